"""DeepSpeed ZeRO stage 1: gradients averaged, the optimizer's moments divided over the ranks.

DeepSpeed on CPU wants to compile a communication op when it starts, and a start that was killed meanwhile blocks all
later ones; the op is switched off. AdamW is torch's own, handed over, so that nothing is built at all. The form of the
flat partitions (parameters one after the other, equal parts per rank) is read from DeepSpeed's own tables.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.batches import Batch
from trainer.engines.base import (
    ParameterGroups,
    State,
    StepResult,
    batch_loss,
    check_same_groups,
    describe_groups,
    load_weights,
    make_optimizer,
    moment_slice,
    optimizer_groups,
    set_rates,
    whole_moments,
)
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

    def step(self, micro_batches: Sequence[Batch], real_rows: int, lr_factor: float) -> StepResult:
        """See `Engine`."""
        set_rates(self._optimizer, lr_factor)
        own_loss = 0.0
        with peers():
            for batch in micro_batches:
                loss = batch_loss(self._engine, batch, real_rows)
                # DeepSpeed averages over the ranks; what is wanted is the sum of the ranks' parts of one mean.
                self._engine.backward(loss * self._group.world_size, scale_wrt_gas=False)
                self._engine.step()
                own_loss += loss.item()
        # A gradient that is not finite is a step left out by DeepSpeed; it reports the norm as infinite.
        return StepResult(self._group.sum(own_loss), float(self._engine.get_global_grad_norm() or 0.0))

    def state(self) -> State:
        """See `Engine`."""
        moments = {
            piece.name: moment_slice(self._optimizer.state[piece.partition], piece.taken, piece.start)
            for piece in self._pieces()
            if piece.partition in self._optimizer.state
        }
        weights = self.module.state_dict() if self._group.rank == 0 else {}
        return {"model": weights, "optimizer": moments, **self._described()}

    def load(self, states: Sequence[State]) -> None:
        """See `Engine`."""
        check_same_groups(states[0], self._described())
        load_weights(self.module, states[0]["model"])
        self._zero.refresh_fp32_params()
        sizes = {name: p.numel() for name, p in self.module.named_parameters()}
        for piece in self._pieces():
            moments = whole_moments(states, piece.name, sizes[piece.name])
            if moments is not None:
                self._load_piece(piece, moments)

    def _load_piece(self, piece: _Piece, moments: dict[str, Tensor]) -> None:
        step = moments.pop("step")
        adam = self._optimizer.state[piece.partition]
        adam["step"] = step
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
