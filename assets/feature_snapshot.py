"""Stage `feature_snapshot`: point-in-time features of the label rows of a partition, with their leakage proof."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, column_lineage, feature_schema, freshness, guarded, plot_metadata, table
from assets.executor import backfill_policy_for
from assets.interrupted import telling_what_is_done
from assets.keys import dataset_key, snapshot_key
from assets.partitions import partitions_definition, snapshot_dependency
from assets.runs import asked_partitions, is_range, is_worth_a_line, report_partitions
from headway.home import load_settings
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from resources.platform import Platform

if TYPE_CHECKING:
    from headway.features.snapshot import SnapshotOutcome

# Not only the latest partition, as `eager()` would: a repaired old day mends the snapshots that reach back to it.
FOLLOWS_SOURCES = (
    dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window())
    & dg.AutomationCondition.all_deps_blocking_checks_passed()
)

CHECKS = {
    "leakage_proof": "Stored times satisfy visibility, and hiding or poisoning what must be invisible changes nothing.",
    "watermark": "Sources are not behind the observations by more than the allowed lateness.",
    "row_count": "One snapshot row per label row.",
    "null_budget": "No feature is null more often than declared.",
}


def build_feature_snapshot(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The snapshot asset of a pipeline, partitioned like its label source."""
    spec = pipeline.spec
    partition = spec.sources[spec.label.source].partition
    assert partition is not None
    key = snapshot_key(spec.name)
    used = dict.fromkeys([spec.label.source, *(v.source for v in spec.features.views.values())])
    used |= dict.fromkeys(c.source for c in spec.features.custom.values())
    source_keys = {s: dataset_key(spec.name, s) for s in used}

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Features of `{spec.name}` as they were known at each observation, with a proof that nothing "
        "later was used.",
        owners=[spec.owner],
        kinds={"parquet", "numpy"},
        tags={"headway/stage": "feature_snapshot"},
        code_version=_code_version(pipeline),
        partitions_def=partitions_definition(partition),
        backfill_policy=backfill_policy_for(load_settings()),
        deps=[dg.AssetDep(k, partition_mapping=snapshot_dependency(spec, s)) for s, k in source_keys.items()],
        automation_condition=FOLLOWS_SOURCES,
        freshness_policy=freshness(partition),
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=True, description=text) for name, text in CHECKS.items()
        ],
        metadata={
            "dagster/column_schema": feature_schema(spec),
            "dagster/column_lineage": column_lineage(spec, source_keys),
            "dagster/code_references": code_references(pipeline, "features", "features.py"),
        },
    )
    def feature_snapshot(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.features.parallel import build_parallel

        step_dies_with_run()
        partitions = asked_partitions(context) or []
        done: list[SnapshotOutcome] = []

        def progress(count: int, outcome: "SnapshotOutcome") -> None:
            done.append(outcome)
            if is_worth_a_line(count, len(partitions)):
                context.log.info(_progress_line(count, len(partitions), outcome))

        with telling_what_is_done(context, key, lambda: {o.partition: _done(o) for o in done}):
            outcomes = build_parallel(
                platform.settings(), pipeline, partitions, run_id=context.run.run_id, progress=progress
            )
        report_partitions(context, key, {o.partition: _metadata(o) for o in outcomes})
        _fail_when_unusable(outcomes, alone=not is_range(partitions))
        return dg.MaterializeResult(
            data_version=dg.DataVersion(_range_digest(outcomes)),
            check_results=[_check(key, name, outcomes, platform) for name in CHECKS],
        )

    return feature_snapshot


def _code_version(pipeline: Pipeline) -> str:
    from headway.features.contract import code_digest

    return code_digest(pipeline)[7:19]


def _progress_line(done: int, total: int, outcome: "SnapshotOutcome") -> str:
    return f"{done}/{total} {outcome.partition} {outcome.status}: {outcome.rows} rows in {outcome.seconds:.2f} s"


def _done(outcome: "SnapshotOutcome") -> tuple[str, dict[str, Any]]:
    return _range_digest([outcome]), _metadata(outcome)


def _metadata(outcome: "SnapshotOutcome") -> dict[str, Any]:
    snapshot = outcome.snapshot
    facts: dict[str, Any] = {
        "status": outcome.status,
        "reason": outcome.reason,
        "dagster/partition_row_count": outcome.rows,
    }
    facts |= {f"excluded/{reason}": count for reason, count in outcome.excluded.items()}
    if snapshot is not None:
        facts |= {
            "snapshot_id": snapshot.snapshot_id,
            "content_digest": snapshot.content_digest,
            "proof_digest": snapshot.facts.proof_digest,
            "feature_set_version": snapshot.feature_set_version,
            "inputs": len(snapshot.inputs),
            "verify": dg.MetadataValue.md(f"`headway snapshots verify {snapshot.snapshot_id}`"),
        }
    return guarded(facts)


def _range_digest(outcomes: "Sequence[SnapshotOutcome]") -> str:
    """One partition: its content digest. A range: Dagster stamps one version on all, so the digest of all digests."""
    from trainer.blobs import digest_json

    digests = [o.snapshot.content_digest if o.snapshot else o.status for o in outcomes]
    return (
        digests[0]
        if len(digests) == 1
        else digest_json([[o.partition, d] for o, d in zip(outcomes, digests, strict=True)])
    )


def _fail_when_unusable(outcomes: "Sequence[SnapshotOutcome]", alone: bool) -> None:
    failed = [o for o in outcomes if o.status == "failed" or (alone and o.status == "refused" and not o.checks)]
    if failed:
        shown = "; ".join(f"{o.partition}: {o.reason}" for o in failed[:10])
        raise dg.Failure(f"{len(failed)} of {len(outcomes)} snapshots not built: {shown}", allow_retries=False)


def _check(
    key: dg.AssetKey, name: str, outcomes: "Sequence[SnapshotOutcome]", platform: Platform
) -> dg.AssetCheckResult:
    """One result for all partitions of the step; a partition refused for another reason did not get that far."""
    found = [(o, c) for o in outcomes for c in o.checks if c.name == name]
    broken = [o.partition for o, c in found if not c.passed]
    rows = [{"partition": o.partition, "passed": c.passed, **c.detail} for o, c in found]
    metadata: dict[str, Any] = {
        "evaluated": len(found),
        "up_to_date": sum(o.status == "up_to_date" for o in outcomes),
        "refused": sum(o.status == "refused" for o in outcomes),
        **table("table_by_partition", rows),
    }
    if name == "row_count" and len(outcomes) > 1:
        metadata |= plot_metadata(
            platform.store(),
            "Snapshot rows and excluded label rows by partition",
            [o.partition for o in outcomes],
            rows=[o.rows for o in outcomes],
            excluded=[sum(o.excluded.values()) for o in outcomes],
        )
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=name,
        passed=not broken,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"failed in {', '.join(broken[:10])}" if broken else f"held in {len(found)} partitions",
        metadata=guarded(metadata),
    )
