"""The launcher of one machine: an attempt is a supervisor process and its nodes, known by its directory.

Every fact lies in files under `runs_root` (layout: `supervisor.json` and `final.json` of the attempt, a stream per
node), so any process may submit, observe, cancel or end an attempt, also after the one that started it was killed.
Needs Linux: processes are told apart through /proc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from headway.training.attempt import Accelerator
from headway.training.launch import (
    SUPERVISOR_LOST,
    FactsUnreadable,
    KillFailed,
    LaunchFailed,
    LaunchRefused,
    Observation,
)
from headway.training.process_table import (
    Process,
    elders_first,
    environment_of,
    kill_process,
    living_process,
    processes,
)
from headway.training.run_files import publish, run_folder, write_once
from headway.training.supervisor import BEAT_EVERY_S, HEARTBEAT_NAME, monotonic_us
from trainer.blobs import canonical_json
from trainer.events import Event, StreamBroken, last_event, node_folder, now_us, one_line, read_events, read_heartbeat
from trainer.spec import AttemptSpec, RunSpec, SpecRefused, parse_attempt

START_S = 60.0
REGISTER_S = 5.0
KILL_S = 15.0
# A supervisor that has not beaten for so long is stuck, unless it beats while one looks on for `LOOK_ON_S`.
STUCK_S = 30.0
LOOK_ON_S = 1.5 * BEAT_EVERY_S
_LOOK_EVERY_S = 0.05

# What workers need of the starter's environment. Nothing else passes, whatever its name begins with: it may be secret.
_PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "USER",
    "LOGNAME",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
)
_OUR_CODE = Path(__file__).resolve().parents[2]
_SUPERVISOR_FACTS: Mapping[str, tuple[type, ...]] = {"pid": (int,), "started": (int,), "boot_id": (str,)}
_FINAL_FACTS: Mapping[str, tuple[type, ...]] = {
    "code": (int,),
    "cause": (str,),
    "exit_codes": (list,),
    "cancelled": (bool,),
    "worker_seconds": (int, float),
    "ended_at": (int,),
}


class LocalLauncher:
    """Runs attempts as process groups of this machine, under `runs_root`.

    `store_root` and `code_root` are what the attempts' specs should name; `python` runs the supervisors. `nodes` is how
    many nodes this machine carries now, which the next attempt of an elastic run heeds; None: as many as are asked for.
    """

    name = "local"
    accelerator: Accelerator = "cpu"

    def __init__(
        self,
        runs_root: Path,
        store_root: Path,
        code_root: Path,
        python: str = sys.executable,
        nodes: int | None = None,
    ) -> None:
        self._runs_root = runs_root.resolve()
        self.store_root = store_root.resolve()
        self.code_root = code_root.resolve()
        self._python = python
        self._nodes = nodes

    def run_dir(self, run_id: str) -> Path:
        """Return the run's directory.

        Raises:
            LaunchRefused: `run_id` is no name for a directory.
        """
        return run_folder(self._runs_root, run_id)

    def artifact_dir(self, run_id: str, attempt: int, name: str) -> Path:
        """Return where the attempt leaves its artifact `name` (network, logistic)."""
        return self._folder(run_id, attempt) / "artifact" / name

    def submit(self, attempt: AttemptSpec, spec: RunSpec) -> None:
        """Start the attempt, unless it was started before; safe at any number of submitters, killed at any moment.

        Raises:
            LaunchRefused: another spec stands under the same name, a later attempt exists, or the attempt names
                another run directory.
            LaunchFailed: the supervisor did not start.
        """
        folder = self._folder(attempt.run_id, attempt.attempt)
        if Path(attempt.run_dir).resolve() != self.run_dir(attempt.run_id):
            raise LaunchRefused(
                f"attempt {attempt.run_id}/{attempt.attempt} names run directory {attempt.run_dir}",
                f"this launcher keeps it in {self.run_dir(attempt.run_id)}",
            )
        folder.mkdir(parents=True, exist_ok=True)
        (self.run_dir(attempt.run_id) / "checkpoints").mkdir(exist_ok=True)
        write_once(self.run_dir(attempt.run_id) / "spec.json", canonical_json(spec.to_json()))
        write_once(folder / "attempt.json", canonical_json(attempt.to_json()))
        if _was_started(folder):
            return
        if later := self._later_attempts(folder, attempt.attempt):
            raise LaunchRefused(
                f"attempt {attempt.attempt} of run {attempt.run_id} is fenced off: attempt {max(later)} exists",
                "submit the newest attempt",
            )
        self._start(folder, attempt)

    def observe(self, run_id: str, attempt: int) -> Observation:
        """Say what is known of the attempt now.

        An attempt whose supervisor was killed has `code` None and what its nodes had worked until they were last seen.
        A supervisor that seems stuck is looked at for `LOOK_ON_S` seconds: a machine that stood still, and has just
        gone on, is given the time to show it.

        Raises:
            FactsUnreadable: `supervisor.json`, `attempt.json` or `final.json` is no such document.
        """
        folder = self._folder(run_id, attempt)
        keeper = _read(folder / "supervisor.json", _SUPERVISOR_FACTS, "`headway reconcile` then starts it anew")
        alive = keeper is not None and _supervisor(keeper) is not None
        # Read after the look at the supervisor: it writes this last, so a dead one has written it or never will.
        final = _read(folder / "final.json", _FINAL_FACTS, "the attempt then counts as lost, and another may follow")
        if final is not None:
            return Observation(
                "ended",
                final["code"],
                final["cause"],
                tuple(final["exit_codes"]),
                final["cancelled"],
                final["worker_seconds"],
                final["ended_at"],
                alive,
            )
        if keeper is None:
            return Observation("absent")
        seen = list(self._seen_of_nodes(folder))
        # A clock that was set back makes the last moment earlier than the first.
        seconds = sum(ranks * max(0, last - first) / 1e6 for first, last, ranks in seen)
        if alive:
            state = "running" if seen else "starting"
            stuck = _is_stuck(folder, keeper)
            return Observation(state, worker_seconds=seconds, supervisor_alive=True, supervisor_stuck=stuck)
        ended_at = max((last for _, last, _ in seen), default=None)
        return Observation("ended", None, SUPERVISOR_LOST, worker_seconds=seconds, ended_at=ended_at)

    def stream(self, run_id: str, attempt: int, node: int, after: int, limit: int) -> list[Event]:
        """Return up to `limit` events of node `node` that follow seq `after`.

        Raises:
            StreamBroken: the stream lost events.
        """
        return read_events(
            node_folder(self._folder(run_id, attempt) / "attempt.json", node) / "events.jsonl", after, limit
        )

    def cancel(self, run_id: str, attempt: int, reason: str) -> None:
        """Ask the attempt to save and end; one that has not started ends as soon as it does."""
        folder = self._folder(run_id, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "cancel").exists():
            publish(folder / "cancel", {"reason": one_line(reason), "at": now_us()})

    def kill(self, run_id: str, attempt: int) -> None:
        """SIGKILL every process that bears the attempt's mark, and return when none is left.

        Raises:
            KillFailed: some are still there after `KILL_S` seconds.
        """
        deadline = time.monotonic() + KILL_S
        while marked := [process for run, number, process in self._marked() if (run, number) == (run_id, attempt)]:
            if time.monotonic() > deadline:
                raise KillFailed(
                    f"processes {[process.pid for process in marked]} of attempt {run_id}/{attempt} survive SIGKILL",
                    "they are stuck in the kernel (a dead disk or network mount?); free that, then reconcile again",
                )
            # The supervisor first: it must not write down its children's death as their own doing.
            for process in elders_first(marked):
                kill_process(process)
            time.sleep(0.01)

    def capacity(self) -> int | None:
        """Return how many nodes this machine carries, None when nobody said."""
        return self._nodes

    def release(self, run_id: str, attempt: int) -> None:
        """Nothing is held: processes are gone when an end is seen, and the run's files are its own."""

    def strays(self) -> list[tuple[str, int, int]]:
        """Return (run, attempt, pid) of every living process that bears the mark of an attempt of this home."""
        return sorted((run, attempt, process.pid) for run, attempt, process in self._marked())

    def close(self) -> None:
        """Nothing runs in this process on behalf of an attempt."""

    def _folder(self, run_id: str, attempt: int) -> Path:
        return self.run_dir(run_id) / "attempts" / str(attempt)

    def _later_attempts(self, folder: Path, attempt: int) -> list[int]:
        numbers = [int(entry.name) for entry in folder.parent.iterdir() if entry.name.isdecimal()]
        return [number for number in numbers if number > attempt]

    def _start(self, folder: Path, attempt: AttemptSpec) -> None:
        command = [self._python, "-m", "headway.training.supervisor", "--attempt", str(folder / "attempt.json")]
        with (folder / "supervisor.log").open("ab") as log:
            try:
                # Returns when supervisor.json is written: the process started here forks the supervisor and waits.
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(attempt, folder),
                    cwd=folder,
                    start_new_session=True,
                    check=True,
                    timeout=START_S,
                )
            except (subprocess.SubprocessError, OSError) as error:
                raise LaunchFailed(
                    f"the supervisor of attempt {attempt.run_id}/{attempt.attempt} did not start: {error}",
                    f"see {folder / 'supervisor.log'}",
                ) from error
        # Another submitter's supervisor may hold the lock and not have registered yet: ours has left quietly then.
        deadline = time.monotonic() + REGISTER_S
        while not _was_started(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not _was_started(folder):
            raise LaunchFailed(
                f"the supervisor of attempt {attempt.run_id}/{attempt.attempt} ended before it registered",
                f"see {folder / 'supervisor.log'}",
            )

    def _seen_of_nodes(self, folder: Path) -> Iterator[tuple[int, int, int]]:
        """Of each node that began: when it began, when it was last seen, and how many ranks it runs."""
        try:
            attempt = parse_attempt((folder / "attempt.json").read_bytes())
        except (SpecRefused, OSError) as error:
            raise FactsUnreadable(
                f"{folder / 'attempt.json'} cannot be read: {type(error).__name__}: {error}",
                "put back what was there: without it the attempt cannot be judged",
            ) from error
        for node in range(attempt.nodes):
            place = node_folder(folder / "attempt.json", node)
            beat = read_heartbeat(place / "node.heartbeat")
            span = _span(place / "events.jsonl", folder / "attempt.json")
            if span is not None:
                yield span[0], max(span[1], beat.at if beat else 0), attempt.processes_per_node

    def _marked(self) -> Iterator[tuple[str, int, Process]]:
        """Every living process that carries an attempt of this home in its environment."""
        for process in processes():
            mark = environment_of(process.pid)
            place = Path(mark.get("TRAINER_ATTEMPT", "/"))
            run_id, _, attempt = mark.get("HEADWAY_ATTEMPT", "").partition("/")
            if place.is_relative_to(self._runs_root) and attempt.isdecimal():
                yield run_id, int(attempt), process


def _environment(attempt: AttemptSpec, folder: Path) -> dict[str, str]:
    """What the supervisor gets and passes on: the little that workers need of ours, and the attempt's mark."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    mark = {
        # The supervisor's own code; nodes and ranks get the attempt's.
        "PYTHONPATH": str(_OUR_CODE),
        "HEADWAY_ATTEMPT": f"{attempt.run_id}/{attempt.attempt}",
        "TRAINER_ATTEMPT": str(folder / "attempt.json"),
    }
    return {**passed, **mark}


def _span(stream: Path, attempt: Path) -> tuple[int, int] | None:
    """First and last moment that a node's stream tells of; of a broken one, what the files' times say."""
    try:
        first, last = read_events(stream, limit=1), last_event(stream)
    except StreamBroken:
        return attempt.stat().st_mtime_ns // 1_000, stream.stat().st_mtime_ns // 1_000
    return (first[0].at, last.at) if first and last is not None else None


def _supervisor(keeper: Mapping[str, Any]) -> Process | None:
    return living_process(keeper["pid"], keeper["started"], keeper["boot_id"])


def _is_stuck(folder: Path, keeper: Mapping[str, Any]) -> bool:
    """Whether the supervisor lives and does nothing, also not while this looks on."""
    path = folder / HEARTBEAT_NAME
    process, first = _supervisor(keeper), read_heartbeat(path)
    silent = first is not None and monotonic_us() - first.at > STUCK_S * 1e6
    if process is None or not (silent or process.state == "T"):
        return False
    # Counted in looks: a clock that leaps while the machine wakes up takes nothing from them.
    for _ in range(round(LOOK_ON_S / _LOOK_EVERY_S)):
        time.sleep(_LOOK_EVERY_S)
        if read_heartbeat(path) != first:
            return False
    process = _supervisor(keeper)
    return process is not None and (silent or process.state == "T")


def _was_started(folder: Path) -> bool:
    return (folder / "supervisor.json").exists() or (folder / "final.json").exists()


def _read(path: Path, facts: Mapping[str, tuple[type, ...]], afterwards: str) -> Mapping[str, Any] | None:
    """The document at `path`, None where there is none; `afterwards` is what follows when it is moved away."""
    try:
        document: object = json.loads(path.read_bytes())
        problem = _misshapen(document, facts)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        document, problem = None, f"{type(error).__name__}: {error}"
    if problem:
        raise FactsUnreadable(
            f"{path} cannot be read: {problem}", f"end its processes if any live, move the file away; {afterwards}"
        )
    return cast("dict[str, Any]", document)


def _misshapen(document: object, facts: Mapping[str, tuple[type, ...]]) -> str:
    """What is wrong with a document that has to hold `facts`; empty when nothing is."""
    if not isinstance(document, dict):
        return f"{document!r:.80} is no object"
    given = cast("dict[str, object]", document)
    for name, kinds in facts.items():
        # By type and not by isinstance: true is no number.
        if type(given.get(name)) not in kinds:
            return f"{name} is {given.get(name)!r:.80}" if name in given else f"{name} is missing"
    for code in cast("list[object]", given.get("exit_codes", [])):
        if code is not None and type(code) is not int:
            return f"exit_codes holds {code!r:.80}"
    return ""
