"""Answers one observation of one declared view from the versions of one entity, as `CompiledView.answer` does.

Everything that the declaration decides is read once, so that a request costs a search, one compiled loop over the rows
of its windows, and a tuple. The loop chooses, adds and rounds by the kernel's own functions, so the bits are the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.declaration import duration_us
from headway.features.kernel import Reason, collapse
from headway.features.kernel.windows import COMPUTED
from headway.features.online.entity_rows import Known
from headway.features.plan import CompiledView, UndecidedTie

FIRST = np.iinfo(np.int64).min
WORDS = tuple(Reason(int(r)).name.lower() for r in collapse(np.array(list(Reason), dtype=np.int8)))
"""By reason code: the word of what a model may see of it."""

HIT, NULL_VALUE, EXPIRED, DELETED, EMPTY, NULL_KEY, NONE_VISIBLE = (
    WORDS[r]
    for r in (
        Reason.HIT,
        Reason.NULL_VALUE,
        Reason.EXPIRED,
        Reason.DELETED,
        Reason.EMPTY,
        Reason.NULL_KEY,
        Reason.NONE_VISIBLE,
    )
)
# At least so many values make an aggregate that is not null.
_LEAST = {"count": 0, "count_value": 0, "sum": 0, "distinct": 0, "std": 2}
# `online.compiled.ROWS` and `WITH_VALUE`, which cannot be imported without numba.
_COUNTED = {"count": -1, "count_value": -2}


class ViewCells(NamedTuple):
    """One row of a view: its features, then the event times and the reasons that go with them, in the plan's order.

    `newest` is the newest event time among its cells (None: none), `answered` whether one of them found a row, `reason`
    that of the view's first feature.
    """

    cells: tuple[Any, ...]
    newest: int | None
    answered: bool
    reason: str


@dataclass(frozen=True)
class ViewPlan:
    """A view with its declaration read once; `names` are the columns of `ViewCells.cells`.

    A feature has a place among the features, and a group, which has one event time and one reason. `latest` says place,
    group and column of each newest value, `windows` place and group of each window, in the order of `aggregates` (see
    `online.compiled.windows_at`); `groups_of_durations` the groups of each duration.
    """

    view: CompiledView
    names: tuple[str, ...]
    features: int
    groups: int
    latest: tuple[tuple[int, int, str], ...]
    windows: tuple[int, ...]
    groups_of_durations: tuple[tuple[int, ...], ...]
    durations: NDArray[np.int64]
    aggregates: NDArray[np.int64]
    lookback: int | None
    strict: bool
    by_column: bool
    ties_decided: bool
    unkeyed: ViewCells


def view_plan(view: CompiledView, beside: Mapping[str, str], windows: Sequence[str]) -> ViewPlan:
    """Read a view's declaration once.

    Args:
        view: the view.
        beside: `assemble.companions` of the pipeline.
        windows: the columns of its scope that are aggregated, in the order of `Known.numbers`.
    """
    spec = view.spec
    declared = spec.window_features()
    durations = sorted({duration_us(f.duration) for f in declared.values()})
    names = [f"{view.name}__{f}" for f in spec.features]
    groups = list(dict.fromkeys(beside[name] for name in names))
    of_durations: list[dict[int, None]] = [{} for _ in durations]
    aggregates: list[tuple[int, int, int, int]] = []
    for name, feature in declared.items():
        at = durations.index(duration_us(feature.duration))
        of_durations[at][groups.index(beside[f"{view.name}__{name}"])] = None
        counted = _COUNTED.get(feature.aggregate)
        aggregate = COMPUTED.index(feature.aggregate) if counted is None else counted
        aggregates.append((windows.index(feature.window), aggregate, at, _LEAST.get(feature.aggregate, 1)))
    nothing = (*(None,) * (len(names) + len(groups)), *(NULL_KEY,) * len(groups))
    return ViewPlan(
        view=view,
        names=(*names, *(f"{g}__event_time" for g in groups), *(f"{g}__reason" for g in groups)),
        features=len(names),
        groups=len(groups),
        latest=tuple(
            (names.index(f"{view.name}__{n}"), groups.index(beside[f"{view.name}__{n}"]), f.latest)
            for n, f in spec.latest_features().items()
        ),
        windows=tuple(names.index(f"{view.name}__{name}") for name in declared),
        groups_of_durations=tuple(tuple(found) for found in of_durations),
        durations=np.array(durations, dtype=np.int64),
        aggregates=np.array(aggregates, dtype=np.int64).reshape(-1, 4),
        lookback=None if spec.lookback is None else duration_us(spec.lookback),
        strict=spec.boundary == "lt",
        by_column=spec.null_policy == "last_known",
        ties_decided="row_id" in spec.tie_break,
        unkeyed=ViewCells(nothing, None, answered=False, reason=NULL_KEY),
    )


def answer(plan: ViewPlan, known: Known, time: int) -> ViewCells:
    """Answer an observation (microseconds UTC) of an entity.

    Raises:
        UndecidedTie: the view declares no order between rows of the entity.
    """
    q = time - 1 if plan.strict and time > FIRST else time
    values: list[Any] = [None] * plan.features
    times: list[int | None] = [None] * plan.groups
    reasons = [EMPTY] * plan.groups
    if plan.latest:
        _newest_values(plan, known, time, q, values, times, reasons)
    if plan.windows:
        _windows(plan, known, time, q, values, times, reasons)
    return ViewCells(
        (*values, *times, *reasons),
        max((t for t in times if t is not None), default=None),
        HIT in reasons or NULL_VALUE in reasons,
        reasons[0],
    )


def _newest_values(
    plan: ViewPlan,
    known: Known,
    time: int,
    q: int,
    values: list[Any],
    times: list[int | None],
    reasons: list[str],
) -> None:
    place, reason = -1, ""
    for number, (at, group, column) in enumerate(plan.latest):
        if number == 0 or plan.by_column:
            place, reason = _newest(plan, known, time, q, column if plan.by_column else "")
        reasons[group] = reason
        if place < 0:
            continue
        times[group] = known.event[place]
        if reason == HIT:
            value = values[at] = known.values[column][place]
            if value is None:
                reasons[group] = NULL_VALUE


def _newest(plan: ViewPlan, known: Known, time: int, q: int, column: str) -> tuple[int, str]:
    """The newest version that counts (-1: none) and the reason, for one column or ("") for all."""
    if not plan.ties_decided and known.is_tied(column):
        raise UndecidedTie(
            f"view {plan.view.name!r}: {plan.view.spec.source} has different rows "
            f"({', '.join(plan.view.source.row_id)}) for one key with equal event time, availability and sequence",
            "end the view's tie_break with row_id, or give the source a sequence",
        )
    skip = known.skipped(column) if column else None
    available, end = known.available, known.end
    null = False
    for place in range(bisect_right(known.event, q) - 1, -1, -1):
        if available[place] <= q < end[place]:
            if skip is not None and skip[place]:
                null = True
                continue
            return _aged(plan, known, time, place)
    return -1, NULL_VALUE if null else NONE_VISIBLE


def _aged(plan: ViewPlan, known: Known, time: int, place: int) -> tuple[int, str]:
    """What became of the newest version: a value is forgotten one look-back after it expired."""
    event, lookback = known.event[place], plan.lookback
    if lookback is not None and event < time - lookback:
        return (-1, NONE_VISIBLE) if event < time - 2 * lookback else (place, EXPIRED)
    return place, DELETED if known.deleted[place] else HIT


def _windows(
    plan: ViewPlan,
    known: Known,
    time: int,
    q: int,
    values: list[Any],
    times: list[int | None],
    reasons: list[str],
) -> None:
    from headway.features.online.compiled import windows_at

    numbers = known.numbers
    counts = np.empty((2, len(plan.durations)), dtype=np.int64)
    out = np.empty(len(plan.aggregates), dtype=np.float64)
    null = np.empty(len(plan.aggregates), dtype=np.bool_)
    windows_at(
        numbers.times,
        numbers.values,
        numbers.missing,
        numbers.units,
        time,
        q,
        plan.durations,
        plan.aggregates,
        counts,
        out,
        null,
    )
    for at, value, missing in zip(plan.windows, out.tolist(), null.tolist(), strict=True):
        values[at] = None if missing else value
    for groups, rows, event in zip(plan.groups_of_durations, *counts.tolist(), strict=True):
        for group in groups:
            times[group], reasons[group] = (event, HIT) if rows else (None, EMPTY)
