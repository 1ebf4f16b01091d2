"""A catalog on PostgreSQL that is frozen, and one that is stopped at once: serving does not notice, and says so."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.live_bench import ENDPOINT, LiveServer, copied, settings_of
from support.postgres import Postgres, running_postgres
from support.workbench import Workbench

from headway.catalog import open_catalog
from headway.catalog.tables import metadata
from headway.home import Settings

pytestmark = pytest.mark.xdist_group("live")
AWAY = ("catalog_unreachable",)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A PostgreSQL of these tests alone: they stop it."""
    with running_postgres() as started:
        yield started


@pytest.fixture(scope="module")
def moved(
    live_bench: Workbench, server: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workbench, Settings]:
    """The bench with its catalog on PostgreSQL: every row of the file, table by table."""
    bench = copied(live_bench, tmp_path_factory.mktemp("postgres") / "bench")
    url = server.fresh_database()
    open_catalog(url).close()
    source = sa.create_engine(f"sqlite:///{bench.home / 'catalog.db'}")
    target = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with source.connect() as old, target.begin() as new:
        new.execute(sa.text("SELECT set_config('headway.tenant', 'default', true)"))
        for table in metadata.sorted_tables:
            rows = [dict(row._mapping) for row in old.execute(sa.select(table))]
            if rows:
                new.execute(sa.insert(table), rows)
    source.dispose()
    target.dispose()
    return bench, settings_of(bench, HEADWAY_DATABASE_URL=url)


def _processes(server: Postgres) -> list[int]:
    """The server and its backends."""
    root = server.process.pid
    found = [root]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended while we looked.
        if int(parts[1]) == root:
            found.append(int(stat.parent.name))
    return found


def test_a_frozen_catalog_stops_no_answer_and_no_start(
    moved: tuple[Workbench, Settings], server: Postgres, rows: pa.Table
) -> None:
    bench, settings = moved
    with LiveServer(bench, settings=settings) as live:
        assert live.degraded() == ()
        frozen = _processes(server)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert len(live.ask(rows.slice(0, 5))) == 5
            live.until(lambda: live.degraded() == AWAY)
            assert live.ask(rows.slice(0, 1))[0].degraded[0] == AWAY[0]
            with LiveServer(bench, settings=settings, name="default-2") as other:
                # It never served here, so it has no pointer of its own, and waits for the catalog without hanging.
                assert other.engine.ready() == (False, "no_pointer")
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        live.until(lambda: live.degraded() == ())
        assert live.engine.served(ENDPOINT).endpoint_epoch == 1


def test_a_catalog_that_is_stopped_at_once_stops_no_answer_and_no_restart(
    moved: tuple[Workbench, Settings], server: Postgres, rows: pa.Table
) -> None:
    bench, settings = moved
    with LiveServer(bench, settings=settings) as live:
        live.until(lambda: live.degraded() == ())
        # What `pg_ctl -m immediate stop` sends.
        server.process.send_signal(signal.SIGQUIT)
        server.process.wait(60)
        live.until(lambda: live.degraded() == AWAY)
        (before,) = live.ask(rows.slice(0, 1))
    again: subprocess.Popen[bytes] | None = None
    try:
        with LiveServer(bench, settings=settings) as live:
            assert live.degraded() == AWAY
            assert live.ask(rows.slice(0, 1))[0].probability == before.probability
            again = subprocess.Popen(server.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
            live.until(lambda: live.degraded() == ())
    finally:
        if again is not None:
            again.send_signal(signal.SIGQUIT)
            again.wait(60)
