"""Attempts whose ranks are toy workers, and how to watch what becomes of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headway.training.launch import Observation
from headway.training.local import LocalLauncher
from headway.training.process_table import environment_of, processes, read_process
from trainer.blobs import canonical_json
from trainer.events import Event, node_folder, read_events
from trainer.spec import (
    AttemptSpec,
    BatchSpec,
    DataFile,
    DataSpec,
    LayoutSpec,
    ModelSpec,
    RestartSpec,
    RunSpec,
)

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# A toy that runs until something ends it.
LONG: dict[str, Any] = {"steps": 100_000}
RUN_ID = "0123456789abcdef01234567"
# How long to wait for what should come; it says nothing about speed.
PATIENCE_S = 60.0

T = TypeVar("T")


def toy_spec(
    nodes: int = 1, ranks: int = 1, *, grace_s: float = 10.0, hang_floor_s: float = 30.0, hang_factor: float = 3.0
) -> RunSpec:
    """A spec that is valid; nothing of it is trained."""
    data = DataSpec(
        files=(DataFile("2013-06", "sha256:" + "0" * 64, 1, 1),),
        identity=("id",),
        target="late",
        observed_at="observed_at",
        known_at="known_at",
        cut=2,
        validation_from=1,
        categorical=(),
        numeric=("x",),
    )
    world = nodes * ranks
    return RunSpec(
        pipeline="toy",
        data=data,
        model=ModelSpec("model.py", "build", "sha256:" + "1" * 64),
        seed=1,
        layout=LayoutSpec(nodes=nodes, processes_per_node=ranks, dp=world),
        batch=BatchSpec(global_size=world),
        restart=RestartSpec(grace_s=grace_s, hang_floor_s=hang_floor_s, hang_factor=hang_factor),
    )


def toy_attempt(
    runs_root: Path, toy: Mapping[str, Any], *, nodes: int = 1, ranks: int = 1, attempt: int = 1, run_id: str = RUN_ID
) -> AttemptSpec:
    """An attempt of toy workers that behave as `toy` says."""
    return AttemptSpec(
        run_id=run_id,
        attempt=attempt,
        token=attempt,
        nodes=nodes,
        processes_per_node=ranks,
        run_dir=str(runs_root / run_id),
        store_root=str(runs_root / "store"),
        code_root=str(ROOT),
        worker="support.toy_worker",
        environment={"PYTHONPATH": f"{ROOT}:{TESTS}", "TOY": json.dumps(dict(toy))},
    )


def written(attempt: AttemptSpec, spec: RunSpec) -> Path:
    """Write an attempt's documents as a launcher does; the path of attempt.json."""
    folder = Path(attempt.run_dir) / "attempts" / str(attempt.attempt)
    folder.mkdir(parents=True, exist_ok=True)
    (Path(attempt.run_dir) / "spec.json").write_bytes(canonical_json(spec.to_json()))
    (folder / "attempt.json").write_bytes(canonical_json(attempt.to_json()))
    return folder / "attempt.json"


@contextmanager
def node_process(attempt_file: Path, node: int = 0, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node started by hand; it and its ranks are gone afterwards."""
    command = [sys.executable, "-m", "trainer.node", "--attempt", str(attempt_file), "--node-rank", str(node), *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        end_marked(attempt_file)


def run_node(attempt_file: Path, node: int = 0, *options: str) -> tuple[int, str]:
    """Run a node to its end: exit code and what it wrote to stderr."""
    with node_process(attempt_file, node, *options) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, errors.decode()


def events(attempt_file: Path, node: int = 0) -> list[Event]:
    """The whole stream of a node."""
    return read_events(node_folder(attempt_file, node) / "events.jsonl", limit=1_000_000)


def of_kind(attempt_file: Path, kind: str, node: int = 0) -> list[Mapping[str, Any]]:
    """The data of a stream's events of one kind."""
    return [event.data for event in events(attempt_file, node) if event.kind == kind]


def node_end(attempt_file: Path, node: int = 0) -> Mapping[str, Any]:
    """The last words of a node that has ended."""
    last = events(attempt_file, node)[-1]
    assert last.kind == "node_end"
    return last.data


def wait_until(look: Callable[[], T | None], what: str) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if seen := look():
            return seen
        time.sleep(0.01)
    raise AssertionError(f"waited {PATIENCE_S} s for {what}")


def rank_pid(attempt_file: Path, rank: int, node: int = 0) -> int:
    """The pid of a rank, once it has begun."""

    def look() -> int | None:
        told = of_kind(attempt_file, "metrics", node)
        return next((data["pid"] for data in told if data.get("rank") == rank and "pid" in data), None)

    return wait_until(look, f"rank {rank} to begin")


def grandchild_pid(attempt_file: Path, node: int = 0) -> int:
    """The pid of a process that a rank started."""

    def look() -> int | None:
        return next((d["grandchild"] for d in of_kind(attempt_file, "metrics", node) if "grandchild" in d), None)

    return wait_until(look, "a grandchild")


def stepped(attempt_file: Path, steps: int = 1) -> None:
    """Wait until rank 0 has made `steps` steps."""
    wait_until(lambda: len(of_kind(attempt_file, "step")) >= steps, f"{steps} steps")


def is_gone(pid: int) -> bool:
    """Whether no process, or only a zombie, has `pid`."""
    process = read_process(pid)
    return process is None or process.state in "ZX"


def marked(attempt_file: Path) -> list[int]:
    """Every living process of the attempt."""
    found = ((process.pid, environment_of(process.pid)) for process in processes())
    return [pid for pid, mark in found if mark.get("TRAINER_ATTEMPT") == str(attempt_file)]


def wait_all_gone(attempt_file: Path) -> None:
    """Wait until no process of the attempt is left."""
    wait_until(lambda: not marked(attempt_file), f"the end of {marked(attempt_file)}")


def end_marked(attempt_file: Path) -> None:
    """Leave nothing behind, whatever the test did."""
    for pid in marked(attempt_file):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def ended(launcher: LocalLauncher, attempt: AttemptSpec) -> Observation:
    """What is observed when the attempt has ended and its supervisor is gone."""

    def look() -> Observation | None:
        seen = launcher.observe(attempt.run_id, attempt.attempt)
        return seen if seen.state == "ended" and not seen.supervisor_alive else None

    return wait_until(look, "the attempt to end")


def attempt_file_of(attempt: AttemptSpec) -> Path:
    """Where the launcher keeps the attempt."""
    return Path(attempt.run_dir).resolve() / "attempts" / str(attempt.attempt) / "attempt.json"


def node_pid(attempt: AttemptSpec, node: int) -> int:
    """The pid of a node, once it has begun."""
    path = attempt_file_of(attempt)
    return wait_until(lambda: of_kind(path, "node_start", node), f"node {node} to begin")[0]["pid"]


def supervisor_pid(attempt: AttemptSpec) -> int:
    """The pid of the attempt's supervisor."""
    return json.loads((attempt_file_of(attempt).parent / "supervisor.json").read_text())["pid"]


def end_all(runs_root: Path) -> None:
    """End every process of every attempt under `runs_root`."""
    for path in runs_root.resolve().glob("*/attempts/*/attempt.json"):
        while marked(path):
            end_marked(path)
