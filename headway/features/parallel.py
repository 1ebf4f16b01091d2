"""Builds many snapshots on several cores: one worker process per core, neighbours kept together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from headway.features.snapshot import SnapshotBuilder, SnapshotOutcome, build_range
from headway.home import Settings
from headway.loading import Pipeline, load_pipeline
from headway.processes import step_dies_with_run
from headway.services import connect, open_services

# Neighbours share most source partitions, and a worker keeps the last few in memory.
_NEIGHBOURS = 8
# Starting a worker costs as much as building about ten small snapshots.
_WORTH_A_WORKER = 16

_builder: SnapshotBuilder | None = None


def build_parallel(
    settings: Settings,
    pipeline: Pipeline,
    partitions: Sequence[str],
    run_id: str | None = None,
    progress: Callable[[int, SnapshotOutcome], None] | None = None,
) -> list[SnapshotOutcome]:
    """Outcomes in the order of `partitions`; `progress` gets the number done so far and each outcome."""
    cores = sorted(os.sched_getaffinity(0))[: len(partitions) // _WORTH_A_WORKER]
    if len(cores) < 2:
        with open_services(settings) as services:
            done: list[SnapshotOutcome] = []
            builder = SnapshotBuilder(services, pipeline)

            def report(outcome: SnapshotOutcome) -> None:
                done.append(outcome)
                if progress is not None:
                    progress(len(done), outcome)

            return build_range(builder, partitions, run_id, report)
    return _in_workers(cores, settings, pipeline, partitions, run_id, progress)


def _in_workers(
    cores: Sequence[int],
    settings: Settings,
    pipeline: Pipeline,
    partitions: Sequence[str],
    run_id: str | None,
    progress: Callable[[int, SnapshotOutcome], None] | None,
) -> list[SnapshotOutcome]:
    chunks = [partitions[i : i + _NEIGHBOURS] for i in range(0, len(partitions), _NEIGHBOURS)]
    found: dict[str, SnapshotOutcome] = {}
    # Spawned, not forked: the parent holds database connections and threads that a fork would share.
    spawn = get_context("spawn")
    free = spawn.SimpleQueue()
    for core in cores:
        free.put(core)
    with ProcessPoolExecutor(
        len(cores), mp_context=spawn, initializer=_open, initargs=(settings, pipeline.folder, free)
    ) as pool:
        for future in as_completed([pool.submit(_build, chunk, run_id) for chunk in chunks]):
            for outcome in future.result():
                found[outcome.partition] = outcome
                if progress is not None:
                    progress(len(found), outcome)
    return [found[p] for p in partitions]


def _open(settings: Settings, folder: Path, free: SimpleQueue[int]) -> None:
    """Prepare a worker: one core of its own, on which the kernel then starts no threads."""
    global _builder
    step_dies_with_run()
    os.sched_setaffinity(0, {free.get()})
    _builder = SnapshotBuilder(connect(settings), load_pipeline(folder))


def _build(partitions: Sequence[str], run_id: str | None) -> list[SnapshotOutcome]:
    assert _builder is not None
    return build_range(_builder, partitions, run_id)
