"""Stage `predictions`: ships what servers logged, and stores each week's answers as one Parquet file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, plot_metadata, table
from assets.keys import model_version_key, online_key, predictions_key
from assets.partitions import partitions_definition, week_calendar
from assets.weekly import Week, WeekResult, do_weeks, nothing, report_weeks, week_table
from headway.loading import Pipeline, PipelineNotFound, load_pipeline
from headway.processes import step_dies_with_run
from resources.platform import Platform

if TYPE_CHECKING:
    from headway.monitoring.answers import WeekAnswers
    from headway.serving.ship import ShipReport

COMPLETENESS = "Every record of the servers' logs is in the catalog once; what was torn or dropped is counted."


def build_predictions(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The answers of the endpoint that bears the pipeline's name, partitioned by the week in which they were asked."""
    spec = pipeline.spec
    key = predictions_key(spec.name)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Answers of the endpoint `{spec.name}`: shipped from its servers, one Parquet file a week.",
        owners=[spec.owner],
        kinds={"parquet"},
        tags={"headway/stage": "predictions"},
        metadata={"dagster/code_references": code_references(pipeline, "serving")},
        code_version="1",
        partitions_def=partitions_definition(week_calendar(spec)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        deps=[
            online_key(spec.name),
            dg.AssetDep(model_version_key(spec.name), partition_mapping=dg.AllPartitionMapping()),
        ],
        check_specs=[dg.AssetCheckSpec("completeness", asset=key, blocking=True, description=COMPLETENESS)],
    )
    def predictions(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.monitoring.answers import publish_answers
        from headway.serving.ship import ship

        step_dies_with_run()
        services = platform.services()

        def lookup(name: str) -> Pipeline | None:
            try:
                return pipeline if name == spec.name else load_pipeline(name)
            except PipelineNotFound:
                # Its answers wait for whoever has it, and hold up none of ours.
                return None

        shipped = ship(services, lookup, platform.settings().serving_folder)
        context.log.info(f"shipped {shipped.shipped} answers of the servers' logs")

        def work(week: Week) -> WeekResult:
            found = publish_answers(services, week.endpoint_id, week.key, week.now)
            return nothing(week) if found is None else _result(week, found)

        results = do_weeks(context, services, pipeline, work)
        version = report_weeks(context, key, results)
        return dg.MaterializeResult(data_version=version, check_results=[_check(key, platform, results, shipped)])

    return predictions


def _result(week: Week, found: "WeekAnswers") -> WeekResult:
    status = found.report.verdict
    facts: dict[str, Any] = {
        "status": status,
        "endpoint": week.endpoint_id,
        "dagster/partition_row_count": found.count,
        "rows_digest": found.rows_digest,
        "report_id": found.report.report_id,
        "degraded_share": round(found.degraded / found.count, 6),
        **{f"by_version/{version}": number for version, number in found.by_version.items()},
        **{f"by_source/{source}": number for source, number in found.by_source.items()},
        **{f"feature_status/{name}": number for name, number in found.feature_status.items()},
        **table("by_day", [{"day": day, "answers": number} for day, number in found.by_day.items()]),
    }
    row = {
        "week": week.key,
        "status": status,
        "answers": found.count,
        "degraded": found.degraded,
        "versions": ", ".join(map(str, found.by_version)),
    }
    reason = "the week is not over: so far" if week.so_far else ""
    return WeekResult(week.key, status, reason, found.report.document_digest, facts, row)


def _check(
    key: dg.AssetKey, platform: Platform, results: Sequence[WeekResult], shipped: "ShipReport"
) -> dg.AssetCheckResult:
    """Whether shipped records and recorded answers agree; one result for all weeks of the step."""
    from headway.monitoring.answers import shipping_balance

    balance = shipping_balance(platform.services())
    metadata: dict[str, Any] = {
        "records_shipped": balance.records,
        "shipped_now": shipped.shipped,
        "torn": balance.torn,
        "dropped": balance.dropped,
        "segments": balance.segments,
        **week_table(results),
    }
    if len(results) > 1:
        counts = [int(str(r.row.get("answers", 0))) for r in results]
        degraded = [int(str(r.row.get("degraded", 0))) for r in results]
        title = "Answers and degraded answers by week"
        metadata |= plot_metadata(platform.store(), title, [r.week for r in results], answers=counts, degraded=degraded)
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="completeness",
        passed=not balance.problems,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(balance.problems[:5])
        or f"{balance.records:,} records shipped and recorded once; {balance.torn:,} torn, {balance.dropped:,} dropped",
        metadata=guarded(metadata),
    )
