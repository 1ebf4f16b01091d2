"""What every source is held to besides its suite: one meaning per row identity, and times that can be true."""

from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.zones import instant
from headway.declaration import SourceSpec, Static, duration_us

AMBIGUOUS_DUPLICATE = "ambiguous_duplicate"
EVENT_AFTER_AVAILABILITY = "event_after_availability"
OUTSIDE_REACH = "outside_reach"


def check_rows(table: pa.Table, spec: SourceSpec, digests: list[bytes]) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Positions of rows to quarantine by reason, and how many rows repeat another exactly.

    The rows are in canonical order. Equal rows are harmless; rows with one identity, both times and sequence, and
    different content, are not: nothing says which of them is true.
    """
    ambiguous, repeated = _duplicates(table, spec, digests)
    found = {
        AMBIGUOUS_DUPLICATE: ambiguous,
        EVENT_AFTER_AVAILABILITY: _event_after_availability(table, spec),
        OUTSIDE_REACH: _outside_reach(table, spec),
    }
    return {reason: positions for reason, positions in found.items() if len(positions)}, repeated


def event_times(table: pa.Table, spec: SourceSpec) -> tuple[int, int] | None:
    """Least and greatest event time in microseconds UTC, a static source's declared instant, or None without any."""
    if isinstance(spec.event_time, Static):
        known_from = static_instant(spec.event_time)
        return (known_from, known_from) if table.num_rows else None
    times = _microseconds(table, spec.event_time)
    known = times[~_missing(table, spec.event_time)]
    return (int(known.min()), int(known.max())) if len(known) else None


def static_instant(clock: Static) -> int:
    """The instant from which a static source is known, microseconds UTC."""
    return instant(datetime.fromisoformat(clock.static_from))


def _duplicates(table: pa.Table, spec: SourceSpec, digests: list[bytes]) -> tuple[NDArray[np.int64], int]:
    rows = table.num_rows
    if rows < 2:
        return np.zeros(0, dtype=np.int64), 0
    clocks = [c for c in (spec.event_time, spec.available_time, spec.sequence) if isinstance(c, str)]
    same = np.ones(rows - 1, dtype=np.bool_)
    for name in dict.fromkeys((*spec.row_id, *clocks)):
        column = table.column(name).combine_chunks()
        equal = pc.fill_null(pc.equal(column.slice(1), column.slice(0, rows - 1)), False)
        both_null = pc.and_(column.slice(1).is_null(), column.slice(0, rows - 1).is_null())
        same &= pc.or_(equal, both_null).to_numpy(zero_copy_only=False).astype(np.bool_)
    differs = np.array([a != b for a, b in zip(digests[1:], digests[:-1], strict=True)], dtype=np.bool_)
    group = np.concatenate([[0], np.cumsum(~same)])
    conflicting = np.unique(group[1:][same & differs])
    return np.flatnonzero(np.isin(group, conflicting)), int((same & ~differs).sum())


def _event_after_availability(table: pa.Table, spec: SourceSpec) -> NDArray[np.int64]:
    if not isinstance(spec.event_time, str) or not isinstance(spec.available_time, str):
        return np.zeros(0, dtype=np.int64)
    known = ~_missing(table, spec.event_time) & ~_missing(table, spec.available_time)
    late = _microseconds(table, spec.event_time) - _microseconds(table, spec.available_time)
    return np.flatnonzero(known & (late > duration_us(spec.quality.clock_skew)))


def _outside_reach(table: pa.Table, spec: SourceSpec) -> NDArray[np.int64]:
    if spec.partition is None or (spec.partition.before is None and spec.partition.after is None):
        return np.zeros(0, dtype=np.int64)
    base = _microseconds(table, spec.partition.column)
    outside = np.zeros(table.num_rows, dtype=np.bool_)
    for clock in (spec.event_time, spec.available_time):
        if isinstance(clock, str):
            distance = _microseconds(table, clock) - base
            known = ~_missing(table, clock)
            if spec.partition.before is not None:
                outside |= known & (distance < -duration_us(spec.partition.before))
            if spec.partition.after is not None and clock == spec.event_time:
                outside |= known & (distance > duration_us(spec.partition.after))
    return np.flatnonzero(outside)


def _microseconds(table: pa.Table, name: str) -> NDArray[np.int64]:
    return pc.fill_null(table.column(name).cast(pa.int64()), 0).to_numpy().astype(np.int64)


def _missing(table: pa.Table, name: str) -> NDArray[np.bool_]:
    return table.column(name).is_null().to_numpy().astype(np.bool_)
