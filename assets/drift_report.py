"""Stage `drift_report`: whether a week's inputs and scores moved against what the version saw in training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, table
from assets.keys import drift_key, labels_key, predictions_key
from assets.partitions import partitions_definition, week_calendar
from assets.weekly import FOLLOWS, Week, WeekResult, do_weeks, nothing, numbers, report_weeks, stored_plots, told
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from headway.words import counted
from resources.platform import Platform
from trainer.blobs import digest_json

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog.monitoring_facts import Report
    from headway.monitoring.drift import FeatureVerdict
    from headway.monitoring.reports import DriftReport

CHECKS = {
    "data_incident": "No column broke: schema, missing values, units, categories, late sources. It never retrains.",
    "drift": "Inputs and scores are as in training, beyond chance and effect. It informs; the sensor decides.",
}
_SHOWN = 25
_PLOTTED = ("rows", "level", "drifted", "drifted_in_segments", "incidents", "out_of_range")


def build_drift_report(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The judgement of a week against the frozen reference of each version that answered in it."""
    spec = pipeline.spec
    key = drift_key(spec.name)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Inputs and scores of a week's answers of `{spec.name}` against what each version was trained on.",
        owners=[spec.owner],
        kinds={"numpy"},
        tags={"headway/stage": "drift_report"},
        metadata={"dagster/code_references": code_references(pipeline, "drift", "monitoring")},
        code_version="1",
        partitions_def=partitions_definition(week_calendar(spec)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        deps=[predictions_key(spec.name), labels_key(spec.name)],
        automation_condition=FOLLOWS,
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=False, description=text) for name, text in CHECKS.items()
        ],
    )
    def drift_report(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.monitoring import reports

        step_dies_with_run()
        services = platform.services()
        alone = len(context.partition_keys) == 1

        def work(week: Week) -> WeekResult:
            found: list[tuple[DriftReport, Report]] = []
            for version in reports.answered_versions(services, week.endpoint_id, week.key):
                built = reports.build_drift_report(services, pipeline, week.endpoint_id, week.key, week.now, version)
                found.append((built, reports.publish_report(services, built)))
            return _result(platform.store(), week, found, alone=alone) if found else nothing(week)

        results = do_weeks(context, services, pipeline, work)
        version = report_weeks(context, key, results)
        return dg.MaterializeResult(data_version=version, check_results=[_check(key, name, results) for name in CHECKS])

    return drift_report


def _result(
    store: "LocalStore", week: Week, found: "Sequence[tuple[DriftReport, Report]]", *, alone: bool
) -> WeekResult:
    """The version with most answers speaks for the week; every version has its line."""
    built, report = found[0]
    verdict = "no drift" if built.verdict == "none" else built.verdict
    status = f"{verdict}, so far" if built.so_far else verdict
    facts: dict[str, Any] = {
        **told(status, built.reason),
        "endpoint": week.endpoint_id,
        "model_version": built.model_version or 0,
        "alarm_by_chance": str(built.document.get("expected_by_chance", "not judged")),
    }
    if built.persistence is not None:
        facts["persistence"] = f"{built.persistence.state} ({', '.join(built.persistence.weeks) or 'no week'})"
    if built.judged is not None:
        incidents = [{"kind": i.kind, "feature": i.feature, "what": i.detail} for i in built.judged.incidents]
        facts |= {
            "drifted_features": ", ".join(built.judged.moved()) or "none",
            **table("what_broke", incidents),
            **table("features", [_feature(f) for f in sorted(built.judged.features, key=_interest)[:_SHOWN]]),
        }
    facts |= {
        **numbers({name: built.metrics.get(name) for name in _PLOTTED}),
        "report_id": report.report_id,
        **table("by_version", [_version(one) for one, _ in found]),
        **stored_plots(store, built.plots, inline=alone),
    }
    digests = [r.document_digest for _, r in found]
    digest = digests[0] if len(digests) == 1 else digest_json(digests)
    return WeekResult(week.key, status, built.reason, digest, facts, found=[one for one, _ in found])


def _interest(feature: "FeatureVerdict") -> tuple[bool, bool, float]:
    """What broke or moved first, the strongest effect first."""
    quiet = feature.verdict not in ("data_incident", "drift", "season")
    return quiet, bool(feature.segment), -(feature.effect or 0.0)


def _feature(feature: "FeatureVerdict") -> dict[str, object]:
    return {
        "feature": feature.name,
        "segment": feature.segment or "all",
        "verdict": feature.verdict,
        "PSI": _number(feature.psi),
        "distance": _number(feature.distance),
        "q": _number(feature.q),
        "n": feature.n,
        "reason": feature.reason,
    }


def _version(built: "DriftReport") -> dict[str, object]:
    level = built.metrics.get("level")
    return {
        "version": built.model_version,
        "verdict": built.verdict,
        "rows": built.metrics["rows"],
        "level": _number(level),
        "reason": built.reason,
    }


def _check(key: dg.AssetKey, name: str, results: "Sequence[WeekResult]") -> dg.AssetCheckResult:
    """One result for all weeks of the step; a warning, which blocks nothing."""
    reports: list[DriftReport] = [built for r in results for built in r.found or []]
    raised = [built for built in reports if built.verdict == name]
    rows = [
        {
            "week": built.week,
            **_version(built),
            "persistence": "" if built.persistence is None else built.persistence.state,
        }
        for built in reports
    ]
    judged = sum(built.judged is not None for built in reports)
    named = "; ".join(f"{built.week}@{built.model_version}: {_found(built, name)}" for built in raised[:10])
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=name,
        passed=not raised,
        severity=dg.AssetCheckSeverity.WARN,
        description=named or f"none in {counted(judged, 'judged report')}, {len(reports) - judged} not judged",
        metadata=guarded({"raised": len(raised), "reports": len(reports), **table("table_by_week", rows)}),
    )


def _found(built: "DriftReport", name: str) -> str:
    assert built.judged is not None
    if name == "data_incident":
        return ", ".join(f"{i.kind} of {i.feature}" for i in built.judged.incidents[:5])
    return f"{', '.join(built.judged.moved()[:5])} ({built.document['expected_by_chance']})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
