"""Stage `quality_report`: what a week's answers were worth, per version and segment, once their labels are mature."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, table
from assets.keys import labels_key, predictions_key, quality_key
from assets.partitions import partitions_definition, week_calendar
from assets.weekly import FOLLOWS, Week, WeekResult, do_weeks, nothing, numbers, report_weeks, stored_plots, told
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from resources.platform import Platform
from trainer.blobs import digest_json

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog.monitoring_facts import Report
    from headway.monitoring.reports import QualityReport

_PLOTTED = ("answers", "labelled", "completeness", "rate", "mean_score", "auc", "log_loss", "calibration_error")
_METRICS = {"auc": "AUC", "log_loss": "log loss", "calibration_error": "calibration error"}


def build_quality_report(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Realised quality of the answers asked in a week; a number only for mature labels, an estimate beside it else."""
    spec = pipeline.spec
    key = quality_key(spec.name)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Quality of a week's answers of `{spec.name}` by version and segment, beside the evaluation's.",
        owners=[spec.owner],
        kinds={"numpy"},
        tags={"headway/stage": "quality_report"},
        metadata={"dagster/code_references": code_references(pipeline, "evaluation")},
        code_version="1",
        partitions_def=partitions_definition(week_calendar(spec)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        deps=[predictions_key(spec.name), labels_key(spec.name)],
        automation_condition=FOLLOWS,
    )
    def quality_report(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.monitoring import reports

        step_dies_with_run()
        services = platform.services()
        alone = len(context.partition_keys) == 1

        def work(week: Week) -> WeekResult:
            found: list[tuple[QualityReport, Report]] = []
            for version in reports.answered_versions(services, week.endpoint_id, week.key):
                built = reports.build_quality_report(services, pipeline, week.endpoint_id, week.key, week.now, version)
                found.append((built, reports.publish_report(services, built)))
            return _result(platform.store(), week, found, alone=alone) if found else nothing(week)

        return dg.MaterializeResult(
            data_version=report_weeks(context, key, do_weeks(context, services, pipeline, work))
        )

    return quality_report


def _result(
    store: "LocalStore", week: Week, found: "Sequence[tuple[QualityReport, Report]]", *, alone: bool
) -> WeekResult:
    """The version with most answers speaks for the week; every version has its line."""
    built, report = found[0]
    status = f"{built.verdict}, so far" if built.so_far else built.verdict
    facts: dict[str, Any] = {
        **told(status, built.reason),
        "endpoint": week.endpoint_id,
        "model_version": built.model_version or 0,
        "basis": str(built.document["basis"]),
        **table("quality", _quality(built)),
        **table("by_segment", _segments(built)),
        **table("by_version", [_version(one) for one, _ in found]),
        # The intervals and the evaluation's numbers stand in the table; these are what the page plots over weeks.
        **numbers({name: built.metrics[name] for name in _PLOTTED}),
        "report_id": report.report_id,
        **stored_plots(store, built.plots, inline=alone),
    }
    digests = [r.document_digest for _, r in found]
    return WeekResult(week.key, status, built.reason, digests[0] if len(digests) == 1 else digest_json(digests), facts)


def _quality(built: "QualityReport") -> list[dict[str, object]]:
    """Each number with its interval, beside what the version's evaluation said."""
    metrics = built.metrics
    return [
        {
            "metric": title,
            "week": _number(metrics.get(name)) or built.verdict,
            "lower": _number(metrics.get(f"{name}_lower")),
            "upper": _number(metrics.get(f"{name}_upper")),
            "evaluation": _number(metrics.get(f"evaluation_{name}")),
            "estimated": _number(metrics.get(f"estimated_{name}")),
        }
        for name, title in _METRICS.items()
    ]


def _segments(built: "QualityReport") -> list[dict[str, object]]:
    by_segment: Any = built.document.get("segments", {})
    rows: list[dict[str, object]] = []
    for name, values in by_segment.items():
        for value, said in values.items():
            area = ((said["quality"] or {}).get("metrics") or {}).get("auc") or {}
            rows.append(
                {
                    "segment": f"{name}={value}",
                    "answers": said["answers"],
                    "labelled": said["labelled"],
                    "AUC": _number(area.get("value")) or said["state"],
                    "lower": _number(area.get("lower")),
                    "upper": _number(area.get("upper")),
                }
            )
    return sorted(rows, key=lambda row: -int(str(row["answers"])))[:30]


def _version(built: "QualityReport") -> dict[str, object]:
    return {
        "version": built.model_version,
        "verdict": built.verdict,
        "answers": built.metrics["answers"],
        "labelled": built.metrics["labelled"],
        "AUC": _number(built.metrics["auc"]),
        "reason": built.reason,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
