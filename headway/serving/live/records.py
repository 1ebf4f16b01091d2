"""One record of the inference log: everything that shipping an answer needs, and nothing that may not be kept.

Rows are kept as plain values (`headway.features.online.plain`) in the order of their columns; the columns themselves
are kept once, in `schemas/<digest>.arrow` beside the segments, and named by the record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from headway.errors import HeadwayError
from headway.features.online.plain import plain_rows as plain_rows
from headway.features.online.plain import table_of as table_of
from headway.serving.features import Freshness, Status
from trainer.blobs import digest_bytes

# Time, age, status, reason and why it is incomplete: the fields of `Freshness` in their order.
View: TypeAlias = tuple[int | None, float | None, Status, str, str]


class RecordUnreadable(HeadwayError):
    """A record, or the columns that it names, are not as a server writes them."""


class Logged(msgspec.Struct, frozen=True, gc=False):
    """An answer. Times are microseconds UTC: `asked_at` and `observed` the world's, `wall_at` the machine's.

    `request` is as it may be kept; `views` holds each view's freshness;
    `inputs_digest` names the online store's pins document.
    """

    prediction_id: str
    asked_at: int
    wall_at: int
    tenant: str
    pipeline: str
    endpoint: str
    epoch: int
    version: int
    arm: str
    artifact_digest: str
    feature_set_version: int
    inputs_digest: str
    caller_id: str | None
    observed: int
    schema: str
    request: tuple[Any, ...]
    values: tuple[Any, ...]
    views: dict[str, View]
    probability: float
    degraded: tuple[str, ...]
    latency_us: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Logged)


def encode_record(record: Logged) -> bytes:
    """The record's bytes."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> Logged:
    """Read a record. Raises `RecordUnreadable`."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordUnreadable(f"a record of the inference log: {error}", "it was written by other code") from error


def views_of(views: Mapping[str, Freshness]) -> dict[str, View]:
    """Freshness by view as a record has it."""
    return {name: (f.time, f.age, f.status, f.reason, f.incomplete) for name, f in views.items()}


class Schemas:
    """The columns of records, beside the log. One writer, any number of readers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "schemas"
        self._written: list[tuple[pa.Schema, pa.Schema, str]] = []
        self._read: dict[str, tuple[pa.Schema, pa.Schema]] = {}

    def keep(self, requests: pa.Schema, values: pa.Schema) -> str:
        """Keep the columns of both tables, once; return their name. Raises `OSError`."""
        for asked, computed, name in self._written:
            if (computed is values or computed.equals(values)) and asked.equals(requests):
                return name
        data = pa.schema([_nested("requests", requests), _nested("values", values)]).serialize().to_pybytes()
        name = digest_bytes(data).removeprefix("sha256:")[:32]
        self._folder.mkdir(mode=0o700, exist_ok=True)
        target = self._folder / f"{name}.arrow"
        if not target.exists():
            unfinished = self._folder / f".{name}.{os.getpid()}"
            unfinished.write_bytes(data)
            unfinished.replace(target)
        self._written.append((requests, values, name))
        return name

    def read(self, name: str) -> tuple[pa.Schema, pa.Schema]:
        """The columns of requests and of values. Raises `RecordUnreadable`."""
        if name not in self._read:
            try:
                data = (self._folder / f"{name}.arrow").read_bytes()
                whole = pa.ipc.read_schema(pa.py_buffer(data))
                self._read[name] = (pa.schema(_fields(whole, "requests")), pa.schema(_fields(whole, "values")))
            except (OSError, pa.ArrowException, KeyError) as error:
                raise RecordUnreadable(f"columns {name!r:.60} of the log: {error}", "restore that file") from error
        return self._read[name]


def _nested(name: str, schema: pa.Schema) -> pa.Field:
    return pa.field(name, pa.struct(list(schema)))


def _fields(whole: pa.Schema, name: str) -> list[pa.Field]:
    kind: Any = whole.field(name).type
    return [kind.field(i) for i in range(kind.num_fields)]
