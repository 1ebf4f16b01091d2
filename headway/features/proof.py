"""The leakage proof of a snapshot.

(a) constructive: the stored times of every answer satisfy the declared visibility inequality.
(b) adversarial: for every label row, all source rows that it must not see are deleted, then poisoned, and the same
    compiled plan has to give the same cells. Label rows observed at one instant share a world, since the same rows
    are hidden from them; worlds run side by side, kept apart by scopes.

What is hidden is decided here from the declaration alone, never from what the plan believes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.declaration import PipelineSpec, duration_us
from headway.features.clocks import Clock, Times, clock_of, instants
from headway.features.kernel import collapse
from headway.features.kernel.encode import encode_identity
from headway.features.plan import (
    Cells,
    CompiledView,
    CustomFunction,
    FeatureFunctionFailed,
    FeaturePlan,
    Scopes,
    SourceRows,
    first_observed,
    prepare,
)
from headway.features.reach import memory

Boundary = Literal["lt", "le"]
Variant = Literal["deleted", "poisoned"]

# Rows of all worlds handled in one piece: bounds memory to a few hundred megabytes.
_ROWS_AT_ONCE = 3_000_000


@dataclass(frozen=True)
class Finding:
    """One feature that broke the proof: by which check, in how many cells, at which first observation (us UTC)."""

    feature: str
    check: str
    cells: int
    first_observed: int

    def sentence(self) -> str:
        """One line for people."""
        return f"{self.feature} ({self.check}, {self.cells} cells)"


@dataclass(frozen=True)
class Trial:
    """One adversarial run: a source under one clock and boundary, altered in one way, over all worlds."""

    source: str
    boundary: str
    variant: str
    features: int
    labels: int
    worlds: int
    rows_altered: int


@dataclass(frozen=True)
class Proof:
    """Outcome of both parts for one snapshot partition."""

    labels: int
    constructive_cells: int
    adversarial_cells: int
    trials: tuple[Trial, ...]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing leaked."""
        return not self.findings

    def to_json(self) -> dict[str, object]:
        """Plain data, without any value of a row."""
        return {"passed": self.passed, **asdict(self)}

    def sentence(self) -> str:
        """One line for people about what was covered."""
        altered = sum(t.rows_altered for t in self.trials)
        worlds = max((t.worlds for t in self.trials), default=0)
        verdict = "nothing leaked" if self.passed else f"{len(self.findings)} findings"
        return (
            f"{self.labels:,} label rows, {self.constructive_cells:,} stored times checked, "
            f"{self.adversarial_cells:,} cells recomputed in {worlds:,} worlds with {altered:,} hidden rows altered: "
            f"{verdict}"
        )


@dataclass(frozen=True)
class _Group:
    """Features that see the same rows of one source: one clock, one boundary."""

    source: str
    clock: Clock
    boundary: Boundary
    views: dict[str, CompiledView]
    custom: tuple[str, ...]
    first_observed: int

    @property
    def memory(self) -> int | None:
        """How far back the group's views look; None when something in it may look at all of the past."""
        unlimited = any(v.spec.latest_features() and v.spec.lookback is None for v in self.views.values())
        return None if self.custom or unlimited else max(memory(v.spec) for v in self.views.values())


def prove(
    spec: PipelineSpec, plan: FeaturePlan, labels: pa.Table, sources: Mapping[str, pa.Table], cells: Mapping[str, Cells]
) -> Proof:
    """Both parts over re-read sources, for the cells that a snapshot holds. `labels` holds the label inputs only."""
    times, valid = instants(labels.column(spec.label.observation_time), spec.label.observation_time)
    findings = list(_constructive(spec, sources, cells, times))
    constructive = sum(len(c.event_time) - c.event_time.null_count for c in cells.values())
    trials: list[Trial] = []
    compared = 0
    for group in _groups(spec, plan, first_observed(labels, spec.label.observation_time)):
        for variant in ("deleted", "poisoned"):
            try:
                trial, broken = _adversarial(spec, plan, group, variant, labels, sources, cells, times, valid)
            except FeatureFunctionFailed as failure:
                # It worked on the real rows and fails without those that it must not see.
                names = ", ".join(group.custom)
                findings.append(Finding(names, f"hidden_rows_{variant}: {failure.message}", len(labels), 0))
                continue
            trials.append(trial)
            compared += trial.features * trial.labels
            findings.extend(broken)
    findings.extend(_derived_look_across(plan, labels, cells, times))
    return Proof(len(labels), constructive, compared, tuple(trials), tuple(findings))


def _passes(moments: NDArray[np.int64], times: NDArray[np.int64], boundary: Boundary) -> NDArray[np.bool_]:
    return moments < times if boundary == "lt" else moments <= times


def _constructive(
    spec: PipelineSpec, sources: Mapping[str, pa.Table], cells: Mapping[str, Cells], times: NDArray[np.int64]
) -> Iterator[Finding]:
    for view_name, view in spec.features.views.items():
        truth = clock_of(spec.sources[view.source], view).times(sources[view.source])
        windows = view.window_features()
        for feature in view.features:
            name = f"{view_name}__{feature}"
            cell = cells[name]
            event, present = instants(cell.event_time, name)
            yield from _broken(name, "event_time", present & ~_passes(event, times, view.boundary), times)
            if feature in windows:
                oldest = times - duration_us(windows[feature].duration)
                yield from _broken(name, "window_edge", present & (event < oldest), times)
            if cell.chosen is not None:
                late = _chosen_too_late(cell.chosen, truth, times, view.boundary)
                yield from _broken(name, "available_time", late, times)


def _chosen_too_late(
    chosen: NDArray[np.int64], truth: Times, times: NDArray[np.int64], boundary: Boundary
) -> NDArray[np.bool_]:
    found = chosen >= 0
    late = np.zeros(len(chosen), dtype=np.bool_)
    late[found] = ~_passes(truth.known[chosen[found]], times[found], boundary) | ~truth.admitted[chosen[found]]
    return late


def _broken(feature: str, check: str, bad: NDArray[np.bool_], times: NDArray[np.int64]) -> Iterator[Finding]:
    if bad.any():
        yield Finding(feature, check, int(bad.sum()), int(times[bad].min()))


def _groups(spec: PipelineSpec, plan: FeaturePlan, first: int) -> list[_Group]:
    """Views by (source, declared clock, boundary); custom features under their source's own clock, strictly before."""
    found: dict[tuple[str, Clock, Boundary], tuple[dict[str, CompiledView], list[str]]] = {}
    for name, view in spec.features.views.items():
        key = (view.source, clock_of(spec.sources[view.source], view), view.boundary)
        found.setdefault(key, ({}, []))[0][name] = plan.views[name]
    for name, custom in spec.features.custom.items():
        key = (custom.source, clock_of(spec.sources[custom.source]), "lt")
        found.setdefault(key, ({}, []))[1].append(name)
    return [_Group(*key, views, tuple(custom), first) for key, (views, custom) in found.items()]


def _adversarial(
    spec: PipelineSpec,
    plan: FeaturePlan,
    group: _Group,
    variant: Variant,
    labels: pa.Table,
    sources: Mapping[str, pa.Table],
    cells: Mapping[str, Cells],
    times: NDArray[np.int64],
    valid: NDArray[np.bool_],
) -> tuple[Trial, list[Finding]]:
    rows = sources[group.source] if group.custom else _needed(sources[group.source], spec, group)
    # In the order of identities, copies included: the kernel then sees at once that no row has a second version.
    identities = encode_identity({c: rows.column(c) for c in spec.sources[group.source].row_id})
    rows = rows.take(pa.array(np.argsort(identities, kind="stable")))
    truth = group.clock.times(rows)
    moments, world = np.unique(times[valid], return_inverse=True)
    asked = np.flatnonzero(valid)
    step = max(1, _ROWS_AT_ONCE // max(1, rows.num_rows))
    altered = 0
    differs: dict[str, NDArray[np.bool_]] = {}
    for first in range(0, len(moments), step):
        inside = (world >= first) & (world < first + step)
        picked, scope = asked[inside], world[inside] - first
        at = moments[first : first + step, None]
        visible = _passes(truth.known[None, :], at, group.boundary) & truth.admitted[None, :]
        hidden = ~visible
        altered += int(hidden.sum())
        if group.memory is not None:
            # What a view has forgotten by then is left out as well: it may not matter either.
            visible &= truth.event[None, :] >= at - group.memory
        answer = _run_worlds(plan, group, variant, labels.take(pa.array(picked)), scope, rows, visible, hidden, spec)
        for name, cell in answer.items():
            mask = differs.setdefault(name, np.zeros(len(labels), dtype=np.bool_))
            mask[picked] = _different(cell, cells[name], picked)
    findings = [f for n, mask in differs.items() for f in _broken(n, f"hidden_rows_{variant}", mask, times)]
    features = sum(len(v.spec.features) for v in group.views.values()) + len(group.custom)
    trial = Trial(group.source, group.boundary, variant, features, len(asked), len(moments), altered)
    return trial, findings


def _run_worlds(
    plan: FeaturePlan,
    group: _Group,
    variant: Variant,
    labels: pa.Table,
    scope: NDArray[np.int64],
    rows: pa.Table,
    visible: NDArray[np.bool_],
    hidden: NDArray[np.bool_],
    spec: PipelineSpec,
) -> dict[str, Cells]:
    """Answers for label rows that each live in a world (`scope`) with its own altered copy of the source."""
    if not hidden.any():
        return _answers(plan, group, spec, labels, rows, None, scope)
    if variant == "deleted":
        row_scope, index = np.nonzero(visible)
        world_rows = rows.take(pa.array(index))
    else:
        row_scope, index = np.nonzero(visible | hidden)
        both = pa.concat_tables([rows, _poison(rows, _value_columns(spec, group))]).unify_dictionaries()
        world_rows = both.take(pa.array(index + rows.num_rows * hidden[row_scope, index]))
    return _answers(plan, group, spec, labels, world_rows, Scopes(scope, row_scope), scope)


def _answers(
    plan: FeaturePlan,
    group: _Group,
    spec: PipelineSpec,
    labels: pa.Table,
    rows: pa.Table,
    scopes: Scopes | None,
    world: NDArray[np.int64],
) -> dict[str, Cells]:
    cells: dict[str, Cells] = {}
    prepared: dict[Clock, SourceRows] = {}
    for view in group.views.values():
        # The plan's clock, not the declared one: what the plan believes is what is on trial.
        if view.clock not in prepared:
            prepared[view.clock] = prepare(spec.sources[group.source], view.clock, rows, scopes)
        cells |= view.answer(labels, prepared[view.clock])
    for name in group.custom:
        cells[name] = _custom_world_by_world(plan.custom[name], labels, rows, scopes, world, group.first_observed)
    return cells


def _custom_world_by_world(
    custom: CustomFunction,
    labels: pa.Table,
    rows: pa.Table,
    scopes: Scopes | None,
    world: NDArray[np.int64],
    first_observed: int,
) -> Cells:
    """A custom function knows no scopes: it is called once per world, with the label rows of that world alone."""
    order = np.argsort(world, kind="stable")
    starts = None if scopes is None else np.searchsorted(scopes.rows, np.arange(int(world.max(initial=0)) + 2))
    parts: list[Cells] = []
    for number in np.unique(world):
        of_world = rows if starts is None else rows.slice(starts[number], starts[number + 1] - starts[number])
        asked = labels.filter(pa.array(world == number))
        parts.append(custom.run(asked, custom.rows(of_world, first_observed)))
    back = pa.array(np.argsort(order, kind="stable"))
    return Cells(
        pa.concat_arrays([p.value for p in parts]).take(back),
        pa.concat_arrays([p.event_time for p in parts]).take(back),
        np.concatenate([p.reason for p in parts])[back.to_numpy()],
    )


def _needed(rows: pa.Table, spec: PipelineSpec, group: _Group) -> pa.Table:
    """The columns that views can read; worlds hold many copies of them."""
    source = spec.sources[group.source]
    clocks = [c for v in group.views.values() for c in (v.clock.event, v.clock.available)]
    named = {*source.row_id, source.sequence, source.deleted, group.clock.event, group.clock.available, *clocks}
    for view in group.views.values():
        named |= {*view.spec.keys.values(), *(f.latest for f in view.spec.latest_features().values())}
        named |= {f.window for f in view.spec.window_features().values()}
    return rows.select([c for c in rows.column_names if c in named])


def _value_columns(spec: PipelineSpec, group: _Group) -> list[str]:
    """Columns that hold values: all but identity, keys, clocks, sequence and retraction marks."""
    source = spec.sources[group.source]
    fixed = {*source.row_id, *source.keys, source.sequence, source.deleted, group.clock.event, group.clock.available}
    return [c for c in source.columns if c not in fixed]


def _poison(rows: pa.Table, columns: list[str]) -> pa.Table:
    for column in columns:
        if column in rows.column_names:
            values = _poisonous(rows.column(column).combine_chunks())
            rows = rows.set_column(rows.column_names.index(column), column, values)
    return rows


def _poisonous(values: pa.Array) -> pa.Array:
    """Another valid value for every cell: nulls become values, values become far-off ones."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.invert(pc.fill_null(values, False))
    if pa.types.is_dictionary(kind):
        return pc.dictionary_encode(_poisonous(values.cast(pa.string()))).cast(kind)
    if pa.types.is_string(kind):
        return pc.binary_join_element_wise(pc.fill_null(values, ""), "poison", "~")
    if pa.types.is_timestamp(kind):
        shift = pa.scalar(-86_400_000_000, pa.int64())
        return pc.add(pc.fill_null(values.cast(pa.int64()), 0), shift).cast(kind)
    if pa.types.is_date(kind):
        return pc.add(pc.fill_null(values.cast(pa.int32()), 0), pa.scalar(1, pa.int32())).cast(kind)
    return pc.subtract(pa.scalar(-1_000_003).cast(kind), pc.fill_null(values, pa.scalar(1).cast(kind)))


def _different(now: Cells, before: Cells, picked: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where value, event time or the collapsed reason differ; both missing is equal."""
    index = pa.array(picked)
    values = _unequal(now.value, before.value.take(index))
    moments = _unequal(now.event_time, before.event_time.take(index))
    return values | moments | (collapse(now.reason) != collapse(before.reason[picked]))


def _unequal(left: pa.Array, right: pa.Array) -> NDArray[np.bool_]:
    if pa.types.is_dictionary(left.type):
        left, right = left.cast(pa.string()), right.cast(pa.string())
    if pa.types.is_floating(left.type):
        # Bits, so that NaN equals itself.
        left, right = left.view(pa.int64()), right.view(pa.int64())
    unequal = pc.fill_null(pc.not_equal(left, right), False).to_numpy(zero_copy_only=False)
    lonely = pc.xor(left.is_null(), right.is_null()).to_numpy(zero_copy_only=False)
    return np.asarray(unequal | lonely)


# Subsets of label rows with which derived features run again: fixed draws, and some rows all alone.
_SPLITS = 2
_ALONE = 4


def _subsets(count: int) -> Iterator[NDArray[np.int64]]:
    for seed in range(_SPLITS):
        mixed = np.random.default_rng(seed).permutation(count)
        yield np.sort(mixed[: count // 2])
        yield mixed[count // 2 :]
    for row in np.random.default_rng(_SPLITS).permutation(count)[:_ALONE]:
        yield np.array([row])


def _derived_look_across(
    plan: FeaturePlan, labels: pa.Table, cells: Mapping[str, Cells], times: NDArray[np.int64]
) -> Iterator[Finding]:
    """A derived feature must give a row the same value when other label rows are absent, and in another order."""
    differs = {name: np.zeros(len(labels), dtype=np.bool_) for name in plan.derived}
    inputs = {column for derived in plan.derived.values() for column in derived.inputs}
    for picked in _subsets(len(labels)) if plan.derived else ():
        index = pa.array(picked)
        some = {n: cells[n].take(picked) for n in inputs if n in cells}
        for name, cell in plan.run_derived(labels.take(index), some).items():
            differs[name][picked] |= _different(cell, cells[name], picked)
    for name, bad in differs.items():
        yield from _broken(name, "other_label_rows", bad, times)
