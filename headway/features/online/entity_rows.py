"""Row versions of one entity, decoded once and kept while they hold: in rank order, without those that never count.

Rank is the order (event time, availability, sequence, identity) of the kernel. What follows from the rows alone (which
version ends when, which tie) is worked out when they are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.features.kernel.columns import NO_FLAGS
from headway.features.kernel.types import NonFiniteValue
from headway.features.online.scopes import Scope
from headway.features.online.store import EntityRow
from headway.features.plan import _numbers as numbers

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

NEVER = np.iinfo(np.int64).max
_NONE = np.iinfo(np.int64).min

_payload = msgspec.msgpack.Decoder(list[Any]).decode
_identity = msgspec.json.Decoder(list[Any]).decode


@dataclass(frozen=True)
class ScopePlan:
    """What is decoded of a scope's rows: columns whose newest value is asked for, and columns that are aggregated."""

    scope: Scope
    types: Mapping[str, pa.DataType]
    latest: tuple[str, ...]
    windows: tuple[str, ...]


@dataclass(frozen=True)
class Numbers:
    """Aggregated columns as `online.compiled.windows_at` takes them; deleted versions are left out.

    `times` is (event time, availability, end; rows), `values` and `missing` (columns, rows), `units` the lowest
    exponent of each column and how long its sums and sums of squares are.
    """

    times: Ints
    values: Floats
    missing: Flags
    units: Ints


@dataclass(frozen=True)
class Known:
    """The versions of an entity that are known, in rank order; `end` is when a later version of each is known.

    `values` holds the latest columns as plain values. `ties` remembers by column whether two rows tie.
    """

    event: list[int]
    available: list[int]
    end: list[int]
    place: list[tuple[int, int, int]]
    identity: list[int]
    deleted: list[bool]
    values: Mapping[str, list[Any]]
    numbers: Numbers
    ties: dict[str, bool] = field(default_factory=dict[str, bool])

    def skipped(self, column: str) -> list[bool]:
        """Versions that a column whose last known value is asked for looks past: null, and not deleted."""
        return [v is None and not gone for v, gone in zip(self.values[column], self.deleted, strict=True)]

    def is_tied(self, column: str) -> bool:
        """Whether rows of different identity tie, among those that `column` looks at; "": among all."""
        if column not in self.ties:
            skip = self.skipped(column) if column else [False] * len(self.event)
            seen = [(p, i) for p, i, out in zip(self.place, self.identity, skip, strict=True) if not out]
            self.ties[column] = any(p == q and i != j for (p, i), (q, j) in pairwise(seen))
        return self.ties[column]


class EntityRows:
    """What the store gave for one entity."""

    def __init__(self, plan: ScopePlan, rows: Sequence[EntityRow]) -> None:
        self._plan = plan
        self._rows = rows
        self._newest = max((r.available_time for r in rows), default=_NONE)
        self._until = _NONE
        self._known: Known | None = None

    def known(self, until: int) -> Known:
        """The versions that became available by an instant, which never goes back."""
        until = min(until, self._newest)
        if self._known is None or until != self._until:
            self._known = decode(self._plan, [r for r in self._rows if r.available_time <= until])
            self._until = until
            if until == self._newest:
                self._rows = ()
        return self._known


def decode(plan: ScopePlan, rows: Sequence[EntityRow]) -> Known:
    """Decode row versions of one entity. Raises the kernel's `NonFiniteValue`."""
    identity = [r.identity for r in rows]
    number = {code: n for n, code in enumerate(sorted(set(identity), key=_identity))}
    numbered = np.array([number[code] for code in identity], dtype=np.int64)
    times = np.array([(r.event_time, r.available_time, r.sequence) for r in rows], dtype=np.int64).reshape(-1, 3)
    order = np.lexsort((numbered, times[:, 2], times[:, 1], times[:, 0]))
    event, available, sequence = (np.ascontiguousarray(times[order, i]) for i in range(3))
    identities = numbered[order]
    ordered = [rows[i] for i in order.tolist()]
    here = np.array([r.here for r in ordered], dtype=np.bool_)
    deleted = np.array([r.deleted for r in ordered], dtype=np.bool_)
    end = _version_ends(event, available, sequence, here, identities, len(number))
    columns = _columns(plan, ordered)
    chosen = np.flatnonzero(here & (end > np.maximum(event, available)))
    kept = chosen.tolist()
    return Known(
        event=event[chosen].tolist(),
        available=available[chosen].tolist(),
        end=end[chosen].tolist(),
        place=list(zip(*(c[chosen].tolist() for c in (event, available, sequence)), strict=True)),
        identity=identities[chosen].tolist(),
        deleted=deleted[chosen].tolist(),
        values={c: [columns[c][i] for i in kept] for c in plan.latest},
        numbers=_numbers(plan, columns, np.stack([event, available, end]), deleted, chosen[~deleted[chosen]]),
    )


def _version_ends(event: Ints, available: Ints, sequence: Ints, here: Flags, identity: Ints, identities: int) -> Ints:
    """When each row of one entity is superseded, as the kernel has it."""
    from headway.features.kernel import compiled

    end = np.full(len(event), NEVER, dtype=np.int64)
    if identities < len(event):
        offsets = compiled.group_offsets(identity, NO_FLAGS, identities)
        index = compiled.group_indices(identity, NO_FLAGS, offsets)
        owner = np.zeros(identities, dtype=np.int64)
        key = np.where(here, np.int64(0), np.int64(-1))
        compiled.version_ends(offsets, index, owner, 0, key, event, available, sequence, end)
    return end


def _columns(plan: ScopePlan, rows: Sequence[EntityRow]) -> dict[str, list[Any]]:
    empty = [None] * len(plan.scope.columns)
    cells = [empty if r.payload is None else _payload(r.payload) for r in rows]
    if not cells:
        return {c: [] for c in plan.scope.columns}
    return {c: list(found) for c, found in zip(plan.scope.columns, zip(*cells, strict=True), strict=True)}


def _numbers(plan: ScopePlan, columns: Mapping[str, list[Any]], times: Ints, deleted: Flags, chosen: Ints) -> Numbers:
    values = np.empty((len(plan.windows), len(chosen)), dtype=np.float64)
    missing = np.empty((len(plan.windows), len(chosen)), dtype=np.bool_)
    units = np.empty((3, len(plan.windows)), dtype=np.int64)
    for place, column in enumerate(plan.windows):
        array = pa.array(columns[column], _plain(plan.types[column]))
        found, null = numbers(pa.chunked_array([array]), column)
        units[:, place] = exponents(np.array(found, dtype=np.float64), np.array(null | deleted, dtype=np.bool_))
        missing[place] = null[chosen]
        # Adding zero turns -0.0 into 0.0: the two are one value.
        values[place] = np.where(missing[place], 0.0, found[chosen] + 0.0)
    return Numbers(np.ascontiguousarray(times[:, chosen]), values, missing, units)


def exponents(values: Floats, ignored: Flags) -> tuple[int, int, int]:
    """The lowest exponent of a column, and how many limbs its sums and sums of squares need.

    Raises:
        NonFiniteValue: a value that is not ignored is infinite or NaN.
    """
    from headway.features.kernel import compiled

    low, high = compiled.exponent_range(values.view(np.int64), ignored)
    if high < 0 and low > 0:
        raise NonFiniteValue(int(-1 - high), float(values[-1 - high]))
    return int(low), compiled.limbs_needed(low, high), compiled.limbs_needed(2 * low, 2 * high)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def whole_table(plan: ScopePlan, rows: Sequence[EntityRow], known_until: int) -> pa.Table:
    """All rows of a source in the order of its dataset, as a custom feature gets them."""
    kept = [r for r in rows if r.available_time <= known_until]
    ordered = sorted(kept, key=lambda r: (r.partition, r.position))
    cells = [_payload(r.payload) for r in ordered if r.payload is not None]
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(plan.scope.columns)
    return pa.table({c: pa.array(values, plan.types[c]) for c, values in zip(plan.scope.columns, columns, strict=True)})
