"""One class per way of spreading the work over ranks; all answer to `trainer.engines.base.Engine`."""

from torch import nn

from trainer.engines.base import Engine, ParameterGroups
from trainer.process_group import Group
from trainer.spec import RunSpec


def make_engine(spec: RunSpec, model: nn.Module, declared: ParameterGroups, group: Group) -> Engine:
    """Return the engine that `spec.layout` names, around `model`; `declared` as in `optimizer_groups`."""
    if spec.layout.engine == "deepspeed":
        # DeepSpeed costs a second to import and needs its environment set first.
        from trainer.engines.zero import ZeroEngine

        return ZeroEngine(spec, model, declared, group)
    from trainer.engines.ddp import DdpEngine

    return DdpEngine(spec, model, declared, group)
