"""The kernel's compiled loops over the rows of a few entities, on the caller's thread.

The kernel spreads millions of rows over threads and finds out about keys and corrections each time. Here rows stand
grouped by entity, and what follows from them alone (which version ends when) was worked out when they were decoded.
The loops that compare, choose and add are the kernel's own, so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.features.kernel import Boundary, Latest, NullPolicy, Observations, Reason
from headway.features.kernel.as_of import FIRST, unanswered
from headway.features.kernel.columns import NO_FLAGS
from headway.features.kernel.types import AmbiguousTie, DistinctTooCostly, NonFiniteValue
from headway.features.kernel.windows import COMPUTED, DISTINCT_LIMIT
from headway.features.kernel.windows import Cells as WindowCells

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

NEVER = np.iinfo(np.int64).max
_AUTO = 0


@dataclass(frozen=True)
class Numbers:
    """An aggregated column: values, which are null, and the exponents between which the others lie."""

    values: Floats
    null: Flags
    low: int
    high: int


@dataclass(frozen=True)
class FewRows:
    """Rows grouped by entity: `offsets` says where each group starts, `index` holds the positions of its rows.

    `end` is the instant from which a later version of the same identity is known; `deleted` is empty when no row is.
    """

    offsets: Ints
    index: NDArray[np.int32]
    event_time: Ints
    available_time: Ints
    sequence: Ints
    row_id: Ints
    deleted: Flags
    end: Ints

    @property
    def groups(self) -> int:
        """How many entities there are."""
        return len(self.offsets) - 1


def version_ends(event: Ints, available: Ints, sequence: Ints, here: Flags, identity: Ints, identities: int) -> Ints:
    """When each row of one entity is superseded, as the kernel has it."""
    from headway.features.kernel import compiled

    end = np.full(len(event), NEVER, dtype=np.int64)
    if identities < len(event):
        offsets = compiled.group_offsets(identity, NO_FLAGS, identities)
        index = compiled.group_indices(identity, NO_FLAGS, offsets)
        owner = np.zeros(identities, dtype=np.int64)
        key = np.where(here, np.int64(0), np.int64(-1))
        compiled.version_ends(offsets, index, owner, 0, key, event, available, sequence, end)
    return end


def prepared_numbers(values: Floats, null: Flags, deleted: Flags) -> Numbers:
    """A column with its exponents. Raises the kernel's `NonFiniteValue`."""
    from headway.features.kernel import compiled

    owned = np.array(values, dtype=np.float64)
    missing = np.array(null, dtype=np.bool_)
    low, high = compiled.exponent_range(owned.view(np.int64), missing | deleted)
    if high < 0 and low > 0:
        raise NonFiniteValue(int(-1 - high), float(owned[-1 - high]))
    return Numbers(owned, missing, int(low), int(high))


@dataclass(frozen=True)
class Asked:
    """Observations by (entity, instant): their index, the last instant that each sees, and where each group starts."""

    observations: Observations
    index: NDArray[np.int32]
    q: Ints
    offsets: Ints
    owner: Ints


def in_order(observations: Observations, groups: int, boundary: Boundary) -> Asked:
    """Order observations as the kernel does."""
    from headway.features.kernel import compiled

    q = observations.time
    if boundary == "lt":
        q = np.where(q > FIRST, q, FIRST + 1) - 1
    valid = NO_FLAGS if bool(observations.valid.all()) else observations.valid
    offsets = compiled.group_offsets(observations.key, valid, groups)
    index = compiled.group_indices(observations.key, valid, offsets)
    sorted_q = np.empty(len(index), dtype=np.int64)
    owner = np.zeros(groups, dtype=np.int64)
    compiled.sort_observations(index, q, offsets, owner, 0, sorted_q)
    return Asked(observations, index, sorted_q, offsets, owner)


def latest(
    rows: FewRows,
    asked: Asked,
    *,
    lookback: int | None,
    null_policy: NullPolicy,
    null: Flags | None,
    tie_break_row_id: bool,
) -> Latest:
    """As `kernel.latest`."""
    from headway.features.kernel import compiled

    is_null = NO_FLAGS if null is None else null
    skip = NO_FLAGS
    if null_policy == "last_known" and len(is_null):
        skip, is_null = (is_null & ~rows.deleted if len(rows.deleted) else is_null), NO_FLAGS
    if not tie_break_row_id:
        _refuse_ties(rows, asked, skip)
    count = len(asked.index)
    best = np.full((count, 2), -1, dtype=np.int64)
    skipped = np.zeros(count, dtype=np.bool_)
    absence = np.full(count, Reason.NO_ENTITY, dtype=np.int8)
    compiled.sweep(
        rows.offsets,
        rows.index,
        asked.offsets,
        asked.index,
        asked.q,
        asked.owner,
        0,
        rows.event_time,
        rows.available_time,
        rows.sequence,
        rows.row_id,
        skip,
        rows.end,
        best,
        skipped,
        absence,
    )
    observations = asked.observations
    total = len(observations)
    out = Latest(
        np.full(total, -1, dtype=np.int64),
        np.zeros(total, dtype=np.int64),
        np.zeros(total, dtype=np.bool_),
        unanswered(observations, Reason.NO_ENTITY),
    )
    absent = compiled.answer(
        asked.index,
        0,
        count,
        observations.time,
        -1 if lookback is None else lookback,
        best,
        rows.deleted,
        is_null,
        skipped,
        out.row,
        out.event_time,
        out.has_event_time,
        out.reason,
    )
    if absent:
        missing = out.reason[asked.index] == Reason.NO_ENTITY
        out.reason[asked.index[missing]] = absence[missing]
    return out


def window(
    rows: FewRows,
    asked: Asked,
    column: Numbers,
    *,
    durations: Sequence[int],
    aggregates: Sequence[str],
) -> WindowCells:
    """What `kernel.window` makes its answers of, one per duration."""
    from headway.features.kernel import compiled

    names = [name for name in COMPUTED if name in aggregates]
    summed = bool({"sum", "mean", "std"} & set(names))
    low, high = column.low, column.high
    cells = WindowCells(asked.observations, len(durations), names)
    beyond = compiled.aggregate(
        rows.offsets,
        rows.index,
        asked.offsets,
        asked.index,
        asked.q,
        asked.observations.time,
        asked.owner,
        0,
        rows.event_time,
        rows.available_time,
        rows.sequence,
        rows.row_id,
        rows.deleted,
        rows.end,
        column.values,
        column.null,
        np.array(durations, dtype=np.int64),
        _AUTO,
        low,
        compiled.limbs_needed(low, high) if summed else 0,
        compiled.limbs_needed(2 * low, 2 * high) if "std" in names else 0,
        np.array([names.index(name) if name in names else -1 for name in COMPUTED], dtype=np.int64),
        DISTINCT_LIMIT,
        cells.counts,
        cells.value_counts,
        cells.events,
        cells.layers,
    )
    if beyond:
        raise DistinctTooCostly(beyond, DISTINCT_LIMIT)
    return cells


def _refuse_ties(rows: FewRows, asked: Asked, skip: Flags) -> None:
    from headway.features.kernel import compiled

    found = np.full(3, rows.groups, dtype=np.int64)
    compiled.find_tie(
        rows.offsets,
        rows.index,
        asked.owner,
        0,
        rows.event_time,
        rows.available_time,
        rows.sequence,
        rows.row_id,
        skip,
        rows.end,
        found,
    )
    group, first, second = found.tolist()
    if group < rows.groups:
        raise AmbiguousTie((first, second))
