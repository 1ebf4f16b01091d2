"""Predictions: answers that were given, each once, possible under the endpoint's epoch that gave them."""

from typing import Any

import sqlalchemy as sa

from headway.catalog.commands import Document, Step, dump
from headway.catalog.encoding import encode
from headway.catalog.endpoints import read_event
from headway.catalog.errors import ImpossiblePrediction, Nondeterminism, UnknownPrediction
from headway.catalog.lineage import keep_blobs
from headway.catalog.registry_documents import prediction_of_row
from headway.catalog.registry_facts import Prediction, PredictionBatch, PredictionFacts
from headway.catalog.tables import endpoint, prediction

_MANY = 500


def aggregate(endpoint_id: str) -> str:
    """Return the aggregate of an endpoint's predictions; promotions do not wait for it."""
    return f"predictions:{endpoint_id}"


def record(step: Step, batch: PredictionBatch) -> Document:
    """Keep the answers of a batch that are not kept yet."""
    served = read_event(step.connection, step.tenant, batch.endpoint_id, batch.endpoint_epoch).row
    for arm in sorted({item.arm for item in batch.records}):
        version = served.stable if arm == "stable" else served.candidate
        if version != batch.model_version:
            raise ImpossiblePrediction(batch.endpoint_id, batch.endpoint_epoch, arm, batch.model_version, version)
    known = _known(step, batch)
    for item in batch.records:
        if item.prediction_id in known:
            _check_same(known[item.prediction_id], item, batch)
    rows = [_values(step, batch, item) for item in batch.records if item.prediction_id not in known]
    if rows:
        step.connection.execute(sa.insert(prediction), rows)
    keep_blobs(step, batch.blobs, "predictions", f"{batch.endpoint_id}@{batch.endpoint_epoch}")
    return {"endpoint": batch.endpoint_id, "epoch": batch.endpoint_epoch, "recorded": len(batch.records)}


def read(connection: sa.Connection, tenant: str, prediction_id: str) -> Prediction:
    """Return one prediction.

    Raises:
        UnknownPrediction: there is no such prediction.
    """
    row = connection.execute(_predictions(tenant).where(prediction.c.prediction_id == prediction_id)).first()
    if row is None:
        raise UnknownPrediction(prediction_id)
    return prediction_of_row(row)


def read_ids(connection: sa.Connection, tenant: str, prefix: str) -> list[str]:
    """Return the prediction ids that begin with a text, in order."""
    column = prediction.c.prediction_id
    mine = (prediction.c.tenant_id == tenant, column.startswith(prefix, autoescape=True))
    return list(connection.execute(sa.select(column).where(*mine).order_by(column)).scalars())


def _predictions(tenant: str) -> "sa.Select[Any]":
    same = sa.and_(endpoint.c.tenant_id == prediction.c.tenant_id, endpoint.c.endpoint_id == prediction.c.endpoint_id)
    return (
        sa.select(prediction, endpoint.c.model_id)
        .select_from(prediction)
        .join(endpoint, same)
        .where(prediction.c.tenant_id == tenant)
    )


def _known(step: Step, batch: PredictionBatch) -> dict[str, Prediction]:
    ids = [item.prediction_id for item in batch.records]
    found: dict[str, Prediction] = {}
    for start in range(0, len(ids), _MANY):
        statement = _predictions(step.tenant).where(prediction.c.prediction_id.in_(ids[start : start + _MANY]))
        found |= {row.prediction_id: prediction_of_row(row) for row in step.connection.execute(statement)}
    return found


def _check_same(stored: Prediction, given: PredictionFacts, batch: PredictionBatch) -> None:
    told = encode(stored)
    wanted = encode(given) | {
        "endpoint_id": batch.endpoint_id,
        "endpoint_epoch": batch.endpoint_epoch,
        "model_version": batch.model_version,
    }
    for field, value in wanted.items():
        if told[field] != value:
            raise Nondeterminism(f"prediction {given.prediction_id}", field, told[field], value)


def _values(step: Step, batch: PredictionBatch, item: PredictionFacts) -> dict[str, object]:
    return {
        "tenant_id": step.tenant,
        "prediction_id": item.prediction_id,
        "endpoint_id": batch.endpoint_id,
        "endpoint_epoch": batch.endpoint_epoch,
        "model_version": batch.model_version,
        "arm": item.arm,
        "feature_as_of": item.feature_as_of,
        "feature_status": item.feature_status,
        "feature_row_digest": item.feature_row_digest,
        "request_digest": item.request_digest,
        "output": dump(item.output),
        "status": item.status,
        "latency_us": item.latency_us,
        "at": step.now,
        "detail_digest": item.detail_digest,
        "detail_row": item.row,
    }
