"""Calls the functions of derived features over the columns of a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from headway.features.plan import DerivedFunction
from headway.features.plan import _function_cells as function_cells


def derived_values(
    derived: Iterable[DerivedFunction], columns: Mapping[str, pa.Array], rows: int
) -> Iterator[list[Any]]:
    """The values of each `DerivedFunction.run`, from columns that hold at least their inputs.

    Raises:
        FeatureFunctionFailed: as `DerivedFunction.run`.
    """
    # Functions of the same columns get the same table, which nobody can change.
    tables: dict[tuple[str, ...], pa.Table] = {}
    for function in derived:
        names = function.inputs
        if names not in tables:
            tables[names] = pa.Table.from_arrays([columns[c] for c in names], names=list(names))
        yield _values(function, tables[names], rows)


def _values(derived: DerivedFunction, table: pa.Table, rows: int) -> list[Any]:
    """What a function returns as declared is taken as it is; anything else is converted or refused as in snapshots.

    Their checks cost several times what such a function does with one row.
    """
    try:
        result: Any = derived.function(table)
    except Exception as error:  # noqa: BLE001 - a pipeline's own code may raise anything, and is told by kind
        failure = error

        def fail() -> None:
            raise failure

        return function_cells(derived.name, derived.reference, derived.type, rows, fail).value.to_pylist()
    if isinstance(result, pa.Array | pa.ChunkedArray) and len(result) == rows and result.type.equals(derived.type):
        values = result.to_pylist()
        if all(v == v for v in values):
            return values
    return function_cells(derived.name, derived.reference, derived.type, rows, lambda: result).value.to_pylist()
