"""Quality of answers whose labels are mature: AUC, log loss, calibration error, rate, by segment; confusion tables.

The metrics and their day-block bootstrap are those of the evaluation (`headway.registry.metrics`), so a week's number
can stand beside the one that the version was promoted with. A segment below its minimum of rows is "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.registry.evaluation import SEED
from headway.registry.metrics import (
    Counts,
    Floats,
    Interval,
    auc_statistic,
    calibration_statistic,
    day_counts,
    interval,
    log_loss_statistic,
)

RESAMPLES = 400
CONFIDENCE = 0.95
_STATISTICS = {"auc": auc_statistic, "log_loss": log_loss_statistic, "calibration_error": calibration_statistic}


@dataclass(frozen=True)
class Judged:
    """Scores (probabilities) and labels (0 or 1) of mature answers; `day` numbers the blocks; arrays are [n]."""

    scores: Floats
    labels: Floats
    day: NDArray[np.int64]
    segments: Mapping[str, NDArray[np.object_]] = field(default_factory=dict)

    def take(self, rows: NDArray[np.bool_]) -> Judged:
        """Some of them."""
        return Judged(
            self.scores[rows], self.labels[rows], self.day[rows], {n: v[rows] for n, v in self.segments.items()}
        )


@dataclass(frozen=True)
class Quality:
    """What scores were worth. `rate` is the share of positives, `mean_score` what the scores said it would be.

    A metric that the data do not define is None.
    """

    rows: int
    positives: int
    days: int
    rate: float | None
    mean_score: float | None
    metrics: Mapping[str, Interval | None]


def measure_quality(judged: Judged, resamples: int = RESAMPLES) -> Quality:
    """Every metric with its interval from days drawn with replacement."""
    rows = len(judged.labels)
    present, day = np.unique(judged.day, return_inverse=True)
    days = max(1, len(present))
    counts = day_counts(days, resamples, SEED)
    metrics = {name: _interval(name, judged, day, days, counts) for name in _STATISTICS}
    return Quality(
        rows,
        int(judged.labels.sum()),
        len(present),
        float(judged.labels.mean()) if rows else None,
        float(judged.scores.mean()) if rows else None,
        metrics,
    )


def measure_segments(judged: Judged, minimum: Mapping[str, int]) -> dict[str, dict[str, Quality | None]]:
    """Quality by value of each segment column; None, which is "unknown", where there are fewer rows than the minimum.

    Args:
        judged: mature answers.
        minimum: rows by column.
    """
    found: dict[str, dict[str, Quality | None]] = {}
    for column, values in judged.segments.items():
        found[column] = {}
        for value in sorted(set(values.tolist())):
            inside = np.asarray(values == value)
            enough = int(inside.sum()) >= minimum[column]
            found[column][value] = measure_quality(judged.take(inside)) if enough else None
    return found


def _interval(name: str, judged: Judged, day: NDArray[np.intp], days: int, counts: Counts) -> Interval | None:
    if not len(judged.labels):
        return None
    place = day.astype(np.int64)
    made = _STATISTICS[name](judged.scores, judged.labels, place, days, np.ones(len(judged.labels)))
    return None if made is None else interval(made, days, counts, CONFIDENCE)


@dataclass(frozen=True)
class Confusion:
    """How often each class was said when each was true: `counts[t][s]`, both in the order of `classes`."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        return {"classes": list(self.classes), "counts": [list(row) for row in self.counts]}


def confusion(truth: Sequence[str], said: Sequence[str], classes: Sequence[str] = ()) -> Confusion:
    """The confusion table of text classes. Classes are text and nothing else: "101" and "0101" are two.

    Args:
        truth: the class of each label.
        said: the class of each answer.
        classes: all that there are, in the order of the table; none: those that occur, sorted as text.

    Raises:
        TypeError: a class is no text; a number that looks like a class is not that class.
        ValueError: the two have different lengths, or a class is not among `classes`.
    """
    if len(truth) != len(said):
        raise ValueError(f"{len(truth)} labels and {len(said)} answers")
    for value in (*truth, *said, *classes):
        if not isinstance(value, str):
            raise TypeError(f"class {value!r:.80} is a {type(value).__name__}; classes are text")
    order = list(dict.fromkeys(classes)) or sorted({*truth, *said})
    place = {name: i for i, name in enumerate(order)}
    unknown = sorted({*truth, *said} - set(place))
    if unknown:
        raise ValueError(f"classes {unknown!r:.200} are not among {order!r:.200}")
    table = np.zeros((len(order), len(order)), np.int64)
    np.add.at(table, ([place[t] for t in truth], [place[s] for s in said]), 1)
    return Confusion(tuple(order), tuple(tuple(int(n) for n in row) for row in table))
