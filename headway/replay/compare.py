"""What other habits would have cost and given on the same rows: never retraining, and retraining every month.

Every strategy is a list of versions with the instant from which each would have answered. The rows are those that the
server logged: the same feature values, bit for bit, are scored by each version, so nothing but the version differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.catalog.registry_facts import ModelVersion, Prediction
from headway.datasets.zones import DAY_US
from headway.registry.metrics import (
    Interval,
    auc,
    auc_statistic,
    calibration_error,
    day_counts,
    difference,
    interval,
    log_loss,
)
from headway.services import Services
from headway.serving.detail import read_detail
from headway.serving.scoring import score_rows

_MANY = 5_000
_RESAMPLES = 1_000


@dataclass(frozen=True)
class Turn:
    """A version that answers from an instant on (microseconds UTC)."""

    start: int
    version: ModelVersion


@dataclass(frozen=True)
class Strategy:
    """Who answered when, and what it took: trainings after the first version, and their worker seconds."""

    name: str
    turns: tuple[Turn, ...]
    trainings: int = 0
    worker_seconds: float = 0.0


@dataclass(frozen=True)
class AnsweredRows:
    """Answered rows whose outcome is known, in the order in which they were asked.

    `values` holds the logged feature values [rows], `label` 0.0 or 1.0, `score` the answers, `asked` microseconds UTC.
    """

    values: pa.Table
    asked: NDArray[np.int64]
    score: NDArray[np.float64]
    label: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.asked)


@dataclass(frozen=True)
class Quality:
    """Quality of some rows: `auc` is None where only one class occurred."""

    rows: int
    rate: float
    auc: float | None
    log_loss: float | None
    calibration_error: float | None


@dataclass(frozen=True)
class Compared:
    """A strategy's quality by month (`YYYY-MM`) and over all rows."""

    strategy: Strategy
    months: Mapping[str, Quality]
    whole: Quality | None
    scores: NDArray[np.float64] = field(repr=False)


def answered_rows(services: Services, endpoint_id: str, start: int, end: int) -> AnsweredRows:
    """The endpoint's answers between two instants that have a label by now."""
    predictions: list[Prediction] = []
    after = ""
    while page := services.catalog.predictions(services.principal, endpoint_id, start, end, after=after, limit=_MANY):
        predictions += page
        after = page[-1].prediction_id
    labels = services.catalog.current_labels(services.principal, [p.prediction_id for p in predictions])
    known = [p for p in predictions if p.prediction_id in labels and p.asked_at is not None]
    known.sort(key=lambda p: (p.detail_digest, p.row))
    tables: list[pa.Table] = []
    for digest in dict.fromkeys(p.detail_digest for p in known):
        rows = [p.row for p in known if p.detail_digest == digest]
        tables.append(read_detail(services, digest).values.take(pa.array(rows)))
    values = pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
    asked = np.array([p.asked_at for p in known], dtype=np.int64)
    score = np.array([np.nan if p.score is None else p.score for p in known])
    label = np.array([float(labels[p.prediction_id].value) for p in known])  # pyright: ignore[reportArgumentType]
    order = np.argsort(asked, kind="stable")
    return AnsweredRows(
        values.take(pa.array(order)) if len(known) else values, asked[order], score[order], label[order]
    )


def compare(services: Services, rows: AnsweredRows, strategies: Sequence[Strategy]) -> list[Compared]:
    """Score the same rows under every strategy; each version scores a row once, however many strategies name it.

    Raises:
        ContractNotMet, ScoringFailed, TrainerFailed: as `score_rows`.
    """
    versions = {t.version.version: t.version for s in strategies for t in s.turns}
    first = {v: min(t.start for s in strategies for t in s.turns if t.version.version == v) for v in versions}
    scored: dict[int, NDArray[np.float64]] = {}
    for number, version in versions.items():
        mine = np.flatnonzero(rows.asked >= first[number])
        scored[number] = np.full(len(rows), np.nan)
        if len(mine):
            scored[number][mine] = score_rows(services, version, rows.values.take(pa.array(mine)))
    return [_compared(rows, strategy, scored) for strategy in strategies]


def quality(score: NDArray[np.float64], label: NDArray[np.float64]) -> Quality | None:
    """Quality of scored rows; None without any."""
    if not len(label):
        return None
    return Quality(
        len(label), float(label.mean()), auc(score, label), log_loss(score, label), calibration_error(score, label)
    )


def auc_gap(rows: AnsweredRows, first: Compared, second: Compared) -> Interval | None:
    """AUC of `first` less that of `second` over all rows, with its paired 95 % interval by bootstrap of days.

    None where it is not defined (one class, or fewer than two days).
    """
    both = ~np.isnan(first.scores) & ~np.isnan(second.scores)
    if not both.any():
        return None
    _, day = np.unique(rows.asked[both] // DAY_US, return_inverse=True)
    days, weights, label = int(day.max()) + 1, np.ones(int(both.sum())), rows.label[both]
    one, other = (auc_statistic(c.scores[both], label, day, days, weights) for c in (first, second))
    if one is None or other is None or days < 2:
        return None
    return interval(difference(one, other), days, day_counts(days, _RESAMPLES, 0), 0.95)


def month_of(moment: int) -> str:
    """The month of an instant in UTC, `YYYY-MM`."""
    return datetime.fromtimestamp(moment / 1_000_000, UTC).strftime("%Y-%m")


def _compared(rows: AnsweredRows, strategy: Strategy, scored: Mapping[int, NDArray[np.float64]]) -> Compared:
    score = np.full(len(rows), np.nan)
    for turn in sorted(strategy.turns, key=lambda t: t.start):
        later = rows.asked >= turn.start
        score[later] = scored[turn.version.version][later]
    answered = ~np.isnan(score)
    months = np.array([month_of(int(a)) for a in rows.asked])
    found: dict[str, Quality] = {}
    for month in sorted(set(months.tolist())):
        part = (months == month) & answered
        if (one := quality(score[part], rows.label[part])) is not None:
            found[month] = one
    return Compared(strategy, found, quality(score[answered], rows.label[answered]), score)
