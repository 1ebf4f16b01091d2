"""The latest known row of a key at an instant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.features.kernel.columns import (
    NO_FLAGS,
    NO_INTS,
    Columns,
    checked_observations,
    checked_rows,
    each_worker,
    flags,
    share,
    workers,
)
from headway.features.kernel.types import (
    AmbiguousTie,
    Boundary,
    KernelInputError,
    Latest,
    NullPolicy,
    Observations,
    Reason,
    Rows,
)

FIRST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Asked:
    """Observations in (key, instant) order: original index, instant, and where each group starts."""

    index: NDArray[np.int32]
    q: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)


def latest(
    rows: Rows,
    observations: Observations,
    *,
    groups: int,
    boundary: Boundary,
    lookback: int | None,
    null_policy: NullPolicy,
    null: NDArray[np.bool_] | None,
    tie_break_row_id: bool,
) -> Latest:
    """For each observation choose the greatest (event time, availability, sequence) among the visible rows of its key.

    Args:
        rows: admitted rows, length n.
        observations: instants asked for, length m.
        groups: number of key codes.
        boundary: "lt" sees what is strictly before the instant, "le" also what is at it.
        lookback: microseconds; an older chosen row answers `EXPIRED` (the edge itself is still valid). None: unlimited.
        null_policy: "row_wins" answers `NULL_VALUE` for a chosen null; "last_known" passes over null rows. A deleted
            row is a statement and never passed over.
        null: which rows hold a null value, length n; None when none does.
        tie_break_row_id: the declared tie-break ends in the row identity.

    With `rows.row_id`, a version counts only until a later version of its identity is known, wherever that one moved
    its key or event time. Without it the identity is (key, event time) and the rule above says everything.

    Raises:
        AmbiguousTie: different identities tie in the rows and `tie_break_row_id` is False. This looks at the rows
            alone, so it does not depend on which observations are asked.
        KernelInputError: an array or a parameter is not as described.
    """
    if lookback is not None and lookback <= 0:
        raise KernelInputError(f"lookback is {lookback}", "give a duration above 0, or None for unlimited")
    if null_policy not in ("row_wins", "last_known"):
        raise KernelInputError(f"null_policy is {null_policy!r}", "use 'row_wins' or 'last_known'")
    columns = checked_rows(rows, groups)
    asked_of = checked_observations(observations, groups)
    is_null = NO_FLAGS if null is None else flags("null", null, len(rows))
    skip = NO_FLAGS
    if null_policy == "last_known" and len(is_null):
        skip, is_null = (is_null & ~columns.deleted if len(columns.deleted) else is_null), NO_FLAGS

    end, moved = supersession(columns)
    if len(columns.row_id) and not tie_break_row_id:
        refuse_ties(columns, groups, skip, end)
    asked = in_time_order(asked_of, groups, boundary)
    # A superseded version that keeps key and event time is smaller than its successor, so it can stay: unless the
    # successor is passed over.
    if len(end) and (moved or len(skip)):
        chosen = choose_by_sweep(columns, asked, groups, skip, end)
    else:
        chosen = choose_by_placing(columns, asked, skip)
    return answers(columns, asked_of, asked, chosen, lookback, is_null)


@dataclass(frozen=True)
class Chosen:
    """By position in `Asked`: (chosen row or -1, its event time), null passed over, why absent.

    `skipped` is empty where no row is ever passed over, `absence` where the least event time of a key explains it.
    """

    best: NDArray[np.int64]
    skipped: NDArray[np.bool_]
    absence: NDArray[np.int8]


def in_time_order(observations: Observations, groups: int, boundary: Boundary) -> Asked:
    """Order the valid observations with a known key by (key, instant); under "lt" the instant is one less."""
    from headway.features.kernel import compiled

    if boundary not in ("lt", "le"):
        raise KernelInputError(f"boundary is {boundary!r}", "use 'lt' or 'le'")
    q = observations.time
    if boundary == "lt":
        q = np.where(q > FIRST, q, FIRST + 1) - 1
    offsets = compiled.group_offsets(observations.key, observations.valid, groups)
    index = compiled.group_indices(observations.key, observations.valid, offsets)
    sorted_q = np.empty(len(index), np.int64)
    count = workers()
    owner = share(np.diff(offsets), count)
    each_worker(count, lambda w: compiled.sort_observations(index, q, offsets, owner, w, sorted_q))
    return Asked(index, sorted_q, offsets)


def supersession(columns: Columns) -> tuple[NDArray[np.int64], bool]:
    """When each row is superseded, and whether a correction moves a key or an event time.

    The array is empty when no identity has a second version.
    """
    from headway.features.kernel import compiled

    if not len(columns.row_id):
        return NO_INTS, False
    codes = columns.row_id
    if bool((codes[1:] > codes[:-1]).all()):
        return NO_INTS, False
    if int(codes.min()) < 0 or int(codes.max()) >= 4 * len(codes) + 1024:
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64, copy=False)
    offsets = compiled.group_offsets(codes, NO_FLAGS, int(codes.max()) + 1)
    sizes = np.diff(offsets)
    if int(sizes.max()) < 2:
        return NO_INTS, False
    index = compiled.group_indices(codes, NO_FLAGS, offsets)
    end = np.full(len(codes), np.iinfo(np.int64).max, np.int64)
    count = workers()
    owner = share(np.where(sizes > 1, sizes, 0), count)
    moved = [False] * count

    def run(worker: int) -> None:
        moved[worker] = compiled.version_ends(
            offsets,
            index,
            owner,
            worker,
            columns.key,
            columns.event_time,
            columns.available_time,
            columns.sequence,
            end,
        )

    each_worker(count, run)
    return end, any(moved)


def refuse_ties(columns: Columns, groups: int, skip: NDArray[np.bool_], end: NDArray[np.int64]) -> None:
    """Raise `AmbiguousTie` for the first pair of rows that only their identity could compiled."""
    from headway.features.kernel import compiled

    offsets = compiled.group_offsets(columns.key, NO_FLAGS, groups)
    index = compiled.group_indices(columns.key, NO_FLAGS, offsets)
    count = workers()
    owner = share(np.diff(offsets), count)
    found = np.full((count, 3), groups, np.int64)

    def run(worker: int) -> None:
        compiled.find_tie(
            offsets,
            index,
            owner,
            worker,
            columns.event_time,
            columns.available_time,
            columns.sequence,
            columns.row_id,
            skip,
            end,
            found[worker],
        )

    each_worker(count, run)
    group, first, second = min(map(tuple, found.tolist()))
    if group < groups:
        raise AmbiguousTie((first, second))


def choose_by_placing(columns: Columns, asked: Asked, skip: NDArray[np.bool_]) -> Chosen:
    """One pass over the rows in input order: each goes to the first observation that sees it, maxima move forward."""
    from headway.features.kernel import compiled

    m = len(asked)
    best = np.empty((m, 2), np.int64)
    best[:, 0] = -1
    skipped = np.zeros(m, np.bool_) if len(skip) else NO_FLAGS
    count = workers()
    edges = np.linspace(0, m, count + 1).astype(np.int64)

    def put(worker: int) -> None:
        compiled.place(
            columns.key,
            columns.event_time,
            columns.available_time,
            columns.sequence,
            columns.row_id,
            skip,
            asked.q,
            asked.offsets,
            edges[worker],
            edges[worker + 1],
            best,
            skipped,
        )

    each_worker(count, put)
    owner = share(np.diff(asked.offsets), count)

    def carry(worker: int) -> None:
        compiled.spread(
            asked.offsets, owner, worker, columns.available_time, columns.sequence, columns.row_id, best, skipped
        )

    each_worker(count, carry)
    return Chosen(best, skipped, np.empty(0, np.int8))


def choose_by_sweep(
    columns: Columns, asked: Asked, groups: int, skip: NDArray[np.bool_], end: NDArray[np.int64]
) -> Chosen:
    """Per key, follow the instants over a heap of live versions: needed when versions move or are passed over."""
    from headway.features.kernel import compiled

    m = len(asked)
    chosen = Chosen(
        np.full((m, 2), -1, np.int64),
        np.zeros(m, np.bool_),
        np.full(m, Reason.NO_ENTITY, np.int8),
    )
    offsets = compiled.group_offsets(columns.key, NO_FLAGS, groups)
    index = compiled.group_indices(columns.key, NO_FLAGS, offsets)
    count = workers()
    owner = share(np.diff(offsets) + np.diff(asked.offsets), count)

    def run(worker: int) -> None:
        compiled.sweep(
            offsets,
            index,
            asked.offsets,
            asked.index,
            asked.q,
            owner,
            worker,
            columns.event_time,
            columns.available_time,
            columns.sequence,
            columns.row_id,
            skip,
            end,
            chosen.best,
            chosen.skipped,
            chosen.absence,
        )

    each_worker(count, run)
    return chosen


def answers(
    columns: Columns,
    observations: Observations,
    asked: Asked,
    chosen: Chosen,
    lookback: int | None,
    null: NDArray[np.bool_],
) -> Latest:
    """Bring the chosen rows back to the observations' own order, with reasons."""
    from headway.features.kernel import compiled

    m = len(observations)
    out = Latest(
        np.full(m, -1, np.int64),
        np.zeros(m, np.int64),
        np.zeros(m, np.bool_),
        unanswered(observations, Reason.NO_ENTITY),
    )
    count = workers()
    edges = np.linspace(0, len(asked), count + 1).astype(np.int64)
    absent = [0] * count

    def run(worker: int) -> None:
        absent[worker] = compiled.answer(
            asked.index,
            edges[worker],
            edges[worker + 1],
            observations.time,
            -1 if lookback is None else lookback,
            chosen.best,
            columns.deleted,
            null,
            chosen.skipped,
            out.row,
            out.event_time,
            out.has_event_time,
            out.reason,
        )

    each_worker(count, run)
    if sum(absent) and len(chosen.absence):
        reason = out.reason[asked.index]
        missing = reason == Reason.NO_ENTITY
        out.reason[asked.index[missing]] = chosen.absence[missing]
    elif sum(absent):
        least = compiled.earliest(columns.key, columns.event_time, len(asked.offsets) - 1)
        compiled.explain_absence(asked.offsets, asked.index, asked.q, least, out.reason)
    return out


def unanswered(observations: Observations, otherwise: Reason) -> NDArray[np.int8]:
    """Reasons before any row is looked at: null key first, then bad observation time, else `otherwise`."""
    reason = np.full(len(observations), otherwise, np.int8)
    if len(observations.valid):
        reason[~observations.valid] = Reason.BAD_OBSERVATION_TIME
    reason[observations.key == -1] = Reason.NULL_KEY
    return reason
