"""DeepSpeed ZeRO stage 1: gradients averaged, the optimizer's moments divided over the ranks.

DeepSpeed on CPU wants to compile a communication op when it starts, and a start that was killed meanwhile blocks all
later ones; the op is switched off. AdamW is torch's own, handed over, so that nothing is built at all. The form of the
flat partitions (parameters one after the other, equal parts per rank) is read from DeepSpeed's own tables.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.batches import Batch
from trainer.engines.base import (
    Evaluated,
    ParameterGroups,
    State,
    StepResult,
    check_same_groups,
    check_same_tensors,
    compose_state,
    describe_groups,
    make_optimizer,
    optimizer_groups,
    set_rates,
    signature,
    step_loss,
)
from trainer.mesh import Mesh
from trainer.pieces import MOMENTS, Pieces, box_piece, collect, flat_piece, read, step_of, whole_box
from trainer.process_group import Group, peers
from trainer.spec import RunSpec

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.ops

# `initialize` would import it, with half of torch's compiler behind it: seconds, which look like a slow first step.
import deepspeed.runtime.zero.muon.muon_optimizer  # pyright: ignore[reportUnusedImport]

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

_BUCKET_MOST = 1 << 25


class _Piece(NamedTuple):
    """Elements of one parameter that this rank's partition holds: from `start` on, at `taken` of the partition."""

    name: str
    partition: Tensor
    start: int
    taken: slice


class ZeroEngine:
    """See `trainer.engines.base.Engine`. Every rank saves the moments of its own partition; rank 0 the weights."""

    def __init__(self, spec: RunSpec, model: nn.Module, declared: ParameterGroups, group: Group) -> None:
        self.mesh = Mesh(spec.layout, group)
        self.module = model
        self._group = group
        groups = optimizer_groups(model, declared, spec.optimizer)
        # DeepSpeed puts its flat partitions in the place of the parameters.
        self._members = [{"params": list(g["params"])} for g in groups]
        self._optimizer = make_optimizer(groups, spec.optimizer)
        with peers():
            engine, zero, *_ = deepspeed.initialize(
                model=model, optimizer=self._optimizer, config=_config(spec, model), dist_init_required=False
            )
        self._engine = engine
        # Its tables of partitions are on no declared type.
        self._zero: Any = zero

    def step(self, micro_batches: Sequence[Batch], real_items: int, lr_factor: float) -> StepResult:
        """See `Engine`."""
        set_rates(self._optimizer, lr_factor)
        own_loss = 0.0
        with peers():
            for batch in micro_batches:
                loss = step_loss(self._engine(*batch.inputs), batch, real_items)
                # DeepSpeed averages over the ranks; what is wanted is the sum of the ranks' parts of one mean.
                self._engine.backward(loss * self._group.world_size, scale_wrt_gas=False)
                self._engine.step()
                own_loss += loss.item()
        # A gradient that is not finite is a step left out by DeepSpeed; it reports the norm as infinite.
        return StepResult(self._group.sum(own_loss), float(self._engine.get_global_grad_norm() or 0.0))

    def evaluate(self, batch: Batch) -> Evaluated:
        """See `Engine`."""
        self.module.eval()
        with torch.inference_mode():
            logits = self.module(*batch.inputs)
            loss = batch.loss_sum(logits).item()
        self.module.train()
        return Evaluated(loss, batch.items, logits)

    def state(self) -> State:
        """See `Engine`."""
        pieces: Pieces = {}
        if self._group.rank == 0:
            whole = self.module.state_dict()
            pieces = {name: [box_piece(w.shape, whole_box(w.shape), weight=w)] for name, w in whole.items()}
        shapes = {name: p.shape for name, p in self.module.named_parameters()}
        for piece in self._pieces():
            if piece.partition in self._optimizer.state:
                adam = self._optimizer.state[piece.partition]
                stop = piece.start + piece.taken.stop - piece.taken.start
                moments = {key: adam[key].view(-1)[piece.taken] for key in MOMENTS}
                part = flat_piece(shapes[piece.name], piece.start, stop, step=float(adam["step"]), **moments)
                pieces.setdefault(piece.name, []).append(part)
        return compose_state(pieces, self._described())

    def load(self, states: Sequence[State]) -> None:
        """See `Engine`."""
        check_same_groups(states[0], self._described())
        saved = collect(states)
        check_same_tensors(saved, signature(self.module))
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                weight = read(saved[name], name, "weight", whole_box(tensor.shape))
                if weight is not None:
                    tensor.copy_(weight)
        self._zero.refresh_fp32_params()
        shapes = {name: p.shape for name, p in self.module.named_parameters()}
        for piece in self._pieces():
            parts, box = saved[piece.name], whole_box(shapes[piece.name])
            step = step_of(parts)
            moments = {key: read(parts, piece.name, key, box) for key in MOMENTS}
            if step is not None:
                self._load_piece(
                    piece, step, {key: whole.flatten() for key, whole in moments.items() if whole is not None}
                )

    def facts(self) -> Mapping[str, Any]:
        """See `Engine`."""
        raise NotImplementedError

    def _load_piece(self, piece: _Piece, step: float, moments: dict[str, Tensor]) -> None:
        adam = self._optimizer.state[piece.partition]
        adam["step"] = torch.tensor(step)
        for key, whole in moments.items():
            flat = adam.setdefault(key, torch.zeros_like(piece.partition))
            count = piece.taken.stop - piece.taken.start
            flat[piece.taken] = whole[piece.start : piece.start + count]

    def _described(self) -> State:
        return describe_groups(self.module, self._members, self._optimizer.param_groups)

    def _pieces(self) -> Iterator[_Piece]:
        names = {id(p): name for name, p in self.module.named_parameters()}
        zero = self._zero
        for index, partition in enumerate(zero.single_partition_of_fp32_groups):
            first = self._group.rank * zero.partition_size[index]
            end = first + zero.partition_size[index]
            offsets = zero.round_robin_bit16_offsets[index]
            for parameter, offset in zip(zero.round_robin_bit16_groups[index], offsets, strict=True):
                low, high = max(first, offset), min(end, offset + parameter.numel())
                if low < high:
                    yield _Piece(names[id(parameter)], partition, low - offset, slice(low - first, high - first))


def _config(spec: RunSpec, model: nn.Module) -> dict[str, Any]:
    # DeepSpeed takes a fresh bucket of this many elements each step, 2 GB by default, whatever the size of the model.
    bucket = min(_BUCKET_MOST, 2 * -(-sum(p.numel() for p in model.parameters() if p.requires_grad) // 2))
    share = spec.batch.global_size // (spec.layout.dp * spec.batch.accumulation)
    return {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": spec.batch.accumulation,
        "gradient_clipping": spec.optimizer.clip_norm,
        "zero_optimization": {
            "stage": spec.layout.zero,
            "round_robin_gradients": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
