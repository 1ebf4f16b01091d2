"""Rows of entities as arrays: decoded once, kept while they hold, put together for the kernel per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.features.kernel.columns import NO_FLAGS
from headway.features.online.few import FewRows, Numbers, prepared_numbers, version_ends
from headway.features.online.scopes import Scope
from headway.features.online.store import EntityRow
from headway.features.plan import _numbers as numbers

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

_CUT_FROM = 128

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
class Together:
    """Rows of several entities of one scope side by side; the group of an entity is its number."""

    rows: FewRows
    values: Mapping[str, list[Any]]
    null: Mapping[str, Flags]
    numbers: Mapping[str, Numbers]


@dataclass(frozen=True)
class EntityRows:
    """Row versions of one entity in the order (event time, availability, sequence, identity).

    `here` is False for versions that stand in another entity. `identity` numbers the row identities in their order.
    `end` is when a later version is known; it was found among all versions, so rows may be cut by time. `values` holds
    the latest columns as Python values, `null` which of them are null, `numbers` the aggregated columns.
    """

    event: Ints
    available: Ints
    sequence: Ints
    deleted: Flags
    here: Flags
    identity: Ints
    identities: int
    end: Ints
    newest_available: int
    values: Mapping[str, list[Any]]
    null: Mapping[str, Flags]
    numbers: Mapping[str, Numbers]

    def __len__(self) -> int:
        return len(self.event)

    @cached_property
    def alone(self) -> Together:
        """The entity by itself, ready for the kernel."""
        index = np.flatnonzero(self.here).astype(np.int32)
        rows = FewRows(
            offsets=np.array([0, len(index)], dtype=np.int64),
            index=index,
            event_time=self.event,
            available_time=self.available,
            sequence=self.sequence,
            row_id=self.identity,
            deleted=self.deleted if self.deleted.any() else NO_FLAGS,
            end=self.end,
        )
        return Together(rows, self.values, self.null, self.numbers)

    def visible(self, known_until: int, first: int, last: int) -> EntityRows:
        """The rows that observations up to `last` may see, `first` being as far back as any feature looks.

        Rows that became available after `known_until` are left out.
        """
        if self.newest_available > known_until:
            return self._loaded(known_until).visible(known_until, first, last)
        # It is made where it saves more than it costs.
        if len(self) < _CUT_FROM:
            return self
        low, high = int(self.event.searchsorted(first)), int(self.event.searchsorted(last, "right"))
        if low == 0 and high == len(self):
            return self
        return self._take(slice(low, high))

    def _loaded(self, known_until: int) -> EntityRows:
        kept = np.flatnonzero(self.available <= known_until)
        some = self._take(kept)
        end = version_ends(some.event, some.available, some.sequence, some.here, some.identity, some.identities)
        return replace(some, end=end, newest_available=known_until)

    def _take(self, rows: slice | Ints) -> EntityRows:
        chosen = [rows] if isinstance(rows, slice) else rows.tolist()
        return EntityRows(
            self.event[rows],
            self.available[rows],
            self.sequence[rows],
            self.deleted[rows],
            self.here[rows],
            self.identity[rows],
            self.identities,
            self.end[rows],
            self.newest_available,
            {c: v[rows] if isinstance(rows, slice) else [v[i] for i in chosen] for c, v in self.values.items()},
            {c: n[rows] for c, n in self.null.items()},
            {c: Numbers(n.values[rows], n.null[rows], n.low, n.high) for c, n in self.numbers.items()},
        )


def decode(plan: ScopePlan, rows: Sequence[EntityRow]) -> EntityRows:
    """Decode what the store gave for one entity."""
    identity = [r.identity for r in rows]
    number = {code: n for n, code in enumerate(sorted(set(identity), key=_identity))}
    numbered = np.array([number[code] for code in identity], dtype=np.int64)
    times = np.array([(r.event_time, r.available_time, r.sequence) for r in rows], dtype=np.int64).reshape(-1, 3)
    order = np.lexsort((numbered, times[:, 2], times[:, 1], times[:, 0]))
    event, available, sequence = (np.ascontiguousarray(times[order, i]) for i in range(3))
    identities = numbered[order]
    ordered = [rows[i] for i in order.tolist()]
    deleted = np.array([r.deleted for r in ordered], dtype=np.bool_)
    here = np.array([r.here for r in ordered], dtype=np.bool_)
    columns = _columns(plan, ordered)
    values = {c: columns[c] for c in plan.latest}
    return EntityRows(
        event=event,
        available=available,
        sequence=sequence,
        deleted=deleted,
        here=here,
        identity=identities,
        identities=len(number),
        end=version_ends(event, available, sequence, here, identities, len(number)),
        newest_available=int(available.max(initial=np.iinfo(np.int64).min)),
        values=values,
        null={c: np.array([v is None for v in found], dtype=np.bool_) for c, found in values.items()},
        numbers={c: _numbers(plan, c, columns[c], deleted) for c in plan.windows},
    )


def _columns(plan: ScopePlan, rows: Sequence[EntityRow]) -> dict[str, list[Any]]:
    empty = [None] * len(plan.scope.columns)
    cells = [empty if r.payload is None else _payload(r.payload) for r in rows]
    if not cells:
        return {c: [] for c in plan.scope.columns}
    return {c: list(found) for c, found in zip(plan.scope.columns, zip(*cells, strict=True), strict=True)}


def _numbers(plan: ScopePlan, column: str, values: list[Any], deleted: Flags) -> Numbers:
    array = pa.array(values, _plain(plan.types[column]))
    return prepared_numbers(*numbers(pa.chunked_array([array]), column), deleted)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def together(plan: ScopePlan, parts: Sequence[EntityRows]) -> Together:
    """Put entities side by side. Each is complete in itself, so identities are numbered apart per entity."""
    from headway.features.kernel import compiled

    if len(parts) < 2:
        return (parts[0] if parts else decode(plan, [])).alone
    lengths = [len(p) for p in parts]
    here = np.concatenate([p.here for p in parts])
    key = np.where(here, np.repeat(np.arange(len(parts), dtype=np.int64), lengths), np.int64(-1))
    start = np.cumsum([0, *(p.identities for p in parts[:-1])])
    deleted = np.concatenate([p.deleted for p in parts])
    offsets = compiled.group_offsets(key, NO_FLAGS, len(parts))
    rows = FewRows(
        offsets=offsets,
        index=compiled.group_indices(key, NO_FLAGS, offsets),
        event_time=np.concatenate([p.event for p in parts]),
        available_time=np.concatenate([p.available for p in parts]),
        sequence=np.concatenate([p.sequence for p in parts]),
        row_id=np.concatenate([p.identity for p in parts]) + np.repeat(start, lengths),
        deleted=deleted if deleted.any() else NO_FLAGS,
        end=np.concatenate([p.end for p in parts]),
    )
    return Together(
        rows,
        {c: [v for p in parts for v in p.values[c]] for c in plan.latest},
        {c: np.concatenate([p.null[c] for p in parts]) for c in plan.latest},
        {c: _numbers_together([p.numbers[c] for p in parts]) for c in plan.windows},
    )


def _numbers_together(parts: Sequence[Numbers]) -> Numbers:
    return Numbers(
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.null for p in parts]),
        min(p.low for p in parts),
        max(p.high for p in parts),
    )


def whole_table(plan: ScopePlan, rows: Sequence[EntityRow], known_until: int) -> pa.Table:
    """All rows of a source in the order of its dataset, as a custom feature gets them."""
    kept = [r for r in rows if r.available_time <= known_until]
    ordered = sorted(kept, key=lambda r: (r.partition, r.position))
    cells = [_payload(r.payload) for r in ordered if r.payload is not None]
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(plan.scope.columns)
    return pa.table({c: pa.array(values, plan.types[c]) for c, values in zip(plan.scope.columns, columns, strict=True)})
