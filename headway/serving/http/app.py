"""The application: routes, and what every answer has in common (codes, log, metrics).

Nothing is computed here. A request is read and checked, its deadline is looked at, and the engine answers.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from headway.declaration import duration_us
from headway.errors import HeadwayError
from headway.serving.http.body import BINARY_HEADER, LARGE, off_loop, read_body
from headway.serving.http.faults import INTERNAL, Fault, fault_of, retry_after
from headway.serving.http.labels import Accept, LabelRoute
from headway.serving.http.logs import log
from headway.serving.http.metrics import CONTENT_TYPE, UNKNOWN
from headway.serving.http.openapi import openapi
from headway.serving.http.page import page
from headway.serving.http.v2 import answer, deadline_s, metadata, read_inference, served_parameters
from headway.serving.live.types import DeadlineExceeded
from headway.serving.requests import serving_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from headway.serving.http.limits import Limits
    from headway.serving.http.metrics import ServeMetrics
    from headway.serving.live.types import Engine, Inference, Served

_JSON = "application/json"
_BINARY = "application/octet-stream"
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


def create_app(engine: Engine, labels: Accept, limits: Limits, metrics: ServeMetrics) -> Starlette:
    """The application over an engine that somebody else starts and stops.

    Args:
        engine: answers.
        labels: takes labels, in a thread; `LabelDesk.accept` of the server's tenant.
        limits: what is taken.
        metrics: where requests are counted.
    """
    routes = _Routes(engine, LabelRoute(engine, labels, limits), limits, metrics)
    return _Application(routes)


class _Application(Starlette):
    """Starlette's application, past whose routing and layers an inference request goes straight to its route."""

    def __init__(self, routes: _Routes) -> None:
        super().__init__(routes=_table(routes), exception_handlers=_HANDLERS)
        self._infer = routes.infer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _INFER.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await super().__call__(scope, receive, send)
            return
        scope["path_params"] = {name: value for name, value in found.groupdict().items() if value is not None}
        request = Request(scope, receive)
        try:
            response = await self._infer(request)
        except Exception as error:
            # As Starlette does: the caller gets an answer, and the server, which logs it, the error.
            await (await _failed(request, error))(scope, receive, send)
            raise
        await response(scope, receive, send)


def _table(routes: _Routes) -> list[Route]:
    model, versioned = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    return [
        Route(f"{model}/infer", routes.infer, methods=["POST"]),
        Route(f"{versioned}/infer", routes.infer, methods=["POST"]),
        Route("/", routes.page),
        Route("/v2", routes.server),
        Route("/v2/health/live", routes.live),
        Route("/v2/health/ready", routes.ready),
        Route(model, routes.metadata),
        Route(versioned, routes.metadata),
        Route(f"{model}/ready", routes.model_ready),
        Route(f"{versioned}/ready", routes.model_ready),
        Route("/v2/labels", routes.labels, methods=["POST"]),
        Route("/metrics", routes.metrics),
        Route("/openapi.json", routes.openapi),
    ]


@dataclass
class _Call:
    """One inference request as far as it came, for its log line and its figures."""

    model: str
    began: float = field(default_factory=time.monotonic)
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    served: Served | None = None
    answers: list[Inference] = field(default_factory=list)
    prediction_ids: tuple[str, ...] = ()


class _Routes:
    def __init__(self, engine: Engine, labels: LabelRoute, limits: Limits, metrics: ServeMetrics) -> None:
        self._engine = engine
        self._labels = labels
        self._limits = limits
        self._metrics = metrics
        self._in_flight = 0
        self._long_bodies = 0

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(self._engine, str(request.base_url).rstrip("/")))

    async def server(self, request: Request) -> Response:
        document = {"name": "headway", "version": installed("headway"), "extensions": ["binary_tensor_data"]}
        return _json(document)

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        ready, reason = self._engine.ready()
        if not ready:
            raise Fault("draining" if reason == "draining" else "not_ready", f"not ready: {reason}")
        return _json({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        served = self._served(request)
        return _json({"name": served.endpoint_id, "ready": True, "parameters": served_parameters(served)})

    async def metadata(self, request: Request) -> Response:
        return _json(metadata(self._served(request)))

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return _json(openapi(self._engine))

    async def labels(self, request: Request) -> Response:
        began = time.monotonic()
        code, counts = "ok", {}
        try:
            body = await self._body(request)
            with self._place():
                data, outcomes = await self._labels.answer(body, request.headers.get("idempotency-key"))
            self._metrics.labels(code, outcomes)
            counts = msgspec.json.decode(data)["counts"]
            return Response(data, media_type=_JSON)
        except (Fault, HeadwayError) as error:
            code = _fault(error).code
            self._metrics.labels(code, ())
            raise
        finally:
            log("labels", code=code, counts=counts, ms=_ms(began))

    async def infer(self, request: Request) -> Response:
        call = _Call(request.path_params["model"])
        code = INTERNAL
        try:
            response = await self._inferred(request, call)
            code = "ok"
            return response
        except (Fault, HeadwayError) as error:
            fault = _fault(error)
            code, call.prediction_ids = fault.code, fault.prediction_ids
            return _refusal(fault, call)
        finally:
            self._told(call, code)

    async def _inferred(self, request: Request, call: _Call) -> Response:
        call.served = served = self._served(request)
        body = await self._body(request)
        with self._place():
            return await self._answered(request, call, served, body)

    async def _body(self, request: Request) -> bytes:
        """The body. Whoever sends it slowly takes no place of those that can be answered; long ones have few places."""
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) <= LARGE:
            return await read_body(request, self._limits)
        if self._long_bodies >= self._limits.long_bodies:
            raise Fault("overloaded", f"{self._long_bodies} long bodies are on their way, which is the limit")
        self._long_bodies += 1
        try:
            return await read_body(request, self._limits)
        finally:
            self._long_bodies -= 1

    async def _answered(self, request: Request, call: _Call, served: Served, body: bytes) -> Response:
        length = request.headers.get(BINARY_HEADER)
        asked = await off_loop(len(body), lambda: read_inference(body, length, served, self._limits))
        call.request_id = asked.request_id or call.request_id
        declared = duration_us(serving_of(served.spec).deadline) / 1_000_000
        allowed = deadline_s(request.headers.get("x-deadline-ms"), asked.timeout_s, declared, self._limits.longest_s)
        deadline = call.began + allowed
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("features")
        call.answers = await self._engine.infer(served, asked.rows, caller_id=asked.request_id, deadline=deadline)
        call.prediction_ids = tuple(a.prediction_id for a in call.answers)
        self._metrics.answered(call.answers)
        data, head = answer(asked, call.answers, call.request_id)
        if head is None:
            return Response(data, media_type=_JSON)
        return Response(data, headers={"content-type": _BINARY, BINARY_HEADER: str(head)})

    def _told(self, call: _Call, code: str) -> None:
        served = call.answers[0].served if call.answers else call.served
        seconds = time.monotonic() - call.began
        model = UNKNOWN if served is None else served.endpoint_id
        version = "" if served is None else str(served.version)
        self._metrics.inference(model, version, code, seconds)
        first = call.answers[0] if call.answers else None
        log(
            "infer",
            id=call.request_id,
            code=code,
            model=model,
            version=version,
            run="" if served is None else served.run_id,
            rows=len(call.answers),
            prediction_ids=call.prediction_ids,
            ms=round(seconds * 1000, 3),
            queue_us=0 if first is None else first.queue_wait_us,
            feature_us=0 if first is None else first.feature_us,
            compute_us=0 if first is None else first.compute_us,
        )

    def _served(self, request: Request) -> Served:
        """What the path names; a text that is no version names none, and never reaches anything else."""
        model, wanted = request.path_params["model"], request.path_params.get("version")
        if wanted is None:
            return self._engine.served(model)
        if _VERSION.fullmatch(wanted) is None:
            text = f"{wanted!r:.40} is no version; versions are whole numbers from 1, or leave it out"
            raise Fault("version_not_served", text)
        return self._engine.served(model, int(wanted))

    def _place(self) -> _Place:
        if self._in_flight >= self._limits.in_flight:
            raise Fault("overloaded", f"{self._in_flight} requests are in flight, which is the limit")
        return _Place(self)

    def entered(self, change: int) -> None:
        self._in_flight += change
        self._metrics.in_flight.set(self._in_flight)


class _Place:
    """One of the places for requests in flight, given back at the end of a `with` block."""

    def __init__(self, routes: _Routes) -> None:
        self._routes = routes

    def __enter__(self) -> None:
        self._routes.entered(1)

    def __exit__(self, *_: object) -> None:
        self._routes.entered(-1)


def _json(document: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, _JSON)


def _ms(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 3)


def _fault(error: Fault | HeadwayError) -> Fault:
    """The entry of the error table, or the error itself where it has none: that is a fault of ours."""
    found = error if isinstance(error, Fault) else fault_of(error)
    if found is None:
        raise error
    return found


def _refusal(fault: Fault, call: _Call | None = None) -> Response:
    body: dict[str, Any] = {"error": fault.text, "code": fault.code, "retry": fault.retry}
    if fault.field is not None:
        body["field"] = fault.field
    if call is not None:
        body["id"] = call.request_id
    if fault.prediction_ids:
        body["prediction_ids"] = list(fault.prediction_ids)
    if call is not None and call.served is not None:
        body["parameters"] = served_parameters(call.served)
    headers = dict(fault.headers)
    if fault.retry:
        headers["retry-after"] = retry_after(fault.retry_after_s)
    return _json(body, fault.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == 405 else "unknown_path"
        text = f"{request.method} {request.url.path[:200]}: {error.detail}; GET /openapi.json lists what there is"
        return _refusal(Fault(code, text, headers=error.headers))
    if not isinstance(error, Fault | HeadwayError):
        raise error
    return _refusal(_fault(error))


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of ours: the caller learns that much, the log (by uvicorn, which gets the error next) the rest."""
    return _refusal(Fault(INTERNAL, "the server failed on this request; its log has the cause"))


_HANDLERS = {Fault: _refused, HeadwayError: _refused, HTTPException: _refused, Exception: _failed}
