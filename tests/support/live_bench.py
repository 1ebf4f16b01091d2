"""A bench whose promoted version is served by an engine in this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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

ENDPOINT = "pipeline"
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
    limits = arguments.pop("limits", None) or EngineLimits()
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


async def until(met: Any, seconds: float = 60.0) -> None:  # noqa: ANN401 - a callable that answers truth
    """Wait until something holds; fail when it does not."""
    last = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < last, "it did not happen in time"
        await asyncio.sleep(0.02)


def spooled(folder: Path) -> list[Logged]:
    """Every whole record of a server's log."""
    return [
        decode_record(data)
        for name in segments(folder)
        for data in scan_segment(segment_file(folder, name), 0, sealed=True).records
    ]
