"""Between rows, stored answers and the records of registry and endpoints."""

from typing import Any, cast

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog.commands import Document, load
from headway.catalog.documents import blobs_of
from headway.catalog.registry_facts import (
    Attestation,
    Endpoint,
    EndpointEvent,
    GatePolicy,
    GateResult,
    ModelVersion,
    ModelVersionFacts,
    Prediction,
    PromotionEvidence,
)

_PLAIN_VERSION = (
    "model_id",
    "pipeline",
    "kind",
    "run_id",
    "manifest_digest",
    "contract_hash",
    "feature_set",
    "feature_set_version",
    "as_of",
)
_PLAIN_RESULT = (
    "model_id",
    "version",
    "gate",
    "verdict",
    "reason",
    "policy_version",
    "statement_digest",
    "artifact_digest",
    "attempt",
    "at",
)
_PLAIN_ATTESTATION = (
    "statement_digest",
    "subject_digest",
    "predicate_type",
    "key_id",
    "role",
    "envelope_digest",
    "created_at",
)
_PLAIN_PREDICTION = (
    "prediction_id",
    "feature_as_of",
    "feature_status",
    "feature_row_digest",
    "request_digest",
    "arm",
    "status",
    "latency_us",
    "detail_digest",
    "endpoint_id",
    "endpoint_epoch",
    "model_id",
    "model_version",
    "at",
    "asked_at",
    "observed_at",
    "caller_id",
    "event_key",
    "score",
    "source",
    "log_server",
    "log_segment",
)


def model_version_of(document: Document) -> ModelVersion:
    """Return the model version that `encode` wrote."""
    fields = cast("dict[str, Any]", document)
    facts = ModelVersionFacts(**fields["facts"] | {"blobs": blobs_of(fields["facts"]["blobs"])})
    return ModelVersion(facts, fields["version"], fields["created_at"], fields["retired"])


def model_version_of_row(row: "sa.Row[Any]") -> ModelVersion:
    """Return the model version of a `model_version` row joined with its model and its retirement."""
    facts = ModelVersionFacts(
        **{name: getattr(row, name) for name in _PLAIN_VERSION},
        contract=cast("Any", load(row.contract)),
        metadata=cast("Any", load(row.metadata)),
        blobs=blobs_of(load(row.blobs)),
    )
    return ModelVersion(facts, row.version, row.created_at, row.retired is not None)


def attestation_of(document: Document) -> Attestation:
    """Return the attestation that `encode` wrote."""
    fields = dict(cast("dict[str, Any]", document))
    blobs = blobs_of(fields.pop("blobs"))
    return Attestation(**fields, blobs=blobs)


def attestation_of_row(row: "sa.Row[Any]") -> Attestation:
    """Return the attestation of an `attestation` row."""
    return Attestation(**{name: getattr(row, name) for name in _PLAIN_ATTESTATION}, blobs=blobs_of(load(row.blobs)))


def policy_of(document: Document) -> GatePolicy:
    """Return the policy that `encode` wrote."""
    return GatePolicy(**cast("dict[str, Any]", document))


def policy_of_row(row: "sa.Row[Any]") -> GatePolicy:
    """Return the policy of a `gate_policy` row."""
    return GatePolicy(row.model_id, row.policy_version, cast("Any", load(row.policy)), row.policy_digest)


def gate_result_of(document: Document) -> GateResult:
    """Return the result that `encode` wrote."""
    return GateResult(**cast("dict[str, Any]", document))


def gate_result_of_row(row: "sa.Row[Any]") -> GateResult:
    """Return the result of a `gate_result` row."""
    return GateResult(**{name: getattr(row, name) for name in _PLAIN_RESULT}, metrics=cast("Any", load(row.metrics)))


def endpoint_of(document: Json) -> Endpoint:
    """Return the endpoint that `encode` wrote."""
    return Endpoint(**cast("dict[str, Any]", document))


def endpoint_of_row(row: "sa.Row[Any]") -> Endpoint:
    """Return the endpoint of an `endpoint` row."""
    return Endpoint(
        row.endpoint_id,
        row.model_id,
        row.contract_major,
        row.epoch,
        row.stable,
        row.previous,
        row.candidate,
        row.phase,
        row.basis_points,
        row.arm_salt,
    )


def endpoint_event_of_row(row: "sa.Row[Any]") -> EndpointEvent:
    """Return the event of an `endpoint_event` row."""
    evidence = None if row.evidence is None else PromotionEvidence(**cast("Any", load(row.evidence)))
    endpoint = endpoint_of(load(row.row))
    return EndpointEvent(row.endpoint_id, row.epoch, row.operation, endpoint, row.reason, evidence, row.actor, row.at)


def prediction_of_row(row: "sa.Row[Any]") -> Prediction:
    """Return the prediction of a `prediction` row joined with its endpoint's model."""
    plain = {name: getattr(row, name) for name in _PLAIN_PREDICTION}
    segments = cast("Any", load(row.segments))
    return Prediction(**plain, output=load(row.output), row=row.detail_row, segments=segments)
