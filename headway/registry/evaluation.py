"""What a candidate's scores on held-out later rows amount to: the numbers that gates look at and the card shows.

Rows whose label is not mature are counted and take no part. Every model is measured on the same rows and the same
resampled days.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from headway.artifacts.digests import Json, digest_file
from headway.declaration import Binned, PipelineSpec
from headway.errors import HeadwayError
from headway.registry.metrics import (
    CALIBRATION_BINS,
    Counts,
    Floats,
    Interval,
    Statistic,
    auc_statistic,
    calibration_statistic,
    day_counts,
    difference,
    interval,
    log_loss_statistic,
)
from headway.registry.policy import Policy

if TYPE_CHECKING:
    import pyarrow as pa

CANDIDATE = "candidate"
CHAMPION = "champion"
HISTORICAL_RATE = "historical_rate"
SCORES_FILE = "scores.parquet"
PARTITION = "__partition"
MISSING = "(missing)"
# One fixed seed: a seed that could be chosen is one more way to look until it fits.
SEED = 20130101
_STATISTICS = {"auc": auc_statistic, "log_loss": log_loss_statistic, "calibration_error": calibration_statistic}


class EvaluationRefused(HeadwayError):
    """A table of scores that is not what `trainer.evaluate` writes for this pipeline."""

    def __init__(self, message: str) -> None:
        super().__init__(f"evaluation: {message}", "evaluate the version again: python -m trainer.evaluate")


@dataclass(frozen=True)
class ScoredRows:
    """The mature rows of an evaluation; arrays are [n] in one order.

    `rows` counts all rows, mature or not. `day` is days since 1970, and `blocks` says of what. `segments` holds the
    value of each declared column as text.
    """

    digest: str
    rows: int
    labels: Floats
    day: NDArray[np.int64]
    scores: Mapping[str, Floats]
    segments: Mapping[str, NDArray[np.object_]]
    blocks: str


@dataclass(frozen=True)
class Segment:
    """One value of a segment column: its rows, every metric of every model there, and the candidate's gains of AUC."""

    rows: int
    positives: int
    days: int
    auc: Mapping[str, float | None]
    metrics: Mapping[str, Mapping[str, Interval | None]]
    gains: Mapping[str, Interval | None]


@dataclass(frozen=True)
class Evaluation:
    """The measured evaluation. None stands for what the data do not define.

    `metrics` is model -> metric -> interval; `gains` is reference -> paired difference of AUC, candidate - reference;
    `segments` is column -> value -> segment; `not_finite` counts scores that are no number, by model.
    """

    scores_digest: str
    rows: int
    mature: int
    positives: int
    days: int
    blocks: str
    resamples: int
    confidence: float
    metrics: Mapping[str, Mapping[str, Interval | None]]
    gains: Mapping[str, Interval | None]
    segments: Mapping[str, Mapping[str, Segment]]
    not_finite: Mapping[str, int]

    def to_json(self) -> dict[str, Json]:
        """The evaluation as JSON."""
        return {
            "scores_digest": self.scores_digest,
            "rows": self.rows,
            "mature": self.mature,
            "positives": self.positives,
            "days": self.days,
            "bootstrap": {
                "blocks": self.blocks,
                "resamples": self.resamples,
                "confidence": self.confidence,
                "seed": SEED,
                "calibration_bins": CALIBRATION_BINS,
            },
            "metrics": _metrics_json(self.metrics),
            "gains": {reference: _json(found) for reference, found in self.gains.items()},
            "segments": {c: {v: _segment_json(s) for v, s in found.items()} for c, found in self.segments.items()},
            "not_finite": dict(self.not_finite),
        }


def kept_columns(spec: PipelineSpec) -> tuple[str, ...]:
    """Columns that an evaluation must keep beside the scores: the observation time and the segments."""
    segments = () if spec.evaluation is None else spec.evaluation.segments
    return tuple(dict.fromkeys([spec.label.observation_time, *segments]))


def rate_columns(spec: PipelineSpec) -> list[Json]:
    """The declared columns of the historical rate, in the form that `trainer.evaluate` takes."""
    parts = () if spec.evaluation is None else spec.evaluation.historical_rate
    return [{"column": p.column, "width": p.width} if isinstance(p, Binned) else p for p in parts]


def read_scores(folder: Path, spec: PipelineSpec) -> ScoredRows:
    """Return the mature rows of an evaluation folder.

    A score that is null or no number is kept as NaN: what follows from it is for the gates to say.

    Raises:
        EvaluationRefused: no such file, a column is missing or stands twice, or a label is neither 0 nor 1.
    """
    import pyarrow.parquet as pq

    path = folder / SCORES_FILE
    if not path.is_file():
        raise EvaluationRefused(f"{path} is not there")
    table = pq.read_table(path)
    names = table.column_names
    daily = partitioned_daily(spec)
    for name in (*kept_columns(spec), "label", f"score_{CANDIDATE}", *((PARTITION,) if daily else ())):
        if names.count(name) != 1:
            raise EvaluationRefused(f"column {name!r} stands {names.count(name)} times in {SCORES_FILE}, not once")
    daily = partitioned_daily(spec)
    if daily and names.count(PARTITION) != 1:
        raise EvaluationRefused(
            f"column {PARTITION!r} stands {names.count(PARTITION)} times in {SCORES_FILE}, not once"
        )
    labels = _floats(table, "label")
    if not np.isin(labels[~np.isnan(labels)], (0.0, 1.0)).all():
        raise EvaluationRefused("a label is neither 0 nor 1")
    mature = ~np.isnan(labels)
    scored = [n.removeprefix("score_") for n in names if n.startswith("score_")]
    columns = () if spec.evaluation is None else spec.evaluation.segments
    return ScoredRows(
        digest=digest_file(path),
        rows=len(table),
        labels=labels[mature],
        day=(_partition_days(table) if daily else _days(table, spec))[mature],
        scores={name: _floats(table, f"score_{name}")[mature] for name in scored},
        segments={column: _texts(table, column)[mature] for column in columns},
        blocks="label partition, daily" if daily else f"observation day in {_zone(spec)}",
    )


def measure(scored: ScoredRows, policy: Policy) -> Evaluation:
    """Return every metric of every model with its interval, and the candidate's gains, over all rows and segments."""
    present, day = np.unique(scored.day, return_inverse=True)
    days = max(1, len(present))
    counts = day_counts(days, policy.resamples, SEED)
    everything = np.ones(len(scored.labels), dtype=np.bool_)
    return Evaluation(
        scores_digest=scored.digest,
        rows=scored.rows,
        mature=len(scored.labels),
        positives=int(scored.labels.sum()),
        days=len(present),
        blocks=scored.blocks,
        resamples=policy.resamples,
        confidence=policy.confidence,
        metrics=_metrics(scored, everything, day, days, counts, policy),
        gains=_gains(scored, everything, day, days, counts, policy)[1],
        segments={c: _segments(scored, c, day, days, counts, policy) for c in scored.segments},
        not_finite={model: int((~np.isfinite(s)).sum()) for model, s in scored.scores.items()},
    )


def _segments(
    scored: ScoredRows, column: str, day: NDArray[np.int64], days: int, counts: Counts, policy: Policy
) -> dict[str, Segment]:
    found: dict[str, Segment] = {}
    values = scored.segments[column]
    for value in sorted(set(values.tolist())):
        inside = np.asarray(values == value)
        areas, gains = _gains(scored, inside, day, days, counts, policy)
        metrics = _metrics(scored, inside, day, days, counts, policy)
        rows, positives = int(inside.sum()), int(scored.labels[inside].sum())
        found[value] = Segment(rows, positives, len(np.unique(day[inside])), areas, metrics, gains)
    return found


def _metrics(
    scored: ScoredRows,
    inside: NDArray[np.bool_],
    day: NDArray[np.int64],
    days: int,
    counts: Counts,
    policy: Policy,
) -> dict[str, dict[str, Interval | None]]:
    """Every metric of every model with its interval, among some of the rows."""
    weights = np.ones(int(inside.sum()))
    found: dict[str, dict[str, Interval | None]] = {}
    for model, scores in scored.scores.items():
        made = {n: m(scores[inside], scored.labels[inside], day[inside], days, weights) for n, m in _STATISTICS.items()}
        found[model] = {n: _interval(s, days, counts, policy) for n, s in made.items()}
    return found


def _gains(
    scored: ScoredRows,
    inside: NDArray[np.bool_],
    day: NDArray[np.int64],
    days: int,
    counts: Counts,
    policy: Policy,
) -> tuple[dict[str, float | None], dict[str, Interval | None]]:
    """AUC by model, and the paired gain over each reference, among some of the rows."""
    weights = np.ones(int(inside.sum()))
    made = {
        model: auc_statistic(scores[inside], scored.labels[inside], day[inside], days, weights)
        for model, scores in scored.scores.items()
    }
    every_day = np.ones((1, days), dtype=np.int64)
    areas = {model: None if s is None else float(s(every_day)[0]) for model, s in made.items()}
    mine = made[CANDIDATE]
    gains: dict[str, Interval | None] = {}
    for reference, other in made.items():
        if reference != CANDIDATE:
            pair = None if mine is None or other is None else difference(mine, other)
            gains[reference] = _interval(pair, days, counts, policy)
    return areas, gains


def _interval(statistic: Statistic | None, days: int, counts: Counts, policy: Policy) -> Interval | None:
    return None if statistic is None else interval(statistic, days, counts, policy.confidence)


def _json(found: Interval | None) -> Json:
    return None if found is None else {"value": found.value, "lower": found.lower, "upper": found.upper}


def _metrics_json(metrics: Mapping[str, Mapping[str, Interval | None]]) -> dict[str, Json]:
    return {model: {name: _json(found) for name, found in named.items()} for model, named in metrics.items()}


def _segment_json(segment: Segment) -> Json:
    return {
        "rows": segment.rows,
        "positives": segment.positives,
        "days": segment.days,
        "auc": dict(segment.auc),
        "metrics": _metrics_json(segment.metrics),
        "gains": {reference: _json(found) for reference, found in segment.gains.items()},
    }


def _floats(table: "pa.Table", name: str) -> Floats:
    values: Any = table.column(name).cast("float64").to_numpy()
    return np.asarray(values, dtype=np.float64)


def _texts(table: "pa.Table", name: str) -> NDArray[np.object_]:
    texts = [MISSING if value is None else value for value in table.column(name).cast("string").to_pylist()]
    return np.asarray(texts, dtype=np.object_)


def partitioned_daily(spec: PipelineSpec) -> bool:
    """Whether label rows belong to a day of their own, which then is their block; else it is the observation's day."""
    partition = spec.sources[spec.label.source].partition
    return partition is not None and partition.cadence == "daily"


def _zone(spec: PipelineSpec) -> str:
    partition = spec.sources[spec.label.source].partition
    return "UTC" if partition is None else partition.zone


def _partition_days(table: "pa.Table") -> NDArray[np.int64]:
    keys, back = np.unique(np.asarray(table.column(PARTITION).to_pylist(), dtype=np.str_), return_inverse=True)
    try:
        days = [(date.fromisoformat(str(key)) - date(1970, 1, 1)).days for key in keys]
    except ValueError as error:
        raise EvaluationRefused(f"a partition is no day: {error}") from error
    return np.asarray(days, dtype=np.int64)[back]


def _days(table: "pa.Table", spec: PipelineSpec) -> NDArray[np.int64]:
    zone = ZoneInfo(_zone(spec))
    column = table.column(spec.label.observation_time)
    if column.null_count:
        raise EvaluationRefused(f"{column.null_count} rows have no {spec.label.observation_time}")
    moments = np.asarray(column.cast("timestamp[us]").cast("int64").to_numpy(), dtype=np.int64)
    unique, back = np.unique(moments, return_inverse=True)
    local = [datetime.fromtimestamp(int(m) / 1_000_000, UTC).astimezone(zone).date() for m in unique]
    epoch = datetime(1970, 1, 1, tzinfo=UTC).date()
    return np.asarray([(found - epoch).days for found in local], dtype=np.int64)[back]
