"""A model in stages: torch's pipelining, which orders the micro-batches; gradients of a rank's stages add up."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard

from trainer.batches import Batch
from trainer.engines.base import step_loss
from trainer.mesh import Mesh
from trainer.spec import STAGES_PER_RANK
from trainer.timing import Part

_SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
_MOST_DIMENSIONS = 6


class _Stage(nn.Module):
    """A stage whose output is plain and half as precise inside, as torch's pipelining takes it."""

    def __init__(self, module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module = module
        self._context = context

    def forward(self, *inputs: Tensor) -> Tensor:
        with self._context():
            output = self.module(*inputs)
        return output.to_local() if isinstance(output, DTensor) else output


class _TimedStage(PipelineStage):
    """A stage that says which pass of a micro-batch it is in."""

    in_part: Callable[[Part], AbstractContextManager[None]]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        with self.in_part("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        with self.in_part("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        with self.in_part("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """The stages of one rank along pp.

    Args:
        stages: Modules by stage number, those of this rank.
        mesh: The ranks.
        micro_batches: How many a step has.
        context: Around each forward pass.
        in_part: What time inside of the block is counted as, see `trainer.timing`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        micro_batches: int,
        context: Callable[[], AbstractContextManager[Any]],
        in_part: Callable[[Part], AbstractContextManager[None]],
    ) -> None:
        layout = mesh.layout
        self._mesh = mesh
        group = mesh.process_group("pp")
        assert group is not None
        self._group = group
        self._count = layout.pp * STAGES_PER_RANK[layout.schedule]
        # FSDP2's modules have to be seen as such; they set their precision themselves.
        self._modules = {i: m if isinstance(m, FSDPModule) else _Stage(m, context) for i, m in stages.items()}
        own = [
            _TimedStage(module, index, self._count, torch.device("cpu"), group=group)
            for index, module in self._modules.items()
        ]
        for stage in own:
            stage.in_part = in_part
        one = layout.schedule in ("gpipe", "1f1b")
        make = _SCHEDULES[layout.schedule]
        self._schedule = make(own[0] if one else own, micro_batches, loss_fn=self._loss, scale_grads=False)
        self._micro_batches = micro_batches
        self._batches: Sequence[Batch] = ()
        self._real_items = 1
        self._factor = 1.0

    def run(self, batches: Sequence[Batch], real_items: int, factor: float) -> float:
        """Forward and backward passes of a step; this rank's part of the loss: 0 without the last stage.

        Args:
            batches: The micro-batches, of one size.
            real_items: Of the global batch.
            factor: What the loss is multiplied with before the backward pass.
        """
        self._batches, self._real_items, self._factor = batches, real_items, factor
        inputs = [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]
        losses: list[Tensor] = []
        # The schedule cuts tensors only: a micro-batch's target is its number.
        numbers = torch.arange(len(batches)) if self._has(self._count - 1) else None
        self._schedule.step(*(inputs if self._has(0) else []), target=numbers, losses=losses, return_outputs=False)
        return sum(loss.item() for loss in losses) / factor

    def output(self, batch: Batch) -> Tensor | None:
        """What the model gives for `batch`, where this rank has the last stage; all ranks along pp call it."""
        x: Tensor | None = None
        for index in range(self._count):
            if index not in self._modules:
                continue
            inputs = batch.inputs if index == 0 else (self._received(index) if x is None else x,)
            x = cast("Tensor", self._modules[index](*inputs))
            if index + 1 < self._count and not self._has(index + 1):
                self._send(x, index)
                x = None
        return None if x is None else self._whole(x)

    def _has(self, index: int) -> bool:
        return index in self._modules

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        batch = self._batches[int(number)]
        return step_loss(self._whole(output), batch, self._real_items) * self._factor

    def _whole(self, output: Tensor) -> Tensor:
        """Logits of a tensor rank as the DTensor that they were."""
        layout = self._mesh.layout
        if layout.tp == 1:
            return output
        return DTensor.from_local(output, self._mesh.submesh("tp"), [Shard(output.ndim - 1)], run_check=False)

    def _rank_of(self, index: int) -> int:
        """The rank along pp that has stage `index`."""
        ranks = self._mesh.layout.pp
        turn, place = divmod(index, ranks)
        return ranks - 1 - place if turn % 2 and self._mesh.layout.schedule == "zbv" else place

    def _send(self, x: Tensor, index: int) -> None:
        head = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64)
        head[: x.ndim + 2] = torch.tensor([_TYPES.index(x.dtype), x.ndim, *x.shape])
        for tensor in (head, x.contiguous()):
            dist.send(tensor, group=self._group, group_dst=self._rank_of(index + 1))

    def _received(self, index: int) -> Tensor:
        head = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64)
        source = self._rank_of(index - 1)
        dist.recv(head, group=self._group, group_src=source)
        kind, ndim, *shape = head.tolist()
        x = torch.empty(shape[:ndim], dtype=_TYPES[kind])
        dist.recv(x, group=self._group, group_src=source)
        return x
