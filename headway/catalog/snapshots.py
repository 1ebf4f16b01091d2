"""Feature sets and feature snapshots: published on released inputs and a passed proof, or refused by name."""

from collections.abc import Sequence
from typing import Any, cast

import sqlalchemy as sa

from headway.catalog.commands import Document, Step, dump, load, next_seq
from headway.catalog.datasets import aggregate as dataset_aggregate
from headway.catalog.datasets import read_version
from headway.catalog.documents import (
    feature_set_document,
    feature_set_of_row,
    inputs_document,
    snapshot_document,
    snapshot_of_row,
    state_document,
)
from headway.catalog.errors import InputNotReleased, Nondeterminism, ProofMissing, UnknownFeatureSet, UnknownSnapshot
from headway.catalog.facts import (
    FeatureSetFacts,
    FeatureSetVersion,
    FeatureSnapshot,
    SnapshotFacts,
    SnapshotInput,
    SnapshotState,
    blob_documents,
    dataset_node,
    feature_set_node,
    snapshot_node,
)
from headway.catalog.lineage import keep_blobs, link
from headway.catalog.tables import feature_set_version, feature_snapshot, snapshot_event


def feature_set_aggregate(name: str) -> str:
    """Return the aggregate of a feature set."""
    return f"feature_set:{name}"


def snapshot_aggregate(pipeline: str, partition: str) -> str:
    """Return the aggregate of one partition of a pipeline's snapshots; a pipeline's name holds no slash."""
    return f"snapshot:{pipeline}/{partition}"


def register_feature_set(step: Step, facts: FeatureSetFacts) -> Document:
    """Return the version of this contract and code, made when there is none."""
    existing = _same_feature_set(step.connection, step.tenant, facts)
    if existing is None:
        number = _insert_feature_set(step, facts)
        return feature_set_document(read_feature_set(step.connection, step.tenant, facts.feature_set, number))
    if existing.contract != load(dump(facts.contract)):
        subject = f"feature set {facts.feature_set!r} version {existing.version}"
        raise Nondeterminism(subject, "contract", existing.contract, facts.contract)
    return feature_set_document(existing)


def feature_set_at(connection: sa.Connection, tenant: str, facts: FeatureSetFacts) -> int:
    """Return the version number that this contract and code has, or would get."""
    existing = _same_feature_set(connection, tenant, facts)
    if existing is not None:
        return existing.version
    statement = sa.select(sa.func.coalesce(sa.func.max(feature_set_version.c.version), 0) + 1)
    mine = (feature_set_version.c.tenant_id == tenant, feature_set_version.c.feature_set == facts.feature_set)
    return connection.execute(statement.where(*mine)).scalar_one()


def publish(step: Step, facts: SnapshotFacts) -> Document:
    """Publish the snapshot of these inputs, or the one that holds them already."""
    if not facts.proof_passed:
        raise ProofMissing(facts.pipeline, facts.partition, facts.proof_digest)
    read_feature_set(step.connection, step.tenant, facts.feature_set, facts.feature_set_version)
    _check_inputs(step, facts.inputs)
    snapshot_id = facts.snapshot_id(step.tenant)
    existing = _find(step.connection, step.tenant, snapshot_id)
    if existing is None:
        _insert(step, facts, snapshot_id)
        _link(step, facts, snapshot_id)
    else:
        _check_same(existing, facts)
    if last_event(step.connection, step.tenant, facts.pipeline, facts.partition)[1:] != ("published", snapshot_id):
        _append(step, facts.pipeline, facts.partition, "published", snapshot_id, "", (), None)
    return snapshot_document(read_snapshot(step.connection, step.tenant, snapshot_id))


def published_at(connection: sa.Connection, tenant: str, facts: SnapshotFacts) -> int:
    """Return the event number at which this snapshot did, or would, become its partition's state."""
    seq, kind, snapshot_id = last_event(connection, tenant, facts.pipeline, facts.partition)
    return seq if (kind, snapshot_id) == ("published", facts.snapshot_id(tenant)) else seq + 1


def refuse(
    step: Step, pipeline: str, partition: str, reason: str, blocking: tuple[str, ...], evidence_digest: str | None
) -> Document:
    """Record that a partition's snapshot was refused, unless that is its state already."""
    if refused_at(step.connection, step.tenant, pipeline, partition, reason, blocking, evidence_digest)[1]:
        _append(step, pipeline, partition, "refused", None, reason, blocking, evidence_digest)
    return state_document(read_states(step.connection, step.tenant, pipeline, [partition])[partition])


def refused_at(
    connection: sa.Connection,
    tenant: str,
    pipeline: str,
    partition: str,
    reason: str,
    blocking: tuple[str, ...],
    evidence_digest: str | None,
) -> tuple[int, bool]:
    """Return the event number at which this refusal did or would become the state, and whether it is still to come."""
    row = connection.execute(_last(tenant, pipeline, partition)).first()
    if row is None:
        return 1, True
    same = ("refused", reason, dump(blocking), evidence_digest)
    there = (row.kind, row.reason, row.blocking, row.evidence_digest) == same
    return (row.seq, False) if there else (row.seq + 1, True)


def last_event(connection: sa.Connection, tenant: str, pipeline: str, partition: str) -> tuple[int, str, str | None]:
    """Return (number, kind, snapshot id) of a partition's last event; (0, "", None) when there is none."""
    row = connection.execute(_last(tenant, pipeline, partition)).first()
    return (0, "", None) if row is None else (row.seq, row.kind, row.snapshot_id)


def read_feature_set(connection: sa.Connection, tenant: str, name: str, number: int) -> FeatureSetVersion:
    """Return one version of a feature set.

    Raises:
        UnknownFeatureSet: there is no such version.
    """
    row = connection.execute(
        sa.select(feature_set_version).where(
            feature_set_version.c.tenant_id == tenant,
            feature_set_version.c.feature_set == name,
            feature_set_version.c.version == number,
        )
    ).first()
    if row is None:
        raise UnknownFeatureSet(name, number)
    return feature_set_of_row(row)


def read_snapshot(connection: sa.Connection, tenant: str, snapshot_id: str) -> FeatureSnapshot:
    """Return one snapshot.

    Raises:
        UnknownSnapshot: there is no such snapshot.
    """
    found = _find(connection, tenant, snapshot_id)
    if found is None:
        raise UnknownSnapshot(snapshot_id)
    return found


def read_ids(connection: sa.Connection, tenant: str, prefix: str) -> list[str]:
    """Return the identities that begin with a text, in order."""
    column = feature_snapshot.c.snapshot_id
    mine = (feature_snapshot.c.tenant_id == tenant, column.startswith(prefix, autoescape=True))
    return list(connection.execute(sa.select(column).where(*mine).order_by(column)).scalars())


def read_states(
    connection: sa.Connection, tenant: str, pipeline: str, partitions: Sequence[str] | None
) -> dict[str, SnapshotState]:
    """Return the state of each partition that has one, in order of the partition."""
    later = snapshot_event.alias("later")
    last = (
        sa.select(sa.func.max(later.c.seq))
        .where(
            later.c.tenant_id == snapshot_event.c.tenant_id,
            later.c.pipeline == snapshot_event.c.pipeline,
            later.c.partition == snapshot_event.c.partition,
        )
        .correlate(snapshot_event)
        .scalar_subquery()
    )
    events = sa.select(snapshot_event).where(
        snapshot_event.c.tenant_id == tenant, snapshot_event.c.pipeline == pipeline, snapshot_event.c.seq == last
    )
    if partitions is not None:
        events = events.where(snapshot_event.c.partition.in_(list(partitions)))
    rows = connection.execute(events).all()
    snapshots = _of_pipeline(connection, tenant, pipeline, [row.snapshot_id for row in rows if row.snapshot_id])
    states = {row.partition: _state(row, snapshots) for row in rows}
    return dict(sorted(states.items()))


def _state(row: "sa.Row[Any]", snapshots: dict[str, FeatureSnapshot]) -> SnapshotState:
    return SnapshotState(
        pipeline=row.pipeline,
        partition=row.partition,
        status=row.kind,
        snapshot=None if row.snapshot_id is None else snapshots[row.snapshot_id],
        reason=row.reason,
        blocking=tuple(cast("list[str]", load(row.blocking))),
        at=row.at,
    )


def _of_pipeline(connection: sa.Connection, tenant: str, pipeline: str, ids: list[str]) -> dict[str, FeatureSnapshot]:
    statement = sa.select(feature_snapshot).where(
        feature_snapshot.c.tenant_id == tenant,
        feature_snapshot.c.pipeline == pipeline,
        feature_snapshot.c.snapshot_id.in_(ids),
    )
    return {row.snapshot_id: snapshot_of_row(row) for row in connection.execute(statement)}


def _same_feature_set(connection: sa.Connection, tenant: str, facts: FeatureSetFacts) -> FeatureSetVersion | None:
    row = connection.execute(
        sa.select(feature_set_version).where(
            feature_set_version.c.tenant_id == tenant,
            feature_set_version.c.feature_set == facts.feature_set,
            feature_set_version.c.contract_digest == facts.contract_digest,
            feature_set_version.c.code_digest == facts.code_digest,
        )
    ).first()
    return None if row is None else feature_set_of_row(row)


def _insert_feature_set(step: Step, facts: FeatureSetFacts) -> int:
    mine = (feature_set_version.c.tenant_id == step.tenant, feature_set_version.c.feature_set == facts.feature_set)
    statement = (
        sa.insert(feature_set_version)
        .values(
            tenant_id=step.tenant,
            feature_set=facts.feature_set,
            version=next_seq(feature_set_version, "version", *mine),
            contract_digest=facts.contract_digest,
            code_digest=facts.code_digest,
            contract=dump(facts.contract),
            created_at=step.now,
            created_by=step.principal.actor,
        )
        .returning(feature_set_version.c.version)
    )
    return step.connection.execute(statement).scalar_one()


def _find(connection: sa.Connection, tenant: str, snapshot_id: str) -> FeatureSnapshot | None:
    row = connection.execute(
        sa.select(feature_snapshot).where(
            feature_snapshot.c.tenant_id == tenant, feature_snapshot.c.snapshot_id == snapshot_id
        )
    ).first()
    return None if row is None else snapshot_of_row(row)


def _last(tenant: str, pipeline: str, partition: str) -> "sa.Select[Any]":
    return (
        sa.select(snapshot_event)
        .where(
            snapshot_event.c.tenant_id == tenant,
            snapshot_event.c.pipeline == pipeline,
            snapshot_event.c.partition == partition,
        )
        .order_by(snapshot_event.c.seq.desc())
        .limit(1)
    )


def _check_inputs(step: Step, inputs: tuple[SnapshotInput, ...]) -> None:
    # Shared locks, in one order: an input cannot be retired between this look and our commit.
    for name in sorted({item.dataset for item in inputs}):
        step.database.lock(step.connection, step.tenant, dataset_aggregate(name), shared=True)
    for item in inputs:
        found = read_version(step.connection, step.tenant, item.dataset, item.version)
        refusal = ""
        if found.content_digest != item.content_digest:
            refusal = f"its content is {found.content_digest}, the snapshot read {item.content_digest}"
        elif found.status != "released":
            refusal = found.status_reason or "only a released version may feed a snapshot"
        elif found.evidence_digest != item.evidence_digest:
            refusal = f"its evidence is {found.evidence_digest}, the snapshot trusted {item.evidence_digest}"
        if refusal:
            raise InputNotReleased(item.dataset, found.partition, item.version, found.status, refusal)


def _check_same(existing: FeatureSnapshot, facts: SnapshotFacts) -> None:
    for field in ("content_digest", "rows"):
        stored, given = getattr(existing.facts, field), getattr(facts, field)
        if stored != given:
            raise Nondeterminism(f"snapshot {existing.snapshot_id}", field, stored, given)


def _insert(step: Step, facts: SnapshotFacts, snapshot_id: str) -> None:
    step.insert(
        feature_snapshot,
        snapshot_id=snapshot_id,
        pipeline=facts.pipeline,
        partition=facts.partition,
        feature_set=facts.feature_set,
        feature_set_version=facts.feature_set_version,
        inputs=dump(inputs_document(facts.inputs)),
        content_digest=facts.content_digest,
        manifest_digest=facts.manifest_digest,
        row_count=facts.rows,
        as_of_min=facts.as_of_min,
        as_of_max=facts.as_of_max,
        source_watermarks=dump(facts.source_watermarks),
        proof_digest=facts.proof_digest,
        excluded=dump(facts.excluded),
        run_id=facts.run_id,
        blobs=dump(blob_documents(facts.blobs)),
        metadata=dump(facts.metadata),
        created_at=step.now,
        created_by=step.principal.actor,
    )
    keep_blobs(step, facts.blobs, "feature_snapshot", snapshot_node(snapshot_id))


def _link(step: Step, facts: SnapshotFacts, snapshot_id: str) -> None:
    node = snapshot_node(snapshot_id)
    for item in facts.inputs:
        link(step, node, dataset_node(item.dataset, item.version), "input")
    link(step, node, feature_set_node(facts.feature_set, facts.feature_set_version), "features")


def _append(
    step: Step,
    pipeline: str,
    partition: str,
    kind: str,
    snapshot_id: str | None,
    reason: str,
    blocking: tuple[str, ...],
    evidence_digest: str | None,
) -> None:
    step.insert(
        snapshot_event,
        pipeline=pipeline,
        partition=partition,
        seq=last_event(step.connection, step.tenant, pipeline, partition)[0] + 1,
        kind=kind,
        snapshot_id=snapshot_id,
        reason=reason,
        blocking=dump(blocking),
        evidence_digest=evidence_digest,
        command_key=step.key,
        actor=step.principal.actor,
        at=step.now,
    )
