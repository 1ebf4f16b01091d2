"""Linux's processes as /proc tells them. A process is known by pid, start time and boot, never by pid alone."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process. `started` is in clock ticks since the boot; `state` is the letter of proc(5), Z for a zombie."""

    pid: int
    parent: int
    state: str
    started: int


def boot_id() -> str:
    """Return the identifier of this boot of the machine (or of its virtual machine)."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_process(pid: int) -> Process | None:
    """Return the process that has `pid` now, None when there is none."""
    try:
        # The second field, the name, may hold blanks and brackets; the rest of proc_pid_stat(5) starts at field 3.
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except _GONE:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, int(fields[1]), fields[0], int(fields[19]))


def living_process(pid: int, started: int, boot: str) -> Process | None:
    """Return the very process that was recorded so, None when it is gone or a zombie."""
    process = read_process(pid) if boot == boot_id() else None
    return process if process is not None and process.started == started and process.state not in "ZX" else None


def processes() -> Iterator[Process]:
    """Yield every process that can be seen."""
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (process := read_process(int(entry.name))) is not None:
            yield process


def descendants(root: int) -> list[int]:
    """Return the pids of every process below `root`, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process.pid)
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found[1:]


def elders_first(several: Sequence[Process]) -> list[Process]:
    """Return the processes with every parent before its children."""
    parents = {process.pid: process.parent for process in several}

    def depth(pid: int) -> int:
        return 1 + depth(parents[pid]) if pid in parents else 0

    return sorted(several, key=lambda process: depth(process.pid))


def environment_of(pid: int) -> Mapping[str, str]:
    """Return the environment that a process was started with; empty for another user's, a zombie, or none."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except (*_GONE, PermissionError):
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def kill_process(process: Process) -> None:
    """SIGKILL this very process; one that took over its pid is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The handle is of whoever has the pid now, and stays with it: compare after opening, then signal the handle.
        now = read_process(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(within_s: float) -> bool:
    """SIGKILL and reap whatever is below this process, which has to be a subreaper. False when time ran out."""
    deadline = time.monotonic() + within_s
    while below := descendants(os.getpid()):
        if time.monotonic() > deadline:
            return False
        for pid in below:
            _kill(pid)
        _reap()
        time.sleep(0.005)
    return True


def _kill(pid: int) -> None:
    # A descendant keeps its pid until this process reaps it, or its parent does, which is being killed too.
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
