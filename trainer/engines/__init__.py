"""One class per way of spreading the work over ranks; all answer to `trainer.engines.base.Engine`."""

from torch import nn

from trainer.engines.base import Engine, ParameterGroups
from trainer.parallel.plan import ParallelPlan
from trainer.process_group import Group
from trainer.spec import RunSpec


def make_engine(
    spec: RunSpec, model: nn.Module, declared: ParameterGroups, group: Group, plan: ParallelPlan | None = None
) -> Engine:
    """Return the engine that `spec.layout` names, around `model`; `declared` as in `optimizer_groups`.

    `plan` says how the model may be divided; a layout that only divides rows does without.
    """
    if spec.layout.engine == "deepspeed":
        # DeepSpeed costs a second to import and needs its environment set first.
        from trainer.engines.zero import ZeroEngine

        return ZeroEngine(spec, model, declared, group, plan)
    if spec.layout.engine == "fsdp2":
        from trainer.engines.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(spec, model, declared, group, plan)
    from trainer.engines.ddp import DdpEngine

    return DdpEngine(spec, model, declared, group, plan)
