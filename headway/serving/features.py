"""Features of requests: the compiled plan of the snapshots over the released versions in reach of each observation.

A row is asked at its observation (the declared field minus `before`). Requests are computed one label partition at a
time, so that memory holds the sources of one partition's reach only. Partitions that were not over at the observation,
the request's own among them, need not exist: what they would hold was not complete then. They are named where they are
absent, and the views that could have read them are marked stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.canonical import treat_personal
from headway.datasets.partitions import PartitionScheme
from headway.datasets.schema import arrow_schema
from headway.datasets.text import ARROW_TYPES, TIMESTAMP
from headway.datasets.zones import START_OF_TIME_US, iso
from headway.declaration import PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.features.clocks import instants
from headway.features.inputs import PinnedInputs, pin_inputs
from headway.features.kernel import Reason, collapse
from headway.features.labels import LabelRows
from headway.features.plan import Cells
from headway.features.reach import WHOLE_TABLE, Interval, partitions_in_reach
from headway.features.snapshot import SnapshotBuilder, incomplete_flags
from headway.loading import Pipeline
from headway.services import Services
from headway.serving.requests import RequestProblem, RequestsRefused, is_personal, serving_of

Status = Literal["fresh", "stale", "missing"]

WATERMARK_BEHIND = "watermark_behind"
PARTITION_NOT_READ = "partition_not_read"
_ANSWERED = (Reason.HIT, Reason.NULL_VALUE)


class InputQuarantined(HeadwayError):
    """A quarantined input without which the pipeline declares that nothing may be computed."""


@dataclass(frozen=True)
class Freshness:
    """What one view's features rest on in one row.

    `time` is the newest event time among its cells (microseconds UTC, None: none), `age` how many seconds it lies
    before the observation. `missing`: no cell found a row; `stale`: found, and the view is incomplete. `reason` is the
    collapsed reason of a missing view, or why a stale one is stale; empty when fresh. `incomplete` says that the source
    was behind or not read as a whole, which may also be why a view is missing; empty when it was not.
    """

    time: int | None
    age: float | None
    status: Status
    reason: str
    incomplete: str


@dataclass(frozen=True)
class RequestGroup:
    """The requests of one label partition: their positions among all requests, and the versions that they rest on."""

    partition: str
    rows: NDArray[np.int64]
    inputs: PinnedInputs


@dataclass(frozen=True)
class ComputedRequests:
    """Features of requests, in the order of the requests.

    `requests` are as they may be kept: personal columns hashed or dropped. `values` is what a snapshot's values table
    would hold, where the identity, the target and everything else that no request knows is null. `observed` is int64
    microseconds UTC. `freshness` has one entry per view and row.
    """

    requests: pa.Table
    values: pa.Table
    observed: NDArray[np.int64]
    groups: tuple[RequestGroup, ...]
    freshness: Mapping[str, Sequence[Freshness]]

    def __len__(self) -> int:
        return self.requests.num_rows

    def group_of(self) -> NDArray[np.int32]:
        """The index of each row's group."""
        found = np.zeros(len(self), dtype=np.int32)
        for index, group in enumerate(self.groups):
            found[group.rows] = index
        return found


def compute_features(services: Services, pipeline: Pipeline, requests: pa.Table) -> ComputedRequests:
    """Compute every feature of every request as of its observation; nothing is stored.

    Args:
        services: where dataset versions and their rows are.
        pipeline: the declaration and its feature functions.
        requests: what `read_requests` gave; counted from 1 in messages.

    Raises:
        NotServed: the pipeline declares no `serving`.
        RequestsRefused: an observation that is still to come, or outside the calendar.
        InputMissing: a partition that was over at the observation has no version.
        InputQuarantined: a whole table is quarantined, or the declaration refuses quarantined inputs.
    """
    spec = pipeline.spec
    inputs = label_inputs(spec, requests)
    observed, _ = instants(inputs.column(spec.label.observation_time), spec.label.observation_time)
    require_askable(spec, observed, services.catalog.clock())
    builder = SnapshotBuilder(services, pipeline)
    groups: list[RequestGroup] = []
    tables: list[pa.Table] = []
    freshness: list[dict[str, list[Freshness]]] = []
    for partition, rows in by_partition(spec, observed, requests):
        some = inputs.take(pa.array(rows))
        pinned = _pin(services, spec, partition, observed[rows])
        labels = without_outcome(spec, some)
        computed = builder.compute(labels, pinned)
        groups.append(RequestGroup(partition, rows, pinned))
        tables.append(computed.table)
        freshness.append({v: list(freshness_of(spec, v, labels, pinned, computed.cells)) for v in spec.features.views})
    back = np.argsort(np.concatenate([g.rows for g in groups]), kind="stable")
    values = pa.concat_tables(tables).unify_dictionaries().take(pa.array(back)).combine_chunks()
    per_view = {v: [f for part in freshness for f in part[v]] for v in spec.features.views}
    return ComputedRequests(
        requests=as_kept(spec, requests),
        values=values,
        observed=observed,
        groups=tuple(groups),
        freshness={v: tuple(found[i] for i in back) for v, found in per_view.items()},
    )


def label_inputs(spec: PipelineSpec, requests: pa.Table) -> pa.Table:
    """What features may read of each request: filled label columns, the observation time, null for all others.

    Raises:
        RequestsRefused: the observation would lie outside the years 1 to 9999, or contradicts the request.
    """
    serving, source = serving_of(spec), spec.sources[spec.label.source]
    filled = {f.column: name for name, f in serving.request.items() if f.column}
    observed = _observation_times(spec, requests)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for column in spec.label_inputs():
        if column == spec.label.observation_time:
            columns[column] = observed
        elif column in filled:
            columns[column] = requests.column(filled[column])
        else:
            columns[column] = pa.nulls(requests.num_rows, ARROW_TYPES[source.columns[column].type])
    return _treated(spec, pa.table(columns))


def without_outcome(spec: PipelineSpec, inputs: pa.Table) -> LabelRows:
    """Label rows as snapshots have them, of which the identity, the target and its time are not known."""
    source, label = spec.sources[spec.label.source], spec.label
    names = dict.fromkeys([*source.row_id, label.target, label.known_at])
    unknown = {n: pa.nulls(inputs.num_rows, ARROW_TYPES[source.columns[n].type]) for n in names}
    # What the request does know of the identity (its observation time, a key) stands in the table once.
    known = {n: inputs.column(n) for n in names if n in inputs.column_names and n != label.target}
    return LabelRows(inputs, pa.table(unknown | known), {})


def as_kept(spec: PipelineSpec, requests: pa.Table) -> pa.Table:
    """The requests as they may be stored: values of personal columns hashed as in the source, or dropped."""
    treated = requests
    for name, field in serving_of(spec).request.items():
        if is_personal(spec, field):
            one = _treated(spec, pa.table({field.column: requests.column(name)}))
            column = one.column(field.column) if one.num_columns else pa.nulls(requests.num_rows, pa.string())
            treated = treated.set_column(treated.column_names.index(name), name, column)
    return treated


def _treated(spec: PipelineSpec, columns: pa.Table) -> pa.Table:
    """Label columns with the personal ones as the source stores them, so that keys meet; dropped ones are left out."""
    source = spec.sources[spec.label.source]
    if not source.privacy.personal:
        return columns
    stored = arrow_schema(source)
    missing = {f.name: pa.nulls(columns.num_rows, f.type) for f in stored if f.name not in columns.column_names}
    whole = pa.table({n: columns.column(n) for n in columns.column_names} | missing)
    treated = treat_personal(whole, source, f"{spec.name}/{spec.label.source}")
    return treated.select([n for n in columns.column_names if n in stored.names])


def _observation_times(spec: PipelineSpec, requests: pa.Table) -> pa.Array:
    serving = serving_of(spec)
    asked, _ = instants(requests.column(serving.observed), serving.observed)
    before = duration_us(serving.before)
    problems = [
        RequestProblem(
            int(i) + 1,
            serving.observed,
            f"{iso(int(asked[i]))} minus {serving.before} is before year 1",
            "give a time of the calendar",
        )
        for i in np.flatnonzero(asked < START_OF_TIME_US + before)
    ]
    moments = asked - before
    for name, field in serving.request.items():
        if field.column == spec.label.observation_time:
            given, present = instants(requests.column(name), name)
            problems += [
                RequestProblem(
                    int(i) + 1,
                    name,
                    f"{iso(int(given[i]))} is not {serving.before} before {serving.observed}",
                    "leave the field out, or correct it",
                )
                for i in np.flatnonzero(present & (given != moments))
            ]
    if problems:
        raise RequestsRefused("requests", problems)
    return pa.array(moments).cast(TIMESTAMP)


def require_askable(spec: PipelineSpec, observed: NDArray[np.int64], now: int) -> None:
    """Refuse observations that are still to come: the answer would rest on less than the model was trained on.

    Raises:
        RequestsRefused: an observation later than `now`, microseconds UTC.
    """
    field = serving_of(spec).observed
    problems = [
        RequestProblem(
            int(i) + 1,
            field,
            f"the prediction is asked for as of {iso(int(observed[i]))}, which is still to come",
            f"ask again then; the clock says {iso(now)}",
        )
        for i in np.flatnonzero(observed > now)
    ]
    if problems:
        raise RequestsRefused("requests", problems)


def _scheme(spec: PipelineSpec, source: str) -> PartitionScheme | None:
    declared = spec.sources[source].partition
    return None if declared is None else PartitionScheme.from_spec(declared)


def by_partition(
    spec: PipelineSpec, observed: NDArray[np.int64], requests: pa.Table
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Positions of the requests of each label partition; by observation when no request fills its column.

    Raises:
        RequestsRefused: a request outside the label source's calendar.
    """
    declared, scheme = spec.sources[spec.label.source].partition, _scheme(spec, spec.label.source)
    assert declared is not None
    assert scheme is not None
    fields = {f.column: name for name, f in serving_of(spec).request.items() if f.column}
    filled = declared.column in fields and declared.column in spec.label_inputs()
    known = filled and not requests.column(fields[declared.column]).null_count
    column = declared.column if known else spec.label.observation_time
    times = instants(requests.column(fields[column]), column)[0] if known else observed
    assigned = scheme.assign(times)
    field = fields.get(column, serving_of(spec).observed)
    says = "{}" if column in fields else "the prediction is asked for as of {}, which"
    problems = [
        RequestProblem(
            int(i) + 1,
            field,
            f"{says.format(iso(int(times[i])))} is outside the calendar of {spec.label.source}",
            f"it starts at {scheme.start}" + (f" and ends before {scheme.end}" if scheme.end else ""),
        )
        for i in np.flatnonzero(assigned.code < 0)
    ]
    if problems:
        raise RequestsRefused("requests", problems)
    for index, key in enumerate(assigned.keys):
        yield key, np.flatnonzero(assigned.code == index)


def _pin(services: Services, spec: PipelineSpec, partition: str, observed: NDArray[np.int64]) -> PinnedInputs:
    """The versions in reach; the label partition and what was not over at the last observation need not exist."""
    last = int(observed.max())
    reach = partitions_in_reach(spec, Interval(int(observed.min()), last))
    spared: dict[str, set[str]] = {spec.label.source: {partition}}
    for source, partitions in reach.items():
        scheme = _scheme(spec, source)
        if scheme is not None:
            spared.setdefault(source, set()).update(p for p in partitions if scheme.window(p)[1] > last)
    pinned = pin_inputs(services, spec, reach, partition, spared)
    refuse_quarantined(spec, pinned)
    return pinned


def refuse_quarantined(spec: PipelineSpec, pinned: PinnedInputs) -> None:
    """Refuse inputs of which a part is quarantined that nothing may be computed without.

    Raises:
        InputQuarantined: a whole table, or any part where the declaration says so.
    """
    for source, partitions in pinned.skipped.items():
        refusing = partitions if spec.features.on_quarantined_input == "refuse" else [WHOLE_TABLE]
        blocking = [f"{source} {p}".rstrip() for p in partitions if p in refusing]
        if blocking:
            raise InputQuarantined(
                f"{', '.join(blocking[:10])} quarantined, and no feature may be computed without it",
                "mend and ingest it again",
            )


def freshness_of(
    spec: PipelineSpec, view: str, labels: LabelRows, inputs: PinnedInputs, cells: Mapping[str, Cells]
) -> Iterator[Freshness]:
    """What one view's features rest on in each label row."""
    observed, _ = instants(labels.inputs.column(spec.label.observation_time), spec.label.observation_time)
    own = [cells[f"{view}__{feature}"] for feature in spec.features.views[view].features]
    newest = np.full(len(observed), np.iinfo(np.int64).min)
    found = np.zeros(len(observed), dtype=np.bool_)
    for cell in own:
        event, present = instants(cell.event_time, view)
        newest = np.where(present, np.maximum(newest, event), newest)
        found |= np.isin(cell.reason, _ANSWERED)
    seen = newest > np.iinfo(np.int64).min
    late = incomplete_flags(spec, labels, replace(inputs, skipped={}, absent={}))[view]
    unread = incomplete_flags(spec, labels, inputs)[view]
    reasons = collapse(own[0].reason)
    for row in range(len(observed)):
        time = int(newest[row]) if seen[row] else None
        age = None if time is None else (int(observed[row]) - time) / 1_000_000
        incomplete = "" if not unread[row] else WATERMARK_BEHIND if late[row] else PARTITION_NOT_READ
        if found[row]:
            yield Freshness(time, age, "stale" if incomplete else "fresh", incomplete, incomplete)
        else:
            yield Freshness(time, age, "missing", Reason(reasons[row]).name.lower(), incomplete)
