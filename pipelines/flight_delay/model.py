"""The network of `flight_delay`: embeddings of carrier, origin and destination, waves of numbers, a residual MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer.encoders import InputEncoding
from trainer.models.tabular import TabularNet, Waves
from trainer.spec import OptimizerSpec

_DEFAULTS: dict[str, Any] = {"width": 64, "blocks": 2, "dropout": 0.1, "waves": 8, "wave_spread": 1.0}


def build(inputs: InputEncoding, options: Mapping[str, Any]) -> nn.Module:
    """The untrained network. Options are those of `TabularNet`; the defaults are the ones that `defs.yaml` chose."""
    unknown = sorted(set(options) - set(_DEFAULTS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; options are {sorted(_DEFAULTS)}")
    chosen = {**_DEFAULTS, **options}
    return TabularNet(inputs.category_sizes, inputs.numeric_width, len(inputs.numeric), **chosen)


def parameter_groups(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """Weight decay for matrices. None for biases and norms, nor for embeddings and waves, whose zero is no default."""
    kept = {id(p) for m in model.modules() if isinstance(m, nn.Embedding | Waves) for p in m.parameters()}
    decay = [p for p in model.parameters() if p.ndim > 1 and id(p) not in kept]
    rest = [p for p in model.parameters() if p.ndim <= 1 or id(p) in kept]
    return [
        {"params": decay, "weight_decay": optimizer.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
