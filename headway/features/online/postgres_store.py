"""The online store of a cluster: tables in PostgreSQL."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg import errors

from headway.features.online.sql_store import SCHEMA, Row, Session, SqlStore
from headway.features.online.store import OnlineBusy, OnlineUnavailable, StoreKey

CONNECT_SECONDS = 5
LOCK_SECONDS = 20.0
READ_SECONDS = 2.0
WRITE_SECONDS = 60.0
_SCHEMA_LOCK = 0x6865_6164_7761_79


class _PostgresSession(Session):
    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection = connection

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(_text(statement), tuple(parameters)).fetchall()

    def change(self, statement: str, parameters: Sequence[Any]) -> int:
        return self._connection.execute(_text(statement), tuple(parameters)).rowcount

    def many(self, statement: str, parameters: Sequence[Sequence[Any]]) -> int:
        if not parameters:
            return 0
        with self._connection.cursor() as cursor:
            cursor.executemany(_text(statement), parameters)
            return cursor.rowcount


class PostgresOnlineStore(SqlStore):
    """The store in a database that several servers share. Safe for several threads and processes.

    A server that is frozen cannot time out itself: after `READ_SECONDS` the connection is cut from this side.
    """

    def __init__(self, url: str) -> None:
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._mutex = threading.RLock()
        self._connections: dict[str, psycopg.Connection[Row]] = {}
        self._pid = os.getpid()

    @contextmanager
    def syncing(self, key: StoreKey) -> Iterator[None]:
        """As `OnlineStore.syncing`: an advisory lock of a session of its own, which ends with it."""
        name = f"headway online {key.tenant} {key.pipeline} {key.feature_set_version}".encode()
        number = int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True)
        with self._failures(), self._connect(LOCK_SECONDS) as connection:
            try:
                connection.execute("SELECT pg_advisory_lock(%s)", (number,))
                connection.commit()
            except errors.QueryCanceled as error:
                raise OnlineBusy(
                    f"another process has been filling the online features of {key.pipeline} for {LOCK_SECONDS:.0f} s",
                    "wait for it, or end it",
                ) from error
            yield

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """As `SqlStore.writing`."""
        with self._transaction("write", WRITE_SECONDS) as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """As `SqlStore.reading`."""
        with self._transaction("read", READ_SECONDS) as session:
            yield session

    def close(self) -> None:
        """As `OnlineStore.close`."""
        with self._mutex:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    @contextmanager
    def _transaction(self, use: str, seconds: float) -> Iterator[Session]:
        with self._mutex, self._failures():
            connection = self._connection(use, seconds)
            try:
                with _cut_after(connection, seconds + 1.0):
                    yield _PostgresSession(connection)
                    connection.commit()
            except BaseException:
                self._connections.pop(use).close()
                raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise OnlineUnavailable(
                f"the online store cannot be used: {str(error).partition(chr(10))[0]}",
                "check the server; the store can be filled again from the datasets",
            ) from error

    def _connect(self, seconds: float) -> psycopg.Connection[Row]:
        options = f"-c statement_timeout={int(seconds * 1000)} -c lock_timeout={int(LOCK_SECONDS * 1000)}"
        return psycopg.connect(
            self._url, connect_timeout=CONNECT_SECONDS, options=options, tcp_user_timeout=int(seconds * 1000)
        )

    def _connection(self, use: str, seconds: float) -> psycopg.Connection[Row]:
        if self._pid != os.getpid():
            # A forked child must not use its parent's connections.
            self._connections, self._pid = {}, os.getpid()
        if use in self._connections and self._connections[use].closed:
            del self._connections[use]
        if use not in self._connections:
            connection = self._connect(seconds)
            if use == "read":
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            self._make_tables()
            self._connections[use] = connection
        return self._connections[use]

    def _make_tables(self) -> None:
        with self._connect(LOCK_SECONDS) as connection:
            if connection.execute("SELECT to_regclass('online_erased')").fetchone() != (None,):
                return
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            for statement in SCHEMA:
                connection.execute(_text(statement.replace("BYTES", "BYTEA")))


@contextmanager
def _cut_after(connection: psycopg.Connection[Row], seconds: float) -> Iterator[None]:
    """Shut the connection's socket when the block takes longer: the waiting call then fails."""

    def cut() -> None:
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.Error):
            # It is closed already, which is what was wanted.
            return

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _text(statement: str) -> Any:  # noqa: ANN401 - psycopg takes literal strings only, these are put together here
    return cast("Any", statement.replace("?", "%s"))
