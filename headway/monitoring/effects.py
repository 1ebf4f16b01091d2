"""How far counts have moved from the reference's, for all features of many windows at once.

Two measures per feature. The population stability index over its bins (missing and "other" among them), each share
with half a count added, so that one value in an empty bin weighs little: PSI = sum (q - p) ln(q / p). For numbers also
the Wasserstein distance in standard deviations of the training rows, each bin at its mean training value; it takes no
account of missing ones.

Without drift PSI is about chi-squared with B - 1 degrees of freedom times 1/n + 1/m (Yurdakul 2018), so a PSI counts
only above that distribution's 99.9th percentile, however small the sample. The effect of a feature is the larger of
PSI and distance, each as a multiple of the level at which it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.reference import Bins, Column, Floats, Ints

Counts: TypeAlias = NDArray[np.floating[Any]]

PSI_CONFIDENCE = 0.999
_HALF = 0.5
# Share of the distance that has to go one way.
_ONE_WAY = 0.8


@dataclass(frozen=True)
class Layout:
    """All bins of some features side by side, so that one array holds the counts of a window: [..., bins].

    `starts` is each feature's first bin, `gaps` the way from a bin's mean to the next one's in standard deviations
    (zero after the last and for categories), `present` 0 for the bins of missing values.
    """

    names: tuple[str, ...]
    starts: NDArray[np.intp]
    sizes: NDArray[np.intp]
    feature: NDArray[np.intp]
    gaps: Floats
    present: Floats
    reference: Floats

    @property
    def width(self) -> int:
        """Number of all bins."""
        return len(self.feature)

    def select(self, features: Sequence[int]) -> NDArray[np.intp]:
        """The bins of some features, in their order."""
        return np.concatenate([np.arange(self.starts[f], self.starts[f] + self.sizes[f]) for f in features])


@dataclass(frozen=True)
class Effects:
    """By feature on the last axis: both measures, and the larger as a multiple of the level at which it counts.

    `shift` is the distance with its sign: how far the mean of a number moved.
    """

    psi: Floats
    distance: Floats
    effect: Floats
    shift: Floats

    def direction(self, feature: int) -> str:
        """Which way a feature of one window moved: up, down, or other (a category, a wider or narrower spread)."""
        shift = float(self.shift[feature])
        if abs(shift) < max(_ONE_WAY * float(self.distance[feature]), 1e-12):
            return "other"
        return "up" if shift > 0 else "down"


def layout_of(bins: Sequence[Bins]) -> Layout:
    """Put the bins of features side by side."""
    sizes = np.array([b.size for b in bins], np.intp)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    return Layout(
        tuple(b.name for b in bins),
        starts,
        sizes,
        np.repeat(np.arange(len(bins)), sizes),
        np.concatenate([_gaps(b) for b in bins]),
        np.concatenate([np.append(np.ones(b.size - 1), 0.0) for b in bins]),
        np.concatenate([b.counts for b in bins]),
    )


def _gaps(bins: Bins) -> Floats:
    found = np.zeros(bins.size)
    if bins.numeric and bins.scale > 0:
        found[: bins.size - 2] = np.abs(np.diff(bins.middles)) / bins.scale
    return found


def block_counts(layout: Layout, bins: Sequence[Bins], columns: Mapping[str, Column], blocks: Ints) -> Counts:
    """Counts [blocks, bins] of a window's rows; float32 holds them exactly, and makes products of them quick."""
    size = int(blocks.max()) + 1 if len(blocks) else 0
    found = np.zeros((size, layout.width), np.float32)
    for at, item in enumerate(bins):
        column = columns[item.name]
        place = blocks[: len(column)] * item.size + item.codes(column)
        first = layout.starts[at]
        found[:, first : first + item.size] = np.bincount(place, minlength=size * item.size).reshape(size, item.size)
    return found


def effects(layout: Layout, reference: Counts, current: Counts, psi: float, distance: float) -> Effects:
    """Effects of counts [..., bins] against reference counts of the same or of one shape.

    Args:
        layout: the bins.
        reference: counts [..., bins] or [bins].
        current: counts [..., bins].
        psi: declared level of the PSI; the critical value for these numbers of rows is the least.
        distance: declared level of the distance.
    """
    p, n = _shares(layout, reference)
    q, m = _shares(layout, current)
    index = np.add.reduceat((q - p) * np.log(q / p), layout.starts, axis=-1)
    moved = (_cumulated(layout, reference) - _cumulated(layout, current)) * layout.gaps
    way = np.add.reduceat(np.abs(moved), layout.starts, axis=-1)
    shift = np.add.reduceat(moved, layout.starts, axis=-1)
    level = np.maximum(psi, critical_psi(layout, n, m))
    return Effects(index, way, np.maximum(index / level, way / distance), shift)


def slice_starts(times: Ints, span: int, steps: int) -> Ints:
    """Starts of windows of `span` within the times, `steps` to a window, at most so many that each could hold a row."""
    first, last = int(times.min()), int(times.max())
    step = max(1, span // steps, -(-(last - first) // max(len(times), 1)))
    return np.arange(first, max(last - span + 2, first), step, dtype=np.int64)


def slice_counts(
    layout: Layout, codes: Sequence[NDArray[np.intp]], times: Ints, starts: Ints, span: int
) -> tuple[Counts, Ints]:
    """Counts [slices, bins] of the rows in [start, start + span) for each start, and how many rows these are."""
    order = np.argsort(times, kind="stable")
    begin, end = np.searchsorted(times[order], starts), np.searchsorted(times[order], starts + span)
    parts: list[Counts] = []
    for found, size in zip(codes, layout.sizes, strict=True):
        running = np.zeros((len(times) + 1, size), np.float32)
        running[np.arange(1, len(times) + 1), found[order]] = 1
        np.cumsum(running, axis=0, out=running)
        parts.append(running[end] - running[begin])
    return np.concatenate(parts, axis=1), (end - begin).astype(np.int64)


def critical_psi(layout: Layout, n: Floats, m: Floats) -> Floats:
    """The PSI that 99.9 % of undrifted windows stay below, for numbers of rows [..., features]."""
    quantiles = np.array([_quantile(int(size)) for size in layout.sizes])
    return quantiles * (1 / np.maximum(n, 1) + 1 / np.maximum(m, 1))


@lru_cache(maxsize=4096)
def _quantile(bins: int) -> float:
    from scipy.special import chdtri

    return float(chdtri(max(bins - 1, 1), 1 - PSI_CONFIDENCE))


def _shares(layout: Layout, counts: Counts) -> tuple[Floats, Floats]:
    counts = np.asarray(counts, np.float64)
    rows = np.add.reduceat(counts, layout.starts, axis=-1)
    whole = (rows + _HALF * layout.sizes)[..., layout.feature]
    return (counts + _HALF) / whole, rows


def _cumulated(layout: Layout, counts: Counts) -> Floats:
    """The share of present values in this or an earlier bin of the same feature."""
    held = np.asarray(counts, np.float64) * layout.present
    total = np.add.reduceat(held, layout.starts, axis=-1)
    running = np.cumsum(held, axis=-1)
    before = (running - held)[..., layout.starts]
    return (running - before[..., layout.feature]) / np.maximum(total, 1)[..., layout.feature]
