"""Compiled loops of `window`. Imported on first use only, since it brings numba.

Per key the candidate versions stand in (event time, availability, sequence, row identity) order; a version's place in
that order is its rank. A window is a stretch of ranks, and a version in it counts while it is live: known, and not
yet superseded, at the instant `q` (the observation time under `le`, one microsecond less under `lt`).
Small windows are scanned. For large ones the instants are followed over a tree on the ranks, into which versions come
when they become known and from which they go when superseded. Counts, extremes and ranks do not depend on the order
of work and sums are exact, so both ways give the same bits.
"""

from __future__ import annotations

import numpy as np

from headway.features.kernel.compiled_exact import add, add_square, deviation, value_of
from headway.features.kernel.compiled_order import sort_by_columns, sort_pairs
from headway.features.kernel.jit import Codes, Flags, Floats, Indices, Ints, compiled, inner

NEVER = np.iinfo(np.int64).max
FIRST = np.iinfo(np.int64).min
SIGN = np.iinfo(np.int64).min

AUTO = 0
SCAN = 1
TREE = 2

SUM = 0
MEAN = 1
STD = 2
MIN = 3
MAX = 4
LEAST = 5
LAST = 6
DISTINCT = 7

COUNT = 0
VALUES = 1
GREATEST = 2
FIRST_VALUE = 3
LAST_VALUE = 4


@compiled
def aggregate(
    row_offsets: Ints,
    row_index: Indices,
    offsets: Ints,
    index: Indices,
    q: Ints,
    time: Ints,
    owner: Ints,
    worker: int,
    event_time: Ints,
    available_time: Ints,
    sequence: Ints,
    row_id: Ints,
    deleted: Flags,
    end: Ints,
    values: Floats,
    null: Flags,
    durations: Ints,
    path: int,
    low: int,
    limbs: int,
    square_limbs: int,
    slots: Ints,
    distinct_limit: int,
    counts: Indices,
    value_counts: Indices,
    events: Ints,
    out: Floats,
) -> int:
    """Answer the worker's groups. Returns 0, or how many rows `distinct` would look at for a key beyond its limit.

    counts, value_counts and events are (durations, observations); out is (asked aggregates, durations, observations)
    and slots says which row of it an aggregate goes to, -1 when it is not asked. `limbs` and `square_limbs` are 0 when
    no sum, no sum of squares is needed.
    """
    longest = 0
    for g in range(owner.shape[0]):
        if owner[g] == worker:
            longest = max(longest, row_offsets[g + 1] - row_offsets[g])
    keys = np.empty(longest, np.int64)
    keys2 = np.empty(longest, np.int64)
    rows = np.empty(longest, np.int32)
    rows2 = np.empty(longest, np.int32)
    event = np.empty(longest, np.int64)
    known = np.empty(longest, np.int64)
    until = np.empty(longest, np.int64)
    value = np.empty(longest, np.float64)
    missing = np.empty(longest, np.bool_)
    live = np.empty(longest, np.bool_)
    lower = np.empty(durations.shape[0], np.int64)
    state = np.empty(5, np.int64)
    extremes = np.empty(2, np.float64)
    total = np.empty(limbs, np.int64)
    squares = np.empty(square_limbs, np.int64)
    digits = np.empty(limbs, np.int64)
    squared = np.empty(square_limbs, np.int64)
    spread = np.empty(max(square_limbs, 2 * limbs) + 2, np.int64)
    want_distinct = slots[DISTINCT] >= 0
    for g in range(owner.shape[0]):
        m = offsets[g + 1] - offsets[g]
        if owner[g] != worker or m == 0:
            continue
        n = row_offsets[g + 1] - row_offsets[g]
        for i in range(n):
            rows[i] = row_index[row_offsets[g] + i]
        sort_by_columns(rows, n, event_time, available_time, sequence, row_id, keys, keys2, rows2)
        n = candidates(
            rows, n, event_time, available_time, deleted, row_id, end, values, null, event, known, until, value, missing
        )
        bits = value.view(np.int64)
        visits = window_rows(event, n, q, time, index, offsets[g], offsets[g + 1], durations, lower)
        if want_distinct and visits > distinct_limit:
            return visits
        tree = path == TREE or (path == AUTO and not want_distinct and visits > 30 * n + 150 * m * durations.shape[0])
        superseded = False
        for i in range(n):
            live[i] = False
            superseded = superseded or until[i] != NEVER
        leaving = np.int64(0)
        if tree:
            for i in range(n):
                keys[i] = known[i]
                rows[i] = i
            sort_pairs(keys, rows, np.int64(0), n, keys2, rows2)
            arrivals = rows[:n].copy()
            leaving = n if superseded else np.int64(0)
            for i in range(leaving):
                keys[i] = until[i]
                rows[i] = i
            sort_pairs(keys, rows, np.int64(0), leaving, keys2, rows2)
        else:
            arrivals = rows[:0].copy()
        departures = rows[:leaving].copy()
        shift = 4 if limbs + square_limbs <= 24 else 6
        bases = level_bases(n if tree else 0, shift)
        nodes = bases[-1]
        node_state = np.empty((nodes, 5), np.int64)
        node_extremes = np.empty((nodes, 2), np.float64)
        node_total = np.zeros((nodes, limbs), np.int64)
        node_squares = np.zeros((nodes, square_limbs), np.int64)
        for i in range(nodes):
            clear(node_state[i], node_extremes[i])
        came = 0
        left = 0
        upper = 0
        lower[:] = 0
        for p in range(offsets[g], offsets[g + 1]):
            now = q[p]
            while upper < n and event[upper] <= now:
                upper += 1
            while came < arrivals.shape[0] and known[arrivals[came]] <= now:
                insert(
                    np.int64(arrivals[came]), bases, shift, live, value, bits, missing, low,
                    node_state, node_extremes, node_total, node_squares,
                )  # fmt: skip
                came += 1
            while left < leaving and until[departures[left]] <= now:
                remove(
                    np.int64(departures[left]), n, bases, shift, live, value, bits, missing, low,
                    node_state, node_extremes, node_total, node_squares,
                )  # fmt: skip
                left += 1
            o = index[p]
            for d in range(durations.shape[0]):
                edge = window_edge(time[o], durations[d])
                while lower[d] < upper and event[lower[d]] < edge:
                    lower[d] += 1
                clear(state, extremes)
                total[:] = 0
                squares[:] = 0
                if tree:
                    query(
                        lower[d], upper, bases, shift, live, value, bits, missing, low,
                        node_state, node_extremes, node_total, node_squares, state, extremes, total, squares,
                    )  # fmt: skip
                else:
                    for rank in range(lower[d], upper):
                        if known[rank] <= now and now < until[rank]:
                            visit(rank, value, bits, missing, low, state, extremes, total, squares)
                counts[d, o] = state[COUNT]
                value_counts[d, o] = state[VALUES]
                if state[COUNT] > 0:
                    events[d, o] = event[state[GREATEST]]
                if slots[SUM] >= 0 or slots[MEAN] >= 0:
                    s = value_of(total, low, digits)
                    if slots[SUM] >= 0:
                        out[slots[SUM], d, o] = s
                    if slots[MEAN] >= 0 and state[VALUES] > 0:
                        out[slots[MEAN], d, o] = s / state[VALUES]
                if slots[STD] >= 0 and state[VALUES] > 1:
                    out[slots[STD], d, o] = deviation(total, squares, state[VALUES], low, digits, squared, spread)
                if state[VALUES] > 0:
                    if slots[MIN] >= 0:
                        out[slots[MIN], d, o] = extremes[0]
                    if slots[MAX] >= 0:
                        out[slots[MAX], d, o] = extremes[1]
                    if slots[LEAST] >= 0:
                        out[slots[LEAST], d, o] = value[state[FIRST_VALUE]]
                    if slots[LAST] >= 0:
                        out[slots[LAST], d, o] = value[state[LAST_VALUE]]
                    if want_distinct:
                        k = np.int64(0)
                        for rank in range(lower[d], upper):
                            if known[rank] <= now and now < until[rank] and not missing[rank]:
                                keys[k] = bits[rank]
                                k += 1
                        out[slots[DISTINCT], d, o] = distinct(keys, k, keys2, rows, rows2)
    return 0


@inner
def candidates(
    rows: Indices,
    n: int,
    event_time: Ints,
    available_time: Ints,
    deleted: Flags,
    row_id: Ints,
    end: Ints,
    values: Floats,
    null: Flags,
    event: Ints,
    known: Ints,
    until: Ints,
    value: Floats,
    missing: Flags,
) -> int:
    """Copy the versions of one group that can ever count, in rank order, into local arrays; returns how many.

    Without a row identity, a later version at the same event time supersedes the earlier one.
    """
    k = 0
    for i in range(n):
        r = rows[i]
        stop = NEVER
        if end.shape[0] > 0:
            stop = end[r]
        elif row_id.shape[0] == 0 and i + 1 < n and event_time[rows[i + 1]] == event_time[r]:
            stop = available_time[rows[i + 1]]
        if deleted.shape[0] > 0 and deleted[r]:
            continue
        if stop <= max(event_time[r], available_time[r]):
            continue
        event[k] = event_time[r]
        known[k] = available_time[r]
        until[k] = stop
        missing[k] = null.shape[0] > 0 and null[r]
        # Adding zero turns -0.0 into 0.0: the two are one value, and a minimum must not depend on which came first.
        value[k] = 0.0 if missing[k] else values[r] + 0.0
        k += 1
    return k


@inner
def window_edge(time: int, duration: int) -> int:
    """time - duration, not below the least int64."""
    return time - duration if time >= FIRST + duration else FIRST


@inner
def window_rows(
    event: Ints, n: int, q: Ints, time: Ints, index: Indices, start: int, stop: int, durations: Ints, lower: Ints
) -> int:
    """How many ranks all windows of one group span together."""
    visits = 0
    upper = 0
    lower[:] = 0
    for p in range(start, stop):
        while upper < n and event[upper] <= q[p]:
            upper += 1
        for d in range(durations.shape[0]):
            edge = window_edge(time[index[p]], durations[d])
            while lower[d] < upper and event[lower[d]] < edge:
                lower[d] += 1
            visits += upper - lower[d]
    return visits


@inner
def distinct(keys: Ints, n: int, keys2: Ints, rows: Indices, rows2: Indices) -> int:
    """Number of different entries in keys[:n], which are left sorted; the rest is scratch."""
    sort_pairs(keys, rows, np.int64(0), n, keys2, rows2)
    different = min(n, 1)
    for i in range(1, n):
        different += 1 if keys[i] != keys[i - 1] else 0
    return different


@inner
def clear(state: Ints, extremes: Floats) -> None:
    """The state of no rows."""
    state[COUNT] = 0
    state[VALUES] = 0
    state[GREATEST] = -1
    state[FIRST_VALUE] = NEVER
    state[LAST_VALUE] = -1
    extremes[0] = np.inf
    extremes[1] = -np.inf


@inner
def visit(
    rank: int,
    value: Floats,
    bits: Ints,
    missing: Flags,
    low: int,
    state: Ints,
    extremes: Floats,
    total: Ints,
    squares: Ints,
) -> None:
    """Take one version into a state."""
    state[COUNT] += 1
    state[GREATEST] = max(state[GREATEST], rank)
    if missing[rank]:
        return
    state[VALUES] += 1
    state[FIRST_VALUE] = min(state[FIRST_VALUE], rank)
    state[LAST_VALUE] = max(state[LAST_VALUE], rank)
    extremes[0] = min(extremes[0], value[rank])
    extremes[1] = max(extremes[1], value[rank])
    if total.shape[0] > 0:
        add(total, bits[rank], low)
    if squares.shape[0] > 0:
        add_square(squares, bits[rank], low, np.int64(1))


@inner
def level_bases(n: int, shift: int) -> Ints:
    """Index of the first node of each level above the n leaves, and the number of nodes at the end."""
    bases = np.zeros(16, np.int64)
    levels = 0
    size = n
    while size > 1:
        size = (size + (1 << shift) - 1) >> shift
        bases[levels + 1] = bases[levels] + size
        levels += 1
    return bases[: levels + 1]


@inner
def insert(
    rank: int,
    bases: Ints,
    shift: int,
    live: Flags,
    value: Floats,
    bits: Ints,
    missing: Flags,
    low: int,
    node_state: Ints,
    node_extremes: Floats,
    node_total: Ints,
    node_squares: Ints,
) -> None:
    """A version becomes known: every node above it takes it in."""
    live[rank] = True
    at = rank
    for level in range(bases.shape[0] - 1):
        at >>= shift
        node = bases[level] + at
        visit(
            rank,
            value,
            bits,
            missing,
            low,
            node_state[node],
            node_extremes[node],
            node_total[node],
            node_squares[node],
        )


@inner
def remove(
    rank: int,
    n: int,
    bases: Ints,
    shift: int,
    live: Flags,
    value: Floats,
    bits: Ints,
    missing: Flags,
    low: int,
    node_state: Ints,
    node_extremes: Floats,
    node_total: Ints,
    node_squares: Ints,
) -> None:
    """A version is superseded: sums are taken back, extremes and ranks are read again from the children."""
    live[rank] = False
    at = rank
    for level in range(bases.shape[0] - 1):
        first = (at >> shift) << shift
        at >>= shift
        node = bases[level] + at
        state = node_state[node]
        extremes = node_extremes[node]
        count = state[COUNT] - 1
        with_value = state[VALUES] - (0 if missing[rank] else 1)
        clear(state, extremes)
        below = n if level == 0 else bases[level] - bases[level - 1]
        for child in range(first, min(first + (1 << shift), below)):
            if level > 0:
                merge(node_state[bases[level - 1] + child], node_extremes[bases[level - 1] + child], state, extremes)
            elif live[child]:
                visit(child, value, bits, missing, low, state, extremes, node_total[node, :0], node_squares[node, :0])
        state[COUNT] = count
        state[VALUES] = with_value
        if not missing[rank]:
            if node_total.shape[1] > 0:
                add(node_total[node], bits[rank] ^ SIGN, low)
            if node_squares.shape[1] > 0:
                add_square(node_squares[node], bits[rank], low, np.int64(-1))


@inner
def merge(part: Ints, part_extremes: Floats, state: Ints, extremes: Floats) -> None:
    """Take the state of disjoint versions into another."""
    state[COUNT] += part[COUNT]
    state[VALUES] += part[VALUES]
    state[GREATEST] = max(state[GREATEST], part[GREATEST])
    state[FIRST_VALUE] = min(state[FIRST_VALUE], part[FIRST_VALUE])
    state[LAST_VALUE] = max(state[LAST_VALUE], part[LAST_VALUE])
    extremes[0] = min(extremes[0], part_extremes[0])
    extremes[1] = max(extremes[1], part_extremes[1])


@inner
def query(
    start: int,
    stop: int,
    bases: Ints,
    shift: int,
    live: Flags,
    value: Floats,
    bits: Ints,
    missing: Flags,
    low: int,
    node_state: Ints,
    node_extremes: Floats,
    node_total: Ints,
    node_squares: Ints,
    state: Ints,
    extremes: Floats,
    total: Ints,
    squares: Ints,
) -> None:
    """Gather the live versions with start <= rank < stop: ragged ends one by one, the rest from ever higher nodes."""
    fan = (1 << shift) - 1
    levels = bases.shape[0] - 1
    for level in range(levels + 1):
        while start < stop and (start & fan or level == levels):
            gather(
                start, level, bases, live, value, bits, missing, low,
                node_state, node_extremes, node_total, node_squares, state, extremes, total, squares,
            )  # fmt: skip
            start += 1
        while start < stop and stop & fan:
            stop -= 1
            gather(
                stop, level, bases, live, value, bits, missing, low,
                node_state, node_extremes, node_total, node_squares, state, extremes, total, squares,
            )  # fmt: skip
        start >>= shift
        stop >>= shift


@inner
def gather(
    at: int,
    level: int,
    bases: Ints,
    live: Flags,
    value: Floats,
    bits: Ints,
    missing: Flags,
    low: int,
    node_state: Ints,
    node_extremes: Floats,
    node_total: Ints,
    node_squares: Ints,
    state: Ints,
    extremes: Floats,
    total: Ints,
    squares: Ints,
) -> None:
    """Take one leaf (level 0) or one node into a state."""
    if level == 0:
        if live[at]:
            visit(at, value, bits, missing, low, state, extremes, total, squares)
        return
    node = bases[level - 1] + at
    merge(node_state[node], node_extremes[node], state, extremes)
    for j in range(total.shape[0]):
        total[j] += node_total[node, j]
    for j in range(squares.shape[0]):
        squares[j] += node_squares[node, j]
