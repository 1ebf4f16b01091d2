"""One delivery to one version per partition: read, split, digest, store, register, validate, release or quarantine.

Everything is repeatable. Content that a partition holds already is left alone; a changed suite validates again and
rewrites nothing; a partition that fails never stops its neighbours.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.artifacts.manifest import Manifest, manifest_entry, put_manifest
from headway.artifacts.store import Blob
from headway.catalog import DatasetVersion, DatasetVersionFacts, Evidence
from headway.datasets.digest import digest_of_rows
from headway.datasets.files import RawFile, delivery_digest
from headway.datasets.partitions import PartitionScheme
from headway.datasets.quality import Evaluation, evaluate
from headway.datasets.reading import Delivery, delivery_files, read_delivery, source_spec
from headway.datasets.refusal import DeliveryRefused, RejectedRow, counts_by_code
from headway.datasets.rowchecks import check_rows, event_times
from headway.datasets.rows import ROWS_ENTRY, NotReleased, dataset_name, load_rows, stored_rows
from headway.datasets.schema import schema_hash
from headway.datasets.suites import Suite, load_suite
from headway.datasets.verdict import Verdict, judge, quarantine_table, rules_digest, rules_digest_of
from headway.datasets.zones import iso
from headway.declaration import SourceSpec
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.services import Services
from trainer.blobs import Json, canonical_json, digest_bytes, digest_json

OutcomeStatus = Literal["released", "quarantined", "retired", "up_to_date", "failed"]
Progress = Callable[["IngestOutcome", int, int], None]

NO_DATA_PUBLISHED = "no_data_published"
PARQUET_MEDIA_TYPE = "application/vnd.apache.parquet"
REPORT_MEDIA_TYPE = "application/json"
_AT_ONCE = 64
_ENDED = ("erased",)
_JUDGED = ("released", "quarantined", "retired")
_DESCRIPTIVE = {"description", "unit"}


class UnexpectedEmpty(HeadwayError):
    """A partition without rows that nobody declared as empty."""

    def __init__(self, dataset: str, partition: str) -> None:
        self.dataset, self.partition = dataset, partition
        super().__init__(
            f"{dataset} {partition}: the delivery has no rows for this partition".replace("  ", " "),
            "deliver them, or declare the partition under `expected_empty`",
        )


@dataclass(frozen=True, slots=True)
class IngestOutcome:
    """What happened to one partition.

    It holds no value of the data but in `rejected`, which is for a person at a terminal: never log or store it.

    `status` says what was done, `standing` where the partition is now (they differ for `up_to_date`). `expectations`
    has one row per rule. Times are microseconds UTC, `window` the partition's exact instants [start, end).
    """

    dataset: str
    partition: str
    status: OutcomeStatus
    reason: str
    version: DatasetVersion | None = None
    rows: int = 0
    rows_rejected: int = 0
    rows_quarantined: int = 0
    exact_duplicates: int = 0
    null_cells: int = 0
    content_digest: str | None = None
    event_times: tuple[int, int] | None = None
    window: tuple[int, int] | None = None
    stored_bytes: int = 0
    suite_digest: str | None = None
    expectations: tuple[Mapping[str, Json], ...] = ()
    drift: tuple[str, ...] = ()
    seconds: float = 0.0
    error: HeadwayError | None = None
    rejected: tuple[RejectedRow, ...] = field(default=(), repr=False)

    @property
    def standing(self) -> str:
        """Where the partition stands now: its version's status, or `failed`."""
        return "failed" if self.version is None else self.version.status


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one partition of a delivery."""

    key: str
    table: pa.Table
    digests: list[bytes]
    rejected: tuple[RejectedRow, ...]
    content_digest: str
    rules_digest: str


@dataclass(slots=True)
class _Job:
    """What the steps of one call share."""

    services: Services
    pipeline: Pipeline
    source: str
    spec: SourceSpec
    suite: Suite
    scheme: PartitionScheme | None
    lookups: Mapping[str, DatasetVersion]
    run_id: str | None
    progress: Progress | None
    dataset: str
    total: int = 0
    outcomes: dict[str, IngestOutcome] = field(default_factory=dict[str, IngestOutcome])

    def done(self, outcome: IngestOutcome) -> None:
        self.outcomes[outcome.partition] = outcome
        if self.progress is not None:
            self.progress(outcome, len(self.outcomes), self.total)

    def current(self, keys: Sequence[str]) -> dict[str, DatasetVersion]:
        return self.services.catalog.current_many(self.services.principal, self.dataset, list(keys))

    def window(self, key: str) -> tuple[int, int] | None:
        return None if self.scheme is None else self.scheme.window(key)


def ingest(
    services: Services,
    pipeline: Pipeline,
    source: str,
    partitions: Sequence[str] | None = None,
    *,
    run_id: str | None = None,
    delivery: Delivery | None = None,
    files: Sequence[Path] | None = None,
    progress: Progress | None = None,
) -> list[IngestOutcome]:
    """Ingest partitions of a source from its declared files, or from `files`, or from a `delivery` read before.

    Without `partitions`: the whole calendar for declared files, and the partitions in the delivery for given ones (for
    both when the calendar has no end). An unpartitioned source has the one partition "".

    Raises:
        DeliveryRefused: the delivery does not have the declared form; no version exists.
        UnknownPartition, PartitionNotClosed: a requested partition does not exist or is not over.
        NotReleased: a source that the transform reads is not released.
        SuiteRefused, SourceMissing, TransformFault: see there.
    """
    job = _job(services, pipeline, source, run_id, progress)
    requested = _requested(job, partitions, is_declared=files is None and delivery is None)
    if delivery is None:
        raw = delivery_files(pipeline, source, files)
        if requested is not None and _answer_unread(job, requested, delivery_digest(raw)):
            return [job.outcomes[key] for key in requested]
        delivery = _read(job, raw)
    return _ingest_delivery(job, delivery, requested)


def is_up_to_date(services: Services, pipeline: Pipeline, source: str, partitions: Sequence[str] | None = None) -> bool:
    """Whether ingesting the declared files would change nothing, judged by digests without parsing them.

    Raises:
        UnknownPartition, PartitionNotClosed, SuiteRefused, SourceMissing: as `ingest` does.
    """
    try:
        job = _job(services, pipeline, source, None, None)
    except NotReleased:
        return False
    requested = _requested(job, partitions, is_declared=True)
    digest = delivery_digest(delivery_files(pipeline, source))
    return requested is not None and _answer_unread(job, requested, digest)


def _job(services: Services, pipeline: Pipeline, source: str, run_id: str | None, progress: Progress | None) -> _Job:
    spec = source_spec(pipeline, source)
    scheme = None if spec.partition is None else PartitionScheme.from_spec(spec.partition)
    return _Job(
        services,
        pipeline,
        source,
        spec,
        load_suite(pipeline, source),
        scheme,
        _current_lookups(services, pipeline, spec),
        run_id,
        progress,
        dataset_name(pipeline.name, source),
    )


def partition_digests(delivery: Delivery) -> tuple[str, dict[str, str]]:
    """The content digest of all rows of a delivery, and of each partition in it (none when it is unpartitioned)."""
    schema = schema_hash(delivery.spec)
    whole = digest_of_rows(delivery.digests, schema)
    if delivery.spec.partition is None:
        return whole, {}
    scheme = PartitionScheme.from_spec(delivery.spec.partition)
    assigned = scheme.assign(_partition_times(delivery))
    by_key: dict[str, list[bytes]] = {key: [] for key in assigned.keys}
    for code, row in zip(assigned.code, delivery.digests, strict=True):
        if code >= 0:
            by_key[assigned.keys[code]].append(row)
    return whole, {key: digest_of_rows(rows, schema) for key, rows in by_key.items()}


def _requested(job: _Job, partitions: Sequence[str] | None, *, is_declared: bool) -> list[str] | None:
    """The partitions to ingest, in order; None when the delivery decides."""
    if job.scheme is None:
        return [""]
    if partitions is None:
        if not is_declared or job.scheme.end is None:
            return None
        return list(job.scheme.keys())
    job.scheme.require_closed(partitions, job.services.catalog.clock)
    return list(dict.fromkeys(partitions))


def _current_lookups(services: Services, pipeline: Pipeline, spec: SourceSpec) -> dict[str, DatasetVersion]:
    found: dict[str, DatasetVersion] = {}
    for name in spec.lookups:
        dataset = dataset_name(pipeline.name, name)
        version = services.catalog.current(services.principal, dataset, "")
        if version is None or version.status != "released":
            raise NotReleased(dataset, "", "missing" if version is None else version.status)
        found[name] = version
    return found


def _read(job: _Job, raw: Sequence[RawFile]) -> Delivery:
    tables = {name: load_rows(job.services, version) for name, version in job.lookups.items()}
    return read_delivery(job.pipeline, job.source, lookups=tables, raw=raw)


def _delivery_key(job: _Job, source_digest: str) -> str:
    """Digest of all that canonical rows depend on: the bytes, how they are read, the transform and what it looks up."""
    code = b""
    if job.spec.transform is not None:
        code = (job.pipeline.folder / f"{job.spec.transform.partition('.')[0]}.py").read_bytes()
    declared: dict[str, Json] = job.spec.model_dump(mode="json", exclude={"quality", "files", "description"})
    lookups: dict[str, Json] = {name: v.content_digest for name, v in sorted(job.lookups.items())}
    return digest_json(
        {"source": source_digest, "declared": _undescribed(declared), "code": digest_bytes(code), "lookups": lookups}
    )


def _undescribed(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {k: _undescribed(v) for k, v in value.items() if k not in _DESCRIPTIVE}
    return value


def _answer_unread(job: _Job, requested: Sequence[str], source_digest: str) -> bool:
    """Whether every partition already holds what these bytes give; then the answers are in `job.outcomes`."""
    key = _delivery_key(job, source_digest)
    current = job.current(requested)
    for partition in requested:
        version = current.get(partition)
        if version is None or version.metadata.get("delivery_key") != key or not _is_judged(job, version):
            return False
    job.total = len(requested)
    for partition in requested:
        job.done(_unchanged(job, current[partition], 0.0))
    return True


def _is_judged(job: _Job, version: DatasetVersion) -> bool:
    """Whether a version's evidence is of the rules in force, or nothing can be said about it any more."""
    if version.status in _ENDED:
        return True
    if version.evidence is None or version.status not in _JUDGED:
        return False
    return version.evidence.suite_digest == rules_digest_of(job.suite, job.spec, version.metadata.get("rejected"))


def _ingest_delivery(job: _Job, delivery: Delivery, requested: Sequence[str] | None) -> list[IngestOutcome]:
    parts = _split(job, delivery)
    keys = sorted(parts) if requested is None else list(requested)
    job.total = len(keys)
    current = job.current(keys)
    todo: list[_Part] = []
    for key in keys:
        part = parts.get(key) or _part(job, key, delivery.table.slice(0, 0), [], ())
        failure = _cannot_ingest(job, part)
        version = current.get(key)
        if failure is not None:
            job.done(_failed(job, part, failure))
        elif version is not None and version.content_digest == part.content_digest and _holds(version, part):
            job.done(_unchanged(job, version, 0.0))
        else:
            todo.append(part)
    for start in range(0, len(todo), _AT_ONCE):
        _publish_some(job, delivery, todo[start : start + _AT_ONCE], current)
    return [job.outcomes[key] for key in keys]


def _holds(version: DatasetVersion, part: _Part) -> bool:
    """Whether the version was judged under the rules in force, or is out of use for good."""
    if version.status in _ENDED:
        return True
    is_judged = version.status in _JUDGED
    return is_judged and version.evidence is not None and version.evidence.suite_digest == part.rules_digest


def _split(job: _Job, delivery: Delivery) -> dict[str, _Part]:
    """The delivery's rows by partition; rejected rows go where they would have been."""
    if job.scheme is None:
        return {"": _part(job, "", delivery.table, delivery.digests, delivery.rejected)}
    assigned = job.scheme.assign(_partition_times(delivery))
    _require_placed(job, delivery, int((assigned.code < 0).sum()))
    rejected = _rejected_by_key(job.scheme, delivery.rejected)
    order = np.argsort(assigned.code, kind="stable")
    bounds = np.searchsorted(assigned.code[order], np.arange(len(assigned.keys) + 1))
    table = delivery.table.take(pa.array(order))
    parts: dict[str, _Part] = {}
    for i, key in enumerate(assigned.keys):
        here: NDArray[np.int64] = order[bounds[i] : bounds[i + 1]]
        rows = table.slice(int(bounds[i]), int(bounds[i + 1] - bounds[i]))
        parts[key] = _part(job, key, rows, [delivery.digests[j] for j in here], tuple(rejected.pop(key, ())))
    for key, lost in rejected.items():
        parts[key] = _part(job, key, delivery.table.slice(0, 0), [], tuple(lost))
    return parts


def _partition_times(delivery: Delivery) -> NDArray[np.int64]:
    """The partition column, microseconds UTC; it has no nulls, because rows without it are rejected on reading."""
    name = delivery.spec.partition.column if delivery.spec.partition is not None else ""
    return delivery.table.column(name).cast(pa.int64()).to_numpy().astype(np.int64)


def _part(job: _Job, key: str, table: pa.Table, digests: list[bytes], rejected: tuple[RejectedRow, ...]) -> _Part:
    return _Part(
        key=key,
        table=table,
        digests=digests,
        rejected=rejected,
        content_digest=digest_of_rows(digests, schema_hash(job.spec)),
        rules_digest=rules_digest(job.suite, job.spec, rejected),
    )


def _rejected_by_key(scheme: PartitionScheme, rejected: Sequence[RejectedRow]) -> dict[str, list[RejectedRow]]:
    placed = [r for r in rejected if r.time is not None]
    if not placed:
        return {}
    assigned = scheme.assign(np.array([r.time for r in placed], dtype=np.int64))
    found: dict[str, list[RejectedRow]] = {}
    for row, code in zip(placed, assigned.code, strict=True):
        if code >= 0:
            found.setdefault(assigned.keys[code], []).append(row)
    return found


def _require_placed(job: _Job, delivery: Delivery, outside: int) -> None:
    """Rows that belong to no partition count against the budget of the whole delivery.

    Raises:
        DeliveryRefused: there are more than the budget allows.
    """
    lost = [r for r in delivery.rejected if r.time is None]
    count = len({(r.file, r.row) for r in lost}) + outside
    limit = job.spec.quality.max_quarantined_share
    if count <= limit * delivery.rows_read:
        return
    first = lost[0] if lost else None
    problem = f"{count} of {delivery.rows_read} rows belong to no partition"
    if outside:
        problem += f", {outside} of them outside the calendar"
    if first is not None:
        problem += f"; the first is {first.code}" + (f" ({first.detail})" if first.detail else "")
    raise DeliveryRefused(
        first.file if first else ", ".join(delivery.files),
        problem,
        "mend the rows, or raise quality.max_quarantined_share",
        row=first.row if first else None,
        column=first.column if first else delivery.spec.partition and delivery.spec.partition.column,
        value=first.value if first else None,
        limit=f"at most {limit:.1%}",
    )


def _cannot_ingest(job: _Job, part: _Part) -> HeadwayError | None:
    if job.scheme is not None:
        try:
            job.scheme.require_closed([part.key], job.services.catalog.clock)
        except HeadwayError as error:
            return error
    is_empty = part.table.num_rows == 0 and not part.rejected
    if is_empty and (job.scheme is None or part.key not in job.scheme.expected_empty):
        return UnexpectedEmpty(job.dataset, part.key)
    return None


def _publish_some(job: _Job, delivery: Delivery, parts: Sequence[_Part], current: Mapping[str, DatasetVersion]) -> None:
    """Validate some partitions in one go, then store and register them one by one."""
    whole = pa.concat_tables([part.table for part in parts])
    ends = np.cumsum([0, *(part.table.num_rows for part in parts)])
    filled = [i for i, part in enumerate(parts) if not _is_empty(part)]
    started = time.perf_counter()
    evaluations = dict(
        zip(filled, evaluate(job.suite, whole, [(int(ends[i]), int(ends[i + 1])) for i in filled]), strict=True)
    )
    shared = (time.perf_counter() - started) / len(parts)
    for i, part in enumerate(parts):
        started = time.perf_counter()
        verdict, repeated = _judge(job, part, evaluations.get(i), current.get(part.key))
        outcome = _publish(job, delivery, part, verdict, repeated, current.get(part.key))
        job.done(_timed(outcome, shared + time.perf_counter() - started))


def _is_empty(part: _Part) -> bool:
    return part.table.num_rows == 0 and not part.rejected


def _judge(
    job: _Job, part: _Part, evaluation: Evaluation | None, current: DatasetVersion | None
) -> tuple[Verdict | None, int]:
    if evaluation is None:
        return None, 0
    faults, repeated = check_rows(part.table, job.spec, part.digests)
    loss = _identity_loss(job, part, current)
    verdict = judge(job.spec, job.suite, evaluation, faults, part.rejected, part.table.num_rows, repeated, loss)
    return verdict, repeated


def _identity_loss(job: _Job, part: _Part, current: DatasetVersion | None) -> float | None:
    """Share of the row identities of the newest released version that the new rows lack."""
    if job.spec.quality.max_identity_loss is None or current is None:
        return None
    versions = job.services.catalog.versions(job.services.principal, job.dataset, part.key)
    known = [v for v in versions if v.status == "released" and v.content_digest != part.content_digest and v.rows]
    if not known:
        return None
    names = list(job.spec.row_id)
    before = stored_rows(job.services, max(known, key=lambda v: v.version), names).group_by(names).aggregate([])
    now = part.table.select(names).group_by(names).aggregate([])
    plain = before.cast(now.select(before.column_names).schema)
    return plain.join(now, keys=names, join_type="left anti").num_rows / before.num_rows


def _publish(
    job: _Job,
    delivery: Delivery,
    part: _Part,
    verdict: Verdict | None,
    repeated: int,
    current: DatasetVersion | None,
) -> IngestOutcome:
    catalog, principal = job.services.catalog, job.services.principal
    version = _registered(job, delivery, part, repeated, current)
    evidence = _evidence(job, part, verdict)
    status: OutcomeStatus = "released" if verdict is None or verdict.is_released else "quarantined"
    if version.status == "released":
        if status == "released":
            version = catalog.record_validation(principal, None, job.dataset, version.version, evidence)
        else:
            # A released version is not turned back: readers may have used it. It is taken out of use, by name.
            version = catalog.retire_version(principal, None, job.dataset, version.version, evidence.reason, evidence)
            status = "retired"
    else:
        catalog.start_validation(principal, None, job.dataset, version.version, part.rules_digest)
        end = catalog.release_version if status == "released" else catalog.quarantine_version
        version = end(principal, None, job.dataset, version.version, evidence)
    return _outcome(job, part, status, evidence.reason, version, verdict, repeated, delivery)


def _registered(
    job: _Job, delivery: Delivery, part: _Part, repeated: int, current: DatasetVersion | None
) -> DatasetVersion:
    """The version that holds the content, in its present state; rows are written only when it is not current."""
    if current is not None and current.content_digest == part.content_digest:
        return current
    catalog, principal = job.services.catalog, job.services.principal
    made = catalog.register_version(principal, None, _facts(job, delivery, part, repeated))
    # A repeated command answers what it answered first, so the state is read after it.
    return catalog.version(principal, job.dataset, made.version)


def _facts(job: _Job, delivery: Delivery, part: _Part, repeated: int) -> DatasetVersionFacts:
    rows = job.services.store.put_bytes(_parquet(part.table), PARQUET_MEDIA_TYPE)
    facts: dict[str, Json] = {
        "dataset": job.dataset,
        "partition": part.key,
        "content_digest": part.content_digest,
        "schema_hash": schema_hash(job.spec),
        "rows": part.table.num_rows,
    }
    manifest = put_manifest(job.services.store, Manifest((manifest_entry(ROWS_ENTRY, rows),), facts))
    times = event_times(part.table, job.spec)
    window = job.window(part.key)
    metadata: dict[str, Json] = {
        "delivery_key": _delivery_key(job, delivery.source_digest),
        "files": list(delivery.files),
        "rejected": counts_by_code(part.rejected),
        "exact_duplicates": repeated,
        "null_cells": _null_cells(part.table),
        "stored_bytes": rows.size,
        "window": None if window is None else [iso(window[0]), iso(window[1])],
        "event_times": None if times is None else [iso(times[0]), iso(times[1])],
        "drift": _drift(delivery),
        "lookups": {name: v.content_digest for name, v in job.lookups.items()},
    }
    return DatasetVersionFacts(
        dataset=job.dataset,
        partition=part.key,
        content_digest=part.content_digest,
        schema_hash=schema_hash(job.spec),
        manifest_digest=manifest.digest,
        rows=part.table.num_rows,
        event_time_min=None if times is None else times[0],
        event_time_max=None if times is None else times[1],
        # Never beyond the newest row seen: a closed partition says nothing about rows that are still on their way.
        watermark=None if times is None or not isinstance(job.spec.event_time, str) else times[1],
        privacy=job.spec.privacy.disposition,
        reason=NO_DATA_PUBLISHED if _is_empty(part) else None,
        source_digest=delivery.source_digest,
        run_id=job.run_id,
        blobs=(rows, manifest),
        metadata=metadata,
    )


def _evidence(job: _Job, part: _Part, verdict: Verdict | None) -> Evidence:
    store = job.services.store
    if verdict is None:
        report = store.put_bytes(canonical_json(_empty_report(job, part)), REPORT_MEDIA_TYPE)
        return Evidence(part.rules_digest, report.digest, 0, 0, 0, None, NO_DATA_PUBLISHED, (report,))
    report = store.put_bytes(canonical_json(verdict.report), REPORT_MEDIA_TYPE)
    blobs: list[Blob] = [report]
    kept_back = quarantine_table(part.table, job.spec, verdict.quarantined, part.rejected)
    if kept_back is not None:
        blobs.append(store.put_bytes(kept_back, PARQUET_MEDIA_TYPE))
    return Evidence(
        suite_digest=part.rules_digest,
        report_digest=report.digest,
        evaluated=verdict.evaluation.evaluated,
        failed=verdict.evaluation.failed,
        quarantined_rows=verdict.quarantined_rows,
        quarantine_digest=None if kept_back is None else blobs[1].digest,
        reason=verdict.reason,
        blobs=tuple(blobs),
    )


def _empty_report(job: _Job, part: _Part) -> dict[str, Json]:
    suite: dict[str, Json] = {"name": job.suite.name, "file": job.suite.file, "digest": job.suite.digest}
    return {"partition": part.key, "suite": suite, "verdict": "released", "reason": NO_DATA_PUBLISHED, "rows": 0}


def _outcome(
    job: _Job,
    part: _Part,
    status: OutcomeStatus,
    reason: str,
    version: DatasetVersion,
    verdict: Verdict | None,
    repeated: int,
    delivery: Delivery,
) -> IngestOutcome:
    return IngestOutcome(
        dataset=job.dataset,
        partition=part.key,
        status=status,
        reason=reason,
        version=version,
        rows=part.table.num_rows,
        rows_rejected=len({(r.file, r.row) for r in part.rejected}),
        rows_quarantined=0 if verdict is None else verdict.quarantined_rows,
        exact_duplicates=repeated,
        null_cells=_null_cells(part.table),
        content_digest=part.content_digest,
        event_times=event_times(part.table, job.spec),
        window=job.window(part.key),
        stored_bytes=sum(blob.size for blob in version.blobs),
        suite_digest=part.rules_digest,
        expectations=() if verdict is None else tuple(verdict.report["expectations"]),  # type: ignore[arg-type]
        drift=tuple(_drift(delivery)),
        rejected=part.rejected,
    )


def _unchanged(job: _Job, version: DatasetVersion, seconds: float) -> IngestOutcome:
    evidence = version.evidence
    times = (version.event_time_min, version.event_time_max)
    return IngestOutcome(
        dataset=job.dataset,
        partition=version.partition,
        status="up_to_date",
        reason=version.status_reason,
        version=version,
        rows=version.rows,
        rows_quarantined=0 if evidence is None else evidence.quarantined_rows,
        null_cells=int(str(version.metadata.get("null_cells", 0))),
        content_digest=version.content_digest,
        event_times=None if times[0] is None or times[1] is None else (times[0], times[1]),
        window=job.window(version.partition),
        stored_bytes=sum(blob.size for blob in version.blobs),
        suite_digest=None if evidence is None else evidence.suite_digest,
        seconds=seconds,
    )


def _failed(job: _Job, part: _Part, error: HeadwayError) -> IngestOutcome:
    return IngestOutcome(job.dataset, part.key, "failed", str(error), window=job.window(part.key), error=error)


def _timed(outcome: IngestOutcome, seconds: float) -> IngestOutcome:
    return replace(outcome, seconds=seconds)


def _drift(delivery: Delivery) -> list[str]:
    return [f"{d.file}: {d.column!r} {d.what}" if d.column else f"{d.file}: {d.what}" for d in delivery.drift]


def _null_cells(table: pa.Table) -> int:
    return sum(column.null_count for column in table.columns)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
