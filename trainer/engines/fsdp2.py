"""Parameters, gradients and moments divided over the data ranks: torch's fully_shard (FSDP2), block by block.

`dp` replicates what `shard` divides (HSDP). With expert ranks everything but the experts is divided over them too.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.engines.base import BadModel, ParameterGroups
from trainer.engines.spread import HALF, SpreadEngine, autocast
from trainer.parallel.expert import expert_parameters
from trainer.parallel.plan import ParallelPlan
from trainer.process_group import Group
from trainer.spec import RunSpec


class Fsdp2Engine(SpreadEngine):
    """See `trainer.engines.base.Engine`. Every rank holds and saves its own part of every parameter.

    Args:
        spec: The run.
        model: The whole model, the same on every rank.
        declared: Its optimizer groups.
        group: The ranks.
        plan: How it may be divided; without one it is divided as a single block.
        reshard: Whether the blocks' gathered weights are given up after the forward pass: less memory, more gathers.
    """

    def __init__(
        self,
        spec: RunSpec,
        model: nn.Module,
        declared: ParameterGroups,
        group: Group,
        plan: ParallelPlan | None = None,
        *,
        reshard: bool = True,
    ) -> None:
        self._reshard = reshard
        super().__init__(spec, model, declared, group, plan)

    def _spread(self, stage: nn.Module) -> nn.Module:
        half = HALF.get(self._precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=False) if self._layout.offload == "parameters" else OffloadPolicy()
        common: dict[str, Any] = {
            "mesh": self._data_mesh(),
            "mp_policy": policy,
            "offload_policy": offload,
            "reshard_after_forward": self._reshard,
            "ignored_params": self._expert_set(stage),
        }
        if self._plan is not None:
            for block in stage.get_submodule(self._plan.blocks).children():
                fully_shard(block, **common)
        fully_shard(stage, **common)
        return stage

    def _data_mesh(self) -> DeviceMesh:
        layout = self._layout
        if layout.sp > 1 or (layout.ep > 1 and layout.dp * layout.shard > 1):
            raise BadModel("fsdp2 takes no sp, and ep neither with dp nor with shard")
        if layout.dp > 1:
            return self.mesh.device_mesh["dp", "shard"]
        return self.mesh.submesh("shard", "ep")

    def _expert_set(self, stage: nn.Module) -> set[nn.Parameter]:
        if self._plan is None or self._layout.ep == 1:
            return set()
        return {p for _, p in expert_parameters(stage, self._plan)}

    @contextmanager
    def _syncing(self, last: bool) -> Iterator[None]:
        module = self.module
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        yield

    def _autocast(self) -> AbstractContextManager[Any]:
        # FSDP2 casts what it gathers; experts are not among that.
        return autocast(self._precision) if self._layout.ep > 1 else nullcontext()

    def _reduce(self) -> None:
        for stage in self.stages.values():
            self._reduce_experts(stage)
