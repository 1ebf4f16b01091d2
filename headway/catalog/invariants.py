"""The catalog checked against its own rules, and the store against the rows: what `headway fsck` runs.

Names I1..I20 are the project's invariants. Each check reads one consistent state of one tenant and says what it found,
in a sentence with the first offenders; nothing is repaired.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from headway.artifacts.errors import StoreError
from headway.artifacts.store import LocalStore
from headway.catalog import monitoring_invariants, registry_invariants, run_invariants, tables
from headway.catalog.catalog import Catalog
from headway.catalog.commands import load
from headway.catalog.datasets import STEPS, read_events, read_versions
from headway.catalog.documents import inputs_of
from headway.catalog.facts import (
    BlobRow,
    DatasetEvent,
    DatasetVersion,
    Principal,
    dataset_node,
    delivery_node,
    feature_set_node,
    snapshot_node,
)
from headway.catalog.lineage import read_blobs
from headway.catalog.registry_invariants import Registry
from headway.catalog.run_facts import TrainingRun

_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """What one check found: the invariant, its name, whether it holds, and a sentence with counts or offenders."""

    invariant: str
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class _State:
    connection: sa.Connection
    dialect: str
    tenant: str
    versions: dict[str, list[DatasetVersion]]
    events: dict[str, list[DatasetEvent]]
    blobs: list[BlobRow]
    edges: set[tuple[str, str, str]]
    runs: list[TrainingRun]
    registry: Registry


def check(catalog: Catalog, principal: Principal, store: LocalStore) -> list[Finding]:
    """Return one finding per invariant that applies, in a fixed order; `ok` is False where it is broken.

    Every live blob's bytes are read and hashed.
    """
    with catalog.reading(principal) as connection:
        state = _read(connection, catalog.database.dialect, principal.tenant)
        findings = [finding(invariant, name, broken(state), good) for invariant, name, broken, good in _CHECKS]
    return [*findings, _stored_bytes(state.blobs, store)]


def triggers_missing(connection: sa.Connection, dialect: str) -> list[str]:
    """Return the append-only triggers that the database lacks or has switched off, as `table.event`."""
    if dialect == "sqlite":
        rows = connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
    else:
        rows = connection.execute(
            sa.text(
                "SELECT t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
                "WHERE c.relnamespace = current_schema()::regnamespace AND t.tgenabled IN ('O', 'A')"
            )
        )
    present = {row[0] for row in rows}
    wanted = [(table, event) for table in sorted(tables.APPEND_ONLY) for event in ("update", "delete")]
    return [f"{table}.{event}" for table, event in wanted if f"{table}_no_{event}" not in present]


def _read(connection: sa.Connection, dialect: str, tenant: str) -> _State:
    names = connection.execute(sa.select(tables.dataset.c.dataset_id).where(tables.dataset.c.tenant_id == tenant))
    datasets = sorted(names.scalars())
    edge = tables.lineage_edge.c
    edges = connection.execute(sa.select(edge.child, edge.parent, edge.role).where(edge.tenant_id == tenant))
    return _State(
        connection=connection,
        dialect=dialect,
        tenant=tenant,
        versions={name: read_versions(connection, tenant, name, None) for name in datasets},
        events={name: read_events(connection, tenant, name, None) for name in datasets},
        blobs=read_blobs(connection, tenant),
        edges={(row.child, row.parent, row.role) for row in edges},
        runs=run_invariants.every_run(connection, tenant),
        registry=registry_invariants.read_registry(connection, tenant),
    )


def _event_steps(state: _State) -> list[str]:
    broken: list[str] = []
    for name, events in state.events.items():
        for version, own in _by_version(events).items():
            node = dataset_node(name, version)
            if [event.seq for event in own] != list(range(1, len(own) + 1)):
                broken.append(f"{node}: events are not numbered 1..{len(own)}")
            previous: str | None = None
            for event in own:
                if event.from_status != previous or not _legal(event):
                    broken.append(f"{node}: event {event.seq} goes {event.from_status} -> {event.to_status}")
                previous = event.to_status
    return broken


def _legal(event: DatasetEvent) -> bool:
    if event.kind == "registered":
        return event.seq == 1 and event.from_status is None and event.to_status == "registered"
    if event.kind == "redelivered":
        return event.from_status == event.to_status
    return event.from_status is not None and event.to_status in STEPS[event.from_status]


def _version_numbers(state: _State) -> list[str]:
    broken = [
        f"dataset {name!r}: versions are {_some([v.version for v in versions])}"
        for name, versions in state.versions.items()
        if [v.version for v in versions] != list(range(1, len(versions) + 1))
    ]
    for name, versions in state.versions.items():
        without = {v.version for v in versions} ^ set(_by_version(state.events[name]))
        broken += [f"{dataset_node(name, number)} has no event or no row" for number in sorted(without)]
    column = tables.feature_set_version.c
    rows = state.connection.execute(
        sa.select(column.feature_set, sa.func.count(), sa.func.min(column.version), sa.func.max(column.version))
        .where(column.tenant_id == state.tenant)
        .group_by(column.feature_set)
    )
    return broken + [f"feature set {row[0]!r}: {row[1]} versions" for row in rows if (row[2], row[3]) != (1, row[1])]


def _partition_fold(state: _State) -> list[str]:
    folded: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for name, events in state.events.items():
        partition_of = {version.version: version.partition for version in state.versions[name]}
        for event in events:
            if event.partition_epoch is not None:
                folded[name, partition_of[event.version]].append((event.partition_epoch, event.version))
    column = tables.dataset_partition.c
    rows = state.connection.execute(
        sa.select(column.dataset_id, column.partition, column.epoch, column.version).where(
            column.tenant_id == state.tenant
        )
    )
    stored = {(row.dataset_id, row.partition): (row.epoch, row.version) for row in rows}
    broken = [f"{key}: a pointer without events, or events without a pointer" for key in sorted(stored.keys() ^ folded)]
    for key, moves in folded.items():
        moves.sort()
        if [epoch for epoch, _ in moves] != list(range(1, len(moves) + 1)):
            broken.append(f"{key}: epochs are not 1..{len(moves)}")
        if key in stored and stored[key] != moves[-1]:
            broken.append(f"{key}: the row says {stored[key]}, its events say {moves[-1]}")
    return broken


def _one_effect(state: _State) -> list[str]:
    column = tables.idempotency.c
    rows = state.connection.execute(
        sa.select(column.key, column.fingerprint, column.status, column.response).where(
            column.tenant_id == state.tenant
        )
    )
    keys = {row.key: row for row in rows}
    broken = [f"key {key!r} was claimed and never answered" for key, row in keys.items() if row.status != "done"]
    for table in (tables.audit, tables.outbox):
        statement = sa.select(table.c.command_key).where(table.c.tenant_id == state.tenant)
        counts: dict[str, int] = defaultdict(int)
        for found in state.connection.execute(statement).scalars():
            counts[found] += 1
        broken += [
            f"key {key!r} has {counts.get(key, 0)} {table.name} rows"
            for key in sorted(keys.keys() | counts)
            if key not in keys or counts.get(key, 0) != 1
        ]
    return broken + _answers(state, {key: row.response for key, row in keys.items()})


def _answers(state: _State, responses: dict[str, str | None]) -> list[str]:
    audit, outbox = tables.audit.c, tables.outbox.c
    statement = sa.select(outbox.command_key, outbox.payload).where(outbox.tenant_id == state.tenant)
    broken = [
        f"key {row.command_key!r}: the outbox tells something else than the stored answer"
        for row in state.connection.execute(statement)
        if responses.get(row.command_key) != row.payload
    ]
    prints = sa.select(audit.command_key).where(
        audit.tenant_id == state.tenant,
        sa.exists().where(
            tables.idempotency.c.tenant_id == audit.tenant_id,
            tables.idempotency.c.key == audit.command_key,
            tables.idempotency.c.fingerprint != audit.fingerprint,
        ),
    )
    return broken + [f"key {key!r}: audited as another command" for key in state.connection.execute(prints).scalars()]


def _append_only(state: _State) -> list[str]:
    return [f"trigger {name} is missing" for name in triggers_missing(state.connection, state.dialect)]


def _blob_rows(state: _State) -> list[str]:
    live = {row.blob.digest: row for row in state.blobs if row.state == "live"}
    broken = [f"blob {row.blob.digest} is live and owned by nothing" for row in live.values() if not row.owners]
    wanted = [
        (version.node, "dataset_version", blob.digest)
        for versions in state.versions.values()
        for version in versions
        for blob in version.blobs
    ]
    column = tables.feature_snapshot.c
    manifests = sa.select(column.snapshot_id, column.manifest_digest).where(column.tenant_id == state.tenant)
    wanted += [
        (snapshot_node(row.snapshot_id), "feature_snapshot", row.manifest_digest)
        for row in state.connection.execute(manifests)
    ]
    wanted += run_invariants.wanted_blobs(state.runs) + registry_invariants.wanted_blobs(state.registry)
    wanted += monitoring_invariants.wanted_blobs(state.connection, state.tenant)
    for node, kind, digest in wanted:
        if digest not in live or (kind, node) not in live[digest].owners:
            broken.append(f"{node}: blob {digest} is not live and owned by it")
    return broken


def _outbox_order(state: _State) -> list[str]:
    column = tables.outbox.c
    rows = state.connection.execute(
        sa.select(column.aggregate, column.aggregate_seq, column.seq)
        .where(column.tenant_id == state.tenant)
        .order_by(column.seq)
    )
    counted: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        counted[row.aggregate].append(row.aggregate_seq)
    return [
        f"aggregate {name!r}: {_some(numbers)}"
        for name, numbers in counted.items()
        if numbers != list(range(1, len(numbers) + 1))
    ]


def _tenant_wall(state: _State) -> list[str]:
    inspector = sa.inspect(state.connection)
    broken = [
        f"table {name}: the key starts with {columns[:1]}"
        for name in sorted(tables.APPEND_ONLY | tables.MUTABLE)
        if (columns := inspector.get_pk_constraint(name)["constrained_columns"])[:1] != ["tenant_id"]
    ]
    if state.dialect == "sqlite":
        return broken
    rows = state.connection.execute(
        sa.text(
            "SELECT c.relname FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace "
            "AND c.relrowsecurity AND c.relforcerowsecurity "
            "AND EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid)"
        )
    )
    walled = set(rows.scalars())
    broken += [f"table {name}: row security is off" for name in sorted((tables.APPEND_ONLY | tables.MUTABLE) - walled)]
    role = sa.text("SELECT rolname FROM pg_roles WHERE rolname = current_user AND (rolsuper OR rolbypassrls)")
    return broken + [
        f"role {name!r} passes row security; connect as an ordinary role"
        for name in state.connection.execute(role).scalars()
    ]


def _snapshot_inputs(state: _State) -> list[str]:
    trusted = {
        (name, event.version, event.evidence_digest)
        for name, events in state.events.items()
        for event in events
        if event.to_status == "released"
    }
    content = {(name, v.version): v.content_digest for name, versions in state.versions.items() for v in versions}
    column = tables.feature_snapshot.c
    broken: list[str] = []
    statement = sa.select(column.snapshot_id, column.inputs).where(column.tenant_id == state.tenant)
    for row in state.connection.execute(statement):
        for item in inputs_of(load(row.inputs)):
            node = dataset_node(item.dataset, item.version)
            if (item.dataset, item.version, item.evidence_digest) not in trusted:
                broken.append(f"snapshot {row.snapshot_id}: {node} was never released on its evidence")
            if content.get((item.dataset, item.version)) != item.content_digest:
                broken.append(f"snapshot {row.snapshot_id}: {node} has other content than it read")
    return broken


def _snapshot_events(state: _State) -> list[str]:
    column = tables.snapshot_event.c
    rows = state.connection.execute(
        sa.select(column.pipeline, column.partition, column.seq)
        .where(column.tenant_id == state.tenant)
        .order_by(column.pipeline, column.partition, column.seq)
    )
    counted: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        counted[row.pipeline, row.partition].append(row.seq)
    return [f"{key}: {_some(seqs)}" for key, seqs in counted.items() if seqs != list(range(1, len(seqs) + 1))]


def _lineage(state: _State) -> list[str]:
    wanted = {
        (version.node, delivery_node(version.source_digest), "source")
        for versions in state.versions.values()
        for version in versions
    }
    column = tables.feature_snapshot.c
    statement = sa.select(column.snapshot_id, column.inputs, column.feature_set, column.feature_set_version)
    for row in state.connection.execute(statement.where(column.tenant_id == state.tenant)):
        node = snapshot_node(row.snapshot_id)
        wanted.add((node, feature_set_node(row.feature_set, row.feature_set_version), "features"))
        wanted |= {(node, dataset_node(i.dataset, i.version), "input") for i in inputs_of(load(row.inputs))}
    wanted |= run_invariants.wanted_edges(state.runs) | registry_invariants.wanted_edges(state.registry)
    return [f"edge {child} <- {parent} ({role}) is missing" for child, parent, role in sorted(wanted - state.edges)]


def _stored_bytes(blobs: Sequence[BlobRow], store: LocalStore) -> Finding:
    broken = [fault for row in blobs if (fault := _fault(row, store))]
    live = {row.blob.digest for row in blobs if row.state == "live"}
    unowned = 0
    try:
        unowned = sum(1 for item in store.list() if item.digest not in live)
    except StoreError as error:
        broken.append(error.message)
    good = f"{len(live)} live blobs read and verified; {unowned} stored files belong to no live row of this tenant"
    return finding("I9", "stored bytes", broken, good)


def _fault(row: BlobRow, store: LocalStore) -> str:
    try:
        found = store.stat(row.blob.digest)
        if row.state == "erased" and found is not None:
            return f"blob {row.blob.digest} is erased and still stored"
        if row.state == "live" and found is not None and found.size != row.blob.size:
            return f"blob {row.blob.digest} has {found.size} bytes, its row says {row.blob.size}"
        if row.state == "live":
            store.read_path(row.blob.digest)
    except StoreError as error:
        return error.message
    return ""


def _by_version(events: Iterable[DatasetEvent]) -> dict[int, list[DatasetEvent]]:
    found: dict[int, list[DatasetEvent]] = defaultdict(list)
    for event in events:
        found[event.version].append(event)
    return found


def _some(items: Sequence[object]) -> str:
    listed = ", ".join(str(item) for item in items[:_SHOWN])
    return listed if len(items) <= _SHOWN else f"{listed} and {len(items) - _SHOWN} more"


def finding(invariant: str, name: str, broken: Sequence[str], good: str) -> Finding:
    """Return a finding: `good` where nothing is broken, else the count and the first offenders."""
    detail = good if not broken else f"{len(broken)} broken: {'; '.join(broken[:_SHOWN])}"
    return Finding(invariant, name, not broken, detail)


_CHECKS: tuple[tuple[str, str, Callable[[_State], list[str]], str], ...] = (
    ("I1", "dataset events", _event_steps, "every event is a legal step from the one before"),
    ("I1", "current versions", _partition_fold, "every partition's row is the fold of its events, epochs 1..n"),
    ("I1", "snapshot events", _snapshot_events, "numbered 1..n per partition"),
    (
        "I1",
        "run events",
        lambda state: run_invariants.numbered_events(state.connection, state.tenant),
        "numbered 1..n per run, and per node's stream",
    ),
    (
        "I1",
        "endpoints",
        lambda state: registry_invariants.endpoint_fold(state.registry),
        "every endpoint is the fold of its moves, epochs 1..n",
    ),
    (
        "I1",
        "retrain requests",
        lambda state: monitoring_invariants.retrain_requests(state.connection, state.tenant),
        "every request is the fold of its moves, and a pipeline has at most one open",
    ),
    (
        "I2",
        "rollouts",
        lambda state: registry_invariants.rollouts(state.registry),
        "at most one is open per endpoint, and every promotion has its own",
    ),
    (
        "I3",
        "served versions",
        lambda state: registry_invariants.served_versions(state.registry, state.blobs),
        "every version that an endpoint names exists, is not retired, and its blobs are live",
    ),
    (
        "I4",
        "promotion evidence",
        lambda state: registry_invariants.promotion_evidence(state.registry),
        "every promotion passed each gate of the policy in force (signatures: headway models verify)",
    ),
    (
        "I5",
        "model version numbers",
        lambda state: registry_invariants.version_numbers(state.registry),
        "1..n per model, its policy, and each gate of a version",
    ),
    (
        "I5",
        "report numbers",
        lambda state: monitoring_invariants.numbers(state.connection, state.tenant),
        "1..n per kind, version and week, and decisions per pipeline",
    ),
    ("I5", "version numbers", _version_numbers, "1..n per dataset and feature set"),
    ("I6", "one key, one effect", _one_effect, "one audit row, one outbox row and one stored answer per key"),
    ("I8", "append-only tables", _append_only, "UPDATE, DELETE and TRUNCATE of every fact are refused"),
    ("I9", "blob rows", _blob_rows, "every blob of a version, snapshot or report is live and owned"),
    ("I10", "outbox order", _outbox_order, "numbered 1..n per aggregate, in commit order"),
    (
        "I11",
        "predictions",
        lambda state: registry_invariants.predictions(state.registry),
        "every prediction's version and arm were the endpoint's at its epoch",
    ),
    (
        "I12",
        "shipped answers",
        lambda state: monitoring_invariants.shipped_answers(state.connection, state.tenant),
        "of every log segment as many answers are recorded as were shipped, without a gap between its ranges",
    ),
    (
        "I13",
        "attached labels",
        lambda state: monitoring_invariants.attached_labels(state.connection, state.tenant),
        "every one is about the answer that it is attached to (which is current follows from the set)",
    ),
    (
        "I13",
        "label inbox",
        lambda state: monitoring_invariants.label_inbox(state.connection, state.tenant),
        "a label waits or is attached, never both, and none waits whose answer is there",
    ),
    (
        "I14",
        "budgets",
        lambda state: run_invariants.budget_sums(state.connection, state.tenant),
        "reserved and spent stay within every limit, one reservation per attempt or retrain request",
    ),
    (
        "I14",
        "reservations",
        lambda state: run_invariants.reservations(state.connection, state.tenant),
        "none outlives its attempt or retrain request",
    ),
    ("I16", "tenant wall", _tenant_wall, "the tenant is the first key column everywhere, behind row security if any"),
    ("I19", "snapshot inputs", _snapshot_inputs, "every snapshot read released versions on the evidence it names"),
    (
        "I20",
        "attempts",
        lambda state: run_invariants.attempt_states(state.connection, state.tenant, state.runs),
        "every attempt is the fold of its events; ends never change, and a success is the last word",
    ),
    ("lineage", "lineage edges", _lineage, "everything is linked to what it came from"),
)
