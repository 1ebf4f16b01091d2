"""Dataset versions: registered once, their state the fold of their events, a partition's pointer moved by epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from headway.catalog.commands import Document, Step, dump, next_seq
from headway.catalog.documents import version_document, version_of_row
from headway.catalog.errors import EvidenceRefused, IllegalTransition, Nondeterminism, StaleEpoch, UnknownVersion
from headway.catalog.facts import (
    NO_DATA_PUBLISHED,
    DatasetEvent,
    DatasetVersion,
    DatasetVersionFacts,
    Evidence,
    VersionStatus,
    blob_documents,
    dataset_node,
    delivery_node,
)
from headway.catalog.lineage import keep_blobs, link
from headway.catalog.tables import dataset, dataset_event, dataset_partition, dataset_version

# What may follow what; everything else is refused. A validation that died is begun again from `validating`. A version
# that was retired because it failed a changed suite may be validated again: else one slip in a suite would end it.
STEPS: dict[str, frozenset[str]] = {
    "registered": frozenset({"validating"}),
    "validating": frozenset({"validating", "released", "quarantined"}),
    "quarantined": frozenset({"validating"}),
    "released": frozenset({"released", "retired"}),
    "retired": frozenset({"validating"}),
    "erased": frozenset(),
}


def aggregate(name: str) -> str:
    """Return the aggregate of a dataset: what its commands lock and what orders them."""
    return f"dataset:{name}"


@dataclass(frozen=True)
class Last:
    """The last event of a version: its state."""

    seq: int
    status: VersionStatus
    reason: str
    suite_digest: str | None
    evidence: str | None
    evidence_digest: str | None


@dataclass(frozen=True)
class Pointer:
    """What a partition points to: its current version (0 when there is none) and how often it moved."""

    version: int
    epoch: int


def register(step: Step, facts: DatasetVersionFacts, expected_epoch: int | None) -> Document:
    """Make the content current in its partition, as a new version or as the version that holds it already."""
    pointer = _pointer(step.connection, step.tenant, facts.dataset, facts.partition)
    expected = pointer.epoch if expected_epoch is None else expected_epoch
    existing = _same_content(step, facts)
    number = _insert_version(step, facts) if existing is None else existing
    moves = pointer.version != number
    if moves:
        _move_partition(step, facts.dataset, facts.partition, number, expected, pointer.epoch)
    elif expected != pointer.epoch:
        raise StaleEpoch(facts.dataset, facts.partition, expected, pointer.epoch)
    last = None if existing is None else last_event(step.connection, step.tenant, facts.dataset, number)
    _append(
        step,
        facts.dataset,
        number,
        facts.partition,
        kind="registered" if last is None else "redelivered",
        last=last,
        to=Last(1, "registered", facts.reason or "", None, None, None) if last is None else last,
        partition_epoch=expected + 1 if moves else None,
    )
    node = dataset_node(facts.dataset, number)
    keep_blobs(step, facts.blobs, "dataset_version", node)
    link(step, node, delivery_node(facts.source_digest), "source")
    return _answer(step, facts.dataset, number)


def start_validation(step: Step, name: str, number: int, suite_digest: str) -> Document:
    """Begin a validation under a suite; nothing happens when that very validation has begun already."""
    last = last_event(step.connection, step.tenant, name, number)
    if (last.status, last.suite_digest) != ("validating", suite_digest):
        _check_step(name, number, last, "validating")
        _transition(step, name, number, last, "validating", Last(0, "validating", "", suite_digest, None, None))
    return _answer(step, name, number)


def conclude(step: Step, name: str, number: int, status: VersionStatus, evidence: Evidence) -> Document:
    """End a validation: `released` or `quarantined` on evidence of the suite that the validation began with."""
    last = last_event(step.connection, step.tenant, name, number)
    if not _is_already(last, status, evidence):
        if last.status != "validating":
            _check_step(name, number, last, status, only_from="validating")
        _check_evidence(step, name, number, status, evidence, last.suite_digest)
        _transition(step, name, number, last, status, _state(status, evidence, evidence.reason))
        keep_blobs(step, evidence.blobs, "evidence", evidence.digest)
    return _answer(step, name, number)


def retire(step: Step, name: str, number: int, reason: str, evidence: Evidence | None) -> Document:
    """Take a released version out of use, on evidence when there is some."""
    last = last_event(step.connection, step.tenant, name, number)
    digest = last.evidence_digest if evidence is None else evidence.digest
    if (last.status, last.reason, last.evidence_digest) != ("retired", reason, digest):
        _check_step(name, number, last, "retired")
        to = Last(0, "retired", reason, last.suite_digest, last.evidence, last.evidence_digest)
        if evidence is not None:
            to = _state("retired", evidence, reason)
            keep_blobs(step, evidence.blobs, "evidence", evidence.digest)
        _transition(step, name, number, last, "retired", to)
    return _answer(step, name, number)


def revalidate(step: Step, name: str, number: int, evidence: Evidence) -> Document:
    """Keep a released version released on new evidence."""
    last = last_event(step.connection, step.tenant, name, number)
    if not _is_already(last, "released", evidence):
        if last.status != "released":
            _check_step(name, number, last, "released", only_from="released")
        _check_evidence(step, name, number, "released", evidence, evidence.suite_digest)
        _transition(step, name, number, last, "revalidated", _state("released", evidence, evidence.reason))
        keep_blobs(step, evidence.blobs, "evidence", evidence.digest)
    return _answer(step, name, number)


def registered_at(connection: sa.Connection, tenant: str, facts: DatasetVersionFacts) -> int:
    """Return the partition epoch at which the content did, or would, become current."""
    row = connection.execute(
        sa.select(dataset_partition.c.epoch, dataset_version.c.content_digest)
        .join(
            dataset_version,
            sa.and_(
                dataset_version.c.tenant_id == dataset_partition.c.tenant_id,
                dataset_version.c.dataset_id == dataset_partition.c.dataset_id,
                dataset_version.c.version == dataset_partition.c.version,
            ),
        )
        .where(*_partition(tenant, facts.dataset, facts.partition))
    ).first()
    if row is None:
        return 1
    return row.epoch if row.content_digest == facts.content_digest else row.epoch + 1


def reached_at(
    connection: sa.Connection, tenant: str, name: str, number: int, status: str, evidence_digest: str | None
) -> int:
    """Return the event number at which the version did, or would, reach the state (for `validating`: its suite)."""
    last = last_event(connection, tenant, name, number)
    mark = last.suite_digest if status == "validating" else last.evidence_digest
    there = last.status == status and (evidence_digest is None or mark == evidence_digest)
    return last.seq if there else last.seq + 1


def last_event(connection: sa.Connection, tenant: str, name: str, number: int) -> Last:
    """Return the state of a version.

    Raises:
        UnknownVersion: there is no such version.
    """
    row = connection.execute(_LAST_EVENT, {"tenant": tenant, "dataset": name, "number": number}).first()
    if row is None:
        raise UnknownVersion(name, number)
    return Last(*row)


def epoch_of(connection: sa.Connection, tenant: str, name: str, partition: str) -> int:
    """Return how often the partition's pointer moved; 0 when nothing was ever registered."""
    return _pointer(connection, tenant, name, partition).epoch


def read_version(connection: sa.Connection, tenant: str, name: str, number: int) -> DatasetVersion:
    """Return one version with its state.

    Raises:
        UnknownVersion: there is no such version.
    """
    row = connection.execute(_ONE_VERSION, {"tenant": tenant, "dataset": name, "number": number}).first()
    if row is None:
        raise UnknownVersion(name, number)
    return version_of_row(row)


def read_versions(connection: sa.Connection, tenant: str, name: str, partition: str | None) -> list[DatasetVersion]:
    """Return the versions of a dataset, or of one partition of it, in order of their number."""
    statement = _VERSIONS.order_by(dataset_version.c.version)
    if partition is not None:
        statement = statement.where(dataset_version.c.partition == partition)
    return [version_of_row(row) for row in connection.execute(statement, {"tenant": tenant, "dataset": name})]


def read_current(
    connection: sa.Connection, tenant: str, name: str, partitions: Sequence[str] | None
) -> dict[str, DatasetVersion]:
    """Return the current version of each partition that has one, in order of the partition."""
    statement = _CURRENT
    if partitions is not None:
        statement = statement.where(dataset_version.c.partition.in_(list(partitions)))
    rows = connection.execute(statement, {"tenant": tenant, "dataset": name})
    found = {row.partition: version_of_row(row) for row in rows}
    return dict(sorted(found.items()))


def read_events(connection: sa.Connection, tenant: str, name: str, number: int | None) -> list[DatasetEvent]:
    """Return the events of a dataset, or of one version, in order of version and number."""
    columns = dataset_event.c
    statement = sa.select(
        columns.version,
        columns.seq,
        columns.kind,
        columns.from_status,
        columns.to_status,
        columns.reason,
        columns.evidence_digest,
        columns.partition_epoch,
        columns.actor,
        columns.at,
    ).where(columns.tenant_id == tenant, columns.dataset_id == name)
    if number is not None:
        statement = statement.where(columns.version == number)
    return [DatasetEvent(*row) for row in connection.execute(statement.order_by(columns.version, columns.seq))]


def _versions() -> "sa.Select[Any]":
    later = dataset_event.alias("later")
    last = (
        sa.select(sa.func.max(later.c.seq))
        .where(
            later.c.tenant_id == dataset_version.c.tenant_id,
            later.c.dataset_id == dataset_version.c.dataset_id,
            later.c.version == dataset_version.c.version,
        )
        .correlate(dataset_version)
        .scalar_subquery()
    )
    return (
        sa.select(
            dataset_version,
            dataset_event.c.to_status,
            dataset_event.c.reason.label("status_reason"),
            dataset_event.c.evidence,
        )
        .select_from(dataset_version)
        .join(
            dataset_event,
            sa.and_(
                dataset_event.c.tenant_id == dataset_version.c.tenant_id,
                dataset_event.c.dataset_id == dataset_version.c.dataset_id,
                dataset_event.c.version == dataset_version.c.version,
                dataset_event.c.seq == last,
            ),
        )
        .where(dataset_version.c.tenant_id == _TENANT, dataset_version.c.dataset_id == _DATASET)
    )


# Built once: putting a statement together costs more than running it.
_TENANT = sa.bindparam("tenant", type_=sa.Text)
_DATASET = sa.bindparam("dataset", type_=sa.Text)
_NUMBER = sa.bindparam("number", type_=sa.BigInteger)
_VERSIONS = _versions()
_ONE_VERSION = _VERSIONS.where(dataset_version.c.version == _NUMBER)
_CURRENT = _VERSIONS.join(
    dataset_partition,
    sa.and_(
        dataset_partition.c.tenant_id == dataset_version.c.tenant_id,
        dataset_partition.c.dataset_id == dataset_version.c.dataset_id,
        dataset_partition.c.partition == dataset_version.c.partition,
        dataset_partition.c.version == dataset_version.c.version,
    ),
)
_LAST_EVENT = (
    sa.select(
        dataset_event.c.seq,
        dataset_event.c.to_status,
        dataset_event.c.reason,
        dataset_event.c.suite_digest,
        dataset_event.c.evidence,
        dataset_event.c.evidence_digest,
    )
    .where(
        dataset_event.c.tenant_id == _TENANT,
        dataset_event.c.dataset_id == _DATASET,
        dataset_event.c.version == _NUMBER,
    )
    .order_by(dataset_event.c.seq.desc())
    .limit(1)
)


def _pointer(connection: sa.Connection, tenant: str, name: str, partition: str) -> Pointer:
    columns = (dataset_partition.c.version, dataset_partition.c.epoch)
    row = connection.execute(sa.select(*columns).where(*_partition(tenant, name, partition))).first()
    return Pointer(0, 0) if row is None else Pointer(*row)


def _partition(tenant: str, name: str, partition: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        dataset_partition.c.tenant_id == tenant,
        dataset_partition.c.dataset_id == name,
        dataset_partition.c.partition == partition,
    )


def _same_content(step: Step, facts: DatasetVersionFacts) -> int | None:
    row = step.connection.execute(
        sa.select(dataset_version.c.version, dataset_version.c.row_count, dataset_version.c.schema_hash).where(
            dataset_version.c.tenant_id == step.tenant,
            dataset_version.c.dataset_id == facts.dataset,
            dataset_version.c.partition == facts.partition,
            dataset_version.c.content_digest == facts.content_digest,
        )
    ).first()
    if row is None:
        return None
    # The content digest covers rows and schema, so these can differ only by a fault in whoever computed them.
    for field, stored, given in (
        ("rows", row.row_count, facts.rows),
        ("schema_hash", row.schema_hash, facts.schema_hash),
    ):
        if stored != given:
            raise Nondeterminism(f"dataset {facts.dataset!r} version {row.version}", field, stored, given)
    return row.version


def _insert_version(step: Step, facts: DatasetVersionFacts) -> int:
    step.insert_once(dataset, dataset_id=facts.dataset, created_at=step.now, created_by=step.principal.actor, epoch=1)
    mine = (dataset_version.c.tenant_id == step.tenant, dataset_version.c.dataset_id == facts.dataset)
    statement = (
        sa.insert(dataset_version)
        .values(
            tenant_id=step.tenant,
            dataset_id=facts.dataset,
            version=next_seq(dataset_version, "version", *mine),
            partition=facts.partition,
            content_digest=facts.content_digest,
            schema_hash=facts.schema_hash,
            manifest_digest=facts.manifest_digest,
            row_count=facts.rows,
            event_time_min=facts.event_time_min,
            event_time_max=facts.event_time_max,
            watermark=facts.watermark,
            privacy=facts.privacy,
            reason=facts.reason,
            source_digest=facts.source_digest,
            run_id=facts.run_id,
            blobs=dump(blob_documents(facts.blobs)),
            metadata=dump(facts.metadata),
            created_at=step.now,
            created_by=step.principal.actor,
        )
        .returning(dataset_version.c.version)
    )
    return step.connection.execute(statement).scalar_one()


def _move_partition(step: Step, name: str, partition: str, number: int, expected: int, seen: int) -> None:
    moved = (
        _first_move(step, name, partition, number)
        if expected == 0
        else step.connection.execute(
            sa.update(dataset_partition)
            .where(*_partition(step.tenant, name, partition))
            .where(dataset_partition.c.epoch == expected)
            .values(version=number, epoch=dataset_partition.c.epoch + 1, updated_at=step.now)
            .returning(dataset_partition.c.epoch)
        ).first()
        is not None
    )
    if not moved:
        raise StaleEpoch(name, partition, expected, seen)


def _first_move(step: Step, name: str, partition: str, number: int) -> bool:
    return step.insert_once(
        dataset_partition, dataset_id=name, partition=partition, version=number, epoch=1, updated_at=step.now
    )


def _state(status: VersionStatus, evidence: Evidence, reason: str) -> Last:
    return Last(0, status, reason, evidence.suite_digest, dump(evidence.document()), evidence.digest)


def _is_already(last: Last, status: VersionStatus, evidence: Evidence) -> bool:
    return last.status == status and last.evidence_digest == evidence.digest


def _check_step(name: str, number: int, last: Last, to: VersionStatus, only_from: str | None = None) -> None:
    legal = [state for state, following in STEPS.items() if to in following and only_from in (None, state)]
    if last.status not in legal:
        raise IllegalTransition(name, number, last.status, to, f"only {' or '.join(legal)} may become {to}")


def _check_evidence(
    step: Step, name: str, number: int, status: VersionStatus, evidence: Evidence, suite_digest: str | None
) -> None:
    if evidence.suite_digest != suite_digest:
        why = f"it is of suite {evidence.suite_digest}, the validation began under {suite_digest}"
        raise EvidenceRefused(name, number, why)
    if status == "released" and evidence.evaluated == 0:
        facts = read_version(step.connection, step.tenant, name, number).facts
        if facts.rows > 0 or facts.reason != NO_DATA_PUBLISHED:
            raise EvidenceRefused(name, number, "no expectation was evaluated, which proves nothing")


def _transition(step: Step, name: str, number: int, last: Last, kind: str, to: Last) -> None:
    partition = step.connection.execute(
        sa.select(dataset_version.c.partition).where(
            dataset_version.c.tenant_id == step.tenant,
            dataset_version.c.dataset_id == name,
            dataset_version.c.version == number,
        )
    ).scalar_one()
    _append(step, name, number, partition, kind=kind, last=last, to=to, partition_epoch=None)


def _append(
    step: Step,
    name: str,
    number: int,
    partition: str,
    *,
    kind: str,
    last: Last | None,
    to: Last,
    partition_epoch: int | None,
) -> None:
    step.insert(
        dataset_event,
        dataset_id=name,
        version=number,
        seq=1 if last is None else last.seq + 1,
        partition=partition,
        kind=kind,
        from_status=None if last is None else last.status,
        to_status=to.status,
        reason=to.reason,
        suite_digest=to.suite_digest,
        evidence=to.evidence,
        evidence_digest=to.evidence_digest,
        partition_epoch=partition_epoch,
        command_key=step.key,
        actor=step.principal.actor,
        at=step.now,
    )


def _answer(step: Step, name: str, number: int) -> Document:
    return version_document(read_version(step.connection, step.tenant, name, number))
