"""Features of requests from an online store: the compiled plan of the snapshots over the rows of the entities asked.

What a cell holds does not depend on what else is loaded, so the rows of the entities asked give the bits that all rows
would give: the same kernel, the same functions. Rows are answered one by one from plans that were made once; an Arrow
table is built only for the functions of a pipeline, which are declared over one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.partitions import PartitionScheme
from headway.datasets.zones import START_OF_TIME_US, iso
from headway.declaration import PipelineSpec, duration_us
from headway.features.assemble import companions
from headway.features.contract import code_digest, contract_digest
from headway.features.inputs import PinnedInputs
from headway.features.online.derived import derived_values
from headway.features.online.entity_rows import EntityRows, ScopePlan, whole_table
from headway.features.online.layout import layout_of
from headway.features.online.pins import Pins, in_reach, pins_of, seen_of
from headway.features.online.plain import plain_column, plain_rows, table_of, typed_column
from headway.features.online.scopes import (
    WHOLE_SOURCE,
    Scope,
    column_types,
    entity_code,
    key_values,
    scopes_of,
)
from headway.features.online.store import (
    NO_ENTITY,
    Entity,
    EntityRow,
    OnlineNotReady,
    OnlineState,
    OnlineStore,
    StoreKey,
)
from headway.features.online.views import HIT, NULL_VALUE, ViewCells, ViewPlan, answer, view_plan
from headway.features.plan import CustomFunction, compile_plan, first_observed
from headway.features.reach import Interval, bounds, event_interval, memory
from headway.loading import Pipeline
from headway.serving.features import (
    PARTITION_NOT_READ,
    WATERMARK_BEHIND,
    Freshness,
    as_kept,
    by_partition,
    label_inputs,
    refuse_quarantined,
    require_askable,
)
from headway.serving.requests import RequestProblem, RequestsRefused, serving_of

TOO_OLD = "too_old"
_NONE = np.iinfo(np.int64).min
ENTITIES_KEPT = 20_000


@dataclass(frozen=True)
class OnlineComputed:
    """Features of requests, in the order of the requests, with the state that they rest on.

    `requests` are as they may be kept, `asked` their rows as plain values. `rows` holds the feature values of each
    request as plain values, in the columns of `schema`; `values` is the same as `ComputedRequests` has it. `moments`
    are the observations, microseconds UTC.
    """

    requests: pa.Table
    asked: Sequence[tuple[Any, ...]]
    schema: pa.Schema
    rows: Sequence[tuple[Any, ...]]
    moments: Sequence[int]
    freshness: Mapping[str, Sequence[Freshness]]
    state: OnlineState

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def values(self) -> pa.Table:
        """The values table."""
        return table_of(self.schema, self.rows)

    @property
    def observed(self) -> NDArray[np.int64]:
        """The observations as an array."""
        return np.array(self.moments, dtype=np.int64)


@dataclass(frozen=True)
class _Place:
    """Label columns that name entities of a scope, in order of the scope's keys.

    `plain`: their values are compared as they are (whole numbers, text in normal form C).
    """

    scope: Scope
    columns: tuple[str, ...]
    plain: bool


@dataclass(frozen=True)
class _Lookup:
    """One view: its plan, which of the places it asks, and what its freshness is measured by (microseconds)."""

    name: str
    plan: ViewPlan
    source: str
    place: int
    memory: int
    lateness: int | None
    limit: int | None


class OnlineFeatures:
    """Answers for one pipeline; for one thread at a time.

    Decoded rows of entities are kept, the least recently used of more than `entities_kept` go first. They are read
    again when the store says that rows changed, whichever process wrote them.

    Custom features get the whole of their source, as in snapshots, and the first observation of the rows that are
    asked together: `rows_independent` is False with them, and requests must then be computed one by one.
    """

    def __init__(
        self, pipeline: Pipeline, online: OnlineStore, tenant: str, *, entities_kept: int = ENTITIES_KEPT
    ) -> None:
        spec = self._spec = pipeline.spec
        self._online = online
        self._tenant = tenant
        self._plan = compile_plan(pipeline)
        self._scopes = scopes_of(self._plan)
        self._scope_plans = {s.scope_id: self._scope_plan(s) for s in self._scopes.all}
        plans = self._view_plans()
        types = {name: self._scope_plans[scope.scope_id].types for name, scope in self._scopes.of_view.items()}
        self._layout = layout_of(spec, self._plan, types, [n for plan in plans.values() for n in plan.names])
        self._places = self._places_asked()
        self._lookups = tuple(self._lookup(name, plan) for name, plan in plans.items())
        read = {name for derived in self._plan.derived.values() for name in derived.inputs}
        self._read_of_labels = {f.name: f.type for f in self._layout.labels if f.name in read}
        self._read_of_views = {
            name: (number, place, self._layout.schema.field(name).type)
            for number, lookup in enumerate(self._lookups)
            for place, name in enumerate(lookup.plan.names)
            if name in read
        }
        serving, source = serving_of(spec), spec.sources[spec.label.source]
        self._filled = {f.column: name for name, f in serving.request.items() if f.column}
        self._before = duration_us(serving.before)
        self._personal = bool(source.privacy.personal)
        # Then the request may contradict itself, and must be read as declared.
        self._observation_given = spec.label.observation_time in self._filled
        assert source.partition is not None
        self._scheme = PartitionScheme.from_spec(source.partition)
        # Instants that are known to lie in the label source's calendar, which is one interval.
        self._calendar: tuple[int, int] | None = None
        self._dated = self._filled.get(source.partition.column) if source.partition.column in self._labels else None
        partitioned = [s for s in self._scopes.sources if spec.sources[s].partition is not None]
        self._ahead = {s: bounds(spec.sources[s])[0] for s in partitioned}
        self._digests = (contract_digest(pipeline), code_digest(pipeline))
        self._kept = entities_kept
        self._key: StoreKey | None = None
        self._seen = (0, 0)
        self._state: OnlineState | None = None
        self._pins: Pins | None = None
        self._whole = PinnedInputs({}, {})
        self._entities: dict[str, dict[tuple[Any, ...], Entity]] = {}
        self._rows: OrderedDict[Entity, EntityRows | Sequence[EntityRow]] = OrderedDict()

    @property
    def rows_independent(self) -> bool:
        """Whether a row's features are the same whatever is asked together with it."""
        return not self._plan.custom

    def state(self) -> OnlineState:
        """What the store answers from now.

        Raises:
            OnlineNotReady: it was never filled for these features.
            OnlineUnavailable: it cannot be read.
        """
        self._refresh([])
        assert self._state is not None
        return self._state

    def compute(self, requests: pa.Table, now: int) -> OnlineComputed:
        """Every feature of every request as of its observation.

        Args:
            requests: what `read_requests` gave; counted from 1 in messages.
            now: the world's time, microseconds UTC.

        Raises:
            RequestsRefused: an observation later than `now`, before what the store keeps, or outside the calendar.
            OnlineNotReady: the store was never filled for these features.
            OnlineUnavailable: it cannot be read.
            InputQuarantined: as `compute_features`.
        """
        spec = self._spec
        asked = {n: plain_column(c) for n, c in zip(requests.column_names, requests.columns, strict=True)}
        labels = self._label_columns(requests, asked)
        observed: list[int] = labels[spec.label.observation_time]
        if observed and max(observed) > now:
            require_askable(spec, np.array(observed, dtype=np.int64), now)
        entities = [self._coded(place, labels) for place in self._places]
        whole = [(s.scope_id, WHOLE_SOURCE) for s in self._scopes.of_custom.values()]
        self._refresh([*whole, *(entity for of_place in entities for entity in of_place if entity[1])])
        assert self._state is not None
        self._require_kept(observed, self._state)
        groups = self._groups(observed, requests, asked)
        views = [
            [self._answer(lookup, entity, time) for entity, time in zip(entities[lookup.place], observed, strict=True)]
            for lookup in self._lookups
        ]
        functions = self._functions(labels, views, [rows for rows, _ in groups])
        behind = [[""] * len(observed) for _ in self._lookups]
        for rows, pinned in groups:
            watermarks = pinned.watermarks()
            for lookup, of_view in zip(self._lookups, behind, strict=True):
                hidden = _hidden(spec, pinned, lookup.source)
                for row in rows:
                    of_view[row] = _incompleteness(lookup, hidden, watermarks.get(lookup.source), observed[row])
        kept = as_kept(spec, requests) if self._personal else requests
        return OnlineComputed(
            requests=kept,
            asked=plain_rows(kept) if self._personal else list(zip(*asked.values(), strict=True)),
            schema=self._layout.schema,
            rows=self._laid_out(labels, views, functions, behind),
            moments=observed,
            freshness={
                lookup.name: tuple(_freshness(lookup, *of_row) for of_row in zip(cells, observed, why, strict=True))
                for lookup, cells, why in zip(self._lookups, views, behind, strict=True)
            },
            state=self._state,
        )

    @property
    def _labels(self) -> list[str]:
        return self._layout.labels.names

    def _scope_plan(self, scope: Scope) -> ScopePlan:
        views = [v for name, v in self._plan.views.items() if self._scopes.of_view[name] == scope]
        latest = dict.fromkeys(f.latest for v in views for f in v.spec.latest_features().values())
        windows = dict.fromkeys(f.window for v in views for f in v.spec.window_features().values())
        return ScopePlan(scope, column_types(self._spec, scope), tuple(latest), tuple(windows))

    def _view_plans(self) -> dict[str, ViewPlan]:
        beside = companions(self._spec)
        of_view = self._scopes.of_view
        return {
            name: view_plan(view, beside, self._scope_plans[of_view[name].scope_id].windows)
            for name, view in self._plan.views.items()
        }

    def _places_asked(self) -> tuple[_Place, ...]:
        found: dict[_Place, None] = {}
        for name in self._plan.views:
            found[self._place(name)] = None
        return tuple(found)

    def _place(self, view: str) -> _Place:
        scope = self._scopes.of_view[view]
        left = {right: left for left, right in self._plan.views[view].spec.keys.items()}
        columns = tuple(left[right] for right in scope.keys)
        kinds = [self._layout.labels.field(c).type for c in columns]
        return _Place(scope, columns, all(pa.types.is_string(k) or pa.types.is_int64(k) for k in kinds))

    def _lookup(self, name: str, plan: ViewPlan) -> _Lookup:
        spec = plan.view.spec
        group = serving_of(self._spec).groups.get(name)
        limit = None if group is None or group.max_staleness is None else duration_us(group.max_staleness)
        return _Lookup(
            name,
            plan,
            spec.source,
            self._places.index(self._place(name)),
            memory(spec),
            None if spec.allowed_lateness is None else duration_us(spec.allowed_lateness),
            limit,
        )

    def _label_columns(self, requests: pa.Table, asked: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """What features may read of each request, as plain values: as `label_inputs` has it."""
        moments: list[int | None] = asked[serving_of(self._spec).observed]
        least = START_OF_TIME_US + self._before
        if self._personal or self._observation_given or any(m is None or m < least for m in moments):
            inputs = label_inputs(self._spec, requests)
            return {name: plain_column(inputs.column(name)) for name in self._labels}
        nothing = [None] * len(moments)
        found = {n: asked[self._filled[n]] if n in self._filled else nothing for n in self._labels}
        found[self._spec.label.observation_time] = [m - self._before for m in moments if m is not None]
        return found

    def _coded(self, place: _Place, labels: Mapping[str, list[Any]]) -> list[Entity]:
        """The entity that each row asks a place for."""
        scope_id = place.scope.scope_id
        known = self._entities.setdefault(scope_id, {})
        if len(known) > self._kept:
            known.clear()
        columns = [labels[c] for c in place.columns]
        if place.plain and all(_is_compared_as_is(v) for column in columns for v in column):
            values = zip(*columns, strict=True)
        else:
            types = [self._layout.labels.field(c).type for c in place.columns]
            arrays = [typed_column(c, t) for c, t in zip(columns, types, strict=True)]
            values = key_values(dict(zip(place.scope.keys, arrays, strict=True)), place.scope.keys)
        return [known.get(parts) or known.setdefault(parts, (scope_id, entity_code(parts))) for parts in values]

    def _refresh(self, wanted: Sequence[Entity]) -> None:
        """Bring the state and the rows of entities, in one round trip unless the store changed meanwhile."""
        key = self._key or self._find()
        needed = dict.fromkeys(wanted)
        held = [e for e in needed if e in self._rows]
        missing = [e for e in needed if e not in self._rows]
        read = self._online.read(key, self._seen, missing, held)
        if not read.sequence:
            self._key = None
            raise self._not_ready()
        if read.state is not None and self._went_back(read.state):
            # Rows that were known then are not any more, and rows are decoded for a time that only grows.
            self._rows.clear()
            self._seen, self._state = (0, 0), None
            self._refresh(wanted)
            return
        if read.rows_sequence != self._seen[1]:
            self._rows.clear()
        else:
            for entity in held:
                self._rows.move_to_end(entity)
        if read.state is not None:
            self._state = read.state
            self._pins = pins_of(read.state, read.state.marks)
            self._whole = PinnedInputs({}, {}, {}, seen_of(self._pins))
        self._seen = (read.sequence, read.rows_sequence)
        for entity, rows in read.rows.items():
            plan = self._scope_plans[entity[0]]
            self._rows[entity] = EntityRows(plan, rows) if plan.scope.keys else rows
        while len(self._rows) > max(self._kept, len(needed)):
            self._rows.popitem(last=False)

    def _went_back(self, state: OnlineState) -> bool:
        known = {} if self._state is None else self._state.known_until
        return any(state.known_until.get(source, _NONE) < until for source, until in known.items())

    def _find(self) -> StoreKey:
        """The feature set version in the store whose contract and code are ours."""
        for state in self._online.states(self._tenant, self._spec.name):
            if (state.contract_digest, state.code_digest) == self._digests:
                self._key = StoreKey(self._tenant, self._spec.name, state.feature_set_version)
                self._seen, self._state = (0, 0), None
                self._rows.clear()
                return self._key
        raise self._not_ready()

    def _not_ready(self) -> OnlineNotReady:
        return OnlineNotReady(
            f"the online store holds no features of {self._spec.name} as they are declared now",
            "fill it first (the asset online_features, or `headway serve` without --no-sync)",
        )

    def _groups(
        self, observed: Sequence[int], requests: pa.Table, asked: Mapping[str, list[Any]]
    ) -> list[tuple[Sequence[int], PinnedInputs]]:
        """The rows that `compute_features` would compute together, and what each group rests on.

        All rows are one group where that makes no difference.
        """
        whole = self.rows_independent and self._is_whole(observed)
        if whole and self._calendar is not None and self._between(observed, asked, *self._calendar):
            return [(range(len(observed)), self._whole)]
        moments = np.array(observed, dtype=np.int64)
        groups = list(by_partition(self._spec, moments, requests))
        windows = [self._scheme.window(partition) for partition, _ in groups]
        known = [self._calendar] if self._calendar is not None else []
        if windows or known:
            self._calendar = (min(w[0] for w in [*known, *windows]), max(w[1] for w in [*known, *windows]))
        return [(rows.tolist(), self._pinned([observed[i] for i in rows.tolist()])) for _, rows in groups]

    def _between(self, observed: Sequence[int], asked: Mapping[str, list[Any]], first: int, end: int) -> bool:
        """Whether the time that decides on a request's label partition lies in [first, end) in all rows."""
        times = observed if self._dated is None else asked[self._dated]
        return all(time is not None and first <= time < end for time in times)

    def _is_whole(self, observed: Sequence[int]) -> bool:
        """Whether the store holds every partition that observations may need."""
        assert self._state is not None
        state = self._state
        if state.skipped or state.absent or not observed or min(observed) < state.since:
            return False
        last = max(observed)
        return all(last + ahead < state.covered.get(s, _NONE) for s, ahead in self._ahead.items())

    def _require_kept(self, observed: Sequence[int], state: OnlineState) -> None:
        """Refuse observations whose rows may have been pruned."""
        field = serving_of(self._spec).observed
        problems = [
            RequestProblem(
                number,
                field,
                f"the prediction is asked for as of {iso(moment)}, before what is kept online",
                f"rows are kept for observations from {iso(state.since)} on; use `headway predict`",
            )
            for number, moment in enumerate(observed, 1)
            if moment < state.since
        ]
        if problems:
            raise RequestsRefused("requests", problems)

    def _pinned(self, observed: Sequence[int]) -> PinnedInputs:
        """What a group of observations rests on; partitions are looked up only where one could be missing."""
        assert self._pins is not None
        if self._is_whole(observed):
            return self._whole
        found = in_reach(self._spec, self._pins, min(observed), max(observed))
        refuse_quarantined(self._spec, found)
        return found

    def _answer(self, lookup: _Lookup, entity: Entity, time: int) -> ViewCells:
        if entity[1] == NO_ENTITY:
            return lookup.plan.unkeyed
        assert self._state is not None
        rows = self._rows[entity]
        assert isinstance(rows, EntityRows)
        return answer(lookup.plan, rows.known(self._state.known_until[lookup.source]), time)

    def _functions(
        self, labels: Mapping[str, list[Any]], views: Sequence[Sequence[ViewCells]], groups: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        """The values of custom and derived features, which a pipeline's own functions give over Arrow columns."""
        rows = len(labels[self._spec.label.observation_time])
        columns: dict[str, pa.Array] = {}
        for name, (view, place, kind) in self._read_of_views.items():
            columns[name] = typed_column([cells.cells[place] for cells in views[view]], kind)
        for name, kind in self._read_of_labels.items():
            columns[name] = typed_column(labels[name], kind)
        found: list[list[Any]] = []
        for name, custom in self._plan.custom.items():
            values = self._custom_values(custom, labels, groups, rows)
            columns[name] = pa.array(values, custom.type)
            found.append(values)
        return [*found, *derived_values(self._plan.derived.values(), columns, rows)]

    def _custom_values(
        self, custom: CustomFunction, labels: Mapping[str, list[Any]], groups: Sequence[Sequence[int]], rows: int
    ) -> list[Any]:
        assert self._state is not None
        scope = self._scopes.of_custom[custom.name]
        held = self._rows[scope.scope_id, WHOLE_SOURCE]
        assert not isinstance(held, EntityRows)
        table = whole_table(self._scope_plans[scope.scope_id], held, self._state.known_until[scope.source])
        inputs = pa.table({f.name: typed_column(labels[f.name], f.type) for f in self._layout.labels})
        found: list[Any] = [None] * rows
        for of_group in groups:
            some = inputs.take(pa.array(of_group, pa.int64()))
            first = first_observed(some, self._plan.observation_time)
            values = custom.run(some, custom.rows(table, first)).value.to_pylist()
            for row, value in zip(of_group, values, strict=True):
                found[row] = value
        return found

    def _laid_out(
        self,
        labels: Mapping[str, list[Any]],
        views: Sequence[Sequence[ViewCells]],
        functions: Sequence[Sequence[Any]],
        behind: Sequence[Sequence[str]],
    ) -> list[tuple[Any, ...]]:
        """The rows of the values table."""
        found: list[tuple[Any, ...]] = []
        for number, of_labels in enumerate(zip(*labels.values(), strict=True)):
            flat: list[Any] = [None, *of_labels]
            for view in views:
                flat += view[number].cells
            for values in functions:
                value = values[number]
                flat += (value, None, NULL_VALUE if value is None else HIT)
            flat += [bool(of_view[number]) for of_view in behind]
            found.append(self._layout.row(flat))
        return found


def _is_compared_as_is(value: object) -> bool:
    return not isinstance(value, str) or value.isascii() or is_normalized("NFC", value)


def _hidden(spec: PipelineSpec, pinned: PinnedInputs, source: str) -> list[Interval]:
    """Where events of a source may lie that were not read."""
    partition = spec.sources[source].partition
    found: list[Interval] = []
    for name in (*pinned.skipped.get(source, ()), *pinned.absent.get(source, ())):
        assert partition is not None
        found.append(event_interval(spec.sources[source], PartitionScheme.from_spec(partition).window(name)))
    return found


def _incompleteness(lookup: _Lookup, hidden: Sequence[Interval], watermark: int | None, time: int) -> str:
    """Why a view may be incomplete as of an observation, as `incomplete_flags` has it; empty: it is not."""
    if lookup.lateness is not None and (watermark is None or watermark < time - lookup.lateness):
        return WATERMARK_BEHIND
    unread = any(part.first <= time and time - lookup.memory <= part.last for part in hidden)
    return PARTITION_NOT_READ if unread else ""


def _freshness(lookup: _Lookup, cells: ViewCells, observed: int, why: str) -> Freshness:
    """As `freshness_of`, and a fresh view that is older than declared is stale."""
    newest = cells.newest
    age = None if newest is None else (observed - newest) / 1_000_000
    if not cells.answered:
        return Freshness(newest, age, "missing", cells.reason, why)
    if not why and lookup.limit is not None and age is not None and age * 1_000_000 > lookup.limit:
        # Whatever it is called, the model gets what a snapshot would hold.
        return Freshness(newest, age, "stale", TOO_OLD, TOO_OLD)
    return Freshness(newest, age, "stale" if why else "fresh", why, why)
