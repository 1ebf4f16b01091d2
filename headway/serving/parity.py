"""Whether the online store and the batch path give the same features, on a sample of the label source's entities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headway.datasets.partitions import PartitionScheme
from headway.datasets.rows import dataset_name, load_rows
from headway.datasets.text import ARROW_TYPES, TIMESTAMP
from headway.declaration import PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.features.online.answer import OnlineFeatures
from headway.features.online.store import OnlineState, OnlineStore
from headway.loading import Pipeline
from headway.services import Services
from headway.serving.features import compute_features
from headway.serving.requests import serving_of

SAMPLE = 24


@dataclass(frozen=True)
class Parity:
    """Features of `rows` sampled requests, asked as of `observed` (microseconds UTC) by both ways.

    `differing` counts by column the requests whose cell is not the same to the last bit. With no rows, `reason` says
    why nothing could be compared.
    """

    rows: int
    cells: int
    observed: int | None
    differing: Mapping[str, int]
    reason: str


def compare_online(services: Services, pipeline: Pipeline, online: OnlineStore, sample: int = SAMPLE) -> Parity:
    """Ask for entities of the newest released label rows, as of what the store knows, online and in batch.

    Raises:
        OnlineNotReady, OnlineUnavailable: the store cannot answer.
    """
    spec = pipeline.spec
    features = OnlineFeatures(pipeline, online, services.principal.tenant)
    state = features.state()
    requests, reason = _requests(services, spec, state, sample)
    if requests is None:
        return Parity(0, 0, None, {}, reason)
    answered = features.compute(requests, state.until)
    try:
        computed = compute_features(services, pipeline, requests)
    except HeadwayError as refusal:
        return Parity(0, 0, None, {}, f"the batch path cannot be asked: {refusal.message}")
    names = computed.values.column_names
    differing = {name: _differing(computed.values, answered.values, name) for name in names}
    return Parity(
        requests.num_rows,
        requests.num_rows * len(names),
        int(answered.observed[0]),
        {name: count for name, count in differing.items() if count},
        "",
    )


def _differing(one: pa.Table, other: pa.Table, name: str) -> int:
    if name not in other.column_names:
        return one.num_rows
    return sum(a != b for a, b in zip(_bits(one.column(name)), _bits(other.column(name)), strict=True))


def _requests(services: Services, spec: PipelineSpec, state: OnlineState, sample: int) -> tuple[pa.Table | None, str]:
    """Requests about entities of label rows, all observed at one instant that the store covers, or why not."""
    serving, source = serving_of(spec), spec.sources[spec.label.source]
    assert source.partition is not None
    scheme = PartitionScheme.from_spec(source.partition)
    asked = state.until
    if scheme.end is not None:
        asked = min(asked, scheme.window(scheme.keys()[-1])[1] - 1)
    if asked - duration_us(serving.before) < state.since:
        return None, f"the calendar of {spec.label.source} ended before what is kept online"
    versions = services.catalog.current_many(
        services.principal, dataset_name(spec.name, spec.label.source), scheme.keys_between(state.since, asked)
    )
    released = [v for v in versions.values() if v.status == "released" and v.facts.rows]
    if not released:
        return None, f"{spec.label.source} has no released rows of the last days"
    rows = load_rows(services, released[-1])
    if not rows.num_rows:
        return None, f"{released[-1].dataset} {released[-1].partition} has no rows"
    chosen = np.unique(np.linspace(0, rows.num_rows - 1, sample).astype(np.int64))
    some = rows.take(pa.array(chosen))
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name, field in serving.request.items():
        kind = ARROW_TYPES[field.type]
        if name == serving.observed:
            columns[name] = pa.array([asked] * some.num_rows).cast(TIMESTAMP)
        elif field.column == spec.label.observation_time:
            columns[name] = pa.array([asked - duration_us(serving.before)] * some.num_rows).cast(TIMESTAMP)
        elif field.column:
            columns[name] = some.column(field.column).cast(kind)
        else:
            columns[name] = pa.nulls(some.num_rows, kind)
    return pa.table(columns), ""


def _bits(column: pa.ChunkedArray) -> list[object]:
    """Every cell, floats as their bits: equal cells are equal to the last bit."""
    whole = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    if pa.types.is_dictionary(whole.type):
        whole = whole.cast(whole.type.value_type)
    return (whole.view(pa.int64()) if pa.types.is_float64(whole.type) else whole).to_pylist()
