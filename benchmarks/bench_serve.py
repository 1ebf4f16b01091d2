"""`make bench-serve`: what serving costs beside a bare ASGI echo, and how long an answer and an online read take.

It serves a copy of the home that `make demo` made, so pipeline, model and features are real. The CPU of
the server process is compared: the model is computed in a process of its own, so what is left is the whole path without
model compute: parse, features, queue, model call, log, answer. Both servers get the same bodies, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pyarrow as pa

from benchmarks.http_load import Load, closed_loop, cpu_seconds, open_loop, request_bytes
from headway.cli.ui import free_port
from headway.datasets.zones import DAY_US
from headway.features.online import online_store_for
from headway.features.online.answer import OnlineFeatures
from headway.features.online.scopes import entity_of, scopes_of
from headway.features.online.store import StoreKey
from headway.features.online.sync import sync_online
from headway.features.plan import compile_plan
from headway.home import Settings, load_settings
from headway.loading import Pipeline, load_pipeline
from headway.replay.events import Asked, events_of, partitions_between
from headway.replay.home import copy_home
from headway.services import Services, open_services
from headway.serving.http.limits import Limits
from headway.serving.http.v2 import read_inference, request_body
from headway.serving.live.spool import Spool
from headway.world import move_clock, replayed_time

if TYPE_CHECKING:
    from headway.serving.live.types import Served

PIPELINE = "flight_delay"
_ENTITIES = 10
_READS = 2_000
_TOGETHER = 16
# How far back the events lie that are asked for.
_BACK = 3 * DAY_US
_ECHO = """
import uvicorn


async def app(scope, receive, send):
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False, lifespan="off")
"""


@dataclass(frozen=True)
class Server:
    """A running server under test."""

    name: str
    pid: int
    port: int
    requests: Sequence[bytes]


@dataclass(frozen=True)
class Cost:
    """CPU microseconds per request of the server process and of those it started, and requests per second, by round."""

    cpu_us: list[float]
    model_us: list[float]
    rate: list[float]


def main() -> int:
    """Measure and print; the exit status is 0 also when a goal is missed, the figures say so."""
    arguments = _arguments()
    source = load_settings()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = copy_home(source, Path(folder) / "home")
        moment = replayed_time(source.clock_file)
        if moment is None:
            sys.exit("error: this home has no replay clock; run `make demo` first")
        move_clock(settings.clock_file, moment)
        pipeline = load_pipeline(PIPELINE)
        with open_services(settings) as services:
            sync_online(services, pipeline, online_store_for(settings), until=moment, retain=_BACK)
            events = _events(services, pipeline, moment, arguments.rows)
        bodies = [_body(pipeline, e) for e in events]
        with _echo(Path(folder), bodies) as echo, _headway(settings, Path(folder), bodies) as headway:
            _print_costs(_measure([echo, headway], arguments), arguments)
            _print_latency(headway, arguments)
        _print_parts(settings, pipeline, bodies, moment)
        _print_reads(settings, pipeline, events)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per server and number of connections")
    parser.add_argument("--requests", type=int, default=1500, help="requests per round")
    parser.add_argument("--rows", type=int, default=200, help="different requests")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the open loop")
    return parser.parse_args()


def _events(services: Services, pipeline: Pipeline, now: int, most: int) -> list[Asked]:
    """Events of the last days before `now`, newest first."""
    found: list[Asked] = []
    for partition in reversed(partitions_between(pipeline.spec, now - _BACK, now)):
        found += [e for e in events_of(services, pipeline, partition, most) if e.at <= now]
    return sorted(found, key=lambda e: e.at, reverse=True)[:most]


def _body(pipeline: Pipeline, event: Asked) -> bytes:
    return json.dumps({"id": event.caller_id} | request_body(pipeline.spec, event.request)).encode()


@contextmanager
def _echo(folder: Path, bodies: Sequence[bytes]) -> Iterator[Server]:
    port = free_port(0)
    script = folder / "echo.py"
    script.write_text(_ECHO.replace("PORT", str(port)))
    with _process([sys.executable, str(script)], folder / "echo.log", {}) as pid:
        _wait(port, pid)
        yield Server("bare ASGI echo", pid, port, [request_bytes("/", b, "bench") for b in bodies])


@contextmanager
def _headway(settings: Settings, folder: Path, bodies: Sequence[bytes]) -> Iterator[Server]:
    port = free_port(0)
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--endpoint", PIPELINE, "--port", str(port)]
    path = f"/v2/models/{PIPELINE}/infer"
    with _process(
        [*command, "--no-sync", "--name", "bench"], folder / "serve.log", {"HEADWAY_HOME": str(settings.home)}
    ) as pid:
        _wait(port, pid, path="/v2/health/ready")
        yield Server("headway serve", pid, port, [request_bytes(path, b, "bench") for b in bodies])


@contextmanager
def _process(command: Sequence[str], log: Path, environ: dict[str, str]) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environ})
        try:
            yield process.pid
        except BaseException:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


def _wait(port: int, pid: int, path: str = "/") -> None:
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    sys.exit(f"error: process {pid} does not answer on port {port}")


def _measure(servers: Sequence[Server], arguments: argparse.Namespace) -> dict[tuple[str, int], Cost]:
    found: dict[tuple[str, int], Cost] = {}
    for connections in (1, 16):
        for server in servers:
            closed_loop(server.port, server.requests, max(100, arguments.requests // 5), connections)
        for _ in range(arguments.rounds):
            for server in servers:
                before, model = cpu_seconds(server.pid), _of_children(server.pid)
                load = closed_loop(server.port, server.requests, arguments.requests, connections)
                if load.failed:
                    sys.exit(f"error: {server.name} failed {load.failed} of {arguments.requests} requests")
                cost = found.setdefault((server.name, connections), Cost([], [], []))
                cost.cpu_us.append(1e6 * (cpu_seconds(server.pid) - before) / arguments.requests)
                cost.model_us.append(1e6 * (_of_children(server.pid) - model) / arguments.requests)
                cost.rate.append(load.rate)
    return found


def _of_children(pid: int) -> float:
    listed = (folder / "children" for folder in Path(f"/proc/{pid}/task").iterdir())
    return sum(cpu_seconds(int(child)) for file in listed for child in file.read_text().split())


def _print_costs(costs: dict[tuple[str, int], Cost], arguments: argparse.Namespace) -> None:
    print(f"\nCPU of the server process per request, medians of {arguments.rounds} rounds in turns")
    print(f"{'server':<16} {'connections':>11} {'CPU us':>9} {'model us':>9} {'requests/s':>11} {'times the echo':>15}")
    for (name, connections), cost in costs.items():
        floor = float(np.median(costs[("bare ASGI echo", connections)].cpu_us))
        cpu = float(np.median(cost.cpu_us))
        model, rate = np.median(cost.model_us), np.median(cost.rate)
        print(f"{name:<16} {connections:>11} {cpu:>9.0f} {model:>9.0f} {rate:>11.0f} {cpu / floor:>14.1f}x")
    print("goal: whole path without model compute <= 4x the echo")


def _print_latency(server: Server, arguments: argparse.Namespace) -> None:
    peak = max(closed_loop(server.port, server.requests, arguments.requests, 16).rate for _ in range(2))
    load: Load = open_loop(server.port, server.requests, peak / 2, arguments.seconds, 64)
    print(f"\nopen loop at {peak / 2:.0f} requests/s, half of the peak of {peak:.0f}, for {arguments.seconds:.0f} s")
    print(f"p50 {load.quantile(0.5):.2f} ms, p99 {load.quantile(0.99):.2f} ms, {load.failed} failed")


def _print_parts(settings: Settings, pipeline: Pipeline, bodies: Sequence[bytes], now: int) -> None:
    """What the parts of an answer cost this process, without HTTP, threads and sockets: rows one by one, and 16."""
    print("\nCPU us per row of the parts, computed alone and 16 at once")
    with closing(online_store_for(settings)) as online, tempfile.TemporaryDirectory() as folder:
        features = OnlineFeatures(pipeline, online, settings.tenant)
        derived = compile_plan(pipeline).derived.values()
        spool = Spool(Path(folder))
        encode = msgspec.msgpack.Encoder().encode
        served = cast("Served", SimpleNamespace(spec=pipeline.spec))
        asked = [read_inference(body, None, served, Limits()).rows for body in bodies]
        parts: dict[str, list[float]] = {}
        for size in (1, _TOGETHER):
            tables = [pa.concat_tables(asked[i : i + size]) for i in range(0, len(asked), size)]
            computed = [features.compute(table, now) for table in tables]
            read = [c.values for c in computed]
            work: dict[str, Callable[[], object]] = {
                "read the request": lambda: [read_inference(b, None, served, Limits()) for b in bodies],
                "features": lambda tables=tables: [features.compute(t, now) for t in tables],
                "of which the pipeline's own functions": lambda read=read: [
                    d.function(values.select(list(d.inputs))) for values in read for d in derived
                ],
                "a frame to the model": lambda computed=computed: [encode(c.rows) for c in computed],
                "log": lambda computed=computed: [
                    spool.append([encode(row) for row in c.rows], 2**40) for c in computed
                ],
            }
            for name, call in work.items():
                parts.setdefault(name, []).append(_thread_us(call) / len(bodies))
        spool.close()
    for name, (alone, together) in parts.items():
        print(f"{name:<40} {alone:>8.0f} {together:>8.0f}")


def _thread_us(work: Callable[[], object]) -> float:
    """CPU microseconds of this thread, the median of some calls after a first one."""
    work()
    times: list[float] = []
    for _ in range(5):
        started = time.thread_time()
        work()
        times.append(1e6 * (time.thread_time() - started))
    return float(np.median(times))


def _print_reads(settings: Settings, pipeline: Pipeline, events: Sequence[Asked]) -> None:
    """One round trip for ten aircraft: rows that the reader holds are asked for changes only, others are read whole."""
    scopes = [s for s in scopes_of(compile_plan(pipeline)).all if s.keys == ("tailnum",) and s.source == "flights"]
    tails = list(dict.fromkeys(str(e.request["tailnum"]) for e in events if e.request.get("tailnum")))[:_ENTITIES]
    entities = [(scopes[0].scope_id, entity_of({"tailnum": tail}, ("tailnum",))) for tail in tails]
    with closing(online_store_for(settings)) as online:
        state = online.states(settings.tenant, pipeline.name)[0]
        key = StoreKey(settings.tenant, pipeline.name, state.feature_set_version)
        seen = online.read(key, (0, 0), entities, [])
        known = (seen.sequence, seen.rows_sequence)
        rows = sum(len(found) for found in seen.rows.values())
        held = _median_us(lambda: online.read(key, known, [], entities))
        whole = _median_us(lambda: online.read(key, known, entities, []))
    print(f"\nonline read of {len(entities)} entities in one round trip, p50 of {_READS}")
    print(f"held by the reader: {held:.0f} us; read whole ({rows} rows): {whole:.0f} us; goal <= 100 us")


def _median_us(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_READS):
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times))


if __name__ == "__main__":
    sys.exit(main())
