"""A language model out of its artifact: tokenizer and module, and the text that it would write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from trainer.lm_nats import continue_tokens
from trainer.predictor import CODE_ROOT, ArtifactRefused, load_language
from trainer.tokenizer import Tokenizer, TokenizerRefused


@dataclass(frozen=True)
class LanguageModel:
    """A loaded model: `module` gives logits [batch, positions, vocab] of at most `context` tokens."""

    module: nn.Module
    tokenizer: Tokenizer
    context: int

    @property
    def end_token(self) -> int:
        """The token that ends a document, and stands before the first."""
        return self.tokenizer.end_token

    def write_on(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        """Text of at most `tokens` tokens that the model draws behind `prompt`, as a document that begins with it."""
        drawn = continue_tokens(
            self.module,
            (self.end_token, *self.tokenizer.encode(prompt.encode())),
            tokens,
            context=self.context,
            end_token=self.end_token,
            temperature=temperature,
            seed=seed,
        )
        # Any bytes may be drawn; what is no UTF-8 is shown as such.
        return self.tokenizer.decode(drawn).decode("utf-8", "backslashreplace")


def load_language_model(folder: Path, code_root: Path = CODE_ROOT) -> LanguageModel:
    """Verify an artifact and load its language model with its tokenizer.

    Raises:
        ArtifactRefused, CodeRefused: as `trainer.predictor.load_language`; a tokenizer that is none, or has another
            vocabulary than the model.
    """
    loaded = load_language(folder, code_root)
    try:
        tokenizer = Tokenizer.parse(loaded.tokenizer)
    except TokenizerRefused as error:
        raise ArtifactRefused(f"tokenizer.json: {error}") from error
    inputs = loaded.inputs
    if (tokenizer.vocab, tokenizer.end_token) != (inputs.vocab, inputs.end_token):
        raise ArtifactRefused(
            f"tokenizer.json: {tokenizer.vocab} tokens with end {tokenizer.end_token}, the model has {inputs.vocab} "
            f"with {inputs.end_token}"
        )
    return LanguageModel(loaded.module, tokenizer, inputs.context)
