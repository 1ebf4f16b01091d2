"""The key of the event that a request asks about: what its label, which knows no prediction id, is found by."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from headway.declaration import PipelineSpec
from headway.features.clocks import instants
from trainer.blobs import digest_json


def match_of(spec: PipelineSpec) -> Mapping[str, str]:
    """Request field -> column of the label source that together name one event; empty: labels come by id only."""
    return {} if spec.monitoring is None else spec.monitoring.labels.match


def event_keys(spec: PipelineSpec, requests: pa.Table) -> list[str | None]:
    """The event that each request asks about: `sha256:<hex>` of the canonical JSON of its `match` fields by name.

    Args:
        spec: the declaration.
        requests: requests as they are kept (`headway.serving.features.as_kept`), or any table that has the match
            fields under their request names with personal columns treated; times count as microseconds UTC.

    Returns:
        One key per row, None for a row in which a match field is null; None for all when no match is declared.
    """
    fields = sorted(match_of(spec))
    if not fields:
        return [None] * requests.num_rows
    columns = [_plain(requests.column(name), name) for name in fields]
    return [
        None if None in values else digest_json(dict(zip(fields, values, strict=True)))
        for values in zip(*columns, strict=True)
    ]


def _plain(column: pa.ChunkedArray, name: str) -> list[str | int | float | bool | None]:
    if pa.types.is_timestamp(column.type):
        times, present = instants(column, name)
        return [int(time) if there else None for time, there in zip(times, present, strict=True)]
    values = column.to_pylist()
    return [None if v is None else str(v) for v in values] if pa.types.is_date(column.type) else values
