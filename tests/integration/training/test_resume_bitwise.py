"""Killed with -9 in mid-training, a run ends with the same weights, bit for bit, as one that was left alone."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.training_bench import AS_OF, TrainingBench, copy_bench, end_everything, write_shop
from support.training_waits import wait_for

from headway.artifacts.manifest import read_manifest
from headway.loading import load_pipeline
from headway.training.follow import Follower, follow
from headway.training.plan import plan_run
from headway.training.reconcile import Reconciler
from headway.training.submit import submit

pytestmark = pytest.mark.xdist_group("spine")


def _longer(engine: str, attributes: dict[str, Any]) -> None:
    """Enough steps to be killed among, and a checkpoint every few of them."""
    attributes["training"] |= {"epochs": 60, "checkpoint_every": 20, "engine": engine}
    attributes["training"] |= {"zero": 1 if engine == "deepspeed" else 0}
    attributes["training"]["early_stopping"] = {"last": "7d", "patience": 60}


def _start(bench: TrainingBench) -> str:
    with bench.services() as services:
        plan = plan_run(services, load_pipeline(bench.folder), AS_OF)
        return submit(services, bench.launcher(), plan, asker="person").run.run_id


def _finish(bench: TrainingBench, run_id: str) -> tuple[int, str]:
    """Follow to the end; return the number of attempts and the digest of the network's weights."""
    with bench.services() as services:
        run = follow(services, bench.launcher(), run_id, Follower(lambda event: None, lambda action: None))
        assert run.status == "succeeded", run.last.reason
        assert run.result is not None
        manifest = read_manifest(services.store, run.result.artifacts["network"])
        return len(run.attempts), manifest.entry("weights.safetensors").sha256


def _has_checkpoint(bench: TrainingBench, run_id: str) -> bool:
    with bench.services() as services:
        Reconciler(services, bench.launcher()).run(run_id)
        return bool(services.catalog.run_events(services.principal, run_id, kinds=("checkpoint",), limit=1))


def _pid(bench: TrainingBench, run_id: str, who: str) -> int:
    folder = bench.launcher().run_dir(run_id) / "attempts" / "1"
    if who == "supervisor":
        return int(json.loads((folder / "supervisor.json").read_text())["pid"])
    word = {"rank": "trainer.worker", "node": "trainer.node"}[who]
    pids = [pid for _, _, pid in bench.launcher().strays()]
    return next(p for p in pids if word.encode() in Path(f"/proc/{p}/cmdline").read_bytes())


@pytest.fixture(scope="module", params=["ddp", "deepspeed"])
def undisturbed(
    request: pytest.FixtureRequest, shop: TrainingBench, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TrainingBench, str]]:
    """The bench of one engine, not yet run, and the weights that it comes to when nothing disturbs it."""
    bench = copy_bench(shop, tmp_path_factory.mktemp("plain"))
    write_shop(bench.folder, lambda attributes: _longer(request.param, attributes))
    alone = copy_bench(bench, tmp_path_factory.mktemp("alone"))
    attempts, weights = _finish(alone, _start(alone))
    assert attempts == 1
    yield bench, weights
    end_everything(alone)


@pytest.mark.parametrize("who", ["rank", "node", "supervisor"])
def test_killed_with_9(undisturbed: tuple[TrainingBench, str], who: str, tmp_path: Path) -> None:
    plain, weights = undisturbed
    bench = copy_bench(plain, tmp_path)
    try:
        run_id = _start(bench)
        wait_for(lambda: _has_checkpoint(bench, run_id))
        os.kill(_pid(bench, run_id, who), signal.SIGKILL)
        attempts, resumed = _finish(bench, run_id)
        assert attempts == 2
        assert resumed == weights
        assert bench.launcher().strays() == []
    finally:
        end_everything(bench)
