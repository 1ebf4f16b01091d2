"""One engine over two databases: transactions, locks, timeouts, and what their failures mean.

SQLite: WAL, `synchronous=FULL`, one writer at a time by `BEGIN IMMEDIATE`. PostgreSQL: READ COMMITTED, advisory locks
for what is checked before it is written, row security keyed on the transaction's tenant. Nothing waits for ever: each
wait ends by a timeout of the database, or by ours when the server is frozen and cannot time out itself.
"""

import fcntl
import hashlib
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.dml import ReturningInsert

from headway.catalog.errors import CatalogBusy, CatalogUnavailable, UnsupportedDatabase

LOCK_SECONDS = 20
STATEMENT_SECONDS = 40
IDLE_SECONDS = 60
ANSWER_SECONDS = 60.0
CONNECT_SECONDS = 10
MIGRATION_SECONDS = 120.0

_WRITER = "headway_writer"
_TAKE = sa.text("SELECT pg_advisory_xact_lock(:number)")
_TAKE_SHARED = sa.text("SELECT pg_advisory_xact_lock_shared(:number)")
_SET_TENANT = sa.text("SELECT set_config('headway.tenant', :tenant, true)")
_SQLITE_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SQLITE_UNUSABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_PG_BUSY = ("LockNotAvailable", "QueryCanceled", "DeadlockDetected", "IdleInTransactionSessionTimeout")
_PG_READ_ONLY = "ReadOnlySqlTransaction"


class Database:
    """The engine for a database URL. Safe for several threads; a forked child drops the parent's connections.

    `answer_seconds` bounds one transaction on PostgreSQL from this side, for a server that is frozen.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._url = _accepted(url)
        self._answer_seconds = answer_seconds
        self._pid = os.getpid()
        self.dialect = self._url.get_backend_name()
        self.engine = _sqlite_engine(self._url) if self.dialect == "sqlite" else _postgres_engine(self._url)

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    @contextmanager
    def write(self, tenant: str, operation: str) -> Iterator[sa.Connection]:
        """Give a connection inside a writing transaction of `tenant`; commit at the end, roll back on any error.

        Raises:
            CatalogBusy: a lock or an answer did not come before its deadline.
            CatalogUnavailable: the connection broke, or the database's file is gone.
        """
        self._check_there()
        with self._transaction(operation, writer=True) as connection:
            self._enter_tenant(connection, tenant)
            yield connection

    @contextmanager
    def read(self, tenant: str) -> Iterator[sa.Connection]:
        """Give a connection inside a reading transaction of `tenant`. Raises as `write`."""
        self._check_there()
        with self._transaction("read", writer=False) as connection:
            self._enter_tenant(connection, tenant)
            yield connection

    @contextmanager
    def plain(self) -> Iterator[sa.Connection]:
        """Give a connection inside a reading transaction of no tenant: it sees the schema. Raises as `write`."""
        with self._transaction("read", writer=False) as connection:
            yield connection

    @contextmanager
    def migrating(self) -> Iterator[sa.Connection]:
        """Give a connection that alone may change the schema, inside one transaction. Raises as `write`."""
        if self.dialect == "sqlite":
            with _folder_locked(_sqlite_path(self._url).parent):
                _use_wal(_sqlite_path(self._url))
                with self._transaction("migrate", writer=True) as connection:
                    yield connection
            return
        with self._transaction("migrate", writer=True) as connection:
            self.lock(connection, "", "schema")
            yield connection

    def insert_once(self, table: sa.Table) -> "ReturningInsert[tuple[str]]":
        """Return the INSERT that gives back the tenant of the inserted row, or no row when the row is there already.

        The number of affected rows would not tell: psycopg's dialect reports -1 for it.
        """
        return _insert_once(self.dialect, table)

    def lock(self, connection: sa.Connection, tenant: str, name: str, *, shared: bool = False) -> None:
        """Hold `name` of `tenant` until the transaction ends, alone or shared with other sharers.

        On SQLite the writing transaction already excludes every other writer.
        """
        if self.dialect == "sqlite":
            return
        number = int.from_bytes(hashlib.sha256(f"{tenant}\0{name}".encode()).digest()[:8], "big", signed=True)
        connection.execute(_TAKE_SHARED if shared else _TAKE, {"number": number})

    def _check_there(self) -> None:
        """To connect would make an empty file, and a kept connection would write to one that nobody finds."""
        if self.dialect == "sqlite" and not _sqlite_path(self._url).exists():
            raise CatalogUnavailable(f"there is no {_sqlite_path(self._url)}")

    def _enter_tenant(self, connection: sa.Connection, tenant: str) -> None:
        if self.dialect == "postgresql":
            connection.execute(_SET_TENANT, {"tenant": tenant})

    @contextmanager
    def _transaction(self, operation: str, *, writer: bool) -> Iterator[sa.Connection]:
        if os.getpid() != self._pid:
            self.engine.dispose(close=False)
            self._pid = os.getpid()
        try:
            with (
                self.engine.connect() as connection,
                self._answered(connection),
                connection.execution_options(**self._options(writer=writer)).begin(),
            ):
                yield connection
        except DBAPIError as error:
            raise _meaning(error, operation) from error
        except PoolTimeout as error:
            raise CatalogBusy(operation, f"no connection became free within {LOCK_SECONDS} s") from error

    def _options(self, *, writer: bool) -> dict[str, Any]:
        if self.dialect == "sqlite" or writer:
            return {_WRITER: writer}
        # A read of several statements sees one state, as it does on SQLite.
        return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}

    @contextmanager
    def _answered(self, connection: sa.Connection) -> Iterator[None]:
        if self.dialect == "sqlite":
            yield
            return
        # A stopped server keeps its socket open, and no setting of ours on it ends the wait (libpq polls for ever).
        driver: Any = connection.connection.driver_connection
        wire = socket.socket(fileno=os.dup(driver.fileno()))
        watch = threading.Timer(self._answer_seconds, _cut, (wire,))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
            watch.join()
            wire.close()


@cache
def _insert_once(dialect: str, table: sa.Table) -> "ReturningInsert[tuple[str]]":
    plain = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    return plain.on_conflict_do_nothing().returning(table.c.tenant_id)


def _cut(wire: socket.socket) -> None:
    # The other side may have hung up in the same moment, which is all that we want.
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def _accepted(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UnsupportedDatabase(url.partition(":")[0][:40]) from error
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite") and parsed.database not in (None, "", ":memory:"):
        return parsed.set(database=str(Path(parsed.database or "").absolute()))
    # An SQLite catalog without a file would be another one in each process.
    raise UnsupportedDatabase(f"{parsed.drivername}:{parsed.database or ''}")


def _sqlite_path(url: URL) -> Path:
    return Path(str(url.database))


def _sqlite_engine(url: URL) -> sa.Engine:
    _sqlite_path(url).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"timeout": LOCK_SECONDS})

    def prepare(connection: sqlite3.Connection, record: object) -> None:
        del record
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        # Without it INSERT OR REPLACE deletes rows past the append-only triggers.
        connection.execute("PRAGMA recursive_triggers=ON")

    def begin(connection: sa.Connection) -> None:
        writer = connection.get_execution_options().get(_WRITER, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")

    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin)
    return engine


def _postgres_engine(url: URL) -> sa.Engine:
    arguments = {
        "connect_timeout": CONNECT_SECONDS,
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": int(ANSWER_SECONDS * 1000),
    }
    engine = sa.create_engine(url, connect_args=arguments, pool_timeout=LOCK_SECONDS)

    def prepare(connection: Any, record: object) -> None:  # noqa: ANN401 - the driver's own connection
        del record
        for name, seconds in (
            ("statement_timeout", STATEMENT_SECONDS),
            ("lock_timeout", LOCK_SECONDS),
            ("idle_in_transaction_session_timeout", IDLE_SECONDS),
        ):
            connection.execute("SELECT set_config(%s, %s, false)", (name, f"{seconds}s"))
        connection.commit()

    event.listen(engine, "connect", prepare)
    return engine


def _meaning(error: DBAPIError, operation: str) -> Exception:
    cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        if cause.sqlite_errorcode & 0xFF in _SQLITE_BUSY:
            return CatalogBusy(operation, f"another writer held the database for {LOCK_SECONDS} s")
        return CatalogUnavailable(str(cause)) if cause.sqlite_errorcode & 0xFF in _SQLITE_UNUSABLE else error
    if type(cause).__name__ in _PG_BUSY:
        return CatalogBusy(operation, str(cause).partition("\n")[0])
    # A full disk, a server that starts or ends, and one that takes no writes (a standby) among them.
    if error.connection_invalidated or isinstance(error, OperationalError) or type(cause).__name__ == _PG_READ_ONLY:
        return CatalogUnavailable(str(cause).partition("\n")[0])
    return error


def _use_wal(path: Path) -> None:
    # Kept in the file from then on; only one process may switch it, which the folder lock sees to.
    try:
        connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
    except sqlite3.OperationalError as error:
        raise CatalogUnavailable(f"{path}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        raise CatalogUnavailable(f"{path}: {error}") from error
    finally:
        connection.close()


@contextmanager
def _folder_locked(folder: Path) -> Iterator[None]:
    # A lock on the folder leaves no file behind, and never touches the database file, whose locks SQLite would lose
    # when another descriptor of it is closed in this process.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + MIGRATION_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise CatalogBusy("migrate", f"another process held {folder} for {MIGRATION_SECONDS:.0f} s")
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
