"""The network of `flight_delay`: embeddings of carrier, origin and destination, and a residual MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer.encoders import InputEncoding
from trainer.models.tabular import TabularNet
from trainer.spec import OptimizerSpec


def build(inputs: InputEncoding, options: Mapping[str, Any]) -> nn.Module:
    """The untrained network. Options: `width`, `blocks`, `dropout`."""
    known = {"width": 128, "blocks": 3, "dropout": 0.1}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown options {unknown}; options are {sorted(known)}")
    return TabularNet(inputs.category_sizes, inputs.numeric_width, **{**known, **options})


def parameter_groups(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """Weight decay for matrices; none for biases, norms and embeddings, whose zero means "no evidence"."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    decay = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if p.ndim <= 1 or id(p) in embeddings]
    return [
        {"params": decay, "weight_decay": optimizer.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
