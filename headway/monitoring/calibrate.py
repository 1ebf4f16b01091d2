"""A/A calibration: how large effects become when nothing has moved, and the level above which they count.

Pairs of windows are drawn from the reference itself, whole blocks with replacement, and each pair's largest effect over
all features is noted. The threshold is the multiple of the declared levels that at most half a percent of the pairs
pass, so that a model raises by chance once in 200 windows: with weeks as windows well below once in 90 days. It is
never below 1: levels are raised, not lowered. Windows of fewer rows vary more; sizes are calibrated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.effects import Counts, Layout, block_counts, effects, layout_of
from headway.monitoring.reference import Calibration, Floats, Reference

PAIRS = 1_000
RATE = 0.005
SEED = 20130901
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
    return Calibration(thresholds, rates, pairs, seed)


def sizes_up_to(minimum: int, rows: int) -> list[int]:
    """`minimum`, and its doublings up to a number of rows: the sizes that a reference is calibrated for."""
    found = [minimum]
    while found[-1] * 2 <= rows:
        found.append(found[-1] * 2)
    return found


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
