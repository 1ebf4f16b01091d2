"""Model versions, attestations, gate policies and gate results: what is known about what a run made."""

from typing import Any

import sqlalchemy as sa

from headway.artifacts.digests import Json, digest_json
from headway.catalog.commands import Document, Step, dump, next_seq
from headway.catalog.encoding import encode
from headway.catalog.errors import Nondeterminism, StatementRefused, UnknownModel, UnknownPolicy, VersionRefused
from headway.catalog.facts import blob_documents, model_node, run_node
from headway.catalog.lineage import keep_blobs, link
from headway.catalog.registry_documents import (
    attestation_of_row,
    gate_result_of_row,
    model_version_of_row,
    policy_of_row,
)
from headway.catalog.registry_facts import (
    Attestation,
    AttestationFacts,
    GatePolicy,
    GateResult,
    GateResultFacts,
    Model,
    ModelVersion,
    ModelVersionFacts,
    artifact_name,
)
from headway.catalog.runs import aggregate as run_aggregate
from headway.catalog.runs import read_run
from headway.catalog.snapshots import read_feature_set
from headway.catalog.tables import (
    attestation,
    endpoint,
    gate_policy,
    gate_result,
    model,
    model_version,
    model_version_event,
)


def aggregate(model_id: str) -> str:
    """Return the aggregate of a model: its versions, policy and gate results."""
    return f"model:{model_id}"


def statement_aggregate(statement_digest: str) -> str:
    """Return the aggregate of a signed statement."""
    return f"statement:{statement_digest}"


def register(step: Step, facts: ModelVersionFacts) -> Document:
    """Return the version of this run and manifest, made when there is none."""
    step.database.lock(step.connection, step.tenant, run_aggregate(facts.run_id))
    existing = _same_artifact(step.connection, step.tenant, facts)
    if existing is not None:
        _check_same(existing, facts)
        return encode(existing)
    _check_run(step, facts)
    read_feature_set(step.connection, step.tenant, facts.feature_set, facts.feature_set_version)
    _ensure_model(step, facts)
    number = _insert_version(step, facts)
    node = model_node(facts.model_id, number)
    keep_blobs(step, facts.blobs, "model_version", node)
    link(step, node, run_node(facts.run_id), "training")
    return encode(read_version(step.connection, step.tenant, facts.model_id, number))


def registered_at(connection: sa.Connection, tenant: str, facts: ModelVersionFacts) -> int:
    """Return the number that this run and manifest has, or would get, among the model's versions."""
    existing = _same_artifact(connection, tenant, facts)
    if existing is not None:
        return existing.version
    newest = sa.select(sa.func.coalesce(sa.func.max(model_version.c.version), 0) + 1)
    mine = (model_version.c.tenant_id == tenant, model_version.c.model_id == facts.model_id)
    return connection.execute(newest.where(*mine)).scalar_one()


def retire(step: Step, model_id: str, number: int, reason: str) -> Document:
    """Take a version out of use; refused while an endpoint names it. A retired one stays as it is."""
    version = read_version(step.connection, step.tenant, model_id, number)
    if version.retired:
        return encode(version)
    named = sa.or_(*(endpoint.c[arm] == number for arm in ("stable", "previous", "candidate")))
    mine = (endpoint.c.tenant_id == step.tenant, endpoint.c.model_id == model_id)
    found = step.connection.execute(sa.select(endpoint.c.endpoint_id).where(*mine, named).limit(1)).scalar()
    if found is not None:
        raise VersionRefused(
            version.node, f"endpoint {found!r} names it as stable, previous or candidate", "promote others first"
        )
    step.insert(
        model_version_event,
        model_id=model_id,
        version=number,
        seq=1,
        kind="retired",
        reason=reason,
        command_key=step.key,
        actor=step.principal.actor,
        at=step.now,
    )
    return encode(read_version(step.connection, step.tenant, model_id, number))


def attest(step: Step, facts: AttestationFacts) -> Document:
    """Keep a signed statement."""
    stored = find_attestation(step.connection, step.tenant, facts.statement_digest)
    if stored is None:
        values = encode(facts) | {"blobs": dump(blob_documents(facts.blobs)), "created_at": step.now}
        step.insert(attestation, **values)
        keep_blobs(step, facts.blobs, "attestation", facts.statement_digest)
        stored = Attestation(**vars(facts), created_at=step.now)
    for field in ("subject_digest", "predicate_type", "key_id", "role", "envelope_digest"):
        known, given = getattr(stored, field), getattr(facts, field)
        if known != given:
            raise Nondeterminism(f"statement {facts.statement_digest}", field, known, given)
    return encode(stored)


def set_policy(step: Step, model_id: str, policy: Json) -> Document:
    """Put a policy in force as the model's next version, unless it is in force already."""
    known = step.connection.execute(
        sa.select(model.c.model_id).where(model.c.tenant_id == step.tenant, model.c.model_id == model_id)
    ).first()
    if known is None:
        raise UnknownModel(model_id)
    newest = find_policy(step.connection, step.tenant, model_id)
    digest = digest_json(policy)
    if newest is None or newest.digest != digest:
        step.insert(
            gate_policy,
            model_id=model_id,
            policy_version=1 if newest is None else newest.version + 1,
            policy=dump(policy),
            policy_digest=digest,
            created_by=step.principal.actor,
            created_at=step.now,
            command_key=step.key,
        )
    return encode(find_policy(step.connection, step.tenant, model_id))


def policy_at(connection: sa.Connection, tenant: str, model_id: str, policy: Json) -> int:
    """Return the version at which this policy came, or would come, in force."""
    newest = find_policy(connection, tenant, model_id)
    if newest is None:
        return 1
    return newest.version if newest.digest == digest_json(policy) else newest.version + 1


def record_result(step: Step, facts: GateResultFacts) -> Document:
    """Keep what a gate found, unless that is its newest result already."""
    version = read_version(step.connection, step.tenant, facts.model_id, facts.version)
    _check_statement(step, facts, version)
    policies = sa.select(gate_policy.c.policy_version).where(
        gate_policy.c.tenant_id == step.tenant,
        gate_policy.c.model_id == facts.model_id,
        gate_policy.c.policy_version == facts.policy_version,
    )
    if step.connection.execute(policies).first() is None:
        raise UnknownPolicy(facts.model_id, facts.policy_version)
    newest = newest_result(step.connection, step.tenant, facts.model_id, facts.version, facts.gate)
    if newest is None or not _same_result(newest, facts):
        values = encode(facts) | {
            "metrics": dump(facts.metrics),
            "attempt": 1 if newest is None else newest.attempt + 1,
            "at": step.now,
            "command_key": step.key,
        }
        step.insert(gate_result, **values)
    return encode(newest_result(step.connection, step.tenant, facts.model_id, facts.version, facts.gate))


def recorded_at(connection: sa.Connection, tenant: str, facts: GateResultFacts) -> int:
    """Return the attempt at which this became, or would become, the gate's newest result."""
    newest = newest_result(connection, tenant, facts.model_id, facts.version, facts.gate)
    if newest is None:
        return 1
    return newest.attempt if _same_result(newest, facts) else newest.attempt + 1


def read_version(connection: sa.Connection, tenant: str, model_id: str, number: int) -> ModelVersion:
    """Return one version of a model.

    Raises:
        UnknownModel: there is no such version.
    """
    mine = (model_version.c.model_id == model_id, model_version.c.version == number)
    row = connection.execute(_versions(tenant).where(*mine)).first()
    if row is None:
        raise UnknownModel(model_id, number)
    return model_version_of_row(row)


def read_versions(connection: sa.Connection, tenant: str, model_id: str | None) -> list[ModelVersion]:
    """Return the versions of a model, or of all, in order of model and number."""
    statement = _versions(tenant).order_by(model_version.c.model_id, model_version.c.version)
    if model_id is not None:
        statement = statement.where(model_version.c.model_id == model_id)
    return [model_version_of_row(row) for row in connection.execute(statement)]


def read_models(connection: sa.Connection, tenant: str) -> list[Model]:
    """Return the models in order of their name."""
    columns = (model.c.model_id, model.c.pipeline, model.c.created_at)
    rows = connection.execute(sa.select(*columns).where(model.c.tenant_id == tenant).order_by(model.c.model_id))
    return [Model(*row) for row in rows]


def find_attestation(connection: sa.Connection, tenant: str, statement_digest: str) -> Attestation | None:
    """Return a statement's attestation, None when it was never attested."""
    row = connection.execute(
        sa.select(attestation).where(
            attestation.c.tenant_id == tenant, attestation.c.statement_digest == statement_digest
        )
    ).first()
    return None if row is None else attestation_of_row(row)


def read_attestations(connection: sa.Connection, tenant: str, subject_digest: str) -> list[Attestation]:
    """Return the attested statements about a digest, the oldest first."""
    columns = attestation.c
    statement = sa.select(attestation).where(columns.tenant_id == tenant, columns.subject_digest == subject_digest)
    rows = connection.execute(statement.order_by(columns.created_at, columns.statement_digest))
    return [attestation_of_row(row) for row in rows]


def find_policy(connection: sa.Connection, tenant: str, model_id: str) -> GatePolicy | None:
    """Return the policy in force, None when there is none."""
    mine = (gate_policy.c.tenant_id == tenant, gate_policy.c.model_id == model_id)
    statement = sa.select(gate_policy).where(*mine).order_by(gate_policy.c.policy_version.desc()).limit(1)
    row = connection.execute(statement).first()
    return None if row is None else policy_of_row(row)


def newest_result(connection: sa.Connection, tenant: str, model_id: str, number: int, gate: str) -> GateResult | None:
    """Return a gate's newest result for a version, None when it was never judged."""
    statement = _results(tenant, model_id, number).where(gate_result.c.gate == gate)
    row = connection.execute(statement.order_by(gate_result.c.attempt.desc()).limit(1)).first()
    return None if row is None else gate_result_of_row(row)


def read_results(connection: sa.Connection, tenant: str, model_id: str, number: int) -> list[GateResult]:
    """Return every result of a version in order of gate and attempt."""
    statement = _results(tenant, model_id, number).order_by(gate_result.c.gate, gate_result.c.attempt)
    return [gate_result_of_row(row) for row in connection.execute(statement)]


def _versions(tenant: str) -> "sa.Select[Any]":
    retired = sa.and_(
        model_version_event.c.tenant_id == model_version.c.tenant_id,
        model_version_event.c.model_id == model_version.c.model_id,
        model_version_event.c.version == model_version.c.version,
        model_version_event.c.seq == 1,
    )
    of_model = sa.and_(model.c.tenant_id == model_version.c.tenant_id, model.c.model_id == model_version.c.model_id)
    return (
        sa.select(model_version, model.c.pipeline, model_version_event.c.kind.label("retired"))
        .select_from(model_version)
        .join(model, of_model)
        .outerjoin(model_version_event, retired)
        .where(model_version.c.tenant_id == tenant)
    )


def _results(tenant: str, model_id: str, number: int) -> "sa.Select[Any]":
    return sa.select(gate_result).where(
        gate_result.c.tenant_id == tenant, gate_result.c.model_id == model_id, gate_result.c.version == number
    )


def _same_artifact(connection: sa.Connection, tenant: str, facts: ModelVersionFacts) -> ModelVersion | None:
    mine = (model_version.c.run_id == facts.run_id, model_version.c.manifest_digest == facts.manifest_digest)
    row = connection.execute(_versions(tenant).where(*mine)).first()
    return None if row is None else model_version_of_row(row)


def _check_same(existing: ModelVersion, facts: ModelVersionFacts) -> None:
    for field in ("model_id", "kind", "contract_hash", "feature_set", "feature_set_version", "as_of"):
        stored, given = getattr(existing.facts, field), getattr(facts, field)
        if stored != given:
            raise Nondeterminism(existing.node, field, stored, given)


def _check_run(step: Step, facts: ModelVersionFacts) -> None:
    run = read_run(step.connection, step.tenant, facts.run_id)
    subject = f"a {facts.kind} version of model {facts.model_id!r} from run {facts.run_id}"
    if run.result is None:
        raise VersionRefused(subject, f"the run is {run.status}", "register what a succeeded run made")
    if run.facts.pipeline != facts.pipeline:
        raise VersionRefused(subject, f"the run is of pipeline {run.facts.pipeline!r}", "name that pipeline")
    # By kind: a gate that does not apply to one kind must not be escaped by naming another.
    listed = run.result.artifacts.get(artifact_name(facts.kind))
    if listed != facts.manifest_digest:
        why = f"its {artifact_name(facts.kind)} artifact is {listed}, not {facts.manifest_digest}"
        raise VersionRefused(subject, why, "register the manifest that the run's result names for this kind")


def _ensure_model(step: Step, facts: ModelVersionFacts) -> None:
    step.insert_once(
        model,
        model_id=facts.model_id,
        pipeline=facts.pipeline,
        created_by=step.principal.actor,
        created_at=step.now,
        epoch=1,
    )
    mine = (model.c.tenant_id == step.tenant, model.c.model_id == facts.model_id)
    pipeline = step.connection.execute(sa.select(model.c.pipeline).where(*mine)).scalar_one()
    if pipeline != facts.pipeline:
        raise VersionRefused(
            f"model {facts.model_id!r}", f"it is of pipeline {pipeline!r}, not {facts.pipeline!r}", "use another name"
        )


def _insert_version(step: Step, facts: ModelVersionFacts) -> int:
    mine = (model_version.c.tenant_id == step.tenant, model_version.c.model_id == facts.model_id)
    statement = (
        sa.insert(model_version)
        .values(
            tenant_id=step.tenant,
            model_id=facts.model_id,
            version=next_seq(model_version, "version", *mine),
            manifest_digest=facts.manifest_digest,
            run_id=facts.run_id,
            contract_hash=facts.contract_hash,
            feature_set=facts.feature_set,
            feature_set_version=facts.feature_set_version,
            created_at=step.now,
            metadata=dump(facts.metadata),
            created_by=step.principal.actor,
            kind=facts.kind,
            contract=dump(facts.contract),
            as_of=facts.as_of,
            blobs=dump(blob_documents(facts.blobs)),
        )
        .returning(model_version.c.version)
    )
    return step.connection.execute(statement).scalar_one()


def _check_statement(step: Step, facts: GateResultFacts, version: ModelVersion) -> None:
    digest = facts.statement_digest
    stored = find_attestation(step.connection, step.tenant, digest)
    if stored is None:
        raise StatementRefused(digest, "it was never attested")
    if stored.role != "gate":
        raise StatementRefused(digest, f"it is signed by role {stored.role}, a gate's result needs role gate")
    if not stored.subject_digest == facts.artifact_digest == version.manifest_digest:
        raise StatementRefused(
            digest,
            f"it is about {stored.subject_digest}, the result about {facts.artifact_digest}, "
            f"and {version.node} is {version.manifest_digest}",
        )
    used = step.connection.execute(
        sa.select(gate_result).where(gate_result.c.tenant_id == step.tenant, gate_result.c.statement_digest == digest)
    )
    for row in used:
        earlier = gate_result_of_row(row)
        if (earlier.model_id, earlier.version, earlier.gate, earlier.verdict) != (
            facts.model_id,
            facts.version,
            facts.gate,
            facts.verdict,
        ):
            raise StatementRefused(digest, f"it said {earlier.verdict} for gate {earlier.gate!r} already")


def _same_result(stored: GateResult, facts: GateResultFacts) -> bool:
    return encode(stored) == encode(facts) | {"attempt": stored.attempt, "at": stored.at}
