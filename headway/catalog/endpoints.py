"""Endpoints: which version serves. Promotion and rollback are one conditional update each, on evidence re-read here."""

from dataclasses import replace
from typing import Literal

import sqlalchemy as sa

from headway.artifacts.digests import digest_json
from headway.catalog.commands import Document, Step, dump
from headway.catalog.encoding import encode
from headway.catalog.errors import (
    EndpointMoved,
    EndpointRefused,
    NothingToRollBack,
    PromotionRefused,
    UnknownEndpoint,
)
from headway.catalog.registry import aggregate as model_aggregate
from headway.catalog.registry import find_attestation, find_policy, newest_result, read_version, statement_aggregate
from headway.catalog.registry_documents import endpoint_event_of_row, endpoint_of_row
from headway.catalog.registry_facts import Endpoint, EndpointEvent, GateResult, ModelVersion, PromotionEvidence
from headway.catalog.tables import endpoint, endpoint_event, rollout

_IMMEDIATE = digest_json({"plan": "immediate"})


def aggregate(endpoint_id: str) -> str:
    """Return the aggregate of an endpoint."""
    return f"endpoint:{endpoint_id}"


def promote(
    step: Step,
    endpoint_id: str,
    model_id: str,
    number: int,
    expected_epoch: int | None,
    evidence: PromotionEvidence,
) -> Document:
    """Make a version stable at once: a rollout with plan `immediate`, opened and closed in this commit.

    A version that is stable already is promoted anew only by who names the present epoch, as after a revoked key.
    """
    # Shared: no result, policy or retirement of the model can slip in between this look and our commit.
    step.database.lock(step.connection, step.tenant, model_aggregate(model_id), shared=True)
    step.database.lock(step.connection, step.tenant, statement_aggregate(evidence.promotion_statement))
    version = read_version(step.connection, step.tenant, model_id, number)
    current = find(step.connection, step.tenant, endpoint_id)
    if current is not None and current.model_id != model_id:
        why = f"it serves model {current.model_id!r}, not {model_id!r}"
        raise EndpointRefused(endpoint_id, why, "use another endpoint")
    if current is not None and current.stable == number and expected_epoch != current.epoch:
        return encode(current)
    _check_epoch(endpoint_id, current, expected_epoch)
    reasons = _reasons(step, version, evidence)
    if reasons:
        raise PromotionRefused(endpoint_id, model_id, number, reasons)
    moved = _first(step, endpoint_id, version) if current is None else _next(current, number)
    _move(step, current, moved)
    _append(step, moved, "promote", None, evidence)
    _record_rollout(step, current, moved)
    return encode(moved)


def promoted_at(
    connection: sa.Connection, tenant: str, endpoint_id: str, number: int, expected_epoch: int | None
) -> int:
    """Return the epoch at which the version became, or would become, stable by this promotion."""
    current = find(connection, tenant, endpoint_id)
    if current is None:
        return 1
    stays = current.stable == number and expected_epoch != current.epoch
    return current.epoch if stays else current.epoch + 1


def rollback(step: Step, endpoint_id: str, expected_epoch: int | None, reason: str) -> Document:
    """Swap stable and previous."""
    current = read(step.connection, step.tenant, endpoint_id)
    _check_epoch(endpoint_id, current, expected_epoch)
    if current.previous is None:
        raise NothingToRollBack(endpoint_id)
    moved = replace(current, epoch=current.epoch + 1, stable=current.previous, previous=current.stable)
    _move(step, current, moved)
    _append(step, moved, "rollback", reason, None)
    return encode(moved)


def rolled_back_at(
    connection: sa.Connection, tenant: str, endpoint_id: str, expected_epoch: int | None, reason: str
) -> int:
    """Return the epoch that this rollback reached, when it is the endpoint's last move, or would reach."""
    events = read_events(connection, tenant, endpoint_id)
    if not events:
        return 1
    last = events[-1]
    mine = (last.operation, last.reason) == ("rollback", reason) and expected_epoch in (None, last.epoch - 1)
    return last.epoch if mine else last.epoch + 1


def find(connection: sa.Connection, tenant: str, endpoint_id: str) -> Endpoint | None:
    """Return an endpoint, None when there is none."""
    mine = (endpoint.c.tenant_id == tenant, endpoint.c.endpoint_id == endpoint_id)
    row = connection.execute(sa.select(endpoint).where(*mine)).first()
    return None if row is None else endpoint_of_row(row)


def read(connection: sa.Connection, tenant: str, endpoint_id: str) -> Endpoint:
    """Return an endpoint.

    Raises:
        UnknownEndpoint: there is none.
    """
    found = find(connection, tenant, endpoint_id)
    if found is None:
        raise UnknownEndpoint(endpoint_id)
    return found


def read_all(connection: sa.Connection, tenant: str) -> list[Endpoint]:
    """Return the endpoints in order of their name."""
    statement = sa.select(endpoint).where(endpoint.c.tenant_id == tenant).order_by(endpoint.c.endpoint_id)
    return [endpoint_of_row(row) for row in connection.execute(statement)]


def read_events(connection: sa.Connection, tenant: str, endpoint_id: str) -> list[EndpointEvent]:
    """Return the moves of an endpoint in order."""
    mine = (endpoint_event.c.tenant_id == tenant, endpoint_event.c.endpoint_id == endpoint_id)
    rows = connection.execute(sa.select(endpoint_event).where(*mine).order_by(endpoint_event.c.epoch))
    return [endpoint_event_of_row(row) for row in rows]


def read_event(connection: sa.Connection, tenant: str, endpoint_id: str, epoch: int) -> EndpointEvent:
    """Return the move that brought an endpoint to an epoch.

    Raises:
        UnknownEndpoint: there is no such endpoint, or it never was at this epoch.
    """
    mine = (
        endpoint_event.c.tenant_id == tenant,
        endpoint_event.c.endpoint_id == endpoint_id,
        endpoint_event.c.epoch == epoch,
    )
    row = connection.execute(sa.select(endpoint_event).where(*mine)).first()
    if row is None:
        raise UnknownEndpoint(endpoint_id, epoch)
    return endpoint_event_of_row(row)


def _check_epoch(endpoint_id: str, current: Endpoint | None, expected: int | None) -> None:
    epoch = 0 if current is None else current.epoch
    if expected not in (None, epoch):
        raise EndpointMoved(endpoint_id, expected, epoch)
    if current is not None and current.phase != "steady":
        raise EndpointRefused(endpoint_id, f"a rollout is open, in phase {current.phase}", "close it first")


def _reasons(step: Step, version: ModelVersion, evidence: PromotionEvidence) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if version.retired:
        reasons["version"] = "it is retired"
    problem = _promotion_problem(step, version, evidence.promotion_statement)
    if problem:
        reasons["promotion"] = problem
    policy = find_policy(step.connection, step.tenant, version.model_id)
    if policy is None:
        return reasons | {"policy": "no gate policy is in force"}
    if not policy.allows_immediate:
        reasons["policy"] = f"version {policy.version} does not allow an immediate rollout"
    elif policy.version != evidence.policy_version:
        reasons["policy"] = f"version {policy.version} is in force, the evidence is for {evidence.policy_version}"
    for gate in policy.gates(version.kind):
        newest = newest_result(step.connection, step.tenant, version.model_id, version.version, gate)
        problem = _gate_problem(step, version, newest, policy.version, evidence.statements.get(gate))
        if problem:
            reasons[gate] = problem
    return reasons


def _gate_problem(
    step: Step, version: ModelVersion, newest: GateResult | None, policy_version: int, named: str | None
) -> str:
    if newest is None:
        return "it was never judged"
    if newest.verdict != "pass":
        return f"{newest.verdict}: {newest.reason}"
    if newest.policy_version != policy_version:
        return f"it was judged under policy version {newest.policy_version}, {policy_version} is in force"
    if newest.artifact_digest != version.manifest_digest:
        return f"it judged {newest.artifact_digest}, the version is {version.manifest_digest}"
    if newest.statement_digest != named:
        return f"the evidence names {named or 'no statement'}, its newest result is by {newest.statement_digest}"
    return _statement_problem(step, version, newest.statement_digest, "gate")


def _promotion_problem(step: Step, version: ModelVersion, statement_digest: str) -> str:
    used = sa.select(endpoint_event.c.endpoint_id, endpoint_event.c.epoch).where(
        endpoint_event.c.tenant_id == step.tenant, endpoint_event.c.promotion_statement == statement_digest
    )
    row = step.connection.execute(used).first()
    if row is not None:
        return f"its statement moved endpoint {row.endpoint_id!r} to epoch {row.epoch} already"
    return _statement_problem(step, version, statement_digest, "promoter")


def _statement_problem(step: Step, version: ModelVersion, statement_digest: str, role: str) -> str:
    stored = find_attestation(step.connection, step.tenant, statement_digest)
    if stored is None:
        return f"statement {statement_digest} was never attested"
    if stored.subject_digest != version.manifest_digest:
        return f"its statement is about {stored.subject_digest}, the version is {version.manifest_digest}"
    return "" if stored.role == role else f"its statement is signed by role {stored.role}, not {role}"


def _first(step: Step, endpoint_id: str, version: ModelVersion) -> Endpoint:
    salt = digest_json([step.tenant, endpoint_id]).removeprefix("sha256:")[:16]
    return Endpoint(endpoint_id, version.model_id, 1, 1, version.version, None, None, "steady", 0, salt)


def _next(current: Endpoint, number: int) -> Endpoint:
    previous = current.previous if current.stable == number else current.stable
    return replace(current, epoch=current.epoch + 1, stable=number, previous=previous)


def _move(step: Step, current: Endpoint | None, moved: Endpoint) -> None:
    if current is None:
        new = step.insert_once(
            endpoint,
            endpoint_id=moved.endpoint_id,
            model_id=moved.model_id,
            contract_major=moved.contract_major,
            stable=moved.stable,
            previous=None,
            candidate=None,
            phase=moved.phase,
            arm_salt=moved.salt,
            budgets="{}",
            basis_points=moved.basis_points,
            updated_at=step.now,
            epoch=moved.epoch,
        )
        if not new:
            raise EndpointMoved(moved.endpoint_id, 0, read(step.connection, step.tenant, moved.endpoint_id).epoch)
        return
    updated = step.connection.execute(
        sa.update(endpoint)
        .where(
            endpoint.c.tenant_id == step.tenant,
            endpoint.c.endpoint_id == moved.endpoint_id,
            endpoint.c.epoch == current.epoch,
        )
        .values(stable=moved.stable, previous=moved.previous, updated_at=step.now, epoch=moved.epoch)
        .returning(endpoint.c.epoch)
    ).first()
    if updated is None:
        found = read(step.connection, step.tenant, moved.endpoint_id).epoch
        raise EndpointMoved(moved.endpoint_id, current.epoch, found)


def _append(
    step: Step,
    moved: Endpoint,
    operation: Literal["promote", "rollback"],
    reason: str | None,
    evidence: PromotionEvidence | None,
) -> None:
    step.insert(
        endpoint_event,
        endpoint_id=moved.endpoint_id,
        epoch=moved.epoch,
        row=dump(encode(moved)),
        operation=operation,
        actor=step.principal.actor,
        command_key=step.key,
        at=step.now,
        reason=reason,
        evidence=None if evidence is None else dump(encode(evidence)),
        promotion_statement=None if evidence is None else evidence.promotion_statement,
    )


def _record_rollout(step: Step, current: Endpoint | None, moved: Endpoint) -> None:
    step.insert(
        rollout,
        rollout_id=f"{moved.endpoint_id}@{moved.epoch}",
        endpoint_id=moved.endpoint_id,
        candidate=moved.stable,
        baseline=None if current is None else current.stable,
        plan_digest=_IMMEDIATE,
        state="promoted",
        created_at=step.now,
        closed_at=step.now,
        reason="immediate",
        epoch=1,
    )
