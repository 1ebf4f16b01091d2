"""Calls the functions of derived features over the columns of a few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headway.features.plan import DerivedFunction
from headway.features.plan import _function_cells as function_cells


def derived_values(derived: DerivedFunction, columns: Mapping[str, pa.Array], rows: int) -> list[Any]:
    """The values of `DerivedFunction.run`, from columns that hold at least its inputs.

    What a function returns as declared is taken as it is; anything else is converted or refused as in snapshots, whose
    checks cost several times what such a function does with one row.

    Raises:
        FeatureFunctionFailed: as `DerivedFunction.run`.
    """
    table = pa.Table.from_arrays([columns[c] for c in derived.inputs], names=list(derived.inputs))
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
