"""DeepSpeed: ZeRO stages 0 to 3, offload, its tensor parallelism (AutoTP) and its sequence parallelism.

DeepSpeed on CPU wants to compile a communication op when it starts, and a start that was killed meanwhile blocks all
later ones; the op is switched off. AdamW is torch's own, handed over, so that nothing is built at all. The form of the
flat partitions is read from DeepSpeed's own tables (`trainer.engines.zero_parts`).
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    describe_groups,
    make_optimizer,
    nothing_to_wait_for,
    optimizer_groups,
    set_rates,
    signature,
    step_loss,
)
from trainer.engines.zero_config import make_config
from trainer.engines.zero_parts import Part, boxes_of, partitions_of, parts_of, whole_shape
from trainer.mesh import Mesh
from trainer.parallel.plan import ParallelPlan, check_plan, matching
from trainer.pieces import MOMENTS, Piece, Pieces, box_piece, collect, read, step_of, whole_box
from trainer.process_group import Group, peers
from trainer.spec import RunSpec
from trainer.timing import StepClock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.ops

# `initialize` would import it, with half of torch's compiler behind it: seconds, which look like a slow first step.
import deepspeed.runtime.zero.muon.muon_optimizer  # pyright: ignore[reportUnusedImport]
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups as deepspeed_groups

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# It calls collectives by names that torch is about to give up, some hundred times a step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

REPLICAS = ("dp", "sp")
"""Ranks over which DeepSpeed divides what its stage says, and sums gradients."""

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ZeroEngine:
    """See `trainer.engines.base.Engine`. Every rank saves its own part of the weights and the moments.

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
        self.module = model
        self._group = group
        self._layout = layout = spec.layout
        self._precision = spec.precision
        self._plan = plan
        self._gradient_bytes = 0
        self._check_layout()
        self._signature = signature(model)
        groups = optimizer_groups(model, declared, spec.optimizer)
        # DeepSpeed puts its flat partitions in the place of the parameters.
        self._members = [{"params": list(g["params"])} for g in groups]
        self._optimizer = make_optimizer(groups, spec.optimizer)
        config = make_config(spec, model, plan)
        with peers():
            self._divide_inside()
            engine, zero, *_ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=config,
                dist_init_required=False,
                mesh_param=(layout.dp, layout.sp) if layout.sp > 1 else None,
            )
            if layout.sp > 1:
                self._divide_sequences()
        # Below stage 2 gradients are whole until they are reduced; that is when they are counted.
        engine.enable_backward_allreduce = layout.zero >= 2
        self._engine = engine
        # Its tables of partitions are on no declared type.
        self._zero: Any = zero

    def step(self, micro_batches: Sequence[Batch], real_items: int, lr_factor: float) -> StepResult:
        """See `Engine`."""
        set_rates(self._optimizer, lr_factor)
        own_loss = norm = 0.0
        with peers():
            for index, whole in enumerate(micro_batches):
                batch = self._own_part(whole)
                last = index == len(micro_batches) - 1
                with self.clock.part("forward"):
                    loss = step_loss(self._engine(*self._inputs(batch)), batch, real_items)
                with self.clock.part("backward"):
                    # DeepSpeed averages over these ranks; what is wanted is the sum of the ranks' parts of one mean.
                    self._engine.backward(loss * self.mesh.degree(*REPLICAS), scale_wrt_gas=False)
                    own_loss += loss.item()
                    self._reduce(last)
                with self.clock.part("optimizer"):
                    # DeepSpeed clips by it at stage 0, and keeps it for itself.
                    norm = self._whole_norm() if last and self._layout.zero == 0 else 0.0
                if last:
                    with self.clock.part("checkpoint"):
                        self.before_update()
                with self.clock.part("optimizer"):
                    self._engine.step()
        with self.clock.part("optimizer"):
            self._balance()
        if self._layout.zero:
            # A gradient that is not finite is a step left out by DeepSpeed; it reports the norm as infinite.
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        # Tensor ranks all have the same loss.
        own_loss = own_loss if self.mesh.coordinate("tp") == 0 else 0.0
        return StepResult(self._group.sum(own_loss), norm)

    def evaluate(self, batch: Batch) -> Evaluated:
        """See `Engine`."""
        self.module.eval()
        part = self._own_part(batch)
        with torch.no_grad(), peers():
            logits: Tensor = self.module(*self._inputs(part))
            loss = part.loss_sum(logits).item()
            if self._layout.sp > 1:
                loss = self._sum_over_sequence(loss)
        self.module.train()
        return Evaluated(loss, batch.items, logits if self._layout.sp == 1 else None)

    def state(self) -> State:
        """See `Engine`."""
        pieces: Pieces = {}
        for part in self._parts():
            if self._saves(part.name):
                pieces.setdefault(part.name, []).extend(self._pieces(part))
        if self.mesh.rank == 0:
            for name, buffer in self._saved_buffers():
                pieces[name] = [box_piece(buffer.shape, whole_box(buffer.shape), weight=buffer)]
        return compose_state(pieces, self._described())

    @torch.no_grad()
    def load(self, states: Sequence[State]) -> None:
        """See `Engine`."""
        check_same_groups(states[0], self._described())
        saved = collect(states)
        check_same_tensors(saved, self._signature)
        for part in self._parts():
            self._load_part(part, saved[part.name])
        self._refresh_weights(saved)
        for name, buffer in self._saved_buffers():
            buffer.copy_(cast("Tensor", read(saved[name], name, "weight", whole_box(buffer.shape))))

    def facts(self) -> Mapping[str, Any]:
        """See `Engine`. With an offload all of it is in host memory, and counted all the same."""
        parameters = [getattr(p, "ds_tensor", p) for p in self.module.parameters()]
        partitions = partitions_of(self._zero, self._layout.zero)
        states = [self._optimizer.state[p] for p in partitions if p in self._optimizer.state]
        moments = [state[key] for state in states for key in MOMENTS]
        # Above stage 0 the optimizer works on a copy of the weights, in fp32 whatever they are.
        copies = partitions if self._layout.zero else []
        return {
            "parameter_bytes": _bytes(parameters),
            "gradient_bytes": self._gradient_bytes,
            "optimizer_bytes": _bytes([*moments, *copies]),
            **self._blocks(),
            "collectives": counted(),
        }

    def _reduce(self, last: bool) -> None:
        """Sum gradients over the ranks as far as the backward pass has not, and note how much of them there was."""
        if self._layout.zero < 2:
            self._gradient_bytes = _bytes(self._gradients())
            self._engine.allreduce_gradients()
        elif last:
            self._gradient_bytes = self._divided_gradient_bytes()

    def _check_layout(self) -> None:
        layout = self._layout
        if layout.shard * layout.pp * layout.ep > 1 or layout.compile:
            raise BadModel("engine deepspeed takes dp, tp and sp, and no compile")
        if self._precision == "fp16":
            raise BadModel("engine deepspeed takes fp32 and bf16")
        if (layout.tp > 1 or layout.sp > 1 or layout.activation_checkpointing) and self._plan is None:
            raise BadModel("the layout divides more than rows, and the model's factory declares no parallel_plan")
        if self._plan is not None:
            check_plan(self.module, self._plan)

    def _divide_inside(self) -> None:
        if not self._layout.activation_checkpointing:
            return
        assert self._plan is not None
        for block in self.module.get_submodule(self._plan.blocks).children():
            # The names of its parameters stay.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _divide_sequences(self) -> None:
        assert self._plan is not None
        group = deepspeed_groups._get_sequence_parallel_group()
        for _, attention in matching(self.module, self._plan.sequence):
            changed = cast("Any", attention)
            changed.exchange = _Distributed(group)
            changed.part = self.mesh.coordinate("sp")

    def _own_part(self, batch: Batch) -> Batch:
        degree = self._layout.sp
        return batch if degree == 1 else batch.sequence_part(self.mesh.coordinate("sp"), degree)

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        if self._precision == "fp32":
            return batch.inputs
        # The weights are bf16 themselves.
        return tuple(x.bfloat16() if x.is_floating_point() else x for x in batch.inputs)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def _divided_gradient_bytes(self) -> int:
        """What this rank has kept of the gradients when the backward passes of a step are done."""
        averaged = [g for part in self._zero.averaged_gradients.values() for g in part or ()]
        offloaded = [p.grad for p in partitions_of(self._zero, self._layout.zero) if p.grad is not None]
        return _bytes(averaged or offloaded)

    def _whole_norm(self) -> float:
        divided = [name for name, p in self.module.named_parameters() if p.grad is not None and self._is_divided(name)]
        if divided:
            raise BadModel(f"at stage 0 no gradient norm is taken over tensor ranks, which divide {divided[0]!r}")
        return nn.utils.get_total_norm(self._gradients(), foreach=True).item()

    def _balance(self) -> None:
        if self._plan is None or not self._plan.routers:
            return
        from trainer.parallel.expert import balance_experts

        balance_experts(self.module, self._plan, self.mesh.process_group(*REPLICAS))

    def _sum_over_sequence(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.mesh.process_group("sp"))
        return total.item()

    def _parts(self) -> Iterator[Part]:
        rank = self.mesh.coordinate("dp") * self._layout.sp + self.mesh.coordinate("sp")
        return parts_of(self._zero, self._layout.zero, rank, self.module)

    def _saves(self, name: str) -> bool:
        """Whether this rank saves its part of a parameter: of equal replicas only the first does."""
        frozen = not self.module.get_parameter(name).requires_grad
        cut = self._layout.zero == 3 or (self._layout.zero > 0 and not frozen)
        return (cut or self._is_first(*REPLICAS)) and (self._is_divided(name) or self._is_first("tp"))

    def _is_divided(self, name: str) -> bool:
        """Whether tensor ranks have different parts of a parameter."""
        return self._local_box(name) != whole_box(self._signature[name][1])

    def _is_first(self, *names: str) -> bool:
        return all(self.mesh.coordinate(name) == 0 for name in names)

    def _local_box(self, name: str) -> list[list[int]]:
        """What the tensor ranks' like of this rank has of a parameter."""
        local, at = whole_shape(self.module.get_parameter(name)), self.mesh.coordinate("tp")
        whole = self._signature[name][1]
        return [[0, n] if n == own else [at * own, (at + 1) * own] for n, own in zip(whole, local, strict=True)]

    def _boxes(self, part: Part) -> list[list[list[int]]]:
        """The places of a part's elements in the whole parameter, in order."""
        own = self._local_box(part.name)
        boxes = boxes_of([stop - start for start, stop in own], part.start, part.stop)
        return [[[a + o, b + o] for (a, b), (o, _) in zip(box, own, strict=True)] for box in boxes]

    def _pieces(self, part: Part) -> Iterator[Piece]:
        adam = self._optimizer.state.get(part.partition)
        tensors = {"weight": part.of(part.partition).float()}
        if adam:
            tensors |= {key: part.of(adam[key]) for key in MOMENTS}
        step = {"step": float(adam["step"])} if adam else {}
        start = 0
        for box in self._boxes(part):
            stop = start + math.prod(b - a for a, b in box)
            shaped = {key: t[start:stop].view([b - a for a, b in box]) for key, t in tensors.items()}
            yield box_piece(self._signature[part.name][1], box, **shaped, **step)
            start = stop

    def _saved_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name in self._signature]

    def _load_part(self, part: Part, parts: Sequence[Piece]) -> None:
        boxes = self._boxes(part)

        def fill(target: Tensor, key: str) -> None:
            own = [read(parts, part.name, key, box) for box in boxes]
            part.of(target).copy_(torch.cat([cast("Tensor", t).flatten() for t in own]))

        fill(part.partition, "weight")
        step = step_of(parts)
        if step is None:
            return
        adam = self._optimizer.state[part.partition]
        adam["step"] = torch.tensor(step)
        for key in MOMENTS:
            fill(adam.setdefault(key, torch.zeros_like(part.partition)), key)

    def _refresh_weights(self, saved: Pieces) -> None:
        """Make the weights that are computed with those of the optimizer."""
        if self._layout.zero == 3:
            for index in range(len(self._zero.fp16_groups)):
                self._zero._reassign_or_swap_out_partitioned_parameters(index)
        elif self._layout.zero:
            for name, p in self.module.named_parameters():
                p.copy_(cast("Tensor", read(saved[name], name, "weight", self._local_box(name))))

    def _described(self) -> State:
        return describe_groups(self.module, self._members, self._optimizer.param_groups)

    def _blocks(self) -> dict[str, Any]:
        """Blocks, heads and experts that this rank has, from the plan's names."""
        if self._plan is None:
            return {"layers": [], "heads": 0, "experts": 0}
        heads, experts = 0, 0
        for _, attention in matching(self.module, self._plan.sequence):
            module = cast("Any", attention)
            heads = whole_shape(module.wq.weight)[0] // module.width // self._layout.sp
        for _, found in matching(self.module, self._plan.experts):
            experts = whole_shape(next(found.parameters()))[0]
        layers = list(cast("nn.ModuleDict", self.module.get_submodule(self._plan.blocks)))
        return {"layers": layers, "heads": heads, "experts": experts}


class _Distributed:
    """DeepSpeed's Ulysses as the `exchange` of an attention; see `trainer.parallel.sequence`."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - DeepSpeed's type of a group
        # Heads are scattered and positions gathered; the batch is the first dimension.
        self._attention = DistributedAttention(cast("Any", _call), group, scatter_idx=2, gather_idx=1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: _Attend) -> Tensor:
        """See `trainer.parallel.sequence.Ulysses`."""
        return self._attention(q, k, v, 0, None, attend)


def _call(q: Tensor, k: Tensor, v: Tensor, attend: _Attend) -> Tensor:
    return attend(q, k, v)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
