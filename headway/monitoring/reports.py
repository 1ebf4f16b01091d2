"""Weekly reports of an endpoint: the quality of its answers, the drift of their inputs, the delay of their labels.

Quality and drift are told per model version (`answered_versions` lists those of a week): each has its own evaluation
and its own reference, so a promotion in the middle of a week is no drift. A builder reads and computes; only
`publish_report` writes: the document and plots to the store, then the row to the catalog. The same week judged again on
the same facts is the same report.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from headway.artifacts.store import Blob
from headway.catalog.monitoring_facts import Label, Report, ReportFacts, ReportKind
from headway.catalog.registry_facts import ModelVersion, Prediction
from headway.declaration import MonitoringSpec, PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.monitoring.drift import DriftPolicy, FeatureVerdict, WindowVerdict, judge_window
from headway.monitoring.estimate import Estimate, estimate_quality
from headway.monitoring.labels import predictions_between
from headway.monitoring.maturity import (
    HISTORY_WEEKS,
    Answered,
    Cohort,
    DelayCurve,
    cohort_of,
    completeness_by_age,
    delay_curve,
    expected_share,
)
from headway.monitoring.persistence import Persistence, WeekSummary, persistent
from headway.monitoring.plots import delay_plot, histogram_plot, quality_plot
from headway.monitoring.quality import CONFIDENCE, Judged, Quality, confusion, measure_quality, measure_segments
from headway.monitoring.reference import SCORE, Reference, ReferenceUnusable, Window, as_kind, numeric_column
from headway.monitoring.versions import (
    MISSING,
    arrow_column,
    contract_inputs,
    entity_fields,
    entity_texts,
    segment_texts,
    version_reference,
)
from headway.monitoring.windows import DAY_US, WEEK_US, day_of, week_bounds, week_key
from headway.registry.judge import evaluation_report
from headway.services import Services
from headway.serving.detail import Detail, read_detail
from trainer.blobs import Json, canonical_json

NO_PREDICTIONS = "no_predictions"
NO_REFERENCE = "no_reference"
IMMATURE = "immature"
DEFAULT_LOSS = 0.03
SEGMENT_MINIMUM = 500
_PLOTTED_FEATURES = 6
_LEAST_DAY_ROWS = 20
# Scales between which values change by a factor and a shift.
_TEMPERATURES = frozenset({"degf", "degc", "f", "c", "k", "fahrenheit", "celsius", "kelvin"})
_OF_THE_SCALE = frozenset({"mean", "min", "max", "first", "last"})
# How far back a week is still a neighbour, whose weather is like this one's.
_WEEKS_BACK = 3
_AGES = {"1h": 3_600_000_000, "1d": DAY_US, "2d": 2 * DAY_US, "3d": 3 * DAY_US, "7d": WEEK_US, "14d": 2 * WEEK_US}


class NoMonitoring(HeadwayError):
    """The pipeline declares no monitoring."""


@dataclass(frozen=True)
class BuiltReport:
    """A report that is not written yet. `plots` are PNG by name, `blobs` further parts that the document names.

    `so_far` says that the week was not over in world time.
    """

    kind: ReportKind
    endpoint_id: str
    model_version: int | None
    week: str
    start: int
    end: int
    verdict: str
    reason: str
    metrics: Mapping[str, float | int | None]
    document: Mapping[str, Json]
    made_at: int
    so_far: bool
    plots: Mapping[str, bytes] = field(default_factory=dict)
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True)
class QualityReport(BuiltReport):
    """Verdicts: ok, loss (certainly below the evaluation), immature (no number), undefined, no_predictions."""

    cohort: Cohort | None = None
    quality: Quality | None = None
    estimate: Estimate | None = None


@dataclass(frozen=True)
class DriftReport(BuiltReport):
    """Verdicts: those of a window, no_reference, no_predictions. `judged` is None for the last two."""

    judged: WindowVerdict | None = None
    persistence: Persistence | None = None


@dataclass(frozen=True)
class LabelReport(BuiltReport):
    """Verdicts: complete (mature), immature, no_predictions. `curve` holds the delays of the week's labels."""

    cohort: Cohort | None = None
    curve: DelayCurve | None = None


@dataclass(frozen=True)
class _Week:
    endpoint_id: str
    key: str
    start: int
    end: int
    now: int

    def head(self, kind: str, version: int | None) -> dict[str, Json]:
        return {
            "format": f"headway.{kind}_report/1",
            "endpoint": self.endpoint_id,
            "model_version": version,
            "week": self.key,
            "start": self.start,
            "end": self.end,
            "so_far": self.now < self.end,
        }


def answered_versions(services: Services, endpoint_id: str, week: str) -> tuple[int, ...]:
    """The model versions that answered in a week, the one with most answers first."""
    start, end = week_bounds(week)
    counts = Counter(p.model_version for p in predictions_between(services, endpoint_id, start, end))
    return tuple(sorted(counts, key=lambda v: (-counts[v], v)))


def build_quality_report(
    services: Services, pipeline: Pipeline, endpoint_id: str, week: str, now: int, model_version: int | None = None
) -> QualityReport:
    """The quality of one version's answers of a week, as far as their labels are mature at `now` (world time).

    Args:
        services: catalog and store.
        pipeline: the declaration.
        endpoint_id: whose answers.
        week: its key.
        now: world time; labels that came later are not known.
        model_version: None is the version with most answers.

    Raises:
        NoMonitoring: the pipeline declares none.
        UnknownWeek: the key names no week.
    """
    monitoring = _monitoring(pipeline)
    span = _span(endpoint_id, week, now)
    version, answers = _of_version(services, span, model_version)
    if version is None:
        return QualityReport(**_empty("quality", span, model_version))
    labels = _labels(services, span)
    answered = _answered(answers, labels, now)
    cohort = _cohort(services, monitoring, span, answered)
    facts = services.catalog.model_version(services.principal, answers[0].model_id, version)
    evaluation = _evaluation(services, facts)
    loss = DEFAULT_LOSS if monitoring.retraining is None else monitoring.retraining.quality_loss
    estimate = None
    quality = None
    document: dict[str, Json] = span.head("quality", version)
    if cohort.state == "mature":
        judged, texts = _judged(pipeline.spec, answers, labels, now)
        quality = measure_quality(judged)
        segments = _segments(services, monitoring, span, pipeline.spec, answers, answered, judged)
        document |= {"segments": segments, "confusion": _confusion(judged, texts, pipeline.spec)}
    else:
        estimate = _estimate(services, pipeline, facts, answers, evaluation)
    verdict, reason = _quality_verdict(cohort, quality, evaluation.get("auc"), loss)
    metrics = _quality_metrics(cohort, quality, estimate, evaluation)
    plots = {"quality_by_week": _quality_plot(services, span, version, metrics)}
    document |= {
        "verdict": verdict,
        "reason": reason,
        "basis": "realised" if quality is not None else "estimated" if metrics["estimated_auc"] is not None else "none",
        "cohort": _json(asdict(cohort)),
        "quality": None if quality is None else _json(asdict(quality)),
        "confidence": CONFIDENCE,
        "estimate": None if estimate is None else _json(asdict(estimate)),
        "evaluation": dict(evaluation),
        "metrics": dict(metrics),
    }
    return QualityReport(
        **_parts("quality", span, version, verdict, reason, metrics, document, plots, ()),
        cohort=cohort,
        quality=quality,
        estimate=estimate,
    )


def build_drift_report(
    services: Services, pipeline: Pipeline, endpoint_id: str, week: str, now: int, model_version: int | None = None
) -> DriftReport:
    """The drift of one version's inputs and scores in a week against its frozen reference.

    Args and errors as `build_quality_report`.
    """
    monitoring = _monitoring(pipeline)
    policy = DriftPolicy.from_spec(monitoring.drift)
    span = _span(endpoint_id, week, now)
    version, answers = _of_version(services, span, model_version)
    if version is None:
        return DriftReport(**_empty("drift", span, model_version))
    facts = services.catalog.model_version(services.principal, answers[0].model_id, version)
    document: dict[str, Json] = span.head("drift", version)
    try:
        reference, blobs = version_reference(
            services, pipeline, facts, policy, _known_reference(services, endpoint_id, version)
        )
    except ReferenceUnusable as error:
        said = {"verdict": NO_REFERENCE, "reason": error.message, "features": [], "incidents": []}
        metrics: dict[str, float | int | None] = {"rows": len(answers), "level": None}
        return DriftReport(
            **_parts("drift", span, version, NO_REFERENCE, error.message, metrics, document | said, {}, ())
        )
    window = answered_window(services, pipeline.spec, facts, answers)
    judged = judge_window(reference, window, policy, _sound_before(services, pipeline.spec, facts, span))
    outside = out_of_range(reference, window)
    persistence = _persistence(services, span, version, judged, policy)
    metrics = _drift_metrics(judged, outside)
    document |= {
        "verdict": judged.verdict,
        "reason": judged.reason,
        "reference": reference.digest,
        "judgement": _json({k: v for k, v in asdict(judged).items() if k not in ("features", "incidents")}),
        "features": [_json(asdict(f)) for f in judged.features],
        "incidents": [_json(asdict(i)) for i in judged.incidents],
        "false_alarm_per_days": judged.false_alarm_per_days,
        "expected_by_chance": _by_chance(judged),
        "persistence": _json(asdict(persistence)),
        "metrics": dict(metrics),
    }
    plots = {"histograms": _histograms(span, version, reference, window, judged)}
    return DriftReport(
        **_parts("drift", span, version, judged.verdict, judged.reason, metrics, document, plots, blobs),
        judged=judged,
        persistence=persistence,
    )


def label_report(services: Services, pipeline: Pipeline, endpoint_id: str, week: str, now: int) -> LabelReport:
    """When the labels of a week's answers came, of all versions together.

    Args and errors as `build_quality_report`.
    """
    monitoring = _monitoring(pipeline)
    span = _span(endpoint_id, week, now)
    answers = list(predictions_between(services, endpoint_id, span.start, span.end))
    if not answers:
        return LabelReport(**_empty("labels", span, None))
    labels = _labels(services, span)
    answered = _answered(answers, labels, now)
    cohort = _cohort(services, monitoring, span, answered)
    curve = delay_curve(answered, now)
    due = duration_us(monitoring.labels.expected_within)
    current = [label for label in labels.values() if label.received_at <= now]
    by_source = Counter(label.source for label in current)
    by_segment = _delays_by_segment(pipeline.spec, answers, answered, now)
    early = sum(1 for p in answers if p.prediction_id in labels and labels[p.prediction_id].received_at < _asked(p))
    metrics: dict[str, float | int | None] = {
        "answers": cohort.answers,
        "labelled": cohort.labelled,
        "expected": cohort.expected,
        "completeness": cohort.share,
        "delay_p50_hours": _hours(curve.quantile(0.5)),
        "delay_p95_hours": _hours(curve.quantile(0.95)),
        "positives": sum(1 for label in current if label.value in (1, True)),
        "came_first": early,
        "inbox": len(services.catalog.label_inbox(services.principal, endpoint_id)),
        **{f"source/{name}": count for name, count in sorted(by_source.items())},
    }
    verdict = "complete" if cohort.state == "mature" else IMMATURE
    document: dict[str, Json] = span.head("labels", None) | {
        "verdict": verdict,
        "reason": cohort.reason,
        "cohort": _json(asdict(cohort)),
        "by_age": completeness_by_age(answered, now, _AGES),
        "by_segment": by_segment,
        "metrics": dict(metrics),
    }
    plots = {"delays": delay_plot(f"{endpoint_id}, week {week}: delay of labels", {"all": curve}, due)}
    return LabelReport(
        **_parts("labels", span, None, verdict, cohort.reason, metrics, document, plots, ()),
        cohort=cohort,
        curve=curve,
    )


def publish_report(services: Services, report: BuiltReport) -> Report:
    """Write a report: plots and document to the store, the row to the catalog. Publishing it again changes nothing."""
    plots = {name: services.store.put_bytes(image, "image/png") for name, image in report.plots.items()}
    named: dict[str, Json] = {name: blob.digest for name, blob in plots.items()}
    document = services.store.put_bytes(canonical_json({**report.document, "plots": named}), "application/json")
    return services.catalog.record_report(
        services.principal,
        None,
        ReportFacts(
            kind=report.kind,
            endpoint_id=report.endpoint_id,
            model_version=report.model_version,
            window=report.week,
            start=report.start,
            end=report.end,
            verdict=report.verdict,
            reason=report.reason[:2_000],
            document_digest=document.digest,
            metrics=dict(report.metrics),
            made_at=report.made_at,
            blobs=tuple({b.digest: b for b in (document, *plots.values(), *report.blobs)}.values()),
        ),
    )


def answered_window(
    services: Services,
    spec: PipelineSpec,
    version: ModelVersion,
    answers: Sequence[Prediction],
    only: Collection[str] | None = None,
) -> Window:
    """Inputs, scores (of both, `only` these), entities and freshness of answers, from their detail documents."""
    by_document: dict[str, list[Prediction]] = {}
    for answer in answers:
        by_document.setdefault(answer.detail_digest, []).append(answer)
    inputs = [n for n, _ in contract_inputs(version) if only is None or n in only]
    fields, _ = entity_fields(spec)
    segments = spec.monitored_segments()
    values: list[pa.Table] = []
    requests: list[pa.Table] = []
    ordered: list[Prediction] = []
    freshness = _Freshness()
    for digest, some in by_document.items():
        detail = read_detail(services, digest)
        rows = pa.array([p.row for p in some])
        wanted = [c for c in dict.fromkeys([*inputs, *segments]) if c in detail.values.column_names]
        values.append(detail.values.select(wanted).take(rows))
        requests.append(detail.requests.select([f for f in fields if f in detail.requests.column_names]).take(rows))
        freshness.add(detail, some)
        ordered += some
    table = pa.concat_tables(values, promote_options="default").unify_dictionaries()
    asked = pa.concat_tables(requests, promote_options="default")
    columns = {n: arrow_column(table.column(n)) for n in inputs if n in table.column_names}
    scores = np.array([np.nan if p.score is None else p.score for p in ordered], np.float64)
    if only is None or SCORE in only:
        columns[SCORE] = numeric_column(scores)
    times = np.array([p.asked_at if p.observed_at is None else p.observed_at for p in ordered], np.int64)
    return Window(
        columns,
        entity_texts(asked, fields) if set(fields) <= set(asked.column_names) else None,
        times,
        segment_texts(table, segments),
        freshness.stale(),
        freshness.skipped(),
        version.facts.feature_set_version,
    )


def out_of_range(reference: Reference, window: Window) -> float:
    """The share of rows with an input outside of what the sample of training rows holds: beyond its ends, or new."""
    outside = np.zeros(window.rows, np.bool_)
    for name, bins in reference.bins.items():
        column = window.columns.get(name)
        kept = None if column is None or name == SCORE else as_kind(column, bins)
        if kept is None:
            continue
        if bins.numeric:
            with np.errstate(invalid="ignore"):
                outside |= (kept.values > bins.high) | (kept.values < bins.low)
        else:
            outside |= bins.codes(kept) == bins.other
    return float(outside.mean()) if window.rows else 0.0


class _Freshness:
    """Which rows rested on a view that was behind, and on a source of which partitions were left out, day by day."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._stale: dict[str, Counter[str]] = {}
        self._skipped: dict[str, Counter[str]] = {}

    def add(self, detail: Detail, answers: Iterable[Prediction]) -> None:
        groups = detail.requests.column("__group").to_pylist()
        for answer in answers:
            day = day_of(_asked(answer))
            self._rows[day] += 1
            output = answer.output
            degraded = output.get("degraded", []) if isinstance(output, Mapping) else []
            for said in degraded if isinstance(degraded, list | tuple) else []:
                view, _, why = str(said).partition(":")
                # A partition that did not exist yet is the ordinary state of the newest rows.
                if why in ("watermark_behind", "too_old"):
                    self._stale.setdefault(view, Counter())[day] += 1
            for source in {s for s, parts in detail.groups[groups[answer.row]].skipped.items() if parts}:
                self._skipped.setdefault(source, Counter())[day] += 1

    def stale(self) -> dict[str, float]:
        return {view: self._worst(days) for view, days in sorted(self._stale.items())}

    def skipped(self) -> dict[str, float]:
        return {source: self._worst(days) for source, days in sorted(self._skipped.items())}

    def _worst(self, days: Counter[str]) -> float:
        shares = [n / self._rows[day] for day, n in days.items() if self._rows[day] >= _LEAST_DAY_ROWS]
        return max([days.total() / self._rows.total(), *shares])


def _monitoring(pipeline: Pipeline) -> MonitoringSpec:
    if pipeline.spec.monitoring is None:
        raise NoMonitoring(f"pipeline {pipeline.name!r} declares no monitoring", "add `monitoring` to defs.yaml")
    return pipeline.spec.monitoring


def _span(endpoint_id: str, week: str, now: int) -> _Week:
    start, end = week_bounds(week)
    return _Week(endpoint_id, week, start, end, now)


def _of_version(services: Services, span: _Week, model_version: int | None) -> tuple[int | None, list[Prediction]]:
    """The answers of the asked version, or of the one with most."""
    found: dict[int, list[Prediction]] = {}
    for prediction in predictions_between(services, span.endpoint_id, span.start, span.end):
        found.setdefault(prediction.model_version, []).append(prediction)
    if model_version is None:
        model_version = max(found, key=lambda v: (len(found[v]), -v), default=None)
    return (model_version, found[model_version]) if model_version in found else (None, [])


def _sound_before(services: Services, spec: PipelineSpec, version: ModelVersion, span: _Week) -> Window | None:
    """Temperatures of the nearest week before without an incident, of whatever version; None without one close by."""
    temperatures = [n for n, unit in feature_units(spec).items() if unit.strip("°").lower() in _TEMPERATURES]
    if not temperatures:
        return None
    reports = services.catalog.reports(services.principal, span.endpoint_id, kind="drift")
    broken = {r.window for r in reports if r.verdict == "data_incident"}
    for back in range(1, _WEEKS_BACK + 1):
        start = span.start - back * WEEK_US
        if week_key(start) in broken:
            continue
        answers = list(predictions_between(services, span.endpoint_id, start, start + WEEK_US))
        if answers:
            return answered_window(services, spec, version, answers, only=temperatures)
    return None


def feature_units(spec: PipelineSpec) -> dict[str, str]:
    """The declared unit of each feature that has one: that of the column which it reads, where it keeps its scale."""
    found: dict[str, str] = {}
    for view_name, view in spec.features.views.items():
        columns = spec.sources[view.source].columns
        kept = {name: feature.latest for name, feature in view.latest_features().items()}
        kept |= {n: f.window for n, f in view.window_features().items() if f.aggregate in _OF_THE_SCALE}
        found |= {f"{view_name}__{n}": unit for n, column in kept.items() if (unit := columns[column].unit)}
    return found


def _labels(services: Services, span: _Week) -> dict[str, Label]:
    """The current label of each answer of the week."""
    pairs = services.catalog.labels_between(services.principal, span.endpoint_id, span.start, span.end)
    return {prediction_id: label for prediction_id, label in pairs if label.current}


def _asked(prediction: Prediction) -> int:
    assert prediction.asked_at is not None
    return prediction.asked_at


def _answered(answers: Sequence[Prediction], labels: Mapping[str, Label], now: int) -> Answered:
    came = [labels.get(p.prediction_id) for p in answers]
    return Answered(
        np.array([_asked(p) for p in answers], np.int64),
        np.array([c is not None and c.received_at <= now for c in came], np.bool_),
        np.array([0 if c is None else c.received_at for c in came], np.int64),
    )


def _cohort(services: Services, monitoring: MonitoringSpec, span: _Week, answered: Answered) -> Cohort:
    share = _expected_share(services, monitoring, span)
    return cohort_of(answered, span.now, share, monitoring.labels.maturity)


def _expected_share(services: Services, monitoring: MonitoringSpec, span: _Week) -> float:
    """What earlier answers say about how many labels come at all."""
    earlier = _Week(span.endpoint_id, span.key, span.start - HISTORY_WEEKS * WEEK_US, span.start, span.now)
    answers = list(predictions_between(services, span.endpoint_id, earlier.start, earlier.end))
    history = _answered(answers, _labels(services, earlier), span.now)
    return expected_share(history, span.now, duration_us(monitoring.labels.expected_within))


def _judged(
    spec: PipelineSpec, answers: Sequence[Prediction], labels: Mapping[str, Label], now: int
) -> tuple[Judged, list[str]]:
    """Scores and outcomes of the labelled answers, and the labels as texts."""
    kept = [
        (p, label)
        for p in answers
        if p.score is not None and (label := labels.get(p.prediction_id)) is not None and label.received_at <= now
    ]
    names = spec.monitored_segments()
    judged = Judged(
        np.array([p.score for p, _ in kept], np.float64),
        np.array([float(label.value in (1, True)) for _, label in kept], np.float64),
        np.array([_asked(p) // DAY_US for p, _ in kept], np.int64),
        {n: np.array([_segment(p, n) for p, _ in kept], object) for n in names},
    )
    return judged, [_class(label.value) for _, label in kept]


def _class(value: Json) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _segment(prediction: Prediction, name: str) -> str:
    value = prediction.segments.get(name)
    return MISSING if value is None else str(value)


def _confusion(judged: Judged, texts: Sequence[str], spec: PipelineSpec) -> Json:
    """Classes said at a probability of one half, by class that came true."""
    said = ["1" if score >= 0.5 else "0" for score in judged.scores]
    table = confusion(texts, said, ("0", "1") if set(texts) <= {"0", "1"} else ())
    return _json(asdict(table))


def _segments(
    services: Services,
    monitoring: MonitoringSpec,
    span: _Week,
    spec: PipelineSpec,
    answers: Sequence[Prediction],
    answered: Answered,
    judged: Judged,
) -> dict[str, Json]:
    """Quality by segment; where its labels are not mature or its rows too few, the reason and no number."""
    declared = {} if spec.evaluation is None else spec.evaluation.segments
    minimum = {n: declared[n].minimum if n in declared else SEGMENT_MINIMUM for n in judged.segments}
    measured = measure_segments(judged, minimum)
    share = _expected_share(services, monitoring, span)
    found: dict[str, Json] = {}
    for name in judged.segments:
        values = np.array([_segment(p, name) for p in answers], object)
        by_value: dict[str, Json] = {}
        for value in sorted(set(values.tolist())):
            cohort = cohort_of(answered.take(values == value), span.now, share, monitoring.labels.maturity)
            quality = measured[name].get(value)
            state = cohort.state if cohort.state != "mature" else "unknown" if quality is None else "mature"
            shown = quality if state == "mature" else None
            by_value[value] = {
                "state": state,
                "answers": cohort.answers,
                "labelled": cohort.labelled,
                "minimum": minimum[name],
                "quality": None if shown is None else _json(asdict(shown)),
            }
        found[name] = by_value
    return found


def _delays_by_segment(
    spec: PipelineSpec, answers: Sequence[Prediction], answered: Answered, now: int
) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name in spec.monitored_segments():
        values = np.array([_segment(p, name) for p in answers], object)
        by_value: dict[str, Json] = {}
        for value in sorted(set(values.tolist())):
            some = answered.take(values == value)
            curve = delay_curve(some, now)
            by_value[value] = {
                "answers": len(some),
                "labelled": int(some.labelled.sum()),
                "delay_p50_hours": _hours(curve.quantile(0.5)),
                "delay_p95_hours": _hours(curve.quantile(0.95)),
            }
        found[name] = by_value
    return found


def _evaluation(services: Services, version: ModelVersion) -> dict[str, float | None]:
    """The version's own numbers, from the evaluation that it was judged by; empty when it never was."""
    report = evaluation_report(services, version)
    metrics = None if report is None else report.get("metrics")
    candidate = metrics.get("candidate") if isinstance(metrics, Mapping) else None
    found: dict[str, float | None] = {}
    for name, said in candidate.items() if isinstance(candidate, Mapping) else ():
        value = said.get("value") if isinstance(said, Mapping) else None
        found[name] = float(value) if isinstance(value, int | float) else None
    return found


def _estimate(
    services: Services,
    pipeline: Pipeline,
    version: ModelVersion,
    answers: Sequence[Prediction],
    evaluation: Mapping[str, float | None],
) -> Estimate:
    """Estimated quality where labels are not mature; its assumptions need the reference."""
    scores = np.array([p.score for p in answers if p.score is not None], np.float64)
    policy = DriftPolicy.from_spec(_monitoring(pipeline).drift)
    error = evaluation.get("calibration_error")
    known = _known_reference(services, answers[0].endpoint_id, version.version)
    try:
        reference, _ = version_reference(services, pipeline, version, policy, known)
    except ReferenceUnusable:
        return Estimate(None, None, None, len(scores), error, 0.0, (NO_REFERENCE,))
    window = answered_window(services, pipeline.spec, version, answers)
    incidents = [i.kind for i in judge_window(reference, window, policy).incidents]
    return estimate_quality(scores, error, out_of_range(reference, window), incidents)


def _quality_verdict(cohort: Cohort, quality: Quality | None, evaluation: float | None, loss: float) -> tuple[str, str]:
    if quality is None:
        share = "" if cohort.share is None else f": {cohort.share:.1%} of the expected labels are there"
        return IMMATURE, f"{cohort.reason}{share}"
    area = quality.metrics["auc"]
    if area is None:
        return "undefined", "the labels hold one class only"
    if evaluation is not None and area.upper is not None and evaluation - area.upper >= loss:
        return "loss", f"AUC is at most {area.upper:.4f}, {evaluation:.4f} in the evaluation"
    return "ok", ""


def _quality_metrics(
    cohort: Cohort, quality: Quality | None, estimate: Estimate | None, evaluation: Mapping[str, float | None]
) -> dict[str, float | int | None]:
    """Flat numbers for the catalog; every quality number of an immature cohort is None."""
    found: dict[str, float | int | None] = {
        "answers": cohort.answers,
        "labelled": cohort.labelled,
        "expected": cohort.expected,
        "completeness": cohort.share,
        "labels": 0 if quality is None else quality.rows,
        "rate": None if quality is None else quality.rate,
        "mean_score": None if quality is None else quality.mean_score,
        "estimated_auc": None if estimate is None else estimate.auc,
        "estimated_log_loss": None if estimate is None else estimate.log_loss,
        "estimated_rate": None if estimate is None else estimate.rate,
    }
    for name in ("auc", "log_loss", "calibration_error"):
        interval = None if quality is None else quality.metrics[name]
        found[name] = None if interval is None else interval.value
        found[f"{name}_lower"] = None if interval is None else interval.lower
        found[f"{name}_upper"] = None if interval is None else interval.upper
        found[f"evaluation_{name}"] = evaluation.get(name)
    return found


def _quality_plot(services: Services, span: _Week, version: int, metrics: Mapping[str, float | int | None]) -> bytes:
    earlier = services.catalog.reports(services.principal, span.endpoint_id, "quality", version)
    rows = {r.window: r.metrics for r in earlier if r.window < span.key} | {span.key: metrics}
    weeks = [(w, m.get("auc"), m.get("auc_lower"), m.get("auc_upper")) for w, m in sorted(rows.items())]
    return quality_plot(f"{span.endpoint_id}@{version}: AUC by week", weeks, metrics.get("evaluation_auc"))


def _known_reference(services: Services, endpoint_id: str, version: int) -> str | None:
    """The reference that the newest drift report of the version names."""
    for report in reversed(services.catalog.reports(services.principal, endpoint_id, "drift", version)):
        digest = json.loads(services.store.get_bytes(report.document_digest)).get("reference")
        if isinstance(digest, str):
            return digest
    return None


def _persistence(
    services: Services, span: _Week, version: int, judged: WindowVerdict, policy: DriftPolicy
) -> Persistence:
    """Whether drift persists at this week, with the reports in force of the weeks before."""
    earlier = services.catalog.reports(services.principal, span.endpoint_id, "drift", version)
    found = {r.window: WeekSummary(r.verdict, r.metrics.get("level")) for r in earlier if r.window < span.key}
    return persistent(found | {span.key: WeekSummary(judged.verdict, judged.level)}, policy)


def _drift_metrics(judged: WindowVerdict, outside: float) -> dict[str, float | int | None]:
    whole = [f for f in judged.features if not f.segment]
    found: dict[str, float | int | None] = {
        "rows": judged.rows,
        "level": judged.level,
        "threshold": judged.threshold,
        "false_alarm_per_days": judged.false_alarm_per_days,
        "drifted": len(judged.moved()),
        "drifted_in_segments": sum(1 for f in judged.features if f.segment and f.verdict == "drift"),
        "incidents": len(judged.incidents),
        "out_of_range": outside,
    }
    return found | {f"psi/{f.name}": f.psi for f in whole} | {f"distance/{f.name}": f.distance for f in whole}


def _by_chance(judged: WindowVerdict) -> str:
    """What is written on every alarm."""
    if judged.false_alarm_per_days is None:
        return "not calibrated"
    return f"expected once per {judged.false_alarm_per_days:,.0f} days by chance"


def _histograms(span: _Week, version: int, reference: Reference, window: Window, judged: WindowVerdict) -> bytes:
    shown = sorted((f for f in judged.features if not f.segment), key=_interest)[:_PLOTTED_FEATURES]
    panels: list[tuple[Any, Any, str]] = []
    for feature in shown:
        bins = reference.bins[feature.name]
        column = window.columns.get(feature.name)
        kept = None if column is None else as_kind(column, bins)
        if kept is not None:
            counts = np.bincount(bins.codes(kept), minlength=bins.size).astype(np.float64)
            panels.append((bins, counts, feature.verdict))
    return histogram_plot(f"{span.endpoint_id}@{version}, week {span.key}: shares, reference in grey", panels)


def _interest(feature: FeatureVerdict) -> tuple[bool, float]:
    return feature.verdict != "data_incident", -(feature.effect or 0.0)


def _hours(delay: int | None) -> float | None:
    return None if delay is None else delay / 3_600_000_000


def _json(value: object) -> Json:
    """Plain JSON of dataclass fields; tuples become lists."""
    return json.loads(json.dumps(value))


def _parts(
    kind: ReportKind,
    span: _Week,
    version: int | None,
    verdict: str,
    reason: str,
    metrics: Mapping[str, float | int | None],
    document: Mapping[str, Any],
    plots: Mapping[str, bytes],
    blobs: tuple[Blob, ...],
) -> dict[str, Any]:
    return {
        "kind": kind,
        "endpoint_id": span.endpoint_id,
        "model_version": version,
        "week": span.key,
        "start": span.start,
        "end": span.end,
        "verdict": verdict,
        "reason": reason,
        "metrics": metrics,
        "document": document,
        "made_at": span.now,
        "so_far": span.now < span.end,
        "plots": plots,
        "blobs": blobs,
    }


def _empty(kind: ReportKind, span: _Week, version: int | None) -> dict[str, Any]:
    reason = f"no answers were recorded in the week of {span.key}"
    document = span.head(kind, version) | {"verdict": NO_PREDICTIONS, "reason": reason, "features": [], "incidents": []}
    return _parts(kind, span, version, NO_PREDICTIONS, reason, {"answers": 0}, document, {}, ())
