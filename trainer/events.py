"""The event channel: one append-only stream per (attempt, node), and the heartbeat of each rank. Standard library only.

A stream is a file of JSON lines, `{"seq": 1.., "node": k, "at": microseconds UTC, "kind": str, "data": {...}}`, each in
canonical form, with no gap in `seq`: line n carries seq n. Its one writer is the node's process. Ranks hand their
events to the node through a pipe (`TRAINER_EVENT_FD`), one `{"kind", "data"}` a line. A reader keeps the last seq it
stored and asks for what comes after it, so that it can die at any moment without losing or doubling an event.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import json
import mmap
import os
import platform
import signal
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from trainer.blobs import Json, canonical_json, sync_folder

# What a crash of the machine must not lose: a reader may act on these.
DURABLE_KINDS = frozenset({"node_end", "checkpoint", "artifact", "error"})

# Longer than any line that ends a stream.
_TAIL = 1 << 20
_HEARTBEAT = struct.Struct("<Qdq")


class EventError(Exception):
    """Base of what this module refuses."""


class StreamBroken(EventError):
    """A stream that lost lines, or whose lines are no events: a gap in seq, another node's line, not JSON."""


class StreamBusy(EventError):
    """Another living process writes this stream; it has one writer."""


@dataclass(frozen=True)
class Event:
    """One line of a stream; `at` is microseconds UTC by the writer's clock."""

    seq: int
    node: int
    at: int
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Beat:
    """What a heartbeat file says.

    `count` grows with progress, `may_take_s` is how long the present phase may be silent (None: the rule of the run
    spec decides), `at` is when the last beat was, in microseconds by the writer's clock (UTC unless it chose another).
    """

    count: int
    may_take_s: float | None
    at: int


def now_us() -> int:
    """Return the time in microseconds UTC."""
    return time.time_ns() // 1000


def cpu_model() -> str:
    """The kind of this machine's CPU, as Linux names it: another kind may round otherwise."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return platform.machine()


def one_line(text: str, limit: int = 500) -> str:
    """Return `text` as one line of at most `limit` characters; what is not printable is shown as its escape."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def storable(text: str) -> str:
    """Return `text` as every JSON document and database takes it: NUL and lone surrogates are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def node_folder(attempt_file: Path, node: int) -> Path:
    """Return where node `node` of the attempt described by `attempt_file` keeps its stream, logs and heartbeats."""
    return attempt_file.parent / f"node-{node}"


class EventWriter:
    """The one writer of the stream at `path`, for node `node`.

    Opening an existing stream goes on after its last whole line and cuts off a torn one.

    Raises:
        StreamBusy: another living process has it open.
        StreamBroken: what stands there is no stream of this node.
    """

    def __init__(self, path: Path, node: int, clock: Callable[[], int] = now_us) -> None:
        self._node = node
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(path)
            self._seq, self._end = _whole_lines(path, node)
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            sync_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def emit(self, kind: str, data: Mapping[str, Json]) -> int:
        """Append one event and return its seq. When this returns, the death of this process cannot lose the event.

        Events of `DURABLE_KINDS` are on the disk by then: the death of the machine cannot lose them either.

        Raises:
            NotCanonical: `data` holds NaN, infinity or what JSON cannot say; nothing was written.
            OSError: the disk refused the line, and nothing of it stays in the stream; or it refused to sync a line
                that stays.
        """
        event: dict[str, Json] = {
            "seq": self._seq + 1,
            "node": self._node,
            "at": self._clock(),
            "kind": kind,
            "data": dict(data),
        }
        line = canonical_json(event) + b"\n"
        try:
            _write_at(self._fd, line, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        # A reader may have it from here on, so its seq is used up even when the disk then refuses to sync.
        self._seq += 1
        self._end += len(line)
        if kind in DURABLE_KINDS:
            os.fsync(self._fd)
        return self._seq

    def close(self) -> None:
        """Close the file; the stream can be opened again."""
        os.close(self._fd)

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StreamBusy(f"{path} is written by another process") from error


def read_events(path: Path, after: int = 0, limit: int = 1000) -> list[Event]:
    """Return up to `limit` events that follow seq `after`, oldest first; a torn last line is not yet an event.

    A stream that does not exist yet has no events.

    Raises:
        StreamBroken: a line is no event or out of sequence, or the stream is shorter than `after`: what was read
            before is gone from it.
    """
    try:
        source = path.open("rb")
    except FileNotFoundError:
        if after:
            raise StreamBroken(f"{path} is gone; {after} events were read from it before") from None
        return []
    with source:
        skipped = sum(1 for line in islice(source, after) if line.endswith(b"\n"))
        if skipped < after:
            raise StreamBroken(f"{path} holds {skipped} events; {after} were read from it before")
        lines = [line for line in islice(source, limit) if line.endswith(b"\n")]
    return [_event(path, line, after + index) for index, line in enumerate(lines, start=1)]


def last_event(path: Path) -> Event | None:
    """Return the newest whole event of a stream, None for a stream without one or one that does not exist.

    Raises:
        StreamBroken: the last whole line is no event.
    """
    try:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - _TAIL))
            lines = [line for line in source if line.endswith(b"\n")]
    except FileNotFoundError:
        return None
    return _parse(path, lines[-1]) if lines else None


class EventSink:
    """A rank's end of the channel: events and heartbeats.

    Make it with `from_environment` as early as the rank's own signal handlers are set: from then on the node takes
    silence for a hang, and a SIGUSR2 writes the stacks of all threads to `rank-R.stacks.txt`. A request to stop that
    comes while the interpreter is already ending is ignored.
    """

    def __init__(self, rank: int, folder: Path, channel: int | EventWriter | None) -> None:
        """`channel` is the node's pipe, a stream of this rank's own, or None where nobody listens."""
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._channel = channel
        self._heart = HeartbeatFile(folder / f"rank-{rank}.heartbeat")
        self._stacks = (folder / f"rank-{rank}.stacks.txt").open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        atexit.register(_leave_undisturbed)
        self.beat()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> EventSink:
        """Open the sink that `TRAINER_ATTEMPT`, `RANK`, `NODE_RANK` and `TRAINER_EVENT_FD` describe.

        Without `TRAINER_EVENT_FD` (ranks started by torchrun) rank 0 writes its node's stream itself, and the other
        ranks only beat: a stream has one writer. torchrun names the node `GROUP_RANK`.

        Raises:
            KeyError: a variable of the contract is missing.
            StreamBusy: rank 0 has to write the stream itself, and another process does.
        """
        given = os.environ if environ is None else environ
        rank = int(given["RANK"])
        node = int(given["NODE_RANK"] if "NODE_RANK" in given else given["GROUP_RANK"])
        folder = node_folder(Path(given["TRAINER_ATTEMPT"]), node)
        if "TRAINER_EVENT_FD" in given:
            fd = int(given["TRAINER_EVENT_FD"])
            # A process that user code starts must not hold the channel open.
            os.set_inheritable(fd, False)
            return cls(rank, folder, fd)
        return cls(rank, folder, EventWriter(folder / "events.jsonl", node) if rank == 0 else None)

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        """Hand one event to the node's stream.

        A `phase` also beats, and its `may_take_s` is from then on how long this rank may be silent. Only rank 0's
        phases enter the stream; another rank's change its heartbeat alone.

        Raises:
            NotCanonical: `data` holds NaN, infinity or what JSON cannot say.
            BrokenPipeError: the node is gone.
        """
        line = canonical_json({"kind": kind, "data": dict(data)}) + b"\n"
        if kind == "phase":
            self._heart.allow(cast("float | None", data.get("may_take_s")))
            if self._rank != 0:
                return
        if isinstance(self._channel, EventWriter):
            self._channel.emit(kind, data)
        elif self._channel is not None:
            _write_all(self._channel, line)

    def beat(self) -> None:
        """Say that there was progress; costs a few stores to memory. Call it each step."""
        self._heart.beat()

    def close(self) -> None:
        """Give the channel back; only for a sink that ends before its process."""
        faulthandler.unregister(signal.SIGUSR2)
        atexit.unregister(_leave_undisturbed)
        self._stacks.close()
        self._heart.close()
        if isinstance(self._channel, EventWriter):
            self._channel.close()
        elif self._channel is not None:
            os.close(self._channel)


class HeartbeatFile:
    """The writing end of a heartbeat: a counter, the present allowance and the time, mapped into memory."""

    def __init__(self, path: Path, clock: Callable[[], int] = now_us) -> None:
        """`clock` gives the beats' times in microseconds."""
        self._clock = clock
        path.write_bytes(bytes(_HEARTBEAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _HEARTBEAT.size)
        self._count = 0
        self._may_take_s = 0.0

    def beat(self) -> None:
        """Count one more piece of progress."""
        self._count += 1
        _HEARTBEAT.pack_into(self._map, 0, self._count, self._may_take_s, self._clock())

    def flush(self) -> None:
        """Give what is mapped to the file system: on a network volume other hosts would see it late, or never."""
        self._map.flush()

    def allow(self, may_take_s: float | None) -> None:
        """Beat, and let silence last `may_take_s` seconds from now on; None restores the run's rule."""
        self._may_take_s = may_take_s or 0.0
        self.beat()

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()


def read_heartbeat(path: Path) -> Beat | None:
    """Return what the heartbeat file at `path` says, None before the first beat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _HEARTBEAT.size:
        return None
    count, may_take_s, at = _HEARTBEAT.unpack(data[: _HEARTBEAT.size])
    return Beat(count, may_take_s or None, at) if count else None


def _leave_undisturbed() -> None:
    # The ending interpreter drops its handlers. A request to a rank that has saved, and is leaving with its code, would
    # then kill it and look like a loss.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _whole_lines(path: Path, node: int) -> tuple[int, int]:
    """How many whole lines the stream has, and the byte after the last one."""
    count = end = 0
    with path.open("rb") as source:
        for line in source:
            if not line.endswith(b"\n"):
                break
            count += 1
            end += len(line)
            event = _event(path, line, count)
            if event.node != node:
                raise StreamBroken(f"{path} line {count} is of node {event.node}, not {node}")
    return count, end


def _event(path: Path, line: bytes, seq: int) -> Event:
    event = _parse(path, line)
    if event.seq != seq:
        raise StreamBroken(f"{path} line {seq} carries seq {event.seq}")
    return event


def _parse(path: Path, line: bytes) -> Event:
    try:
        raw = json.loads(line)
        return Event(raw["seq"], raw["node"], raw["at"], raw["kind"], raw["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise StreamBroken(f"{path}: {line[:80]!r} is no event") from error


def _write_at(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
