"""Rows of entities as arrays: decoded once, kept while they hold, put together for the kernel per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.features.kernel import Rows
from headway.features.online.scopes import Scope
from headway.features.online.store import EntityRow
from headway.features.plan import _numbers as numbers

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

_payload = msgspec.msgpack.Decoder(list[Any]).decode
_identity = msgspec.json.Decoder(list[Any]).decode


@dataclass(frozen=True)
class ScopePlan:
    """What is decoded of a scope's rows: columns whose newest value is asked for, and columns that are aggregated."""

    scope: Scope
    types: Mapping[str, pa.DataType]
    latest: tuple[str, ...]
    windows: tuple[str, ...]
    memory: int | None


@dataclass(frozen=True)
class EntityRows:
    """Row versions of one entity by event time. `here` is False for versions that stand in another entity.

    `identity` numbers the row identities in their order. `values` holds the latest columns as Python values, `null`
    which of them are null, `numbers` the aggregated columns. `always` are rows whose identity has several event times:
    no cut by time may part them.
    """

    event: Ints
    available: Ints
    sequence: Ints
    deleted: Flags
    here: Flags
    identity: Ints
    identities: int
    newest_known: int
    values: Mapping[str, list[Any]]
    null: Mapping[str, Flags]
    numbers: Mapping[str, tuple[Floats, Flags]]
    always: Ints

    def __len__(self) -> int:
        return len(self.event)

    def visible(self, known_until: int, first: int, last: int) -> EntityRows:
        """The rows that observations of [first, last] may see, `first` being as far back as any feature looks."""
        low = int(np.searchsorted(self.event, first, "left"))
        high = int(np.searchsorted(self.event, last, "right"))
        if low == 0 and high == len(self) and self.newest_known <= known_until:
            return self
        chosen = np.arange(low, high)
        if low and len(self.always):
            chosen = np.union1d(chosen, self.always[self.always < low])
        if self.newest_known > known_until:
            chosen = chosen[np.maximum(self.event[chosen], self.available[chosen]) <= known_until]
        return self._take(chosen)

    def _take(self, rows: Ints) -> EntityRows:
        return EntityRows(
            self.event[rows],
            self.available[rows],
            self.sequence[rows],
            self.deleted[rows],
            self.here[rows],
            self.identity[rows],
            self.identities,
            self.newest_known,
            {c: [v[i] for i in rows.tolist()] for c, v in self.values.items()},
            {c: n[rows] for c, n in self.null.items()},
            {c: (v[rows], n[rows]) for c, (v, n) in self.numbers.items()},
            self.always,
        )


def decode(plan: ScopePlan, rows: Sequence[EntityRow]) -> EntityRows:
    """Decode what the store gave for one entity."""
    ordered = sorted(rows, key=lambda r: (r.event_time, r.available_time, r.sequence, r.partition, r.position))
    identity, _, _, event, available, sequence, deleted, here, payload = (
        zip(*ordered, strict=True) if ordered else ((),) * 9
    )
    events = np.array(event, dtype=np.int64)
    availables = np.array(available, dtype=np.int64)
    number = {code: n for n, code in enumerate(sorted(set(identity), key=_identity))}
    identities = np.array([number[code] for code in identity], dtype=np.int64)
    empty = [None] * len(plan.scope.columns)
    cells = [empty if p is None else _payload(p) for p in payload]
    columns = dict(zip(plan.scope.columns, zip(*cells, strict=True), strict=True)) if cells else {}
    values = {c: list(columns.get(c, ())) for c in plan.latest}
    arrays = {c: pa.array(columns.get(c, ()), _plain(plan.types[c])) for c in plan.windows}
    return EntityRows(
        event=events,
        available=availables,
        sequence=np.array(sequence, dtype=np.int64),
        deleted=np.array(deleted, dtype=np.bool_),
        here=np.array(here, dtype=np.bool_),
        identity=identities,
        identities=len(number),
        newest_known=int(np.maximum(events, availables).max(initial=np.iinfo(np.int64).min)),
        values=values,
        null={c: np.array([v is None for v in found], dtype=np.bool_) for c, found in values.items()},
        numbers={c: numbers(pa.chunked_array([a]), c) for c, a in arrays.items()},
        always=_of_several_times(events, identities, len(number)),
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _of_several_times(event: Ints, identity: Ints, identities: int) -> Ints:
    """Positions of rows whose identity has more than one event time."""
    if identities == len(event):
        return np.empty(0, dtype=np.int64)
    first = np.full(identities, np.iinfo(np.int64).max)
    last = np.full(identities, np.iinfo(np.int64).min)
    np.minimum.at(first, identity, event)
    np.maximum.at(last, identity, event)
    return np.flatnonzero((first != last)[identity])


@dataclass(frozen=True)
class Together:
    """Rows of several entities of one scope, ready for the kernel: the key is the entity's number."""

    rows: Rows
    values: Mapping[str, list[Any]]
    null: Mapping[str, Flags]
    numbers: Mapping[str, tuple[Floats, Flags]]
    groups: int


def together(plan: ScopePlan, parts: Sequence[EntityRows]) -> Together:
    """Put entities side by side. Each is complete in itself, so identities are numbered apart per entity."""
    lengths = np.array([len(p) for p in parts], dtype=np.int64)
    code = np.repeat(np.arange(len(parts), dtype=np.int64), lengths)
    start = np.cumsum([0, *(p.identities for p in parts)])[:-1].astype(np.int64)
    here = np.concatenate([p.here for p in parts]) if parts else np.empty(0, dtype=np.bool_)
    return Together(
        Rows(
            key=np.where(here, code, np.int64(-1)),
            event_time=_joined([p.event for p in parts]),
            available_time=_joined([p.available for p in parts]),
            sequence=_joined([p.sequence for p in parts]),
            deleted=np.concatenate([p.deleted for p in parts]) if parts else np.empty(0, dtype=np.bool_),
            row_id=_joined([p.identity for p in parts]) + (start[code] if len(code) else 0),
        ),
        {c: [v for p in parts for v in p.values[c]] for c in plan.latest},
        {c: np.concatenate([p.null[c] for p in parts]) if parts else np.empty(0, np.bool_) for c in plan.latest},
        {
            c: (
                np.concatenate([p.numbers[c][0] for p in parts]) if parts else np.empty(0, np.float64),
                np.concatenate([p.numbers[c][1] for p in parts]) if parts else np.empty(0, np.bool_),
            )
            for c in plan.windows
        },
        max(1, len(parts)),
    )


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def whole_table(plan: ScopePlan, rows: Sequence[EntityRow], known_until: int) -> pa.Table:
    """All rows of a source in the order of its dataset, as a custom feature gets them."""
    kept = [r for r in rows if max(r.event_time, r.available_time) <= known_until]
    ordered = sorted(kept, key=lambda r: (r.partition, r.position))
    cells = [_payload(r.payload) for r in ordered if r.payload is not None]
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(plan.scope.columns)
    return pa.table({c: pa.array(values, plan.types[c]) for c, values in zip(plan.scope.columns, columns, strict=True)})
