"""Stage `feature_snapshot` of a pipeline that learns from text: documents as tokens, split, with a leakage proof."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, table
from assets.keys import dataset_key, snapshot_key
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from resources.platform import Platform

if TYPE_CHECKING:
    from headway.features.snapshot import SnapshotOutcome

CHECKS = {
    "leakage_proof": "No document and no near duplicate lies in two parts of the split, stored tokens are the text, "
    "and other text in the parts kept apart changes neither the tokenizer nor the training files.",
    "row_count": "One row of the table of documents per document.",
}

_COLUMNS = {
    "document": ("string", "Name of the document."),
    "split": ("string", "train, valid or held_out."),
    "group": ("string", "First name among its near duplicates, which lie in the same part."),
    "shard": ("string", "Token file, an entry of the snapshot's manifest."),
    "offset": ("int64", "First token in the file."),
    "tokens": ("int64", "Tokens, the end token included."),
    "bytes": ("int64", "Bytes of the text in UTF-8."),
    "sha256": ("string", "Digest of the text in UTF-8."),
}


def build_token_snapshot(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The snapshot asset of a pipeline that learns from text; it has no partitions."""
    spec = pipeline.spec
    assert spec.text is not None
    key = snapshot_key(spec.name)

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Documents of `{spec.name}` as tokens, split by groups of near duplicates, with a proof that "
        "nothing of the held-out side was seen.",
        owners=[spec.owner],
        kinds={"parquet", "numpy"},
        tags={"headway/stage": "feature_snapshot"},
        code_version=_code_version(pipeline),
        deps=[dataset_key(spec.name, spec.text.source)],
        automation_condition=dg.AutomationCondition.eager() & dg.AutomationCondition.all_deps_blocking_checks_passed(),
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=True, description=text) for name, text in CHECKS.items()
        ],
        metadata={
            "dagster/code_references": code_references(pipeline, "text"),
            "dagster/column_schema": dg.TableSchema(
                [dg.TableColumn(name, kind, description=text) for name, (kind, text) in _COLUMNS.items()]
            ),
        },
    )
    def feature_snapshot(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.text.snapshot import TextSnapshotBuilder

        step_dies_with_run()
        try:
            outcome = TextSnapshotBuilder(platform.services(), pipeline).build(run_id=context.run.run_id)
        except HeadwayError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        context.log.info(f"{outcome.status}: {outcome.rows} documents in {outcome.seconds:.1f} s")
        if outcome.snapshot is None and not outcome.checks:
            raise dg.Failure(f"the snapshot was not built: {outcome.reason}", allow_retries=False)
        return dg.MaterializeResult(
            metadata=_metadata(outcome),
            data_version=dg.DataVersion(outcome.snapshot.content_digest if outcome.snapshot else outcome.status),
            check_results=[_check(key, name, outcome) for name in CHECKS],
        )

    return feature_snapshot


def _code_version(pipeline: Pipeline) -> str:
    from trainer.blobs import digest_json

    assert pipeline.spec.text is not None
    return digest_json(pipeline.spec.text.model_dump(mode="json"))[7:19]


def _metadata(outcome: "SnapshotOutcome") -> dict[str, Any]:
    snapshot = outcome.snapshot
    facts: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason, "dagster/row_count": outcome.rows}
    if snapshot is not None:
        text: Any = snapshot.facts.metadata["text"]
        facts |= {
            "snapshot_id": snapshot.snapshot_id,
            "content_digest": snapshot.content_digest,
            "proof_digest": snapshot.facts.proof_digest,
            "feature_set_version": snapshot.feature_set_version,
            "tokenizer": text["kind"],
            "vocab": text["vocab"],
            "groups": text["groups"],
            "verify": dg.MetadataValue.md(f"`headway snapshots verify {snapshot.snapshot_id}`"),
            **table("parts", [{"part": part, **counts} for part, counts in text["parts"].items()]),
        }
    return guarded(facts)


def _check(key: dg.AssetKey, name: str, outcome: "SnapshotOutcome") -> dg.AssetCheckResult:
    """What this execution looked at; a snapshot that is up to date was proved when it was published."""
    found = next((c for c in outcome.checks if c.name == name), None)
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=name,
        passed=found is None or found.passed,
        severity=dg.AssetCheckSeverity.ERROR,
        description=outcome.reason if found is None or not found.passed else "held",
        metadata=guarded({} if found is None else dict(found.detail)),
    )
