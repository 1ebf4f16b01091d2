"""Answers one observation of one declared view from the versions of one entity, as `CompiledView.answer` does.

Everything that the declaration decides is read once, so that a request costs a search, one compiled loop over the rows
of its windows, and a tuple. The loop chooses, adds and rounds by the kernel's own functions, so the bits are the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
_ROWS, _VALUES = -1, -2
# At least so many values make an aggregate that is not null.
_LEAST = {"count": 0, "count_value": 0, "sum": 0, "distinct": 0, "std": 2}


@dataclass(frozen=True)
class ViewCells:
    """One row of a view: its features, then the event times and the reasons that go with them, in the plan's order.

    `newest` is the newest event time among its cells (None: none), `answered` whether one of them found a row, `reason`
    that of the view's first feature.
    """

    cells: tuple[Any, ...]
    newest: int | None
    answered: bool
    reason: str


@dataclass(frozen=True)
class _Window:
    """Where a window feature lies: its column, its aggregate (or what of it is counted) and its duration."""

    column: int
    aggregate: int
    duration: int
    least: int


@dataclass(frozen=True)
class ViewPlan:
    """A view with its declaration read once.

    `features` says for each feature the column of its newest value, or its window. `groups` names the feature whose
    event time and reason stand for each group. `names` are the columns of `ViewCells.cells`.
    """

    view: CompiledView
    names: tuple[str, ...]
    features: tuple[str | _Window, ...]
    groups: tuple[int, ...]
    durations: NDArray[np.int64]
    wanted: NDArray[np.bool_]

    @cached_property
    def latest(self) -> tuple[str, ...]:
        """The columns whose newest values are asked for, in the order of the features."""
        return tuple(f for f in self.features if isinstance(f, str))

    @cached_property
    def strict(self) -> bool:
        """Whether a row must lie before the observation."""
        return self.view.spec.boundary == "lt"

    @cached_property
    def lookback(self) -> int | None:
        """How far back a newest value may lie, microseconds."""
        return None if self.view.spec.lookback is None else duration_us(self.view.spec.lookback)

    @cached_property
    def by_column(self) -> bool:
        """Whether the newest value of a column is looked for past its nulls."""
        return self.view.spec.null_policy == "last_known"

    @cached_property
    def ties_decided(self) -> bool:
        """Whether rows that tie in time have a declared order."""
        return "row_id" in self.view.spec.tie_break

    @cached_property
    def unkeyed(self) -> ViewCells:
        """The row of an observation without a key."""
        groups = len(self.groups)
        nothing = (*(None,) * (len(self.features) + groups), *(NULL_KEY,) * groups)
        return ViewCells(nothing, None, answered=False, reason=NULL_KEY)


def view_plan(view: CompiledView, beside: dict[str, str], windows: Sequence[str]) -> ViewPlan:
    """Read a view's declaration once.

    Args:
        view: the view.
        beside: `assemble.companions` of the pipeline.
        windows: the columns of its scope that are aggregated, in the order of `Known.numbers`.
    """
    spec = view.spec
    declared = spec.window_features()
    durations = sorted({duration_us(f.duration) for f in declared.values()})
    wanted = np.zeros((len(windows), len(COMPUTED) + 1), dtype=np.bool_)
    features: list[str | _Window] = []
    for name in spec.features:
        if name not in declared:
            features.append(spec.latest_features()[name].latest)
            continue
        window = declared[name]
        column = windows.index(window.window)
        computed = window.aggregate in COMPUTED
        aggregate = COMPUTED.index(window.aggregate) if computed else _ROWS if window.aggregate == "count" else _VALUES
        wanted[column, aggregate if computed else -1] = True
        least = _LEAST.get(window.aggregate, 1)
        features.append(_Window(column, aggregate, durations.index(duration_us(window.duration)), least))
    names = [f"{view.name}__{f}" for f in spec.features]
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        first.setdefault(beside[name], place)
    columns = (*names, *(f"{g}__event_time" for g in first), *(f"{g}__reason" for g in first))
    return ViewPlan(view, columns, tuple(features), tuple(first.values()), np.array(durations, dtype=np.int64), wanted)


def answer(plan: ViewPlan, known: Known, time: int) -> ViewCells:
    """Answer an observation (microseconds UTC) of an entity.

    Raises:
        UndecidedTie: the view declares no order between rows of the entity.
    """
    q = time - 1 if plan.strict and time > FIRST else time
    newest = _newest_values(plan, known, time, q) if plan.latest else {}
    windows = _windows(plan, known, time, q) if len(plan.durations) else ([], [])
    cells: list[tuple[Any, int | None, str]] = []
    for feature in plan.features:
        if isinstance(feature, str):
            cells.append(newest[feature])
        else:
            cells.append(_window_cell(feature, *windows))
    times = [t for _, t, _ in cells if t is not None]
    groups = plan.groups
    return ViewCells(
        (*[c[0] for c in cells], *[cells[g][1] for g in groups], *[cells[g][2] for g in groups]),
        max(times, default=None),
        any(reason in (HIT, NULL_VALUE) for _, _, reason in cells),
        cells[0][2],
    )


def _newest_values(plan: ViewPlan, known: Known, time: int, q: int) -> dict[str, tuple[Any, int | None, str]]:
    """By column: the newest value, its event time and its reason."""
    found: dict[str, tuple[Any, int | None, str]] = {}
    place, reason = -1, ""
    for number, column in enumerate(plan.latest):
        if number == 0 or plan.by_column:
            place, reason = _newest(plan, known, time, q, column if plan.by_column else "")
        if reason != HIT:
            found[column] = (None, None if place < 0 else known.event[place], reason)
            continue
        value = known.values[column][place]
        found[column] = (value, known.event[place], NULL_VALUE if value is None else HIT)
    return found


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


def _windows(plan: ViewPlan, known: Known, time: int, q: int) -> tuple[list[list[int]], list[list[list[float]]]]:
    """Counts and aggregates of all windows, as `windows_at` gives them."""
    from headway.features.online.compiled import windows_at

    numbers = known.numbers
    columns, durations = len(numbers.values), len(plan.durations)
    counts = np.empty((2 + columns, durations), dtype=np.int64)
    out = np.empty((columns, len(COMPUTED), durations), dtype=np.float64)
    windows_at(
        numbers.times, numbers.values, numbers.missing, numbers.units, time, q, plan.durations, plan.wanted, counts, out
    )
    return counts.tolist(), out.tolist()


def _window_cell(
    feature: _Window, counts: list[list[int]], out: list[list[list[float]]]
) -> tuple[float | None, int | None, str]:
    at = feature.duration
    rows, values = counts[0][at], counts[2 + feature.column][at]
    if rows == 0:
        return (None if feature.least else 0.0), None, EMPTY
    event = counts[1][at]
    if feature.aggregate == _ROWS:
        return float(rows), event, HIT
    if feature.aggregate == _VALUES:
        return float(values), event, HIT
    return (None if values < feature.least else out[feature.column][feature.aggregate][at]), event, HIT
