"""Stage `dataset_version`: raw files to validated, immutable versions, one asset per source."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, column_schema, freshness, guarded, plot_metadata, table
from assets.executor import backfill_policy_for
from assets.interrupted import telling_what_is_done
from assets.keys import dataset_key
from assets.partitions import partitions_definition
from assets.runs import asked_partitions, is_worth_a_line, report_partitions
from headway.declaration import SourceSpec
from headway.home import load_settings
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from resources.platform import Platform

if TYPE_CHECKING:
    from headway.datasets.ingest import IngestOutcome

CHECKS = {
    "quality": "The suite beside the pipeline, evaluated by Great Expectations; failing rows go to quarantine.",
    "schema_contract": "Every declared column is there with its type; undeclared columns are reported.",
    "privacy": "Personal columns are treated as declared before anything is stored.",
}


def build_dataset_version(pipeline: Pipeline, source: str) -> dg.AssetsDefinition:
    """The dataset asset of one source."""
    spec = pipeline.spec
    declared = spec.sources[source]
    key = dataset_key(spec.name, source)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=declared.description or f"Versions of `{source}`.",
        owners=[spec.owner],
        kinds={declared.format.type, "parquet"},
        tags={"headway/stage": "dataset_version", "headway/privacy": declared.privacy.disposition},
        code_version=_code_version(pipeline, declared),
        partitions_def=partitions_definition(declared.partition) if declared.partition else None,
        backfill_policy=backfill_policy_for(load_settings()) if declared.partition else None,
        deps=[dataset_key(spec.name, other) for other in declared.lookups],
        freshness_policy=freshness(declared.partition),
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=True, description=text) for name, text in CHECKS.items()
        ],
        metadata={
            "dagster/column_schema": column_schema(declared.columns),
            "dagster/table_name": f"{spec.name}.{source}",
            "dagster/code_references": code_references(pipeline, source, declared.quality.suite, *_transform(declared)),
            "files": _files(declared),
        },
    )
    def dataset_version(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.datasets.ingest import ingest

        step_dies_with_run()
        partitions = asked_partitions(context)
        done: list[IngestOutcome] = []

        def progress(outcome: "IngestOutcome", count: int, total: int) -> None:
            done.append(outcome)
            if is_worth_a_line(count, total):
                context.log.info(_progress_line(outcome, count, total))

        with telling_what_is_done(context, key, lambda: {o.partition: _done(o) for o in done if o.version is not None}):
            outcomes = _without_values(
                lambda: ingest(
                    platform.services(), pipeline, source, partitions, run_id=context.run.run_id, progress=progress
                )
            )
        _refuse_dependent_snapshots(platform, pipeline, source, outcomes)
        _fail_when_missing(context, key, outcomes)
        report_partitions(context, key, {o.partition: _metadata(o) for o in outcomes})
        return dg.MaterializeResult(
            data_version=dg.DataVersion(_range_digest(outcomes)),
            check_results=[_check(key, name, declared, outcomes, platform) for name in CHECKS],
        )

    return dataset_version


def _code_version(pipeline: Pipeline, declared: SourceSpec) -> str:
    """Digest of what decides the rows: the declaration of the source and the file of its transform."""
    from trainer.blobs import digest_json

    code = ""
    if declared.transform is not None:
        code = (pipeline.folder / f"{declared.transform.partition('.')[0]}.py").read_text(encoding="utf-8")
    return digest_json({"declared": declared.model_dump(mode="json"), "code": code})[7:19]


def _files(declared: SourceSpec) -> str:
    """Where the raw data come from, in the declaration's own words."""
    said = declared.files.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return "; ".join(f"{name}: {', '.join(v) if isinstance(v, list) else v}" for name, v in said.items())


def _transform(declared: SourceSpec) -> list[str]:
    return [] if declared.transform is None else [f"{declared.transform.partition('.')[0]}.py"]


def _without_values(work: "Callable[[], list[IngestOutcome]]") -> "list[IngestOutcome]":
    """Run the ingest; a refusal reaches Dagster's log without the offending value or what a transform raised."""
    from headway.datasets.canonical import TransformFault
    from headway.datasets.refusal import DeliveryRefused

    try:
        return work()
    except DeliveryRefused as refusal:
        raise dg.Failure(
            f"{refusal.redacted()}. The value is withheld here; `headway datasets canonical` shows it.",
            allow_retries=False,
        ) from None
    except TransformFault as fault:
        raise dg.Failure(str(fault), allow_retries=False) from None


def _progress_line(outcome: "IngestOutcome", done: int, total: int) -> str:
    return (
        f"{done}/{total} {outcome.partition or outcome.dataset} {outcome.status}: {outcome.rows} rows, "
        f"{outcome.rows_quarantined} quarantined in {outcome.seconds:.2f} s"
    )


def _refuse_dependent_snapshots(
    platform: Platform, pipeline: Pipeline, source: str, outcomes: "Sequence[IngestOutcome]"
) -> None:
    """Label rows in quarantine mean that there is no snapshot: recorded now, however the snapshot is launched later."""
    from headway.features.refusal import refuse_quarantined_labels

    if source == pipeline.spec.learned_source:
        bad = [
            o.partition for o in outcomes if o.version is not None and o.version.status in ("quarantined", "retired")
        ]
        refuse_quarantined_labels(platform.services(), pipeline.spec, bad)


def _fail_when_missing(
    context: dg.AssetExecutionContext, key: dg.AssetKey, outcomes: "Sequence[IngestOutcome]"
) -> None:
    """Fail the step when a partition has no version; its neighbours' versions are reported before."""
    failed = [o for o in outcomes if o.status == "failed"]
    if not failed:
        return
    for outcome in outcomes:
        if outcome.status != "failed":
            context.log_event(
                dg.AssetMaterialization(key, partition=outcome.partition or None, metadata=_metadata(outcome))
            )
    shown = "; ".join(_withheld(o) for o in failed[:10])
    raise dg.Failure(f"{len(failed)} of {len(outcomes)} partitions have no version: {shown}", allow_retries=False)


def _withheld(outcome: "IngestOutcome") -> str:
    """The reason of a failure without any value of the data."""
    from headway.datasets.refusal import DeliveryRefused

    return outcome.error.redacted() if isinstance(outcome.error, DeliveryRefused) else outcome.reason


def _done(outcome: "IngestOutcome") -> tuple[str, dict[str, Any]]:
    return _range_digest([outcome]), _metadata(outcome)


def _metadata(outcome: "IngestOutcome") -> dict[str, Any]:
    version = outcome.version
    assert version is not None
    facts: dict[str, Any] = {
        "status": version.status,
        "outcome": outcome.status,
        "reason": outcome.reason,
        "version": version.version,
        "dagster/partition_row_count" if outcome.partition else "dagster/row_count": outcome.rows,
        "rows_rejected": outcome.rows_rejected,
        "rows_quarantined": outcome.rows_quarantined,
        "exact_duplicates": outcome.exact_duplicates,
        "content_digest": version.content_digest,
        "stored_bytes": outcome.stored_bytes,
        "suite_digest": outcome.suite_digest or "",
        "seconds": round(outcome.seconds, 3),
    }
    for name, interval in (("event_time", outcome.event_times), ("window", outcome.window)):
        if interval is not None:
            facts |= {f"{name}/first": _instant(interval[0]), f"{name}/last": _instant(interval[1])}
    return guarded(facts)


def _instant(moment: int) -> str:
    from headway.datasets.zones import iso

    return iso(moment)


def _range_digest(outcomes: "Sequence[IngestOutcome]") -> str:
    """One partition: its content digest. A range: Dagster stamps one version on all, so the digest of all digests."""
    from trainer.blobs import digest_json

    digests = [o.version.content_digest for o in outcomes if o.version is not None]
    return digests[0] if len(digests) == 1 else digest_json(digests)


def _check(
    key: dg.AssetKey, name: str, declared: SourceSpec, outcomes: "Sequence[IngestOutcome]", platform: Platform
) -> dg.AssetCheckResult:
    if name == "quality":
        return _quality(key, declared, outcomes, platform)
    drift = sorted({line for o in outcomes for line in o.drift})
    detail: dict[str, Any] = {"partitions": len(outcomes)}
    if name == "schema_contract":
        # The step ends before this when a declared column is missing or has another type.
        detail |= {"columns": len(declared.columns), "undeclared": dg.MetadataValue.json(drift)}
        text = f"{len(drift)} undeclared columns" if drift else "all columns as declared"
    else:
        treated = declared.privacy.personal
        detail |= {"disposition": declared.privacy.disposition, "treated": dg.MetadataValue.json(dict(treated))}
        text = f"{len(treated)} personal columns treated before storing"
    return dg.AssetCheckResult(asset_key=key, check_name=name, passed=True, description=text, metadata=detail)


def _quality(
    key: dg.AssetKey, declared: SourceSpec, outcomes: "Sequence[IngestOutcome]", platform: Platform
) -> dg.AssetCheckResult:
    """One result for all partitions of the step, with a table by partition and, for a range, a plot.

    Alone, a quarantined partition fails the check; in a range only more of them than declared do.
    """
    bad = [o.partition for o in outcomes if o.version is not None and o.version.status != "released"]
    limit = declared.quality.max_quarantined_partitions if len(outcomes) > 1 else 0.0
    metadata: dict[str, Any] = {
        "partitions": len(outcomes),
        "partitions_not_released": len(bad),
        "rows": sum(o.rows for o in outcomes),
        "rows_rejected": sum(o.rows_rejected for o in outcomes),
        "rows_quarantined": sum(o.rows_quarantined for o in outcomes),
        "expectations": sum(len(o.expectations) for o in outcomes),
        # First, where a person looks first: among hundreds of good days the bad ones would have to be searched for.
        **table("not_released", [_row(o) for o in outcomes if o.partition in bad]),
        **table("table_by_partition", [_row(o) for o in outcomes]),
    }
    if len(outcomes) == 1:
        metadata |= table("rules", outcomes[0].expectations)
    else:
        metadata |= plot_metadata(
            platform.store(),
            "Rows, quarantined rows and nulls by partition",
            [o.partition for o in outcomes],
            rows=[o.rows for o in outcomes],
            quarantined_rows=[o.rows_quarantined for o in outcomes],
            null_cells=[o.null_cells for o in outcomes],
        )
    shown = ", ".join(filter(None, bad[:10]))
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="quality",
        passed=len(bad) <= limit * len(outcomes),
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{len(bad)} of {len(outcomes)} partitions not released {shown}".strip(),
        metadata=guarded(metadata),
    )


def _row(outcome: "IngestOutcome") -> dict[str, str | int | float | bool | None]:
    status = outcome.version.status if outcome.version is not None else outcome.status
    return {
        "partition": outcome.partition,
        "status": status,
        "rows": outcome.rows,
        "quarantined": outcome.rows_quarantined,
        "reason": outcome.reason[:80],
    }
