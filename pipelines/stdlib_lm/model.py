"""The language model: a small decoder over the tokens of one pipeline, with the rates and groups that it likes."""

from typing import Any

from torch import nn

from trainer.models.decoder import Decoder, DecoderOptions, decoder_plan
from trainer.parallel.plan import ParallelPlan
from trainer.spec import OptimizerSpec

_BETAS = (0.9, 0.95)


def build(inputs: object, options: dict[str, Any]) -> nn.Module:
    """The decoder of `options`, whose fields are those of `trainer.models.decoder.DecoderOptions`.

    Raises:
        ValueError: an option is unknown, missing or out of its limits.
    """
    return Decoder(DecoderOptions.parse(options))


def parameter_groups(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """Matrices decay; norms and the embedding, whose rows are mostly unseen in a step, do not.

    The second moment is averaged over 20 steps (beta 0.95): a run of some hundred steps is too short for 1,000.
    """
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.ndim > 1 and not name.startswith("embed.")]
    kept = [p for name, p in named if p.ndim == 1 or name.startswith("embed.")]
    return [
        {"params": decayed, "weight_decay": optimizer.weight_decay, "betas": _BETAS},
        {"params": kept, "weight_decay": 0.0, "betas": _BETAS},
    ]


def parallel_plan(options: dict[str, Any]) -> ParallelPlan:
    """How the decoder may be divided over ranks."""
    return decoder_plan(DecoderOptions.parse(options))
