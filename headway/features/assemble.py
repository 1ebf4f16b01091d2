"""Puts label rows and feature cells into the tables that a snapshot stores."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.datasets.digest import digest_of_rows, row_digests
from headway.declaration import PipelineSpec
from headway.features.kernel import Reason, collapse
from headway.features.labels import LabelRows
from headway.features.plan import Cells
from trainer.blobs import digest_json

_REASONS = pa.array([r.name.lower() for r in Reason])


def values_table(
    spec: PipelineSpec, labels: LabelRows, cells: Mapping[str, Cells], incomplete: Mapping[str, NDArray[np.bool_]]
) -> pa.Table:
    """Identity, target, inputs, features, event times, collapsed reasons and incompleteness flags, one row per label.

    A window's event time and reason belong to (view, duration) and stand once; field metadata of each feature names
    the columns that go with it.
    """
    names: list[pa.Field] = []
    columns: list[pa.Array | pa.ChunkedArray] = []
    for table in (labels.outcome, labels.inputs):
        for column in table.schema:
            if column.name not in {n.name for n in names}:
                names.append(pa.field(column.name, column.type))
                columns.append(table.column(column.name))
    done: set[str] = set()
    for feature, group in companions(spec).items():
        cell = cells[feature]
        beside = {"event_time": f"{group}__event_time", "reason": f"{group}__reason"}
        names.append(pa.field(feature, cell.value.type, metadata=beside))
        columns.append(cell.value)
        if group not in done:
            done.add(group)
            names += [pa.field(beside["event_time"], cell.event_time.type), pa.field(beside["reason"], pa.string())]
            columns += [cell.event_time, reason_names(collapse(cell.reason))]
    for view, flags in incomplete.items():
        names.append(pa.field(f"{view}__incomplete", pa.bool_()))
        columns.append(pa.array(flags))
    plain = [c.cast(f.type) if c.type != f.type else c for c, f in zip(columns, names, strict=True)]
    return pa.Table.from_arrays(plain, schema=pa.schema(names))


def details_table(spec: PipelineSpec, labels: LabelRows, cells: Mapping[str, Cells]) -> pa.Table:
    """Row identity and the full reason of every feature: it depends on rows not visible, so it is for people only."""
    identity = spec.sources[spec.label.source].row_id
    columns = {c: labels.outcome.column(c) for c in identity}
    columns |= {f"{group}__detail": reason_names(cells[f].reason) for f, group in companions(spec).items()}
    return pa.table(columns)


def companions(spec: PipelineSpec) -> dict[str, str]:
    """Feature -> prefix of the event time and reason columns that go with it."""
    found: dict[str, str] = {}
    for view_name, view in spec.features.views.items():
        windows = view.window_features()
        for feature in view.features:
            name = f"{view_name}__{feature}"
            found[name] = f"{view_name}__{windows[feature].duration}" if feature in windows else name
    return found | {n: n for n in (*spec.features.custom, *spec.features.derived)}


def cells_of(spec: PipelineSpec, table: pa.Table) -> dict[str, Cells]:
    """Cells back from a stored values table; reasons come back collapsed."""
    codes = {r.name.lower(): int(r) for r in Reason}
    cells: dict[str, Cells] = {}
    for feature, group in companions(spec).items():
        words = table.column(f"{group}__reason").to_pylist()
        cells[feature] = Cells(
            value=table.column(feature).combine_chunks(),
            event_time=table.column(f"{group}__event_time").combine_chunks(),
            reason=np.array([codes[w] for w in words], dtype=np.int8),
        )
    return cells


def reason_names(reasons: NDArray[np.int8]) -> pa.Array:
    """Reason codes as text, dictionary-encoded."""
    return pa.DictionaryArray.from_arrays(pa.array(reasons, pa.int8()), _REASONS).cast(pa.string())


def table_digest(table: pa.Table) -> str:
    """Content digest of stored values: names, types and rows, whatever their order or the file that holds them."""
    schema = digest_json([[f.name, str(f.type)] for f in sorted(table.schema, key=lambda f: f.name)])
    return digest_of_rows(row_digests(table), schema)


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as one Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def null_shares(spec: PipelineSpec, cells: Mapping[str, Cells]) -> dict[str, float]:
    """Share of null cells per feature; of no rows it is 0."""
    return {f: (cells[f].value.null_count / max(1, len(cells[f].value))) for f in spec.feature_names()}
