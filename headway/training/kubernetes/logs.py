"""What the pods of an attempt print, kept in files before the pods are gone.

Suspension, eviction and a Job that fails take pods away together with their logs, so each pod's log is followed from
the moment its container runs, into `attempts/<n>/logs/node-<k>.<pod uid>.log`. What ranks print does not come this way:
their node keeps it on the volume (`stdout-rank-<r>.log`). This is what the node's own process prints, and all there is
when it cannot even start.

A cursor (`.cursor` beside the log) names the last line that was kept: its time by the kubelet, how many lines of that
time were kept, and the bytes they end at. The line is written first, its cursor next, so a killed keeper leaves at most
one line beyond its cursor, and the next one knows it when it comes again. The cursor file is locked while it is kept:
of several processes one follows, the others look again later.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from headway.training.kubernetes.client import ManifestRefused, ObjectMissing
from headway.training.kubernetes.names import CONTAINER, INDEX_LABEL
from headway.training.launch import LaunchError

_CURSOR_BYTES = 256
_PAUSES_S = (0.5, 1.0, 2.0, 5.0)
_LONG_S = 5.0
# How many followers are remembered before those that are done are forgotten: a keeper may live for months.
_MANY = 1_000
_LOOK_EVERY_S = 0.05
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")
# How the kernel, glibc, multiprocessing and PyTorch's data loader say it (pytorch/pytorch#16979).
_SHARED_MEMORY = re.compile(
    r"bus error|\bSIGBUS\b|out of shared memory|insufficient shared memory|unable to (open|write|mmap) shared memory"
    r"|unable to (open|write|mmap).{0,80}(torch_|shm)|No space left on device.{0,80}/dev/shm"
    r"|/dev/shm.{0,80}No space left on device",
    re.IGNORECASE | re.DOTALL,
)

logger = logging.getLogger(__name__)

Moment = tuple[int, int]
"""Seconds since 1970 and nanoseconds: the kubelet's times are finer than a float."""


class LogSource(Protocol):
    """The one call of a cluster's client that is needed here."""

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        """Lines with their ends, each with its time in front; see `client.Client.pod_log`."""
        ...


class LogBusy(Exception):
    """Another process keeps this log."""


@dataclass
class Cursor:
    """Where a pod's log was kept up to: `same` lines of time `stamp` are among the first `size` bytes of the file."""

    uid: str
    stamp: str = ""
    same: int = 0
    size: int = 0
    done: bool = False


class LogKeeper:
    """Keeps the logs of the pods that it is shown, each in a thread of its own; `close` ends them."""

    def __init__(self, client: LogSource, run_dir: Callable[[str], Path]) -> None:
        """`run_dir` gives a run's directory, as the launcher's method of that name does."""
        self._client = client
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._followers: dict[str, _Follower] = {}
        self._closed = threading.Event()

    def keep(self, run_id: str, attempt: int, pods: Sequence[Mapping[str, Any]]) -> None:
        """Follow every pod whose container has started, from where anybody stopped; call it as often as you look.

        Pods are documents of the API; those without an index of a Job are passed over.
        """
        folder = self._run_dir(run_id) / "attempts" / str(attempt) / "logs"
        for pod in pods:
            node = node_of(pod)
            if node is None or not _has_started(pod):
                continue
            with self._lock:
                if len(self._followers) > _MANY:
                    self._followers = {uid: follower for uid, follower in self._followers.items() if not follower.done}
                follower = self._followers.get(pod["metadata"]["uid"])
                if follower is not None:
                    follower.pod = pod
                if self._closed.is_set() or (follower is not None and (follower.done or follower.is_alive())):
                    continue
                follower = _Follower(self._client, log_file(folder, node, pod), pod, self._closed)
                self._followers[pod["metadata"]["uid"]] = follower
                follower.start()

    def catch_up(self, run_id: str, attempt: int, pods: Sequence[Mapping[str, Any]], within_s: float) -> list[str]:
        """Read the logs of containers that have ended to their end, before their pods are deleted.

        Returns the names of the pods whose logs could not be kept whole within `within_s` seconds.
        """
        folder = self._run_dir(run_id) / "attempts" / str(attempt) / "logs"
        ended = [(pod["metadata"]["name"], log_file(folder, node_of(pod) or 0, pod)) for pod in pods if has_ended(pod)]
        deadline = time.monotonic() + within_s
        while True:
            self.keep(run_id, attempt, pods)
            open_still = [name for name, path in ended if not is_complete(path)]
            if not open_still or time.monotonic() >= deadline:
                return open_still
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Have every follower stop after its present line; what it kept stands, and anybody may go on from there."""
        self._closed.set()


class PodLogFile:
    """The kept log of one pod, with its cursor; held by one process at a time."""

    def __init__(self, path: Path, uid: str) -> None:
        """Open or create both files.

        Raises:
            LogBusy: another process holds them.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cursor_fd = os.open(path.with_suffix(".cursor"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._cursor_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._cursor_fd)
            raise LogBusy(str(path)) from error
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.cursor = _read_cursor(os.pread(self._cursor_fd, _CURSOR_BYTES, 0)) or Cursor(uid)
        size = os.fstat(self._fd).st_size
        # The file may end before its cursor only where the machine died; what is missing is read again.
        if size < self.cursor.size:
            self.cursor = Cursor(uid)
        # What was written after the cursor; it comes again, and is not written twice.
        self._ahead = os.pread(self._fd, size - self.cursor.size, self.cursor.size)
        self._skip: tuple[Moment, int] | None = None
        self._torn = b""

    def resume(self) -> str:
        """The time to ask the log from, "" for its beginning; lines that are known are passed over from here on."""
        found = _moment(self.cursor.stamp.encode())
        self._skip = None if found is None else (found[0], self.cursor.same)
        return self.cursor.stamp

    def add(self, line: bytes) -> None:
        """Keep one line as the API gives it, its time in front; one without an end waits for `add_torn`."""
        found = _moment(line)
        # Without a time they are the kubelet's own words, such as that it does not find the log: no part of it.
        if found is None or self._is_known(found[0]):
            return
        self._torn = b""
        if line.endswith(b"\n"):
            self._keep(line, found[1])
        else:
            self._torn = line

    def add_torn(self) -> None:
        """Keep the last line without its end: there will be no more of it."""
        if found := _moment(self._torn):
            line, self._torn = self._torn, b""
            self._keep(line, found[1])

    def finish(self) -> None:
        """Note that nothing more will come."""
        self.cursor.done = True
        self._save()

    def close(self) -> None:
        """Give both files back."""
        os.close(self._fd)
        os.close(self._cursor_fd)

    def _is_known(self, moment: Moment) -> bool:
        if self._skip is None:
            return False
        last, left = self._skip
        if moment < last:
            return True
        self._skip = (last, left - 1) if moment == last and left > 0 else None
        return self._skip is not None

    def _keep(self, line: bytes, length: int) -> None:
        stamp, text = line[:length].decode().strip(), line[length:]
        rest = text[self._known(text) :]
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        same = self.cursor.same + 1 if stamp == self.cursor.stamp else 1
        self.cursor = Cursor(self.cursor.uid, stamp, same, self.cursor.size + len(text))
        self._save()

    def _known(self, text: bytes) -> int:
        """How many bytes of `text` stand behind the cursor already."""
        known = min(len(text), len(self._ahead))
        if text[:known] != self._ahead[:known]:
            # Something else comes: the kubelet rotated away what is ahead. It stays, and counts as kept.
            self.cursor.size += len(self._ahead)
            self._ahead = b""
            return 0
        self._ahead = self._ahead[known:]
        return known

    def _save(self) -> None:
        document = json.dumps(asdict(self.cursor)).encode()
        os.pwrite(self._cursor_fd, document.ljust(_CURSOR_BYTES - 1) + b"\n", 0)


class _Follower(threading.Thread):
    """Follows one pod's log until the pod is gone or its container ended and everything was read."""

    def __init__(self, client: LogSource, path: Path, pod: Mapping[str, Any], closed: threading.Event) -> None:
        super().__init__(name=f"log of {pod['metadata']['name']}", daemon=True)
        self.pod = pod
        self.done = False
        self._client = client
        self._path = path
        self._closed = closed

    def run(self) -> None:
        try:
            with contextlib.closing(PodLogFile(self._path, self.pod["metadata"]["uid"])) as file:
                self._follow(file)
        except LogBusy:
            return
        except OSError as error:
            # A full disk ends this try; the next look at the attempt begins another one, from the cursor.
            logger.warning("the log of pod %s is not kept: %s", self.pod["metadata"]["name"], error)

    def _follow(self, file: PodLogFile) -> None:
        tries = 0
        while not file.cursor.done and not self._closed.is_set():
            # Looked at first: what is read after the end is all there is.
            ended = has_ended(self.pod)
            before, began_s = file.cursor.size, time.monotonic()
            if self._read(file, follow=not ended) and ended:
                file.add_torn()
                file.finish()
            if time.monotonic() - began_s > _LONG_S:
                # Nothing was printed for so long that the connection was given up: no pause, in which the pod might go.
                continue
            tries = 0 if file.cursor.size > before else tries + 1
            if not file.cursor.done:
                self._closed.wait(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
        self.done = file.cursor.done

    def _read(self, file: PodLogFile, *, follow: bool) -> bool:
        """Keep what comes until the stream ends; False when it could not be read to its end."""
        name = self.pod["metadata"]["name"]
        try:
            for line in self._client.pod_log(name, CONTAINER, since_time=file.resume(), follow=follow, timestamps=True):
                file.add(line)
                if self._closed.is_set():
                    return False
        except ObjectMissing:
            file.add_torn()
            file.finish()
            return True
        except ManifestRefused:
            # The container is not there yet, or not any more.
            return False
        except LaunchError as error:
            logger.info("the log of pod %s cannot be read now: %s", name, error)
            return False
        return True


def log_file(folder: Path, node: int, pod: Mapping[str, Any]) -> Path:
    """Where the log of a pod is kept, below the attempt's `logs` folder."""
    return folder / f"node-{node}.{pod['metadata']['uid']}.log"


def is_complete(path: Path) -> bool:
    """Whether a pod's log was kept to its end, by whichever process."""
    try:
        cursor = _read_cursor(path.with_suffix(".cursor").read_bytes())
    except FileNotFoundError:
        return False
    return cursor is not None and cursor.done


def node_of(pod: Mapping[str, Any]) -> int | None:
    """The pod's index in its Job, which is the node's number; None for a pod of no indexed Job."""
    metadata = pod["metadata"]
    index = (
        (metadata.get("labels") or {}).get(INDEX_LABEL) or (metadata.get("annotations") or {}).get(INDEX_LABEL) or ""
    )
    return int(index) if index.isdecimal() else None


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether the trainer's container has ended, so that its log grows no more."""
    return "terminated" in _state(pod)


def names_shared_memory(text: str) -> bool:
    """Whether what a rank or node said tells of too small a shared memory: a bus error, or a full `/dev/shm`."""
    return _SHARED_MEMORY.search(text) is not None


def _has_started(pod: Mapping[str, Any]) -> bool:
    state = _state(pod)
    return "running" in state or "terminated" in state


def _state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name") == CONTAINER:
            return status.get("state") or {}
    return {}


def _read_cursor(data: bytes) -> Cursor | None:
    """The cursor in a file; None when there is none yet, or the machine died while it was written."""
    try:
        return Cursor(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _moment(line: bytes) -> tuple[Moment, int] | None:
    """The time that a line begins with, and how many bytes it takes with the blank after it."""
    found = _STAMP.match(line)
    if found is None:
        return None
    second, fraction, zone = found.group(1).decode(), found.group(2) or b"", found.group(3).decode()
    seconds = int(datetime.fromisoformat(second + zone.replace("Z", "+00:00")).timestamp())
    return (seconds, int(fraction.ljust(9, b"0"))), found.end()
