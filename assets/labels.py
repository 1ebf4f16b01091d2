"""Stage `labels`: what became known about a week's answers, with the label source's own rows filled in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, table
from assets.keys import dataset_key, labels_key, predictions_key
from assets.partitions import partitions_definition, week_calendar, weekly_dependency
from assets.weekly import (
    FOLLOWS,
    Week,
    WeekResult,
    do_weeks,
    nothing,
    numbers,
    report_weeks,
    stored_plots,
    told,
    week_table,
)
from headway.declaration import duration_us
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from headway.words import counted
from resources.platform import Platform

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog.monitoring_facts import Report
    from headway.monitoring.labels import BatchLabels
    from headway.monitoring.reports import LabelReport

COMPLETENESS = "The declared share of the labels expected by now is there; weeks that are too young are not judged."


def build_labels(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Labels of the answers asked in a week: delays, completeness, corrections, and what still waits."""
    spec = pipeline.spec
    key = labels_key(spec.name)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"What became known about the answers of `{spec.name}`, and how late.",
        owners=[spec.owner],
        kinds={"table"},
        tags={"headway/stage": "labels"},
        metadata={"dagster/code_references": code_references(pipeline, "label")},
        code_version="1",
        partitions_def=partitions_definition(week_calendar(spec)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        deps=[
            predictions_key(spec.name),
            dg.AssetDep(dataset_key(spec.name, spec.label.source), partition_mapping=weekly_dependency()),
        ],
        automation_condition=FOLLOWS,
        check_specs=[dg.AssetCheckSpec("completeness", asset=key, blocking=False, description=COMPLETENESS)],
    )
    def labels(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.monitoring.label_items import policy_of
        from headway.monitoring.labels import batch_labels, corrections
        from headway.monitoring.reports import NO_PREDICTIONS, label_report, publish_report

        step_dies_with_run()
        services = platform.services()
        alone = len(context.partition_keys) == 1
        expected_within = duration_us(policy_of(spec).expected_within)

        def work(week: Week) -> WeekResult:
            filled = batch_labels(services, pipeline, week.endpoint_id, week.start, week.end)
            built = label_report(services, pipeline, week.endpoint_id, week.key, week.now)
            if built.verdict == NO_PREDICTIONS:
                return nothing(week)
            report = publish_report(services, built)
            corrected = corrections(services, week.endpoint_id, week.start, week.end)
            result = _result(platform.store(), filled, built, report, corrected, alone=alone)
            due = week.now >= week.end + expected_within
            return replace(result, found="complete" if built.verdict == "complete" else "wanting" if due else "young")

        results = do_weeks(context, services, pipeline, work)
        version = report_weeks(context, key, results)
        return dg.MaterializeResult(data_version=version, check_results=[_check(key, results)])

    return labels


def _result(
    store: "LocalStore",
    filled: "BatchLabels",
    built: "LabelReport",
    report: "Report",
    corrected: int,
    *,
    alone: bool,
) -> WeekResult:
    status = f"{built.verdict}, so far" if built.so_far else built.verdict
    metrics = numbers(built.metrics)
    ages: Any = built.document["by_age"]
    rows = [{"within": age, "share of labels": _share(share) or "too young"} for age, share in ages.items()]
    left_out = [*filled.quarantined, *filled.absent]
    facts: dict[str, Any] = {
        **told(status, built.reason),
        "endpoint": built.endpoint_id,
        "labels_added": filled.added,
        "corrections": corrected,
        "label_partitions_not_read": ", ".join(left_out[:10]) or "none",
        **table("by_age", rows),
        **table("by_segment", _segments(built)),
        **metrics,
        "report_id": report.report_id,
        **stored_plots(store, built.plots, inline=alone),
    }
    row = {
        "week": built.week,
        "status": status,
        "answers": metrics["answers"],
        "labelled": metrics["labelled"],
        "completeness": _share(built.metrics["completeness"]),
        "p95 delay (h)": metrics.get("delay_p95_hours", ""),
        "added": filled.added,
    }
    return WeekResult(built.week, status, built.reason, report.document_digest, facts, row)


def _segments(built: "LabelReport") -> list[dict[str, object]]:
    """The groups with most answers, as the page shows them."""
    by_segment: Any = built.document["by_segment"]
    rows = [
        {
            "segment": f"{name}={value}",
            "answers": said["answers"],
            "labelled": said["labelled"],
            "median delay (h)": _hours(said["delay_p50_hours"]),
            "p95 delay (h)": _hours(said["delay_p95_hours"]),
        }
        for name, values in by_segment.items()
        for value, said in values.items()
    ]
    return sorted(rows, key=lambda row: -int(row["answers"]))[:30]


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.1f}"


def _check(key: dg.AssetKey, results: Sequence[WeekResult]) -> dg.AssetCheckResult:
    """Whether weeks whose labels are all due are complete; the page says of the others that they are young."""
    wanting = [r.week for r in results if r.found == "wanting"]
    complete, young = (sum(r.found == state for r in results) for state in ("complete", "young"))
    said = (
        f"below the declared share: {', '.join(wanting[:10])}" if wanting else f"{counted(complete, 'week')} complete"
    )
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="completeness",
        passed=not wanting,
        severity=dg.AssetCheckSeverity.WARN,
        description=said + (f", {young} too young to judge" if young else ""),
        metadata=guarded({"weeks": len(results), **week_table(results)}),
    )
