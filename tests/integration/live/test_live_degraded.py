"""What answers while a part is away, what is told of it, and that it heals: one row of the table each."""

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pyarrow as pa
import pytest
from support.live_bench import ENDPOINT, WORLD, LiveServer, another_version, copied, settings_of, spooled
from support.serving_bench import HOUR, opened
from support.serving_model import keys_of
from support.workbench import Workbench

from headway.registry.promote import rollback
from headway.serving.live.following import Following
from headway.serving.live.types import NotReady
from headway.serving.requests import RequestsRefused
from headway.world import FORMAT

pytestmark = pytest.mark.xdist_group("live")
AWAY = ("catalog_unreachable",)
# Far above any honest answer: that serving does not wait for a catalog is what is asserted, not how fast it is.
WAIT = 30.0


@pytest.fixture(scope="module")
def running(live_bench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workbench, LiveServer]]:
    """One server for the rows of the table that leave no trace once they healed."""
    bench = copied(live_bench, tmp_path_factory.mktemp("degraded") / "bench")
    with LiveServer(bench) as server:
        yield bench, server


@contextmanager
def _catalog_missing(bench: Workbench) -> Iterator[None]:
    away = bench.home / "away"
    away.mkdir()
    for file in bench.home.glob("catalog.db*"):
        file.rename(away / file.name)
    try:
        yield
        assert not (bench.home / "catalog.db").exists(), "following makes no catalog"
    finally:
        for file in away.iterdir():
            file.rename(bench.home / file.name)
        away.rmdir()


@contextmanager
def _catalog_damaged(bench: Workbench) -> Iterator[None]:
    with closing(sqlite3.connect(bench.home / "catalog.db", isolation_level=None, timeout=60)) as holder:
        holder.execute("ALTER TABLE endpoint RENAME TO endpoint_elsewhere")
        try:
            yield
        finally:
            holder.execute("ALTER TABLE endpoint_elsewhere RENAME TO endpoint")


@pytest.mark.parametrize("away", [_catalog_missing, _catalog_damaged])
def test_a_catalog_that_is_away_stops_no_answer(
    running: tuple[Workbench, LiveServer], rows: pa.Table, away: Callable[[Workbench], AbstractContextManager[None]]
) -> None:
    bench, server = running
    logged = len(spooled(bench.home / "serving" / "default" / "spool"))
    server.until(lambda: server.degraded() == ())
    with away(bench):
        server.until(lambda: server.degraded() == AWAY)
        answers = server.ask(rows.slice(0, 5), seconds=WAIT)
        assert {a.degraded[0] for a in answers} == set(AWAY)
        age = server.engine.status().catalog_age_s
        assert age is not None
        assert age > 0
        assert server.engine.ready() == (True, "")
    server.until(lambda: server.degraded() == ())
    assert server.ask(rows.slice(0, 1))[0].degraded == ()
    assert len(spooled(bench.home / "serving" / "default" / "spool")) == logged + 6


def test_a_signing_key_that_is_away_stops_promotions_and_no_answer(
    running: tuple[Workbench, LiveServer], rows: pa.Table
) -> None:
    bench, server = running
    version = another_version(bench, 5, promoted=False)
    (file,) = (bench.home / "keys").glob("promoter-*.key")
    file.rename(file.with_suffix(".away"))
    refused = bench.run("promote", f"{ENDPOINT}@{version}")
    assert (refused.exit_code, "cannot be read" in refused.stderr) == (2, True)
    assert server.ask(rows.slice(0, 1))[0].served.version == 1
    assert server.degraded() == ()
    file.with_suffix(".away").rename(file)
    assert server.engine.served(ENDPOINT).endpoint_epoch == 1


def test_a_clock_that_jumps_changes_what_may_be_asked_and_no_duration(
    running: tuple[Workbench, LiveServer], rows: pa.Table
) -> None:
    bench, server = running
    clock = settings_of(bench).clock_file
    text = clock.read_text()
    try:
        for hours in (1, -24 * 3):
            moment = time.gmtime((WORLD + hours * HOUR) / 1_000_000)
            clock.write_text(f'{{"format": "{FORMAT}", "now": "{time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)}"}}')
            assert server.engine.now() == WORLD + hours * HOUR
            if hours > 0:
                (answer,) = server.ask(rows.slice(0, 1))
                assert 0 <= answer.queue_wait_us + answer.feature_us + answer.compute_us < WAIT * 1_000_000
            else:
                with pytest.raises(RequestsRefused, match="still to come"):
                    server.ask(rows.slice(rows.num_rows - 1, 1))
    finally:
        clock.write_text(text)
    last = spooled(bench.home / "serving" / "default" / "spool")[-1]
    assert (last.asked_at, 0 <= last.latency_us < WAIT * 1_000_000) == (WORLD + HOUR, True)


def test_a_restart_without_the_catalog_serves_the_last_signed_pointer_and_heals(
    bench: Workbench, rows: pa.Table
) -> None:
    with LiveServer(bench) as server:
        another_version(bench, 5)
        server.until(lambda: server.engine.served(ENDPOINT).version == 2)
        with opened(bench) as services:
            rollback(services, keys_of(bench), ENDPOINT, "worse on Mondays")
        server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 3)
        (before,) = server.ask(rows.slice(0, 1))
    keys = bench.home / "keys" / "public.json"
    with _catalog_missing(bench):
        keys.rename(keys.with_suffix(".away"))
        with LiveServer(bench) as server:
            assert server.degraded() == (*AWAY, "keys_away")
            (after,) = server.ask(rows.slice(0, 1))
            assert (after.probability, after.served.endpoint_epoch) == (before.probability, 3)
            assert after.degraded[0] == AWAY[0]
        keys.with_suffix(".away").rename(keys)
    # A catalog that was restored from a copy of before: what was served is not taken back.
    old = bench.home / "old.db"
    with closing(sqlite3.connect(bench.home / "catalog.db")) as now, closing(sqlite3.connect(old)) as copy:
        now.backup(copy)
    with LiveServer(bench) as server:
        assert server.degraded() == ()
        another_version(bench, 6)
        server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 4)
    for file in bench.home.glob("catalog.db*"):
        file.unlink()
    shutil.copy(old, bench.home / "catalog.db")
    with LiveServer(bench) as server:
        server.until(lambda: server.degraded() == ("catalog_behind:3 of 4",))
        assert server.ask(rows.slice(0, 1))[0].served.endpoint_epoch == 4


def test_without_a_pointer_and_without_a_catalog_nothing_answers_until_it_comes(
    bench: Workbench, rows: pa.Table
) -> None:
    with _catalog_missing(bench):
        server = LiveServer(bench)
        with server:
            assert server.engine.ready() == (False, "no_pointer")
            assert server.engine.models() == ()
            for file in (bench.home / "away").iterdir():
                shutil.copy(file, bench.home / file.name)
            server.until(lambda: server.engine.ready()[0])
            assert server.ask(rows.slice(0, 1))[0].served.version == 1
        for file in bench.home.glob("catalog.db*"):
            file.unlink()


def test_a_server_that_stops_finishes_what_is_in_flight_and_refuses_the_rest(bench: Workbench, rows: pa.Table) -> None:
    refused: list[str] = []
    with LiveServer(bench) as server:
        asked = [threading.Thread(target=server.ask, args=(rows.slice(i, 2),)) for i in range(10)]
        with server.load(rows, pause=0.01) as answers:
            time.sleep(0.3)
        for thread in asked:
            thread.start()
        server.until(lambda: server.engine.status().queue_rows > 0 or not any(t.is_alive() for t in asked))
        server._run(server.engine.stop(WAIT))
        for thread in asked:
            thread.join()
        assert server.engine.ready() == (False, "draining")
        try:
            server.engine.served(ENDPOINT)
        except NotReady as error:
            refused.append(error.reason)
    assert refused == ["draining"]
    kept = spooled(bench.home / "serving" / "default" / "spool")
    assert len(kept) >= len(answers)
    assert {a.prediction_id for a in answers} <= {r.prediction_id for r in kept}


def test_a_fault_of_the_loading_thread_is_told_and_what_serves_goes_on(
    bench: Workbench, rows: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(self: Following) -> None:
        raise ZeroDivisionError("a fault that nobody thought of")

    with LiveServer(bench) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Following, "_revive", fault)
            server.until(lambda: server.degraded() == ("following_fault",))
            (answer,) = server.ask(rows.slice(0, 1))
            assert (answer.served.version, answer.degraded[0]) == (1, "following_fault")
        server.until(lambda: server.degraded() == ())
