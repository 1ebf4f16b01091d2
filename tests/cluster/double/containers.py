"""Containers of the double: a process in its pod's network namespace with its own mounts, host name and processes.

The image is the machine's own file system. Users, read-only roots and capabilities are not enforced; memory limits
are where the machine has the memory hierarchy of cgroup v1, else only the fault file makes a container run out.
The shell is bash: like busybox, and unlike dash, its `echo` leaves backslashes alone.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.double.logs import ContainerLog
from tests.cluster.double.quantity import number
from tests.cluster.double.store import Object

_IMAGE = sorted({Path(sys.prefix), Path(sys.base_prefix)})
_MEMORY = Path("/sys/fs/cgroup/memory")
_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# `unshare --fork` (util-linux 2.38) reports a child that was killed by SIGKILL as exit 1; a shell reports 137.
_REAPER = 'exec 3>&2 2>/dev/null; "$@" 2>&3 3>&-; exit $?'
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# $1 host name, $2 folder of the pod, $3 marker, $4 memory group or empty, $5 working directory.
_SETUP = """
if [ -n "$4" ]; then echo 0 > "$4/cgroup.procs"; fi
mount -t proc proc /proc
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
mount --bind "$3.message" /dev/termination-log
mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm
if [ -x /bin/bash ]; then mount --bind /bin/bash /bin/sh; fi
%s
cd "$5"
: > "$3"
shift 5
exec "$@"
"""


class StartFailed(Exception):
    """The command does not exist in the image."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host, seen in a container."""

    source: Path
    target: str
    read_only: bool = False

    def script(self) -> str:
        """The lines that mount it; the interpreter, which is the image here, stays visible below it."""
        lines = f"mount --rbind {_quote(str(self.source))} {_quote(self.target)}\n"
        for part in (part for part in _IMAGE if part.is_relative_to(self.target)):
            place = _quote(str(part))
            lines = f"exec 8<{place}\n{lines}mkdir -p {place}\nmount -c --rbind /proc/self/fd/8 {place}\nexec 8<&-\n"
        return lines + (f"mount -o remount,bind,ro {_quote(self.target)}\n" if self.read_only else "")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def expand(text: str, values: dict[str, str]) -> str:
    """Kubernetes' expansion of `$(NAME)`; `$$` stands for `$`, unknown names stay."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", one, text)


@dataclass
class Process:
    """One run of one container.

    Attributes:
        started_at: Seconds since the epoch.
        finished_at: Likewise; 0 while it runs.
        exit_code: As a runtime reports it: 128 + signal when killed.
        out_of_memory: Whether the memory limit, or the fault file, killed it.
    """

    process: asyncio.subprocess.Process
    marker: Path
    group: Path | None
    drained: asyncio.Task[None]
    started_at: float = field(default_factory=time.time)
    finished_at: float = 0.0
    exit_code: int = 0
    out_of_memory: bool = False

    async def wait(self) -> None:
        """Wait for the end of the container and of its output."""
        code = await self.process.wait()
        self.exit_code = code if code >= 0 else 128 - code
        self.finished_at = time.time()
        await self.drained
        if self.group is not None:
            control = (self.group / "memory.oom_control").read_text()
            self.out_of_memory |= self.exit_code == 137 and "oom_kill 0" not in control
            await _remove_group(self.group)

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the container's first process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                os.kill(int(child), which)

    def kill(self) -> None:
        """Kill every process of the container."""
        self.send(signal.SIGKILL)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not `process.kill()`: that looks for the exit code first and takes it away from the event loop.
                os.kill(self.process.pid, signal.SIGKILL)

    def message(self) -> str:
        """What the container wrote to /dev/termination-log."""
        return Path(f"{self.marker}.message").read_bytes()[:4096].decode(errors="replace")


async def _remove_group(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
        except OSError:
            await asyncio.sleep(0.02)
        else:
            return


def _memory_group(name: str, limit: str | None) -> Path | None:
    group = _MEMORY / name
    if limit is None or not os.access(_MEMORY / "memory.limit_in_bytes", os.W_OK):
        return None
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(int(number(limit))))
    return group


def _check(command: list[str], directory: str, mounts: list[Mount]) -> None:
    first = command[0]
    if any(first.startswith(mount.target.rstrip("/") + "/") for mount in mounts):
        return
    if "/" not in first:
        if shutil.which(first, path=_PATH) is None:
            raise StartFailed(f'exec: "{first}": executable file not found in $PATH')
    elif not Path(directory, first).exists():
        raise StartFailed(f'exec: "{first}": stat {first}: no such file or directory')
    elif not os.access(Path(directory, first), os.X_OK):
        raise StartFailed(f'exec: "{first}": permission denied')


async def start(
    spec: Object,
    *,
    namespace: str,
    host: str,
    folder: Path,
    env: dict[str, str],
    mounts: list[Mount],
    log: ContainerLog,
) -> Process:
    """Run a container.

    Args:
        spec: The container of the pod's spec.
        namespace: The pod's network namespace.
        host: The pod's host name.
        folder: The pod's folder: `hosts`, `resolv.conf`.
        env: Its environment.
        mounts: What it sees of the host, in order.
        log: Where its output goes.

    Raises:
        StartFailed: The command does not exist.
    """
    values = {"PATH": _PATH, "HOSTNAME": host, "HOME": "/root", **env}
    command = [expand(word, values) for word in spec.get("command") or []]
    command += [expand(word, values) for word in spec.get("args") or []]
    directory = spec.get("workingDir") or "/"
    _check(command := command or ["/bin/sh"], directory, mounts)
    marker = folder / f"{spec['name']}.{time.time_ns():x}"
    Path(f"{marker}.message").touch()
    group = _memory_group(f"{namespace}-{spec['name']}", spec.get("resources", {}).get("limits", {}).get("memory"))
    script = _SETUP % "".join(mount.script() for mount in sorted(mounts, key=lambda one: one.target))
    words = [host, str(folder), str(marker), str(group or ""), directory, *command]
    process = await asyncio.create_subprocess_exec(
        *(*_DIE_WITH_PARENT, "nsenter", f"--net=/run/netns/{namespace}"),
        *("unshare", "--mount", "--uts", "--ipc", "--pid", "--propagation", "private"),
        *("/bin/sh", "-c", _REAPER, "sh", *_DIE_WITH_PARENT, "/bin/sh", "-ec", script, "sh", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=values,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    drained = asyncio.create_task(log.drain(process.stdout, process.stderr))
    while not marker.exists() and process.returncode is None:
        await asyncio.sleep(0.003)
    return Process(process, marker, group, drained)
