"""The embedded online store: one SQLite file in write-ahead mode."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.features.online.sql_store import SCHEMA, SEQUENCES, Row, Session, SqlStore
from headway.features.online.store import OnlineBusy, OnlineUnavailable, StoreKey

LOCK_SECONDS = 20.0
READ_SECONDS = 2.0


class _SqliteSession(Session):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(statement, parameters).fetchall()

    def change(self, statement: str, parameters: Sequence[Any]) -> int:
        return self._connection.execute(statement, parameters).rowcount

    def many(self, statement: str, parameters: Sequence[Sequence[Any]]) -> int:
        return self._connection.executemany(statement, parameters).rowcount if parameters else 0


class SqliteOnlineStore(SqlStore):
    """The store in one file, made when it is first written or read. Safe for several threads and processes.

    A killed writer loses its open transaction and nothing else. The file can always be filled again from the datasets,
    so a commit does not wait for the disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.RLock()
        self._connections: dict[str, sqlite3.Connection] = {}
        self._pid = os.getpid()

    @contextmanager
    def syncing(self, key: StoreKey) -> Iterator[None]:
        """As `OnlineStore.syncing`: an advisory lock on a file beside the database, which a killed holder gives up."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise OnlineBusy(
                            f"another process has been filling {self._path} for {LOCK_SECONDS:.0f} s",
                            "wait for it, or end it",
                        ) from error
                    time.sleep(0.02)
            yield

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """As `SqlStore.writing`."""
        with self._transaction("write", "BEGIN IMMEDIATE") as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """As `SqlStore.reading`."""
        with self._transaction("read", "BEGIN") as session:
            yield session

    def sequences(self, key: StoreKey) -> tuple[int, int] | None:
        """As `SqlStore.sequences`: a statement by itself sees one state of the database too, at half the cost."""
        with self._mutex:
            try:
                statement = self._connection("read").execute
                return statement(SEQUENCES, (key.tenant, key.pipeline, key.feature_set_version)).fetchone()
            except sqlite3.Error as error:
                raise self._unavailable(error) from error

    def close(self) -> None:
        """As `OnlineStore.close`."""
        with self._mutex:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    @contextmanager
    def _transaction(self, use: str, begin: str) -> Iterator[Session]:
        with self._mutex:
            try:
                connection = self._connection(use)
                connection.execute(begin)
                try:
                    yield _SqliteSession(connection)
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._unavailable(error) from error

    def _unavailable(self, cause: Exception) -> OnlineUnavailable:
        return OnlineUnavailable(
            f"the online store {self._path} cannot be used: {cause}",
            "check the file and the disk; it can be removed and filled again from the datasets",
        )

    def _connection(self, use: str) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # A forked child must not use its parent's connections.
            self._connections, self._pid = {}, os.getpid()
        if use not in self._connections:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._unavailable(error) from error
            seconds = LOCK_SECONDS if use == "write" else READ_SECONDS
            connection = sqlite3.connect(self._path, timeout=seconds, isolation_level=None, check_same_thread=False)
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA mmap_size=268435456")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'online_erased'").fetchone():
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    text = statement.replace("INT8", "INTEGER").replace("BYTES", "BLOB")
                    connection.execute(text + (" WITHOUT ROWID" if "PRIMARY KEY" in text else ""))
                connection.execute("COMMIT")
            self._connections[use] = connection
        return self._connections[use]
