"""What every engine does, and what they share: the loss, the optimizer's groups, the form of their state.

The state that engines give and take is keyed by parameter name, whatever the layout: weights whole, the optimizer's
moments as slices of each flattened parameter, so that a state saved by one layout can be loaded by another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.batches import Batch
from trainer.spec import OptimizerSpec

ParameterGroups: TypeAlias = Sequence[Mapping[str, Any]]
"""How the parameters are split for the optimizer: torch's list of groups, each with `params`."""

State: TypeAlias = dict[str, Any]
"""Nested dicts, lists, scalars and tensors; see `trainer.tree`."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIONS = ("initial_lr", "weight_decay", "betas", "eps")


class StepResult(NamedTuple):
    """Mean loss over the real rows of the global batch, and the gradient's norm before clipping; same on all ranks."""

    loss: float
    grad_norm: float


class Engine(Protocol):
    """A model with its optimizer, spread over the ranks."""

    module: nn.Module
    """The model itself, whole on every rank; for evaluation."""

    def step(self, micro_batches: Sequence[Batch], real_rows: int, lr_factor: float) -> StepResult:
        """Learn from this rank's part of one global batch that has `real_rows` real rows over all ranks.

        Every group's rate is its own base rate times `lr_factor`.
        """
        ...

    def state(self) -> State:
        """This rank's part of the state, by parameter name: `model`, `optimizer`, `groups`, `frozen`."""
        ...

    def load(self, states: Sequence[State]) -> None:
        """Take over the state whose parts, in rank order, are `states`.

        Raises:
            ParameterMismatch: it is of other parameters, groups or rates.
        """
        ...


class ParameterMismatch(RuntimeError):
    """A saved state and the model at hand disagree about a parameter; the message names it."""


class BadModel(RuntimeError):
    """The model cannot be trained as it is: no trainable parameter, one in two groups, logits of another shape."""


def batch_loss(model: nn.Module, batch: Batch, real_rows: int) -> Tensor:
    """This micro-batch's part of the mean binary cross-entropy over the `real_rows` of the global batch.

    Raises:
        BadModel: the model does not give one logit per row.
    """
    logits = model(batch.numeric, batch.categorical)
    if logits.shape != batch.target.shape:
        raise BadModel(f"the model gave logits {tuple(logits.shape)}, expected {tuple(batch.target.shape)}")
    total = F.binary_cross_entropy_with_logits(logits, batch.target, weight=batch.weight, reduction="sum")
    return total / real_rows


def optimizer_groups(model: nn.Module, declared: ParameterGroups, spec: OptimizerSpec) -> list[dict[str, Any]]:
    """The groups for AdamW, as `declared`, without frozen parameters and groups that have no other.

    A group's own `lr` and `weight_decay` win over the spec's.

    Raises:
        BadModel: no parameter is trainable, or one stands in two groups or in none.
    """
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise BadModel("the model has no trainable parameter")
    defaults = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    kept = [{**defaults, **group, "params": [p for p in group["params"] if p.requires_grad]} for group in declared]
    placed = [id(p) for group in kept for p in group["params"]]
    for key, name in trainable.items():
        if placed.count(key) != 1:
            raise BadModel(f"parameter {name!r} stands in {placed.count(key)} optimizer groups, expected 1")
    return [group for group in kept if group["params"]]


def make_optimizer(groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over `groups`; each group's `initial_lr` keeps the rate that the schedule scales."""
    optimizer = torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's rate to its base rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def describe_groups(model: nn.Module, members: ParameterGroups, options: ParameterGroups) -> State:
    """Who is in which group, by name (from `members`), with what options (`options`, same order), and who is frozen."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "groups": [
            {"parameters": [names[id(p)] for p in group["params"]], **{key: own[key] for key in _OPTIONS}}
            for group, own in zip(members, options, strict=True)
        ],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }


def check_same_groups(saved: State, now: State) -> None:
    """Refuse a saved state whose parameters, groups or rates are not those of the model at hand.

    Raises:
        ParameterMismatch: names the parameter, or the group and the option.
    """
    before, after = _homes(saved), _homes(now)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            raise ParameterMismatch(
                f"parameter {name!r}: {before.get(name, 'absent')} in the checkpoint, {after.get(name, 'absent')} now"
            )
    for index, (old, new) in enumerate(zip(saved["groups"], now["groups"], strict=True)):
        for key in _OPTIONS:
            if old[key] != new[key]:
                raise ParameterMismatch(
                    f"optimizer group {index} ({old['parameters'][0]!r}, ...): {key} {old[key]} in the checkpoint, "
                    f"{new[key]} now"
                )


def _homes(described: State) -> dict[str, str]:
    homes = {name: f"in group {i}" for i, group in enumerate(described["groups"]) for name in group["parameters"]}
    return homes | dict.fromkeys(described["frozen"], "frozen")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into `model`, in place.

    Raises:
        ParameterMismatch: names the first tensor that is missing, unknown, or of another shape or type.
    """
    own = model.state_dict()
    for name in sorted({*own, *weights}):
        old, new = weights.get(name), own.get(name)
        if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
            raise ParameterMismatch(f"tensor {name!r}: {_shape(old)} in the checkpoint, {_shape(new)} in the model")
    model.load_state_dict(dict(weights))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def moment_slice(adam: Mapping[str, Tensor], taken: slice, start: int) -> State:
    """The part `taken` of AdamW's flattened moments, as a slice that begins at element `start` of its parameter."""
    return {"start": start, "step": adam["step"], **{key: adam[key].view(-1)[taken] for key in _MOMENTS}}


def whole_moments(states: Sequence[State], name: str, size: int) -> dict[str, Tensor] | None:
    """Put the slices of parameter `name` (`size` elements) together: `step` and flat moments; None before any step.

    Raises:
        ParameterMismatch: the slices do not make up the parameter.
    """
    parts = [state["optimizer"][name] for state in states if name in state["optimizer"]]
    if not parts:
        return None
    parts.sort(key=lambda part: part["start"])
    ends = [part["start"] + part["exp_avg"].numel() for part in parts]
    if [part["start"] for part in parts] != [0, *ends[:-1]] or ends[-1] != size:
        raise ParameterMismatch(f"parameter {name!r}: its optimizer slices end at {ends}, expected {size} elements")
    return {"step": parts[0]["step"], **{key: torch.cat([part[key] for part in parts]) for key in _MOMENTS}}
