"""Ticks in processes of their own, for tests that kill some of them."""

import json
import os
from pathlib import Path

from support.retrain_bench import pipeline_of
from support.training_bench import TrainingBench

from headway.monitoring.retrain import SchedulerRun, tick
from headway.registry.keys import KeyRing


class Listed:
    """A scheduler that has the runs which a test says it has."""

    def __init__(self, *runs: SchedulerRun) -> None:
        self.known = list(runs)

    def runs(self, request_id: str) -> list[SchedulerRun]:
        return self.known


def keep_ticking(folder: str, home: str, output: str, ticks: int) -> None:
    """Tick and write each asked run key, one line at a time, as soon as it is asked for."""
    bench = TrainingBench(Path(folder), Path(home))
    pipeline = pipeline_of(bench)
    with Path(output).open("a") as file, bench.services() as services:
        for _ in range(ticks):
            done = tick(services, KeyRing(bench.home / "keys"), Listed(), pipeline)
            key = None if done.ask is None else done.ask.run_key
            file.write(json.dumps({"pid": os.getpid(), "key": key, "acts": done.acts}) + "\n")
            file.flush()
