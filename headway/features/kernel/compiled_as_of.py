"""Compiled loops of `latest`. Imported on first use only, since it brings numba.

An instant `q` stands for the observation time under `le`, one microsecond less under `lt`: a row is then visible
when its event time and its availability are both `<= q`, whatever the boundary.
"""

from __future__ import annotations

import numpy as np

from headway.features.kernel.compiled_order import sort_by_columns, sort_pairs
from headway.features.kernel.jit import Codes, Flags, Indices, Ints, compiled, inner

HIT = 0
NO_ENTITY = 1
BEFORE_FIRST = 2
EXPIRED = 3
NOT_YET_AVAILABLE = 4
DELETED = 5
NULL_VALUE = 6

BATCH = 256
STRETCHES = 128
BUFFER = 8192
NEVER = np.iinfo(np.int64).max
FIRST = np.iinfo(np.int64).min


@compiled
def place(
    key: Ints,
    event_time: Ints,
    available_time: Ints,
    sequence: Ints,
    row_id: Ints,
    skip: Flags,
    q: Ints,
    offsets: Ints,
    start: int,
    stop: int,
    best: Ints,
    skipped: Flags,
) -> None:
    """Give every row to the first observation of its key that sees it, and keep the greatest row of each observation.

    Only the observations start..stop (in key and time order) are served, so that workers never share one. Rows in
    `skip` leave a mark in `skipped` instead. `best` is (m, 3): row or -1, its event time, its availability.

    Rows arrive in any order, and a search among millions of observations waits for memory at every step. So rows are
    first collected by stretch of observations (a hot key is cut into several), and a stretch is served when its
    buffer is full, while its observations are in the cache.
    """
    groups = offsets.shape[0] - 1
    first = max(np.searchsorted(offsets, start, side="right") - 1, 0)
    last = min(np.searchsorted(offsets, stop, side="left"), groups)
    stretch = max((stop - start) // STRETCHES + 1, 1)
    size = np.zeros(STRETCHES, np.int64)
    row = np.empty((STRETCHES, BUFFER), np.int32)
    code = np.empty((STRETCHES, BUFFER), np.int32)
    event = np.empty((STRETCHES, BUFFER), np.int64)
    available = np.empty((STRETCHES, BUFFER), np.int64)
    for i in range(key.shape[0]):
        k = key[i]
        if k < first or k >= last:
            continue
        lo = max(offsets[k], start)
        hi = min(offsets[k + 1], stop)
        if lo >= hi:
            continue
        s = (lo - start) // stretch
        end = (hi - 1 - start) // stretch
        if s < end:
            known = max(event_time[i], available_time[i])
            while s < end:
                middle = (s + end + 1) >> 1
                if q[start + middle * stretch] < known:
                    s = middle
                else:
                    end = middle - 1
        j = size[s]
        row[s, j] = i
        code[s, j] = k
        event[s, j] = event_time[i]
        available[s, j] = available_time[i]
        size[s] = j + 1
        if j + 1 == BUFFER:
            lo = start + s * stretch
            hi = min(lo + stretch + 1, stop)
            serve(
                row[s],
                code[s],
                event[s],
                available[s],
                size[s],
                sequence,
                row_id,
                skip,
                q,
                offsets,
                lo,
                hi,
                best,
                skipped,
            )
            size[s] = 0
    for s in range(STRETCHES):
        lo = start + s * stretch
        hi = min(lo + stretch + 1, stop)
        serve(
            row[s], code[s], event[s], available[s], size[s], sequence, row_id, skip, q, offsets, lo, hi, best, skipped
        )


@inner
def serve(
    row: Indices,
    code: Indices,
    event: Ints,
    available: Ints,
    size: int,
    sequence: Ints,
    row_id: Ints,
    skip: Flags,
    q: Ints,
    offsets: Ints,
    start: int,
    stop: int,
    best: Ints,
    skipped: Flags,
) -> None:
    """Let row[:size] compete for the observations start..stop, a batch at a time.

    The searches of a batch go down level by level together: their waits for memory overlap.
    """
    slot = np.empty(BATCH, np.int64)
    length = np.empty(BATCH, np.int64)
    for base in range(0, size, BATCH):
        n = min(BATCH, size - base)
        longest = 1
        for j in range(n):
            k = code[base + j]
            lo = max(offsets[k], start)
            slot[j] = lo
            length[j] = min(offsets[k + 1], stop) - lo
            longest = max(longest, length[j])
        while longest > 1:
            for j in range(n):
                half = length[j] >> 1
                middle = slot[j] + max(half - 1, 0)
                slot[j] += half if q[middle] < max(event[base + j], available[base + j]) else 0
                length[j] -= half
            longest -= longest >> 1
        for j in range(n):
            p = slot[j]
            i = row[base + j]
            e = event[base + j]
            a = available[base + j]
            if q[p] < max(e, a) or (best[p, 0] >= 0 and best[p, 1] > e):
                continue
            if skip.shape[0] > 0 and skip[i]:
                skipped[p] = True
            elif best[p, 0] < 0 or greater(e, a, i, best[p, 1], best[p, 2], best[p, 0], sequence, row_id):
                best[p, 0] = i
                best[p, 1] = e
                best[p, 2] = a


@inner
def greater(
    event: int, available: int, row: int, event2: int, available2: int, row2: int, sequence: Ints, row_id: Ints
) -> bool:
    """(event, available, sequence, row identity) of one row strictly above that of another."""
    if event != event2:
        return event > event2
    if available != available2:
        return available > available2
    if sequence.shape[0] > 0 and sequence[row] != sequence[row2]:
        return sequence[row] > sequence[row2]
    return row_id.shape[0] > 0 and row_id[row] > row_id[row2]


@compiled
def spread(offsets: Ints, owner: Ints, worker: int, sequence: Ints, row_id: Ints, best: Ints, skipped: Flags) -> None:
    """Carry the greatest row (and the mark of a skipped one) forward to the later observations of each group."""
    for g in range(owner.shape[0]):
        if owner[g] != worker:
            continue
        for p in range(offsets[g] + 1, offsets[g + 1]):
            if skipped.shape[0] > 0 and skipped[p - 1]:
                skipped[p] = True
            if best[p - 1, 0] < 0:
                continue
            if best[p, 0] < 0 or not greater(
                best[p, 1], best[p, 2], best[p, 0], best[p - 1, 1], best[p - 1, 2], best[p - 1, 0], sequence, row_id
            ):
                for c in range(3):
                    best[p, c] = best[p - 1, c]


@compiled
def earliest(key: Ints, event_time: Ints, groups: int) -> Ints:
    """Least event time of each group, the greatest int64 where a group has no row."""
    least = np.full(groups, NEVER, np.int64)
    for i in range(key.shape[0]):
        k = key[i]
        if k >= 0 and event_time[i] < least[k]:
            least[k] = event_time[i]
    return least


@compiled
def explain_absence(offsets: Ints, index: Indices, q: Ints, least: Ints, reason: Codes) -> None:
    """Say for each observation that has no visible row why, from the least event time of its key."""
    for g in range(offsets.shape[0] - 1):
        for p in range(offsets[g], offsets[g + 1]):
            m = index[p]
            if reason[m] != NO_ENTITY or least[g] == NEVER:
                continue
            reason[m] = NOT_YET_AVAILABLE if least[g] <= q[p] else BEFORE_FIRST


@compiled
def answer(
    index: Indices,
    start: int,
    stop: int,
    time: Ints,
    lookback: int,
    best: Ints,
    deleted: Flags,
    null: Flags,
    skipped: Flags,
    row: Ints,
    event_time: Ints,
    has_event_time: Flags,
    reason: Codes,
) -> int:
    """Turn the chosen row of each observation into row, event time and reason; returns how many have no row at all.

    Those keep the reason no_entity for `explain_absence`. A negative look-back means unlimited.
    """
    absent = 0
    for p in range(start, stop):
        m = index[p]
        b = best[p, 0]
        if b < 0:
            if skipped.shape[0] > 0 and skipped[p]:
                reason[m] = NULL_VALUE
            else:
                reason[m] = NO_ENTITY
                absent += 1
            continue
        event_time[m] = best[p, 1]
        has_event_time[m] = True
        if lookback >= 0 and older(best[p, 1], time[m], lookback):
            reason[m] = EXPIRED
        elif deleted.shape[0] > 0 and deleted[b]:
            reason[m] = DELETED
        elif null.shape[0] > 0 and null[b]:
            reason[m] = NULL_VALUE
        else:
            reason[m] = HIT
            row[m] = b
    return absent


@inner
def older(event: int, time: int, lookback: int) -> bool:
    """True when event < time - lookback, without overflow."""
    if time < FIRST + lookback:
        return False
    return event < time - lookback


@compiled
def sweep(
    row_offsets: Ints,
    row_index: Indices,
    offsets: Ints,
    index: Indices,
    q: Ints,
    owner: Ints,
    worker: int,
    event_time: Ints,
    available_time: Ints,
    sequence: Ints,
    row_id: Ints,
    skip: Flags,
    end: Ints,
    best: Ints,
    skipped: Flags,
    absence: Codes,
) -> None:
    """Answer when versions also stop counting: sweep each group by time over a heap of the versions known and live.

    Fills best (as `place` does) and skipped by observation position, and in `absence` the reason for those with no row.
    """
    longest = 0
    for g in range(owner.shape[0]):
        if owner[g] == worker:
            longest = max(longest, row_offsets[g + 1] - row_offsets[g])
    keys = np.empty(longest, np.int64)
    keys2 = np.empty(longest, np.int64)
    rows = np.empty(longest, np.int32)
    by_start = np.empty(longest, np.int32)
    scratch = np.empty(longest, np.int32)
    heap = np.empty(longest, np.int32)
    for g in range(owner.shape[0]):
        n = row_offsets[g + 1] - row_offsets[g]
        if owner[g] != worker or offsets[g + 1] == offsets[g]:
            continue
        for i in range(n):
            rows[i] = row_index[row_offsets[g] + i]
        sort_by_columns(rows, n, event_time, available_time, sequence, row_id, keys, keys2, scratch)
        for i in range(n):
            by_start[i] = i
            keys[i] = max(event_time[rows[i]], available_time[rows[i]])
        sort_pairs(keys, by_start, np.int64(0), n, keys2, scratch)
        size = 0
        started = 0
        happened = 0
        nulls_until = FIRST
        for p in range(offsets[g], offsets[g + 1]):
            now = q[p]
            while happened < n and event_time[rows[happened]] <= now:
                happened += 1
            while started < n and keys[started] <= now:
                rank = by_start[started]
                started += 1
                r = rows[rank]
                if end[r] <= now:
                    continue
                if skip.shape[0] > 0 and skip[r]:
                    nulls_until = max(nulls_until, end[r])
                    continue
                push(heap, size, rank)
                size += 1
            while size > 0 and end[rows[heap[0]]] <= now:
                size -= 1
                pop(heap, size)
            if size > 0:
                best[p, 0] = rows[heap[0]]
                best[p, 1] = event_time[rows[heap[0]]]
            else:
                skipped[p] = nulls_until > now
                if n > 0:
                    absence[p] = NOT_YET_AVAILABLE if happened > started else BEFORE_FIRST


@inner
def push(heap: Indices, size: int, rank: int) -> None:
    """Add a rank to the max-heap heap[:size]."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] >= rank:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = rank


@inner
def pop(heap: Indices, size: int) -> None:
    """Drop the greatest rank; `size` is the size that remains."""
    rank = heap[size]
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= rank:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = rank


@compiled
def find_tie(
    row_offsets: Ints,
    row_index: Indices,
    owner: Ints,
    worker: int,
    event_time: Ints,
    available_time: Ints,
    sequence: Ints,
    row_id: Ints,
    skip: Flags,
    end: Ints,
    found: Ints,
) -> None:
    """First pair of different identities that tie on (event time, availability, sequence): found = (group, row, row).

    Versions that can never be seen (superseded before they count) and skipped rows are left out.
    """
    longest = 0
    for g in range(owner.shape[0]):
        if owner[g] == worker:
            longest = max(longest, row_offsets[g + 1] - row_offsets[g])
    keys = np.empty(longest, np.int64)
    keys2 = np.empty(longest, np.int64)
    rows = np.empty(longest, np.int32)
    scratch = np.empty(longest, np.int32)
    for g in range(owner.shape[0]):
        if owner[g] != worker:
            continue
        n = 0
        for p in range(row_offsets[g], row_offsets[g + 1]):
            r = row_index[p]
            if skip.shape[0] > 0 and skip[r]:
                continue
            if end.shape[0] > 0 and end[r] <= max(event_time[r], available_time[r]):
                continue
            rows[n] = r
            n += 1
        sort_by_columns(rows, n, event_time, available_time, sequence, row_id, keys, keys2, scratch)
        for i in range(1, n):
            a = rows[i - 1]
            b = rows[i]
            if event_time[a] != event_time[b] or available_time[a] != available_time[b] or row_id[a] == row_id[b]:
                continue
            if sequence.shape[0] == 0 or sequence[a] == sequence[b]:
                found[0] = g
                found[1] = min(a, b)
                found[2] = max(a, b)
                return
