"""Compiles declared features into a plan and runs it over label rows and source rows.

The same plan makes snapshots, answers the leakage proof and will serve online: nothing else computes a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.declaration import CustomFeature, FeatureViewSpec, PipelineSpec, SourceSpec, duration_us
from headway.errors import HeadwayError
from headway.features import kernel
from headway.features.clocks import Clock, clock_of, instants
from headway.features.kernel import Observations, Reason, Rows
from headway.features.kernel.encode import encode_identity, encode_keys
from headway.loading import Pipeline

Scope = NDArray[np.int64] | None


class FeatureFunctionFailed(HeadwayError):
    """A derived or custom function raised, or returned something other than one value per row."""


class UndecidedTie(HeadwayError):
    """Different rows of one key could answer, and the declared order does not say which."""


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

    def take(self, rows: NDArray[np.int64]) -> Cells:
        """The cells of some label rows."""
        index = pa.array(rows)
        chosen = None if self.chosen is None else self.chosen[rows]
        return Cells(self.value.take(index), self.event_time.take(index), self.reason[rows], chosen)


@dataclass(frozen=True)
class Scopes:
    """Worlds for the leakage proof: a label row sees only source rows of its own scope. Both sides or neither."""

    labels: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source under one clock, ready to be looked up by any of their keys.

    `table` holds the admitted rows, `origin` where each stood in the table that was given.
    """

    table: pa.Table
    origin: NDArray[np.int64]
    encoded: Rows
    scopes: Scopes | None


def prepare(source: SourceSpec, clock: Clock, rows: pa.Table, scopes: Scopes | None = None) -> SourceRows:
    """Admit the rows that have both times, and encode what does not depend on a view's key."""
    times = clock.times(rows)
    origin = np.flatnonzero(times.admitted)
    table = rows if len(origin) == rows.num_rows else rows.take(pa.array(origin))
    row_scope = None if scopes is None else scopes.rows[origin]
    encoded = Rows(
        key=np.broadcast_to(np.int64(0), (len(origin),)),
        event_time=times.event[origin],
        available_time=times.available[origin],
        sequence=_integers(table, source.sequence),
        deleted=_flags(table, source.deleted),
        row_id=_identities(table, source.row_id, row_scope),
    )
    return SourceRows(
        table, origin, encoded, None if scopes is None or row_scope is None else replace(scopes, rows=row_scope)
    )


@dataclass(frozen=True)
class CompiledView:
    """One feature view with everything resolved that the declaration leaves to other parts of it."""

    name: str
    spec: FeatureViewSpec
    source: SourceSpec
    clock: Clock
    observation_time: str

    def answer(self, labels: pa.Table, rows: SourceRows) -> dict[str, Cells]:
        """Answer every label row, in its order, from prepared source rows."""
        keys = encode_keys(
            {right: rows.table.column(right) for right in self.spec.keys.values()},
            {right: labels.column(left) for left, right in self.spec.keys.items()},
            row_scope=None if rows.scopes is None else rows.scopes.rows,
            observation_scope=None if rows.scopes is None else rows.scopes.labels,
        )
        moments, valid = instants(labels.column(self.observation_time), self.observation_time)
        observations = Observations(keys.observations, moments, valid)
        encoded = replace(rows.encoded, key=keys.rows)
        cells = self._latest(rows, encoded, observations, keys.groups)
        cells |= self._windows(rows, encoded, observations, keys.groups)
        return {f"{self.name}__{feature}": cells[feature] for feature in self.spec.features}

    def _latest(self, rows: SourceRows, encoded: Rows, observations: Observations, groups: int) -> dict[str, Cells]:
        lookback = None if self.spec.lookback is None else duration_us(self.spec.lookback)
        answers: dict[str, kernel.Latest] = {}
        cells: dict[str, Cells] = {}
        for name, feature in self.spec.latest_features().items():
            column = rows.table.column(feature.latest)
            null = np.asarray(column.is_null().to_numpy())
            # Under row_wins the chosen row does not depend on the column: one answer serves all features.
            shared = feature.latest if self.spec.null_policy == "last_known" else ""
            if shared not in answers:
                answers[shared] = self._newest(
                    encoded,
                    observations,
                    groups=groups,
                    boundary=self.spec.boundary,
                    lookback=lookback,
                    null_policy=self.spec.null_policy,
                    null=null if shared else None,
                    tie_break_row_id="row_id" in self.spec.tie_break,
                )
            answer = answers[shared] if lookback is None else _forget(answers[shared], observations, lookback)
            cells[name] = _latest_cells(answer, column, rows.origin, null)
        return cells

    def _newest(self, encoded: Rows, observations: Observations, **how: Any) -> kernel.Latest:  # noqa: ANN401
        try:
            return kernel.latest(encoded, observations, **how)
        except kernel.AmbiguousTie as tie:
            identity = ", ".join(self.source.row_id)
            raise UndecidedTie(
                f"view {self.name!r}: {self.spec.source} has different rows ({identity}) for one key with equal event "
                f"time, availability and sequence, {len(tie.rows)} rows at positions {list(tie.rows)} for instance",
                "end the view's tie_break with row_id, or give the source a sequence",
            ) from tie

    def _windows(self, rows: SourceRows, encoded: Rows, observations: Observations, groups: int) -> dict[str, Cells]:
        features = self.spec.window_features()
        cells: dict[str, Cells] = {}
        for column in dict.fromkeys(f.window for f in features.values()):
            wanted = {n: f for n, f in features.items() if f.window == column}
            durations = sorted({duration_us(f.duration) for f in wanted.values()})
            values, null = _numbers(rows.table.column(column), column)
            answers = kernel.window(
                encoded,
                observations,
                values,
                null,
                groups=groups,
                boundary=self.spec.boundary,
                durations=durations,
                aggregates=sorted({f.aggregate for f in wanted.values()}),
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
class DerivedFunction:
    """A derived feature: label columns and features of a row in, one value per row out."""

    name: str
    reference: str
    function: Callable[..., Any]
    type: pa.DataType
    inputs: tuple[str, ...]

    def run(self, labels: pa.Table, cells: Mapping[str, Cells]) -> Cells:
        """The feature for every label row."""
        table = pa.table({c: cells[c].value if c in cells else labels.column(c) for c in self.inputs})
        return _function_cells(self.name, self.reference, self.type, labels.num_rows, lambda: self.function(table))


@dataclass(frozen=True)
class CustomFunction:
    """A custom feature: label rows and rows of a source in, one value per label row out.

    It gets the columns that are known when the source says that a row is, and no event older than the look-back before
    the partition's first observation: what other features make us read must not show.
    """

    name: str
    reference: str
    function: Callable[..., Any]
    type: pa.DataType
    source: str
    clock: Clock
    columns: tuple[str, ...]
    lookback: int | None

    def rows(self, rows: pa.Table, first_observed: int) -> pa.Table:
        """What of a source the function may get for a partition whose first observation is given."""
        kept = rows.select([c for c in rows.column_names if c in self.columns])
        if self.lookback is None:
            return kept
        times = self.clock.times(rows)
        return kept.filter(pa.array(times.admitted & (times.event >= first_observed - self.lookback)))

    def run(self, labels: pa.Table, rows: pa.Table) -> Cells:
        """The feature for every label row, from rows that `rows` gave."""
        call = lambda: self.function(labels, rows)  # noqa: E731
        return _function_cells(self.name, self.reference, self.type, labels.num_rows, call)


@dataclass(frozen=True)
class FeaturePlan:
    """The compiled feature set of a pipeline."""

    views: dict[str, CompiledView]
    observation_time: str
    custom: dict[str, CustomFunction] = field(default_factory=dict)
    derived: dict[str, DerivedFunction] = field(default_factory=dict)

    def execute(self, labels: pa.Table, sources: Mapping[str, pa.Table]) -> dict[str, Cells]:
        """Every feature for every label row. `labels` holds the label inputs only, never the target."""
        prepared: dict[tuple[str, Clock], SourceRows] = {}
        cells: dict[str, Cells] = {}
        for view in self.views.values():
            key = (view.spec.source, view.clock)
            if key not in prepared:
                prepared[key] = prepare(view.source, view.clock, sources[view.spec.source])
            cells |= view.answer(labels, prepared[key])
        first = first_observed(labels, self.observation_time)
        for name, custom in self.custom.items():
            cells[name] = custom.run(labels, custom.rows(sources[custom.source], first))
        return cells | self.run_derived(labels, cells)

    def run_derived(self, labels: pa.Table, cells: Mapping[str, Cells]) -> dict[str, Cells]:
        """All derived features, from label columns and the given cells."""
        return {name: derived.run(labels, cells) for name, derived in self.derived.items()}


def first_observed(labels: pa.Table, column: str) -> int:
    """The earliest observation time of label rows, 0 without any."""
    moments, valid = instants(labels.column(column), column)
    return int(moments[valid].min()) if valid.any() else 0


def compile_plan(pipeline: Pipeline, *, fresh: bool = False) -> FeaturePlan:
    """Compile the declared feature set; imports the functions that it names, anew when `fresh`."""
    spec = pipeline.spec
    return FeaturePlan(
        views={name: _compile_view(spec, name, view) for name, view in spec.features.views.items()},
        observation_time=spec.label.observation_time,
        custom={n: _compile_custom(pipeline, n, c, fresh=fresh) for n, c in spec.features.custom.items()},
        derived={
            n: DerivedFunction(n, d.function, pipeline.function(d.function, fresh=fresh), _ARROW[d.type], d.inputs)
            for n, d in spec.features.derived.items()
        },
    )


def _compile_custom(pipeline: Pipeline, name: str, custom: CustomFeature, *, fresh: bool) -> CustomFunction:
    spec = pipeline.spec
    source = spec.sources[custom.source]
    # Columns that become known at another time than their row are withheld.
    columns = tuple(c for c in source.columns if spec.known_at(custom.source, c) == source.available_time)
    return CustomFunction(
        name=name,
        reference=custom.function,
        function=pipeline.function(custom.function, fresh=fresh),
        type=_ARROW[custom.type],
        source=custom.source,
        clock=clock_of(source),
        columns=columns,
        lookback=None if custom.lookback is None else duration_us(custom.lookback),
    )


_ARROW = {"float64": pa.float64(), "int64": pa.int64(), "string": pa.string(), "bool": pa.bool_()}


def _compile_view(spec: PipelineSpec, name: str, view: FeatureViewSpec) -> CompiledView:
    source = spec.sources[view.source]
    return CompiledView(name, view, source, clock_of(source, view), spec.label.observation_time)


def _forget(answer: kernel.Latest, observations: Observations, lookback: int) -> kernel.Latest:
    """Answers that expired more than one further look-back ago become `before_first`.

    How far back rows are read must not show in a cell: an expired row is remembered for exactly one more look-back,
    which `features.reach` guarantees to have read.
    """
    old = (answer.reason == Reason.EXPIRED) & (answer.event_time < observations.time - 2 * lookback)
    return replace(
        answer,
        row=np.where(old, -1, answer.row),
        has_event_time=answer.has_event_time & ~old,
        reason=np.where(old, np.int8(Reason.BEFORE_FIRST), answer.reason),
    )


def _latest_cells(
    answer: kernel.Latest, column: pa.ChunkedArray, origin: NDArray[np.int64], null: NDArray[np.bool_]
) -> Cells:
    found = answer.row >= 0
    reason = answer.reason.copy()
    hit = reason == Reason.HIT
    reason[hit] = np.where(null[answer.row[hit]], np.int8(Reason.NULL_VALUE), np.int8(Reason.HIT))
    value = pc.take(column, pa.array(answer.row, mask=~hit))
    chosen = np.full(len(found), -1, dtype=np.int64)
    chosen[found] = origin[answer.row[found]]
    plain = value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value
    return Cells(plain, _timestamps(answer.event_time, answer.has_event_time), reason, chosen)


def _function_cells(name: str, reference: str, kind: pa.DataType, expected: int, call: Callable[[], Any]) -> Cells:
    """Run a person's function. What it raises or returns may hold values of the data, so only its kind is told."""
    place = f"feature {name!r} ({reference})"
    result: Any
    try:
        result = call()
    except Exception as error:
        raise FeatureFunctionFailed(
            f"{place} raised {type(error).__name__}", "call it on a few rows to see the message, which may hold values"
        ) from error
    if not isinstance(result, pa.Array | pa.ChunkedArray):
        raise FeatureFunctionFailed(f"{place} returned {type(result).__name__}", "return an Arrow array")
    if len(result) != expected:
        raise FeatureFunctionFailed(
            f"{place} returned {len(result)} values for {expected} label rows", "return one value per row"
        )
    try:
        value = (result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise FeatureFunctionFailed(
            f"{place} returned {result.type}, which does not fit the declared {kind}", "return or declare another type"
        ) from error
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(value)).as_py():
        raise FeatureFunctionFailed(f"{place} returned NaN", "return null where there is no value")
    null = np.asarray(value.is_null().to_numpy(zero_copy_only=False))
    reason = np.where(null, np.int8(Reason.NULL_VALUE), np.int8(Reason.HIT))
    return Cells(value, pa.nulls(expected, pa.timestamp("us", tz="UTC")), reason)


def _timestamps(moments: NDArray[np.int64], present: NDArray[np.bool_]) -> pa.Array:
    return pa.array(moments, mask=~present).cast(pa.timestamp("us", tz="UTC"))


def _identities(rows: pa.Table, columns: tuple[str, ...], scope: Scope) -> NDArray[np.int64]:
    """Ranks of row identities; rows of different worlds are different events."""
    ranks = encode_identity({c: rows.column(c) for c in columns})
    return ranks if scope is None else scope * (int(ranks.max(initial=0)) + 1) + ranks


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
    null = np.asarray(column.is_null().to_numpy())
    kind = column.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        encoded = column.combine_chunks()
        encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
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
