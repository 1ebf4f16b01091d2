"""The catalog is frozen, killed, read-only or out of disk: writes are refused in time, and heal to one effect each."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from support.catalog_facts import ALICE, delivery
from support.postgres import Postgres, running_postgres
from support.registry_facts import ENDPOINT, MODEL, ask, judge, pass_all, prepare_inputs, registered, run_facts

from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.clock import system_clock
from headway.catalog.database import Database
from headway.catalog.errors import CatalogBusy, CatalogUnavailable

pytestmark = pytest.mark.xdist_group("degraded_catalog")
# A frozen server is given up after this; a new connection to it takes ten seconds more (CONNECT_SECONDS).
ANSWER_S = 1.0
# Far above both, on a machine that does other things as well.
LIMIT_S = 120.0

Commands = Mapping[str, Callable[[Catalog], object]]


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A PostgreSQL of one test alone, which stops it."""
    with running_postgres() as started:
        yield started


def _prepare(url: str) -> tuple[Catalog, Commands]:
    """A catalog with a version that may be promoted, and the commands: register, start, promote, judge."""
    open_catalog(url).close()
    catalog = Catalog(Database(url, answer_seconds=ANSWER_S), system_clock, None)
    snapshot = prepare_inputs(catalog)
    version = registered(catalog, snapshot)
    proof = pass_all(catalog, version)
    return catalog, {
        "register": lambda c: c.register_version(ALICE, "register", delivery(content=2)),
        "start": lambda c: ask(c, run_facts(snapshot, seed=8), key="start"),
        "promote": lambda c: c.promote_immediate(
            ALICE, "promote", ENDPOINT, MODEL, version.version, expected_epoch=None, evidence=proof
        ),
        "judge": lambda c: judge(c, version, "contract", look=2),
    }


def _state(catalog: Catalog) -> dict[str, Any]:
    """How much of everything there is."""
    endpoint = catalog.endpoint(ALICE, ENDPOINT)
    return {
        "versions": len(catalog.versions(ALICE, "flights")),
        "runs": len(catalog.runs(ALICE)),
        "gates": len(catalog.gate_results(ALICE, MODEL, 1)),
        "stable": None if endpoint is None else (endpoint.stable, endpoint.epoch),
        "audit": len(catalog.audit_rows(ALICE)),
    }


def _refused(catalog: Catalog, commands: Commands) -> None:
    """Every command is refused as the catalog's absence, in time, and says what helps."""
    for name, command in commands.items():
        began = time.monotonic()
        with pytest.raises((CatalogUnavailable, CatalogBusy)) as refusal:
            command(catalog)
        assert time.monotonic() - began < LIMIT_S, name
        assert "repeat the same command" in refusal.value.remedy, name


def _heals(catalog: Catalog, commands: Commands, before: dict[str, Any]) -> None:
    """Nothing was half done; each command has its effect now, and again changes nothing."""
    assert _state(catalog) == before
    for command in commands.values():
        command(catalog)
    after = _state(catalog)
    assert (after["versions"], after["runs"], after["stable"]) == (before["versions"] + 1, before["runs"] + 1, (1, 1))
    assert after["gates"] == before["gates"] + 1
    for command in commands.values():
        command(catalog)
    assert _state(catalog) == after


@contextmanager
def _frozen(server: Postgres, url: str) -> Iterator[None]:
    del url
    pids = [server.process.pid, *_backends(server)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def _killed(server: Postgres, url: str) -> Iterator[None]:
    """kill -9 of the server; it is started again, and recovers from its log."""
    pids = _backends(server)
    server.process.kill()
    server.process.wait(60)
    yield
    _until(lambda: not [p for p in pids if Path(f"/proc/{p}").exists()])
    again = subprocess.Popen(server.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    _AGAIN.append(again)
    _until(lambda: _connects(url))


@contextmanager
def _read_only(server: Postgres, url: str) -> Iterator[None]:
    """As on a standby, or when an operator locks the database for its upgrade."""
    name = sql.Identifier(url.partition("@/")[2].partition("?")[0])
    with psycopg.connect(host=str(server.socket), user="postgres", dbname="postgres", autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        _cut_connections(admin)
        try:
            yield
        finally:
            admin.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
            _cut_connections(admin)


def _cut_connections(admin: psycopg.Connection[Any]) -> None:
    """Ended by the server a moment after it was asked to: none is left when this returns."""
    ours = "FROM pg_stat_activity WHERE usename = 'headway'"
    admin.execute(f"SELECT pg_terminate_backend(pid) {ours}")
    _until(lambda: admin.execute(f"SELECT count(*) {ours}").fetchone() == (0,))


_AGAIN: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _started_again_is_ended() -> Iterator[None]:
    yield
    while _AGAIN:
        process = _AGAIN.pop()
        process.send_signal(signal.SIGQUIT)
        process.wait(60)


def _backends(server: Postgres) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == server.process.pid:
                found.append(int(stat.parent.name))
    return found


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("away", [_frozen, _killed, _read_only])
def test_a_catalog_that_is_away_refuses_writes_in_time_and_heals(
    server: Postgres, away: Callable[[Postgres, str], Any]
) -> None:
    url = server.fresh_database()
    catalog, commands = _prepare(url)
    before = _state(catalog)
    with away(server, url):
        if away is _read_only:
            # `judge` reads first, and SQLAlchemy asks for READ WRITE by name on a connection that has read.
            _refused(catalog, {name: commands[name] for name in ("register", "start", "promote")})
            assert _state(catalog) == before
        else:
            _refused(catalog, commands)
    if away is not _frozen:
        # The pool may still hold connections that broke; whoever asks first is told so, once for each.
        _until(lambda: _answers(catalog))
    _heals(catalog, commands, before)
    catalog.close()


def _answers(catalog: Catalog) -> bool:
    try:
        catalog.runs(ALICE)
    except CatalogUnavailable:
        return False
    return True


def test_one_killed_backend_is_one_refusal(server: Postgres) -> None:
    """kill -9 of a process that serves clients: PostgreSQL drops all of them, recovers, and nothing is lost."""
    url = server.fresh_database()
    catalog, commands = _prepare(url)
    before = _state(catalog)
    with psycopg.connect(url) as other:
        os.kill(other.info.backend_pid, signal.SIGKILL)
        with suppress(psycopg.OperationalError):
            other.execute("SELECT 1")
    _until(lambda: _answers(catalog))
    _heals(catalog, commands, before)
    catalog.close()


def test_a_full_disk_refuses_writes_answers_reads_and_heals(tmp_path: Path) -> None:
    """SQLite: the log of writes cannot grow; what is there is read, and nothing is half done."""
    catalog, commands = _prepare(f"sqlite:///{tmp_path / 'catalog.db'}")
    # Everything into the database file, so that the next write must make the log grow.
    catalog.close()
    catalog = Catalog(Database(f"sqlite:///{tmp_path / 'catalog.db'}"), system_clock, None)
    before = _state(catalog)
    with _full_log(tmp_path):
        _refused(catalog, commands)
        assert _state(catalog) == before
    _heals(catalog, commands, before)
    catalog.close()


@contextmanager
def _full_log(folder: Path) -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = folder / "catalog.db-wal"
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size if log.exists() else 1, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
