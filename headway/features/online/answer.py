"""Features of requests from an online store: the compiled plan of the snapshots over the rows of the entities asked.

What a cell holds does not depend on what else is loaded, so the rows of the entities asked give the bits that all rows
would give: the same kernel, the same functions, the same tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.zones import iso
from headway.declaration import duration_us
from headway.features import kernel
from headway.features.assemble import values_table
from headway.features.clocks import instants
from headway.features.contract import code_digest, contract_digest
from headway.features.inputs import PinnedInputs, Seen
from headway.features.kernel import NULL_KEY, Observations, Reason
from headway.features.labels import LabelRows
from headway.features.online.entity_rows import EntityRows, ScopePlan, Together, decode, together, whole_table
from headway.features.online.few import Asked, in_order, latest, window
from headway.features.online.pins import Pins, in_reach, pins_of, seen_of
from headway.features.online.scopes import (
    WHOLE_SOURCE,
    Scope,
    column_types,
    encode_values,
    key_values,
    scopes_of,
)
from headway.features.online.store import (
    NO_ENTITY,
    Entity,
    OnlineNotReady,
    OnlineState,
    OnlineStore,
    StoreKey,
)
from headway.features.plan import Cells, CompiledView, UndecidedTie, compile_plan, first_observed
from headway.features.plan import _forget as forget
from headway.features.plan import _timestamps as timestamps
from headway.features.reach import bounds, memory
from headway.features.snapshot import incomplete_flags
from headway.loading import Pipeline
from headway.serving.features import (
    Freshness,
    as_kept,
    by_partition,
    freshness_of,
    label_inputs,
    refuse_quarantined,
    require_askable,
    without_outcome,
)
from headway.serving.requests import RequestProblem, RequestsRefused, serving_of

TOO_OLD = "too_old"
ENTITIES_KEPT = 20_000


@dataclass(frozen=True)
class OnlineComputed:
    """Features of requests, in the order of the requests; as `ComputedRequests`, with the state that they rest on."""

    requests: pa.Table
    values: pa.Table
    observed: NDArray[np.int64]
    freshness: Mapping[str, tuple[Freshness, ...]]
    state: OnlineState

    def __len__(self) -> int:
        return self.requests.num_rows


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
        self._spec = pipeline.spec
        self._online = online
        self._tenant = tenant
        self._plan = compile_plan(pipeline)
        self._scopes = scopes_of(self._plan)
        self._scope_plans = {s.scope_id: self._scope_plan(s) for s in self._scopes.all}
        self._before = {s: bounds(self._spec.sources[s])[0] for s in self._scopes.sources}
        self._digests = (contract_digest(pipeline), code_digest(pipeline))
        self._kept = entities_kept
        self._key: StoreKey | None = None
        self._seen = (0, 0)
        self._state: OnlineState | None = None
        self._pins: Pins | None = None
        self._parts: dict[str, Seen] = {}
        self._rows: OrderedDict[Entity, EntityRows | Sequence[Any]] = OrderedDict()

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
        inputs = label_inputs(spec, requests)
        observed, valid = instants(inputs.column(spec.label.observation_time), spec.label.observation_time)
        require_askable(spec, observed, now)
        asked = {view: self._asked(compiled, inputs) for view, compiled in self._plan.views.items()}
        whole = [(s.scope_id, WHOLE_SOURCE) for s in self._scopes.of_custom.values()]
        self._refresh([*whole, *(entity for entities in asked.values() for entity in entities if entity[1])])
        assert self._state is not None
        assert self._pins is not None
        self._require_kept(observed, self._state)
        groups = list(by_partition(spec, observed, requests))
        pinned = [self._pinned(observed[rows]) for _, rows in groups]
        labels = without_outcome(spec, inputs)
        cells = self._cells(inputs, observed, valid, asked, groups)
        flags = {v: np.zeros(len(observed), dtype=np.bool_) for v in spec.features.views}
        freshness: dict[str, list[Freshness | None]] = {v: [None] * len(observed) for v in spec.features.views}
        for (_, rows), rests in zip(groups, pinned, strict=True):
            one = len(groups) == 1
            some = labels if one else LabelRows(labels.inputs.take(rows), labels.outcome.take(rows), {})
            own = cells if one else {n: c.take(rows) for n, c in cells.items()}
            for view, behind in incomplete_flags(spec, some, rests).items():
                flags[view][rows] = behind
                for row, found in zip(rows.tolist(), freshness_of(spec, view, some, rests, own), strict=True):
                    freshness[view][row] = self._aged(view, found)
        return OnlineComputed(
            requests=as_kept(spec, requests),
            values=values_table(spec, labels, cells, flags).combine_chunks(),
            observed=observed,
            freshness={v: tuple(f for f in found if f is not None) for v, found in freshness.items()},
            state=self._state,
        )

    def _scope_plan(self, scope: Scope) -> ScopePlan:
        views = [v for name, v in self._plan.views.items() if self._scopes.of_view[name] == scope]
        latest = dict.fromkeys(f.latest for v in views for f in v.spec.latest_features().values())
        windows = dict.fromkeys(f.window for v in views for f in v.spec.window_features().values())
        endless = any(v.spec.latest_features() and v.spec.lookback is None for v in views)
        furthest = max((memory(v.spec) for v in views), default=0)
        return ScopePlan(
            scope, column_types(self._spec, scope), tuple(latest), tuple(windows), None if endless else furthest
        )

    def _asked(self, view: CompiledView, inputs: pa.Table) -> list[Entity]:
        """The entity that each row asks a view for."""
        scope = self._scopes.of_view[view.name]
        left = {right: left for left, right in view.spec.keys.items()}
        values = key_values({right: inputs.column(left[right]) for right in scope.keys}, scope.keys)
        return [
            (scope.scope_id, NO_ENTITY if any(v is None for v in parts) else encode_values(parts)) for parts in values
        ]

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
        if read.rows_sequence != self._seen[1]:
            self._rows.clear()
        else:
            for entity in held:
                self._rows.move_to_end(entity)
        if read.state is not None:
            self._state = read.state
            self._pins = pins_of(read.state, read.state.marks)
            self._parts = seen_of(self._pins)
        self._seen = (read.sequence, read.rows_sequence)
        for entity, rows in read.rows.items():
            plan = self._scope_plans[entity[0]]
            self._rows[entity] = decode(plan, rows) if plan.scope.keys else rows
        while len(self._rows) > max(self._kept, len(needed)):
            self._rows.popitem(last=False)

    def _find(self) -> StoreKey:
        """The feature set version in the store whose contract and code are ours."""
        for state in self._online.states(self._tenant, self._spec.name):
            if (state.contract_digest, state.code_digest) == self._digests:
                self._key = StoreKey(self._tenant, self._spec.name, state.feature_set_version)
                self._seen = (0, 0)
                self._rows.clear()
                return self._key
        raise self._not_ready()

    def _not_ready(self) -> OnlineNotReady:
        return OnlineNotReady(
            f"the online store holds no features of {self._spec.name} as they are declared now",
            "fill it first (the asset online_features, or `headway serve` without --no-sync)",
        )

    def _require_kept(self, observed: NDArray[np.int64], state: OnlineState) -> None:
        """Refuse observations whose rows may have been pruned."""
        field = serving_of(self._spec).observed
        problems = [
            RequestProblem(
                int(i) + 1,
                field,
                f"the prediction is asked for as of {iso(int(observed[i]))}, before what is kept online",
                f"rows are kept for observations from {iso(state.since)} on; use `headway predict`",
            )
            for i in np.flatnonzero(observed < state.since)
        ]
        if problems:
            raise RequestsRefused("requests", problems)

    def _pinned(self, observed: NDArray[np.int64]) -> PinnedInputs:
        """What a group of observations rests on; partitions are looked up only where one could be missing."""
        assert self._pins is not None
        assert self._state is not None
        first, last = int(observed.min()), int(observed.max())
        state = self._state
        whole = not state.skipped and not state.absent and first >= state.since
        if whole and all(last + self._before[s] < end for s, end in state.covered.items()):
            return PinnedInputs({}, {}, {}, self._parts)
        found = in_reach(self._spec, self._pins, first, last)
        refuse_quarantined(self._spec, found)
        return found

    def _cells(
        self,
        inputs: pa.Table,
        observed: NDArray[np.int64],
        valid: NDArray[np.bool_],
        asked: Mapping[str, list[Entity]],
        groups: Sequence[tuple[str, NDArray[np.int64]]],
    ) -> dict[str, Cells]:
        gathered: dict[str, tuple[Together, dict[Entity, int]]] = {}
        cells: dict[str, Cells] = {}
        for name, view in self._plan.views.items():
            scope = self._scopes.of_view[name]
            if scope.scope_id not in gathered:
                every = [asked[v] for v in asked if self._scopes.of_view[v] == scope]
                entities = dict.fromkeys(e for of_view in every for e in of_view if e[1] != NO_ENTITY)
                numbers = {entity: number for number, entity in enumerate(entities)}
                gathered[scope.scope_id] = (self._together(scope, list(entities), observed), numbers)
            rows, numbers = gathered[scope.scope_id]
            keys = np.array([numbers.get(e, NULL_KEY) for e in asked[name]], dtype=np.int64)
            cells |= _answer(view, rows, Observations(keys, observed, valid), self._scope_plans[scope.scope_id])
        for name, custom in self._plan.custom.items():
            scope = self._scopes.of_custom[name]
            assert self._state is not None
            rows = self._rows[scope.scope_id, WHOLE_SOURCE]
            assert not isinstance(rows, EntityRows)
            table = whole_table(self._scope_plans[scope.scope_id], rows, self._state.known_until[scope.source])
            parts: list[Cells] = []
            for _, of_group in groups:
                some = inputs.take(pa.array(of_group))
                first = first_observed(some, self._plan.observation_time)
                parts.append(custom.run(some, custom.rows(table, first)))
            cells[name] = _in_order(parts, [rows for _, rows in groups])
        return cells | self._plan.run_derived(inputs, cells)

    def _together(self, scope: Scope, entities: Sequence[Entity], observed: NDArray[np.int64]) -> Together:
        assert self._state is not None
        plan = self._scope_plans[scope.scope_id]
        known_until = self._state.known_until[scope.source]
        start = np.iinfo(np.int64).min if plan.memory is None else int(observed.min()) - plan.memory
        parts: list[EntityRows] = []
        for entity in entities:
            rows = self._rows[entity]
            assert isinstance(rows, EntityRows)
            parts.append(rows.visible(known_until, start, int(observed.max())))
        return together(plan, parts)

    def _aged(self, view: str, found: Freshness) -> Freshness:
        """A fresh view is stale when it is older than the declaration allows."""
        group = serving_of(self._spec).groups.get(view)
        limit = None if group is None or group.max_staleness is None else duration_us(group.max_staleness)
        if limit is None or found.status != "fresh" or found.age is None or found.age * 1_000_000 <= limit:
            return found
        return replace(found, status="stale", reason=TOO_OLD, incomplete=TOO_OLD)


def _in_order(parts: Sequence[Cells], rows: Sequence[NDArray[np.int64]]) -> Cells:
    back = np.argsort(np.concatenate(rows), kind="stable")
    joined = Cells(
        pa.concat_arrays([p.value for p in parts]),
        pa.concat_arrays([p.event_time for p in parts]),
        np.concatenate([p.reason for p in parts]),
    )
    return joined.take(back)


def _answer(view: CompiledView, rows: Together, observations: Observations, plan: ScopePlan) -> dict[str, Cells]:
    asked = in_order(observations, rows.rows.groups, view.spec.boundary)
    cells = _latest(view, rows, asked, plan) | _windows(view, rows, asked)
    return {f"{view.name}__{feature}": cells[feature] for feature in view.spec.features}


def _latest(view: CompiledView, rows: Together, asked: Asked, plan: ScopePlan) -> dict[str, Cells]:
    lookback = None if view.spec.lookback is None else duration_us(view.spec.lookback)
    answers: dict[str, tuple[kernel.Latest, pa.Array]] = {}
    cells: dict[str, Cells] = {}
    for name, feature in view.spec.latest_features().items():
        column = feature.latest
        shared = column if view.spec.null_policy == "last_known" else ""
        null = rows.null[column]
        if shared not in answers:
            found = _newest(view, rows, asked, lookback, null if shared else None)
            answer = found if lookback is None else forget(found, asked.observations, lookback)
            answers[shared] = (answer, timestamps(answer.event_time, answer.has_event_time))
        answer, event_time = answers[shared]
        values = rows.values[column]
        picked = [None if i < 0 else values[i] for i in answer.row.tolist()]
        hit = answer.row >= 0
        reason = answer.reason.copy()
        reason[hit] = np.where(null[answer.row[hit]], np.int8(Reason.NULL_VALUE), np.int8(Reason.HIT))
        cells[name] = Cells(pa.array(picked, plan.types[column]), event_time, reason)
    return cells


def _newest(
    view: CompiledView, rows: Together, asked: Asked, lookback: int | None, null: NDArray[np.bool_] | None
) -> kernel.Latest:
    try:
        return latest(
            rows.rows,
            asked,
            lookback=lookback,
            null_policy=view.spec.null_policy,
            null=null,
            tie_break_row_id="row_id" in view.spec.tie_break,
        )
    except kernel.AmbiguousTie as tie:
        raise UndecidedTie(
            f"view {view.name!r}: {view.spec.source} has different rows ({', '.join(view.source.row_id)}) for one key "
            "with equal event time, availability and sequence",
            "end the view's tie_break with row_id, or give the source a sequence",
        ) from tie


def _windows(view: CompiledView, rows: Together, asked: Asked) -> dict[str, Cells]:
    features = view.spec.window_features()
    cells: dict[str, Cells] = {}
    for column in dict.fromkeys(f.window for f in features.values()):
        wanted = {n: f for n, f in features.items() if f.window == column}
        durations = sorted({duration_us(f.duration) for f in wanted.values()})
        answers = window(
            rows.rows,
            asked,
            rows.numbers[column],
            durations=durations,
            aggregates=sorted({f.aggregate for f in wanted.values()}),
        )
        event_times = [timestamps(a.event_time, a.has_event_time) for a in answers]
        for name, feature in wanted.items():
            at = durations.index(duration_us(feature.duration))
            answer = answers[at]
            value = pa.array(answer.values[feature.aggregate], mask=answer.null[feature.aggregate])
            cells[name] = Cells(value, event_times[at], answer.reason)
    return cells
