"""What goes into the kernel and what comes out of it: encoded columns, answers, reason codes, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError

Boundary = Literal["lt", "le"]
NullPolicy = Literal["row_wins", "last_known"]

UNKNOWN_KEY = -2
NULL_KEY = -1


class Reason(IntEnum):
    """Why an output cell holds what it holds. `NONE_VISIBLE` is the only form of "nothing" that a model may see."""

    HIT = 0
    NO_ENTITY = 1
    BEFORE_FIRST = 2
    EXPIRED = 3
    NOT_YET_AVAILABLE = 4
    DELETED = 5
    NULL_VALUE = 6
    EMPTY = 7
    NULL_KEY = 8
    BAD_OBSERVATION_TIME = 9
    NOT_DEFINED_YET = 10
    SUBJECT_REMOVED = 11
    NONE_VISIBLE = 12


def collapse(reasons: NDArray[np.int8]) -> NDArray[np.int8]:
    """Replace the three reasons that differ only by rows from the future with `NONE_VISIBLE`."""
    table = np.arange(len(Reason), dtype=np.int8)
    table[[Reason.NO_ENTITY, Reason.BEFORE_FIRST, Reason.NOT_YET_AVAILABLE]] = Reason.NONE_VISIBLE
    return table[reasons]


class KernelInputError(HeadwayError):
    """Arrays or parameters that the kernel cannot take: wrong length, dtype, range or name."""


class NonFiniteValue(KernelInputError):
    """A window was asked over a value that is infinite or NaN and not marked null."""

    def __init__(self, row: int, value: float) -> None:
        self.row = row
        self.value = value
        super().__init__(
            f"row {row} holds {value}, and windows take finite numbers only", "mark the row null or mend the source"
        )


class DistinctTooCostly(KernelInputError):
    """`distinct` would have to look at more rows than the kernel's stated bound."""

    def __init__(self, visits: int, limit: int) -> None:
        self.visits = visits
        self.limit = limit
        super().__init__(
            f"'distinct' would look at {visits:,} rows, the limit is {limit:,}",
            "shorten the window, ask for fewer observations at a time, or drop 'distinct'",
        )


class AmbiguousTie(HeadwayError):
    """Different row identities of one key share event time, availability and sequence: no declared order decides.

    `rows` holds the indices of two such rows, smallest key first.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"rows {self.rows[0]} and {self.rows[1]} have different row identities but the same key, event time, "
            "availability and sequence",
            "end the view's tie_break with row_id, or mend the source",
        )


@dataclass(frozen=True)
class Rows:
    """Admitted rows of one source, all arrays of one length n. Times are int64 microseconds UTC.

    `key` is a group code, -1 where a key part is null. `sequence` orders versions that became available together.
    `row_id` is an order-preserving code of the row identity; without it the identity is (key, event time).
    A column that is constant may be a zero-stride view (`numpy.broadcast_to`); it then takes no memory.
    """

    key: NDArray[np.int64]
    event_time: NDArray[np.int64]
    available_time: NDArray[np.int64]
    sequence: NDArray[np.int64]
    deleted: NDArray[np.bool_]
    row_id: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class Observations:
    """Instants at which values are asked for, in the caller's order, all arrays of one length m.

    `key` is the group code of the rows' side, -1 for a null key, -2 for one that no row has. `valid` is False where
    the observation time is missing; `time` is ignored there.
    """

    key: NDArray[np.int64]
    time: NDArray[np.int64]
    valid: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class Latest:
    """Answers of `latest`, length m. `row` indexes the rows where the reason is `HIT`, else it is -1.

    `event_time` is that of the chosen row (also when it is expired, deleted or null); `has_event_time` says whether a
    row was chosen.
    """

    row: NDArray[np.int64]
    event_time: NDArray[np.int64]
    has_event_time: NDArray[np.bool_]
    reason: NDArray[np.int8]


@dataclass(frozen=True)
class Window:
    """Answers of `window` for one duration. `values` and `null` hold one array of length m per aggregate.

    `event_time` is the greatest one selected; a null cell holds 0.0.
    """

    values: dict[str, NDArray[np.float64]]
    null: dict[str, NDArray[np.bool_]]
    event_time: NDArray[np.int64]
    has_event_time: NDArray[np.bool_]
    reason: NDArray[np.int8]
