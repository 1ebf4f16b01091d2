"""How good scores are, and how sure that is: AUC, log loss, calibration error, paired block bootstrap by day.

Rows carry weights (1 when none are given). A metric that the data do not define (no row, one class, a score that is
not finite) is None: no evidence, which is neither good nor bad.

Days are the blocks: flights of one day share weather and delays, so rows are not independent, and days nearly are.
One resample draws as many days as there are, with replacement, for all models at once (paired). A resample weighs every
row by how often its day was drawn, and under such weights the AUC is a ratio of two quadratic forms in the day counts:
with K[d, e] the concordance of day d's positives with day e's negatives, AUC = c'Kc / (c'P)(c'N). K is made once per
model, so a thousand resamples cost one small matrix product, and the result is exact, ties included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Statistic: TypeAlias = Callable[[Counts], Floats]

PROBABILITY_FLOOR = 1e-15
CALIBRATION_BINS = 20
# Columns of the day-by-day matrix that are made at one time: bounds memory to rows x 32 numbers.
_DAYS_AT_ONCE = 32


@dataclass(frozen=True)
class Interval:
    """A metric or a difference: its value on all rows, and the percentile interval of its resamples.

    `lower` and `upper` are None when resamples in which it is undefined reach that end: they count as the worst case.
    """

    value: float
    lower: float | None
    upper: float | None


def auc(scores: Floats, labels: Floats, weights: Floats | None = None) -> float | None:
    """Return the area under the ROC curve: the weighted share of (positive, negative) pairs that are in order.

    A tied pair counts one half (Mann-Whitney). `scores`, `labels` (0 or 1) and `weights` are [n].
    """
    weights = _weights(labels, weights)
    found = auc_statistic(scores, labels, np.zeros(len(labels), dtype=np.int64), 1, weights)
    return None if found is None else _finite(found(np.ones((1, 1), dtype=np.int64))[0])


def log_loss(scores: Floats, labels: Floats, weights: Floats | None = None) -> float | None:
    """Return the weighted mean of -log p(label); probabilities are kept 1e-15 away from 0 and 1."""
    found = log_loss_statistic(scores, labels, np.zeros(len(labels), dtype=np.int64), 1, _weights(labels, weights))
    return None if found is None else _finite(found(np.ones((1, 1), dtype=np.int64))[0])


def calibration_error(scores: Floats, labels: Floats, weights: Floats | None = None) -> float | None:
    """Return the expected calibration error over 20 bins of equal weight.

    Rows are sorted by score and cut into bins of equal weight; rows of one score stay together, in the bin of the
    middle of their weight, so the order of rows does not matter. The error is the weighted mean over bins of
    |mean score - share of positives|.
    """
    day = np.zeros(len(labels), dtype=np.int64)
    found = calibration_statistic(scores, labels, day, 1, _weights(labels, weights))
    return None if found is None else _finite(found(np.ones((1, 1), dtype=np.int64))[0])


def auc_statistic(
    scores: Floats, labels: Floats, day: NDArray[np.int64], days: int, weights: Floats
) -> Statistic | None:
    """Return the AUC as a function of day counts [resamples, days]; NaN where a resample has one class only.

    None when the data define no AUC at all.
    """
    positive = labels > 0.5
    if not _defined(scores, weights) or not weights[positive].any() or not weights[~positive].any():
        return None
    concordance = _concordance(scores, positive, day, days, weights)
    positives = _sums(day, weights * positive, days)
    negatives = _sums(day, weights * ~positive, days)

    def statistic(counts: Counts) -> Floats:
        drawn = counts.astype(np.float64)
        pairs = (drawn @ positives) * (drawn @ negatives)
        ordered = ((drawn @ concordance) * drawn).sum(axis=1)
        return np.divide(ordered, pairs, out=np.full(len(drawn), np.nan), where=pairs > 0)

    return statistic


def log_loss_statistic(
    scores: Floats, labels: Floats, day: NDArray[np.int64], days: int, weights: Floats
) -> Statistic | None:
    """Return the log loss as a function of day counts; None when it is undefined."""
    if not _defined(scores, weights):
        return None
    kept = np.clip(scores, PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    loss = -np.where(labels > 0.5, np.log(kept), np.log1p(-kept))
    sums, total = _sums(day, weights * loss, days), _sums(day, weights, days)

    def statistic(counts: Counts) -> Floats:
        return _ratio(counts @ sums, counts @ total)

    return statistic


def calibration_statistic(
    scores: Floats, labels: Floats, day: NDArray[np.int64], days: int, weights: Floats
) -> Statistic | None:
    """Return the calibration error as a function of day counts, over the bins of all rows; None when undefined."""
    if not _defined(scores, weights):
        return None
    unique, place = np.unique(scores, return_inverse=True)
    mass = _sums(place, weights, len(unique))
    middle = np.cumsum(mass) - mass / 2
    of_score = np.minimum((middle / mass.sum() * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    cell = of_score[place] * days + day
    size = CALIBRATION_BINS * days
    gap = _sums(cell, weights * (scores - labels), size).reshape(CALIBRATION_BINS, days)
    total = _sums(day, weights, days)

    def statistic(counts: Counts) -> Floats:
        return _ratio(np.abs(counts @ gap.T).sum(axis=1), counts @ total)

    return statistic


def day_counts(days: int, resamples: int, seed: int) -> Counts:
    """Return how often each day is drawn, int64 [resamples, days]: `days` draws with replacement in each resample."""
    draws = np.random.default_rng(seed).multinomial(days, np.full(days, 1 / days), size=resamples)
    return draws.astype(np.int64)


def interval(statistic: Statistic, days: int, counts: Counts, confidence: float) -> Interval | None:
    """Return the value of `statistic` on all days and its percentile interval; None when it has no value.

    The ends are taken outwards (no interpolation inwards), and an undefined resample counts as the worst at both ends.
    """
    value = _finite(statistic(np.ones((1, days), dtype=np.int64))[0])
    if value is None:
        return None
    drawn = statistic(counts)
    tail = (1 - confidence) / 2
    low = np.quantile(np.nan_to_num(drawn, nan=-np.inf), tail, method="lower")
    high = np.quantile(np.nan_to_num(drawn, nan=np.inf), 1 - tail, method="higher")
    return Interval(value, _finite(low), _finite(high))


def difference(first: Statistic, second: Statistic) -> Statistic:
    """Return the paired difference first - second."""
    return lambda counts: first(counts) - second(counts)


def _concordance(
    scores: Floats, positive: NDArray[np.bool_], day: NDArray[np.int64], days: int, weights: Floats
) -> Floats:
    """K[d, e]: weight of pairs (positive of day d, negative of day e) in order, tied pairs half."""
    order = np.argsort(scores, kind="stable")
    ranked, is_positive, day, weights = scores[order], positive[order], day[order], weights[order]
    first = np.searchsorted(ranked, ranked, side="left")
    behind = np.searchsorted(ranked, ranked, side="right")
    at = np.flatnonzero(is_positive)
    found = np.zeros((days, days))
    for start in range(0, days, _DAYS_AT_ONCE):
        stop = min(start + _DAYS_AT_ONCE, days)
        below = np.zeros((len(ranked) + 1, stop - start))
        rows = np.flatnonzero(~is_positive & (day >= start) & (day < stop))
        below[rows + 1, day[rows] - start] = weights[rows]
        np.cumsum(below, axis=0, out=below)
        each = weights[at, None] * (below[first[at]] + below[behind[at]]) / 2
        np.add.at(found[:, start:stop], day[at], each)
    return found


def _weights(labels: Floats, weights: Floats | None) -> Floats:
    return np.ones(len(labels)) if weights is None else weights


def _sums(place: NDArray[np.int64], values: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(place, values, size), dtype=np.float64)


def _defined(scores: Floats, weights: Floats) -> bool:
    return bool(weights.any()) and bool(np.isfinite(scores).all())


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
