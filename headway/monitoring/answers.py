"""The answers of a week as one Parquet file in the store, and what they were like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headway.catalog.monitoring_facts import Report, ReportFacts
from headway.catalog.monitoring_invariants import shipped_answers
from headway.catalog.registry_facts import Prediction
from headway.datasets.text import TIMESTAMP
from headway.features.assemble import parquet_bytes
from headway.monitoring.labels import predictions_between
from headway.monitoring.windows import DAY_US, day_of, week_bounds
from headway.services import Services
from trainer.blobs import Json, canonical_json

FORMAT = "headway.answers/1"
SO_FAR, COMPLETE = "so_far", "complete"

_FIELDS: Mapping[str, pa.DataType] = {
    "prediction_id": pa.string(),
    "model_version": pa.int64(),
    "endpoint_epoch": pa.int64(),
    "arm": pa.string(),
    "source": pa.string(),
    "asked_at": TIMESTAMP,
    "observed_at": TIMESTAMP,
    "caller_id": pa.string(),
    "event_key": pa.string(),
    "score": pa.float64(),
    "status": pa.string(),
    "feature_status": pa.string(),
    "feature_as_of": TIMESTAMP,
    "latency_us": pa.int64(),
    "detail_digest": pa.string(),
    "row": pa.int64(),
}
_SEGMENT = "segment__"


@dataclass(frozen=True)
class WeekAnswers:
    """What was answered in a week. `degraded` counts answers whose features were incomplete.

    `rows_digest` names the Parquet file: one row per answer by prediction id, segments as columns `segment__<name>`.
    """

    report: Report
    count: int
    by_version: Mapping[int, int]
    by_source: Mapping[str, int]
    degraded: int
    feature_status: Mapping[str, int]
    rows_digest: str
    by_day: Mapping[str, int]


def publish_answers(services: Services, endpoint_id: str, week: str, now: int) -> WeekAnswers | None:
    """Store the week's recorded answers and record the report; None, and nothing recorded, when there is none.

    The same answers are the same report; `now` (world time) decides whether the week is over.

    Raises:
        UnknownWeek: `week` names none.
    """
    start, end = week_bounds(week)
    answers = list(predictions_between(services, endpoint_id, start, end))
    if not answers:
        return None
    rows = services.store.put_bytes(parquet_bytes(answers_table(answers)), "application/vnd.apache.parquet")
    by_version = Counter(a.model_version for a in answers)
    by_source = Counter(a.source for a in answers)
    feature_status = Counter(a.feature_status for a in answers)
    degraded = sum(a.status != "ok" for a in answers)
    verdict = SO_FAR if now < end else COMPLETE
    metrics: dict[str, float | int | None] = {
        "count": len(answers),
        "degraded": degraded,
        "degraded_share": degraded / len(answers),
        **{f"version/{version}": number for version, number in sorted(by_version.items())},
    }
    document: dict[str, Json] = {
        "format": FORMAT,
        "endpoint": endpoint_id,
        "week": week,
        "verdict": verdict,
        "rows": rows.digest,
        "metrics": dict(metrics),
    }
    stored = services.store.put_bytes(canonical_json(document), "application/json")
    report = services.catalog.record_report(
        services.principal,
        None,
        ReportFacts(
            kind="predictions",
            endpoint_id=endpoint_id,
            model_version=None,
            window=week,
            start=start,
            end=end,
            verdict=verdict,
            reason="",
            document_digest=stored.digest,
            metrics=metrics,
            made_at=now,
            blobs=(stored, rows),
        ),
    )
    return WeekAnswers(
        report=report,
        count=len(answers),
        by_version=dict(sorted(by_version.items())),
        by_source=dict(sorted(by_source.items())),
        degraded=degraded,
        feature_status=dict(sorted(feature_status.items())),
        rows_digest=rows.digest,
        by_day=_by_day(answers, start),
    )


def answers_table(answers: Sequence[Prediction]) -> pa.Table:
    """One row per answer; segment values as text, null where an answer has none."""
    columns = {name: pa.array([getattr(answer, name) for answer in answers], kind) for name, kind in _FIELDS.items()}
    for name in sorted({name for answer in answers for name in answer.segments}):
        values = [answer.segments.get(name) for answer in answers]
        columns[_SEGMENT + name] = pa.array([None if v is None else str(v) for v in values], pa.string())
    return pa.table(columns)


def _by_day(answers: Sequence[Prediction], start: int) -> dict[str, int]:
    """Answers asked on each of the week's seven days (UTC)."""
    counts = Counter(day_of(answer.asked_at) for answer in answers if answer.asked_at is not None)
    return {day: counts[day] for day in (day_of(start + i * DAY_US) for i in range(7))}


@dataclass(frozen=True)
class ShippingBalance:
    """Totals of the servers' logs as far as they are shipped, and what does not add up with the recorded answers."""

    segments: int
    records: int
    torn: int
    dropped: int
    problems: tuple[str, ...]


def shipping_balance(services: Services) -> ShippingBalance:
    """Whether of every log segment as many answers are recorded as were shipped (invariant I12)."""
    shipped = services.catalog.shipments(services.principal)
    with services.catalog.reading(services.principal) as connection:
        problems = shipped_answers(connection, services.principal.tenant)
    return ShippingBalance(
        segments=len(shipped),
        records=sum(s.records for s in shipped),
        torn=sum(s.torn for s in shipped),
        dropped=sum(s.dropped for s in shipped),
        problems=tuple(problems),
    )
