"""Derived features of a few rows are those of snapshots, whatever a function returns or raises."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headway.datasets.arrow import compute as pc
from headway.features.online.derived import derived_values
from headway.features.plan import DerivedFunction, FeatureFunctionFailed

COLUMNS = {"a": pa.array([1, None, 3], pa.int64()), "b": pa.array([0.5, 2.0, None], pa.float64())}
FUNCTIONS: dict[str, Callable[[pa.Table], Any]] = {
    "as declared": lambda row: pc.multiply(row.column("b"), 2.0),
    "one array": lambda row: pa.array([0.1, None, -0.0]),
    "converted": lambda row: row.column("a"),
    "not a number": lambda row: pa.array([0.1, float("nan"), 1.0]),
    "too few": lambda row: row.column("b").slice(1),
    "no array": lambda row: [1.0, 2.0, 3.0],
    "text": lambda row: pa.array(["x", "y", "z"]),
    "raises": lambda row: row.column("there is none"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_gives_is_taken_or_refused_as_in_snapshots(name: str) -> None:
    derived = DerivedFunction("d", "features.d", FUNCTIONS[name], pa.float64(), ("a", "b"))
    try:
        expected: object = derived.run(pa.table(COLUMNS), {}).value.to_pylist()
    except FeatureFunctionFailed as refusal:
        expected = str(refusal)
    try:
        found: object = next(iter(derived_values([derived], COLUMNS, 3)))
    except FeatureFunctionFailed as refusal:
        found = str(refusal)
    assert found == expected


def test_each_function_gets_its_own_columns_alone() -> None:
    seen: list[list[str]] = []

    def look(row: pa.Table) -> pa.ChunkedArray:
        seen.append(row.column_names)
        return row.column(0)

    functions = [DerivedFunction(n, "f", look, COLUMNS[n[0]].type, tuple(n)) for n in ("a", "ba", "a")]
    assert list(derived_values(functions, COLUMNS, 3)) == [COLUMNS[n].to_pylist() for n in "aba"]
    assert seen == [["a"], ["b", "a"], ["a"]]
