"""kill -9 of a child at each point of a command, then the same command again: nothing lost, nothing doubled."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.catalog_child import BEFORE, COMMANDS, exit_code, main, run
from support.catalog_facts import ALICE, Ticker

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.invariants import check

ROOT = Path(__file__).parents[3]
POINTS = ("begun", "claimed", "effect", "before_commit", "after_commit")


def _counts(catalog: Catalog) -> tuple[int, int, int, int]:
    return (
        len(catalog.audit_rows(ALICE)),
        len(catalog.outbox(ALICE)),
        len(catalog.dataset_events(ALICE, "flights")),
        len(catalog.versions(ALICE, "flights")),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def _prepared(url: str, folder: Path, command: str) -> Catalog:
    catalog = open_catalog(url, Ticker())
    catalog.ensure_tenant(ALICE)
    for earlier in BEFORE[command]:
        run(catalog, LocalStore(folder), earlier, f"before-{earlier}")
    return catalog


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("key", ["my-key", None])
def test_a_killed_command_is_repeated_without_loss_or_doubling(
    catalog_url: str, folder: Path, point: str, key: str | None
) -> None:
    catalog = _prepared(catalog_url, folder, "register")
    before = _counts(catalog)
    assert exit_code(main, catalog_url, folder, "register", point, key) == -signal.SIGKILL
    assert _counts(catalog)[0] == before[0] + (1 if point == "after_commit" else 0)
    store = LocalStore(folder)
    run(catalog, store, "register", key)
    run(catalog, store, "register", key)
    assert _counts(catalog) == (before[0] + 1, before[1] + 1, 1, 1)
    assert [finding for finding in check(catalog, ALICE, store) if not finding.ok] == []
    catalog.close()


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_every_command_survives_a_kill_around_its_commit(
    catalog_url: str, folder: Path, command: str, point: str
) -> None:
    catalog = _prepared(catalog_url, folder, command)
    audit, outbox, events, versions = _counts(catalog)
    assert exit_code(main, catalog_url, folder, command, point, None) == -signal.SIGKILL
    store = LocalStore(folder)
    first = run(catalog, store, command, None)
    assert run(catalog, store, command, None) == first
    moved = 0 if command in ("feature_set", "publish", "refuse") else 1
    assert _counts(catalog) == (audit + 1, outbox + 1, events + moved, versions)
    assert [finding for finding in check(catalog, ALICE, store) if not finding.ok] == []
    catalog.close()


@pytest.mark.parametrize("point", ["written", "flushed", "linked"])
def test_a_kill_between_blob_and_row_leaves_neither_torn_blob_nor_temporary_file(
    tmp_path: Path, folder: Path, point: str
) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    catalog = _prepared(url, folder, "register")
    assert exit_code(main, url, folder, "register", point, "my-key") == -signal.SIGKILL
    assert len(list((folder / "tmp").iterdir())) == 1
    assert catalog.versions(ALICE, "flights") == []
    store = LocalStore(folder)
    assert list((folder / "tmp").iterdir()) == []
    for stored in store.list():
        store.get_bytes(stored.digest)
    run(catalog, store, "register", "my-key")
    assert [finding for finding in check(catalog, ALICE, store) if not finding.ok] == []
    catalog.close()


def test_a_killed_migration_leaves_nothing_half_made(empty_database_url: str, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from alembic.operations import Operations\n"
        "from headway.catalog import open_catalog\n"
        "plain = Operations.create_table\n"
        "def create(self, name, *items):\n"
        "    if name == 'rollout': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return plain(self, name, *items)\n"
        "import alembic.op\n"
        "alembic.op.create_table = lambda name, *items: create(alembic.op._proxy, name, *items)\n"
        "open_catalog(sys.argv[1])\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, empty_database_url], cwd=ROOT, capture_output=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    catalog = open_catalog(empty_database_url, Ticker())
    catalog.ensure_tenant(ALICE)
    assert [f for f in check(catalog, ALICE, LocalStore(tmp_path / "store")) if not f.ok] == []
    catalog.close()
