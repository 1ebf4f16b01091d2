"""How parameters are split for the optimizer, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer.engines.base import (
    BadModel,
    ParameterMismatch,
    check_same_groups,
    load_weights,
    optimizer_groups,
    whole_moments,
)
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


def test_weights_of_another_shape_are_refused_by_name() -> None:
    m = model()
    other = {**m.state_dict(), "1.weight": torch.zeros(1, 4)}
    with pytest.raises(ParameterMismatch, match=r"tensor '1.weight': torch.float32 \(1, 4\) in the checkpoint"):
        load_weights(m, other)
    with pytest.raises(ParameterMismatch, match=r"tensor '0.bias': absent in the checkpoint"):
        load_weights(m, {k: v for k, v in m.state_dict().items() if k != "0.bias"})


def piece(start: int, values: list[float]) -> dict[str, Any]:
    flat = torch.tensor(values)
    return {"optimizer": {"w": {"start": start, "step": torch.tensor(3.0), "exp_avg": flat, "exp_avg_sq": flat * 2}}}


def test_moments_are_put_together_from_slices_in_any_order() -> None:
    whole = whole_moments([piece(2, [3.0]), piece(0, [1.0, 2.0])], "w", 3)
    assert whole is not None
    assert whole["exp_avg"].tolist() == [1.0, 2.0, 3.0]
    assert whole["exp_avg_sq"].tolist() == [2.0, 4.0, 6.0]
    assert whole_moments([], "w", 3) is None
    with pytest.raises(ParameterMismatch, match="parameter 'w'"):
        whole_moments([piece(2, [3.0]), piece(0, [1.0])], "w", 3)
