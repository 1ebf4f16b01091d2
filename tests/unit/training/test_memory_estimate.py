"""The estimate of a rank's memory against what a decoder's step really keeps."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from headway.training.memory import MemoryEstimate, SizesUnknown, estimate_memory, parameter_count
from trainer.models.decoder import Decoder, DecoderOptions
from trainer.spec import BatchSpec, LayoutSpec, ModelFacts, Precision, model_facts, parse_layout

OPTIONS: dict[str, Any] = {
    "vocab": 256,
    "sequence": 64,
    "dim": 64,
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "hidden": 128,
}
MIXTURE = {**OPTIONS, "experts": 4, "top_k": 2}
SHAPES = [OPTIONS, {**OPTIONS, "kv_heads": 8, "tied": True}, {**OPTIONS, "layers": 6, "vocab": 64}, MIXTURE]
ROWS = 5
BATCH = BatchSpec(ROWS, 1)


def _decoder(options: Mapping[str, Any]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderOptions.parse(options))


def _kept(model: Decoder, autocast: bool = False) -> int:
    """Bytes that autograd keeps for the backward pass of a step and the logits; without weights and casts of them."""
    own = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    shapes = {p.shape for p in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2} | {s[1:] for s in shapes if len(s) == 3}
    shapes |= {s[:0:-1] for s in shapes if len(s) == 3}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = autocast and tensor.dtype == torch.bfloat16 and tensor.shape in shapes
        if tensor.untyped_storage().data_ptr() not in own and not is_cast:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = torch.randint(OPTIONS["vocab"] // 4, (ROWS, OPTIONS["sequence"] + 1))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        logits = model(rows[:, :-1])
        F.cross_entropy(logits.flatten(0, -2).float(), rows[:, 1:].flatten(), reduction="sum")
    kept[logits.untyped_storage().data_ptr()] = logits
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _estimate(
    options: Mapping[str, Any],
    text: str = "dp=1",
    engine: str = "ddp",
    precision: Precision = "fp32",
    batch: BatchSpec = BATCH,
    **changed: Any,  # noqa: ANN401 - fields of LayoutSpec
) -> MemoryEstimate:
    return estimate_memory(model_facts(options), replace(parse_layout(engine, text), **changed), precision, batch)


@pytest.mark.parametrize("options", SHAPES)
def test_a_process_alone_keeps_what_was_estimated(options: Mapping[str, Any]) -> None:
    model = _decoder(options)
    assert parameter_count(model_facts(options)) == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    estimate = _estimate(options)
    assert estimate.parameters == sum(p.nbytes for p in model.parameters())
    assert estimate.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert estimate.optimizer == sum(t.nbytes for t in moments)
    assert estimate.activations == pytest.approx(_kept(model), rel=0.02)
    assert estimate.total == sum(
        (estimate.parameters, estimate.gradients, estimate.optimizer, estimate.activations, estimate.transient)
    )


@pytest.mark.parametrize("options", SHAPES)
def test_activations_under_autocast_are_as_estimated(options: Mapping[str, Any]) -> None:
    estimate = _estimate(options, precision="bf16")
    assert estimate.activations == pytest.approx(_kept(_decoder(options), autocast=True), rel=0.02)


@pytest.mark.parametrize("options", SHAPES)
def test_activations_of_a_model_in_bf16_are_as_estimated(options: Mapping[str, Any]) -> None:
    estimate = _estimate(options, engine="fsdp2", precision="bf16")
    assert estimate.activations == pytest.approx(_kept(_decoder(options).bfloat16()), rel=0.02)


def test_checkpointed_blocks_keep_their_inputs_and_one_block_anew() -> None:
    model = _decoder(OPTIONS)
    for block in model.layers.values():
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    whole, one = _estimate(OPTIONS), _estimate({**OPTIONS, "layers": 1})
    ends = 2 * one.activations - _estimate({**OPTIONS, "layers": 2}).activations
    block = one.activations - ends
    estimate = _estimate(OPTIONS, activation_checkpointing=True)
    assert estimate.activations - block == pytest.approx(_kept(model), rel=0.02)
    assert estimate.activations < whole.activations


def test_every_degree_divides_what_it_should() -> None:
    alone, batch = _estimate(MIXTURE, batch=BatchSpec(8, 1)), BatchSpec(8, 1)
    count = parameter_count(model_facts(MIXTURE))
    experts = 4 * 4 * 3 * 64 * 128
    assert _estimate(MIXTURE, "dp=2", batch=batch).parameters == alone.parameters
    assert _estimate(MIXTURE, "dp=2", batch=batch).activations == alone.activations // 2
    assert _estimate(MIXTURE, "shard=2", "fsdp2", batch=batch).optimizer == 8 * count // 2
    assert _estimate(MIXTURE, "ep=4", "ddp", batch=batch).parameters == 4 * (count - experts * 3 // 4)
    assert _estimate(MIXTURE, "ep=4", "fsdp2", batch=batch).parameters == 4 * (count // 4)
    assert _estimate(MIXTURE, "sp=2", batch=batch).activations == alone.activations // 2
    assert _estimate(OPTIONS, "tp=2", batch=batch).parameters < _estimate(OPTIONS).parameters * 0.51
    assert _estimate(OPTIONS, "pp=2", batch=batch).parameters < _estimate(OPTIONS).parameters * 0.51


@pytest.mark.parametrize(
    ("zero", "precision", "parameters", "gradients", "optimizer"),
    [
        (0, "fp32", 4, 4, 8),
        (1, "fp32", 4, 4, 6),
        (2, "fp32", 4, 2, 6),
        (3, "fp32", 2, 2, 6),
        (1, "bf16", 2, 2, 6),
        (2, "bf16", 2, 1, 6),
        (3, "bf16", 1, 1, 6),
    ],
)
def test_stages_divide_as_in_the_paper(
    zero: int, precision: Precision, parameters: int, gradients: int, optimizer: int
) -> None:
    count = parameter_count(model_facts(OPTIONS))
    estimate = _estimate(OPTIONS, f"dp=2,zero={zero}", "deepspeed", precision)
    assert (estimate.parameters, estimate.gradients, estimate.optimizer) == (
        parameters * count,
        gradients * count,
        optimizer * count,
    )


def test_stages_divide_over_sequence_ranks_too() -> None:
    alone, divided = (_estimate(OPTIONS, f"{text}zero=3", "deepspeed") for text in ("", "sp=2,"))
    assert divided.parameters * 2 == alone.parameters
    assert divided.optimizer * 2 == alone.optimizer


def test_schedules_hold_different_numbers_of_micro_batches() -> None:
    batch = BatchSpec(32, 8)
    held = {
        schedule: _estimate(OPTIONS, "pp=2", batch=batch, schedule=schedule).activations
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
    }
    assert held["1f1b"] == held["zbv"] < held["interleaved"] == held["zero_bubble"] < held["gpipe"]


def test_what_is_offloaded_is_said() -> None:
    assert _estimate(OPTIONS, "dp=2,zero=2", "deepspeed", offload="optimizer").host == ("optimizer",)
    assert "parameters" in _estimate(OPTIONS, "shard=2", "fsdp2", offload="parameters").host


def test_a_model_without_sizes_has_no_estimate() -> None:
    with pytest.raises(SizesUnknown, match="state no layers, heads"):
        estimate_memory(ModelFacts(), LayoutSpec(), "fp32", BATCH)
