"""What the engines over torch's own parts share: a model divided as its plan says, and the step over a mesh.

The order of a step: forward and backward passes of the micro-batches, gradients summed over the ranks that have tokens
of their own, one norm over everything, clipping, AdamW on the part that this rank holds.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer.batches import Batch
from trainer.counting import counted
from trainer.engines.base import (
    BadModel,
    Evaluated,
    ParameterGroups,
    State,
    StepResult,
    check_same_groups,
    check_same_tensors,
    compose_state,
    make_optimizer,
    nothing_to_wait_for,
    optimizer_groups,
    set_rates,
    signature,
    step_loss,
)
from trainer.engines.places import saved_box
from trainer.engines.scaler import LossScaler
from trainer.mesh import DIMENSIONS, REPLICAS, Mesh
from trainer.parallel.plan import ParallelPlan
from trainer.pieces import MOMENTS, Piece, Pieces, box_piece, collect, read, step_of
from trainer.process_group import Group, peers
from trainer.spec import STAGES_PER_RANK, LayoutSpec, RunSpec
from trainer.timing import Part, StepClock, mark_end_of_backward

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIONS = ("initial_lr", "weight_decay", "betas", "eps")


class _Held(NamedTuple):
    """A parameter on this rank: as the module has it, and the plain part of it that the optimizer works on."""

    parameter: nn.Parameter
    own: nn.Parameter


class SpreadEngine(ABC):
    """See `trainer.engines.base.Engine`.

    Args:
        spec: The run.
        model: The whole model, the same on every rank; it is taken apart.
        declared: Its optimizer groups.
        group: The ranks.
        plan: How the model may be divided; None when only rows are.

    Raises:
        BadModel: the layout needs a plan and there is none, or the engine cannot do the layout.
        PlanMismatch: the plan does not fit.
    """

    def __init__(
        self,
        spec: RunSpec,
        model: nn.Module,
        declared: ParameterGroups,
        group: Group,
        plan: ParallelPlan | None = None,
    ) -> None:
        self.mesh = Mesh(spec.layout, group)
        self.before_update = nothing_to_wait_for
        self.clock = StepClock()
        self._group = group
        self._layout = spec.layout
        self._precision = spec.precision
        self._clip_norm = spec.optimizer.clip_norm
        self._plan = plan
        self._check_plan()
        groups = optimizer_groups(model, declared, spec.optimizer)
        names = {id(p): name for name, p in model.named_parameters()}
        members = [[names[id(p)] for p in g["params"]] for g in groups]
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        self._signature = signature(model)
        self._scaler = LossScaler() if spec.precision == "fp16" else None
        model.train()
        with peers():
            self.stages = _divide(model, plan, self.mesh)
            self._called = {index: self._spread(stage) for index, stage in self.stages.items()}
        self._held = {name: _hold(p) for name, p in self._named_parameters()}
        for chosen, names_of in zip(groups, members, strict=True):
            chosen["params"] = [self._held[name].own for name in names_of if name in self._held]
        self._optimizer = make_optimizer(groups, spec.optimizer)
        self._described = _describe(members, self._optimizer.param_groups, frozen)
        self._trainable = [held.parameter for held in self._held.values() if held.parameter.requires_grad]
        self._pipeline = None
        if self._layout.pp > 1:
            from trainer.engines.pipeline import Pipeline

            with peers():
                self._pipeline = Pipeline(
                    self._called, self.mesh, spec.batch.accumulation, self._autocast, self._in_part
                )

    @property
    def module(self) -> nn.Module:
        """The model, or what this rank holds of it (of a pipeline, its first stage here)."""
        return next(iter(self.stages.values()))

    @abstractmethod
    def _spread(self, stage: nn.Module) -> nn.Module:
        """Wrap `stage` for the data ranks; what is returned is called in its place."""

    @abstractmethod
    def _reduce(self) -> None:
        """Sum gradients over the ranks, as far as the backward passes have not."""

    @abstractmethod
    def _syncing(self, last: bool) -> AbstractContextManager[Any]:
        """Around the passes of a micro-batch: gradients are summed over the ranks with the last one."""

    @abstractmethod
    def _autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""

    def step(self, micro_batches: Sequence[Batch], real_items: int, lr_factor: float) -> StepResult:
        """See `Engine`."""
        set_rates(self._optimizer, lr_factor)
        for p in self._trainable:
            p.grad = None
        scale = 1.0 if self._scaler is None else self._scaler.scale
        batches = [self._own_part(batch) for batch in micro_batches]
        with peers():
            own_loss = self._passes(batches, real_items, scale)
            with self.clock.part("backward"):
                self._place_gradients()
                self._reduce()
            with self.clock.part("optimizer"):
                norm = self._norm_and_clip(scale)
        skipped = self._scaler is not None and self._scaler.skips(norm)
        with self.clock.part("checkpoint"):
            self.before_update()
        with self.clock.part("optimizer"):
            if not skipped:
                self._update()
            self._balance()
        # Tensor ranks all have the same loss.
        own_loss = own_loss if self.mesh.coordinate("tp") == 0 else 0.0
        return StepResult(self._group.sum(own_loss), norm, scale, skipped)

    def evaluate(self, batch: Batch) -> Evaluated:
        """See `Engine`."""
        for stage in self.stages.values():
            stage.eval()
        part = self._own_part(batch)
        with torch.no_grad(), peers():
            output = self._output(part)
            loss = 0.0 if output is None else part.loss_sum(output).item()
            loss = self._sum_over(loss, "pp", "sp")
        for stage in self.stages.values():
            stage.train()
            if hasattr(stage, "reshard"):
                # Gathered weights would outlive a load.
                cast("Any", stage).reshard()
        whole = type(output) is Tensor and self._layout.sp == 1
        return Evaluated(loss, batch.items, output if whole else None)

    def state(self) -> State:
        """See `Engine`."""
        pieces: Pieces = {}
        for name, p in self._named_parameters(remove_duplicate=False):
            piece = self._piece(name, p)
            if piece is not None:
                pieces[name] = [piece]
        if all(self.mesh.coordinate(name) == 0 for name in DIMENSIONS if name != "pp"):
            for name, buffer in self._named_buffers():
                pieces[name] = [box_piece(buffer.shape, [[0, n] for n in buffer.shape], weight=buffer)]
        scaler = None if self._scaler is None else self._scaler.state()
        return compose_state(pieces, self._described, scaler)

    @torch.no_grad()
    def load(self, states: Sequence[State]) -> None:
        """See `Engine`."""
        check_same_groups(states[0], self._described)
        saved = collect(states)
        check_same_tensors(saved, self._signature)
        for name, held in self._held.items():
            self._load_parameter(name, held, saved[name])
        for name, buffer in self._named_buffers():
            buffer.copy_(cast("Tensor", read(saved[name], name, "weight", [[0, n] for n in buffer.shape])))
        if self._scaler is not None and states[0].get("scaler") is not None:
            self._scaler.load(states[0]["scaler"])

    def facts(self) -> Mapping[str, Any]:
        """See `Engine`."""
        held = [h.own for h in self._held.values()]
        moments = [self._optimizer.state[p][key] for p in held if p in self._optimizer.state for key in MOMENTS]
        return {
            "parameter_bytes": _bytes(held),
            "gradient_bytes": _bytes([plain(p.grad) for p in self._trainable if p.grad is not None]),
            "optimizer_bytes": _bytes(moments),
            **self._blocks(),
            "collectives": counted(),
        }

    def _check_plan(self) -> None:
        layout = self._layout
        needing = [name for name in ("tp", "pp", "sp", "ep") if getattr(layout, name) > 1]
        needing += ["activation_checkpointing"] if layout.activation_checkpointing else []
        if needing and self._plan is None:
            raise BadModel(f"the layout asks for {needing}, and the model's factory declares no parallel_plan")

    def _named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters(remove_duplicate=remove_duplicate)

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self.stages.values():
            kept = stage.state_dict().keys()
            yield from ((name, buffer) for name, buffer in stage.named_buffers() if name in kept)

    def _in_part(self, part: Part) -> AbstractContextManager[None]:
        # The clock may be changed for another after the pipeline was made.
        return self.clock.part(part)

    def _own_part(self, batch: Batch) -> Batch:
        degree = self._layout.sp
        return batch if degree == 1 else batch.sequence_part(self.mesh.coordinate("sp"), degree)

    def _passes(self, batches: Sequence[Batch], real_items: int, scale: float) -> float:
        """Forward and backward passes; this rank's part of the loss."""
        # Gradients are averaged over these ranks; what is wanted is the sum of the ranks' parts of one mean.
        factor = self.mesh.degree(*REPLICAS) * scale
        if self._pipeline is not None:
            return self._pipeline.run(batches, real_items, factor)
        own_loss = 0.0
        model = next(iter(self._called.values()))
        for index, batch in enumerate(batches):
            with self._syncing(index == len(batches) - 1):
                with self.clock.part("forward"):
                    with self._autocast():
                        output = model(*batch.inputs)
                    loss = step_loss(output, batch, real_items)
                with self.clock.part("backward"):
                    mark_end_of_backward(self.clock, loss)
                    (loss * factor).backward()
            own_loss += loss.item()
        return own_loss

    def _output(self, part: Batch) -> Tensor | None:
        if self._pipeline is not None:
            return self._pipeline.output(part)
        # Not through DDP, which would sum gradients that nobody has asked for.
        with self._autocast():
            return self.module(*part.inputs)

    def _norm_and_clip(self, scale: float) -> float:
        """The norm of the gradients before clipping, which are unscaled and clipped."""
        from trainer.parallel.clip import clip_gradients, grad_norm

        norm = grad_norm(self._trainable, stages=self._layout.pp) / scale
        if scale != 1.0 and math.isfinite(norm):
            torch._foreach_div_([plain(p.grad) for p in self._trainable if p.grad is not None], scale)  # pyright: ignore[reportPrivateImportUsage]
        if self._clip_norm:
            clip_gradients(self._trainable, norm, self._clip_norm)
        return norm

    def _place_gradients(self) -> None:
        """Divide gradients as their parameters are: DTensor leaves that of an embedding whole."""
        for p in self._trainable:
            grad, wanted = cast("Any", p.grad), getattr(p, "placements", None)
            if grad is not None and wanted is not None and grad.placements != wanted:
                p.grad = grad.redistribute(placements=wanted)

    def _update(self) -> None:
        for parameter, own in self._held.values():
            if parameter is not own:
                own.grad = None if parameter.grad is None else plain(parameter.grad)
        self._optimizer.step()

    def _balance(self) -> None:
        if self._plan is None or not self._plan.routers:
            return
        from trainer.parallel.expert import balance_experts

        for stage in self.stages.values():
            balance_experts(stage, self._plan, self.mesh.process_group(*REPLICAS))

    def _sum_over(self, value: float, *names: str) -> float:
        group = self.mesh.process_group(*names)
        if group is None:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(total, group=group)
        return total.item()

    def _piece(self, name: str, p: nn.Parameter) -> Piece | None:
        box = saved_box(p, self.mesh)
        if box is None:
            return None
        shape = self._signature[name][1]
        held = self._held.get(name)
        # A second name of a shared parameter has no moments of its own.
        own = plain(p.detach()) if held is None else held.own
        adam = self._optimizer.state.get(own) if held is not None else None
        if not adam:
            return box_piece(shape, box, weight=own.detach())
        moments = {key: adam[key] for key in MOMENTS}
        return box_piece(shape, box, weight=own.detach(), step=float(adam["step"]), **moments)

    def _load_parameter(self, name: str, held: _Held, parts: Sequence[Piece]) -> None:
        box = saved_box(held.parameter, None)
        assert box is not None
        read_part = partial(read, parts, name, box=box)
        held.own.copy_(cast("Tensor", read_part(key="weight")))
        step = step_of(parts)
        if step is not None:
            moments = {key: read_part(key=key) for key in MOMENTS}
            self._optimizer.state[held.own] = {"step": torch.tensor(step), **moments}

    def _blocks(self) -> dict[str, Any]:
        """Blocks, heads and experts that this rank has, from the plan's names."""
        from trainer.parallel.plan import matching

        if self._plan is None:
            return {"layers": [], "heads": 0, "experts": 0}
        plan, heads, experts = self._plan, 0, 0
        layers: list[str] = []
        for stage in self.stages.values():
            layers += list(cast("nn.ModuleDict", stage.get_submodule(plan.blocks)))
            for _, attention in matching(stage, plan.sequence):
                module = cast("Any", attention)
                heads = module.wq.weight.shape[0] // module.width // self.mesh.degree("tp", "sp")
            for _, found in matching(stage, plan.experts):
                experts = plain(next(found.parameters())).shape[0]
        return {"layers": layers, "heads": heads, "experts": experts}

    def _reduce_experts(self, stage: nn.Module) -> None:
        if self._plan is None or self._layout.ep == 1:
            return
        from trainer.parallel.expert import reduce_expert_gradients

        same = self.mesh.process_group("dp", "shard", "sp")
        reduce_expert_gradients(stage, self._plan, self.mesh.degree(*REPLICAS), same)


def _divide(model: nn.Module, plan: ParallelPlan | None, mesh: Mesh) -> dict[int, nn.Module]:
    """The stages of this rank by number, divided further inside as the layout says."""
    layout = mesh.layout
    if plan is None:
        if layout.compile:
            model.compile()
        return {0: model}
    from trainer.parallel.plan import check_plan, cut_stage

    check_plan(model, plan)
    numbers = stages_of(layout, mesh.coordinate("pp"))
    count = layout.pp * STAGES_PER_RANK[layout.schedule] if layout.pp > 1 else 1
    copies = [copy.deepcopy(model) for _ in numbers[1:]]
    stages = dict(zip(numbers, [model, *copies], strict=True))
    for number, stage in stages.items():
        if count > 1:
            cut_stage(stage, plan, number, count)
        _divide_inside(stage, plan, mesh)
    return stages


def stages_of(layout: LayoutSpec, rank: int) -> list[int]:
    """The numbers of the stages that `rank` along pp has."""
    if layout.pp == 1:
        return [0]
    if layout.schedule == "zbv":
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + turn * layout.pp for turn in range(STAGES_PER_RANK[layout.schedule])]


def _divide_inside(stage: nn.Module, plan: ParallelPlan, mesh: Mesh) -> None:
    layout = mesh.layout
    if layout.ep > 1:
        from trainer.parallel.expert import apply_experts

        apply_experts(stage, plan, mesh.submesh("ep"))
    if layout.tp > 1:
        from trainer.parallel.tensor import apply_tensor

        apply_tensor(stage, plan, mesh.submesh("tp"))
    if layout.sp > 1:
        from trainer.parallel.sequence import apply_sequence

        apply_sequence(stage, plan, mesh.submesh("sp").get_group())
    blocks = list(stage.get_submodule(plan.blocks).children())
    for block in blocks:
        if layout.activation_checkpointing:
            _recompute(block)
        if layout.compile:
            block.compile()


def _recompute(block: nn.Module) -> None:
    """Compute the activations of `block` again in its backward pass; the names of its parameters stay."""
    from torch.utils.checkpoint import checkpoint

    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _describe(members: Sequence[Sequence[str]], options: ParameterGroups, frozen: Sequence[str]) -> State:
    groups = [
        {"parameters": list(names), **{key: own[key] for key in _OPTIONS}}
        for names, own in zip(members, options, strict=True)
    ]
    return {"groups": groups, "frozen": list(frozen)}


def _hold(p: nn.Parameter) -> _Held:
    own = plain(p.detach())
    if type(p.data) is Tensor:
        return _Held(p, p)
    return _Held(p, nn.Parameter(own, requires_grad=p.requires_grad))


def plain(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, itself; to be called without gradients."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def autocast(precision: str) -> AbstractContextManager[Any]:
    """Matrix products in the half type of `precision`; nothing with fp32."""
    dtype = HALF.get(precision)
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
