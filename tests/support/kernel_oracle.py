"""Point-in-time rules as plain loops over plain rows: slow, obvious, and sharing nothing with the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from headway.features.kernel import Observations, Rows


@dataclass(frozen=True)
class Row:
    """One admitted version."""

    key: int
    event: int
    available: int
    sequence: int = 0
    row_id: int | None = None
    deleted: bool = False
    value: float | None = None


@dataclass(frozen=True)
class Label:
    """One observation; time None is a bad one."""

    key: int
    time: int | None


@dataclass(frozen=True)
class Cell:
    """Answer of `latest`: position of the row, event time, reason."""

    row: int | None
    event: int | None
    reason: str


@dataclass(frozen=True)
class Stretch:
    """Answer of `window`."""

    values: dict[str, float | None] = field(default_factory=dict)
    event: int | None = None
    reason: str = "empty"


def passes(at: int, time: int, boundary: str) -> bool:
    return at < time if boundary == "lt" else at <= time


def identity(row: Row) -> object:
    return ("id", row.row_id) if row.row_id is not None else (row.key, row.event)


def current_versions(rows: Sequence[Row], time: int, boundary: str) -> list[int]:
    """Latest known version of each identity; of versions alike in everything the last one."""
    best: dict[object, int] = {}
    for i, row in enumerate(rows):
        if not passes(row.available, time, boundary):
            continue
        j = best.get(identity(row))
        if j is None or (rows[j].available, rows[j].sequence) <= (row.available, row.sequence):
            best[identity(row)] = i
    return list(best.values())


def latest_cell(rows: Sequence[Row], label: Label, *, boundary: str, lookback: int | None, null_policy: str) -> Cell:
    if label.key == -1:
        return Cell(None, None, "null_key")
    if label.time is None:
        return Cell(None, None, "bad_observation_time")
    of_key = [i for i, r in enumerate(rows) if r.key == label.key]
    known: Iterable[int] = of_key
    if rows and rows[0].row_id is not None:
        known = current_versions(rows, label.time, boundary)
    seen = [
        i
        for i in known
        if rows[i].key == label.key
        and passes(rows[i].event, label.time, boundary)
        and passes(rows[i].available, label.time, boundary)
    ]
    usable = [i for i in seen if null_policy == "row_wins" or rows[i].deleted or rows[i].value is not None]
    if not usable:
        if seen:
            return Cell(None, None, "null_value")
        if not of_key:
            return Cell(None, None, "no_entity")
        late = any(
            passes(rows[i].event, label.time, boundary) and not passes(rows[i].available, label.time, boundary)
            for i in of_key
        )
        return Cell(None, None, "not_yet_available" if late else "before_first")
    i = max(usable, key=lambda i: (rows[i].event, rows[i].available, rows[i].sequence, rows[i].row_id or 0, -i))
    if lookback is not None and rows[i].event < label.time - lookback:
        return Cell(None, rows[i].event, "expired")
    if rows[i].deleted:
        return Cell(None, rows[i].event, "deleted")
    if rows[i].value is None:
        return Cell(None, rows[i].event, "null_value")
    return Cell(i, rows[i].event, "hit")


def window_cell(rows: Sequence[Row], label: Label, *, boundary: str, duration: int) -> Stretch:
    if label.key == -1:
        return Stretch(reason="null_key")
    if label.time is None:
        return Stretch(reason="bad_observation_time")
    selected = [
        i
        for i in current_versions(rows, label.time, boundary)
        if not rows[i].deleted
        and rows[i].key == label.key
        and label.time - duration <= rows[i].event
        and passes(rows[i].event, label.time, boundary)
    ]
    selected.sort(key=lambda i: (rows[i].event, rows[i].available, rows[i].sequence, rows[i].row_id or 0, i))
    values = [v + 0.0 for v in (rows[i].value for i in selected) if v is not None]
    total = math.fsum(values)
    mean = total / len(values) if values else None
    return Stretch(
        {
            "count": len(selected),
            "count_value": len(values),
            "sum": total,
            "mean": mean,
            "std": deviation(values, mean) if mean is not None and len(values) > 1 else None,
            "min": min(values, default=None),
            "max": max(values, default=None),
            "first": values[0] if values else None,
            "last": values[-1] if values else None,
            "distinct": len(set(values)),
        },
        max((rows[i].event for i in selected), default=None),
        "hit" if selected else "empty",
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Two-pass standard deviation around the rounded mean, without rounding inside."""
    spread = sum(((Fraction(v) - Fraction(mean)) ** 2 for v in values), Fraction(0)) / (len(values) - 1)
    if not spread:
        return 0.0
    # The root of numerator * 2**(2k) / denominator keeps 100 bits and more, whatever the size.
    k = max(0, 120 - (spread.numerator.bit_length() - spread.denominator.bit_length()) // 2)
    root = math.isqrt((spread.numerator << (2 * k)) // spread.denominator)
    return float(Fraction(root, 1 << k))


def columns(rows: Sequence[Row]) -> Rows:
    return Rows(
        key=np.array([r.key for r in rows], np.int64),
        event_time=np.array([r.event for r in rows], np.int64),
        available_time=np.array([r.available for r in rows], np.int64),
        sequence=np.array([r.sequence for r in rows], np.int64),
        deleted=np.array([r.deleted for r in rows], np.bool_),
        row_id=np.array([r.row_id for r in rows], np.int64) if rows and rows[0].row_id is not None else None,
    )


def values_of(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([0.0 if r.value is None else r.value for r in rows], np.float64),
        np.array([r.value is None for r in rows], np.bool_),
    )


def observations(labels: Sequence[Label]) -> Observations:
    return Observations(
        key=np.array([x.key for x in labels], np.int64),
        time=np.array([0 if x.time is None else x.time for x in labels], np.int64),
        valid=np.array([x.time is not None for x in labels], np.bool_),
    )
