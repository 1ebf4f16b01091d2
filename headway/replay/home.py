"""A second home that starts from what the first one holds, for a replay that must not disturb it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from headway.errors import HeadwayError
from headway.home import Settings, load_settings

CATALOG = "catalog.db"
UNTRAINED = "catalog-before-training.db"


class HomeNotCopied(HeadwayError):
    """The state of a home cannot be taken into another one."""


def keep_untrained(settings: Settings) -> None:
    """Keep a copy of the catalog as it is before anything was trained; a copy that is there stays.

    A replay starts from it: a model that the future trained must not be known to the past. Nothing is kept of a
    catalog that is no SQLite file below the home.
    """
    target = settings.home / UNTRAINED
    if _own_catalog(settings) is None or target.exists():
        return
    unfinished = target.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    _copy_catalog(settings.home / CATALOG, unfinished)
    unfinished.replace(target)


def copy_home(settings: Settings, target: Path, *, untrained: bool = False) -> Settings:
    """Copy catalog, store and keys of a home to a fresh folder; what `target` held before is removed.

    Stored blobs are written once and never changed, so they are linked where the file system allows it. Runs, servers,
    clocks and Dagster's instance stay behind.

    Args:
        settings: the home to copy.
        target: where to.
        untrained: take the catalog that `keep_untrained` kept.

    Raises:
        HomeNotCopied: the catalog is no SQLite file below the home, or is not there.
    """
    catalog = _own_catalog(settings)
    if catalog is None:
        raise HomeNotCopied(
            "only a home whose catalog is its own SQLite file can be copied",
            "unset HEADWAY_DATABASE_URL, or replay in the home itself with `headway demo feed`",
        )
    source = settings.home / UNTRAINED if untrained else catalog
    if not source.exists():
        what = "was trained in before this release" if untrained and catalog.exists() else "holds no catalog"
        raise HomeNotCopied(f"{settings.home} {what}", f"rm -rf {settings.home} && make demo")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    _copy_catalog(source, target / CATALOG)
    shutil.copytree(settings.store_root, target / "store", copy_function=_link)
    if settings.keys_folder.exists():
        shutil.copytree(settings.keys_folder, target / "keys")
    return load_settings({**os.environ, "HEADWAY_HOME": str(target)})


def _own_catalog(settings: Settings) -> Path | None:
    catalog = settings.home / CATALOG
    return catalog if settings.database_url == f"sqlite:///{catalog}" else None


def _copy_catalog(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as copy:
        read.backup(copy)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # Another file system: a copy holds the same bytes.
        shutil.copy2(source, target)
    return target
