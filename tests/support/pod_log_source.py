"""A cluster's log endpoint, as far as log keepers ask it: the log of each pod is a file of lines with their times.

It answers as a kubelet does: `since_time` counts whole seconds, a followed log goes on until the container ends (a file
`<pod>.ended`), and a pod without a file is gone. Used in tests, and as a program that keeps one pod's log until killed:
`python -m support.pod_log_source LOGS RUN POD UID`.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.training.kubernetes.client import ObjectMissing
from headway.training.kubernetes.logs import LogKeeper

PATIENCE_S = 120.0


class LogFolder:
    """`LogSource` over a folder; `fault` of a pod is raised once by its next call, after `fault_after` lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[tuple[int, Exception]] = []
        self.calls: list[str] = []

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        assert (container, timestamps) == ("trainer", True)
        self.calls.append(since_time)
        left, fault = self.faults.pop(0) if self.faults else (-1, None)
        file = self.folder / pod
        if not file.exists():
            raise ObjectMissing(f'pods "{pod}" not found', "")
        with file.open("rb") as source:
            pending = b""
            while True:
                if fault is not None and left == 0:
                    raise fault
                ended = not follow or (self.folder / f"{pod}.ended").exists() or not file.exists()
                line = pending + source.readline()
                if line.endswith(b"\n") or (ended and line):
                    pending = b""
                    if line[:19].decode() >= since_time[:19]:
                        left -= 1
                        yield line
                elif ended:
                    return
                else:
                    pending = line
                    time.sleep(0.005)


def pod(name: str, uid: str, node: int = 0, state: str = "running") -> dict[str, Any]:
    """A pod of an indexed Job whose container is in `state`."""
    return {
        "metadata": {"name": name, "uid": uid, "labels": {"batch.kubernetes.io/job-completion-index": str(node)}},
        "status": {"containerStatuses": [{"name": "trainer", "state": {state: {}}}]},
    }


def wait_for(path: Path, content: bytes) -> None:
    """Wait until a file holds exactly `content`; what it held at last is shown when it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes() == content:
            return
        time.sleep(0.01)
    assert (path.read_bytes() if path.exists() else None) == content


if __name__ == "__main__":
    logs, run, name, uid = sys.argv[1:]
    LogKeeper(LogFolder(Path(logs)), lambda _: Path(run)).keep("r", 1, [pod(name, uid)])
    while True:
        time.sleep(1)
