"""Between rows, stored answers and the records of labels, reports and retraining."""

from typing import Any, cast

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog.commands import Document, load
from headway.catalog.documents import blobs_of
from headway.catalog.monitoring_facts import (
    LabelFacts,
    LabelOutcome,
    Report,
    RetrainDecision,
    RetrainFacts,
    RetrainRequest,
)

_PLAIN_LABEL = ("label_id", "endpoint_id", "source", "observed_at", "received_at", "actor", "reason")
_PLAIN_REPORT = (
    "kind",
    "endpoint_id",
    "verdict",
    "reason",
    "document_digest",
    "made_at",
    "seq",
    "created_at",
)
_PLAIN_REQUEST = (
    "request_id",
    "state",
    "reason",
    "as_of",
    "run_id",
    "dagster_run_id",
    "candidate_version",
    "cost_seconds",
    "epoch",
    "created_at",
    "closed_at",
)
_PLAIN_DECISION = ("pipeline", "endpoint_id", "decision", "reason", "fingerprint", "made_at", "seq")


def label_facts_of_row(row: "sa.Row[Any]") -> LabelFacts:
    """Return the facts of a `label` or `label_inbox` row."""
    plain = {name: getattr(row, name) for name in _PLAIN_LABEL}
    address = {"prediction_id": None, "caller_id": None, "event_key": None, row.address_kind: row.address}
    return LabelFacts(**plain, **address, value=load(row.value))


def outcomes_of(document: Document) -> tuple[LabelOutcome, ...]:
    """Return the outcomes that `encode` wrote."""
    listed = cast("list[dict[str, Any]]", document["outcomes"])
    return tuple(LabelOutcome(**_tupled(item, "candidates")) for item in listed)


def report_of(document: Document) -> Report:
    """Return the report that `encode` wrote."""
    fields = dict(cast("dict[str, Any]", document))
    blobs = blobs_of(fields.pop("blobs"))
    return Report(**fields, blobs=blobs)


def report_of_row(row: "sa.Row[Any]") -> Report:
    """Return the report of a `report` row."""
    return Report(
        **{name: getattr(row, name) for name in _PLAIN_REPORT},
        model_version=row.version or None,
        window=row.time_window,
        start=row.start_at,
        end=row.end_at,
        metrics=cast("Any", load(row.metrics)),
        blobs=blobs_of(load(row.blobs)),
    )


def retrain_request_of(document: Json) -> RetrainRequest:
    """Return the request that `encode` wrote."""
    fields = dict(cast("dict[str, Any]", document))
    return RetrainRequest(facts=_retrain_facts_of(fields.pop("facts")), **fields)


def retrain_request_of_row(row: "sa.Row[Any]") -> RetrainRequest:
    """Return the request of a `retrain_request` row."""
    plain = {name: getattr(row, name) for name in _PLAIN_REQUEST}
    return RetrainRequest(facts=_retrain_facts_of(load(row.facts)), **plain)


def retrain_decision_of_row(row: "sa.Row[Any]") -> RetrainDecision:
    """Return the decision of a `retrain_decision` row."""
    return RetrainDecision(**{name: getattr(row, name) for name in _PLAIN_DECISION})


def _retrain_facts_of(document: Json) -> RetrainFacts:
    return RetrainFacts(**_tupled(cast("dict[str, Any]", document), "evidence"))


def _tupled(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {**fields, name: tuple(fields[name])}
