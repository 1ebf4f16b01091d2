"""A/A calibration: how large effects become when nothing has moved, and the level above which they count.

Pairs of windows are drawn from the reference itself, whole blocks with replacement, and each pair's largest effect over
all features is noted. The threshold is the multiple of the declared levels that at most half a percent of the pairs
pass, so that a model raises by chance once in 200 windows: with weeks as windows well below once in 90 days. It is
never below 1: levels are raised, not lowered. Windows of fewer rows vary more; sizes are calibrated one by one.

Pairs drawn like that know nothing of time: in real data every week has its own weather, and no week looks like the
year. So the reference is also cut into windows in time, each against the whole, in steps of a quarter. Per feature and
measure the level is a common multiple of what nine of ten of its windows stay below; the multiple is the smallest at
which the windows that pass any level would, with all else that chance raises, stay within one in 90 days. What moves
less than the reference's own windows did is season. With fewer windows than that takes, none may pass, and the rate
says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.effects import Counts, Layout, block_counts, effects, layout_of, slice_counts, slice_starts
from headway.monitoring.reference import Calibration, Floats, Reference

PAIRS = 1_000
RATE = 0.005
SEED = 20130901
DAYS = 90.0
LEAST_WINDOWS = 4
_STEPS = 4
_COMMON = 0.9
_LEAST_ROWS = 100
_PAIRS_AT_ONCE = 250


def calibrate(
    reference: Reference,
    psi: float,
    distance: float,
    sizes: Sequence[int],
    *,
    pairs: int = PAIRS,
    rate: float = RATE,
    seed: int = SEED,
    span: int | None = None,
    days: float = 7.0,
) -> Calibration:
    """Thresholds for windows of these sizes (rows), by the features that the sample holds.

    Args:
        reference: bins and sample.
        psi: declared level of the PSI.
        distance: declared level of the distance.
        sizes: rows of windows.
        pairs: A/A pairs per size, at least 200.
        rate: share of pairs that may pass.
        seed: of the draws; the same seed gives the same thresholds.
        span: length of a window in microseconds, for windows in time; None leaves them out.
        days: the same in days, for the rate that is allowed.
    """
    if pairs < 200:
        raise ValueError(f"{pairs} pairs are too few to calibrate with, the least is 200")
    thresholds: dict[int, float] = {}
    rates: dict[int, float] = {}
    for size in sizes:
        largest = np.sort(_largest_effects(reference, psi, distance, size, pairs, seed))
        passing = int(rate * pairs)
        thresholds[size] = max(1.0, float(largest[pairs - 1 - passing]) * (1 + 1e-9))
        rates[size] = (float((largest > thresholds[size]).sum()) + 1) / (pairs + 1)
    seasons, windows, passing_share = ({}, 0, 0.0) if span is None else _seasons(reference, span, days / DAYS, rate)
    return Calibration(thresholds, rates, pairs, seed, seasons, windows, passing_share)


def sizes_up_to(minimum: int, rows: int) -> list[int]:
    """`minimum` and at most four doublings up to a number of rows: the sizes that a reference is calibrated for.

    A larger window is judged by the largest of them, which is on the safe side.
    """
    return [size for size in (minimum * 2**i for i in range(5)) if size == minimum or size <= rows]


def _seasons(
    reference: Reference, span: int, allowed: float, chance: float
) -> tuple[dict[str, tuple[float, float]], int, float]:
    """Levels by feature (PSI, distance), the number of windows, and the share of them that passes any level."""
    sample = reference.sample
    bins = [reference.bins[n] for n in sample.columns if n in reference.bins and not reference.bins[n].constant]
    if not bins or sample.times is None or not len(sample.times):
        return {}, 0, 0.0
    first, last = int(sample.times.min()), int(sample.times.max())
    windows = (last - first + 1) // span
    if windows < LEAST_WINDOWS or sample.rows < windows * _LEAST_ROWS:
        return {}, 0, 0.0
    layout = layout_of(bins)
    starts = slice_starts(sample.times, span, _STEPS)
    codes = [b.codes(sample.columns[b.name]) for b in bins]
    counts, rows = slice_counts(layout, codes, sample.times, starts, span)
    counts = counts[rows >= max(_LEAST_ROWS, np.median(rows) / 2)]
    if len(counts) < LEAST_WINDOWS * _STEPS // 2:
        return {}, 0, 0.0
    found = effects(layout, layout.reference, counts, 1.0, 1.0)
    measured = np.concatenate([found.psi, found.distance], axis=1)
    common = np.maximum(np.quantile(measured, _COMMON, axis=0), 1e-9)
    worst = np.sort((measured / common).max(axis=1))[::-1]
    may_pass = max(int((allowed - chance) * (windows + 1)) - 1, 0)
    multiple = max(1.0, float(worst[min(may_pass * _STEPS, len(worst) - 1)]) * (1 + 1e-9))
    levels = np.split(common * multiple, 2)
    return (
        {b.name: (float(levels[0][i]), float(levels[1][i])) for i, b in enumerate(bins)},
        windows,
        (may_pass + 1) / (windows + 1),
    )


def _largest_effects(reference: Reference, psi: float, distance: float, size: int, pairs: int, seed: int) -> Floats:
    sample = reference.sample
    bins = [reference.bins[n] for n in sample.columns if n in reference.bins and not reference.bins[n].constant]
    if not bins or not sample.rows:
        return np.zeros(pairs)
    layout = layout_of(bins)
    rng = np.random.default_rng([seed, size])
    counts = None if sample.entity is None else block_counts(layout, bins, sample.columns, sample.blocks)
    found: list[Floats] = []
    for first in range(0, pairs, _PAIRS_AT_ONCE):
        some = min(_PAIRS_AT_ONCE, pairs - first)
        if counts is None:
            current, against = (_drawn_rows(layout, rows, some, rng) for rows in (size, sample.rows))
        else:
            drawn = max(1, round(size * len(counts) / sample.rows))
            current, against = (_drawn_blocks(counts, blocks, some, rng) for blocks in (drawn, len(counts)))
        found.append(effects(layout, against, current, psi, distance).effect.max(axis=1))
    return np.concatenate(found)


def _drawn_blocks(counts: Counts, blocks: int, pairs: int, rng: np.random.Generator) -> Counts:
    """Counts [pairs, bins] of windows of so many blocks, drawn with replacement."""
    drawn = rng.integers(len(counts), size=(pairs, blocks)) + len(counts) * np.arange(pairs)[:, None]
    times = np.bincount(drawn.ravel(), minlength=pairs * len(counts)).reshape(pairs, len(counts))
    return times.astype(np.float32) @ counts


def _drawn_rows(layout: Layout, rows: int, pairs: int, rng: np.random.Generator) -> Floats:
    """Rows that stand alone, each feature by itself: their largest effect is no smaller than with features together."""
    parts: list[NDArray[np.int64]] = []
    for start, size in zip(layout.starts, layout.sizes, strict=True):
        known = layout.reference[start : start + size]
        parts.append(rng.multinomial(rows, known / known.sum(), size=pairs))
    return np.concatenate(parts, axis=1).astype(np.float64)
