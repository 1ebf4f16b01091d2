"""Features of requests from an online store: the compiled plan of the snapshots over the rows of the entities asked.

What a cell holds does not depend on what else is loaded, so the rows of the entities asked give the bits that all rows
would give: the same kernel, the same functions, the same tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.partitions import PartitionScheme
from headway.datasets.zones import iso
from headway.declaration import PipelineSpec, duration_us
from headway.features.clocks import instants
from headway.features.contract import code_digest, contract_digest
from headway.features.inputs import PinnedInputs, Seen
from headway.features.kernel import NULL_KEY, Observations, Reason, collapse
from headway.features.labels import LabelRows
from headway.features.online.entity_rows import EntityRows, ScopePlan, Together, decode, together, whole_table
from headway.features.online.layout import Layout
from headway.features.online.pins import Pins, in_reach, pins_of, seen_of
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
    OnlineNotReady,
    OnlineState,
    OnlineStore,
    StoreKey,
)
from headway.features.online.views import ViewCells, answer, view_plan
from headway.features.plan import Cells, compile_plan, first_observed
from headway.features.reach import bounds, memory
from headway.features.snapshot import incomplete_flags
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
    without_outcome,
)
from headway.serving.requests import RequestProblem, RequestsRefused, serving_of

TOO_OLD = "too_old"
_NONE = np.iinfo(np.int64).min
_COLLAPSED = [Reason(int(code)).name.lower() for code in collapse(np.array(list(Reason), dtype=np.int8))]
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
        self._view_plans = {
            name: view_plan(view, self._scope_plans[self._scopes.of_view[name].scope_id].types)
            for name, view in self._plan.views.items()
        }
        self._layout = Layout(self._spec)
        self._limits = {
            view: duration_us(group.max_staleness)
            for view, group in serving_of(self._spec).groups.items()
            if group.max_staleness is not None
        }
        declared = self._spec.sources[self._spec.label.source].partition
        assert declared is not None
        self._scheme = PartitionScheme.from_spec(declared)
        # Instants that are known to lie in the label source's calendar, which is one interval.
        self._calendar: tuple[int, int] | None = None
        fields = {f.column: name for name, f in serving_of(self._spec).request.items() if f.column}
        inside = declared.column in self._spec.label_inputs()
        self._filled = fields.get(declared.column) if inside else None
        partitioned = [s for s in self._scopes.sources if self._spec.sources[s].partition is not None]
        self._before = {s: bounds(self._spec.sources[s])[0] for s in partitioned}
        self._digests = (contract_digest(pipeline), code_digest(pipeline))
        self._kept = entities_kept
        self._key: StoreKey | None = None
        self._seen = (0, 0)
        self._state: OnlineState | None = None
        self._pins: Pins | None = None
        self._parts: dict[str, Seen] = {}
        self._entities: dict[str, dict[tuple[Any, ...], Entity]] = {}
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
        asked = self._asked(inputs)
        whole = [(s.scope_id, WHOLE_SOURCE) for s in self._scopes.of_custom.values()]
        self._refresh([*whole, *(entity for entities in asked.values() for entity in entities if entity[1])])
        assert self._state is not None
        assert self._pins is not None
        self._require_kept(observed, self._state)
        groups = self._groups(observed, requests)
        pinned = [self._pinned(observed[rows]) for _, rows in groups]
        labels = without_outcome(spec, inputs)
        views = self._views(observed, valid, asked)
        cells = self._cells(inputs, views, groups)
        flags = {v: np.zeros(len(observed), dtype=np.bool_) for v in spec.features.views}
        freshness: dict[str, list[Freshness | None]] = {v: [None] * len(observed) for v in spec.features.views}
        for (_, rows), rests in zip(groups, pinned, strict=True):
            some = labels if len(groups) == 1 else LabelRows(labels.inputs.take(rows), labels.outcome.take(rows), {})
            behind = incomplete_flags(spec, some, rests)
            late = behind if not (rests.skipped or rests.absent) else _late(spec, some, rests)
            for view, of_view in behind.items():
                flags[view][rows] = of_view
                told = self._freshness(view, views[view], rows, observed, of_view, late[view])
                for row, of_row in zip(rows.tolist(), told, strict=True):
                    freshness[view][row] = of_row
        return OnlineComputed(
            requests=as_kept(spec, requests),
            values=self._layout.table(labels, cells, flags).combine_chunks(),
            observed=observed,
            freshness={v: tuple(f for f in found if f is not None) for v, found in freshness.items()},
            state=self._state,
        )

    def _scope_plan(self, scope: Scope) -> ScopePlan:
        views = [v for name, v in self._plan.views.items() if self._scopes.of_view[name] == scope]
        latest = dict.fromkeys(f.latest for v in views for f in v.spec.latest_features().values())
        windows = dict.fromkeys(f.window for v in views for f in v.spec.window_features().values())
        # Under last_known, nulls of any age say null_value, so rows are not cut by age there.
        endless = any(
            v.spec.latest_features() and (v.spec.lookback is None or v.spec.null_policy == "last_known") for v in views
        )
        furthest = max((memory(v.spec) for v in views), default=0)
        return ScopePlan(
            scope, column_types(self._spec, scope), tuple(latest), tuple(windows), None if endless else furthest
        )

    def _asked(self, inputs: pa.Table) -> dict[str, list[Entity]]:
        """The entity that each row asks each view for."""
        found: dict[tuple[str, ...], list[Entity]] = {}
        asked: dict[str, list[Entity]] = {}
        for name, view in self._plan.views.items():
            scope = self._scopes.of_view[name]
            left = {right: left for left, right in view.spec.keys.items()}
            place = (scope.scope_id, *(left[right] for right in scope.keys))
            if place not in found:
                values = key_values({right: inputs.column(left[right]) for right in scope.keys}, scope.keys)
                found[place] = self._coded(scope.scope_id, values)
            asked[name] = found[place]
        return asked

    def _coded(self, scope_id: str, values: Sequence[tuple[Any, ...]]) -> list[Entity]:
        known = self._entities.setdefault(scope_id, {})
        if len(known) > self._kept:
            known.clear()
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

    def _groups(self, observed: NDArray[np.int64], requests: pa.Table) -> list[tuple[str, NDArray[np.int64]]]:
        """The rows that `compute_features` would compute together; all at once where that makes no difference."""
        whole = not self._plan.custom and self._is_whole(observed)
        if whole and self._calendar is not None and self._filled_between(observed, requests, *self._calendar):
            return [("", np.arange(len(observed)))]
        groups = list(by_partition(self._spec, observed, requests))
        windows = [self._scheme.window(partition) for partition, _ in groups]
        known = [self._calendar] if self._calendar is not None else []
        self._calendar = (min(w[0] for w in [*known, *windows]), max(w[1] for w in [*known, *windows]))
        return groups

    def _filled_between(self, observed: NDArray[np.int64], requests: pa.Table, first: int, end: int) -> bool:
        """Whether the time that decides on a request's label partition lies in [first, end) in all rows."""
        times = observed
        if self._filled is not None:
            column = requests.column(self._filled)
            if column.null_count:
                return False
            times = instants(column, self._filled)[0]
        return bool(times.min() >= first and times.max() < end)

    def _is_whole(self, observed: NDArray[np.int64]) -> bool:
        """Whether the store holds every partition that observations may need."""
        assert self._state is not None
        state = self._state
        if state.skipped or state.absent or not len(observed) or observed.min() < state.since:
            return False
        last = int(observed.max())
        return all(last + before < state.covered.get(s, _NONE) for s, before in self._before.items())

    def _require_kept(self, observed: NDArray[np.int64], state: OnlineState) -> None:
        """Refuse observations whose rows may have been pruned."""
        if not len(observed) or observed.min() >= state.since:
            return
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
        if self._is_whole(observed):
            return PinnedInputs({}, {}, {}, self._parts)
        found = in_reach(self._spec, self._pins, int(observed.min()), int(observed.max()))
        refuse_quarantined(self._spec, found)
        return found

    def _views(
        self, observed: NDArray[np.int64], valid: NDArray[np.bool_], asked: Mapping[str, list[Entity]]
    ) -> dict[str, ViewCells]:
        gathered: dict[str, tuple[Together, dict[Entity, int]]] = {}
        found: dict[str, ViewCells] = {}
        for name, plan in self._view_plans.items():
            scope = self._scopes.of_view[name]
            if scope.scope_id not in gathered:
                every = [asked[v] for v in asked if self._scopes.of_view[v].scope_id == scope.scope_id]
                entities = dict.fromkeys(e for of_view in every for e in of_view if e[1] != NO_ENTITY)
                numbers = {entity: number for number, entity in enumerate(entities)}
                gathered[scope.scope_id] = (self._together(scope, list(entities), observed), numbers)
            rows, numbers = gathered[scope.scope_id]
            keys = np.array([numbers.get(e, NULL_KEY) for e in asked[name]], dtype=np.int64)
            found[name] = answer(plan, rows, Observations(keys, observed, valid))
        return found

    def _cells(
        self, inputs: pa.Table, views: Mapping[str, ViewCells], groups: Sequence[tuple[str, NDArray[np.int64]]]
    ) -> dict[str, Cells]:
        cells = {name: cell for view in views.values() for name, cell in view.cells.items()}
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

    def _freshness(
        self,
        view: str,
        found: ViewCells,
        rows: NDArray[np.int64],
        observed: NDArray[np.int64],
        incomplete: NDArray[np.bool_],
        late: NDArray[np.bool_],
    ) -> Iterator[Freshness]:
        """As `freshness_of`, and a fresh view that is older than declared is stale."""
        limit = self._limits.get(view)
        of_rows = (observed, found.newest, found.answered, found.reason)
        moments, newest, answered, reasons = (of_row[rows].tolist() for of_row in of_rows)
        for i, (is_incomplete, is_late) in enumerate(zip(incomplete.tolist(), late.tolist(), strict=True)):
            time = None if newest[i] == _NONE else newest[i]
            age = None if time is None else (moments[i] - time) / 1_000_000
            why = "" if not is_incomplete else WATERMARK_BEHIND if is_late else PARTITION_NOT_READ
            if not answered[i]:
                yield Freshness(time, age, "missing", _COLLAPSED[reasons[i]], why)
                continue
            if not why and limit is not None and age is not None and age * 1_000_000 > limit:
                why = TOO_OLD
            yield Freshness(time, age, "stale" if why else "fresh", why, why)


def _late(spec: PipelineSpec, labels: LabelRows, inputs: PinnedInputs) -> dict[str, NDArray[np.bool_]]:
    """Where a source's watermark alone makes a view incomplete."""
    return incomplete_flags(spec, labels, replace(inputs, skipped={}, absent={}))


def _in_order(parts: Sequence[Cells], rows: Sequence[NDArray[np.int64]]) -> Cells:
    back = np.argsort(np.concatenate(rows), kind="stable")
    joined = Cells(
        pa.concat_arrays([p.value for p in parts]),
        pa.concat_arrays([p.event_time for p in parts]),
        np.concatenate([p.reason for p in parts]),
    )
    return joined.take(back)
