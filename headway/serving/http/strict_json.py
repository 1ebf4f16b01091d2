"""JSON of callers: one meaning or none, and never more memory than the limits say.

The document is walked over once without building anything, which proves its syntax and lets its values and member
names be counted before a single object is made.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headway.serving.http.faults import Fault
from headway.serving.http.limits import Limits

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_skim = msgspec.json.Decoder(msgspec.Raw)
_decode = msgspec.json.Decoder()


def parse_json(data: bytes, limits: Limits) -> Any:  # noqa: ANN401
    """The value of a UTF-8 JSON document, as plain Python objects; whole numbers stay whole, of any size.

    Raises:
        Fault: `bad_json` (no JSON, NaN or infinities, numbers out of range, a name twice in one object) or
            `body_too_large` (more values or nesting than `limits` allow).
    """
    try:
        _skim.decode(data)
        # Only now is every string known to end, without which the expression would not be linear.
        bones = _STRINGS.sub(b"", data)
        values = bones.count(b",") + bones.count(b"[") + bones.count(b"{")
        if values > limits.values:
            raise Fault("body_too_large", f"the document holds {values:,} values, the limit is {limits.values:,}")
        document = _decode.decode(data)
    except RecursionError as error:
        raise _too_deep(limits) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Fault("bad_json", f"not JSON: {error}; where there is no value write null") from error
    if _members(document, limits) != bones.count(b":"):
        raise Fault("bad_json", f"{_twice(data)} stands twice in one object; give each name once")
    return document


def _members(document: object, limits: Limits) -> int:
    """How many names the objects of a document have."""
    found, depth = 0, 0
    level: list[Any] = [document]
    while level := [value for value in level if type(value) is dict or type(value) is list]:
        if depth == limits.depth:
            raise _too_deep(limits)
        inside: list[Any] = []
        for value in level:
            if type(value) is dict:
                found += len(value)
                inside.extend(value.values())
            else:
                inside.extend(value)
        level, depth = inside, depth + 1
    return found


def _too_deep(limits: Limits) -> Fault:
    return Fault("body_too_large", f"the document is nested deeper than {limits.depth}, the limit")


def _twice(data: bytes) -> str:
    """The first repeated name. Read again by the slower parser, which shows every name."""
    import json

    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        found.extend(n for n in names if names.count(n) > 1)

    json.loads(data, object_pairs_hook=look)
    return f"{found[0]!r:.80}"
