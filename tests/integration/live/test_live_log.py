"""What was answered is recorded, each answer once: shipping, explaining, and I12 under kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.live_bench import ENDPOINT, WORLD, LiveServer, copied, spooled
from support.serving_bench import opened, pipeline_of
from support.serving_model import explained
from support.workbench import Workbench

from headway.catalog.monitoring_facts import SegmentProgress
from headway.monitoring.events import event_keys
from headway.serving import ship as module
from headway.serving.live.records import Logged
from headway.serving.live.spool import segments
from headway.serving.ship import ShipReport, ship

pytestmark = pytest.mark.xdist_group("live")
ROOT = Path(__file__).resolve().parents[3]


def _spool(bench: Workbench) -> Path:
    return bench.home / "serving" / "default" / "spool"


def _ship(bench: Workbench, *, seal: bool = False) -> ShipReport:
    pipeline = pipeline_of(bench)
    with opened(bench) as services:
        return ship(services, {pipeline.name: pipeline}.get, bench.home / "serving", seal=seal)


def _child(what: str, bench: Workbench) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.live_child", what, str(bench.folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def _recorded(bench: Workbench) -> set[str]:
    with opened(bench) as services:
        return set(services.catalog.prediction_ids(services.principal, ""))


@pytest.fixture(scope="module")
def answered(
    live_bench: Workbench, rows: pa.Table, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workbench, list[Logged]]:
    """A bench whose server answered every row, some of them together, and stopped; nothing is shipped."""
    bench = copied(live_bench, tmp_path_factory.mktemp("log") / "bench")
    with LiveServer(bench) as server:
        for start in range(0, rows.num_rows, 20):
            server.ask(rows.slice(start, 20), caller=f"order-{start}")
        server.ask(rows.slice(3, 1), caller="single")
    return bench, spooled(_spool(bench))


def test_answers_are_shipped_with_what_labels_and_quality_need(
    answered: tuple[Workbench, list[Logged]], rows: pa.Table, tmp_path: Path
) -> None:
    origin, logged = answered
    bench = copied(origin, tmp_path / "bench")
    pipeline = pipeline_of(bench)
    assert len(logged) == rows.num_rows + 1
    (name,) = segments(_spool(bench))
    size = (_spool(bench) / f"{name}.log").stat().st_size
    assert _ship(bench) == ShipReport(shipped=len(logged), records=len(logged), segments_removed=1)
    with opened(bench) as services:
        who, catalog = services.principal, services.catalog
        assert catalog.shipments(who) == [SegmentProgress("default", name, 0, size, len(logged), 0, 0)]
        kept = {p.prediction_id: p for p in catalog.predictions(who, ENDPOINT, WORLD, WORLD + 1)}
        assert set(kept) == {r.prediction_id for r in logged}
        for record in logged:
            found = kept[record.prediction_id]
            assert (found.score, found.observed_at, found.asked_at) == (record.probability, record.observed, WORLD)
            assert (found.caller_id, found.source, found.model_version) == (record.caller_id, "online", 1)
            assert (found.endpoint_epoch, found.event_key) == (1, None)
        assert {p.caller_id for p in kept.values()} >= {"single", "order-0/0", "order-100/19"}
        # With a match declared, the event's key is that of the request.
        keys = event_keys(pipeline.spec, rows)
        assert set(keys) == {None}
    assert _ship(bench) == ShipReport()
    assert segments(_spool(bench)) == []


def test_a_pipeline_is_looked_up_once_however_many_answers_it_gave(
    answered: tuple[Workbench, list[Logged]], tmp_path: Path
) -> None:
    """To load a declaration takes a while, and nobody else ships meanwhile."""
    bench = copied(answered[0], tmp_path / "bench")
    pipeline = pipeline_of(bench)
    asked: list[str] = []
    with opened(bench) as services:
        done = ship(services, lambda name: asked.append(name) or pipeline, bench.home / "serving")
    assert done.shipped > len(asked) == 1


def test_what_was_answered_online_is_explained_down_to_raw_rows(
    answered: tuple[Workbench, list[Logged]], tmp_path: Path
) -> None:
    """The catalog does not know it yet: explain ships first. Features and score are computed again, to the bit."""
    origin, logged = answered
    bench = copied(origin, tmp_path / "bench")
    assert _recorded(bench) == set()
    for record in (logged[57], logged[-1]):
        told = explained(bench, record.prediction_id)
        assert told["problems"] == []
        assert told["prediction"]["output"]["probability"] == record.probability
    assert len(_recorded(bench)) == len(logged)
    unknown = bench.run("explain", "ffffffff", "--pipeline", str(bench.folder))
    assert unknown.exit_code == 2


def test_answers_of_a_pipeline_that_is_not_known_wait(answered: tuple[Workbench, list[Logged]], tmp_path: Path) -> None:
    origin, _ = answered
    bench = copied(origin, tmp_path / "bench")
    with opened(bench) as services:
        assert ship(services, lambda name: None, bench.home / "serving") == ShipReport(left=1)
    assert _recorded(bench) == set()
    assert len(segments(_spool(bench))) == 1


def test_several_that_ship_at_once_record_each_answer_once(
    answered: tuple[Workbench, list[Logged]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.serving.ship.RECORDS_OF_A_SHIPMENT", 10)
    origin, logged = answered
    bench = copied(origin, tmp_path / "bench")
    reports: list[ShipReport] = []
    threads = [threading.Thread(target=lambda: reports.append(_ship(bench))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(r.shipped for r in reports) == len(logged)
    assert _recorded(bench) == {r.prediction_id for r in logged}


def test_a_rival_elsewhere_is_found_by_the_cursor(
    answered: tuple[Workbench, list[Logged]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock, as on another machine: the slower one is told and goes on from there."""
    monkeypatch.setattr("headway.serving.ship.RECORDS_OF_A_SHIPMENT", 30)
    monkeypatch.setattr("headway.serving.ship._alone", lambda spool: nullcontext())
    # So that the rival, which would have files of its own, leaves ours.
    monkeypatch.setattr("headway.serving.ship.server_running", lambda spool: True)
    origin, logged = answered
    bench = copied(origin, tmp_path / "bench")
    real = module._batches
    rivals: list[ShipReport] = []
    begun: list[bool] = []

    def batches(*arguments: Any) -> Any:  # noqa: ANN401
        if not begun:
            begun.append(True)
            # Of the same range it would be the same command, which is answered and not done again.
            with pytest.MonkeyPatch.context() as other:
                other.setattr("headway.serving.ship.RECORDS_OF_A_SHIPMENT", 50)
                rivals.append(_ship(bench))
        return real(*arguments)

    monkeypatch.setattr(module, "_batches", batches)
    mine = _ship(bench)
    assert (mine.shipped, [r.shipped for r in rivals]) == (0, [len(logged)])
    assert len(_recorded(bench)) == len(logged)


def test_i12_every_answer_is_recorded_whenever_server_and_shipper_are_killed(bench: Workbench, rows: pa.Table) -> None:
    """Rounds of a real server process under load and a real shipping process, each killed at a random point."""
    drawn = random.Random(12)
    answered: list[str] = []
    for _ in range(3):
        server = _child("serve", bench)
        assert server.stdout is not None
        first = server.stdout.readline()
        answered.append(json.loads(first)["id"])
        shipper = _child("ship", bench)
        time.sleep(drawn.uniform(0.2, 1.5))
        server.send_signal(signal.SIGKILL)
        answered += [json.loads(line)["id"] for line in server.stdout.read().splitlines() if line.endswith(b"}")]
        server.wait()
        time.sleep(drawn.uniform(0.0, 1.0))
        shipper.send_signal(signal.SIGKILL)
        shipper.wait()
    waiting = [r.prediction_id for r in spooled(_spool(bench))]
    recorded = _recorded(bench)
    assert len(answered) > 30
    assert set(answered) <= recorded | set(waiting), "what was answered is recorded or waits"
    _ship(bench)
    assert set(answered) <= _recorded(bench)
    with opened(bench) as services:
        who, catalog = services.principal, services.catalog
        told = catalog.shipments(who)
        kept = Counter(p.log_segment for p in catalog.predictions(who, ENDPOINT, 0, 2**62, limit=100_000))
        assert {s.segment: s.records for s in told if s.records} == dict(kept)
        assert sum(kept.values()) == len(_recorded(bench))
    assert segments(_spool(bench)) == []
