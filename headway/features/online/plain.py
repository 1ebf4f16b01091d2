"""Rows of tables as plain values and back, bit for bit: times are whole microseconds, dates whole days."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def plain_column(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column."""
    kind = column.type
    stored = pa.int64() if pa.types.is_timestamp(kind) else pa.int32() if pa.types.is_date32(kind) else None
    chunks = column.chunks if stored is None else [chunk.view(stored) for chunk in column.chunks]
    return chunks[0].to_pylist() if len(chunks) == 1 else [v for chunk in chunks for v in chunk.to_pylist()]


def plain_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table."""
    columns = [plain_column(column) for column in table.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def typed_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The column of a type that `plain_column` took apart."""
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    if pa.types.is_date32(kind):
        return pa.array(values, pa.int32()).view(kind)
    if pa.types.is_dictionary(kind):
        value_type: Any = kind
        return pa.array(values, value_type.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """The table that `plain_rows` took apart."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.Table.from_arrays(
        [typed_column(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )
