"""A small HTTP load generator: closed loop for throughput and CPU, open loop for latency from the scheduled time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Load:
    """What a run saw: latencies in seconds (open loop: from the scheduled time), wall seconds, answers that failed."""

    latencies: list[float]
    seconds: float
    failed: int

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        """A quantile of the latencies in milliseconds."""
        ranked = sorted(self.latencies)
        return 1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def request_bytes(path: str, body: bytes, host: str) -> bytes:
    """A whole HTTP/1.1 request on a kept connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, its threads included and its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def closed_loop(port: int, requests: Sequence[bytes], count: int, connections: int) -> Load:
    """Send `count` requests, each connection the next one when its last was answered."""
    return asyncio.run(_closed(port, requests, count, connections))


def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int) -> Load:
    """Send at a fixed rate whatever the answers do; a latency counts from when its request was due."""
    return asyncio.run(_open(port, requests, rate, seconds, connections))


async def _closed(port: int, requests: Sequence[bytes], count: int, connections: int) -> Load:
    pending = iter(range(count))
    latencies: list[float] = []
    failed = 0

    async def work() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for index in pending:
            started = time.perf_counter()
            failed += not await _exchange(reader, writer, requests[index % len(requests)])
            latencies.append(time.perf_counter() - started)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    return Load(latencies, time.perf_counter() - started, failed)


async def _open(port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int) -> Load:
    due: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
    latencies: list[float] = []
    failed = 0

    async def work() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (item := await due.get()) is not None:
            failed += not await _exchange(reader, writer, item[1])
            latencies.append(time.perf_counter() - item[0])
        writer.close()

    workers = [asyncio.create_task(work()) for _ in range(connections)]
    started = time.perf_counter()
    for index in range(int(rate * seconds)):
        moment = started + index / rate
        if (wait := moment - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        due.put_nowait((moment, requests[index % len(requests)]))
    for _ in workers:
        due.put_nowait(None)
    await asyncio.gather(*workers)
    return Load(latencies, time.perf_counter() - started, failed)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bool:
    """Send one request and read its answer whole; return whether its status was 200."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    await reader.readexactly(length)
    return head.startswith(b"HTTP/1.1 200")
