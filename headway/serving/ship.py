"""Ships what servers logged into the catalog: answers in time, each once, with the document that explains it.

The cursor of each segment moves in the commit that records its answers, so that nothing is lost and nothing comes
twice, whenever the shipping process dies. One process ships a server's log at a time (flock); a rival on another
machine is found by the cursor.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.catalog.errors import SegmentMoved
from headway.catalog.monitoring_facts import SegmentProgress, Shipment
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts
from headway.datasets.digest import row_digests
from headway.declaration import PipelineSpec
from headway.features.online.pins import groups_of, read_pins
from headway.loading import Pipeline
from headway.monitoring.events import event_keys
from headway.services import Services
from headway.serving.detail import RowDigests, put_detail, verified_inputs
from headway.serving.features import ComputedRequests, Freshness, RequestGroup
from headway.serving.live.records import Logged, Schemas, decode_record, table_of
from headway.serving.live.spool import (
    SEAL_REQUEST,
    dropped_count,
    scan_segment,
    segment_file,
    segments,
    server_running,
)
from trainer.blobs import Json

RECORDS_OF_A_SHIPMENT = 2_000
_STATUSES = ("fresh", "stale", "missing")
_VERSIONS_KEPT = 512

Lookup = Callable[[str], Pipeline | None]


@dataclass
class ShipReport:
    """What was done: answers recorded, records that were torn, answers that were dropped unlogged, segments removed.

    `records` counts answers and torn ones, `left` the segments that end (for now) with an answer of another tenant, or
    of a pipeline that is not known here.
    """

    shipped: int = 0
    records: int = 0
    torn: int = 0
    dropped: int = 0
    segments_removed: int = 0
    left: int = 0


@dataclass
class _Shop:
    """What the steps of one shipping share; row digests are those of released versions, which never change."""

    services: Services
    lookup: Lookup
    report: ShipReport
    digests: RowDigests = field(default_factory=dict)
    _pipelines: dict[str, Pipeline | None] = field(default_factory=dict[str, Pipeline | None])

    def pipeline(self, name: str) -> Pipeline | None:
        """The pipeline of a name, looked up once: to load a declaration takes longer than to ship many answers."""
        if name not in self._pipelines:
            self._pipelines[name] = self.lookup(name)
        return self._pipelines[name]


def ship(services: Services, lookup: Lookup, serving_folder: Path, *, seal: bool = False) -> ShipReport:
    """Record every whole answer that any server of this home has logged and that is not recorded yet.

    Args:
        services: the catalog and store; answers of other tenants are left.
        lookup: a pipeline by name, None for one that is not known; its answers are left.
        serving_folder: `HEADWAY_HOME/serving`.
        seal: ask running servers to end their present segment, so that a later shipping can remove it.

    Raises:
        InputAltered: rows that an answer rests on are not what they were.
        RecordUnreadable, StoreError: the log or what it names cannot be read.
        ImpossiblePrediction, Nondeterminism: the catalog contradicts the log.
    """
    shop = _Shop(services, lookup, ShipReport())
    for spool in sorted(serving_folder.glob("*/spool")):
        with _alone(spool):
            _ship_server(shop, spool.parent.name, spool)
            if seal and server_running(spool):
                (spool / SEAL_REQUEST).touch()
    return shop.report


def _ship_server(shop: _Shop, server: str, spool: Path) -> None:
    # Listed before it is asked: a server that starts in between writes to none of these.
    names = segments(spool)
    running = server_running(spool)
    schemas = Schemas(spool)
    for name in names:
        sealed = not running or name != names[-1]
        path = segment_file(spool, name)
        while _ship_some(shop, server, spool, schemas, name, sealed=sealed):
            pass
        cursor = shop.services.catalog.segment_cursor(shop.services.principal, server, name)
        if sealed and cursor >= path.stat().st_size:
            path.unlink()
            shop.report.segments_removed += 1


def _ship_some(shop: _Shop, server: str, spool: Path, schemas: Schemas, name: str, *, sealed: bool) -> bool:
    """Record the next answers of a segment; return whether there may be more."""
    services, report = shop.services, shop.report
    cursor = services.catalog.segment_cursor(services.principal, server, name)
    scan = scan_segment(segment_file(spool, name), cursor, sealed=sealed, most=RECORDS_OF_A_SHIPMENT)
    records = [decode_record(data) for data in scan.records]
    known = [shop.pipeline(r.pipeline) if r.tenant == services.principal.tenant else None for r in records]
    if None in known:
        records = records[: known.index(None)]
        report.left += 1
        if not records:
            return False
        scan = scan_segment(segment_file(spool, name), cursor, sealed=False, most=len(records))
    if scan.end == cursor:
        return False
    dropped = _untold_drops(services, server, spool) if records else 0
    progress = SegmentProgress(server, name, cursor, scan.end, len(records), scan.torn, dropped)
    try:
        services.catalog.record_shipment(
            services.principal, None, Shipment(progress, tuple(_batches(shop, schemas, records)))
        )
    except SegmentMoved:
        # Somebody recorded these meanwhile; go on from there.
        return True
    report.shipped += len(records)
    report.records += len(records) + scan.torn
    report.torn += scan.torn
    report.dropped += dropped
    return None not in known


def _untold_drops(services: Services, server: str, spool: Path) -> int:
    told = sum(s.dropped for s in services.catalog.shipments(services.principal) if s.server == server)
    return max(0, dropped_count(spool) - told)


def _batches(shop: _Shop, schemas: Schemas, records: Sequence[Logged]) -> Iterator[PredictionBatch]:
    """One batch per endpoint, epoch and version, its answers in documents by what they rest on."""
    by_version: dict[tuple[str, int, int], dict[tuple[str, str, str], list[Logged]]] = {}
    for record in records:
        documents = by_version.setdefault((record.endpoint, record.epoch, record.version), {})
        documents.setdefault((record.pipeline, record.inputs_digest, record.schema), []).append(record)
    for (endpoint, epoch, version), documents in by_version.items():
        parts = [_document(shop, schemas, some) for some in documents.values()]
        facts = tuple(f for found, _ in parts for f in found)
        yield PredictionBatch(endpoint, epoch, version, facts, tuple({b for _, blobs in parts for b in blobs}))


def _document(
    shop: _Shop, schemas: Schemas, records: Sequence[Logged]
) -> tuple[list[PredictionFacts], tuple[Any, ...]]:
    """Store the document of answers that rest on the same inputs; their facts, and its blobs."""
    first, services = records[0], shop.services
    pipeline = shop.pipeline(first.pipeline)
    assert pipeline is not None
    asked, columns = schemas.read(first.schema)
    requests = table_of(asked, [r.request for r in records])
    values = table_of(columns, [r.values for r in records])
    observed = np.array([r.observed for r in records], np.int64)
    groups = _groups(shop, pipeline.spec, first.inputs_digest, observed, requests)
    freshness = {view: tuple(Freshness(*r.views[view]) for r in records) for view in first.views}
    computed = ComputedRequests(requests, values, observed, groups, freshness)
    outputs: list[dict[str, Json]] = [{"probability": r.probability, "degraded": list(r.degraded)} for r in records]
    detail, blobs = put_detail(services, computed, _row_digests(shop, computed), _facts(services, first), outputs)
    features, questions = row_digests(values), row_digests(requests)
    segments_of = _segments(pipeline.spec, requests, values)
    events = event_keys(pipeline.spec, requests)
    found = [
        PredictionFacts(
            prediction_id=record.prediction_id,
            feature_as_of=max((v[0] for v in record.views.values() if v[0] is not None), default=None),
            feature_status=max((v[2] for v in record.views.values()), key=_STATUSES.index),
            feature_row_digest=f"sha256:{features[row].hex()}",
            request_digest=f"sha256:{questions[row].hex()}",
            output=outputs[row],
            arm="stable",
            status="degraded" if record.degraded else "ok",
            latency_us=record.latency_us,
            detail_digest=detail,
            row=row,
            asked_at=record.asked_at,
            observed_at=record.observed,
            caller_id=record.caller_id,
            event_key=events[row],
            score=record.probability,
            segments={name: of_rows[row] for name, of_rows in segments_of.items()},
            source="online",
        )
        for row, record in enumerate(records)
    ]
    return found, blobs


def _groups(
    shop: _Shop,
    spec: PipelineSpec,
    inputs_digest: str,
    observed: NDArray[np.int64],
    requests: pa.Table,
) -> tuple[RequestGroup, ...]:
    """The groups that were computed together: rows of one label partition, or each row where a custom feature reads."""
    services = shop.services
    pins = read_pins(services, inputs_digest)
    if not spec.features.custom:
        return groups_of(services, spec, pins, observed, requests)
    found: list[RequestGroup] = []
    for row in range(requests.num_rows):
        (group,) = groups_of(services, spec, pins, observed[row : row + 1], requests.slice(row, 1))
        found.append(replace(group, rows=np.array([row], np.int64)))
    return tuple(found)


def _row_digests(shop: _Shop, computed: ComputedRequests) -> RowDigests:
    """The row digests of the versions that were read; each version is read and checked once per shipping."""
    needed = {
        (p.version.dataset, p.version.version)
        for group in computed.groups
        for versions in group.inputs.released.values()
        for p in versions
    }
    if not needed <= shop.digests.keys():
        if len(shop.digests) > _VERSIONS_KEPT:
            shop.digests.clear()
        missing = [
            g
            for g in computed.groups
            if any(
                (p.version.dataset, p.version.version) not in shop.digests
                for versions in g.inputs.released.values()
                for p in versions
            )
        ]
        shop.digests |= verified_inputs(shop.services, replace(computed, groups=tuple(missing)))
    return {key: shop.digests[key] for key in needed}


def _facts(services: Services, record: Logged) -> Mapping[str, Json]:
    """Who answered, with what; as the document of a batch prediction has it."""
    endpoint = services.catalog.endpoint(services.principal, record.endpoint)
    assert endpoint is not None
    version = services.catalog.model_version(services.principal, endpoint.model_id, record.version)
    facts = version.facts
    trained = services.catalog.feature_set(services.principal, facts.feature_set, facts.feature_set_version)
    return {
        "feature_set": facts.feature_set,
        "feature_set_version": facts.feature_set_version,
        "contract_digest": trained.contract_digest,
        "code_digest": trained.code_digest,
        "pipeline": record.pipeline,
        "model_id": version.model_id,
        "model_version": version.version,
        "artifact_digest": record.artifact_digest,
        "endpoint_id": record.endpoint,
        "endpoint_epoch": record.epoch,
    }


def _segments(spec: PipelineSpec, requests: pa.Table, values: pa.Table) -> dict[str, list[Json]]:
    """The values of the columns by which quality is told, one list per column."""
    serving = spec.serving
    assert serving is not None
    fields = {f.column: name for name, f in serving.request.items() if f.column}
    found: dict[str, list[Json]] = {}
    for name in spec.monitored_segments():
        if name in values.column_names:
            found[name] = [_json(v) for v in values.column(name).to_pylist()]
        elif name in fields:
            found[name] = [_json(v) for v in requests.column(fields[name]).to_pylist()]
    return found


def _json(value: Any) -> Json:  # noqa: ANN401 - a value of an Arrow column
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


@contextmanager
def _alone(spool: Path) -> Iterator[None]:
    descriptor = os.open(spool / "shipping", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
