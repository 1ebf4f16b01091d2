"""Real ranks for tests, forked from one parent that has torch and DeepSpeed imported: a start costs little.

`warm()` is that parent, one per test process; it ends when the test process does. Ranks run `trainer.worker.run` with
toy data and a toy model in the place of a pipeline's; what they do is steered by the run spec's `model.options`.
The test process itself imports no torch.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from trainer.blobs import canonical_json
from trainer.events import Event, EventSink, read_events
from trainer.spec import (
    PLAIN_DEGREE,
    AttemptSpec,
    BatchSpec,
    DataFile,
    DataSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
    RestartSpec,
    RunSpec,
    ScheduleSpec,
    parse_attempt,
    parse_run,
)

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
ENGINES = ("ddp", "fsdp2", "deepspeed")

Options = Mapping[str, Any]


def layout(engine: str, nodes: int) -> LayoutSpec:
    degree: dict[str, Any] = {PLAIN_DEGREE[engine]: nodes}
    return LayoutSpec(engine=cast("Any", engine), zero=1 if engine == "deepspeed" else 0, nodes=nodes, **degree)


def toy_spec(engine: str = "ddp", nodes: int = 2, **changes: object) -> RunSpec:
    """A run of 40 rows in batches of 8, 3 epochs of 5 steps, saved every 2 steps."""
    spec = RunSpec(
        pipeline="toy",
        data=DataSpec(
            files=(DataFile("2013-01", "sha256:" + "0" * 64, 1, 1),),
            identity=("id",),
            target="late",
            observed_at="observed",
            known_at="known",
            cut=2,
            validation_from=1,
            categorical=("carrier",),
            numeric=("a", "b", "c", "d"),
        ),
        model=ModelSpec(file="pipelines/toy/model.py", function="build", code_digest="sha256:" + "0" * 64),
        seed=7,
        layout=layout(engine, nodes),
        optimizer=OptimizerSpec(lr=0.01),
        batch=BatchSpec(global_size=8, accumulation=1),
        schedule=ScheduleSpec(epochs=3, patience=3, checkpoint_every=2, synchronous=True),
        restart=RestartSpec(group_timeout_s=60.0, grace_s=30.0),
    )
    return replace(spec, **cast("dict[str, Any]", changes))


def with_options(spec: RunSpec, **options: object) -> RunSpec:
    return replace(spec, model=replace(spec.model, options={**spec.model.options, **options}))


@dataclass
class Started:
    """One forked process; `status` is its exit status (negative: the signal) once it has ended."""

    pid: int
    log: Path
    status: int | None = None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Warm:
    """The parent that ranks are forked from."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support.trainer_runs import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            cwd=ROOT,
        )
        self._started: dict[int, Started] = {}
        self._rest = b""

    def start(self, function: str, arguments: Options, environ: Mapping[str, str], log: Path) -> Started:
        """Fork a process that calls `function` ("module:name") with keyword `arguments` and exits with its answer."""
        request = {"function": function, "arguments": arguments, "environ": dict(environ), "log": str(log)}
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(canonical_json(request) + b"\n")
        stdin.flush()
        answer = self._read(time.monotonic() + WAIT_S)
        while "status" in answer:
            answer = self._read(time.monotonic() + WAIT_S)
        self._started[answer["pid"]] = Started(answer["pid"], log)
        return self._started[answer["pid"]]

    def wait(self, processes: Sequence[Started], wait_s: float = WAIT_S) -> list[int]:
        """The exit statuses of `processes`; one that does not end in time fails the test with its log."""
        until = time.monotonic() + wait_s
        for process in processes:
            while process.status is None:
                try:
                    self._read(until)
                except TimeoutError:
                    for other in processes:
                        if other.status is None:
                            other.signal(signal.SIGKILL)
                    raise TimeoutError(f"still running; its log:\n{process.log.read_text()}") from None
        return [cast("int", process.status) for process in processes]

    def close(self) -> None:
        """End the parent."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.close()
        self._process.wait()
        stdout.close()

    def _read(self, until: float) -> dict[str, Any]:
        """The parent's next message; the end of a process is noted."""
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = os.read(stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the parent of the ranks ended")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        message = json.loads(line)
        if "status" in message:
            self._started[message["pid"]].status = message["status"]
        return message


@functools.cache
def warm() -> Warm:
    """The parent of this test process's ranks."""
    parent = Warm()
    atexit.register(parent.close)
    return parent


@dataclass
class Run:
    """A toy run in a folder of its own."""

    folder: Path
    spec: RunSpec
    attempts: int = 0
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "spec.json").write_bytes(canonical_json(self.spec.to_json()))

    def prepare(self) -> Path:
        """The file of a new attempt."""
        self.attempts += 1
        file = self.attempt_folder / "attempt.json"
        file.parent.mkdir(parents=True)
        attempt = AttemptSpec(
            run_id=self.folder.name,
            attempt=self.attempts,
            token=self.attempts,
            nodes=self.spec.layout.nodes,
            processes_per_node=1,
            run_dir=str(self.folder),
            store_root=str(self.folder),
            code_root=str(ROOT),
        )
        file.write_bytes(canonical_json(attempt.to_json()))
        return file

    def begin(self, **arguments: object) -> list[Started]:
        """Start the ranks of a new attempt."""
        files = [self.prepare()] * self.spec.layout.nodes
        self.started = start_ranks("support.trainer_runs:run_rank", files, arguments)
        return self.started

    def finish(self, **arguments: object) -> list[int]:
        """Run a new attempt to its end; the exit statuses of its ranks."""
        return warm().wait(self.begin(**arguments))

    @property
    def attempt_folder(self) -> Path:
        return self.folder / "attempts" / str(self.attempts)

    def events(self, kind: str | None = None, attempt: int | None = None) -> list[Event]:
        """Events of an attempt (default: the newest)."""
        path = self.folder / "attempts" / str(attempt or self.attempts) / "node-0" / "events.jsonl"
        return [e for e in read_events(path, limit=100_000) if kind in (None, e.kind)]

    def losses(self) -> dict[int, str]:
        """Loss of each step, to the last bit, over all attempts; what a later attempt repeats has to be the same."""
        found: dict[int, str] = {}
        for attempt in range(1, self.attempts + 1):
            for event in self.events("step", attempt):
                loss = float(event.data["loss"]).hex()
                assert found.setdefault(event.data["step"], loss) == loss
        return found

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in (self.folder / "checkpoints").iterdir() if p.is_dir())

    def state(self, checkpoint: str = "") -> dict[str, str]:
        """Digests of all files of a checkpoint (default: the newest)."""
        folder = self.folder / "checkpoints" / (checkpoint or self.checkpoints()[-1])
        entries = json.loads((folder / "manifest.json").read_bytes())["entries"]
        return {entry["name"]: entry["sha256"] for entry in entries}

    def weights(self) -> bytes:
        return (self.attempt_folder / "artifact" / "network" / "weights.safetensors").read_bytes()

    def error(self, rank: int) -> dict[str, Any]:
        return json.loads((self.attempt_folder / f"node-{rank}" / f"rank-{rank}.error.json").read_bytes())

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has told of `step`."""
        until = time.monotonic() + WAIT_S
        while not any(e.data["step"] >= step for e in self.events("step")):
            assert time.monotonic() < until, f"step {step} was not reached:\n{self.started[0].log.read_text()}"
            time.sleep(0.01)


def start_ranks(function: str, attempt_files: Sequence[Path], arguments: Options) -> list[Started]:
    """Fork one process per file, each a node of its own; they meet at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started: list[Started] = []
    for rank, attempt_file in enumerate(attempt_files):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "NODE_RANK": str(rank),
            "WORLD_SIZE": str(len(attempt_files)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TRAINER_ATTEMPT": str(attempt_file),
        }
        log = attempt_file.parent / f"rank-{rank}.log"
        started.append(warm().start(function, arguments, environ, log))
    return started


# Inside of the forked processes.


def run_rank(kill: Options | None = None, pause_s: float = 0.0, quota: int | None = None) -> int:
    """A rank of a toy run.

    `kill` {rank, step}: the rank that kills itself with -9 in the forward pass of a step, counted from 0 in this
    process. `pause_s`: how long every forward pass takes at least. `quota`: how many bytes the
    checkpoints may take together.
    """
    from support.trainer_toys import toy_parts

    from trainer.worker import StopRequest, run

    file = Path(os.environ["TRAINER_ATTEMPT"])
    stop = StopRequest(file.parent / "cancel")
    stop.install()
    sink = EventSink.from_environment()
    attempt = parse_attempt(file.read_bytes())
    spec = parse_run((Path(attempt.run_dir) / "spec.json").read_bytes())
    return run(attempt, spec, sink, stop, step_event_every_s=0.0, parts=toy_parts(kill or {}, pause_s, quota))


def serve() -> None:
    """The parent: fork what stdin asks for, tell pids and ends on stdout, end with stdin."""
    for module in ("trainer.engines.zero", "trainer.engines.fsdp2", "trainer.rank", "support.trainer_toys"):
        importlib.import_module(module)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.005 if children else None)
        if ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line))
                children.add(pid)
                _tell(out, {"pid": pid})
        for pid in sorted(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _tell(out, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tell(out: IO[bytes], message: Options) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environ"])
        module, name = request["function"].split(":")
        code = int(getattr(importlib.import_module(module), name)(**request["arguments"]))
    except BaseException:  # noqa: BLE001 - the child must not return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
