"""Under which scopes and entities the rows of a feature set are filed, and how their values are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import is_normalized

import msgspec
import numpy as np
import pyarrow as pa

from headway.datasets.text import ARROW_TYPES
from headway.declaration import PipelineSpec, SourceSpec
from headway.errors import HeadwayError
from headway.features.clocks import Clock
from headway.features.kernel.encode import plain
from headway.features.online.store import NO_ENTITY, RowVersion, Subject
from headway.features.plan import CompiledView, CustomFunction, FeaturePlan
from trainer.blobs import digest_json

WHOLE_SOURCE = b"*"


class KeyPartMissing(HeadwayError):
    """An entity was named without all parts of its key. `missing` names them."""

    def __init__(self, missing: Sequence[str], parts: Sequence[str]) -> None:
        self.missing = tuple(missing)
        super().__init__(
            f"key part {', '.join(repr(m) for m in missing)} is missing", f"give all of {', '.join(sorted(parts))}"
        )


@dataclass(frozen=True)
class Scope:
    """Rows of one source under one clock, looked up by some key columns (in order of name; none: as a whole).

    `columns` are what its features read, in the order in which a payload holds their values.
    """

    scope_id: str
    source: str
    clock: Clock
    keys: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def subject(self) -> Subject:
        """What its entities are."""
        return self.source, self.keys


@dataclass(frozen=True)
class Scopes:
    """The scopes of a feature set, and which one each view and custom feature reads."""

    all: tuple[Scope, ...]
    of_view: Mapping[str, Scope]
    of_custom: Mapping[str, Scope]

    def of_source(self, source: str) -> tuple[Scope, ...]:
        """The scopes of a source."""
        return tuple(s for s in self.all if s.source == source)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that features read, in order of their first scope."""
        return tuple(dict.fromkeys(s.source for s in self.all))


def scopes_of(plan: FeaturePlan) -> Scopes:
    """The scopes that a compiled feature set needs."""
    found: dict[str, Scope] = {}
    views = {name: _add(found, _view_scope(view)) for name, view in plan.views.items()}
    custom = {name: _add(found, _custom_scope(function)) for name, function in plan.custom.items()}
    return Scopes(
        tuple(found.values()),
        {name: found[scope] for name, scope in views.items()},
        {name: found[scope] for name, scope in custom.items()},
    )


def _add(found: dict[str, Scope], scope: Scope) -> str:
    known = found.get(scope.scope_id, scope)
    columns = tuple(dict.fromkeys([*known.columns, *scope.columns]))
    found[scope.scope_id] = replace(known, columns=columns)
    return scope.scope_id


def _view_scope(view: CompiledView) -> Scope:
    columns = [f.latest for f in view.spec.latest_features().values()]
    columns += [f.window for f in view.spec.window_features().values()]
    return _scope(view.spec.source, view.clock, tuple(sorted(view.spec.keys.values())), columns)


def _custom_scope(function: CustomFunction) -> Scope:
    return _scope(function.source, function.clock, (), function.columns)


def _scope(source: str, clock: Clock, keys: tuple[str, ...], columns: Sequence[str]) -> Scope:
    place = digest_json([source, clock.event, clock.available, clock.delay, list(keys)])
    return Scope(place.removeprefix("sha256:")[:16], source, clock, keys, tuple(columns))


def entity_of(parts: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """The one encoding of an entity, whatever the order in which its parts are given.

    `NO_ENTITY` when a part is null: nothing matches it.

    Raises:
        KeyPartMissing: a part of the key is not given.
    """
    missing = [c for c in columns if c not in parts]
    if missing:
        raise KeyPartMissing(missing, columns)
    return entity_code([parts[c] for c in sorted(columns)])


def entity_code(values: Sequence[Any]) -> bytes:
    """The entity of key values in order of their columns' names; `NO_ENTITY` when one is null."""
    return NO_ENTITY if any(v is None for v in values) else encode_values(values)


def encode_values(values: Sequence[Any]) -> bytes:
    """Values of a key or an identity as bytes; equal bytes are equal values of one declared type each."""
    return json.dumps(list(values), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def key_values(columns: Mapping[str, pa.Array | pa.ChunkedArray], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of some key columns row by row, in the form in which the kernel compares them.

    Raises:
        ColumnError: as the kernel's `encode_keys`.
    """
    return list(zip(*(_compared(name, columns[name]) for name in names), strict=True))


def _compared(name: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_int64(kind):
        # What `plain` would give, at a fraction of its cost for the few rows of a request.
        found = column.to_pylist()
        if not pa.types.is_string(kind) or all(v is None or v.isascii() or is_normalized("NFC", v) for v in found):
            return found
    _, values = plain(name, column)
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    return values.to_pylist()


def entities(table: pa.Table, names: Sequence[str]) -> list[bytes]:
    """The entity of each row by the named source columns (`WHOLE_SOURCE` without any)."""
    if not names:
        return [WHOLE_SOURCE] * table.num_rows
    known: dict[tuple[Any, ...], bytes] = {}
    return [_encoded(known, values) for values in key_values(_columns(table, names), sorted(names))]


def _encoded(known: dict[tuple[Any, ...], bytes], values: tuple[Any, ...]) -> bytes:
    if values not in known:
        known[values] = entity_code(values)
    return known[values]


def identities(table: pa.Table, row_id: Sequence[str]) -> list[bytes]:
    """The identity of each row, in declared order of its columns."""
    return [encode_values(v) for v in key_values(_columns(table, row_id), row_id)]


def _columns(table: pa.Table, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    return {name: table.column(name) for name in names}


def row_versions(
    source: SourceSpec, scope: Scope, table: pa.Table, place: tuple[str, int], chosen: np.ndarray[Any, Any]
) -> list[RowVersion]:
    """Some rows of a dataset version (positions ascending) as a scope files them.

    Args:
        source: the declaration of the table's source.
        scope: under which to file them.
        table: released rows of one dataset version.
        place: its partition and version.
        chosen: positions of rows that have both times.
    """
    some = table.take(pa.array(chosen))
    times = scope.clock.times(some)
    sequence = [0] * len(chosen) if source.sequence is None else some.column(source.sequence).to_pylist()
    deleted = [False] * len(chosen) if source.deleted is None else some.column(source.deleted).to_pylist()
    payloads = zip(*(_stored(some.column(c)) for c in scope.columns), strict=True)
    encode = msgspec.msgpack.Encoder().encode
    return [
        RowVersion(scope.scope_id, entity, identity, *place, position, event, available, number, bool(gone), payload)
        for entity, identity, position, event, available, number, gone, payload in zip(
            entities(some, scope.keys),
            identities(some, source.row_id),
            chosen.tolist(),
            times.event.tolist(),
            times.available.tolist(),
            sequence,
            deleted,
            map(encode, payloads),
            strict=True,
        )
    ]


def _stored(column: pa.ChunkedArray) -> list[Any]:
    """Values of a column as a payload holds them: times as microseconds, dates as days since 1970."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    if pa.types.is_date(column.type):
        return column.cast(pa.int32()).to_pylist()
    return column.to_pylist()


def column_types(spec: PipelineSpec, scope: Scope) -> dict[str, pa.DataType]:
    """The Arrow type of each payload column as released rows have it: text is dictionary-encoded."""
    declared = spec.sources[scope.source].columns
    found = {c: ARROW_TYPES[declared[c].type] for c in scope.columns}
    return {c: pa.dictionary(pa.int32(), t) if pa.types.is_string(t) else t for c, t in found.items()}


Decode = Callable[[bytes], list[Any]]
