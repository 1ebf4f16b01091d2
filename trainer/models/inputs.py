"""What a factory is told about the inputs of its module: how rows are encoded, or which tokens there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from trainer.blobs import Json
from trainer.encoders import InputEncoding


@dataclass(frozen=True)
class TokenInputs:
    """What goes into a language model: `vocab` tokens, `context` of them at most, of which `end_token` ends a document.

    `tokenizer` is the digest of the tokenizer's file.
    """

    vocab: int
    context: int
    end_token: int
    tokenizer: str

    def to_json(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "vocab": self.vocab,
            "context": self.context,
            "end_token": self.end_token,
            "tokenizer": self.tokenizer,
        }


Inputs: TypeAlias = InputEncoding | TokenInputs
