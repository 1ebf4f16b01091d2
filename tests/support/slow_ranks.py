"""Ranks of toy runs on another number of nodes than was declared, or of which one is slow."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.trainer_runs import Run, Started, run_rank, start_ranks, warm

from trainer.blobs import canonical_json
from trainer.spec import RunSpec, parse_attempt


@dataclass
class ElasticRun(Run):
    """A toy run whose attempts may have fewer nodes than its spec."""

    def finish_on(self, nodes: int, **arguments: object) -> list[int]:
        """Run a new attempt on `nodes` nodes to its end; the exit statuses of its ranks."""
        file = self.prepare()
        attempt = replace(parse_attempt(file.read_bytes()), nodes=nodes)
        file.write_bytes(canonical_json(attempt.to_json()))
        self.started = start_ranks("support.trainer_runs:run_rank", [file] * nodes, arguments)
        return warm().wait(self.started)


def begin_slow(run: Run, rank: int, pause_s: float) -> list[Started]:
    """Start a new attempt, each forward pass of one rank of which takes `pause_s` longer."""
    files: list[Path] = [run.prepare()] * run.spec.layout.nodes
    run.started = start_ranks("support.slow_ranks:run_slow", files, {"rank": rank, "pause_s": pause_s})
    return run.started


def elastic(spec: RunSpec) -> RunSpec:
    """The spec with a range down to one node."""
    return replace(spec, layout=replace(spec.layout, min_nodes=1))


# Inside of the forked processes.


def run_slow(rank: int, pause_s: float, **more: object) -> int:
    """A rank of a toy run; only rank `rank` pauses in every forward pass."""
    unchecked: dict[str, Any] = more
    return run_rank(pause_s=pause_s if int(os.environ["RANK"]) == rank else 0.0, **unchecked)
