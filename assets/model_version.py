"""Stage `model_version`: evaluates a trained model on the month after `as_of`, runs its gates, registers it.

The checks show what the gates said; what the registry believes are the signed statements behind them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, interval_metadata, table
from assets.keys import model_version_key, snapshot_key, training_key
from assets.partitions import partitions_definition
from assets.text_version import intervals, text_metadata, with_intervals
from assets.training_run import code_version
from assets.version_card import version_facts
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from headway.training.window import WHOLE, as_of_calendar
from resources.platform import Platform
from trainer.blobs import Json

if TYPE_CHECKING:
    from headway.catalog.registry_facts import ModelVersion
    from headway.registry.candidates import Candidate

_METRICS = ("auc", "log_loss", "calibration_error", "gain")


def build_model_version(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The model version asset of a pipeline, one partition per month of `as_of`, with one check per gate."""
    spec = pipeline.spec
    key = model_version_key(spec.name)
    assert spec.promotion is not None
    gates = [gate.gate for gate in spec.promotion.gates]
    on = "the documents that its snapshot held out" if spec.text is not None else "the month after `as_of`"
    mapping = None if spec.text is not None else dg.TimeWindowPartitionMapping()

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Versions of `{spec.name}`: judged on {on}, every verdict signed.",
        owners=[spec.owner],
        kinds={"pytorch", "safetensors"},
        tags={"headway/stage": "model_version"},
        metadata={"dagster/code_references": code_references(pipeline, "promotion", "model.py")},
        code_version=code_version(pipeline),
        partitions_def=None if spec.text is not None else partitions_definition(as_of_calendar(spec)),
        backfill_policy=None if spec.text is not None else dg.BackfillPolicy.multi_run(1),
        deps=[
            training_key(spec.name),
            dg.AssetDep(snapshot_key(spec.name), partition_mapping=mapping),
        ],
        check_specs=[dg.AssetCheckSpec(gate, asset=key, blocking=True, description=_TEXTS[gate]) for gate in gates],
    )
    def model_version(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.registry.candidates import judge_run, newest_run

        step_dies_with_run()
        services = platform.services()
        try:
            partition = context.partition_key if context.has_partition_key else WHOLE
            shown = _shown_run(context, training_key(spec.name), partition)
            known = shown != "" and shown in services.catalog.run_ids(services.principal, shown)
            run = (
                services.catalog.run(services.principal, shown) if known else newest_run(services, spec.name, partition)
            )
            found = judge_run(services, platform.keyring(), pipeline, run, context.log.info)
        except HeadwayError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        return _report(platform, key, gates, found)

    return model_version


def _shown_run(context: dg.AssetExecutionContext, key: dg.AssetKey, partition: str) -> str:
    """The run that the newest materialization of this partition's training shows: what a person looks at is judged.

    Empty when Dagster shows none; then the newest succeeded run of the catalog is meant.
    """
    wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=None if partition == WHOLE else [partition])
    for record in context.instance.fetch_materializations(wanted, limit=1).records:
        found = record.asset_materialization
        if found is not None and "run_id" in found.metadata:
            return str(found.metadata["run_id"].value)
    return ""


_TEXTS = {
    "auc_over_historical_rate": "AUC exceeds that of the historical rate by the margin, at the interval's lower end.",
    "auc_over_logistic": "AUC exceeds that of logistic regression on the same features and rows.",
    "auc_over_champion": "AUC against the version that serves now; without one, against the historical rate.",
    "bits_per_byte_over_gzip": "Fewer bits per byte than gzip -9: by file at the interval's lower end, and all as one.",
    "bits_per_byte_over_champion": "Bits per byte against the version that serves now; without one, against gzip -9.",
    "segments": "No segment with enough rows loses more than its allowance.",
    "finite_outputs": "Missing and out-of-range inputs, or any order of tokens, get finite answers.",
    "contract": "The contract is there, and compatible with the version that serves now.",
    "leakage_proof": "The leakage proof of every snapshot used verifies.",
    "weights_only": "The weights load from safetensors alone.",
}


def _report(
    platform: Platform, key: dg.AssetKey, gates: Sequence[str], found: "Sequence[Candidate]"
) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument]

    from headway.registry.card import card_rows
    from headway.registry.dossier import newest_results

    last = found[-1]
    services = platform.services()
    rows = card_rows(services, last.version)
    refused = [f"{c.version.kind} (version {c.version.version})" for c in found if not c.passed]
    facts: dict[str, Any] = {
        "version": last.version.version,
        "kind": last.version.kind,
        "passed": last.passed,
        "status": "up to date" if last.judgement is None else "judged",
        "manifest_digest": last.version.manifest_digest,
        "run_id": last.version.run_id,
        "refused": ", ".join(refused) or "none",
        "show": dg.MetadataValue.md(f"`headway models show {last.version.model_id}@{last.version.version}`"),
        **version_facts(services, last.version),
        **_measured(platform, last.version, rows),
    }
    results = newest_results(services, last.version)
    checks = [_check(key, gate, results.get(gate), last.version.kind) for gate in gates]
    return dg.MaterializeResult(
        metadata=guarded(facts), data_version=dg.DataVersion(last.version.manifest_digest), check_results=checks
    )


def _measured(platform: Platform, version: "ModelVersion", rows: Sequence[Mapping[str, Json]]) -> dict[str, Any]:
    from headway.registry.judge import evaluation_report
    from headway.registry.text_card import is_text

    report = evaluation_report(platform.services(), version)
    if report is not None and is_text(report):
        return text_metadata(platform.store(), report, rows)
    return {
        **table("metrics", [with_intervals(row, _METRICS) for row in rows]),
        **interval_metadata(
            platform.store(), "AUC on the month after as_of, with intervals by day", intervals(rows, "auc")
        ),
    }


def _check(key: dg.AssetKey, gate: str, result: Any, kind: str) -> dg.AssetCheckResult:  # noqa: ANN401
    if result is None:
        return dg.AssetCheckResult(
            asset_key=key, check_name=gate, passed=True, description=f"does not apply to a version of kind {kind}"
        )
    scalars = {n: v for n, v in result.metrics.items() if isinstance(v, int | float | str)}
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=gate,
        passed=result.verdict == "pass",
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{result.verdict}: {result.reason}",
        metadata={**scalars, "statement_digest": result.statement_digest, "attempt": result.attempt},
    )
