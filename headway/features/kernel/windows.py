"""Aggregates over what was known of a key during a duration before an instant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.features.kernel.as_of import Asked, in_time_order, supersession, unanswered
from headway.features.kernel.columns import (
    NO_FLAGS,
    Columns,
    check_length,
    checked_observations,
    checked_rows,
    each_worker,
    flags,
    lent,
    share,
    workers,
)
from headway.features.kernel.types import (
    Boundary,
    DistinctTooCostly,
    KernelInputError,
    NonFiniteValue,
    Observations,
    Reason,
    Rows,
    Window,
)

AGGREGATES = ("count", "count_value", "sum", "mean", "std", "min", "max", "first", "last", "distinct")
COMPUTED = ("sum", "mean", "std", "min", "max", "first", "last", "distinct")
DISTINCT_LIMIT = 2_000_000_000

Path = Literal["auto", "scan", "tree"]


def window(
    rows: Rows,
    observations: Observations,
    values: NDArray[np.float64],
    null: NDArray[np.bool_],
    *,
    groups: int,
    boundary: Boundary,
    durations: Sequence[int],
    aggregates: Sequence[str],
    path: Path = "auto",
) -> list[Window]:
    """Aggregate, for each observation and duration, the rows known and inside [time - duration, time).

    Each row identity counts once, in its latest version known at the instant; a deleted one removes it. The upper
    edge follows the boundary, the lower edge is inclusive.

    Args:
        rows: admitted rows, length n.
        observations: instants asked for, length m.
        values: float64, length n, finite where not null. -0.0 counts as 0.0.
        null: which values are null, length n.
        groups: number of key codes.
        boundary: "lt" or "le", for event time and availability alike.
        durations: microseconds, each above 0.
        aggregates: names out of `AGGREGATES`. count is rows, the others look at non-null values; sum of none is 0.0,
            std divides by n - 1 and is null below two values. first and last go by event time, availability,
            sequence, row identity.
        path: "auto" chooses per key between scanning windows and a tree over the event times; the others force one.
            All give the same bits.

    Returns:
        One `Window` per duration, in the given compiled. Sums are the exact sum rounded once (beyond the float64 range:
        infinite), so a cell's bits depend on nothing but the rows selected for it.

    Raises:
        NonFiniteValue: a value that is not null is infinite or NaN.
        DistinctTooCostly: `distinct` sorts every window, and one key's windows hold more than `DISTINCT_LIMIT` rows.
        KernelInputError: an array or a parameter is not as described.
    """
    check_parameters(durations, aggregates, path)
    columns = checked_rows(rows, groups)
    asked_of = checked_observations(observations, groups)
    check_length("values", values, len(rows))
    if values.dtype != np.float64:
        raise KernelInputError(f"values has dtype {values.dtype}, needed is float64")
    asked = in_time_order(asked_of, groups, boundary)
    end, _ = supersession(columns)
    out = compute(
        columns,
        asked_of,
        asked,
        end,
        lent(values),
        flags("null", null, len(rows)),
        groups,
        np.array(durations, np.int64),
        [name for name in COMPUTED if name in aggregates],
        path,
    )
    return [out.window(d, aggregates) for d in range(len(durations))]


def check_parameters(durations: Sequence[int], aggregates: Sequence[str], path: str) -> None:
    """Refuse durations that are not positive and names that do not exist."""
    for duration in durations:
        if duration <= 0:
            raise KernelInputError(f"window duration is {duration}", "give a duration above 0")
    for name in aggregates:
        if name not in AGGREGATES:
            raise KernelInputError(f"unknown aggregate {name!r}", f"use {', '.join(AGGREGATES)}")
    if path not in ("auto", "scan", "tree"):
        raise KernelInputError(f"path is {path!r}", "use 'auto', 'scan' or 'tree'")


class Cells:
    """What the compiled loops write: (durations, observations) arrays, and one such layer per computed aggregate."""

    def __init__(self, observations: Observations, durations: int, names: list[str]) -> None:
        m = len(observations)
        self.names = names
        self.counts = np.zeros((durations, m), np.int32)
        self.value_counts = np.zeros((durations, m), np.int32)
        self.events = np.zeros((durations, m), np.int64)
        self.layers = np.zeros((len(names), durations, m), np.float64)
        self.reason = unanswered(observations, Reason.EMPTY)
        self.unanswerable = self.reason != Reason.EMPTY

    def window(self, d: int, aggregates: Sequence[str]) -> Window:
        """The answer for the d-th duration."""
        count = self.counts[d]
        with_value = self.value_counts[d]
        values: dict[str, NDArray[np.float64]] = {}
        null: dict[str, NDArray[np.bool_]] = {}
        for name in aggregates:
            if name in self.names:
                values[name] = self.layers[self.names.index(name), d]
            else:
                values[name] = (count if name == "count" else with_value).astype(np.float64)
            if name in ("count", "count_value", "sum", "distinct"):
                null[name] = self.unanswerable
            else:
                null[name] = self.unanswerable | (with_value < (2 if name == "std" else 1))
        selected = count > 0
        reason = np.where(selected, np.int8(Reason.HIT), self.reason)
        return Window(values, null, self.events[d], selected, reason)


def compute(
    columns: Columns,
    observations: Observations,
    asked: Asked,
    end: NDArray[np.int64],
    values: NDArray[np.float64],
    null: NDArray[np.bool_],
    groups: int,
    durations: NDArray[np.int64],
    names: list[str],
    path: Path,
) -> Cells:
    """Group the rows by key and run the compiled aggregation over all groups on all cores."""
    from headway.features.kernel import compiled

    low, high = compiled.exponent_range(values.view(np.int64), ignored(null, columns.deleted))
    if high < 0 and low > 0:
        raise NonFiniteValue(int(-1 - high), float(values[-1 - high]))
    summed = bool({"sum", "mean", "std"} & set(names))
    limbs = compiled.limbs_needed(low, high) if summed else 0
    square_limbs = compiled.limbs_needed(2 * low, 2 * high) if "std" in names else 0
    slots = np.array([names.index(name) if name in names else -1 for name in COMPUTED], np.int64)
    cells = Cells(observations, len(durations), names)
    offsets = compiled.group_offsets(columns.key, NO_FLAGS, groups)
    index = compiled.group_indices(columns.key, NO_FLAGS, offsets)
    asked_for = np.diff(asked.offsets)
    count = workers()
    owner = share(np.where(asked_for > 0, np.diff(offsets) + asked_for, 0), count)
    beyond = [0] * count

    def run(worker: int) -> None:
        beyond[worker] = compiled.aggregate(
            offsets,
            index,
            asked.offsets,
            asked.index,
            asked.q,
            observations.time,
            owner,
            worker,
            columns.event_time,
            columns.available_time,
            columns.sequence,
            columns.row_id,
            columns.deleted,
            end,
            values,
            null,
            durations,
            ("auto", "scan", "tree").index(path),
            low,
            limbs,
            square_limbs,
            slots,
            DISTINCT_LIMIT,
            cells.counts,
            cells.value_counts,
            cells.events,
            cells.layers,
        )

    each_worker(count, run)
    if any(beyond):
        raise DistinctTooCostly(max(beyond), DISTINCT_LIMIT)
    return cells


def ignored(null: NDArray[np.bool_], deleted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows whose value says nothing: null, or of a deleted version."""
    if not len(deleted):
        return null
    return null | deleted if len(null) else deleted
