"""A bench whose promoted version is served by an engine in this process."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from support.serving_bench import DAYS, HOUR, opened, pipeline_of, requests_for, write_serving_bench
from support.serving_model import judge, keys_of, register, serve, snapshot_of
from support.workbench import Workbench

from headway.features.online.open import online_store_for
from headway.features.online.sync import sync_online
from headway.home import Settings, load_settings
from headway.registry.promote import promote
from headway.serving.live.engine import EngineLimits, LiveEngine
from headway.serving.live.records import Logged, decode_record
from headway.serving.live.spool import scan_segment, segment_file, segments
from headway.serving.live.types import Inference
from headway.world import move_clock

T = TypeVar("T")
ENDPOINT = "pipeline"
LEAN = EngineLimits(spare=False)
"""Without the process that waits warm, which costs a test seconds of torch."""
DEADLINE = 60.0
WORLD = 1_772_841_600_000_000
"""The world's time of a bench, 2026-03-07T00:00:00Z."""


def settings_of(bench: Workbench, **more: str) -> Settings:
    """The settings of a bench's home."""
    return load_settings({"HEADWAY_HOME": str(bench.home), **more})


def make_live_bench(root: Path) -> Workbench:
    """A bench that was ingested, promoted and synced, without a server."""
    bench = write_serving_bench(root)
    bench.ingest("data", "register", "labels")
    # All that is known by then, which the serving bench's rows are.
    move_clock(settings_of(bench).clock_file, WORLD)
    for day in DAYS:
        bench.table(day)
    assert serve(bench, DAYS).stable == 1
    sync(bench)
    return bench


def copied(bench: Workbench, to: Path) -> Workbench:
    """The bench with a home of its own."""
    shutil.copytree(bench.folder.parent, to)
    return Workbench(to / "pipeline", to / "home")


def sync(bench: Workbench, **more: str) -> None:
    """Fill the online store up to now."""
    online = online_store_for(settings_of(bench, **more))
    try:
        with opened(bench) as services:
            sync_online(services, pipeline_of(bench), online, retain=10 * 24 * HOUR)
    finally:
        online.close()


def another_version(bench: Workbench, seed: int, *, promoted: bool = True) -> int:
    """Register and judge another version with other weights, and promote it."""
    with opened(bench) as services:
        version = register(services, pipeline_of(bench), [snapshot_of(bench, DAYS[0])], seed)
        judge(bench, services, version)
        if promoted:
            promote(services, keys_of(bench), ENDPOINT, ENDPOINT, version.version)
        return version.version


def rows_to_ask(bench: Workbench) -> pa.Table:
    """Requests for every label row of the bench."""
    stored = pa.concat_tables([bench.table(day) for day in DAYS]).unify_dictionaries()
    return requests_for(pipeline_of(bench), stored)


@asynccontextmanager
async def running(bench: Workbench, **arguments: Any) -> AsyncIterator[LiveEngine]:  # noqa: ANN401
    """An engine over the bench's home, started; stopped at the end."""
    settings = arguments.pop("settings", None) or settings_of(bench)
    online = online_store_for(settings)
    limits = arguments.pop("limits", None) or LEAN
    pipeline = pipeline_of(bench)
    engine = LiveEngine(settings, {pipeline.name: pipeline}, online, limits=limits, **arguments)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop(5.0)
        online.close()


async def ask(
    engine: LiveEngine, requests: pa.Table, *, seconds: float = DEADLINE, caller: str | None = None
) -> list[Inference]:
    """Ask for all rows as one request."""
    return await engine.infer(engine.served(ENDPOINT), requests, caller_id=caller, deadline=time.monotonic() + seconds)


def spooled(folder: Path) -> list[Logged]:
    """Every whole record of a server's log."""
    return [
        decode_record(data)
        for name in segments(folder)
        for data in scan_segment(segment_file(folder, name), 0, sealed=True).records
    ]


class LiveServer:
    """An engine on an event loop of its own thread, for tests that do not run on one."""

    def __init__(self, bench: Workbench, **arguments: Any) -> None:  # noqa: ANN401
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live-server")
        self._thread.start()
        self._context = running(bench, **arguments)
        try:
            self.engine = self._run(self._context.__aenter__())
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            self._run(self._context.__aexit__(None, None, None))
        finally:
            self._end()

    def ask(self, requests: pa.Table, **arguments: Any) -> list[Inference]:  # noqa: ANN401
        """Ask for all rows as one request."""
        return self._run(ask(self.engine, requests, **arguments))

    def degraded(self) -> tuple[str, ...]:
        """What callers are told now."""
        return self.engine.served(ENDPOINT).degraded

    def until(self, met: Callable[[], bool], seconds: float = 90.0) -> None:
        """Wait until something holds; fail when it does not."""
        last = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < last, "it did not happen in time"
            time.sleep(0.02)

    @contextmanager
    def load(self, rows: pa.Table, pause: float = 0.03) -> Iterator[list[Inference]]:
        """Requests of one row each, one every `pause` seconds whatever becomes of the others; each must be answered."""
        answers: list[Inference] = []
        stop = threading.Event()

        async def fire() -> None:
            tasks: list[asyncio.Task[list[Inference]]] = []
            number = 0
            while not stop.is_set():
                row = rows.slice(number % rows.num_rows, 1)
                tasks.append(asyncio.create_task(ask(self.engine, row, caller=f"load-{number}")))
                number += 1
                await asyncio.sleep(pause)
            for found in await asyncio.gather(*tasks):
                answers.extend(found)

        going = asyncio.run_coroutine_threadsafe(fire(), self._loop)
        try:
            yield answers
        finally:
            stop.set()
            going.result(180)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(180)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
