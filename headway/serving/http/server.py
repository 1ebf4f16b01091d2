"""Runs the application under uvicorn, with the limits that uvicorn itself does not have.

Uvicorn bounds neither the time nor the size of a request's head, and nothing bounds what a client sends after it was
refused. A connection here has a fixed time for its head, a size that the head may have, and a bounded rest.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headway.errors import HeadwayError
from headway.serving.http.faults import retry_after
from headway.serving.http.limits import Limits
from headway.serving.http.logs import log

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from headway.serving.live.types import Engine

BACKLOG = 512

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class PortTaken(HeadwayError):
    """The address cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that an address in use is known before anything is loaded; port 0 takes any free one.

    Raises:
        PortTaken: the address is in use, is not this machine's, or has no such name.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise PortTaken(f"{host} is no address to listen on ({error.strerror})", "give --host an address") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Without this a second server could still bind the same port until the first one listens.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        remedy = "choose another with --port (make serve ARGS='--port 8081') or take any free one with --port 0"
        raise PortTaken(f"port {port} on {host} cannot be used ({error.strerror})", remedy) from error
    return bound


def run_server(
    app: Starlette, engine: Engine, bound: socket.socket, limits: Limits, started: Callable[[], None]
) -> None:
    """Start the engine, answer until SIGTERM, SIGINT or SIGHUP, drain and stop it.

    Draining is in this order: readiness off and new requests refused by the engine, what is in flight answered, the log
    flushed, the port closed.

    Args:
        app: the application over `engine`.
        engine: is started first and stopped last.
        bound: where to listen.
        limits: of connections and of draining.
        started: called once requests are taken or known not to be.
    """
    config = Config(
        app,
        http=_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=round(limits.drain_s),
    )
    _Server(config, engine, limits, started).run([bound])


class _Server(uvicorn.Server):
    def __init__(self, config: Config, engine: Engine, limits: Limits, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._limits = limits
        self._tell = started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in order on these signals, and only that: uvicorn would raise them again afterwards."""
        before = {number: signal.signal(number, self.handle_exit) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load first: nobody is answered `not ready` who could have waited in the backlog instead."""
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.stop(0)
            raise
        await super().startup(sockets)
        self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log("draining", in_flight=len(self.server_state.tasks))
        await self._engine.stop(self._limits.drain_s)
        await super().shutdown(sockets)
        log("stopped")


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    """A protocol class with these limits; uvicorn makes one per connection."""

    class Bounded(_BoundedProtocol):
        bounds = limits

    return Bounded


class _BoundedProtocol(HttpToolsProtocol):
    bounds: Limits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._left_over = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "overloaded", "too many connections are open")
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        # A chunk may end a head and bring much of a body, so only what is still unfinished counts.
        if self._head is not None and self._head_bytes > self.bounds.header:
            self._refuse(431, "header_too_large", f"the head has more than {self.bounds.header:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._left_over = 0
        if self._head is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._left_over += len(body)
            if self._left_over > self.bounds.drained:
                self.transport.close()
        super().on_body(body)

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        self._head = self.loop.call_later(self.bounds.header_s, self._head_is_late)

    def _head_is_there(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        self._refuse(408, "slow_head", f"the head was not there after {self.bounds.header_s:g} s")

    def _refuse(self, status: int, code: str, text: str) -> None:
        """Answer without the application, and close."""
        self._head_is_there()
        if self.transport.is_closing():
            return
        retry = status in (408, 503)
        body = msgspec.json.encode({"error": text, "code": code, "retry": retry})
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n" + (f"retry-after: {retry_after(None)}\r\n" if retry else "")
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()
        log("refused", code=code)
