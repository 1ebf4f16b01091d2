"""The statements of the online store, which SQLite and PostgreSQL share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from headway.features.online.store import (
    Change,
    Entity,
    EntityRow,
    OnlineState,
    PartitionMark,
    Read,
    RowVersion,
    StoreKey,
    Subject,
)

Row = tuple[Any, ...]
_WHERE = "tenant = ? AND pipeline = ? AND feature_set_version = ?"
_IN_PARTS = 200

# BYTES and INT8 stand for what each database calls them.
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS online_row (
        tenant TEXT NOT NULL, pipeline TEXT NOT NULL, feature_set_version INT8 NOT NULL,
        scope TEXT NOT NULL, entity BYTES NOT NULL, identity BYTES NOT NULL,
        "partition" TEXT NOT NULL, version INT8 NOT NULL, position INT8 NOT NULL,
        event_time INT8 NOT NULL, available_time INT8 NOT NULL, sequence INT8 NOT NULL, deleted INT8 NOT NULL,
        payload BYTES NOT NULL,
        PRIMARY KEY (tenant, pipeline, feature_set_version, scope, entity, "partition", position, version))""",
    """CREATE INDEX IF NOT EXISTS online_row_identity
        ON online_row (tenant, pipeline, feature_set_version, scope, identity, entity)""",
    """CREATE INDEX IF NOT EXISTS online_row_partition
        ON online_row (tenant, pipeline, feature_set_version, scope, "partition")""",
    """CREATE TABLE IF NOT EXISTS online_moved (
        tenant TEXT NOT NULL, pipeline TEXT NOT NULL, feature_set_version INT8 NOT NULL,
        scope TEXT NOT NULL, entity BYTES NOT NULL, identity BYTES NOT NULL,
        "partition" TEXT NOT NULL, version INT8 NOT NULL, position INT8 NOT NULL,
        event_time INT8 NOT NULL, available_time INT8 NOT NULL, sequence INT8 NOT NULL, deleted INT8 NOT NULL,
        PRIMARY KEY (
            tenant, pipeline, feature_set_version, scope, entity, identity, "partition", position, version))""",
    """CREATE TABLE IF NOT EXISTS online_mark (
        tenant TEXT NOT NULL, pipeline TEXT NOT NULL, feature_set_version INT8 NOT NULL,
        source TEXT NOT NULL, "partition" TEXT NOT NULL, document TEXT NOT NULL,
        PRIMARY KEY (tenant, pipeline, feature_set_version, source, "partition"))""",
    """CREATE TABLE IF NOT EXISTS online_state (
        tenant TEXT NOT NULL, pipeline TEXT NOT NULL, feature_set_version INT8 NOT NULL,
        sequence INT8 NOT NULL, rows_sequence INT8 NOT NULL, document TEXT NOT NULL,
        PRIMARY KEY (tenant, pipeline, feature_set_version))""",
    """CREATE TABLE IF NOT EXISTS online_erased (
        tenant TEXT NOT NULL, pipeline TEXT NOT NULL,
        source TEXT NOT NULL, key_columns TEXT NOT NULL, entity BYTES NOT NULL, erased_at INT8 NOT NULL,
        PRIMARY KEY (tenant, pipeline, source, key_columns, entity))""",
)
SEQUENCES = f"SELECT sequence, rows_sequence FROM online_state WHERE {_WHERE}"
_READ = 'r.identity, r."partition", r.position, r.event_time, r.available_time, r.sequence, r.deleted'
# SQLite keeps the order of a CROSS JOIN: one search by key per entity, never a walk over all rows.
_ASKED = "r.tenant = ? AND r.pipeline = ? AND r.feature_set_version = ? AND r.scope = w.scope AND r.entity = w.entity"
_PLACE = 'identity, "partition", position, event_time, available_time, sequence, deleted'


class Session(ABC):
    """One open transaction. Statements use `?` for parameters."""

    @abstractmethod
    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """The rows of one statement; none for one that gives none."""

    @abstractmethod
    def change(self, statement: str, parameters: Sequence[Any]) -> int:
        """The number of rows that one statement changed."""

    @abstractmethod
    def many(self, statement: str, parameters: Sequence[Sequence[Any]]) -> int:
        """One statement for many rows; how many it changed."""


class SqlStore(ABC):
    """An online store in a database."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Session]:
        """A transaction that may write, committed at the end."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Session]:
        """A transaction that sees one state of the database."""

    def sequences(self, key: StoreKey) -> tuple[int, int] | None:
        """The sequences of the state and of the rows; None when there is no state."""
        with self.reading() as session:
            found = session.run(SEQUENCES, _of(key))
        return (found[0][0], found[0][1]) if found else None

    def apply(self, key: StoreKey, change: Change) -> int:
        """As `OnlineStore.apply`."""
        with self.writing() as session:
            touched = _empty(session, key, change.emptied)
            kept = list(_not_erased(session, key, change))
            added = session.many(_INSERT, [_parameters(key, row) for row in kept])
            touched |= {(r.scope, r.identity) for r in kept}
            _note_moves(session, key, touched)
            for source, partition in change.dropped_marks:
                session.change(
                    f'DELETE FROM online_mark WHERE {_WHERE} AND source = ? AND "partition" = ?',
                    (*_of(key), source, partition),
                )
            session.many(_MARK, [(*_of(key), m.source, m.partition, json.dumps(asdict(m))) for m in change.marks])
            _move_state(session, key, change.state, rows=bool(touched))
        return added

    def states(self, tenant: str, pipeline: str) -> list[OnlineState]:
        """As `OnlineStore.states`."""
        with self.reading() as session:
            rows = session.run(
                "SELECT sequence, document FROM online_state WHERE tenant = ? AND pipeline = ? "
                "ORDER BY feature_set_version",
                (tenant, pipeline),
            )
        return [_state(sequence, document) for sequence, document in rows]

    def marks(self, key: StoreKey) -> list[PartitionMark]:
        """As `OnlineStore.marks`."""
        with self.reading() as session:
            return _marks(session, key)

    def read(self, key: StoreKey, seen: tuple[int, int], missing: Sequence[Entity], held: Sequence[Entity]) -> Read:
        """As `OnlineStore.read`."""
        if not missing and self.sequences(key) == seen:
            return Read(*seen, None, {})
        with self.reading() as session:
            found = session.run(SEQUENCES, _of(key))
            if not found:
                return Read(0, 0, None, {})
            sequence, rows_sequence = found[0]
            state = None if sequence == seen[0] else _whole_state(session, key)
            wanted = list(missing) if rows_sequence == seen[1] else [*missing, *held]
            return Read(sequence, rows_sequence, state, _rows(session, key, wanted))

    def erase(self, key: StoreKey, subject: Subject, entity: bytes, scopes: Mapping[str, Subject], at: int) -> int:
        """As `OnlineStore.erase`."""
        with self.writing() as session:
            session.change(
                f"INSERT INTO online_erased VALUES ({_marks_of(6)}) ON CONFLICT DO NOTHING",
                (key.tenant, key.pipeline, subject[0], json.dumps(subject[1]), entity, at),
            )
            own: set[bytes] = set()
            for scope in (s for s, of in scopes.items() if of == subject):
                found = session.run(
                    f"SELECT DISTINCT identity FROM online_row WHERE {_WHERE} AND scope = ? AND entity = ?",
                    (*_of(key), scope, entity),
                )
                own |= {bytes(identity) for (identity,) in found}
            removed = 0
            for identity in own:
                for scope in scopes:
                    removed += session.change(
                        f"DELETE FROM online_row WHERE {_WHERE} AND scope = ? AND identity = ?",
                        (*_of(key), scope, identity),
                    )
            _note_moves(session, key, {(scope, identity) for identity in own for scope in scopes})
            _move_state(session, key, None, rows=True)
        return removed

    def erased(self, tenant: str, pipeline: str) -> frozenset[tuple[Subject, bytes]]:
        """As `OnlineStore.erased`."""
        with self.reading() as session:
            return _erased(session, tenant, pipeline)

    def dump(self, key: StoreKey) -> list[tuple[object, ...]]:
        """As `OnlineStore.dump`."""
        with self.reading() as session:
            rows: list[Row] = []
            for table in ("online_row", "online_moved"):
                found = session.run(f"SELECT * FROM {table} WHERE {_WHERE}", _of(key))
                rows += [(table, *_plain(r)) for r in found]
            rows += [
                ("online_mark", *_plain(r)) for r in session.run(f"SELECT * FROM online_mark WHERE {_WHERE}", _of(key))
            ]
        return sorted(rows, key=repr)


_COLUMNS = (
    'tenant, pipeline, feature_set_version, scope, entity, identity, "partition", version, position, '
    "event_time, available_time, sequence, deleted, payload"
)


def _marks_of(count: int) -> str:
    return ", ".join("?" * count)


_INSERT = f"INSERT INTO online_row ({_COLUMNS}) VALUES ({_marks_of(14)}) ON CONFLICT DO NOTHING"
_MARK = (
    f"INSERT INTO online_mark VALUES ({_marks_of(6)}) "
    'ON CONFLICT (tenant, pipeline, feature_set_version, source, "partition") '
    "DO UPDATE SET document = excluded.document"
)


def _of(key: StoreKey) -> tuple[str, str, int]:
    return key.tenant, key.pipeline, key.feature_set_version


def _plain(row: Row) -> Row:
    return tuple(bytes(v) if isinstance(v, memoryview) else v for v in row)


def _parameters(key: StoreKey, row: RowVersion) -> Row:
    return (
        *_of(key),
        row.scope,
        row.entity,
        row.identity,
        row.partition,
        row.version,
        row.position,
        row.event_time,
        row.available_time,
        row.sequence,
        int(row.deleted),
        row.payload,
    )


def _empty(session: Session, key: StoreKey, emptied: Iterable[tuple[str, str]]) -> set[tuple[str, bytes]]:
    """Remove all rows of (scope, partition); the identities that may have lost a version."""
    touched: set[tuple[str, bytes]] = set()
    for scope, partition in emptied:
        where = f'{_WHERE} AND scope = ? AND "partition" = ?'
        parameters = (*_of(key), scope, partition)
        found = session.run(f"SELECT DISTINCT identity FROM online_row WHERE {where}", parameters)
        touched |= {(scope, bytes(identity)) for (identity,) in found}
        session.change(f"DELETE FROM online_row WHERE {where}", parameters)
    return touched


def _erased(session: Session, tenant: str, pipeline: str) -> frozenset[tuple[Subject, bytes]]:
    found = session.run(
        "SELECT source, key_columns, entity FROM online_erased WHERE tenant = ? AND pipeline = ?", (tenant, pipeline)
    )
    return frozenset(((source, tuple(json.loads(columns))), bytes(entity)) for source, columns, entity in found)


def _not_erased(session: Session, key: StoreKey, change: Change) -> Iterator[RowVersion]:
    erased = _erased(session, key.tenant, key.pipeline)
    return (r for r in change.rows if (change.subjects.get(r.scope), r.entity) not in erased)


def _note_moves(session: Session, key: StoreKey, touched: set[tuple[str, bytes]]) -> None:
    """Note every version of an identity in the other entities where it has a row: a function of the rows alone."""
    by_scope: dict[str, list[bytes]] = {}
    for scope, identity in touched:
        by_scope.setdefault(scope, []).append(identity)
    for scope, identities in by_scope.items():
        for start in range(0, len(identities), _IN_PARTS):
            part = identities[start : start + _IN_PARTS]
            where = f"{_WHERE} AND scope = ? AND identity IN ({_marks_of(len(part))})"
            parameters = (*_of(key), scope, *part)
            session.change(f"DELETE FROM online_moved WHERE {where}", parameters)
            several = session.run(
                f"SELECT identity FROM online_row WHERE {where} GROUP BY identity HAVING count(DISTINCT entity) > 1",
                parameters,
            )
            for (identity,) in several:
                _note_move(session, key, scope, bytes(identity))


def _note_move(session: Session, key: StoreKey, scope: str, identity: bytes) -> None:
    where = f"{_WHERE} AND scope = ? AND identity = ?"
    versions = session.run(
        f"SELECT entity, version, {_PLACE} FROM online_row WHERE {where}", (*_of(key), scope, identity)
    )
    for entity in {bytes(v[0]) for v in versions}:
        others = [v for v in versions if bytes(v[0]) != entity]
        session.many(
            f"INSERT INTO online_moved VALUES ({_marks_of(13)}) ON CONFLICT DO NOTHING",
            [(*_of(key), scope, entity, identity, v[3], v[1], *v[4:]) for v in others],
        )


def _move_state(session: Session, key: StoreKey, state: OnlineState | None, *, rows: bool) -> None:
    found = session.run(SEQUENCES, _of(key))
    sequence = found[0][0] + 1 if found else 1
    rows_sequence = sequence if rows or not found else found[0][1]
    if state is None:
        session.change(
            f"UPDATE online_state SET sequence = ?, rows_sequence = ? WHERE {_WHERE}",
            (sequence, rows_sequence, *_of(key)),
        )
        return
    session.change(f"DELETE FROM online_state WHERE {_WHERE}", _of(key))
    document = {k: v for k, v in asdict(state).items() if k not in ("sequence", "marks")}
    session.change(
        f"INSERT INTO online_state VALUES ({_marks_of(6)})",
        (*_of(key), sequence, rows_sequence, json.dumps(document)),
    )


def _whole_state(session: Session, key: StoreKey) -> OnlineState:
    sequence, document = session.run(f"SELECT sequence, document FROM online_state WHERE {_WHERE}", _of(key))[0]
    return replace(_state(sequence, document), marks=tuple(_marks(session, key)))


def _state(sequence: int, document: str) -> OnlineState:
    facts: dict[str, Any] = json.loads(document)
    for named in ("skipped", "absent"):
        facts[named] = {s: tuple(p) for s, p in facts[named].items()}
    return OnlineState(**facts, sequence=sequence)


def _marks(session: Session, key: StoreKey) -> list[PartitionMark]:
    found = session.run(f'SELECT document FROM online_mark WHERE {_WHERE} ORDER BY source, "partition"', _of(key))
    return [PartitionMark(**json.loads(document)) for (document,) in found]


def _rows(session: Session, key: StoreKey, wanted: Sequence[Entity]) -> Mapping[Entity, Sequence[EntityRow]]:
    found: dict[Entity, list[EntityRow]] = {entity: [] for entity in wanted}
    for start in range(0, len(wanted), _IN_PARTS):
        part = wanted[start : start + _IN_PARTS]
        values = [v for pair in part for v in pair]
        statement = (
            f"WITH wanted(scope, entity) AS (VALUES {', '.join(['(?, ?)'] * len(part))}) "
            f"SELECT r.scope, r.entity, {_READ}, 1, r.payload "
            f"FROM wanted AS w CROSS JOIN online_row AS r WHERE {_ASKED} "
            f"UNION ALL SELECT r.scope, r.entity, {_READ}, 0, NULL "
            f"FROM wanted AS w CROSS JOIN online_moved AS r WHERE {_ASKED}"
        )
        for row in session.run(statement, (*values, *_of(key), *_of(key))):
            found[row[0], row[1]].append(EntityRow._make(row[2:]))
    return found
