"""Floating-point operations of a model, what the machine can do of them, and the share of that which a run gets.

A product and a sum count as two operations. Counted are matrix products, convolutions and attention (without regard to
its mask), as torch's counter sees them in a forward pass of the whole model; the backward pass takes twice as many
(Kaplan and others, Scaling Laws for Neural Language Models, 2020, section 2.1). Activations that are computed again
are not counted: model FLOPs utilization, Chowdhery and others, PaLM (2022), appendix B.

    MFU = operations of a step / (seconds of a step x ranks x peak of a rank)

The peak is measured: the best of some square matrix products in the precision and with the threads of the run. On a
machine that is busy with other work the peak comes out low, and MFU high.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from trainer.batches import Batch
from trainer.spec import Precision

_BACKWARD = 2
_SIZE = 768
_MEASURE_S = 0.12
_TYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """What one rank can do at most: operations per second, found how."""

    flops_per_s: float
    how: str


def flops_per_item(model: nn.Module, batch: Batch) -> float:
    """Operations of a training step per real item of `batch`, forward and backward; the model stays as it is.

    `model` is whole, not yet divided over ranks.
    """
    training = model.training
    model.eval()
    counter = FlopCounterMode(display=False, custom_mapping={_CPU_ATTENTION: _attention})
    try:
        with torch.no_grad(), counter:
            model(*batch.inputs)
    finally:
        model.train(training)
    return (1 + _BACKWARD) * counter.get_total_flops() / batch.items


def measured_peak(precision: Precision, measure_s: float = _MEASURE_S) -> Peak:
    """The best rate of square matrix products on this rank's threads, over `measure_s` seconds or a little more."""
    kind = _TYPES[precision]
    a, b = (torch.ones(_SIZE, _SIZE, dtype=kind) for _ in range(2))
    out = torch.empty(_SIZE, _SIZE, dtype=kind)
    best, until = float("inf"), time.perf_counter() + measure_s
    while time.perf_counter() < until or best == float("inf"):
        since = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - since)
    threads = torch.get_num_threads()
    how = f"best of {precision} matrix products {_SIZE} x {_SIZE} in {measure_s:g} s, {threads} threads"
    return Peak(2 * _SIZE**3 / best, how)


def mfu(flops_per_step: float, step_s: float, ranks: int, peak: Peak) -> float:
    """Model FLOPs utilization; see the module's text."""
    return flops_per_step / (step_s * ranks * peak.flops_per_s)


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *_: Any,  # noqa: ANN401 - torch's signature
    **__: Any,  # noqa: ANN401
) -> int:
    # torch knows the kernels of GPUs only.
    return sdpa_flop_count(query, key, value)
