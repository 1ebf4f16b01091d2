"""Compiles declared features into a plan and runs it over label rows and source rows.

The same plan makes snapshots, answers the leakage proof and will serve online: nothing else computes a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headway.declaration import FeatureViewSpec, PipelineSpec, SourceSpec, duration_us
from headway.errors import HeadwayError
from headway.features import kernel
from headway.features.clocks import Clock, Times, clock_of
from headway.features.kernel import Observations, Reason, Rows
from headway.features.kernel.encode import encode_keys, instants, rank_identities
from headway.loading import Pipeline

Scope = NDArray[np.int64] | None


class FeatureFunctionFailed(HeadwayError):
    """A derived or custom function returned another number of values than it was given rows."""


class ValueNotExact(HeadwayError):
    """A whole number too large for the exact arithmetic of windows."""


@dataclass(frozen=True)
class Cells:
    """One feature for every label row: value, the event time it rests on (null: none) and a reason code.

    `chosen` is the index of the answering source row (-1: none); windows, derived and custom features have none.
    """

    value: pa.Array
    event_time: pa.Array
    reason: NDArray[np.int8]
    chosen: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Scopes:
    """Worlds for the leakage proof: a label row sees only source rows of its own scope. Both sides or neither."""

    labels: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class CompiledView:
    """One feature view with everything resolved that the declaration leaves to other parts of it."""

    name: str
    spec: FeatureViewSpec
    source: SourceSpec
    clock: Clock
    observation_time: str

    def answer(self, labels: pa.Table, rows: pa.Table, scopes: Scopes | None = None) -> dict[str, Cells]:
        """Answer every label row, in its order, from the given source rows, in any order."""
        times = self.clock.times(rows)
        encoded, observations, groups = self._encode(labels, rows, times, scopes)
        cells = self._latest(rows, encoded, observations, groups)
        cells |= self._windows(rows, times, encoded, observations, groups)
        return {f"{self.name}__{feature}": cells[feature] for feature in self.spec.features}

    def _encode(
        self, labels: pa.Table, rows: pa.Table, times: Times, scopes: Scopes | None
    ) -> tuple[Rows, Observations, int]:
        admitted = pc.filter(rows, pa.array(times.admitted)) if not times.admitted.all() else rows
        row_scope = None if scopes is None else scopes.rows[times.admitted]
        left = [(c, labels.column(c)) for c in self.spec.keys]
        right = [(c, admitted.column(c)) for c in self.spec.keys.values()]
        keys = encode_keys(left, right, None if scopes is None else scopes.labels, row_scope)
        moments, valid = instants(labels.column(self.observation_time), self.observation_time)
        identities = rank_identities([(c, admitted.column(c)) for c in self.source.row_id], row_scope)
        encoded = Rows(
            key=keys.right,
            event_time=times.event[times.admitted],
            available_time=times.available[times.admitted],
            sequence=_integers(admitted, self.source.sequence),
            deleted=_flags(admitted, self.source.deleted),
            row_id=identities,
        )
        return encoded, Observations(keys.left, moments, valid), keys.groups

    def _latest(self, rows: pa.Table, encoded: Rows, observations: Observations, groups: int) -> dict[str, Cells]:
        features = self.spec.latest_features()
        origin = np.flatnonzero(self.clock.times(rows).admitted) if features else np.empty(0, np.int64)
        answers: dict[str, kernel.Latest] = {}
        cells: dict[str, Cells] = {}
        for name, feature in features.items():
            column = rows.column(feature.latest).combine_chunks()
            null = np.asarray(pc.is_null(column).to_numpy(zero_copy_only=False))[origin]
            # Under row_wins the chosen row does not depend on the column: one answer serves all features.
            shared = feature.latest if self.spec.null_policy == "last_known" else ""
            if shared not in answers:
                answers[shared] = kernel.latest(
                    encoded,
                    observations,
                    groups=groups,
                    boundary=self.spec.boundary,
                    lookback=None if self.spec.lookback is None else duration_us(self.spec.lookback),
                    null_policy=self.spec.null_policy,
                    null=null if shared else None,
                    tie_break_row_id="row_id" in self.spec.tie_break,
                )
            cells[name] = _latest_cells(answers[shared], column, origin, null)
        return cells

    def _windows(
        self, rows: pa.Table, times: Times, encoded: Rows, observations: Observations, groups: int
    ) -> dict[str, Cells]:
        features = self.spec.window_features()
        cells: dict[str, Cells] = {}
        for column in dict.fromkeys(f.window for f in features.values()):
            wanted = {n: f for n, f in features.items() if f.window == column}
            durations = sorted({duration_us(f.duration) for f in wanted.values()})
            aggregates = sorted({f.aggregate for f in wanted.values()})
            values, null = _numbers(rows.column(column), column)
            answers = kernel.window(
                encoded,
                observations,
                values[times.admitted],
                null[times.admitted],
                groups=groups,
                boundary=self.spec.boundary,
                durations=durations,
                aggregates=aggregates,
            )
            for name, feature in wanted.items():
                answer = answers[durations.index(duration_us(feature.duration))]
                cells[name] = Cells(
                    value=pa.array(answer.values[feature.aggregate], mask=answer.null[feature.aggregate]),
                    event_time=_timestamps(answer.event_time, answer.has_event_time),
                    reason=answer.reason,
                )
        return cells


@dataclass(frozen=True)
class CompiledFunction:
    """A derived feature (label columns and features in, values out) or a custom one (label rows and source rows in)."""

    function: Callable[..., pa.Array | pa.ChunkedArray]
    type: pa.DataType
    inputs: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True)
class FeaturePlan:
    """The compiled feature set of a pipeline."""

    views: dict[str, CompiledView]
    custom: dict[str, CompiledFunction] = field(default_factory=dict)
    derived: dict[str, CompiledFunction] = field(default_factory=dict)

    def execute(self, labels: pa.Table, sources: Mapping[str, pa.Table]) -> dict[str, Cells]:
        """Every feature for every label row. `labels` holds the label inputs only, never the target."""
        cells: dict[str, Cells] = {}
        for view in self.views.values():
            cells |= view.answer(labels, sources[view.spec.source])
        for name in self.custom:
            cells[name] = self.run_custom(name, labels, sources)
        return cells | self.run_derived(labels, cells)

    def run_custom(self, name: str, labels: pa.Table, sources: Mapping[str, pa.Table]) -> Cells:
        """One custom feature."""
        custom = self.custom[name]
        return _function_cells(name, custom, custom.function(labels, sources[custom.source or ""]), labels.num_rows)

    def run_derived(self, labels: pa.Table, cells: Mapping[str, Cells]) -> dict[str, Cells]:
        """All derived features, from label columns and the given cells."""
        result: dict[str, Cells] = {}
        for name, derived in self.derived.items():
            columns = {c: cells[c].value if c in cells else labels.column(c) for c in derived.inputs}
            result[name] = _function_cells(name, derived, derived.function(pa.table(columns)), labels.num_rows)
        return result

    def restricted_to(self, views: Mapping[str, CompiledView]) -> FeaturePlan:
        """The plan with other compiled views."""
        return replace(self, views=dict(views))


def compile_plan(pipeline: Pipeline) -> FeaturePlan:
    """Compile the declared feature set; imports the functions that it names."""
    spec = pipeline.spec
    return FeaturePlan(
        views={name: _compile_view(spec, name, view) for name, view in spec.features.views.items()},
        custom={
            n: CompiledFunction(pipeline.function(c.function), _ARROW[c.type], source=c.source)
            for n, c in spec.features.custom.items()
        },
        derived={
            n: CompiledFunction(pipeline.function(d.function), _ARROW[d.type], inputs=d.inputs)
            for n, d in spec.features.derived.items()
        },
    )


_ARROW = {"float64": pa.float64(), "int64": pa.int64(), "string": pa.string(), "bool": pa.bool_()}


def _compile_view(spec: PipelineSpec, name: str, view: FeatureViewSpec) -> CompiledView:
    source = spec.sources[view.source]
    return CompiledView(name, view, source, clock_of(source, view), spec.label.observation_time)


def _latest_cells(answer: kernel.Latest, column: pa.Array, origin: NDArray[np.int64], null: NDArray[np.bool_]) -> Cells:
    found = answer.row >= 0
    chosen = np.where(found, origin[answer.row] if len(origin) else -1, -1)
    reason = answer.reason.copy()
    hit = reason == Reason.HIT
    reason[hit & null[np.where(hit, answer.row, 0)] if len(null) else hit & False] = Reason.NULL_VALUE
    value = pc.take(column, pa.array(chosen, mask=~hit))
    return Cells(value, _timestamps(answer.event_time, answer.has_event_time), reason, chosen)


def _function_cells(name: str, compiled: CompiledFunction, result: pa.Array | pa.ChunkedArray, expected: int) -> Cells:
    if len(result) != expected:
        raise FeatureFunctionFailed(
            f"feature {name!r} returned {len(result)} values for {expected} label rows", "return one value per row"
        )
    value = result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result
    value = pc.cast(value, compiled.type)
    null = np.asarray(pc.is_null(value).to_numpy(zero_copy_only=False))
    reason = np.where(null, np.int8(Reason.NULL_VALUE), np.int8(Reason.HIT))
    return Cells(value, pa.nulls(expected, pa.timestamp("us", tz="UTC")), reason)


def _timestamps(moments: NDArray[np.int64], present: NDArray[np.bool_]) -> pa.Array:
    return pa.array(moments, mask=~present).cast(pa.timestamp("us", tz="UTC"))


def _integers(rows: pa.Table, column: str | None) -> NDArray[np.int64]:
    if column is None:
        return np.broadcast_to(np.int64(0), (rows.num_rows,))
    values = rows.column(column)
    if values.null_count:
        raise ValueNotExact(
            f"sequence column {column!r} is null in {values.null_count} rows, so their order is undefined",
            "fill it in the source, or declare it required",
        )
    return values.to_numpy()


def _flags(rows: pa.Table, column: str | None) -> NDArray[np.bool_]:
    if column is None:
        return np.broadcast_to(np.bool_(False), (rows.num_rows,))
    return np.asarray(pc.fill_null(rows.column(column), False).to_numpy())


_EXACT = 2**53


def _numbers(column: pa.ChunkedArray, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Values as float64 and a null mask. Text becomes codes, good for counting and `distinct` alone."""
    null = np.asarray(pc.is_null(column).to_numpy())
    kind = column.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        encoded = column.combine_chunks()
        encoded = encoded if pa.types.is_dictionary(encoded.type) else pc.dictionary_encode(encoded)
        return pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False).astype(np.float64), null
    if pa.types.is_integer(kind):
        whole = pc.fill_null(column, 0).to_numpy()
        largest = int(np.abs(whole).max(initial=0))
        if largest > _EXACT:
            raise ValueNotExact(
                f"column {name!r} holds whole numbers beyond 2^53 ({largest}), which windows cannot add exactly",
                "scale the column in the source, or declare it float64",
            )
        return whole.astype(np.float64), null
    return pc.fill_null(pc.cast(column, pa.float64()), 0.0).to_numpy(), null
