"""Evaluates one declared view over the rows of the entities asked: what `CompiledView.answer` does over all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.declaration import duration_us
from headway.features import kernel
from headway.features.kernel import Observations, Reason
from headway.features.online.entity_rows import Together
from headway.features.online.few import Asked, in_order, latest, window
from headway.features.plan import Cells, CompiledView, UndecidedTie
from headway.features.plan import _forget as forget

_NONE = np.iinfo(np.int64).min
_FLOAT = pa.float64()
_STAMP = pa.timestamp("us", tz="UTC")
_NULL_VALUE = np.int8(Reason.NULL_VALUE)


@dataclass(frozen=True)
class WindowGroup:
    """Windows over one column: durations and aggregates that are computed together, and where each feature's lies."""

    column: str
    durations: tuple[int, ...]
    aggregates: tuple[str, ...]
    features: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class ViewPlan:
    """A view with its durations read once. Feature names are qualified; `types` are those of the latest columns."""

    view: CompiledView
    lookback: int | None
    latest: tuple[tuple[str, str], ...]
    windows: tuple[WindowGroup, ...]
    types: Mapping[str, pa.DataType]


@dataclass(frozen=True)
class ViewCells:
    """The cells of a view, and what its freshness rests on.

    `newest` is the newest event time among a row's cells (the least int64: none), `answered` whether one of them found
    a row, `reason` that of the view's first feature.
    """

    cells: Mapping[str, Cells]
    newest: NDArray[np.int64]
    answered: NDArray[np.bool_]
    reason: NDArray[np.int8]


def view_plan(view: CompiledView, types: Mapping[str, pa.DataType]) -> ViewPlan:
    """Read a view's declaration once."""
    groups: list[WindowGroup] = []
    features = view.spec.window_features()
    for column in dict.fromkeys(f.window for f in features.values()):
        wanted = {n: f for n, f in features.items() if f.window == column}
        durations = sorted({duration_us(f.duration) for f in wanted.values()})
        groups.append(
            WindowGroup(
                column,
                tuple(durations),
                tuple(sorted({f.aggregate for f in wanted.values()})),
                tuple(
                    (f"{view.name}__{n}", durations.index(duration_us(f.duration)), f.aggregate)
                    for n, f in wanted.items()
                ),
            )
        )
    return ViewPlan(
        view,
        None if view.spec.lookback is None else duration_us(view.spec.lookback),
        tuple((f"{view.name}__{n}", f.latest) for n, f in view.spec.latest_features().items()),
        tuple(groups),
        types,
    )


def answer(plan: ViewPlan, rows: Together, observations: Observations) -> ViewCells:
    """Answer every observation, in its order. The observations' keys are the numbers of entities in `rows`."""
    asked = in_order(observations, rows.rows.groups, plan.view.spec.boundary)
    newest = np.full(len(observations), _NONE, dtype=np.int64)
    answered = np.zeros(len(observations), dtype=np.bool_)
    cells = _latest(plan, rows, asked, newest, answered)
    cells |= _windows(plan, rows, asked, newest, answered)
    ordered = {name: cells[name] for name in (f"{plan.view.name}__{f}" for f in plan.view.spec.features)}
    return ViewCells(ordered, newest, answered, next(iter(ordered.values())).reason)


def _arrow(values: NDArray[np.int64] | NDArray[np.float64], kind: pa.DataType, present: NDArray[np.bool_]) -> pa.Array:
    """The values as they lie in memory, null where not present: `pa.array` with a mask takes three times as long."""
    if present.all():
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)
    valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def _latest(
    plan: ViewPlan, rows: Together, asked: Asked, newest: NDArray[np.int64], answered: NDArray[np.bool_]
) -> dict[str, Cells]:
    found: dict[str, tuple[kernel.Latest, pa.Array, list[int]]] = {}
    cells: dict[str, Cells] = {}
    for name, column in plan.latest:
        shared = column if plan.view.spec.null_policy == "last_known" else ""
        if shared not in found:
            chosen = _newest(plan, rows, asked, rows.null[column] if shared else None)
            chosen = chosen if plan.lookback is None else forget(chosen, asked.observations, plan.lookback)
            np.maximum(newest, np.where(chosen.has_event_time, chosen.event_time, _NONE), out=newest)
            np.logical_or(answered, (chosen.row >= 0) | (chosen.reason == _NULL_VALUE), out=answered)
            event_time = _arrow(chosen.event_time, _STAMP, chosen.has_event_time)
            found[shared] = (chosen, event_time, chosen.row.tolist())
        chosen, event_time, of_rows = found[shared]
        values = rows.values[column]
        picked = [None if i < 0 else values[i] for i in of_rows]
        reason = chosen.reason
        nulls = [at for at, i in enumerate(of_rows) if i >= 0 and picked[at] is None]
        if nulls:
            reason = reason.copy()
            reason[nulls] = _NULL_VALUE
        cells[name] = Cells(pa.array(picked, plan.types[column]), event_time, reason)
    return cells


def _newest(plan: ViewPlan, rows: Together, asked: Asked, null: NDArray[np.bool_] | None) -> kernel.Latest:
    spec = plan.view.spec
    try:
        return latest(
            rows.rows,
            asked,
            lookback=plan.lookback,
            null_policy=spec.null_policy,
            null=null,
            tie_break_row_id="row_id" in spec.tie_break,
        )
    except kernel.AmbiguousTie as tie:
        raise UndecidedTie(
            f"view {plan.view.name!r}: {spec.source} has different rows ({', '.join(plan.view.source.row_id)}) for one "
            "key with equal event time, availability and sequence",
            "end the view's tie_break with row_id, or give the source a sequence",
        ) from tie


def _windows(
    plan: ViewPlan, rows: Together, asked: Asked, newest: NDArray[np.int64], answered: NDArray[np.bool_]
) -> dict[str, Cells]:
    cells: dict[str, Cells] = {}
    for group in plan.windows:
        found = window(
            rows.rows, asked, rows.numbers[group.column], durations=group.durations, aggregates=group.aggregates
        )
        selected = found.counts > 0
        np.maximum(newest, np.where(selected, found.events, _NONE).max(axis=0), out=newest)
        np.logical_or(answered, selected.any(axis=0), out=answered)
        answers = [found.window(d, group.aggregates) for d in range(len(group.durations))]
        event_times = [_arrow(a.event_time, _STAMP, a.has_event_time) for a in answers]
        for name, at, aggregate in group.features:
            value = _arrow(answers[at].values[aggregate], _FLOAT, ~answers[at].null[aggregate])
            cells[name] = Cells(value, event_times[at], answers[at].reason)
    return cells
