"""The rules that versions, gates, endpoints and predictions keep, each as a check that says what breaks it.

Signatures are not looked at here: `headway.registry` verifies them where the keys are.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from headway.catalog import tables
from headway.catalog.commands import load
from headway.catalog.endpoints import read_all, read_events
from headway.catalog.facts import BlobRow, run_node
from headway.catalog.registry import find_attestation, read_versions
from headway.catalog.registry_documents import attestation_of_row, endpoint_of, policy_of_row
from headway.catalog.registry_facts import Endpoint, EndpointEvent, GatePolicy, ModelVersion


@dataclass(frozen=True)
class Registry:
    """What the checks read, once. `order` gives the place of each command's commit, by its key.

    `policies` holds each policy and `moved_at` each move of an endpoint with that place.
    """

    connection: sa.Connection
    tenant: str
    versions: dict[tuple[str, int], ModelVersion]
    endpoints: list[Endpoint]
    events: dict[str, list[EndpointEvent]]
    policies: dict[tuple[str, int], tuple[GatePolicy, int]]
    moved_at: dict[tuple[str, int], int]
    order: dict[str, int]
    open_rollouts: dict[str, int]
    rollouts: dict[str, str]


def read_registry(connection: sa.Connection, tenant: str) -> Registry:
    """Read what the checks need."""
    endpoints = read_all(connection, tenant)
    policies = connection.execute(sa.select(tables.gate_policy).where(tables.gate_policy.c.tenant_id == tenant))
    rollouts = connection.execute(sa.select(tables.rollout).where(tables.rollout.c.tenant_id == tenant)).all()
    event = tables.endpoint_event.c
    moves = connection.execute(
        sa.select(event.endpoint_id, event.epoch, event.command_key).where(event.tenant_id == tenant)
    ).all()
    order = _commit_order(connection, tenant)
    opened: dict[str, int] = defaultdict(int)
    for row in rollouts:
        opened[row.endpoint_id] += row.closed_at is None
    return Registry(
        connection=connection,
        tenant=tenant,
        versions={(v.model_id, v.version): v for v in read_versions(connection, tenant, None)},
        endpoints=endpoints,
        events={name: read_events(connection, tenant, name) for name in sorted({row.endpoint_id for row in moves})},
        policies={
            (row.model_id, row.policy_version): (policy_of_row(row), order.get(row.command_key, 0)) for row in policies
        },
        moved_at={(row.endpoint_id, row.epoch): order.get(row.command_key, 0) for row in moves},
        order=order,
        open_rollouts=opened,
        rollouts={row.rollout_id: row.state for row in rollouts},
    )


def _commit_order(connection: sa.Connection, tenant: str) -> dict[str, int]:
    # An audit row gets its number while the command holds its locks, so numbers follow them.
    columns = tables.audit.c
    rows = connection.execute(sa.select(columns.command_key, columns.seq).where(columns.tenant_id == tenant))
    return {row.command_key: row.seq for row in rows}


def version_numbers(registry: Registry) -> list[str]:
    """Say which models' versions, policies or gate results are not numbered 1..n."""
    broken: list[str] = []
    version, policy, result = tables.model_version.c, tables.gate_policy.c, tables.gate_result.c
    for what, tenant, names, number in (
        ("model", version.tenant_id, (version.model_id,), version.version),
        ("policy of model", policy.tenant_id, (policy.model_id,), policy.policy_version),
        ("gate result", result.tenant_id, (result.model_id, result.version, result.gate), result.attempt),
    ):
        counts = (sa.func.count(), sa.func.min(number), sa.func.max(number))
        statement = sa.select(*names, *counts).where(tenant == registry.tenant).group_by(*names)
        for row in registry.connection.execute(statement):
            *subject, count, first, last = tuple(row)
            if (first, last) != (1, count):
                broken.append(f"{what} {' '.join(map(str, subject))}: {count} are numbered {first}..{last}")
    return broken


def endpoint_fold(registry: Registry) -> list[str]:
    """Say which endpoints are not the fold of their moves, and which moves are no legal step."""
    broken = [f"endpoint {name!r}: moves without a row" for name in registry.events.keys() - _names(registry)]
    for endpoint in registry.endpoints:
        events = registry.events.get(endpoint.endpoint_id, [])
        name = f"endpoint {endpoint.endpoint_id!r}"
        if [event.epoch for event in events] != list(range(1, len(events) + 1)) or not events:
            broken.append(f"{name}: epochs are not 1..{len(events)}")
            continue
        before: Endpoint | None = None
        for event in events:
            if not _legal(before, event):
                broken.append(f"{name}: {event.operation} to epoch {event.epoch} is no legal step")
            before = event.row
        if before != endpoint:
            broken.append(f"{name}: its row says otherwise than its last move")
    return broken


def _legal(before: Endpoint | None, event: EndpointEvent) -> bool:
    after = event.row
    if after.epoch != event.epoch or after.endpoint_id != event.endpoint_id:
        return False
    if before is None:
        return event.operation == "promote" and after.previous is None
    if before.model_id != after.model_id:
        return False
    if event.operation == "rollback":
        return (after.stable, after.previous) == (before.previous, before.stable)
    # A version that is stable already may be promoted anew: the previous one stays.
    expected = before.previous if after.stable == before.stable else before.stable
    return after.stable is not None and after.previous == expected


def rollouts(registry: Registry) -> list[str]:
    """Say where two rollouts are open, an arm is impossible, or a promotion has no rollout."""
    broken = [f"endpoint {name!r}: {n} rollouts are open" for name, n in registry.open_rollouts.items() if n > 1]
    for item in registry.endpoints:
        name = f"endpoint {item.endpoint_id!r}"
        if (item.phase == "steady") != (item.candidate is None) or not 0 <= item.basis_points <= 10_000:
            broken.append(f"{name}: phase {item.phase}, candidate {item.candidate}, {item.basis_points} basis points")
        if item.candidate is not None and item.candidate == item.stable:
            broken.append(f"{name}: candidate and stable are both {item.stable}")
        if bool(registry.open_rollouts.get(item.endpoint_id)) == (item.phase == "steady"):
            broken.append(f"{name}: phase {item.phase}, {registry.open_rollouts[item.endpoint_id]} open rollouts")
    return broken + [
        f"endpoint {name!r}: its promotion to epoch {event.epoch} has no promoted rollout"
        for name, events in registry.events.items()
        for event in events
        if event.operation == "promote" and registry.rollouts.get(f"{name}@{event.epoch}") != "promoted"
    ]


def served_versions(registry: Registry, blobs: list[BlobRow]) -> list[str]:
    """Say which endpoints name a version that is unknown, retired, or whose blobs are not live."""
    live = {row.blob.digest for row in blobs if row.state == "live"}
    broken: list[str] = []
    for item in registry.endpoints:
        for number in (item.stable, item.previous, item.candidate):
            if number is None:
                continue
            version = registry.versions.get((item.model_id, number))
            name = f"endpoint {item.endpoint_id!r} names {item.model_id}@{number}, which"
            if version is None:
                broken.append(f"{name} does not exist")
            elif version.retired:
                broken.append(f"{name} is retired")
            elif not {blob.digest for blob in version.facts.blobs} <= live:
                broken.append(f"{name} has blobs that are not live")
    return broken


def promotion_evidence(registry: Registry) -> list[str]:
    """Say which promotions did not rest on complete evidence in force then, and which rollbacks led to another."""
    broken: list[str] = []
    for name, events in registry.events.items():
        stable_before: set[int | None] = set()
        for event in events:
            where = f"endpoint {name!r} epoch {event.epoch}"
            if event.operation == "rollback":
                if event.row.stable not in stable_before:
                    broken.append(f"{where}: {event.row.stable} was never promoted")
            else:
                broken += [f"{where}: {problem}" for problem in _promotion_problems(registry, event)]
            stable_before.add(event.row.stable)
    return broken


def _promotion_problems(registry: Registry, event: EndpointEvent) -> list[str]:
    version = registry.versions.get((event.row.model_id, event.row.stable or 0))
    if version is None or event.evidence is None:
        return ["no such version, or no evidence"]
    policy, _ = registry.policies.get((version.model_id, event.evidence.policy_version), (None, 0))
    if policy is None or not policy.allows_immediate:
        return [f"policy {event.evidence.policy_version} does not exist or does not allow it"]
    broken = _statement_problems(registry, version, event.evidence.promotion_statement, "promoter")
    moved_at = registry.moved_at[event.endpoint_id, event.epoch]
    following = registry.policies.get((version.model_id, policy.version + 1))
    if following is not None and following[1] < moved_at:
        broken.append(f"policy {policy.version} was not in force any more")
    newest = _newest_results(registry, version, moved_at)
    for gate in policy.gates(version.kind):
        found = newest.get(gate)
        named = event.evidence.statements.get(gate)
        if found != ("pass", policy.version, version.manifest_digest, named):
            broken.append(f"gate {gate}: its newest result was {found}")
        broken += _statement_problems(registry, version, named or "", "gate")
    return broken


def _newest_results(registry: Registry, version: ModelVersion, before: int) -> dict[str, tuple[object, ...]]:
    columns = tables.gate_result.c
    mine = (
        columns.tenant_id == registry.tenant,
        columns.model_id == version.model_id,
        columns.version == version.version,
    )
    rows = registry.connection.execute(sa.select(tables.gate_result).where(*mine).order_by(columns.attempt))
    return {
        row.gate: (row.verdict, row.policy_version, row.artifact_digest, row.statement_digest)
        for row in rows
        if registry.order.get(row.command_key, 0) < before
    }


def _statement_problems(registry: Registry, version: ModelVersion, statement_digest: str, role: str) -> list[str]:
    stored = find_attestation(registry.connection, registry.tenant, statement_digest)
    if stored is not None and (stored.subject_digest, stored.role) == (version.manifest_digest, role):
        return []
    return [f"statement {statement_digest or '(none)'} is no {role} statement about {version.manifest_digest}"]


def predictions(registry: Registry) -> list[str]:
    """Say which predictions name a version or an arm that the endpoint did not have at their epoch."""
    columns = tables.prediction.c
    event = tables.endpoint_event
    used = sa.select(columns.endpoint_id, columns.endpoint_epoch, columns.model_version, columns.arm).distinct()
    every = used.where(columns.tenant_id == registry.tenant).subquery()
    statement = sa.select(every, event.c.row.label("served")).outerjoin(
        event,
        sa.and_(
            event.c.tenant_id == registry.tenant,
            event.c.endpoint_id == every.c.endpoint_id,
            event.c.epoch == every.c.endpoint_epoch,
        ),
    )
    broken: list[str] = []
    for row in registry.connection.execute(statement):
        served: Any = None if row.served is None else endpoint_of(load(row.served))
        version = None if served is None else served.stable if row.arm == "stable" else served.candidate
        if version != row.model_version:
            broken.append(
                f"endpoint {row.endpoint_id!r} epoch {row.endpoint_epoch}: arm {row.arm} was {version}, "
                f"predictions name {row.model_version}"
            )
    return broken


def wanted_edges(registry: Registry) -> set[tuple[str, str, str]]:
    """Return the lineage edges that model versions must have."""
    return {(version.node, run_node(version.run_id), "training") for version in registry.versions.values()}


def wanted_blobs(registry: Registry) -> list[tuple[str, str, str]]:
    """Return (owner, kind of owner, digest) of every blob of versions, attestations and predictions."""
    wanted = [
        (version.node, "model_version", blob.digest)
        for version in registry.versions.values()
        for blob in version.facts.blobs
    ]
    mine = sa.select(tables.attestation).where(tables.attestation.c.tenant_id == registry.tenant)
    for row in registry.connection.execute(mine):
        stored = attestation_of_row(row)
        wanted += [(stored.statement_digest, "attestation", blob.digest) for blob in stored.blobs]
    columns = tables.prediction.c
    details = sa.select(columns.endpoint_id, columns.endpoint_epoch, columns.detail_digest).distinct()
    for row in registry.connection.execute(details.where(columns.tenant_id == registry.tenant)):
        wanted.append((f"{row.endpoint_id}@{row.endpoint_epoch}", "predictions", row.detail_digest))
    return wanted


def _names(registry: Registry) -> set[str]:
    return {endpoint.endpoint_id for endpoint in registry.endpoints}
