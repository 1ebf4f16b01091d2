"""The keeper of one local attempt: `python -m headway.training.supervisor --attempt PATH`.

It outlives who started it (own session, no terminal, SIGHUP ignored), starts each node in a process group of its own,
and writes `final.json` when all have ended. An attempt is started at most once: the living supervisor holds a lock on
`lock`, and one that finds `supervisor.json` or `final.json` leaves quietly.

Nothing outlives it: nodes end when their parent is gone (see `trainer.node`), and what a killed node leaves behind
falls to the supervisor (child subreaper).

The code of the attempt: 0 when every node ended with 0; 75 when every node ended with 0 or 75, and somebody (here, or
on a node) had asked for the stop, or a checkpoint was published. A 75 that nobody asked for, and that saved nothing,
would restart for ever: it is 65. Otherwise one node's
bad end decides, and the others get SIGKILL at once. When that end may be the consequence of another one (its own
`node_end` says so), the supervisor waits `SETTLE_S` for a better explanation; among causes of one kind the earliest by
`cause_at` wins. A node that was killed counts as 77, one that stopped answering for `restart.hang_floor_s` as 76.

While it lives it beats in `supervisor.heartbeat`, by the monotonic clock: it is the same for all processes of one boot,
nobody sets it, and it stands still while the machine sleeps.

SIGTERM is the machine stopping: nodes save and the attempt ends with 75. The file `cancel` is a person's wish: nodes
save too, and `final.json` says `cancelled`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.training.judge import NodeEnd, bad_ends, explained, judge, said_end
from headway.training.process_table import adopt_orphans, boot_id, kill_descendants, read_process
from headway.training.run_files import publish
from trainer.events import (
    Event,
    HeartbeatFile,
    StreamBroken,
    last_event,
    node_folder,
    now_us,
    one_line,
    read_heartbeat,
)
from trainer.spec import AttemptSpec, ExitCode, RunSpec, SpecRefused, parse_attempt, parse_run

POLL_S = 0.02
SETTLE_S = 1.0
# Nodes keep the grace themselves; this much longer, and the supervisor takes over.
STOP_MARGIN_S = 5.0
BURY_S = 15.0
# Longer than any silence of a supervisor that works, except while it buries.
BEAT_EVERY_S = 2.0
HEARTBEAT_NAME = "supervisor.heartbeat"
ADDRESS = "127.0.0.1"


@dataclass
class NodeProcess:
    """One node's process; times ending in `_s` are monotonic seconds."""

    node: int
    process: subprocess.Popen[bytes]
    started_s: float
    answered_s: float
    beats: int = 0
    end: NodeEnd | None = None


class Supervisor:
    """Keeps the attempt described by `attempt_file` from start to `final.json`."""

    def __init__(self, attempt_file: Path, signals: list[int]) -> None:
        """`signals` is where the handler puts what arrives."""
        self._file = attempt_file
        self._signals = signals
        self._nodes: list[NodeProcess] = []
        self._stop_by_s: float | None = None
        self._settle_by_s: float | None = None
        self._cancelled = False
        self._looked_s = time.monotonic()
        self._heart = HeartbeatFile(attempt_file.parent / HEARTBEAT_NAME, monotonic_us)

    def run(self) -> None:
        """Run the attempt to its end and write `final.json`."""
        self._heart.beat()
        try:
            attempt = parse_attempt(self._file.read_bytes())
            spec = parse_run((Path(attempt.run_dir) / "spec.json").read_bytes())
        except (SpecRefused, OSError) as error:
            self._write_final(NodeEnd(None, None, ExitCode.REFUSED_SPEC, f"{type(error).__name__}: {error}"), None)
            return
        try:
            verdict = self._watch(attempt, spec)
        finally:
            buried = kill_descendants(BURY_S)
        if not buried:
            print("processes of this attempt could not be killed", file=sys.stderr, flush=True)
        self._write_final(verdict, attempt)

    def _watch(self, attempt: AttemptSpec, spec: RunSpec) -> NodeEnd:
        if (self._file.parent / "cancel").exists():
            self._cancelled = True
            return NodeEnd(None, None, ExitCode.PREEMPTED, "cancelled before it started")
        self._start_nodes(attempt)
        while True:
            verdict = self._look(attempt, spec)
            if verdict is not None:
                return verdict
            time.sleep(POLL_S)

    def _start_nodes(self, attempt: AttemptSpec) -> None:
        # The port is bound here and stays bound: no other run can take it between now and rank 0's first accept.
        with socket.create_server((ADDRESS, 0), backlog=128) as store:
            port = store.getsockname()[1]
            for node in range(attempt.nodes):
                self._nodes.append(self._start_node(attempt, node, port, store.fileno()))

    def _start_node(self, attempt: AttemptSpec, node: int, port: int, store_fd: int) -> NodeProcess:
        environment = {
            **os.environ,
            # Here and not for this process: the attempt may bring the `trainer` of the day it was planned.
            **attempt.environment,
            # Ranks of one machine talk over the loopback device, whatever the machine's own name resolves to.
            "GLOO_SOCKET_IFNAME": "lo",
            "TRAINER_ATTEMPT": str(self._file),
            "TRAINER_PARENT": str(os.getpid()),
            "HEADWAY_ATTEMPT": f"{attempt.run_id}/{attempt.attempt}",
        }
        passed = (store_fd,) if node == 0 else ()
        if node == 0:
            environment["TRAINER_STORE_FD"] = str(store_fd)
        folder = node_folder(self._file, node)
        folder.mkdir(exist_ok=True)
        options = ["--attempt", str(self._file), "--node-rank", str(node)]
        where = ["--master-addr", ADDRESS, "--master-port", str(port)]
        with (folder / "node.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.node", *options, *where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._file.parent,
                pass_fds=passed,
                process_group=0,
            )
        now = time.monotonic()
        return NodeProcess(node, process, now, now)

    def _look(self, attempt: AttemptSpec, spec: RunSpec) -> NodeEnd | None:
        """One look at everything; the verdict when the attempt has to end."""
        self._heart.beat()
        self._reap(attempt)
        verdict = self._judge()
        if verdict is None:
            self._heed_wishes(spec)
            verdict = self._check_deadlines(spec)
        return verdict

    def _forgive_own_pause(self, now: float) -> None:
        """Nodes are not to blame for silence while this process itself stood still."""
        if now - self._looked_s > SETTLE_S:
            for node in self._nodes:
                node.answered_s += now - self._looked_s
        self._looked_s = now

    def _reap(self, attempt: AttemptSpec) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for node in self._nodes:
                if node.process.pid == pid:
                    node.process.returncode = os.waitstatus_to_exitcode(status)
                    node.end = self._end_of(node, attempt)

    def _end_of(self, node: NodeProcess, attempt: AttemptSpec) -> NodeEnd:
        """What the node's status and its last event say together."""
        status = node.process.returncode
        event = self._last_event(node.node)
        if (said := said_end(node.node, status, event)) is not None:
            return said
        # Whatever it was (killed, fenced off, the disk was full, the trainer is broken), it was not the user's code.
        code = ExitCode(status) if status in (ExitCode.REFUSED_SPEC, ExitCode.HUNG) else ExitCode.LOST_PEER
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}, see its node.log"
        if event is None and self._stop_by_s is not None:
            code, how = ExitCode.PREEMPTED, "stopped before it began"
        seconds = (time.monotonic() - node.started_s) * attempt.processes_per_node
        return NodeEnd(node.node, status, code, f"node {node.node} {how}", worker_seconds=seconds)

    def _last_event(self, node: int) -> Event | None:
        try:
            return last_event(node_folder(self._file, node) / "events.jsonl")
        except StreamBroken as error:
            print(f"node {node}: {error}", file=sys.stderr, flush=True)
            return None

    def _judge(self) -> NodeEnd | None:
        ends = [node.end for node in self._nodes if node.end is not None]
        all_ended = len(ends) == len(self._nodes)
        if bad_ends(ends) and self._settle_by_s is None:
            self._settle_by_s = time.monotonic() + SETTLE_S
        settled = self._settle_by_s is not None and time.monotonic() >= self._settle_by_s
        if not (all_ended or explained(ends) or settled):
            return None
        return judge(ends, stop_was_asked=not all_ended or self._stop_was_asked())

    def _stop_was_asked(self) -> bool:
        """Whether somebody beside the nodes asked for the stop."""
        return self._stop_by_s is not None or bool(self._signals) or (self._file.parent / "cancel").exists()

    def _heed_wishes(self, spec: RunSpec) -> None:
        if self._stop_by_s is not None:
            return
        if (self._file.parent / "cancel").exists():
            self._cancelled = True
            self._stop_nodes(signal.SIGINT, spec)
        elif self._signals:
            self._stop_nodes(signal.SIGTERM, spec)

    def _stop_nodes(self, number: signal.Signals, spec: RunSpec) -> None:
        self._stop_by_s = time.monotonic() + spec.restart.grace_s + STOP_MARGIN_S
        for node in self._nodes:
            if node.end is None:
                os.kill(node.process.pid, number)

    def _check_deadlines(self, spec: RunSpec) -> NodeEnd | None:
        now = time.monotonic()
        living = [node for node in self._nodes if node.end is None]
        if self._stop_by_s is not None and now >= self._stop_by_s:
            late = living[0].node
            return NodeEnd(late, None, ExitCode.LOST_PEER, f"node {late} did not stop in time")
        self._forgive_own_pause(now)
        for node in living:
            beat = read_heartbeat(node_folder(self._file, node.node) / "node.heartbeat")
            if beat is not None and beat.count != node.beats:
                node.beats, node.answered_s = beat.count, now
            if now - node.answered_s > spec.restart.hang_floor_s:
                process = read_process(node.process.pid)
                stopped = " (it was stopped)" if process is not None and process.state == "T" else ""
                cause = f"node {node.node} did not answer for {now - node.answered_s:.1f} s{stopped}"
                return NodeEnd(node.node, None, ExitCode.HUNG, cause)
        return None

    def _write_final(self, verdict: NodeEnd, attempt: AttemptSpec | None) -> None:
        for node in self._nodes:
            if node.end is None:
                seconds = (time.monotonic() - node.started_s) * (attempt.processes_per_node if attempt else 1)
                cause = "killed with the attempt"
                node.end = NodeEnd(node.node, -signal.SIGKILL, ExitCode.LOST_PEER, cause, worker_seconds=seconds)
        ends = [node.end for node in self._nodes if node.end is not None]
        never = attempt.nodes - len(ends) if attempt else 0
        publish(
            self._file.parent / "final.json",
            {
                "exit_codes": [*(end.exit for end in ends), *(None for _ in range(never))],
                "code": int(verdict.code),
                "cause": one_line(verdict.cause),
                "cause_node": verdict.node,
                "cause_rank": verdict.rank,
                "ended_at": now_us(),
                "worker_seconds": round(sum(end.worker_seconds for end in ends), 3),
                "cancelled": self._cancelled and verdict.code != ExitCode.DONE,
            },
        )


def monotonic_us() -> int:
    """Return the monotonic clock in microseconds."""
    return time.monotonic_ns() // 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Leave the starter behind and keep the attempt; the starter returns once `supervisor.json` is written."""
    parser = argparse.ArgumentParser(
        prog="python -m headway.training.supervisor", description="Keep one local training attempt, in the background."
    )
    parser.add_argument("--attempt", required=True, metavar="PATH", help="the attempt.json of the attempt")
    attempt_file = Path(parser.parse_args(arguments).attempt).resolve()
    log = os.open(attempt_file.parent / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started, starting = os.pipe()
    if os.fork():
        os.close(starting)
        os.read(started, 1)  # returns when the other end is closed, by its owner or by its death
        return 0
    os.close(started)
    _leave_terminal(log)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    lock = _own(attempt_file.parent)
    os.close(starting)
    if lock is not None:
        adopt_orphans()
        Supervisor(attempt_file, signals).run()
    return 0


def _leave_terminal(log: int) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Not SIG_IGN: nodes would inherit it, and one that is just starting would miss a request to stop.
    signal.signal(signal.SIGINT, lambda *_: None)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)


def _own(folder: Path) -> int | None:
    """Become the one supervisor of the attempt: the held lock, or None when somebody is or was."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    if (folder / "supervisor.json").exists() or (folder / "final.json").exists():
        return None
    me = read_process(os.getpid())
    if me is None:
        raise OSError(f"/proc shows no process {os.getpid()}; a supervisor needs Linux's /proc")
    publish(folder / "supervisor.json", {"pid": me.pid, "started": me.started, "boot_id": boot_id()})
    return lock


if __name__ == "__main__":
    sys.exit(main())
