"""Ticks in processes of their own, for tests that kill some of them."""

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import dagster as dg
from support.retrain_bench import pipeline_of
from support.training_bench import TrainingBench

from assets.retraining import DagsterRuns
from headway.monitoring.retrain import Scheduler, SchedulerRun, tick
from headway.registry.keys import KeyRing

ROOT = Path(__file__).resolve().parents[2]


class Listed:
    """A scheduler that has the runs which a test says it has."""

    def __init__(self, *runs: SchedulerRun) -> None:
        self.known = list(runs)

    def runs(self, request_id: str) -> list[SchedulerRun]:
        return self.known


def keep_ticking(folder: str, home: str, output: str, ticks: int, dagster: bool = False) -> None:
    """Tick and write each asked run key, one line at a time, as soon as it is asked for.

    With `dagster` the runs are those of the home's Dagster instance, else there are none.
    """
    bench = TrainingBench(Path(folder), Path(home))
    pipeline = pipeline_of(bench)
    with Path(output).open("a") as file, bench.services() as services, _scheduler(bench, dagster) as scheduler:
        for _ in range(ticks):
            done = tick(services, KeyRing(bench.home / "keys"), scheduler, pipeline)
            key = None if done.ask is None else done.ask.run_key
            file.write(json.dumps({"pid": os.getpid(), "key": key, "acts": done.acts}) + "\n")
            file.flush()


@contextmanager
def _scheduler(bench: TrainingBench, dagster: bool) -> Iterator[Scheduler]:
    if not dagster:
        yield Listed()
        return
    with dg.DagsterInstance.from_config(str(bench.settings.dagster_home)) as instance:
        yield DagsterRuns(instance)


def tick_at_once(
    bench: TrainingBench, output: Path, ticks: int, meanwhile: Callable[[], None], *, dagster: bool
) -> list[str | None]:
    """Let ten processes tick at the same time, do something meanwhile, and kill four of them.

    Returns what each tick asked for: a run key, or None.
    """
    output.touch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.retrain_ticks"])
    arguments = (str(bench.folder), str(bench.home), str(output), ticks, dagster)
    workers = [context.Process(target=keep_ticking, args=arguments) for _ in range(10)]
    chance = random.Random(7)
    # The fork server imports what it preloads by this path only, whatever the path of the test is.
    with mock.patch.dict(os.environ, {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}):
        for worker in workers:
            worker.start()
    while len(output.read_text().splitlines()) < 4:
        assert any(worker.is_alive() for worker in workers)
        time.sleep(0.01)
    meanwhile()
    for worker in workers[:4]:
        worker.kill()
        time.sleep(chance.uniform(0.0, 0.1))
    for worker in workers:
        worker.join(300)
    assert all(worker.exitcode == 0 for worker in workers[4:]), output.read_text()
    return [json.loads(line)["key"] for line in output.read_text().splitlines()]
