"""A second home that starts from what the first one holds, for a replay that must not disturb it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from headway.errors import HeadwayError
from headway.home import Settings, load_settings


class HomeNotCopied(HeadwayError):
    """The state of a home cannot be taken into another one."""


def copy_home(settings: Settings, target: Path) -> Settings:
    """Copy catalog, store and keys of a home to a fresh folder; what `target` held before is removed.

    Stored blobs are written once and never changed, so they are linked where the file system allows it. Runs, servers,
    clocks and Dagster's instance stay behind.

    Raises:
        HomeNotCopied: the catalog is no SQLite file below the home.
    """
    catalog = settings.home / "catalog.db"
    if settings.database_url != f"sqlite:///{catalog}":
        raise HomeNotCopied(
            "only a home whose catalog is its own SQLite file can be copied",
            "unset HEADWAY_DATABASE_URL, or replay in the home itself with `headway demo feed`",
        )
    if not catalog.exists():
        raise HomeNotCopied(f"there is no catalog in {settings.home}", "run `make demo` first")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with closing(sqlite3.connect(catalog)) as source, closing(sqlite3.connect(target / "catalog.db")) as copy:
        source.backup(copy)
    shutil.copytree(settings.store_root, target / "store", copy_function=_link)
    if settings.keys_folder.exists():
        shutil.copytree(settings.keys_folder, target / "keys")
    return load_settings({**os.environ, "HEADWAY_HOME": str(target)})


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # Another file system: a copy holds the same bytes.
        shutil.copy2(source, target)
    return target
