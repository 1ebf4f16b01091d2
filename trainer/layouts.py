"""Which layouts each engine supports: a table whose every row is proven by parity tests, and why the rest is refused.

A layout that is in no row is refused before launch, with the fields that do not go together and the nearest layout that
is in one. Some of what is refused would run, and train wrongly: `FAULTS` says what was measured. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias, cast

from trainer.spec import (
    DEGREES,
    LAYOUT_OPTIONS,
    PLAIN_DEGREE,
    STAGES_PER_RANK,
    BatchSpec,
    LayoutConflict,
    LayoutSpec,
    ModelFacts,
    Precision,
    describe_choice,
    layout_text,
    parse_layout,
)

SCHEDULES = tuple(STAGES_PER_RANK)

Fields: TypeAlias = Mapping[str, object]
"""Dotted names of a spec's fields, with their values."""


@dataclass(frozen=True)
class Choice:
    """What is asked for. `model` and `batch` None: not known, so nothing is said about them."""

    layout: LayoutSpec
    precision: Precision
    clip_norm: float = 1.0
    model: ModelFacts | None = None
    batch: BatchSpec | None = None

    @property
    def degrees(self) -> tuple[str, ...]:
        """The degrees above 1; of a single process, the engine's plain one."""
        above = tuple(name for name in DEGREES if getattr(self.layout, name) > 1)
        return above or (PLAIN_DEGREE[self.layout.engine],)

    def values(self, *names: str) -> dict[str, object]:
        """The values of `names`: fields of the layout, of the batch by `batch.`, of the model by `model.options.`."""
        return {_path(name): self._value(name) for name in names}

    def _value(self, name: str) -> object:
        if name in ("precision", "clip_norm"):
            return getattr(self, name)
        part, _, field = name.rpartition(".")
        return getattr({"": self.layout, "batch": self.batch, "model.options": self.model}[part], field)


@dataclass(frozen=True)
class Supported:
    """A row of the table: what an engine runs along `degrees`.

    `proven` are the layouts at which the parity test runs in fp32. The other precisions, schedules and options, and
    accumulation where there is but one degree and no offload, are proven at the first of them, each by itself.
    """

    engine: str
    degrees: tuple[str, ...]
    proven: tuple[str, ...]
    zero: int = 0
    offload: str = ""
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    schedules: tuple[str, ...] = ("1f1b",)
    options: tuple[str, ...] = ()

    def cases(self) -> Iterator[ParityCase]:
        """The parity tests that prove this row."""
        first, *others = self.proven
        yield self._case(first)
        for text in others:
            yield self._case(text)
        for precision in self.precisions[1:]:
            yield self._case(first, precision=precision)
        for schedule in self.schedules:
            if schedule != "1f1b":
                yield self._case(first, {"schedule": schedule})
        for option in self.options:
            yield self._case(first, {option: True})
        if self.degrees == (PLAIN_DEGREE[self.engine],) and not self.offload:
            yield self._case(first, accumulation=2)

    def _case(
        self,
        text: str,
        changed: Mapping[str, object] | None = None,
        precision: Precision = "fp32",
        accumulation: int | None = None,
    ) -> ParityCase:
        fields: Any = {"offload": self.offload, **(changed or {})}
        layout = replace(parse_layout(self.engine, text), **fields)
        return ParityCase(layout, precision, accumulation or layout.pp)


@dataclass(frozen=True)
class ParityCase:
    """One run of the parity test: a layout trains as one process does; `accumulation` micro-batches per step."""

    layout: LayoutSpec
    precision: Precision
    accumulation: int

    @property
    def name(self) -> str:
        """The case's name among the parity tests, such as `deepspeed-dp=2,zero=2-fp32-optimizer`."""
        layout = self.layout
        schedule = layout.schedule if layout.schedule != "1f1b" else ""
        options = [name for name in LAYOUT_OPTIONS if getattr(layout, name)]
        if self.accumulation != layout.pp:
            options.append(f"accumulation={self.accumulation}")
        parts = [layout.engine, layout_text(layout), self.precision, layout.offload, schedule, *options]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Fault:
    """A combination that is refused for a reason that is known: it trains wrongly, or the engine cannot do it.

    `applies` gives the fields that do not go together, or nothing.
    """

    combination: str
    reason: str
    happens: Literal["runs, and trains wrongly", "cannot be run", "is not built", "means nothing"]
    applies: Callable[[Choice], Fields]


def _deepspeed(choice: Choice, *names: str, when: bool) -> Fields:
    return choice.values(*names) if choice.layout.engine == "deepspeed" and when else {}


TABLE: tuple[Supported, ...] = (
    Supported("ddp", ("dp",), ("dp=2", "dp=4"), precisions=("fp32", "bf16", "fp16"), options=LAYOUT_OPTIONS),
    Supported("ddp", ("tp",), ("tp=2",)),
    Supported("ddp", ("dp", "tp"), ("dp=2,tp=2",)),
    Supported("ddp", ("sp",), ("sp=2",)),
    Supported("ddp", ("dp", "sp"), ("dp=2,sp=2",)),
    Supported("ddp", ("ep",), ("ep=2",)),
    Supported("ddp", ("dp", "ep"), ("dp=2,ep=2",)),
    Supported("ddp", ("pp",), ("pp=2",), schedules=SCHEDULES),
    Supported("ddp", ("dp", "pp"), ("dp=2,pp=2",)),
    Supported("ddp", ("tp", "pp"), ("tp=2,pp=2",)),
    Supported("fsdp2", ("shard",), ("shard=2", "shard=4"), precisions=("fp32", "bf16", "fp16"), options=LAYOUT_OPTIONS),
    Supported("fsdp2", ("shard",), ("shard=2",), offload="parameters"),
    Supported("fsdp2", ("dp", "shard"), ("dp=2,shard=2",)),
    Supported("fsdp2", ("tp",), ("tp=2",)),
    Supported("fsdp2", ("shard", "tp"), ("shard=2,tp=2",)),
    Supported("fsdp2", ("shard", "pp"), ("shard=2,pp=2",)),
    Supported("fsdp2", ("ep",), ("ep=2", "ep=4")),
    Supported("deepspeed", ("dp",), ("dp=2,zero=0", "dp=4,zero=0"), zero=0, precisions=("fp32",)),
    Supported("deepspeed", ("dp",), ("dp=2,zero=1", "dp=4,zero=1"), zero=1, options=("activation_checkpointing",)),
    Supported("deepspeed", ("dp",), ("dp=2,zero=2", "dp=4,zero=2"), zero=2, options=("activation_checkpointing",)),
    Supported("deepspeed", ("dp",), ("dp=2,zero=3", "dp=4,zero=3"), zero=3, options=("activation_checkpointing",)),
    Supported("deepspeed", ("dp",), ("dp=2,zero=2",), zero=2, offload="optimizer"),
    Supported("deepspeed", ("dp",), ("dp=2,zero=3",), zero=3, offload="optimizer"),
    Supported("deepspeed", ("dp",), ("dp=2,zero=3",), zero=3, offload="parameters"),
    Supported("deepspeed", ("tp",), ("tp=2,zero=1",), zero=1),
    Supported("deepspeed", ("dp", "tp"), ("dp=2,tp=2,zero=1",), zero=1),
    Supported("deepspeed", ("dp", "tp"), ("dp=2,tp=2,zero=2",), zero=2),
    Supported("deepspeed", ("sp",), ("sp=2,zero=3",), zero=3),
    Supported("deepspeed", ("dp", "sp"), ("dp=2,sp=2,zero=3",), zero=3),
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "deepspeed, ZeRO 0, bf16",
        "without a stage DeepSpeed takes its FP16_UnfusedOptimizer, and losses drift by 2.4e-2 from one process",
        "runs, and trains wrongly",
        lambda c: _deepspeed(c, "zero", "precision", when=c.layout.zero == 0 and c.precision == "bf16"),
    ),
    Fault(
        "deepspeed, sp, ZeRO 0 to 2",
        "DeepSpeed's DistributedAttention leaves gradients unreduced over the sequence ranks below stage 3: losses are "
        "off by 0.12 and the ranks end with different parameters",
        "runs, and trains wrongly",
        lambda c: _deepspeed(c, "sp", "zero", when=c.layout.sp > 1 and c.layout.zero < 3),
    ),
    Fault(
        "deepspeed, pp, ZeRO 0, clipping",
        "each stage of DeepSpeed's PipelineModule clips by its own gradient norm: losses are off by 3.7e-3",
        "runs, and trains wrongly",
        lambda c: _deepspeed(
            c, "pp", "zero", "clip_norm", when=c.layout.pp > 1 and c.layout.zero == 0 and c.clip_norm > 0
        ),
    ),
    Fault(
        "deepspeed, ep, ZeRO 3",
        "DeepSpeed's experts cannot be sharded by stage 3",
        "cannot be run",
        lambda c: _deepspeed(c, "ep", "zero", when=c.layout.ep > 1 and c.layout.zero == 3),
    ),
    Fault(
        "deepspeed, pp, ZeRO 2 or 3",
        "DeepSpeed's PipelineModule adds up gradients that stages 2 and 3 have divided",
        "cannot be run",
        lambda c: _deepspeed(c, "pp", "zero", when=c.layout.pp > 1 and c.layout.zero > 1),
    ),
    Fault(
        "deepspeed, pp",
        "the pipelines here are torch's, of the engines ddp and fsdp2; DeepSpeed's PipelineModule is not used",
        "is not built",
        lambda c: _deepspeed(c, "engine", "pp", when=c.layout.pp > 1),
    ),
    Fault(
        "deepspeed, ep",
        "the experts here are those of the engines ddp and fsdp2; DeepSpeed's MoE is not used",
        "is not built",
        lambda c: _deepspeed(c, "engine", "ep", when=c.layout.ep > 1),
    ),
    Fault(
        "deepspeed, shard",
        "DeepSpeed shards over dp, by its ZeRO stage",
        "means nothing",
        lambda c: _deepspeed(c, "engine", "shard", when=c.layout.shard > 1),
    ),
    Fault(
        "ddp, shard",
        "DistributedDataParallel keeps everything whole on every rank",
        "means nothing",
        lambda c: c.values("engine", "shard") if c.layout.engine == "ddp" and c.layout.shard > 1 else {},
    ),
    Fault(
        "fsdp2, dp without shard",
        "replicas of what is not sharded are what ddp is for",
        "means nothing",
        lambda c: c.values("engine", "dp", "shard") if c.layout.engine == "fsdp2" and c.degrees == ("dp",) else {},
    ),
    Fault(
        "a pipeline schedule without pp",
        "without a pipeline a schedule means nothing",
        "means nothing",
        lambda c: c.values("schedule", "pp") if c.layout.pp == 1 and c.layout.schedule != "1f1b" else {},
    ),
)

# degree -> sizes of the model that have to divide by it; the first has to be stated, the others where they are.
_DIVIDES: Mapping[str, tuple[str, ...]] = {
    "tp": ("heads", "kv_heads", "hidden", "vocab"),
    "sp": ("heads", "kv_heads", "sequence"),
    "pp": ("layers",),
    "ep": ("experts",),
}

# What a change costs when the nearest layout is looked for. A degree costs its change in powers of two.
_ENGINE_COST, _DEGREE_COST, _ZERO_COST, _PRECISION_COST = 2.5, 1.5, 0.5, 3.0
_OFFLOAD_COST, _OPTION_COST, _SCHEDULE_COST = 1.5, 1.0, 0.5


def check_layout(
    layout: LayoutSpec,
    precision: Precision,
    clip_norm: float,
    model_facts: ModelFacts | None = None,
    batch: BatchSpec | None = None,
) -> None:
    """Refuse what the layout's engine does not support, or the model's sizes do not divide by.

    Args:
        layout: A layout whose degrees make up its ranks.
        precision: Of the run.
        clip_norm: Of the optimizer; 0 for no clipping.
        model_facts: The model's sizes; None asks about the engine alone.
        batch: The batch; None as for the model. It divides by its own micro-batches.

    Raises:
        LayoutConflict: the fields that do not go together, why, and the nearest valid choice.
    """
    choice = Choice(layout, precision, clip_norm, model_facts, batch)
    found = conflict(choice)
    if found is not None:
        fields, reason = found
        near = nearest(choice)
        raise LayoutConflict(fields, reason, near.layout, near.precision)


def conflict(choice: Choice) -> tuple[Fields, str] | None:
    """The fields of `choice` that do not go together, and why; None when it is valid."""
    for fault in FAULTS:
        fields = fault.applies(choice)
        if fields:
            return fields, fault.reason
    return _not_in_table(choice) or _not_divisible(choice) or _too_few_micro_batches(choice)


def proof(choice: Choice) -> ParityCase | None:
    """The parity test of the row that `choice` is in; None when it is in none."""
    found = None if _not_in_table(choice) else _rows(choice)[0]
    return None if found is None else next(found.cases())


def parity_cases() -> list[ParityCase]:
    """Every run of the parity test, in the order of the table."""
    return [case for row in TABLE for case in row.cases()]


def nearest(choice: Choice) -> Choice:
    """The valid choice that differs least from `choice`: on as many ranks, or on the most that divide their number."""
    world = choice.layout.world_size
    for ranks in (d for d in range(world, 0, -1) if world % d == 0):
        valid = [c for c in _candidates(choice, ranks) if _fits(c)]
        if valid:
            return min(valid, key=lambda c: _distance(choice, c))
    raise AssertionError(f"one process is always valid, and was not: {choice}")


def render_page() -> str:
    """`docs/layouts.md`."""
    rows = "".join(map(_row_line, TABLE))
    faults = "".join(_line(fault.combination, fault.happens, fault.reason) for fault in FAULTS)
    divides = "".join(_divides_line(degree, sizes) for degree, sizes in _DIVIDES.items())
    return _HEAD + rows + _FAULTS_HEAD + faults + _DIVIDES_HEAD + divides


def _path(name: str) -> str:
    if name == "precision" or "." in name:
        return name
    return "optimizer.clip_norm" if name == "clip_norm" else f"layout.{name}"


def _rows(choice: Choice) -> list[Supported]:
    return [row for row in TABLE if not _misses(row, choice)]


def _misses(row: Supported, choice: Choice) -> tuple[str, ...]:
    """The first thing of `choice` that `row` has not, as the names of its fields."""
    layout = choice.layout
    if row.engine != layout.engine or row.degrees != choice.degrees:
        return ("engine", *choice.degrees)
    if row.zero != layout.zero:
        return ("zero", *choice.degrees)
    if row.offload != layout.offload:
        return ("offload", "engine", *choice.degrees, *(("zero",) if layout.engine == "deepspeed" else ()))
    offload = ("offload",) if layout.offload else ()
    if choice.precision not in row.precisions:
        return ("precision", "engine", *choice.degrees, *offload)
    if layout.pp > 1 and layout.schedule not in row.schedules:
        return ("schedule", "engine", *choice.degrees)
    for option in LAYOUT_OPTIONS:
        if getattr(layout, option) and option not in row.options:
            return (option, "engine", *choice.degrees, *offload)
    return ()


_ORDER = ("engine", "zero", "offload", "precision", "schedule", *LAYOUT_OPTIONS)


def _not_in_table(choice: Choice) -> tuple[Fields, str] | None:
    missed = [_misses(row, choice) for row in TABLE]
    if not all(missed):
        return None
    # The row that goes furthest along with the choice says what stands against it.
    names = max(missed, key=lambda names: _ORDER.index(names[0]))
    return choice.values(*names), "no parity test proves that they train as one process does"


def _not_divisible(choice: Choice) -> tuple[Fields, str] | None:
    model, layout = choice.model, choice.layout
    if model is None:
        return None
    for degree, sizes in _DIVIDES.items():
        ranks = getattr(layout, degree)
        for size in sizes if ranks > 1 else ():
            if size == "hidden" and model.experts:
                continue
            found = _size_conflict(choice, degree, size, _parts(layout, degree, size), size == sizes[0])
            if found is not None:
                return found
    if layout.activation_checkpointing and not model.layers:
        fields = choice.values("activation_checkpointing", "model.options.layers")
        return fields, "what is computed again are the blocks, and the options state no layers"
    if model.tied and layout.pp > 1:
        fields = choice.values("pp", "model.options.tied")
        return fields, "the first and the last stage would share the embedding's weights"
    return None


def _parts(layout: LayoutSpec, degree: str, size: str) -> int:
    """Into how many parts `layout` divides the size `size` of a model that its `degree` divides."""
    if size in ("heads", "kv_heads"):
        return layout.tp * layout.sp
    return getattr(layout, degree) * (STAGES_PER_RANK[layout.schedule] if degree == "pp" else 1)


def _size_conflict(choice: Choice, degree: str, size: str, parts: int, needed: bool) -> tuple[Fields, str] | None:
    value = getattr(choice.model, size)
    fields = choice.values(degree, f"model.options.{size}")
    if not value and needed:
        return fields, f"a model that is divided along {degree} has to state its {size} among its options"
    if value % parts:
        more = choice.values("schedule") if degree == "pp" else choice.values(*_also(choice.layout, degree, size))
        return {**fields, **more}, f"{value} {size} do not divide by {parts}"
    return None


def _also(layout: LayoutSpec, degree: str, size: str) -> tuple[str, ...]:
    other = {"tp": "sp", "sp": "tp"}.get(degree, degree)
    return (other,) if size in ("heads", "kv_heads") and getattr(layout, other) > 1 else ()


def _too_few_micro_batches(choice: Choice) -> tuple[Fields, str] | None:
    layout, batch = choice.layout, choice.batch
    if batch is None or layout.pp == 1:
        return None
    count, fields = batch.accumulation, choice.values("batch.accumulation", "pp", "schedule")
    if layout.schedule == "1f1b" and count < layout.pp:
        return fields, f"1f1b needs a micro-batch for each of the {layout.pp} stages"
    rounds = max(1, count // layout.pp)
    if layout.schedule in ("interleaved", "zero_bubble") and count % rounds:
        return fields, f"{layout.schedule} takes {layout.pp} micro-batches at a time: {count} do not divide by {rounds}"
    return None


def _fits(choice: Choice) -> bool:
    batch = choice.batch
    share = choice.layout.data_ranks * batch.accumulation if batch is not None else 1
    whole = batch is None or batch.global_size % batch.accumulation or batch.global_size % share == 0
    return bool(whole) and conflict(choice) is None


def _candidates(choice: Choice, ranks: int) -> Iterator[Choice]:
    for row in TABLE:
        precisions = [choice.precision] if choice.precision in row.precisions else row.precisions
        options = [{}, *({name: True} for name in row.options if getattr(choice.layout, name))]
        if len(options) > 2:
            options.append({**options[1], **options[2]})
        parts = product(_factors(ranks, row.degrees), precisions, row.schedules, options)
        for degrees, precision, schedule, kept in parts:
            layout = LayoutSpec(
                engine=cast("Any", row.engine),
                zero=row.zero,
                offload=cast("Any", row.offload),
                schedule=cast("Any", schedule),
                **_nodes(choice.layout, ranks),
                **cast("Any", {**degrees, **kept}),
            )
            yield replace(choice, layout=layout, precision=precision)


def _nodes(asked: LayoutSpec, ranks: int) -> dict[str, int]:
    nodes = math.gcd(asked.nodes, ranks)
    return {"nodes": nodes, "processes_per_node": ranks // nodes}


def _factors(ranks: int, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Every way to give `names` degrees above 1 whose product is `ranks`; a single process has one degree of 1."""
    first, *others = names
    if not others:
        yield {first: ranks}
        return
    for degree in range(2, ranks // 2 + 1):
        if ranks % degree == 0:
            for rest in _factors(ranks // degree, tuple(others)):
                yield {first: degree, **rest}


def _distance(asked: Choice, other: Choice) -> tuple[float, str]:
    a, b = asked.layout, other.layout
    wanted = {name: getattr(a, name) for name in DEGREES}
    stage = b.zero
    if b.engine == "deepspeed":
        stage = a.zero if a.engine == "deepspeed" else 1
    if a.engine == b.engine == "deepspeed":
        wanted |= {"dp": a.dp * a.shard, "shard": 1}
    cost = _DEGREE_COST * sum(abs(math.log2(wanted[name] / getattr(b, name))) for name in DEGREES)
    cost += _ENGINE_COST * (a.engine != b.engine)
    cost += _ZERO_COST * abs(stage - b.zero)
    cost += _PRECISION_COST * (asked.precision != other.precision) + _OFFLOAD_COST * (a.offload != b.offload)
    cost += _SCHEDULE_COST * (a.schedule != b.schedule)
    cost += _OPTION_COST * sum(getattr(a, name) != getattr(b, name) for name in LAYOUT_OPTIONS)
    # The words make the choice among equals the same everywhere.
    return cost, describe_choice(b, other.precision)


_HEAD = """\
# Layouts

Written by `python -m trainer.layouts > docs/layouts.md` from the table in `trainer/layouts.py`; a test keeps it so.

A layout is written `dp=2,shard=2,tp=2,pp=2,sp=2,ep=2,zero=1`. Degrees that are not named are 1; `zero` is 1 with
`deepspeed` when it is not named, and refused elsewhere. `dp` replicates, `shard` divides parameters, gradients and
moments, `tp` divides matrices, `pp` layers, `sp` the sequence, `ep` experts. What is in no row is refused before
launch: `headway train check` names the fields that do not go together, and the nearest layout that is in a row.

## Supported

Each row is proven by runs of the parity test against one process. Precisions, schedules, options and accumulation are
proven one by one, at the row's first layout. A single process counts as a degree of 1 in the engine's first row.

| engine | degrees | ZeRO | offload | precision | schedules | options | parity tests |
|---|---|---|---|---|---|---|---|
"""

_FAULTS_HEAD = """
## Refused for a known reason

| combination | what happens | reason |
|---|---|---|
"""

_DIVIDES_HEAD = """
Everything else that is in no row is refused because no parity test proves it.

## What has to divide

A model that is divided along a degree has to state the first of the sizes among its options; for activation
checkpointing, its layers. `1f1b` needs as many
micro-batches as stages; `interleaved` and `zero_bubble` take `pp` micro-batches at a time.

| by | what |
|---|---|
| dp x shard x ep x accumulation | the global batch |
"""


def _row_line(row: Supported) -> str:
    return _line(
        row.engine,
        " x ".join(row.degrees),
        str(row.zero) if row.engine == "deepspeed" else "",
        row.offload,
        ", ".join(row.precisions),
        ", ".join(row.schedules) if "pp" in row.degrees else "",
        ", ".join(row.options),
        ", ".join(f"`{case.name}`" for case in row.cases()),
    )


def _divides_line(degree: str, sizes: tuple[str, ...]) -> str:
    twice = ", ".join(name for name, count in STAGES_PER_RANK.items() if count > 1)
    more = {"pp": f", twice that with {twice}", "tp": ", heads by tp x sp", "sp": ", heads by tp x sp"}
    return _line(degree + more.get(degree, ""), ", ".join(f"`model.options.{size}`" for size in sizes))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(render_page(), end="")
