"""Catalogs without their guards, so that a test can damage rows and see which invariant says so."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def take_guards_off(file: Path, index: str) -> None:
    """Drop every trigger of an SQLite catalog, and one unique index."""
    connection = sqlite3.connect(file, isolation_level=None)
    triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for (name,) in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(f"DROP INDEX {index}")
    connection.close()


@contextmanager
def damageable(catalog: Path, folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a copy of an unguarded catalog in `folder`, whose check constraints are ignored."""
    shutil.copy(catalog, folder / "catalog.db")
    connection = sqlite3.connect(folder / "catalog.db", isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints=ON")
    yield connection
    connection.close()
