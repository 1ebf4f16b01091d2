"""The kernel's compiled loops. Imported on first use only, since this brings numba.

All in one file on purpose: machine code is kept on disk, and a file's machine code is thrown away when that file
changes, but not when a file changes from which it took functions.

An instant `q` stands for the observation time under `le`, one microsecond less under `lt`: a row is then visible when
its event time and its availability are both `<= q`, whatever the boundary.
"""

# The compiler types scalars by itself; numpy's stubs see arrays in them.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import math

import numpy as np

from headway.features.kernel.jit import Codes, Flags, Floats, Indices, Ints, compiled, inner

NEVER = np.iinfo(np.int64).max
FIRST = np.iinfo(np.int64).min

# Grouping and sorting
#
# Columns that are constant are passed as empty arrays and skipped. A plain `0` as an argument would be a type of its
# own to the compiler and cost a second compilation, hence `np.int64(0)`.

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


# Exact sums of float64
#
# A sum is a fixed-point integer in signed limbs of 30 bits (the idea of Kulisch's long accumulator, cut to the
# exponents that the data have). Adding is exact, hence free of order, and only the last step rounds: the same numbers
# give the same bits whatever else was loaded. Carries wait in the upper half of each int64, which holds 2**31
# additions.

BITS = 30
MASK = (1 << BITS) - 1
FRACTION = (1 << 52) - 1
GROWTH = 32
SIGNIFICANT = 53
SPLIT = float((1 << 27) + 1)


@compiled
def exponent_range(bits: Ints, null: Flags) -> tuple[int, int]:
    """Exponents of the lowest and one above the highest set bit among the values that are not null; (0, 1) if none.

    `bits` are the float64 values seen as int64. A row that is not finite gives (1, -1 - row).
    """
    low = 5000
    high = -5000
    for i in range(bits.shape[0]):
        if null.shape[0] > 0 and null[i]:
            continue
        biased = (bits[i] >> 52) & 0x7FF
        if biased == 0x7FF:
            return 1, -1 - i
        m = bits[i] & FRACTION
        if biased > 0:
            m |= FRACTION + 1
        elif m == 0:
            continue
        e = max(biased, 1) - 1075
        if e + SIGNIFICANT > high:
            high = e + SIGNIFICANT
        # Most values share their lowest bits with the ones before; only a lower bit needs the slow search for it.
        if e < low and (low - e > 52 or m & ((1 << (low - e)) - 1) != 0):
            while m & 1 == 0:
                m >>= 1
                e += 1
            low = min(low, e)
    if low > high:
        return 0, 1
    return low, high


@compiled
def limbs_needed(low: int, high: int) -> int:
    """Limbs that hold 2**31 additions of numbers between 2**low and 2**high, with room for the sign."""
    return (high - low + GROWTH) // BITS + 4


@inner
def add(total: Ints, bits: int, low: int) -> None:
    """Add one float64 (as its bits) to the sum whose unit is 2**low."""
    m = bits & FRACTION
    biased = (bits >> 52) & 0x7FF
    if biased > 0:
        m |= FRACTION + 1
    if m == 0:
        return
    e = max(biased, 1) - 1075 - low
    if e < 0:
        m >>= -e
        e = 0
    j = e // BITS
    shift = e - j * BITS
    bottom = (m & MASK) << shift
    top = (m >> BITS) << shift
    if bits < 0:
        total[j] -= bottom & MASK
        total[j + 1] -= (bottom >> BITS) + (top & MASK)
        total[j + 2] -= top >> BITS
    else:
        total[j] += bottom & MASK
        total[j + 1] += (bottom >> BITS) + (top & MASK)
        total[j + 2] += top >> BITS


@inner
def add_square(total: Ints, bits: int, low: int, sign: int) -> None:
    """Add the exact square of one float64, times sign, to the sum whose unit is 2**(2 low)."""
    m = bits & FRACTION
    biased = (bits >> 52) & 0x7FF
    if biased > 0:
        m |= FRACTION + 1
    if m == 0:
        return
    e = max(biased, 1) - 1075 - low
    if e < 0:
        m >>= -e
        e = 0
    j = 2 * e // BITS
    shift = 2 * e - j * BITS
    bottom = m & MASK
    top = m >> BITS
    part = bottom * bottom
    for step in range(4):
        digit = (part & MASK) << shift
        total[j + step] += sign * (digit & MASK)
        total[j + step + 1] += sign * (digit >> BITS)
        part >>= BITS
        if step == 0:
            part += 2 * bottom * top
        elif step == 1:
            part += top * top


@inner
def settle(total: Ints, digits: Ints) -> bool:
    """Write the magnitude of the sum as digits of 30 bits; True when the sum is negative."""
    carry = 0
    n = total.shape[0]
    for i in range(n):
        v = total[i] + carry
        digits[i] = v & MASK
        carry = v >> BITS
    if carry >= 0:
        return False
    carry = 1
    for i in range(n):
        v = (digits[i] ^ MASK) + carry
        digits[i] = v & MASK
        carry = v >> BITS
    return True


@inner
def rounded(digits: Ints) -> tuple[float, int]:
    """The digits as m * 2**e with m an integer of at most 53 bits, rounded half to even; (0.0, 0) for nothing."""
    top = digits.shape[0] - 1
    while top >= 0 and digits[top] == 0:
        top -= 1
    if top < 0:
        return 0.0, 0
    # Three digits hold at least 61 significant bits; the part below is one sticky bit.
    head = digits[top]
    used = 0
    while (head >> used) > 0:
        used += 1
    take = 60 - used
    second = digits[top - 1] if top >= 1 else 0
    third = digits[top - 2] if top >= 2 else 0
    low = (second << BITS) | third
    m = (head << take) | (low >> (60 - take))
    sticky = (low & ((1 << (60 - take)) - 1)) != 0
    for i in range(top - 2):
        if digits[i] != 0:
            sticky = True
            break
    e = top * BITS - take
    extra = 60 - SIGNIFICANT
    rest = m & ((1 << extra) - 1)
    m >>= extra
    half = 1 << (extra - 1)
    if rest > half or (rest == half and (sticky or m & 1 == 1)):
        m += 1
    return float(m), e + extra


@inner
def value_of(total: Ints, low: int, digits: Ints) -> float:
    """The sum as the nearest float64 (ties to even); `digits` is scratch of the same length."""
    negative = settle(total, digits)
    m, e = rounded(digits)
    value = math.ldexp(m, e + low)
    return -value if negative else value


@inner
def mean_slip(total: Ints, count: int, low: int, digits: Ints) -> tuple[float, int]:
    """How far count * (rounded mean) is from the exact sum, as m * 2**e. `total` is used up.

    The sum is taken as a rounded part and the rest, scaled near 1, and the product as Dekker's exact pair.
    """
    whole = value_of(total, low, digits)
    if whole == 0.0 or math.isinf(whole):
        return 0.0, 0
    add(total, np.float64(-whole).view(np.int64), low)
    rest = value_of(total, low, digits)
    _, e = math.frexp(whole)
    mean = math.ldexp(whole / count, -e)
    factor = float(count)
    product = factor * mean
    cut = mean * SPLIT
    mean_top = cut - (cut - mean)
    cut = factor * SPLIT
    factor_top = cut - (cut - factor)
    mean_rest = mean - mean_top
    factor_rest = factor - factor_top
    error = ((mean_top * factor_top - product) + mean_top * factor_rest + mean_rest * factor_top) + (
        mean_rest * factor_rest
    )
    return ((product - math.ldexp(whole, -e)) + error) - math.ldexp(rest, -e), e


@inner
def deviation(total: Ints, squares: Ints, count: int, low: int, digits: Ints, squared: Ints, spread: Ints) -> float:
    """Sample standard deviation around the rounded mean, as in two passes, but from exact sums. `total` is used up.

    With S the sum, Q the sum of squares and m the rounded mean, sum((x - m)^2) = (n Q - S^2 + (n m - S)^2) / n.
    The first difference is exact; what cancels in it cannot hurt. digits and squared are scratch like total and
    squares; spread is scratch of max(len(squares), 2 len(total)) + 2.
    """
    settle(total, digits)
    settle(squares, squared)
    n = digits.shape[0]
    spread[:] = 0
    carry = np.int64(0)
    for i in range(squared.shape[0]):
        v = squared[i] * count + carry
        spread[i] = v & MASK
        carry = v >> BITS
    i = squared.shape[0]
    while carry > 0:
        spread[i] = carry & MASK
        carry >>= BITS
        i += 1
    used = n
    while used > 0 and digits[used - 1] == 0:
        used -= 1
    for i in range(used):
        borrow = np.int64(0)
        for j in range(used):
            v = spread[i + j] - digits[i] * digits[j] - borrow
            spread[i + j] = v & MASK
            borrow = -(v >> BITS)
        j = i + used
        while borrow > 0:
            v = spread[j] - borrow
            spread[j] = v & MASK
            borrow = -(v >> BITS)
            j += 1
    m, e = rounded(spread)
    e += 2 * low
    slip, slip_e = mean_slip(total, count, low, digits)
    if m == 0.0:
        return math.ldexp(abs(slip) / math.sqrt(float(count) * float(count - 1)), slip_e)
    m += math.ldexp(slip * slip, 2 * slip_e - e)
    ratio = m / (float(count) * float(count - 1))
    if e & 1:
        ratio *= 2.0
        e -= 1
    return math.ldexp(math.sqrt(ratio), e // 2)


# Latest known row

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
    `skip` leave a mark in `skipped` instead. `best` is (m, 2): row or -1, and its event time.

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
                available_time,
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
            row[s],
            code[s],
            event[s],
            available[s],
            size[s],
            available_time,
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


@inner
def serve(
    row: Indices,
    code: Indices,
    event: Ints,
    available: Ints,
    size: int,
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
            elif best[p, 0] < 0 or e > best[p, 1] or later(i, best[p, 0], available_time, sequence, row_id):
                best[p, 0] = i
                best[p, 1] = e


@inner
def later(row: int, other: int, available_time: Ints, sequence: Ints, row_id: Ints) -> bool:
    """(availability, sequence, row identity) of one row strictly above that of another at the same event time."""
    if available_time[row] != available_time[other]:
        return available_time[row] > available_time[other]
    if sequence.shape[0] > 0 and sequence[row] != sequence[other]:
        return sequence[row] > sequence[other]
    return row_id.shape[0] > 0 and row_id[row] > row_id[other]


@compiled
def spread(
    offsets: Ints,
    owner: Ints,
    worker: int,
    available_time: Ints,
    sequence: Ints,
    row_id: Ints,
    best: Ints,
    skipped: Flags,
) -> None:
    """Carry the greatest row (and the mark of a skipped one) forward to the later observations of each group."""
    for g in range(owner.shape[0]):
        if owner[g] != worker:
            continue
        for p in range(offsets[g] + 1, offsets[g + 1]):
            if skipped.shape[0] > 0 and skipped[p - 1]:
                skipped[p] = True
            b = best[p - 1, 0]
            if b < 0:
                continue
            c = best[p, 0]
            if (
                c < 0
                or best[p, 1] < best[p - 1, 1]
                or (best[p, 1] == best[p - 1, 1] and not later(c, b, available_time, sequence, row_id))
            ):
                best[p, 0] = b
                best[p, 1] = best[p - 1, 1]


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


# Windows
#
# Per key the candidate versions stand in (event time, availability, sequence, row identity) order; a version's place in
# that order is its rank. A window is a stretch of ranks, and a version in it counts while it is live: known, and not
# yet superseded, at the instant `q` (the observation time under `le`, one microsecond less under `lt`).
# Small windows are scanned. For large ones the instants are followed over a tree on the ranks, into which versions come
# when they become known and from which they go when superseded. Counts, extremes and ranks do not depend on the order
# of work and sums are exact, so both ways give the same bits.

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
    """Edge time - duration, not below the least int64."""
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
