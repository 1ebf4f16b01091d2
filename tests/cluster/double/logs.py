"""Logs of containers: kept as lines with their times, as a container runtime keeps them, and read as a kubelet reads.

A line is stored when its newline arrives, or when the container has ended; standard output and error are split
into lines apart and stored in order of arrival.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster.double.store import Object, failure

_PART = 16_384


def _nano(moment: int) -> str:
    return datetime.fromtimestamp(moment // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{moment % 10**9:09d}Z"


@dataclass
class ContainerLog:
    """The log of one run of one container.

    Attributes:
        path: File that keeps the lines.
        lines: (nanoseconds since the epoch, line with its newline if it has one).
        ended: Whether nothing more will come.
    """

    path: Path
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, *streams: asyncio.StreamReader) -> None:
        """Keep what comes out of the streams until all are closed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            await asyncio.gather(*(self._drain_one(stream, file.write) for stream in streams))
        self.ended = True
        self.notify()

    async def _drain_one(self, stream: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        rest = b""
        while chunk := await stream.read(65_536):
            *whole, rest = (rest + chunk).split(b"\n")
            kept = [line + b"\n" for line in whole]
            while len(rest) > _PART:
                kept.append(rest[:_PART])
                rest = rest[_PART:]
            self._keep(kept, write)
        self._keep([rest] if rest else [], write)

    def _keep(self, lines: list[bytes], write: Callable[[bytes], object]) -> None:
        for line in lines:
            self.lines.append((time.time_ns(), line))
            write(line)
        if lines:
            self.notify()

    def notify(self) -> None:
        """Wake the followers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, start: int, follow: bool) -> AsyncIterator[tuple[int, bytes]]:
        """Lines from number `start`, and with `follow` those to come until the end."""
        while True:
            changed = self._changed
            while start < len(self.lines):
                yield self.lines[start]
                start += 1
            if self.ended or not follow:
                return
            await changed.wait()


class PodLogs:
    """The logs of every container of the cluster.

    Attributes:
        unreachable: Whether the kubelet of a node does not answer.
    """

    def __init__(self, folder: Path) -> None:
        """Keep logs under `folder`."""
        self._folder = folder
        self._logs: dict[tuple[str, str], list[ContainerLog]] = {}
        self.unreachable: Callable[[str], bool] = lambda _node: False

    def open(self, pod: Object, container: str) -> ContainerLog:
        """A new log for the next run of a container."""
        runs = self._logs.setdefault((pod["metadata"]["uid"], container), [])
        name = f"{pod['metadata']['namespace']}_{pod['metadata']['name']}_{pod['metadata']['uid']}"
        log = ContainerLog(self._folder / name / container / f"{len(runs)}.log")
        runs.append(log)
        return log

    def forget(self, uid: str) -> None:
        """A pod is gone: followers come to their end, the files go."""
        for key in [key for key in self._logs if key[0] == uid]:
            for log in self._logs.pop(key):
                log.ended = True
                log.notify()
                log.path.unlink(missing_ok=True)

    def tail(self, pod: Object, container: str, lines: int, limit: int) -> str:
        """The last lines of a container's newest run, at most `limit` bytes, as text."""
        runs = self._logs.get((pod["metadata"]["uid"], container), [])
        text = b"".join(line for _, line in runs[-1].lines[-lines:]) if runs else b""
        return text[-limit:].decode(errors="replace")

    async def read(
        self,
        pod: Object,
        container: str | None,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
        timestamps: bool = False,
        limit: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes] | None:
        """The log of one container.

        Args:
            pod: The pod.
            container: Its container; may be None when it has only one.
            follow: Go on until the container has ended.
            tail: Only so many of the newest lines.
            since: Only lines from then on.
            timestamps: Put each line's time before it.
            limit: End after so many bytes.
            previous: The run before the newest.

        Returns:
            Pieces of the log, or None for a pod that no node has (204).

        Raises:
            ApiError: 400 for a container that does not exist or has not started; 500 for a node that is lost.
        """
        name = _choose(pod, container)
        node = pod["spec"].get("nodeName")
        if not node:
            return None
        if self.unreachable(node):
            meta, host = pod["metadata"], pod["status"].get("hostIP", "")
            url = f"https://{host}:10250/containerLogs/{meta['namespace']}/{meta['name']}/{name}"
            raise failure(500, "", f'Get "{url}": dial tcp {host}:10250: connect: connection refused')
        log = self._run(pod, name, previous)
        first = 0
        if since is not None:
            first = next((i for i, (at, _) in enumerate(log.lines) if at >= since.timestamp() * 1e9), len(log.lines))
        if tail is not None:
            first = max(first, len(log.lines) - tail)
        return _limited(log.follow(first, follow), timestamps, limit)

    def _run(self, pod: Object, name: str, previous: bool) -> ContainerLog:
        runs = self._logs.get((pod["metadata"]["uid"], name), [])
        if previous:
            if len(runs) < 2:
                message = f'previous terminated container "{name}" in pod "{pod["metadata"]["name"]}" not found'
                raise failure(400, "BadRequest", message)
            return runs[-2]
        statuses = pod["status"].get("containerStatuses", []) + pod["status"].get("initContainerStatuses", [])
        waiting = next((s["state"].get("waiting") for s in statuses if s["name"] == name), None)
        reason = waiting["reason"] if waiting else "ContainerCreating"
        if runs and (not waiting or reason not in ("ContainerCreating", "PodInitializing")):
            return runs[-1]
        if not waiting and any(s["name"] == name and "terminated" in s["state"] for s in statuses):
            return ContainerLog(Path(), ended=True)
        if reason in ("ErrImagePull", "ImagePullBackOff"):
            reason = "trying and failing to pull image"
        message = f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: {reason}'
        raise failure(400, "BadRequest", message)


def _choose(pod: Object, container: str | None) -> str:
    main = [one["name"] for one in pod["spec"]["containers"]]
    every = main + [one["name"] for one in pod["spec"].get("initContainers", ())]
    name = pod["metadata"]["name"]
    if container is None:
        if len(main) > 1:
            what = f"a container name must be specified for pod {name}, choose one of: [{' '.join(main)}]"
            init = [one for one in every if one not in main]
            raise failure(
                400, "BadRequest", what + (f" or one of the init containers: [{' '.join(init)}]" if init else "")
            )
        return main[0]
    if container not in every:
        raise failure(400, "BadRequest", f"container {container} is not valid for pod {name}")
    return container


async def _limited(
    lines: AsyncIterator[tuple[int, bytes]], timestamps: bool, limit: int | None
) -> AsyncIterator[bytes]:
    left = limit
    async for moment, line in lines:
        text = _nano(moment).encode() + b" " + line if timestamps else line
        if left is not None:
            text, left = text[:left], left - len(text)
        yield text
        if left is not None and left <= 0:
            return
