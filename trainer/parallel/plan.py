"""What a model says about how it may be divided, and the cutting of a pipeline stage out of it.

Names are those of `named_modules`; in a pattern `*` stands for one part of a dotted name. Dividing a model never
changes the names of its parameters, so that a state saved under one layout is found under any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal, TypeAlias

from torch import nn

Style: TypeAlias = Literal["column", "row", "vocab"]
"""How a linear or embedding layer is divided over the tensor ranks.

`column`: its outputs are divided; `row`: its inputs are, and the parts are summed; `vocab`: the tokens of an embedding
or of the output layer are.
"""

STYLES = ("column", "row", "vocab")


class PlanMismatch(ValueError):
    """A plan that does not fit its model or its degree; the message names the pattern or module, and the limit."""


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be divided.

    Args:
        blocks: The `ModuleDict` of equal blocks, in order, that a pipeline cuts.
        first: Attributes of the model that only the first stage has; `forward` does without those that are None.
        last: The same for the last stage.
        split_points: The block that each stage but the first begins with; empty for stages of equal length.
        tensor: Style of each linear or embedding layer that tensor ranks divide, by pattern.
        sequence: Pattern of the attention modules. Each has `exchange` and `part`; see `trainer.parallel.sequence`.
        experts: Pattern of the modules whose parameters hold one expert per index of their first dimension, and that
            have `exchange`; see `trainer.parallel.expert`.
        routers: Pattern of the modules with `load` and `balance`; see `trainer.parallel.expert`.

    Raises:
        PlanMismatch: an unknown style, or split points that do not rise.
    """

    blocks: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    split_points: tuple[int, ...] = ()
    tensor: Mapping[str, Style] = field(default_factory=dict[str, Style])
    sequence: str = ""
    experts: str = ""
    routers: str = ""

    def __post_init__(self) -> None:
        for pattern, style in self.tensor.items():
            if style not in STYLES:
                raise PlanMismatch(f"tensor[{pattern!r}] is {style!r}, expected one of {list(STYLES)}")
        if any(b <= a for a, b in pairwise((0, *self.split_points))):
            raise PlanMismatch(f"split_points {list(self.split_points)} must rise, from 1 on")


def matching(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Names and modules that `pattern` stands for, in the order of the model; none for an empty pattern."""
    return [(name, found) for name, found in module.named_modules() if pattern and _matches(pattern, name)]


def check_plan(module: nn.Module, plan: ParallelPlan) -> None:
    """Refuse a plan that names what the whole model has not. Call it before any part is cut off.

    Raises:
        PlanMismatch: names the pattern.
    """
    patterns = (plan.blocks, *plan.first, *plan.last, *plan.tensor, plan.sequence, plan.experts, plan.routers)
    for pattern in patterns:
        if pattern and not matching(module, pattern):
            raise PlanMismatch(f"the plan names {pattern!r}, which the {type(module).__name__} has not")


def stage_blocks(blocks: int, stages: int, split_points: tuple[int, ...] = ()) -> list[range]:
    """The blocks of each of `stages` stages; without `split_points` the first ones get one more where it is uneven.

    Raises:
        PlanMismatch: a stage would have no block, or the split points make another number of stages.
    """
    if split_points and len(split_points) != stages - 1:
        raise PlanMismatch(f"split_points {list(split_points)} make {len(split_points) + 1} stages, expected {stages}")
    each, more = divmod(blocks, stages)
    starts = [0, *split_points, blocks] if split_points else [s * each + min(s, more) for s in range(stages + 1)]
    ranges = [range(start, stop) for start, stop in pairwise(starts)]
    if not all(ranges):
        raise PlanMismatch(f"{blocks} blocks in {stages} stages at {starts[1:-1]}: a stage would have none")
    return ranges


def cut_stage(module: nn.Module, plan: ParallelPlan, stage: int, stages: int) -> nn.Module:
    """Take away, in place, what does not belong to `stage` (from 0) of `stages`; names stay as they were.

    With interleaved schedules `stages` counts all stages of all ranks.

    Raises:
        PlanMismatch: a parameter would be needed by two stages (a tied output layer), or a stage would have no block.
    """
    blocks = module.get_submodule(plan.blocks)
    if not isinstance(blocks, nn.ModuleDict):
        raise PlanMismatch(f"blocks {plan.blocks!r} is a {type(blocks).__name__}, expected a ModuleDict")
    ranges = stage_blocks(len(blocks), stages, plan.split_points)
    _refuse_shared(module, plan, ranges)
    for index, key in enumerate(list(blocks)):
        if index not in ranges[stage]:
            del blocks[key]
    for name in (*(plan.first if stage > 0 else ()), *(plan.last if stage < stages - 1 else ())):
        setattr(module, name, None)
    return module


def _matches(pattern: str, name: str) -> bool:
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def _refuse_shared(module: nn.Module, plan: ParallelPlan, ranges: list[range]) -> None:
    if len(ranges) == 1:
        return
    keys = list(module.get_submodule(plan.blocks).children())
    homes = {id(p): (s, plan.blocks) for s, own in enumerate(ranges) for i in own for p in keys[i].parameters()}
    for stage, names in ((0, plan.first), (len(ranges) - 1, plan.last)):
        for name in names:
            for p in module.get_submodule(name).parameters():
                other, owner = homes.setdefault(id(p), (stage, name))
                if other != stage:
                    raise PlanMismatch(
                        f"{owner} (stage {other}) and {name} (stage {stage}) share a parameter; untie them, or use one "
                        "pipeline stage"
                    )
