"""Reads a request's body: bounded in bytes and time, packed or not, and only of a type that is read here."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headway.serving.http.faults import Fault

if TYPE_CHECKING:
    from starlette.requests import Request

    from headway.serving.http.limits import Limits

BINARY_HEADER = "inference-header-content-length"
# Above this many bytes a body is unpacked and parsed off the event loop.
LARGE = 128 * 1024

_JSON = "application/json"
_GZIP = 31
T = TypeVar("T")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body as it was before it was packed.

    Raises:
        Fault: `unsupported_type`, `unsupported_encoding`, `body_too_large`, `slow_body`, or `bad_request` for a body
            that ends early or is packed wrongly.
    """
    _check_type(request)
    packed = _is_packed(request)
    data = await _received(request, limits)
    if not packed:
        return data
    return await asyncio.to_thread(_unpacked, data, limits)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do it here when the input is small, else in a thread, so that one large body does not hold up all others."""
    return work() if size <= LARGE else await asyncio.to_thread(work)


def _check_type(request: Request) -> None:
    told = request.headers.get("content-type")
    if told is None or told == _JSON:
        return
    kind, _, rest = told.partition(";")
    charset = rest.strip().lower().removeprefix("charset=").strip('"')
    allowed = [_JSON]
    if BINARY_HEADER in request.headers:
        allowed.append("application/octet-stream")
    if kind.strip().lower() not in allowed or charset not in ("", "utf-8"):
        raise Fault(
            "unsupported_type",
            f"the content type is {told!r:.120}; send application/json (curl: -H 'content-type: application/json'), "
            f"or application/octet-stream with the header {BINARY_HEADER}",
        )


def _is_packed(request: Request) -> bool:
    told = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if told in ("", "identity"):
        return False
    if told == "gzip":
        return True
    raise Fault("unsupported_encoding", f"the content encoding is {told!r:.80}; send gzip, once, or none")


async def _received(request: Request, limits: Limits) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limits.body:
        raise _too_large(f"{int(length):,}", limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Fault("bad_request", "the body ended early")
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > limits.body:
                    raise _too_large(f"more than {limits.body:,}", limits)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError as error:
        text = f"the body was not there after {limits.body_s:g} s ({size:,} bytes came)"
        raise Fault("slow_body", text, headers={"connection": "close"}) from error


def _too_large(size: str, limits: Limits) -> Fault:
    return Fault("body_too_large", f"the body has {size} bytes, the limit is {limits.body:,}; send fewer rows at once")


def _unpacked(data: bytes, limits: Limits) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        plain = unpacker.decompress(data, limits.body + 1)
    except zlib.error as error:
        raise Fault("bad_request", f"the body is no gzip: {error}") from error
    if len(plain) > limits.body:
        raise _too_large(f"unpacked more than {limits.body:,}", limits)
    if not unpacker.eof:
        raise Fault("bad_request", "the gzip body is cut off")
    if unpacker.unused_data:
        raise Fault("bad_request", "something follows the gzip body; send one gzip member")
    return plain
