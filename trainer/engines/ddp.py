"""Replicas that average their gradients: torch's DistributedDataParallel over gloo; models divided otherwise by hand.

DDP takes plain parameters only. With tensor or pipeline ranks the gradients are summed in one all-reduce after the
backward passes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from trainer.engines.spread import SpreadEngine, autocast, plain
from trainer.mesh import REPLICAS


class DdpEngine(SpreadEngine):
    """See `trainer.engines.base.Engine`. Every data rank holds everything whole; the first one saves."""

    def _spread(self, stage: nn.Module) -> nn.Module:
        self._experts = self._expert_names(stage)
        if self._layout.tp > 1 or self._layout.pp > 1:
            return stage
        # Buffers that are not saved are the same everywhere: DDP would send them around in every pass.
        kept = stage.state_dict().keys()
        fixed = [name for name, _ in stage.named_buffers() if name not in kept]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, [*self._experts, *fixed])
        group = self.mesh.process_group(*REPLICAS)
        return DistributedDataParallel(stage, gradient_as_bucket_view=True, process_group=group)

    def _expert_names(self, stage: nn.Module) -> set[str]:
        if self._plan is None or self._layout.ep == 1:
            return set()
        from trainer.parallel.expert import expert_parameters

        return {name for name, _ in expert_parameters(stage, self._plan)}

    def _syncing(self, last: bool) -> AbstractContextManager[Any]:
        called = next(iter(self._called.values()))
        return called.no_sync() if isinstance(called, DistributedDataParallel) and not last else nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._precision)

    def _reduce(self) -> None:
        for stage, called in zip(self.stages.values(), self._called.values(), strict=True):
            if called is stage:
                average_gradients(
                    [p for name, p in stage.named_parameters() if name not in self._expert_names(stage)],
                    self.mesh.process_group(*REPLICAS),
                )
            self._reduce_experts(stage)

    def _norm_and_clip(self, scale: float) -> float:
        whole = next(iter(self._called.values())) is not self.module and self._layout.ep == 1
        if scale != 1.0 or not whole:
            return super()._norm_and_clip(scale)
        # Every rank holds everything: no rank has to be asked.
        return nn.utils.clip_grad_norm_(self._trainable, self._clip_norm or float("inf"), foreach=True).item()


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
    """Average the gradients of `parameters` over `group` in place, by one all-reduce per type."""
    if group is None:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_type.setdefault(p.grad.dtype, []).append(plain(p.grad))
    for grads in by_type.values():
        flat = _flatten_dense_tensors(grads)
        flat.div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(grads, list(_unflatten_dense_tensors(flat, grads)))  # pyright: ignore[reportPrivateImportUsage]
