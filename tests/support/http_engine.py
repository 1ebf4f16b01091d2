"""An engine that answers by a function of the request, and what else an application needs in tests."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
import pyarrow as pa
from starlette.applications import Starlette

from headway.declaration import PipelineSpec, PrivacySpec, RequestColumn
from headway.loading import load_pipeline
from headway.serving.features import Freshness
from headway.serving.http.app import create_app
from headway.serving.http.limits import Limits
from headway.serving.http.metrics import ServeMetrics
from headway.serving.http.v2 import DATATYPES
from headway.serving.live.types import (
    EngineStatus,
    Inference,
    NotReady,
    Served,
    SpoolStatus,
    UnknownModel,
    VersionNotServed,
)

MODEL = "flight_delay"
VERSION = 3
NOW = 1_364_774_400_000_000
INFER = f"/v2/models/{MODEL}/infer"
EXTRA = {
    "share": RequestColumn(type="float64"),
    "charter": RequestColumn(type="bool"),
    "day": RequestColumn(type="date"),
}
VALUES: Mapping[str, Any] = {
    "carrier": "UA",
    "flight": 1545,
    "origin": "EWR",
    "dest": "IAH",
    "tailnum": "N14228",
    "sched_dep_time": "2013-04-01T05:15:00-04:00",
    "sched_arr_time": "2013-04-01T12:19:00Z",
    "share": 0.5,
    "charter": False,
    "day": "2013-04-01",
}


@lru_cache
def spec_of_double() -> PipelineSpec:
    """`flight_delay` with a field of every type, where the tail number counts as personal."""
    spec = load_pipeline(MODEL).spec
    assert spec.serving is not None
    flights = spec.sources["flights"].model_copy(update={"privacy": PrivacySpec(personal={"tailnum": "hash"})})
    serving = spec.serving.model_copy(update={"request": {**spec.serving.request, **EXTRA}, "max_rows": 50})
    return spec.model_copy(update={"sources": {**spec.sources, "flights": flights}, "serving": serving})


def tensor(name: str, *values: object, **changes: object) -> dict[str, Any]:
    """A tensor of a declared field."""
    serving = spec_of_double().serving
    assert serving is not None
    kind = serving.request[name].type if name in serving.request else "string"
    return {"name": name, "shape": [len(values)], "datatype": DATATYPES[kind], "data": list(values)} | changes


def asked(rows: int = 1, **values: object) -> dict[str, Any]:
    """A good request; `values` replace those of a field in every row, None leaves the field out."""
    given = {**VALUES, **values}
    return {"inputs": [tensor(n, *([v] * rows)) for n, v in given.items() if v is not None]}


Answer = Callable[[pa.Table], Sequence[float]]


def by_flight(rows: pa.Table) -> list[float]:
    """A probability that names the row it is for."""
    return [f / 1e6 for f in rows.column("flight").to_pylist()]


@dataclass
class DoubleEngine:
    """Answers with `answer` of the rows; `error` is raised instead, when set. Keeps what it was given in `seen`."""

    answer: Answer = by_flight
    error: Exception | None = None
    reason: str = ""
    degraded: tuple[str, ...] = ()
    hold: asyncio.Event | None = None
    seen: list[pa.Table] = field(default_factory=list)
    callers: list[str | None] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    started: int = 0
    stopped: list[float] = field(default_factory=list)

    def served(self, model: str, version: int | None = None) -> Served:
        if model != MODEL:
            raise UnknownModel(model, (MODEL,))
        if self.reason:
            raise NotReady(self.reason, 2.0)
        if version not in (None, VERSION):
            raise VersionNotServed(model, version, VERSION)
        return Served(
            model_id=MODEL,
            endpoint_id=MODEL,
            endpoint_epoch=7,
            arm="stable",
            version=VERSION,
            artifact_digest="sha256:" + "a" * 64,
            contract={"inputs": [], "output": {}},
            contract_hash="sha256:" + "c" * 64,
            feature_set_version=1,
            degraded=self.degraded,
            spec=spec_of_double(),
            run_id="run-3",
        )

    def models(self) -> tuple[str, ...]:
        return (MODEL,)

    def ready(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    async def infer(
        self, served: Served, requests: pa.Table, *, caller_id: str | None, deadline: float
    ) -> list[Inference]:
        self.seen.append(requests)
        self.callers.append(caller_id)
        self.deadlines.append(deadline - time.monotonic())
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        answers = self.answer(requests)
        return [self._inference(served, len(self.seen), row, p) for row, p in enumerate(answers)]

    def _inference(self, served: Served, number: int, row: int, probability: float) -> Inference:
        views = {
            "weather_at_origin": Freshness(NOW - 3_600_123_000, 3600.123, "fresh", "", ""),
            "aircraft": Freshness(None, None, "missing", "no_row", ""),
        }
        return Inference(
            prediction_id=f"p{number:03d}-{row}",
            probability=probability,
            observed=NOW,
            views=views,
            degraded=self.degraded,
            served=served,
            queue_wait_us=120,
            feature_us=300,
            compute_us=80,
        )

    def now(self) -> int:
        return NOW

    def status(self) -> EngineStatus:
        return EngineStatus(
            epochs={MODEL: 7},
            loaded={MODEL: (VERSION,)},
            degraded={MODEL: self.degraded},
            catalog_age_s=0.2,
            spool=SpoolStatus(records=5, bytes=1234, limit=100_000, dropped=1, torn=2, segments=1),
            queue_rows=0,
            watermarks={"flights": NOW - 60_000_000, "planes": None},
        )

    async def start(self) -> None:
        self.started += 1

    async def stop(self, drain_s: float) -> None:
        self.reason = "draining"
        self.stopped.append(drain_s)


def accept_all(endpoint: str, items: Sequence[object]) -> list[dict[str, Any]]:
    """A desk that takes every label that is an object."""
    return [
        {"status": "accepted", "label_id": f"{endpoint}-{place}"}
        if isinstance(item, dict)
        else {"status": "refused", "reason": "malformed"}
        for place, item in enumerate(items)
    ]


def app_of(engine: DoubleEngine, limits: Limits | None = None, labels: Callable[..., Any] = accept_all) -> Starlette:
    """The application over the double."""
    return create_app(engine, labels, limits or Limits(), ServeMetrics(engine))


def client_of(app: Starlette) -> httpx.AsyncClient:
    """A client that calls the application in process."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://headway")


def send(app: Starlette, method: str, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401
    """One request in an event loop of its own."""

    async def once() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **more)

    return asyncio.run(once())


def infer(app: Starlette, document: object, path: str = INFER, **more: Any) -> httpx.Response:  # noqa: ANN401
    """One inference request."""
    return send(app, "POST", path, json=document, **more)
