"""What every engine does, and what they share: the optimizer's groups, the form of their state.

The state that engines give and take is keyed by parameter name, whatever the layout, and comes in pieces with their
places (`trainer.pieces`), so that a state saved by one layout can be loaded by another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from trainer.batches import Batch
from trainer.mesh import Mesh
from trainer.pieces import FORMAT, ParameterMismatch, Pieces
from trainer.spec import OptimizerSpec
from trainer.timing import StepClock

ParameterGroups: TypeAlias = Sequence[Mapping[str, Any]]
"""How the parameters are split for the optimizer: torch's list of groups, each with `params`."""

State: TypeAlias = dict[str, Any]
"""Nested dicts, lists, scalars and tensors; see `trainer.tree`."""

_OPTIONS = ("initial_lr", "weight_decay", "betas", "eps")


class StepResult(NamedTuple):
    """What came of a step, the same on all ranks.

    `loss` is the mean over the real items of the global batch, `grad_norm` the gradient's norm before clipping. `scale`
    is what the loss was multiplied with for the backward pass, 1 but with fp16; `skipped`: the gradient was not finite
    under that scale, so nothing was learned and the next scale is lower.
    """

    loss: float
    grad_norm: float
    scale: float = 1.0
    skipped: bool = False


class Evaluated(NamedTuple):
    """What the model makes of a batch of this data rank: the sum of the losses of its `items` real items.

    `logits` are the module's output, whole; None on ranks that have not all of it.
    """

    loss_sum: float
    items: int
    logits: Tensor | None


class Engine(Protocol):
    """A model with its optimizer, spread over the ranks."""

    mesh: Mesh
    """Where this rank stands."""

    before_update: Callable[[], None]
    """Called in each step before the update, the first thing that changes what AdamW works on; a save may still be
    copying that until then."""

    clock: StepClock
    """Told what a step's time goes into: the passes, the update, the wait for a save."""

    def step(self, micro_batches: Sequence[Batch], real_items: int, lr_factor: float) -> StepResult:
        """Learn from this rank's part of one global batch that has `real_items` real items over all ranks.

        `micro_batches` are those of the rank's part of the data (`mesh.data_index`), all of one size. Every group's
        rate is its own base rate times `lr_factor`.
        """
        ...

    def evaluate(self, batch: Batch) -> Evaluated:
        """Judge a batch without learning from it; all ranks call it together, with batches of one size."""
        ...

    def state(self) -> State:
        """This rank's part of the state: `format`, `pieces` by tensor name, `groups`, `frozen`, `scaler`."""
        ...

    def load(self, states: Sequence[State]) -> None:
        """Take over the state whose parts, in rank order, are `states`, whatever layout saved them.

        Raises:
            ParameterMismatch: it is of other parameters, groups or rates.
            PiecesMissing: parts of it are not there.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """What this rank really holds.

        `parameter_bytes`, `gradient_bytes` (of the last step), `optimizer_bytes`, `layers` (names of the blocks),
        `heads` (query heads that it computes per block), `experts` (per block), `collectives` (calls by kind, see
        `trainer.counting`).
        """
        ...


def nothing_to_wait_for() -> None:
    """What `before_update` is while nobody sets it."""


class BadModel(RuntimeError):
    """The model cannot be trained as it is: no trainable parameter, one in two groups, no plan for its layout."""


def step_loss(output: Tensor, batch: Batch, real_items: int) -> Tensor:
    """This micro-batch's part of the mean loss over the `real_items` of the global batch.

    Raises:
        BadOutput: the output does not fit the batch.
    """
    return batch.loss_sum(output) / real_items


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


def compose_state(pieces: Pieces, described: State, scaler: State | None = None) -> State:
    """A rank's part of the state; `described` is what `describe_groups` said."""
    return {"format": FORMAT, "pieces": pieces, **described, "scaler": scaler}


Signature: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each of a model's tensors (parameters, and buffers that are saved), whole, by name."""


def signature(model: nn.Module) -> Signature:
    """The signature of a whole model."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}


def check_same_tensors(pieces: Pieces, model: Signature) -> None:
    """Refuse a saved state of other tensors than the model's.

    Raises:
        ParameterMismatch: names the first tensor that is missing, unknown, or of another shape or type.
    """
    saved: Mapping[str, Any] = {name: (_saved_type(parts), tuple(parts[0]["shape"])) for name, parts in pieces.items()}
    for name in sorted({*saved, *model}):
        old, new = saved.get(name), model.get(name)
        if old != new:
            raise ParameterMismatch(f"tensor {name!r}: {_shape(old)} in the checkpoint, {_shape(new)} in the model")


def _saved_type(parts: Sequence[Mapping[str, Any]]) -> torch.dtype | None:
    return next((part["weight"].dtype for part in parts if "weight" in part), None)


def _shape(tensor: tuple[torch.dtype | None, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {tensor[1]}"
