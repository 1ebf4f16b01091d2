"""From table columns to what a model takes: numbers and category codes, one row at a time.

The encoding is fitted on training rows only and travels in the artifact. Rules, the same in training and serving:

* A null, NaN or infinite number is missing. A finite one is cut at +-1e18, standardised, then cut at +-10 standard
  deviations, so that no input, however wrong, makes an output that is not finite.
* A missing number becomes 0, the training mean. When training rows lacked that input too, an indicator column says so;
  when none did, there is no indicator, because nothing could be learned about it.
* A category that training rows did not hold is code 0 ("other"), a missing one code 1, the others follow in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.blobs import Json

OTHER = 0
MISSING = 1
KNOWN_FROM = 2

LARGEST = 1e18
LARGEST_DEVIATION = 10.0
# Below so many rows, looking at texts one by one costs less than encoding them.
_FEW = 64

InputType = str


class EncodingRefused(ValueError):
    """A column or an encoding that cannot be used; `name` is the input."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"input {name!r}: {problem}")
        self.name = name


@dataclass(frozen=True)
class CategoricalInput:
    """A column of categories: `values` are those that training rows held, sorted; `type` is the column's type."""

    name: str
    type: InputType
    values: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of codes: other, missing, and one per value."""
        return KNOWN_FROM + len(self.values)


@dataclass(frozen=True)
class NumericInput:
    """A column of numbers: mean and standard deviation of the training rows' present values.

    `missing` tells whether training rows lacked it, which gives it an indicator column.
    """

    name: str
    type: InputType
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class InputEncoding:
    """How a model's inputs are encoded. Encoding a row depends on that row alone, bit for bit."""

    categorical: tuple[CategoricalInput, ...]
    numeric: tuple[NumericInput, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all input columns."""
        return (*(c.name for c in self.categorical), *(n.name for n in self.numeric))

    @property
    def numeric_width(self) -> int:
        """Columns of the numeric matrix: one per number, then one per missing indicator."""
        return len(self.numeric) + sum(n.missing for n in self.numeric)

    @property
    def category_sizes(self) -> tuple[int, ...]:
        """Number of codes of each categorical input."""
        return tuple(c.size for c in self.categorical)

    def encode(self, table: pa.Table) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The numeric matrix [rows, numeric_width] and the category codes [rows, categorical inputs] of `table`.

        Raises:
            EncodingRefused: an input column is not in the table or has another kind of type.
        """
        places = _places(table)
        values = np.empty((table.num_rows, len(self.numeric)), dtype=np.float64)
        for index, item in enumerate(self.numeric):
            values[:, index] = _floats(_column(table, places, item.name), item.name)
        missing = _cut(values)
        indicators = [index for index, item in enumerate(self.numeric) if item.missing]
        numbers = np.empty((table.num_rows, self.numeric_width), dtype=np.float32)
        numbers[:, : len(self.numeric)] = _standardised(values, missing, *self._spread)
        numbers[:, len(self.numeric) :] = missing[:, indicators]
        codes = np.empty((table.num_rows, len(self.categorical)), dtype=np.int64)
        for index, item in enumerate(self.categorical):
            codes[:, index] = _codes(_column(table, places, item.name), item.name, self._known[index])
        return numbers, codes

    @cached_property
    def _spread(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array([n.mean for n in self.numeric]), np.array([n.std for n in self.numeric])

    @cached_property
    def _known(self) -> tuple[dict[str, int], ...]:
        """The code of each value of each categorical input."""
        return tuple({v: KNOWN_FROM + index for index, v in enumerate(c.values)} for c in self.categorical)

    def to_json(self) -> dict[str, Json]:
        """The encoding as JSON."""
        return {
            "categorical": [{"name": c.name, "type": c.type, "values": list(c.values)} for c in self.categorical],
            "numeric": [
                {"name": n.name, "type": n.type, "mean": n.mean, "std": n.std, "missing": n.missing}
                for n in self.numeric
            ],
        }


def encoding_from_json(document: object) -> InputEncoding:
    """Read an encoding.

    Raises:
        EncodingRefused: other fields, types or numbers than `to_json` writes.
    """
    fields = _fields(document, "$", {"categorical": list, "numeric": list})
    categorical = [
        _fields(item, f"categorical[{i}]", {"name": str, "type": str, "values": list})
        for i, item in enumerate(fields["categorical"])
    ]
    numeric = [
        _fields(item, f"numeric[{i}]", {"name": str, "type": str, "mean": float, "std": float, "missing": bool})
        for i, item in enumerate(fields["numeric"])
    ]
    for item in numeric:
        if not math.isfinite(item["mean"]) or not math.isfinite(item["std"]) or item["std"] <= 0:
            raise EncodingRefused(item["name"], f"mean {item['mean']} and std {item['std']} cannot standardise")
    for item in categorical:
        values = cast("list[object]", item["values"])
        if not all(isinstance(v, str) for v in values) or values != sorted(set(cast("list[str]", values))):
            raise EncodingRefused(item["name"], "values are not distinct texts in order")
    encoding = InputEncoding(
        tuple(CategoricalInput(c["name"], c["type"], tuple(c["values"])) for c in categorical),
        tuple(NumericInput(**n) for n in numeric),
    )
    twice = sorted({c for c in encoding.columns if encoding.columns.count(c) > 1})
    if twice:
        raise EncodingRefused(twice[0], "stands twice")
    return encoding


def fit_inputs(table: pa.Table, categorical: Sequence[str], numeric: Sequence[str]) -> InputEncoding:
    """The encoding of these columns, fitted on the rows of `table`: training rows and no others.

    Raises:
        EncodingRefused: a column is not there, or its type cannot be used.
    """
    return InputEncoding(
        tuple(_fit_categorical(table, name) for name in categorical),
        tuple(_fit_numeric(table, name) for name in numeric),
    )


def numeric_values(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as float64, NaN where it is missing, finite values cut at +-1e18.

    Raises:
        EncodingRefused: there is no such column, or it holds no numbers.
    """
    values = np.array(_floats(_column(table, _places(table), name), name))
    _cut(values)
    return values


def category_values(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of categories as text.

    Raises:
        EncodingRefused: there is no such column, or it holds neither text, whole numbers nor booleans.
    """
    return _texts(_column(table, _places(table), name), name)


def _fit_numeric(table: pa.Table, name: str) -> NumericInput:
    values = numeric_values(table, name)
    present = values[~np.isnan(values)]
    mean = float(present.mean()) if len(present) else 0.0
    std = float(present.std()) if len(present) else 0.0
    kind = _numeric_type(name, table.schema.field(name).type)
    return NumericInput(name, kind, mean, std if std > 0 else 1.0, missing=len(present) < len(values))


def _fit_categorical(table: pa.Table, name: str) -> CategoricalInput:
    values = category_values(table, name).unique().drop_null().to_pylist()
    return CategoricalInput(name, _category_type(name, table.schema.field(name).type), tuple(sorted(values)))


def _floats(column: pa.ChunkedArray, name: str) -> NDArray[np.float64]:
    """A column's values, NaN where null; not to be written to."""
    _numeric_type(name, column.type)
    plain = column if pa.types.is_float64(column.type) else column.cast(pa.float64(), safe=False)
    return plain.to_numpy(zero_copy_only=False)


def _cut(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Make what is no finite number NaN and cut the others at +-1e18, in place; return which are missing."""
    missing = ~np.isfinite(values)
    values[missing] = np.nan
    np.clip(values, -LARGEST, LARGEST, out=values)
    return missing


def _standardised(
    values: NDArray[np.float64], missing: NDArray[np.bool_], mean: NDArray[np.float64], std: NDArray[np.float64]
) -> NDArray[np.float64]:
    # A tiny deviation of training rows may send a quotient to infinity, which the cut then makes finite.
    with np.errstate(over="ignore"):
        deviations = np.clip((values - mean) / std, -LARGEST_DEVIATION, LARGEST_DEVIATION)
    deviations[missing] = 0.0
    return deviations


def _texts(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    _category_type(name, column.type)
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _codes(column: pa.ChunkedArray, name: str, known: Mapping[str, int]) -> NDArray[np.int64]:
    texts = _texts(column, name)
    if len(texts) < _FEW:
        return np.array([MISSING if v is None else known.get(v, OTHER) for v in texts.to_pylist()], np.int64)
    encoded = cast("Any", texts.combine_chunks()).dictionary_encode()
    lookup = np.array([known.get(value, OTHER) for value in encoded.dictionary.to_pylist()] + [MISSING], np.int64)
    return lookup[encoded.indices.fill_null(len(lookup) - 1).to_numpy()]


def _places(table: pa.Table) -> dict[str, list[int]]:
    """Where each column name stands."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(table.schema.names):
        found.setdefault(name, []).append(index)
    return found


def _column(table: pa.Table, places: Mapping[str, list[int]], name: str) -> pa.ChunkedArray:
    at = places.get(name, [])
    if len(at) != 1:
        raise EncodingRefused(name, f"stands {len(at)} times in {table.schema.names!r:.400}")
    return table.column(at[0])


def _numeric_type(name: str, kind: pa.DataType) -> InputType:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    if pa.types.is_floating(kind) or pa.types.is_null(kind):
        return "float64"
    raise EncodingRefused(name, f"is {kind}; a model takes int64, float64 or bool")


def _category_type(name: str, kind: pa.DataType) -> InputType:
    if pa.types.is_dictionary(kind):
        kind = cast("pa.DictionaryType[Any, Any, Any]", kind).value_type
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return "string"
    raise EncodingRefused(name, f"is {kind}; categories are string, int64 or bool")


def _fields(raw: object, place: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise EncodingRefused(place, "is no object")
    document = cast("dict[str, Any]", raw)
    if set(document) != set(kinds):
        raise EncodingRefused(place, f"has fields {sorted(document)!r:.200}, expected {sorted(kinds)}")
    for name, kind in kinds.items():
        # Canonical JSON writes 1.0 and 1 differently, but a reader may meet a whole number where a mean belongs.
        value = document[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            document = {**document, name: float(value)}
        elif not isinstance(value, kind):
            raise EncodingRefused(f"{place}.{name}", f"{value!r:.80} is no {kind.__name__}")
    return document
