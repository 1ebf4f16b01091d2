"""Finds the processes of a chaos home by what they carry in their environment, and hits them."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.processes import die_with_parent

ENDED_S = 30.0


def of_home(home: Path) -> dict[int, str]:
    """Living processes (no zombies) with the home in their environment or command line, by id."""
    found: dict[int, str] = {}
    mark = f"HEADWAY_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            named = f"{home}/".encode() in line or mark in (entry / "environ").read_bytes().split(b"\0")
            if named and _state(int(entry.name)) != "Z":
                found[int(entry.name)] = line.decode()
    return found


def children(parent: int) -> list[int]:
    """Living children of a process."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(above) == parent and state != "Z":
                found.append(int(entry.name))
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def kill(pids: Sequence[int]) -> bool:
    """kill -9; whether any of them was there."""
    hit = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit = True
    return hit


def stop_for(pids: Sequence[int], seconds: float) -> bool:
    """SIGSTOP, and SIGCONT after a while whatever happens; whether any of them was there."""
    stopped: list[int] = []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        if stopped:
            time.sleep(seconds)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return bool(stopped)


@contextmanager
def disk_full(pid: int) -> Iterator[None]:
    """No file of the process grows: every write behind a file's first byte fails, as on a disk without space."""
    usual = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, usual[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)


class Service:
    """A process that somebody keeps running: it is started again whenever it ended."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.starts = name, 0
        self._command, self._environ, self._log = list(command), dict(environ), log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that was started last."""
        assert self._process is not None
        return self._process.pid

    def keep(self) -> None:
        """Start it unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self.starts += 1
            with self._log.open("ab") as output:
                us = os.getpid()
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environ,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),
                )

    def wait(self) -> None:
        """Wait until the process that was started last has ended."""
        assert self._process is not None
        self._process.wait(ENDED_S)

    def end(self) -> None:
        """SIGTERM, and SIGKILL when that does not help."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(ENDED_S)
