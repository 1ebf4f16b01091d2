"""What `defs.yaml` may say of a pipeline that learns from text: `text:` stands in place of `label:` and `features:`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.declaration_base import Name, Share, Spec

END_TOKEN = 256
"""Ids below are bytes; this one ends a document; merges follow."""

MOST_TOKENS = 65_536
"""Ids are stored as uint16."""


class TextFiles(Spec):
    """Whole files as rows: `path`, `content`, `sha256` of the delivered bytes, and their number `bytes`."""

    type: Literal["text"] = "text"
    encoding: Literal["utf-8"] = Field(
        default="utf-8", description="A file that is not written so has no content: declare it required to reject it."
    )
    missing: tuple[str, ...] = ()
    zone: None = None
    extra_columns: Literal["report", "refuse"] = "report"


class InterpreterFiles(Spec):
    """Source files of the running interpreter's standard library, read and never imported.

    Installed packages do not belong to it. Folders named in `exclude` are left out wherever they stand.
    """

    interpreter: Literal["stdlib"]
    paths: tuple[str, ...] = Field(default=("**/*.py",), min_length=1, description="Shell patterns below the library.")
    exclude: tuple[str, ...] = Field(default=("test", "tests"), description="Names of folders that are left out.")
    limit: int | None = Field(
        default=None, ge=1, description="At most so many files, spread evenly over the sorted paths; none: all."
    )


class BytesTokenizer(Spec):
    """Every byte of the UTF-8 text is a token."""

    kind: Literal["bytes"]

    @property
    def vocab(self) -> int:
        """Ids: 256 bytes and the end of a document."""
        return END_TOKEN + 1


class BpeTokenizer(Spec):
    """Byte-pair encoding, trained on the training documents of the snapshot."""

    kind: Literal["bpe"]
    vocab: int = Field(
        default=4096, gt=END_TOKEN + 1, le=MOST_TOKENS, description="Ids: 256 bytes, the end of a document, merges."
    )


class TextSplitSpec(Spec):
    """Which documents are learned from: whole documents, drawn by a hash of the group of near duplicates they are in.

    `near_duplicates` is the Jaccard similarity of their runs of five words from which two documents are one group.
    """

    held_out: Share = Field(default=0.05, gt=0, lt=0.5, description="Never seen in training; judges the model.")
    valid: Share = Field(default=0.02, gt=0, lt=0.5, description="Decides which checkpoint is the best.")
    near_duplicates: float = Field(default=0.8, ge=0.5, le=1.0)
    seed: int = Field(default=0, ge=0, description="Another one draws other documents.")


class TextSpec(Spec):
    """Documents to learn a language from, how they become tokens, and which of them are kept apart."""

    source: Name
    document: str = Field(description="Column that names a document; the source's only row_id.")
    content: str = Field(description="Column of its text.")
    tokenizer: Annotated[BytesTokenizer | BpeTokenizer, Field(discriminator="kind")]
    split: TextSplitSpec = TextSplitSpec()
    context: int = Field(default=256, ge=2, le=MOST_TOKENS, description="Tokens that a training sample spans.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.document == self.content:
            raise ValueError(f"document and content are both {self.content!r}; a name and a text are two columns")
        return self
