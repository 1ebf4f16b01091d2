"""Compiled grouping and sorting. Imported on first use only, since it brings numba.

Columns that are constant are passed as empty arrays and skipped. A plain `0` as an argument would be a type of its
own to the compiler and cost a second compilation, hence `np.int64(0)`.
"""

from __future__ import annotations

import numpy as np

from headway.features.kernel.jit import Flags, Indices, Ints, compiled, inner

RUN = 16


@compiled
def group_offsets(key: Ints, valid: Flags, groups: int) -> Ints:
    """Start of each group in key order, length groups + 1; negative keys and invalid entries are left out."""
    offsets = np.zeros(groups + 1, np.int64)
    for i in range(key.shape[0]):
        k = key[i]
        if k >= 0 and (valid.shape[0] == 0 or valid[i]):
            offsets[k + 1] += 1
    for g in range(groups):
        offsets[g + 1] += offsets[g]
    return offsets


@compiled
def group_indices(key: Ints, valid: Flags, offsets: Ints) -> Indices:
    """Row indices in key order, ascending inside each group (a counting sort)."""
    at = offsets[:-1].copy()
    index = np.empty(offsets[-1], np.int32)
    for i in range(key.shape[0]):
        k = key[i]
        if k >= 0 and (valid.shape[0] == 0 or valid[i]):
            index[at[k]] = i
            at[k] += 1
    return index


@compiled
def hand_out(cost: Ints, order: Ints, workers: int) -> Ints:
    """Worker of each group: the dearest first (the end of `order`), each to the worker with the least so far."""
    load = np.zeros(workers, np.int64)
    owner = np.zeros(cost.shape[0], np.int64)
    for j in range(cost.shape[0] - 1, -1, -1):
        g = order[j]
        least = 0
        for w in range(1, workers):
            if load[w] < load[least]:
                least = w
        owner[g] = least
        load[least] += cost[g]
    return owner


@inner
def sort_pairs(keys: Ints, index: Indices, start: int, stop: int, keys2: Ints, index2: Indices) -> None:
    """Stable merge sort of keys[start:stop] carrying index along; keys2 and index2 are scratch of the same shape."""
    for lo in range(start, stop, RUN):
        for i in range(lo + 1, min(lo + RUN, stop)):
            k = keys[i]
            r = index[i]
            j = i - 1
            while j >= lo and keys[j] > k:
                keys[j + 1] = keys[j]
                index[j + 1] = index[j]
                j -= 1
            keys[j + 1] = k
            index[j + 1] = r
    width = RUN
    while width < stop - start:
        for lo in range(start, stop, 2 * width):
            mid = min(lo + width, stop)
            hi = min(lo + 2 * width, stop)
            if mid >= hi or keys[mid - 1] <= keys[mid]:
                continue
            # Only the left half moves away; the merge then fills the range in place from the left.
            for i in range(lo, mid):
                keys2[i] = keys[i]
                index2[i] = index[i]
            a = lo
            b = mid
            out = lo
            while a < mid and b < hi:
                if keys[b] < keys2[a]:
                    keys[out] = keys[b]
                    index[out] = index[b]
                    b += 1
                else:
                    keys[out] = keys2[a]
                    index[out] = index2[a]
                    a += 1
                out += 1
            while a < mid:
                keys[out] = keys2[a]
                index[out] = index2[a]
                a += 1
                out += 1
        width *= 2


@inner
def sort_by_columns(
    index: Indices, n: int, c0: Ints, c1: Ints, c2: Ints, c3: Ints, keys: Ints, keys2: Ints, index2: Indices
) -> None:
    """Sort index[:n] by (c0, c1, c2, c3) of the rows it names, then by its present order.

    Later columns are looked at only inside runs that are equal so far. keys, keys2, index2 are scratch of at least n.
    """
    for i in range(n):
        keys[i] = c0[index[i]]
    sort_pairs(keys, index, np.int64(0), n, keys2, index2)
    for level in range(1, 4):
        column = c1 if level == 1 else (c2 if level == 2 else c3)
        if column.shape[0] == 0:
            continue
        lo = 0
        while lo < n:
            first = index[lo]
            hi = lo + 1
            while hi < n:
                other = index[hi]
                if c0[other] != c0[first]:
                    break
                if level > 1 and c1.shape[0] > 0 and c1[other] != c1[first]:
                    break
                if level > 2 and c2.shape[0] > 0 and c2[other] != c2[first]:
                    break
                hi += 1
            if hi - lo > 1:
                for i in range(lo, hi):
                    keys[i] = column[index[i]]
                sort_pairs(keys, index, lo, hi, keys2, index2)
            lo = hi


@compiled
def sort_observations(index: Indices, q: Ints, offsets: Ints, owner: Ints, worker: int, sorted_q: Ints) -> None:
    """Sort each of the worker's groups of observations by instant; sorted_q gets the instants in that order."""
    longest = 0
    for g in range(owner.shape[0]):
        if owner[g] == worker:
            longest = max(longest, offsets[g + 1] - offsets[g])
    keys = np.empty(longest, np.int64)
    keys2 = np.empty(longest, np.int64)
    rows = np.empty(longest, np.int32)
    rows2 = np.empty(longest, np.int32)
    for g in range(owner.shape[0]):
        lo = offsets[g]
        n = offsets[g + 1] - lo
        if owner[g] != worker or n == 0:
            continue
        for i in range(n):
            rows[i] = index[lo + i]
            keys[i] = q[rows[i]]
        sort_pairs(keys, rows, np.int64(0), n, keys2, rows2)
        for i in range(n):
            index[lo + i] = rows[i]
            sorted_q[lo + i] = keys[i]


@compiled
def version_ends(
    offsets: Ints,
    index: Indices,
    owner: Ints,
    worker: int,
    key: Ints,
    event_time: Ints,
    available_time: Ints,
    sequence: Ints,
    end: Ints,
) -> bool:
    """For each row, the instant from which a later version of its identity is known; True where key or time move.

    `offsets` and `index` group the rows by identity. Rows that are never superseded keep the greatest int64.
    """
    longest = 0
    for g in range(owner.shape[0]):
        if owner[g] == worker:
            longest = max(longest, offsets[g + 1] - offsets[g])
    keys = np.empty(longest, np.int64)
    keys2 = np.empty(longest, np.int64)
    rows = np.empty(longest, np.int32)
    rows2 = np.empty(longest, np.int32)
    none = np.empty(0, np.int64)
    moved = False
    for g in range(owner.shape[0]):
        lo = offsets[g]
        n = offsets[g + 1] - lo
        if owner[g] != worker or n < 2:
            continue
        for i in range(n):
            rows[i] = index[lo + i]
        sort_by_columns(rows, n, available_time, sequence, none, none, keys, keys2, rows2)
        for i in range(n - 1):
            a = rows[i]
            b = rows[i + 1]
            end[a] = available_time[b]
            if key[a] != key[b] or event_time[a] != event_time[b]:
                moved = True
    return moved
