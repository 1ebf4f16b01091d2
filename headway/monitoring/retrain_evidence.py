"""What the reports of an endpoint say to the retraining decision: alarms, incident, mature labels, expected gain.

Only reports in force are read, and of documents only those of the weeks that count. Reports of another version than
the one that serves are kept as alarms of that version: they were measured against another reference. A week that was
not over when it was reported may show an incident, which blocks at once, and no alarm.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headway.datasets.partitions import PartitionScheme
from headway.loading import Pipeline
from headway.monitoring.drift import DriftPolicy
from headway.monitoring.persistence import WeekSummary, persistent
from headway.monitoring.retraining import Alarm, Champion, Gain, Incident, Moved
from headway.services import Services
from headway.training.window import as_of_calendar

if TYPE_CHECKING:
    from headway.catalog.monitoring_facts import Report

JUDGED = ("none", "drift", "season")
INCIDENT = "data_incident"
IMMATURE = "immature"


@dataclass(frozen=True)
class Evidence:
    """The reports, summed up for `headway.monitoring.retraining.DecisionInput`."""

    alarms: tuple[Alarm, ...]
    incident: Incident | None
    labels: int
    gain: Gain | None


def gather_evidence(services: Services, pipeline: Pipeline, champion: Champion | None) -> Evidence:
    """Sum up the drift and quality reports in force of the pipeline's endpoint."""
    catalog, principal = services.catalog, services.principal
    drift = catalog.reports(principal, pipeline.name, "drift")
    quality = _whole(catalog.reports(principal, pipeline.name, "quality"))
    monitoring = pipeline.spec.monitoring
    assert monitoring is not None
    assert monitoring.retraining is not None
    policy = DriftPolicy.from_spec(monitoring.drift)
    alarms = [
        alarm
        for version, reports in sorted(_by_version(_whole(drift)).items())
        if (alarm := _drift_alarm(services, version, reports, policy)) is not None
    ]
    for version, reports in sorted(_by_version(quality).items()):
        alarm = _quality_alarm(version, reports, policy, monitoring.retraining.quality_loss)
        alarms += [] if alarm is None else [alarm]
    mine = [] if champion is None else [r for r in quality if r.model_version == champion.version]
    return Evidence(
        tuple(alarms),
        _incident(drift),
        0 if champion is None else _labels(pipeline, quality, champion),
        _gain(mine, policy.of),
    )


def _whole(reports: Sequence[Report]) -> list[Report]:
    """Those of weeks that were over when they were made; a part of a week raises no alarm."""
    return [r for r in reports if r.made_at >= r.end]


def _by_version(reports: Sequence[Report]) -> dict[int, list[Report]]:
    found: defaultdict[int, list[Report]] = defaultdict(list)
    for report in reports:
        if report.model_version is not None:
            found[report.model_version].append(report)
    return found


def _drift_alarm(services: Services, version: int, reports: Sequence[Report], policy: DriftPolicy) -> Alarm | None:
    judged = [r for r in reports if r.verdict in JUDGED]
    if not judged:
        return None
    levels = {r.window: WeekSummary(r.verdict, _number(r, "level")) for r in reports}
    found = persistent(levels, policy)
    counting = [r for r in judged if r.window in found.weeks]
    state: Literal["raised", "building", "season", "clear"] = found.state
    if state != "raised" and judged[-1].verdict == "season":
        state = "season"
    # An alarm outlasts the last week with drift by hysteresis; what moved is what that week says.
    drifted = [r for r in judged if r.verdict == "drift"]
    return Alarm(
        "drift",
        version,
        state,
        tuple(r.window for r in counting),
        tuple(r.report_id for r in counting),
        _moved(services, drifted[-1]) if state == "raised" else (),
        (_number(counting[-1], "level") or 0.0) if counting else 0.0,
        judged[-1].end,
    )


def _moved(services: Services, report: Report) -> tuple[Moved, ...]:
    """What drifted in a week; its segments count only where nothing drifted over all rows."""
    document = json.loads(services.store.get_bytes(report.document_digest))
    drifted: list[Mapping[str, Any]] = [f for f in document["features"] if f["verdict"] == "drift"]
    whole = [f for f in drifted if not f["segment"]]
    return tuple(Moved(f["name"], f["segment"], _direction(f)) for f in whole or drifted)


def _direction(feature: Mapping[str, Any]) -> Literal["up", "down", "other"]:
    said = feature.get("direction")
    return said if said in ("up", "down") else "other"


def _quality_alarm(version: int, reports: Sequence[Report], policy: DriftPolicy, limit: float) -> Alarm | None:
    """A loss that even the upper end of the week's interval shows, in as many weeks as drift needs."""
    mature = [(r, loss) for r in reports if (loss := _certain_loss(r)) is not None][-policy.of :]
    if not mature:
        return None
    counting = [(r, loss) for r, loss in mature if loss >= limit]
    state: Literal["raised", "building", "clear"] = "building" if counting else "clear"
    if len(counting) >= policy.weeks:
        state = "raised"
    return Alarm(
        "quality",
        version,
        state,
        tuple(r.window for r, _ in counting),
        tuple(r.report_id for r, _ in counting),
        (Moved("auc", "", "down"),),
        max((loss / limit for _, loss in counting[-1:]), default=0.0),
        mature[-1][0].end,
    )


def _certain_loss(report: Report) -> float | None:
    upper, evaluation = _number(report, "auc_upper"), _number(report, "evaluation_auc")
    if report.verdict == IMMATURE or upper is None or evaluation is None:
        return None
    return evaluation - upper


def _incident(drift: Sequence[Report]) -> Incident | None:
    """The incident of the newest week that could be judged, whichever version's rows show it.

    A week with too few rows says nothing, so it does not end an incident.
    """
    said = [r for r in drift if r.verdict in (*JUDGED, INCIDENT)]
    newest = max((r.window for r in said), default="")
    for report in said:
        if report.window == newest and report.verdict == INCIDENT:
            return Incident(report.window, report.report_id, report.reason)
    return None


def _labels(pipeline: Pipeline, quality: Sequence[Report], champion: Champion) -> int:
    """Labels of mature weeks that began after the champion's data ended, whichever version answered."""
    calendar = PartitionScheme.from_spec(as_of_calendar(pipeline.spec))
    cut = calendar.window(champion.as_of)[0]
    return sum(int(_number(r, "labels") or 0) for r in quality if r.start >= cut and r.verdict != IMMATURE)


def _gain(quality: Sequence[Report], weeks: int) -> Gain | None:
    """What the champion lost against its own evaluation over its newest weeks, each weighed by its labels.

    By labels where there are any, else as estimated without.
    """
    realised = [loss for r in quality if r.verdict != IMMATURE and (loss := _loss(r, "auc")) is not None]
    estimated = [loss for r in quality if (loss := _loss(r, "estimated_auc")) is not None]
    if realised:
        return Gain(_mean(realised[-weeks:]), "realised")
    return Gain(_mean(estimated[-weeks:]), "estimated") if estimated else None


def _loss(report: Report, name: str) -> tuple[float, float] | None:
    """The evaluation less a number of the week, and the rows that it rests on."""
    found, evaluation = _number(report, name), _number(report, "evaluation_auc")
    if found is None or evaluation is None:
        return None
    return evaluation - found, max(1.0, _number(report, "labels") or _number(report, "answers") or 1.0)


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


def _number(report: Report, name: str) -> float | None:
    found = report.metrics.get(name)
    return None if found is None else float(found)
