"""How parameters are split for the optimizer, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.engines.base import (
    BadModel,
    ParameterMismatch,
    check_same_groups,
    check_same_tensors,
    optimizer_groups,
    signature,
)
from trainer.pieces import PiecesMissing, box_piece, collect, flat_piece, read, step_of, whole_box, whole_weights
from trainer.spec import OptimizerSpec

SPEC = OptimizerSpec(lr=0.5, weight_decay=0.25)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_a_groups_own_rate_and_decay_win() -> None:
    m = model()
    m[0].requires_grad_(False)
    declared = [{"params": [m[0].weight, m[1].weight], "lr": 0.1}, {"params": [m[1].bias], "weight_decay": 0.0}]
    groups = optimizer_groups(m, [*declared, {"params": [m[0].bias]}], SPEC)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [(0.1, 0.25, 1), (0.5, 0.0, 1)]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda m: [{"params": [m[0].weight, m[0].bias, m[1].weight]}], "parameter '1.bias' stands in 0 optimizer"),
        (lambda m: [{"params": list(m.parameters())}, {"params": [m[0].bias]}], "parameter '0.bias' stands in 2"),
    ],
)
def test_every_parameter_stands_in_one_group(declare: Callable[[Any], Any], message: str) -> None:
    m = model()
    with pytest.raises(BadModel) as caught:
        optimizer_groups(m, declare(m), SPEC)
    assert message in str(caught.value)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    m = model().requires_grad_(False)
    with pytest.raises(BadModel, match="no trainable parameter"):
        optimizer_groups(m, [{"params": list(m.parameters())}], SPEC)


OPTIONS = {"initial_lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": ["a"]}, "parameter 'b': in group 0 in the checkpoint, absent now"),
        ({"parameters": ["a", "b", "c"]}, "parameter 'c': absent in the checkpoint, in group 0 now"),
        ({"initial_lr": 0.2}, "optimizer group 0 ('a', ...): initial_lr 0.1 in the checkpoint, 0.2 now"),
        ({"weight_decay": 0.1}, "optimizer group 0 ('a', ...): weight_decay 0.0 in the checkpoint, 0.1 now"),
    ],
)
def test_d05_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    saved = {"groups": [{"parameters": ["a", "b"], **OPTIONS}], "frozen": []}
    check_same_groups(saved, saved)
    with pytest.raises(ParameterMismatch) as caught:
        check_same_groups(saved, {"groups": [{**saved["groups"][0], **change}], "frozen": []})
    assert message in str(caught.value)


def whole(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: [box_piece(w.shape, whole_box(w.shape), weight=w)] for name, w in weights.items()}


def test_weights_of_another_shape_are_refused_by_name() -> None:
    m = model()
    other = {**m.state_dict(), "1.weight": torch.zeros(1, 4)}
    check_same_tensors(whole(m.state_dict()), signature(m))
    with pytest.raises(ParameterMismatch, match=r"tensor '1.weight': torch.float32 \(1, 4\) in the checkpoint"):
        check_same_tensors(whole(other), signature(m))
    with pytest.raises(ParameterMismatch, match=r"tensor '0.bias': absent in the checkpoint"):
        check_same_tensors(whole({k: v for k, v in m.state_dict().items() if k != "0.bias"}), signature(m))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_is_read_from_any_pieces(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, rows))
        boxes = [[[0, cut], [0, columns]], [[cut, rows], [0, columns]]]
        pieces = [box_piece(tensor.shape, b, exp_avg=tensor[slice(*b[0]), slice(*b[1])], step=3.0) for b in boxes]
    else:
        cut = data.draw(st.integers(0, tensor.numel()))
        ranges = [(0, cut), (cut, tensor.numel())]
        pieces = [flat_piece(tensor.shape, a, b, exp_avg=tensor.flatten()[a:b], step=3.0) for a, b in ranges]
    box = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in tensor.shape]
    for order in (pieces, pieces[::-1]):
        part = read(order, "w", "exp_avg", box)
        assert part is not None
        assert torch.equal(part, tensor[slice(*box[0]), slice(*box[1])])
    assert step_of(pieces) == 3.0
    assert read(pieces, "w", "weight", box) is None


def test_pieces_that_lack_a_part_are_refused() -> None:
    pieces = [flat_piece((2, 2), 0, 3, exp_avg=torch.zeros(3))]
    with pytest.raises(PiecesMissing, match="parameter 'w': its pieces hold 3 elements of exp_avg, of 4"):
        read(pieces, "w", "exp_avg", [[0, 2], [0, 2]])
    with pytest.raises(PiecesMissing, match="parameter 'w': no piece holds its weights"):
        whole_weights([{"pieces": {"w": pieces}}])


def test_states_of_the_first_format_are_read() -> None:
    """Written out as they were saved: whole weights by rank 0, moments as a flat range of each rank."""
    weight, flat = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(4.0)

    def state(rank: int) -> dict[str, Any]:
        part = flat[2 * rank : 2 * rank + 2]
        moments = {"start": 2 * rank, "step": torch.tensor(5.0), "exp_avg": part, "exp_avg_sq": part * 2}
        return {"model": {"w": weight} if rank == 0 else {}, "optimizer": {"w": moments}}

    states = [state(0), state(1)]
    assert torch.equal(whole_weights(states)["w"], weight)
    parts = collect(states)["w"]
    second = read(parts, "w", "exp_avg_sq", [[0, 2], [1, 2]])
    assert second is not None
    assert (second.tolist(), step_of(parts)) == ([[2.0], [6.0]], 5.0)
