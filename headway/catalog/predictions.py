"""Predictions: answers that were given, each once, possible under the endpoint's epoch that gave them."""

from collections.abc import Sequence
from typing import Any, Literal

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog.commands import Document, Step, chunks, dump
from headway.catalog.encoding import encode
from headway.catalog.endpoints import read_event
from headway.catalog.errors import ImpossiblePrediction, Nondeterminism, SegmentMoved, UnknownPrediction
from headway.catalog.labels import attach_waiting
from headway.catalog.lineage import keep_blobs
from headway.catalog.monitoring_facts import SegmentProgress, Shipment
from headway.catalog.registry_documents import prediction_of_row
from headway.catalog.registry_facts import Prediction, PredictionBatch, PredictionFacts
from headway.catalog.tables import endpoint, inference_segment, prediction

_OWNER = "predictions"


def aggregate(endpoint_id: str) -> str:
    """Return the aggregate of an endpoint's predictions and their labels; promotions do not wait for it."""
    return f"predictions:{endpoint_id}"


def segment_aggregate(server: str, segment: str) -> str:
    """Return the aggregate of a log segment."""
    return f"segment:{server}/{segment}"


def record(step: Step, batch: PredictionBatch) -> Document:
    """Keep the answers of a batch that are not kept yet, and attach the labels that waited for them."""
    _keep(step, batch, None)
    keep_blobs(step, batch.blobs, _OWNER, _owner(batch))
    return {"endpoint": batch.endpoint_id, "epoch": batch.endpoint_epoch, "recorded": len(batch.records)}


def ship(step: Step, shipment: Shipment) -> Document:
    """Keep a range of a log segment: its answers, and how far the segment is recorded."""
    progress = shipment.segment
    stored = read_cursor(step.connection, step.tenant, progress.server, progress.segment)
    if stored != progress.from_offset:
        raise SegmentMoved(progress.server, progress.segment, stored, progress.from_offset)
    step.insert(inference_segment, **encode(progress), at=step.now, command_key=step.key)
    for endpoint_id in sorted({batch.endpoint_id for batch in shipment.batches}):
        step.database.lock(step.connection, step.tenant, aggregate(endpoint_id))
    for batch in shipment.batches:
        _keep(step, batch, progress)
    # In order of digest over all batches: two shipments that share blobs never wait for each other in a circle.
    owned = {(blob, _owner(batch)) for batch in shipment.batches for blob in batch.blobs}
    for blob, owner in sorted(owned, key=lambda item: (item[0].digest, item[1])):
        keep_blobs(step, (blob,), _OWNER, owner)
    return {"recorded": progress.records}


def _keep(step: Step, batch: PredictionBatch, progress: SegmentProgress | None) -> None:
    served = read_event(step.connection, step.tenant, batch.endpoint_id, batch.endpoint_epoch).row
    for arm in sorted({item.arm for item in batch.records}):
        version = served.stable if arm == "stable" else served.candidate
        if version != batch.model_version:
            raise ImpossiblePrediction(batch.endpoint_id, batch.endpoint_epoch, arm, batch.model_version, version)
    known = read_many(step.connection, step.tenant, [item.prediction_id for item in batch.records])
    for item in batch.records:
        if item.prediction_id in known:
            _check_same(known[item.prediction_id], item, batch, progress)
    new = [item for item in batch.records if item.prediction_id not in known]
    step.insert_many(prediction, [_values(step, batch, item, progress) for item in new])
    attach_waiting(step, batch.endpoint_id, new)


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


def read_many(connection: sa.Connection, tenant: str, ids: Sequence[str]) -> dict[str, Prediction]:
    """Return the predictions that there are among those asked for, by id."""
    found: dict[str, Prediction] = {}
    for chunk in chunks(ids):
        statement = _predictions(tenant).where(prediction.c.prediction_id.in_(chunk))
        found |= {row.prediction_id: prediction_of_row(row) for row in connection.execute(statement)}
    return found


def read_asked(
    connection: sa.Connection, tenant: str, endpoint_id: str, start: int, end: int, after: str, limit: int
) -> list[Prediction]:
    """Return at most `limit` predictions asked in [start, end) whose id follows `after`, in order of id."""
    column = prediction.c.prediction_id
    mine = (*asked_in(endpoint_id, start, end), column > after)
    statement = _predictions(tenant).where(*mine).order_by(column).limit(limit)
    return [prediction_of_row(row) for row in connection.execute(statement)]


def count_asked(connection: sa.Connection, tenant: str, endpoint_id: str, start: int, end: int) -> int:
    """Return how many predictions were asked in [start, end)."""
    mine = (prediction.c.tenant_id == tenant, *asked_in(endpoint_id, start, end))
    return connection.execute(sa.select(sa.func.count()).select_from(prediction).where(*mine)).scalar_one()


def read_addressed(
    connection: sa.Connection,
    tenant: str,
    endpoint_id: str,
    kind: Literal["caller_id", "event_key"],
    addresses: Sequence[str],
) -> list[Prediction]:
    """Return the endpoint's predictions with one of these ids of callers, or event keys, in order of id."""
    found: list[Prediction] = []
    for chunk in chunks(addresses):
        mine = (prediction.c.endpoint_id == endpoint_id, prediction.c[kind].in_(chunk))
        found += map(prediction_of_row, connection.execute(_predictions(tenant).where(*mine)))
    return sorted(found, key=lambda item: item.prediction_id)


def asked_in(endpoint_id: str, start: int, end: int) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions under which a prediction was asked of an endpoint in [start, end)."""
    columns = prediction.c
    return (columns.endpoint_id == endpoint_id, columns.asked_at >= start, columns.asked_at < end)


def read_cursor(connection: sa.Connection, tenant: str, server: str, segment: str) -> int:
    """Return up to which byte a log segment is recorded; 0 for one that nothing was recorded of."""
    columns = inference_segment.c
    mine = (columns.tenant_id == tenant, columns.server == server, columns.segment == segment)
    reached = sa.select(sa.func.coalesce(sa.func.max(columns.to_offset), 0)).where(*mine)
    return connection.execute(reached).scalar_one()


def read_shipments(connection: sa.Connection, tenant: str) -> list[SegmentProgress]:
    """Return what was recorded of each log segment in total, in order of server and segment."""
    columns = inference_segment.c
    totals = [sa.func.sum(columns[name]).label(name) for name in ("records", "torn", "dropped")]
    statement = (
        sa.select(columns.server, columns.segment, sa.func.max(columns.to_offset).label("to_offset"), *totals)
        .where(columns.tenant_id == tenant)
        .group_by(columns.server, columns.segment)
        .order_by(columns.server, columns.segment)
    )
    return [
        SegmentProgress(row.server, row.segment, 0, row.to_offset, int(row.records), int(row.torn), int(row.dropped))
        for row in connection.execute(statement)
    ]


def _owner(batch: PredictionBatch) -> str:
    return f"{batch.endpoint_id}@{batch.endpoint_epoch}"


def _predictions(tenant: str) -> "sa.Select[Any]":
    same = sa.and_(endpoint.c.tenant_id == prediction.c.tenant_id, endpoint.c.endpoint_id == prediction.c.endpoint_id)
    return (
        sa.select(prediction, endpoint.c.model_id)
        .select_from(prediction)
        .join(endpoint, same)
        .where(prediction.c.tenant_id == tenant)
    )


def _check_same(
    stored: Prediction, given: PredictionFacts, batch: PredictionBatch, progress: SegmentProgress | None
) -> None:
    told = encode(stored)
    wanted = encode(given) | {
        "endpoint_id": batch.endpoint_id,
        "endpoint_epoch": batch.endpoint_epoch,
        "model_version": batch.model_version,
        **_log(progress),
    }
    for field, value in wanted.items():
        if told[field] != value:
            raise Nondeterminism(f"prediction {given.prediction_id}", field, told[field], value)


def _log(progress: SegmentProgress | None) -> dict[str, Json]:
    if progress is None:
        return {"log_server": None, "log_segment": None}
    return {"log_server": progress.server, "log_segment": progress.segment}


def _values(
    step: Step, batch: PredictionBatch, item: PredictionFacts, progress: SegmentProgress | None
) -> dict[str, object]:
    return {
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
        "asked_at": item.asked_at,
        "observed_at": item.observed_at,
        "caller_id": item.caller_id,
        "event_key": item.event_key,
        "score": item.score,
        "segments": dump(item.segments),
        "source": item.source,
        **_log(progress),
    }
