"""Between rows, stored answers and records. A replayed answer decodes to the very record that the first call gave."""

from collections.abc import Mapping
from typing import Any, cast

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.artifacts.store import Blob
from headway.catalog.commands import Document, load
from headway.catalog.facts import (
    DatasetVersion,
    DatasetVersionFacts,
    Evidence,
    FeatureSetFacts,
    FeatureSetVersion,
    FeatureSnapshot,
    SnapshotFacts,
    SnapshotInput,
    SnapshotState,
    blob_documents,
)

_VERSION_FIELDS = (
    "dataset",
    "partition",
    "content_digest",
    "schema_hash",
    "manifest_digest",
    "rows",
    "event_time_min",
    "event_time_max",
    "watermark",
    "privacy",
    "reason",
    "source_digest",
    "run_id",
)
_SNAPSHOT_FIELDS = (
    "pipeline",
    "partition",
    "feature_set",
    "feature_set_version",
    "content_digest",
    "manifest_digest",
    "rows",
    "as_of_min",
    "as_of_max",
    "source_watermarks",
    "proof_digest",
    "proof_passed",
    "excluded",
    "run_id",
)


def facts_document(facts: DatasetVersionFacts) -> Document:
    """Return the facts of a dataset version as JSON."""
    document: Document = {name: getattr(facts, name) for name in _VERSION_FIELDS}
    return document | {"blobs": blob_documents(facts.blobs), "metadata": facts.metadata}


def version_document(version: DatasetVersion) -> Document:
    """Return a dataset version as JSON."""
    return {
        "facts": facts_document(version.facts),
        "version": version.version,
        "status": version.status,
        "status_reason": version.status_reason,
        "evidence": None if version.evidence is None else version.evidence.document(),
        "created_at": version.created_at,
    }


def version_of(document: Document) -> DatasetVersion:
    """Return the dataset version that `version_document` wrote."""
    fields = cast("dict[str, Any]", document)
    facts = fields["facts"]
    return DatasetVersion(
        facts=DatasetVersionFacts(**facts | {"blobs": blobs_of(facts["blobs"])}),
        version=fields["version"],
        status=fields["status"],
        status_reason=fields["status_reason"],
        evidence=evidence_of(fields["evidence"]),
        created_at=fields["created_at"],
    )


def version_of_row(row: "sa.Row[Any]") -> DatasetVersion:
    """Return the dataset version of a `dataset_version` row joined with its last event."""
    return DatasetVersion(
        facts=DatasetVersionFacts(
            dataset=row.dataset_id,
            rows=row.row_count,
            blobs=blobs_of(load(row.blobs)),
            metadata=cast("Mapping[str, Json]", load(row.metadata)),
            **{name: getattr(row, name) for name in _VERSION_FIELDS if name not in ("dataset", "rows")},
        ),
        version=row.version,
        status=row.to_status,
        status_reason=row.status_reason,
        evidence=None if row.evidence is None else evidence_of(load(row.evidence)),
        created_at=row.created_at,
    )


def evidence_of(document: Json) -> Evidence | None:
    """Return the evidence that `Evidence.document` wrote, None for None."""
    if document is None:
        return None
    fields = dict(cast("dict[str, Any]", document))
    blobs = blobs_of(fields.pop("blobs"))
    return Evidence(**fields, blobs=blobs)


def feature_set_document(version: FeatureSetVersion) -> Document:
    """Return a feature set version as JSON."""
    facts = version.facts
    return {
        "feature_set": facts.feature_set,
        "contract_digest": facts.contract_digest,
        "code_digest": facts.code_digest,
        "contract": facts.contract,
        "version": version.version,
        "created_at": version.created_at,
    }


def feature_set_of(document: Document) -> FeatureSetVersion:
    """Return the feature set version that `feature_set_document` wrote."""
    fields = dict(cast("dict[str, Any]", document))
    version, created_at = fields.pop("version"), fields.pop("created_at")
    return FeatureSetVersion(FeatureSetFacts(**fields), version, created_at)


def feature_set_of_row(row: "sa.Row[Any]") -> FeatureSetVersion:
    """Return the feature set version of a `feature_set_version` row."""
    facts = FeatureSetFacts(row.feature_set, row.contract_digest, row.code_digest, load(row.contract))
    return FeatureSetVersion(facts, row.version, row.created_at)


def snapshot_facts_document(facts: SnapshotFacts) -> Document:
    """Return the facts of a snapshot as JSON."""
    document: Document = {name: getattr(facts, name) for name in _SNAPSHOT_FIELDS}
    return document | {
        "inputs": inputs_document(facts.inputs),
        "blobs": blob_documents(facts.blobs),
        "metadata": facts.metadata,
    }


def inputs_document(inputs: tuple[SnapshotInput, ...]) -> Json:
    """Return pinned inputs as JSON."""
    return [
        {
            "dataset": item.dataset,
            "version": item.version,
            "content_digest": item.content_digest,
            "evidence_digest": item.evidence_digest,
            "quarantine_digest": item.quarantine_digest,
        }
        for item in inputs
    ]


def snapshot_document(snapshot: FeatureSnapshot) -> Document:
    """Return a snapshot as JSON."""
    return {
        "facts": snapshot_facts_document(snapshot.facts),
        "snapshot_id": snapshot.snapshot_id,
        "created_at": snapshot.created_at,
    }


def snapshot_of(document: Document) -> FeatureSnapshot:
    """Return the snapshot that `snapshot_document` wrote."""
    fields = cast("dict[str, Any]", document)
    facts = fields["facts"]
    return FeatureSnapshot(
        facts=SnapshotFacts(**facts | {"inputs": inputs_of(facts["inputs"]), "blobs": blobs_of(facts["blobs"])}),
        snapshot_id=fields["snapshot_id"],
        created_at=fields["created_at"],
    )


def snapshot_of_row(row: "sa.Row[Any]") -> FeatureSnapshot:
    """Return the snapshot of a `feature_snapshot` row. Only proved snapshots have a row."""
    decoded = {name: cast("Any", load(getattr(row, name))) for name in ("source_watermarks", "excluded", "metadata")}
    plain = {name: getattr(row, name) for name in _SNAPSHOT_FIELDS if name not in {*decoded, "rows", "proof_passed"}}
    facts = SnapshotFacts(
        **plain,
        **decoded,
        rows=row.row_count,
        proof_passed=True,
        inputs=inputs_of(load(row.inputs)),
        blobs=blobs_of(load(row.blobs)),
    )
    return FeatureSnapshot(facts, row.snapshot_id, row.created_at)


def state_document(state: SnapshotState) -> Document:
    """Return the state of a snapshot partition as JSON."""
    return {
        "pipeline": state.pipeline,
        "partition": state.partition,
        "status": state.status,
        "snapshot": None if state.snapshot is None else snapshot_document(state.snapshot),
        "reason": state.reason,
        "blocking": list(state.blocking),
        "at": state.at,
    }


def state_of(document: Document) -> SnapshotState:
    """Return the state that `state_document` wrote."""
    fields = cast("dict[str, Any]", document)
    snapshot = None if fields["snapshot"] is None else snapshot_of(fields["snapshot"])
    return SnapshotState(**fields | {"snapshot": snapshot, "blocking": tuple(fields["blocking"])})


def blobs_of(documents: Json) -> tuple[Blob, ...]:
    """Return the blobs that `blob_documents` wrote."""
    return tuple(Blob(**item) for item in cast("list[dict[str, Any]]", documents))


def inputs_of(documents: Json) -> tuple[SnapshotInput, ...]:
    """Return the inputs that `inputs_document` wrote."""
    return tuple(SnapshotInput(**item) for item in cast("list[dict[str, Any]]", documents))
