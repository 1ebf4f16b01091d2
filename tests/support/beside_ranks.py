"""Ranks of toy runs whose saves are slow or deadly, and which note the rows they see."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.trainer_runs import Run, Started, run_rank, start_ranks, warm


def begin(run: Run, **arguments: object) -> list[Started]:
    """Start the ranks of a new attempt; `arguments` are those of `run_troubled`."""
    files = [run.prepare()] * run.spec.layout.nodes
    run.started = start_ranks("support.beside_ranks:run_troubled", files, arguments)
    return run.started


def finish(run: Run, **arguments: object) -> list[int]:
    """Run a new attempt to its end; the exit statuses of its ranks."""
    return warm().wait(begin(run, **arguments))


def rows_seen(run: Run) -> dict[int, list[int]]:
    """The rows of each step, over all ranks and attempts; what a later attempt repeats has to be the same."""
    found: dict[int, dict[str, list[int]]] = {}
    for file in sorted(run.folder.glob("rows-*.jsonl")):
        rank = file.stem.split("-")[2]
        for line in file.read_text().splitlines():
            step, rows = json.loads(line)
            assert found.setdefault(step, {}).setdefault(rank, rows) == rows
    return {step: [row for rank in sorted(ranks) for row in ranks[rank]] for step, ranks in found.items()}


# Inside of the forked processes.


def run_troubled(slow_s: float = 0.0, die: Mapping[str, int] | None = None, note: bool = False, **more: object) -> int:
    """A rank of a toy run.

    `slow_s`: how long each write to a checkpoint takes at least. `die` {rank, write}: the rank that kills itself
    with -9 in the middle of a write, counted from 1. `note`: whether it notes its rows. `more`: see `run_rank`.
    """
    _trouble_writes(slow_s, die or {})
    if note:
        _note_rows()
    unchecked: dict[str, Any] = more
    return run_rank(**unchecked)


def _trouble_writes(slow_s: float, die: Mapping[str, int]) -> None:
    import trainer.checkpoint

    write, count = trainer.checkpoint.write_synced, 0

    def troubled(path: Path, data: bytes | memoryview) -> None:
        nonlocal count
        count += 1
        others = [p.name for p in path.parent.parent.glob("*.partial") if p != path.parent]
        assert path.parent.suffix != ".partial" or not others, f"{path.parent.name} beside {others}"
        time.sleep(slow_s)
        if die and int(os.environ["RANK"]) == die["rank"] and count == die["write"]:
            write(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)

    trainer.checkpoint.write_synced = troubled


def _note_rows() -> None:
    from trainer.batches import BatchPlan

    attempt = Path(os.environ["TRAINER_ATTEMPT"]).parent
    file = attempt.parents[1] / f"rows-{attempt.name}-{os.environ['RANK']}.jsonl"
    plain = BatchPlan.micro_batches

    def noting(plan: BatchPlan, order: Any, step: int, rank: int) -> Sequence[Any]:  # noqa: ANN401
        batches = list(plain(plan, order, step, rank))
        rows = [
            int(place)
            for places, weight in batches
            for i, place in enumerate(places)
            if weight is None or float(weight[i]) > 0
        ]
        with file.open("a") as target:
            target.write(json.dumps([step, rows]) + "\n")
        return batches

    unchecked: Any = BatchPlan
    unchecked.micro_batches = noting
