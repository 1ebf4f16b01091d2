"""How a command runs: one key, one effect, one audit row, one outbox row, one stored answer, in one commit.

The key is claimed by the first statement with `INSERT ... ON CONFLICT DO NOTHING RETURNING`: whoever gets the row back
runs the effect, everybody else gets the stored answer. Without a key from the caller, one is derived from the command
and from the position that its aggregate has or would reach, so that a repeat after a crash finds its own answer and a
later call with the same arguments, after something else happened, is a new command.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, cast

import sqlalchemy as sa

from headway.artifacts.digests import Json, canonical_json, digest_json
from headway.catalog.clock import Clock
from headway.catalog.database import Database
from headway.catalog.errors import IdempotencyConflict, InvalidFact, UnknownTenant
from headway.catalog.facts import Principal, check_name
from headway.catalog.tables import audit, idempotency, outbox, tenant

Document: TypeAlias = dict[str, Json]
Probe: TypeAlias = Callable[[str], None]

DERIVED = "auto:"
# How many names one statement lists: SQLite takes 32,766 parameters, and a short list keeps its plan.
MANY = 500


@dataclass(frozen=True)
class Command:
    """What is asked for: an operation with its arguments, on an aggregate (the thing that is locked and ordered)."""

    operation: str
    aggregate: str
    arguments: Mapping[str, Json]

    @property
    def fingerprint(self) -> str:
        """The digest of operation, aggregate and arguments."""
        return digest_json([self.operation, self.aggregate, self.arguments])


@dataclass(frozen=True)
class Step:
    """The transaction in which an effect happens."""

    database: Database
    connection: sa.Connection
    principal: Principal
    key: str
    now: int

    @property
    def tenant(self) -> str:
        """The tenant whose rows are touched."""
        return self.principal.tenant

    def insert(self, table: sa.Table, **values: object) -> None:
        """Insert one row of the tenant."""
        self.connection.execute(_plain_insert(table), {"tenant_id": self.tenant, **values})

    def insert_many(self, table: sa.Table, rows: Sequence[Mapping[str, object]]) -> None:
        """Insert rows of the tenant, of which there may be none."""
        if rows:
            self.connection.execute(_plain_insert(table), [{"tenant_id": self.tenant, **row} for row in rows])

    def insert_once(self, table: sa.Table, **values: object) -> bool:
        """Insert one row of the tenant unless it is there; return whether it was inserted."""
        statement = self.database.insert_once(table)
        return self.connection.execute(statement, {"tenant_id": self.tenant, **values}).first() is not None


class Runner:
    """Runs commands against one database."""

    def __init__(self, database: Database, clock: Clock, probe: Probe | None) -> None:
        self.database = database
        self._clock = clock
        self._probe = probe or _no_probe
        self._known: set[str] = set()

    def run(
        self,
        principal: Principal,
        key: str | None,
        command: Command,
        effect: Callable[[Step], Document],
        position: Callable[[sa.Connection], int],
    ) -> Document:
        """Run `effect` once for the key and return its answer, or return the answer that the key has already.

        Args:
            principal: who asks.
            key: the caller's key, or None to derive one from the command and from `position`.
            command: what is asked; another command under the same key is refused.
            effect: changes the rows and returns the answer.
            position: the count of the aggregate's steps at which this command did, or would, take effect.

        Raises:
            IdempotencyConflict: the key answered another command.
            UnknownTenant: the principal's tenant does not exist.
        """
        if key is not None:
            _check_key(key)
        with self.database.write(principal.tenant, command.operation) as connection:
            self._probe("begun")
            if key is None:
                self.database.lock(connection, principal.tenant, command.aggregate)
                key = DERIVED + digest_json([command.fingerprint, position(connection)])
            step = Step(self.database, connection, principal, key, self._clock())
            answer = _claim(step, command)
            if answer is None:
                self._probe("claimed")
                self._check_tenant(step, command)
                self.database.lock(connection, principal.tenant, command.aggregate)
                answer = effect(step)
                self._probe("effect")
                _record(step, command, answer)
            self._probe("before_commit")
        self._probe("after_commit")
        self._known.add(principal.tenant)
        return answer

    def _check_tenant(self, step: Step, command: Command) -> None:
        if command.operation == "tenant.ensure" or step.tenant in self._known:
            return
        if step.connection.execute(sa.select(tenant.c.epoch).where(tenant.c.tenant_id == step.tenant)).first() is None:
            raise UnknownTenant(step.tenant)


@cache
def _plain_insert(table: sa.Table) -> sa.Insert:
    return sa.insert(table)


def next_seq(table: sa.Table, name: str, *conditions: sa.ColumnElement[bool]) -> "sa.ScalarSelect[int]":
    """Return 1 + the highest `name` among the rows of `table` that meet the conditions, as a subquery."""
    return sa.select(sa.func.coalesce(sa.func.max(table.c[name]), 0) + 1).where(*conditions).scalar_subquery()


def chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield `names` in pieces that one statement can list."""
    for start in range(0, len(names), MANY):
        yield names[start : start + MANY]


def load(text: str) -> Json:
    """Return the JSON value stored as `text`."""
    return cast("Json", json.loads(text))


def dump(value: Json) -> str:
    """Return the canonical JSON of `value` as text."""
    return canonical_json(value).decode()


def _no_probe(point: str) -> None:
    del point


def _check_key(key: str) -> None:
    check_name("key", key)
    if key.startswith(DERIVED):
        raise InvalidFact("key", key, f"a key that does not start with {DERIVED!r}, which marks derived keys")


def _claim(step: Step, command: Command) -> Document | None:
    mine = step.insert_once(
        idempotency,
        key=step.key,
        operation=command.operation,
        fingerprint=command.fingerprint,
        status="claimed",
        response=None,
        created_at=step.now,
    )
    if mine:
        return None
    stored = step.connection.execute(_STORED, {"tenant": step.tenant, "command": step.key}).one()
    if stored.fingerprint != command.fingerprint:
        raise IdempotencyConflict(step.key, command.operation)
    return cast("Document", load(stored.response))


def _record(step: Step, command: Command, answer: Document) -> None:
    response = dump(answer)
    step.connection.execute(_ANSWER, {"tenant": step.tenant, "command": step.key, "answer": response})
    # Readers of the outbox take the other side of this lock, so that they never pass a lower number still in flight.
    step.database.lock(step.connection, step.tenant, "outbox", shared=True)
    _insert_counted(
        step,
        audit,
        actor=step.principal.actor,
        action=command.operation,
        resource=command.aggregate,
        outcome="allow",
        command_key=step.key,
        fingerprint=command.fingerprint,
        at=step.now,
    )
    own = {"tenant": step.tenant, "aggregate": command.aggregate}
    _insert_counted(
        step,
        outbox,
        aggregate=command.aggregate,
        aggregate_seq=step.connection.execute(_NEXT_OF_AGGREGATE, own).scalar_one(),
        topic=command.operation,
        payload=response,
        command_key=step.key,
        at=step.now,
    )


def _insert_counted(step: Step, table: sa.Table, **values: object) -> None:
    # PostgreSQL counts by a sequence; on SQLite the one writer counts, as a second key column cannot autoincrement.
    if step.database.dialect == "sqlite":
        values["seq"] = step.connection.execute(_NEXT[table.name], {"tenant": step.tenant}).scalar_one()
    step.insert(table, **values)


_TENANT = sa.bindparam("tenant", type_=sa.Text)
_MINE = (idempotency.c.tenant_id == _TENANT, idempotency.c.key == sa.bindparam("command", type_=sa.Text))
_STORED = sa.select(idempotency.c.fingerprint, idempotency.c.response).where(*_MINE)
_ANSWER = sa.update(idempotency).where(*_MINE).values(status="done", response=sa.bindparam("answer", type_=sa.Text))
_NEXT = {table.name: sa.select(next_seq(table, "seq", table.c.tenant_id == _TENANT)) for table in (audit, outbox)}
_NEXT_OF_AGGREGATE = sa.select(
    next_seq(
        outbox,
        "aggregate_seq",
        outbox.c.tenant_id == _TENANT,
        outbox.c.aggregate == sa.bindparam("aggregate", type_=sa.Text),
    )
)
