"""The compiled loop of one observation over the windows of one entity. Imported on first use, since this brings numba.

It chooses, adds and rounds by the functions of `kernel.compiled`, so its answers have the kernel's bits. It stands
apart from them because the kernel's files are part of what a feature set's code digest names.
"""

# The compiler types scalars by itself; numpy's stubs see arrays in them.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.features.kernel import compiled as kernel
from headway.features.kernel.compiled import (
    COUNT,
    DISTINCT,
    FIRST,
    FIRST_VALUE,
    GREATEST,
    LAST,
    LAST_VALUE,
    LEAST,
    MAX,
    MEAN,
    MIN,
    STD,
    SUM,
    VALUES,
    clear,
    deviation,
    distinct,
    value_of,
    visit,
    window_edge,
)
from headway.features.kernel.jit import Flags, Floats, Ints, compiled
from trainer.blobs import digest_bytes

# What is counted, beside the kernel's aggregates.
ROWS = -1
WITH_VALUE = -2


def _of_kernel(digest: str) -> Callable[..., None]:
    """The loop. Machine code is kept by source and captured values, so another kernel compiles it anew."""

    def windows_at(
        times: Ints,
        values: Floats,
        missing: Flags,
        units: Ints,
        time: int,
        q: int,
        durations: Ints,
        features: Ints,
        counts: Ints,
        out: Floats,
        null: Flags,
    ) -> None:
        """Answer one observation over the rows of one key as `aggregate` does, in one pass from the newest row back.

        `times` is (event time, availability, end; rows): what `candidates` keeps, in rank order. `values` and `missing`
        are (columns, rows), `units` is (low, limbs, square limbs; columns). Durations ascend. `features` is (features;
        column, aggregate or `ROWS` or `WITH_VALUE`, duration, least number of values). `counts` is filled with (rows,
        newest event time; durations), `out` and `null` with the value of each feature, and whether it is null.
        """
        _ = digest
        event = times[0]
        upper = np.int64(0)
        above = np.int64(event.shape[0])
        while upper < above:
            middle = (upper + above) >> 1
            if event[middle] <= q:
                upper = middle + 1
            else:
                above = middle
        state = np.empty(5, np.int64)
        extremes = np.empty(2, np.float64)
        for c in range(values.shape[0]):
            summed = squared = apart = asked = False
            for f in range(features.shape[0]):
                if features[f, 0] == c:
                    asked = True
                    summed = summed or features[f, 1] == SUM or features[f, 1] == MEAN
                    squared = squared or features[f, 1] == STD
                    apart = apart or features[f, 1] == DISTINCT
            if c > 0 and not asked:
                continue
            value = values[c]
            bits = value.view(np.int64)
            low = units[0, c]
            limbs = units[1, c] if summed or squared else np.int64(0)
            square_limbs = units[2, c] if squared else np.int64(0)
            total = np.zeros(limbs, np.int64)
            squares = np.zeros(square_limbs, np.int64)
            digits = np.empty(limbs, np.int64)
            square_digits = np.empty(square_limbs, np.int64)
            spread = np.empty(max(square_limbs, 2 * limbs) + 2, np.int64)
            scratch = upper if apart else np.int64(0)
            keys = np.empty(scratch, np.int64)
            keys2 = np.empty(scratch, np.int64)
            rows = np.empty(scratch, np.int32)
            rows2 = np.empty(scratch, np.int32)
            clear(state, extremes)
            rank = upper
            for d in range(durations.shape[0]):
                edge = window_edge(time, durations[d])
                while rank > 0 and event[rank - 1] >= edge:
                    rank -= 1
                    if times[1, rank] <= q and q < times[2, rank]:
                        visit(rank, value, bits, missing[c], low, state, extremes, total, squares)
                if c == 0:
                    counts[0, d] = state[COUNT]
                    counts[1, d] = event[state[GREATEST]] if state[COUNT] > 0 else FIRST
                s = value_of(total, low, digits) if summed else 0.0
                for f in range(features.shape[0]):
                    if features[f, 0] != c or features[f, 2] != d:
                        continue
                    what = features[f, 1]
                    out[f] = 0.0
                    null[f] = state[VALUES] < features[f, 3]
                    if what == ROWS:
                        out[f] = state[COUNT]
                    elif what == WITH_VALUE:
                        out[f] = state[VALUES]
                    elif what == SUM:
                        out[f] = s
                    elif null[f] or state[VALUES] == 0:
                        continue
                    elif what == MEAN:
                        out[f] = s / state[VALUES]
                    elif what == STD:
                        of_all = total.copy()
                        out[f] = deviation(of_all, squares, state[VALUES], low, digits, square_digits, spread)
                    elif what == MIN:
                        out[f] = extremes[0]
                    elif what == MAX:
                        out[f] = extremes[1]
                    elif what == LEAST:
                        out[f] = value[state[FIRST_VALUE]]
                    elif what == LAST:
                        out[f] = value[state[LAST_VALUE]]
                    elif what == DISTINCT:
                        k = np.int64(0)
                        for i in range(rank, upper):
                            if times[1, i] <= q and q < times[2, i] and not missing[c, i]:
                                keys[k] = bits[i]
                                k += 1
                        out[f] = distinct(keys, k, keys2, rows, rows2)

    return compiled(windows_at)


windows_at = _of_kernel(digest_bytes(Path(kernel.__file__).read_bytes()))
