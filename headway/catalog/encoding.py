"""Records as JSON: what stored answers and audit fingerprints are made of."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from headway.artifacts.digests import Json
from headway.catalog.commands import Document


def encode(record: Any) -> Document:  # noqa: ANN401 - any of the catalog's frozen records
    """Return a record's fields as JSON; records, tuples and mappings inside it alike."""
    return {item.name: _json(getattr(record, item.name)) for item in fields(record)}


def _json(value: Any) -> Json:  # noqa: ANN401
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(name): _json(item) for name, item in cast("Mapping[str, Any]", value).items()}
    return value
