"""What runs on a node: `python -m trainer.node` starts the ranks of one node, watches them, and tells how they ended.

Torch-free. Ranks are started under torchrun's environment contract as `python -m <attempt.worker>`, each in a process
group of its own, and none outlives the node: a rank dies with its node by parent-death signal; what a rank leaves
behind falls to the node (child subreaper), which kills it. A node whose parent dies ends everything and itself; its
own parent-death signal is SIGCONT, so that a stopped node notices too.

Signals to the node:

| signal | what it does |
|---|---|
| SIGTERM, SIGUSR1, first SIGINT | ranks get SIGTERM and `restart.grace_s` seconds to save; then SIGKILL |
| second SIGINT | ranks get SIGKILL at once |
| SIGUSR2 | every rank writes its stacks; nothing ends |
| SIGHUP | ignored: a closed terminal ends no training |

The code that the node exits with (`trainer.spec.ExitCode`), from how its ranks ended:

- 0 when every rank exited 0; 75 when every rank exited 0 or 75, at least one 75. A rank that ends with 75 unasked has
  agreed with ranks elsewhere to stop: its neighbours get the grace, not SIGKILL. When nobody asked the node either, and
  no checkpoint was published here, its `node_end` says `unasked`, and the supervisor looks whether another node was
  asked. An only node knows that there is no other: it exits 65, or the attempt would restart for ever.
- Otherwise the first bad end decides, and the other ranks get SIGKILL at once. An exit with 77 is the consequence of a
  loss elsewhere, so when that is all there is, the node waits `SETTLE_S` for a better explanation, and prefers it.
- A rank's own 64, 65, 75, 76, 77 is passed on. Death by signal is 77: the code did not choose it. Any other exit status
  is 65. A rank that SIGTERM ends during a stop before its first heartbeat had nothing to save, and counts as 75; one
  that had begun counts as 77, as does one that outlives the grace.
- 76 when a rank made no progress for longer than it may; 64 when the attempt or run spec is refused, before any rank
  starts; 77 when the node's parent is gone or the attempt is fenced off.

Fence: an attempt with a `final.json`, or with a later attempt beside it, is over. Its nodes start nothing, and end
within a second when it becomes so, also when they were stopped meanwhile and then continued; they write nothing more.
A node that has written its last event is over too: started again it exits with the same code.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from trainer.blobs import Json
from trainer.events import (
    EventError,
    EventWriter,
    HeartbeatFile,
    last_event,
    node_folder,
    now_us,
    one_line,
    read_heartbeat,
    storable,
)
from trainer.rank_log import CHUNK, READS, RankLog
from trainer.spec import AttemptSpec, ExitCode, RunSpec, SpecRefused, parse_attempt, parse_run

POLL_S = 0.02
SETTLE_S = 0.3
FENCE_EVERY_S = 1.0
STACKS_WAIT_S = 2.0
# How long the kernel may take to bury what got SIGKILL; longer means a process stuck in the kernel.
BURY_S = 10.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_STOP_REASONS = {signal.SIGTERM: "sigterm", signal.SIGUSR1: "preempt", signal.SIGINT: "cancel"}
_HEEDED = (*_STOP_REASONS, signal.SIGUSR2)
_ORDERLY = (ExitCode.DONE, ExitCode.PREEMPTED)


@dataclass
class Rank:
    """One rank's process. Times ending in `_s` are monotonic seconds, others microseconds UTC."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: int
    log: RankLog
    started_s: float
    progress_s: float
    pending: bytes = b""
    beats: int = 0
    may_take_s: float | None = None
    intervals_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=64))
    told_errors: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    status: int | None = None
    ended_at: int = 0
    ended_s: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether its end was not seen yet."""
        return self.status is None


@dataclass(frozen=True)
class RankError:
    """A rank's own account of its failure; `code` is whatever stands there."""

    kind: str
    message: str
    stack: str
    code: object


@dataclass(frozen=True)
class Verdict:
    """How the node ends. `consequence`: something elsewhere is likelier to be the cause.

    `unasked`: ranks stopped in order, and nothing here says why they should have.
    """

    code: ExitCode
    cause: str
    rank: int | None = None
    at: int = field(default_factory=now_us)
    consequence: bool = False
    fenced: bool = False
    unasked: bool = False


class Node:
    """The ranks of node `node_rank`, from start to the node's last event."""

    def __init__(
        self,
        attempt_file: Path,
        attempt: AttemptSpec,
        spec: RunSpec,
        node_rank: int,
        master: Master,
        parent: int,
        signals: list[signal.Signals],
    ) -> None:
        """`parent` is the process to end with; `signals` is where handlers put what arrives."""
        self._file = attempt_file
        self._attempt = attempt
        self._spec = spec
        self._node_rank = node_rank
        self._master = master
        self._parent = parent
        self._folder = node_folder(attempt_file, node_rank)
        self._stream = EventWriter(self._folder / "events.jsonl", node_rank)
        self._heart = HeartbeatFile(self._folder / "node.heartbeat")
        self._selector = selectors.DefaultSelector()
        self._ranks: list[Rank] = []
        self._signals = signals
        self._verdict: Verdict | None = None
        self._stop_by_s: float | None = None
        self._asked_to_stop = False
        self._published = False
        self._interrupts = 0
        self._stacks_due_s: float | None = None
        self._looked_s = time.monotonic()
        self._fence_s = 0.0

    def run(self) -> ExitCode:
        """Start the ranks, watch them to the end, write the last event and return the node's code."""
        try:
            self._start_ranks()
            while self._verdict is None:
                self._look()
            verdict = self._verdict
        finally:
            buried = self._kill_everything()
            # The ending interpreter drops its handlers; a late signal would then look like a death.
            for number in _HEEDED:
                signal.signal(number, signal.SIG_IGN)
        # Looked at again: what ended the node may be its keeper, which noticed the later attempt first.
        if reason := fenced(self._file, self._attempt):
            print(f"node {self._node_rank}: {reason}", file=sys.stderr, flush=True)
            return ExitCode.LOST_PEER
        self._last_words(verdict, buried)
        return verdict.code

    def _start_ranks(self) -> None:
        here = range(self._attempt.processes_per_node)
        numbers = [self._node_rank * self._attempt.processes_per_node + local for local in here]
        self._stream.emit("node_start", {"hostname": socket.gethostname(), "pid": os.getpid(), "ranks": numbers})
        for local, number in enumerate(numbers):
            self._ranks.append(self._start_rank(local, number))
        if self._master.store_fd is not None:
            os.close(self._master.store_fd)

    def _start_rank(self, local: int, number: int) -> Rank:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        passed = [theirs]
        environment = self._rank_environment(local, number) | {"TRAINER_EVENT_FD": str(theirs)}
        if number == 0 and self._master.store_fd is not None:
            environment["TRAINER_STORE_FD"] = str(self._master.store_fd)
            passed.append(self._master.store_fd)
        node = os.getpid()
        printed, printing = os.pipe()
        log = RankLog(self._folder / f"stdout-rank-{number}.log", printed)
        process = subprocess.Popen(
            [sys.executable, "-m", self._attempt.worker],
            stdin=subprocess.DEVNULL,
            stdout=printing,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=passed,
            process_group=0,
            preexec_fn=lambda: _before_rank(node),
        )
        os.close(theirs)
        os.close(printing)
        rank = Rank(number, process, ours, log, time.monotonic(), time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._relay(rank))
        self._selector.register(printed, selectors.EVENT_READ, lambda: self._relay_log(rank))
        return rank

    def _rank_environment(self, local: int, number: int) -> dict[str, str]:
        # The protocol's own variables are set anew for each process.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRAINER_")}
        return {
            "PYTHONUNBUFFERED": "1",
            **inherited,
            "OMP_NUM_THREADS": str(self._spec.threads),
            **self._attempt.environment,
            "RANK": str(number),
            "LOCAL_RANK": str(local),
            "NODE_RANK": str(self._node_rank),
            "WORLD_SIZE": str(self._attempt.world_size),
            "LOCAL_WORLD_SIZE": str(self._attempt.processes_per_node),
            "MASTER_ADDR": self._master.address,
            "MASTER_PORT": str(self._master.port),
            "TRAINER_ATTEMPT": str(self._file),
            "HEADWAY_ATTEMPT": f"{self._attempt.run_id}/{self._attempt.attempt}",
        }

    def _look(self) -> None:
        """One look at everything, at most `POLL_S` long; sets the verdict when the node has to end."""
        # Before anything is passed on: a node that was paused meanwhile may have become stale.
        self._check_fence()
        for key, _ in self._selector.select(POLL_S):
            key.data()
        if os.getppid() != self._parent:
            self._decide(Verdict(ExitCode.LOST_PEER, "the process that started the node is gone"))
        self._reap()
        self._judge_ends()
        while self._signals and self._verdict is None:
            self._obey(self._signals.pop(0))
        if self._verdict is None:
            self._check_deadlines()

    def _decide(self, verdict: Verdict) -> None:
        self._verdict = self._verdict or verdict

    def _forgive_own_pause(self, now: float) -> None:
        """Ranks are not to blame for silence while this process itself stood still."""
        if now - self._looked_s > FENCE_EVERY_S:
            for rank in self._ranks:
                rank.progress_s += now - self._looked_s
        self._looked_s = now

    def _check_fence(self) -> None:
        now = time.monotonic()
        if now - self._fence_s < FENCE_EVERY_S:
            return
        self._fence_s = now
        self._heart.beat()
        self._heart.flush()
        if reason := fenced(self._file, self._attempt):
            self._decide(Verdict(ExitCode.LOST_PEER, reason, fenced=True))

    def _relay(self, rank: Rank) -> None:
        """Move whole lines of the rank's channel into the stream, unless the attempt is fenced off."""
        for _ in range(READS):
            if self._verdict is not None and self._verdict.fenced:
                return
            try:
                data = os.read(rank.channel, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(rank.channel)
                return
            *lines, rank.pending = (rank.pending + data).split(b"\n")
            for line in lines:
                self._relay_line(rank, line)

    def _relay_log(self, rank: Rank) -> None:
        rank.log.relay()
        if not rank.log.open:
            self._selector.unregister(rank.log.channel)

    def _relay_line(self, rank: Rank, line: bytes) -> None:
        try:
            raw = json.loads(line)
            kind, data = raw["kind"], raw["data"]
            if kind == "error":
                rank.told_errors.add((str(data.get("kind")), str(data.get("message"))))
            self._stream.emit(kind, data)
            self._published |= kind == "checkpoint"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"rank {rank.rank} wrote {line[:80]!r} to its event channel, which is no event: {error}"
            self._decide(Verdict(ExitCode.USER_CODE, text, rank.rank))

    def _reap(self) -> None:
        """Take note of every child that ended, ranks and what ranks left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for rank in self._ranks:
                if rank.process.pid == pid:
                    rank.status, rank.ended_at, rank.ended_s = status, now_us(), time.monotonic()
                    rank.process.returncode = os.waitstatus_to_exitcode(status)
                    if rank.channel in self._selector.get_map():
                        self._relay(rank)
                    if rank.log.channel in self._selector.get_map():
                        self._relay_log(rank)

    def _judge_ends(self) -> None:
        ended = [(rank, *self._meaning(rank)) for rank in self._ranks if not rank.alive]
        bad = [(rank, code, cause) for rank, code, cause in ended if code not in _ORDERLY]
        if bad:
            first_s = min(rank.ended_s for rank, _, _ in bad)
            primary = [end for end in bad if not _is_consequence(end[0], end[1])]
            if primary or len(ended) == len(self._ranks) or time.monotonic() - first_s >= SETTLE_S:
                rank, code, cause = min(primary or bad, key=lambda end: (end[0].ended_s, end[0].rank))
                self._decide(Verdict(code, cause, rank.rank, rank.ended_at, consequence=not primary))
        elif len(ended) == len(self._ranks):
            saved = [(rank, cause) for rank, code, cause in ended if code == ExitCode.PREEMPTED]
            if saved:
                self._decide(self._judge_stop(*saved[0]))
            else:
                self._decide(Verdict(ExitCode.DONE, "done"))
        elif any(code == ExitCode.PREEMPTED for _, code, _ in ended):
            self._stop("preempt", ask=False)

    def _judge_stop(self, rank: Rank, cause: str) -> Verdict:
        """What it means that all ranks stopped in order, as `rank` did."""
        asked = self._asked_to_stop or any(number in _STOP_REASONS for number in self._signals)
        if asked or self._published or (self._file.parent / "cancel").exists():
            return Verdict(ExitCode.PREEMPTED, cause, rank.rank, rank.ended_at)
        code = ExitCode.USER_CODE if self._attempt.nodes == 1 else ExitCode.PREEMPTED
        cause = cause.replace(f"exited with {ExitCode.PREEMPTED}", f"exited with {ExitCode.PREEMPTED} unasked", 1)
        return Verdict(code, cause, rank.rank, rank.ended_at, unasked=True)

    def _meaning(self, rank: Rank) -> tuple[ExitCode, str]:
        """The code and the cause in words that the end of `rank` stands for."""
        status = cast("int", rank.status)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            name = signal.Signals(-code).name
            if self._stop_by_s is not None and -code == signal.SIGTERM:
                if read_heartbeat(self._heartbeat_of(rank)) is None:
                    return ExitCode.PREEMPTED, f"rank {rank.rank} stopped by SIGTERM before it began"
                return ExitCode.LOST_PEER, f"rank {rank.rank} ended by SIGTERM without saving"
            return ExitCode.LOST_PEER, f"rank {rank.rank} killed by {name}"
        cause = f"rank {rank.rank} exited with {code}" + _told(self._error_of(rank))
        return (ExitCode(code) if code in list(ExitCode) else ExitCode.USER_CODE), cause

    def _error_of(self, rank: Rank) -> RankError | None:
        """What the rank wrote about its failure; user code may have written anything there."""
        path = self._folder / f"rank-{rank.rank}.error.json"
        try:
            text = path.read_bytes().decode("utf-8", "backslashreplace")
        except FileNotFoundError:
            return None
        except OSError as error:
            return RankError("unreadable", f"{type(error).__name__}: {error}", "", None)
        try:
            told = json.loads(text)
            kind, message, stack = (storable(str(told[key])) for key in ("kind", "message", "stack"))
            return RankError(kind, message, stack, told["code"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return RankError("unreadable", one_line(text), "", None)

    def _obey(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            self._signal_ranks(signal.SIGUSR2)
            self._stacks_due_s = time.monotonic() + FENCE_EVERY_S
            return
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._decide(Verdict(ExitCode.LOST_PEER, "killed by a second SIGINT"))
        else:
            self._stop(_STOP_REASONS[number], ask=True)

    def _stop(self, reason: str, *, ask: bool) -> None:
        """Begin the orderly end; `ask` the ranks for it unless they ask themselves."""
        if self._stop_by_s is None:
            self._stop_by_s = time.monotonic() + self._spec.restart.grace_s
            self._stream.emit("stopping", {"reason": reason})
        if ask and not self._asked_to_stop:
            self._asked_to_stop = True
            self._signal_ranks(signal.SIGTERM)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.alive:
                os.kill(rank.process.pid, number)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._stacks_due_s is not None and now >= self._stacks_due_s:
            self._stacks_due_s = None
            self._tell_stacks()
        if self._stop_by_s is None:
            self._check_progress(now)
        elif now >= self._stop_by_s:
            slow = [rank.rank for rank in self._ranks if rank.alive]
            grace = self._spec.restart.grace_s
            self._decide(Verdict(ExitCode.LOST_PEER, f"rank {slow[0]} did not stop within {grace:g} s", slow[0]))

    def _check_progress(self, now: float) -> None:
        self._forgive_own_pause(now)
        living = [(rank, self._silence(rank, now)) for rank in self._ranks if rank.alive]
        silent = [(rank, quiet) for rank, quiet in living if quiet is not None]
        if not silent:
            return
        stopped = [(rank, quiet) for rank, quiet in silent if _state(rank.process.pid) == "T"]
        rank, quiet = max(stopped or silent, key=lambda pair: (pair[1], -pair[0].rank))
        cause = f"rank {rank.rank} made no progress for {quiet:.1f} s" + (" (it was stopped)" if stopped else "")
        at = now_us() - int(quiet * 1e6)
        self._dump_stacks()
        self._decide(Verdict(ExitCode.HUNG, cause, rank.rank, at, consequence=not stopped))

    def _silence(self, rank: Rank, now: float) -> float | None:
        """How many seconds the rank has been silent, when that is longer than it may be."""
        beat = read_heartbeat(self._heartbeat_of(rank))
        if beat is not None and beat.count != rank.beats:
            rank.intervals_s.append((now - rank.progress_s) / (beat.count - rank.beats))
            rank.beats, rank.may_take_s, rank.progress_s = beat.count, beat.may_take_s, now
        quiet = now - rank.progress_s
        policy = self._spec.restart
        if rank.may_take_s is not None:
            return quiet if quiet > rank.may_take_s else None
        if quiet <= policy.hang_floor_s:
            return None
        typical = statistics.median(rank.intervals_s) if rank.intervals_s else 0.0
        return quiet if quiet > policy.hang_factor * typical else None

    def _heartbeat_of(self, rank: Rank) -> Path:
        return self._folder / f"rank-{rank.rank}.heartbeat"

    def _dump_stacks(self) -> None:
        """Have every rank write its stacks: one that is stopped has to be continued for it."""
        self._signal_ranks(signal.SIGCONT)
        self._signal_ranks(signal.SIGUSR2)
        deadline = time.monotonic() + STACKS_WAIT_S
        living = [rank for rank in self._ranks if rank.alive]
        while time.monotonic() < deadline and not all(self._stacks_of(rank) for rank in living):
            time.sleep(POLL_S)
        time.sleep(POLL_S)
        self._tell_stacks()

    def _stacks_of(self, rank: Rank) -> Path | None:
        path = self._folder / f"rank-{rank.rank}.stacks.txt"
        return path if path.exists() and path.stat().st_size else None

    def _tell_stacks(self) -> None:
        for rank in self._ranks:
            if path := self._stacks_of(rank):
                where = str(path.relative_to(self._attempt.run_dir))
                self._stream.emit("stacks", {"rank": rank.rank, "path": where})

    def _kill_everything(self) -> bool:
        """SIGKILL every descendant, until none is left. False when some could not be buried in time."""
        deadline = time.monotonic() + BURY_S
        while time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                _kill(pid)
            self._reap()
            if not descendants(os.getpid()):
                return True
            time.sleep(0.005)
        return False

    def _last_words(self, verdict: Verdict, buried: bool) -> None:
        for rank in self._ranks:
            error = self._error_of(rank)
            if error is None or error.code in _ORDERLY or (error.kind, error.message) in rank.told_errors:
                continue
            told: dict[str, Json] = {"kind": error.kind, "message": error.message, "stack": error.stack}
            self._stream.emit("error", {"rank": rank.rank, **told})
        now = time.monotonic()
        seconds = sum((now if rank.alive else rank.ended_s) - rank.started_s for rank in self._ranks)
        cause = verdict.cause if buried else f"{verdict.cause}; a process could not be killed"
        _end_stream(self._stream, verdict, cause, seconds)


@dataclass(frozen=True)
class Master:
    """Where rank 0's store listens; `store_fd` is the listening socket itself, where this node hosts it."""

    address: str
    port: int
    store_fd: int | None


def fenced(attempt_file: Path, attempt: AttemptSpec) -> str | None:
    """Return why this attempt is over, None while it may run."""
    folder = attempt_file.parent
    if (folder / "final.json").exists():
        return f"attempt {attempt.attempt} has ended: it has a final.json"
    later = [int(p.name) for p in folder.parent.iterdir() if p.name.isdecimal() and int(p.name) > attempt.attempt]
    return f"attempt {attempt.attempt} is fenced off: attempt {max(later)} exists" if later else None


def ended_before(attempt_file: Path, node: int) -> int | None:
    """The code with which this node of the attempt has ended already; None while it has not.

    A cluster may replace a pod that was done. What takes its place trains nothing, writes nothing and says the same.
    """
    last = last_event(node_folder(attempt_file, node) / "events.jsonl")
    return int(last.data["code"]) if last is not None and last.kind == "node_end" else None


def descendants(root: int) -> list[int]:
    """Return the pids of every living process below `root`, parents first. Zombies count: somebody must reap them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _stat(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one node and return its exit code."""
    options = _parser().parse_args(arguments)
    parent = int(os.environ.get("TRAINER_PARENT", os.getppid()))
    signals: list[signal.Signals] = []
    for number in _HEEDED:
        signal.signal(number, lambda got, _: signals.append(signal.Signals(got)))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    path = Path(options.attempt).resolve()
    try:
        attempt, spec = read_specs(path)
        if not 0 <= options.node_rank < attempt.nodes:
            raise SpecRefused("node-rank", f"{options.node_rank} is not one of {attempt.nodes} nodes")
        master = _master(options, attempt)
    except (SpecRefused, OSError) as error:
        return _refuse(path, options.node_rank, error)
    if reason := fenced(path, attempt):
        print(f"node {options.node_rank}: {reason}", file=sys.stderr)
        return ExitCode.LOST_PEER
    try:
        if (code := ended_before(path, options.node_rank)) is not None:
            print(f"node {options.node_rank}: it ended with {code} before, nothing is left to do", file=sys.stderr)
            return code
        return Node(path, attempt, spec, options.node_rank, master, parent, signals).run()
    except (OSError, EventError) as error:
        print(f"node {options.node_rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.LOST_PEER


def read_specs(attempt_file: Path) -> tuple[AttemptSpec, RunSpec]:
    """Read the attempt and the run spec that it belongs to.

    Raises:
        SpecRefused: one of them cannot be run, or the attempt was copied to where it does not belong.
        OSError: one of them is missing.
    """
    attempt = parse_attempt(attempt_file.read_bytes())
    belongs = Path(attempt.run_dir).resolve() / "attempts" / str(attempt.attempt)
    if belongs != attempt_file.parent:
        raise SpecRefused("run_dir", f"the attempt lies in {attempt_file.parent}, and belongs in {belongs}")
    return attempt, parse_run((Path(attempt.run_dir) / "spec.json").read_bytes())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.node", description="Start and watch the ranks of one node of a training attempt."
    )
    parser.add_argument("--attempt", required=True, metavar="PATH", help="the attempt.json of the attempt")
    parser.add_argument("--node-rank", required=True, type=int, metavar="K", help="which node this is, from 0")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="A", help="address of node 0 (default 127.0.0.1)")
    parser.add_argument(
        "--master-port", type=int, metavar="P", help="port of rank 0's store; a free one when there is one node"
    )
    return parser


def _master(options: argparse.Namespace, attempt: AttemptSpec) -> Master:
    inherited = os.environ.get("TRAINER_STORE_FD")
    if options.master_port is not None:
        return Master(options.master_addr, options.master_port, int(inherited) if inherited else None)
    if attempt.nodes > 1:
        raise SpecRefused("master-port", f"missing; the {attempt.nodes} nodes have to agree on one")
    listener = socket.create_server((options.master_addr, 0))
    port = listener.getsockname()[1]
    return Master(options.master_addr, port, listener.detach())


def _refuse(path: Path, node_rank: int, error: SpecRefused | OSError) -> int:
    """End before anything was started, and say so on the stream where there is a place for one."""
    print(f"node {node_rank}: {type(error).__name__}: {error}", file=sys.stderr)
    if path.parent.is_dir() and node_rank >= 0:
        stream = EventWriter(node_folder(path, node_rank) / "events.jsonl", node_rank)
        stream.emit("error", {"rank": None, "kind": type(error).__name__, "message": str(error), "stack": ""})
        _end_stream(stream, Verdict(ExitCode.REFUSED_SPEC, str(error)), str(error), 0.0)
    return ExitCode.REFUSED_SPEC


def _end_stream(stream: EventWriter, verdict: Verdict, cause: str, worker_seconds: float) -> None:
    """Write `node_end`; beside the contract's fields, `cause_at`, `consequence` and `unasked` let nodes be compared."""
    stream.emit(
        "node_end",
        {
            "code": int(verdict.code),
            "cause": one_line(cause),
            "cause_rank": verdict.rank,
            "worker_seconds": round(worker_seconds, 3),
            "cause_at": verdict.at,
            "consequence": verdict.consequence,
            "unasked": verdict.unasked,
        },
    )
    stream.close()


def _before_rank(node: int) -> None:
    """In the rank's process before its program: die with the node, and not of a SIGUSR2 that has no handler yet."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if os.getppid() != node:
        os._exit(ExitCode.LOST_PEER)


def _is_consequence(rank: Rank, code: ExitCode) -> bool:
    """Whether the rank itself said that it lost a peer."""
    return code == ExitCode.LOST_PEER and os.WIFEXITED(cast("int", rank.status))


def _told(error: RankError | None) -> str:
    return "" if error is None else f": {error.kind}: {error.message}"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second, the name, may hold blanks. Empty: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


if __name__ == "__main__":
    sys.exit(main())
