"""JSON of signed documents: one meaning or none. Repeated keys, NaN and documents without measure are refused."""

import json
from typing import cast

from headway.artifacts.digests import Json

MAX_BYTES = 8 << 20


class JsonRefused(ValueError):
    """A document that two readers could read differently; `code` says which rule it breaks."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_json(data: bytes) -> Json:
    """Return the value of a UTF-8 JSON document of at most 8 MiB.

    Raises:
        JsonRefused: `too_large`, `not_json` (also NaN, infinity and nesting past the parser's depth) or
            `duplicate_key`.
    """
    if len(data) > MAX_BYTES:
        raise JsonRefused("too_large", f"{len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except JsonRefused:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonRefused("not_json", f"not JSON: {error}") from error
    return cast("Json", value)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise JsonRefused("duplicate_key", f"key {key!r:.80} stands twice")
        found[key] = value
    return found


def _constant(text: str) -> object:
    raise JsonRefused("not_json", f"{text} is no JSON number")
