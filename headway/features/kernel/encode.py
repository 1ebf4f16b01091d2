"""From Arrow columns to the kernel's int64 codes and microseconds. Nothing is coerced: what does not fit is refused.

Codes keep the order of the values (text by code point), so an order by codes never depends on what else was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from headway.features.kernel.types import NULL_KEY, UNKNOWN_KEY, KernelInputError

Arrow: TypeAlias = "pa.Array | pa.ChunkedArray"
Ints = NDArray[np.int64]

# pyarrow makes its functions at run time, so no type checker can see them.
pc: Any = pyarrow.compute

YEAR_1 = -62_135_596_800_000_000
YEAR_9999_END = 253_402_300_799_999_999
PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
CODE_LIMIT = 2**62
BITMAP_LIMIT = 2**26


class ColumnError(KernelInputError):
    """A column cannot be encoded. `column` is its name."""

    def __init__(self, column: str, message: str, remedy: str = "") -> None:
        self.column = column
        super().__init__(f"column {column!r}: {message}", remedy)


@dataclass(frozen=True)
class EncodedKeys:
    """Group codes of both sides: 0 .. groups - 1, -1 for a null part, -2 (observations) for a key that no row has.

    With scopes some codes may belong to no row: an observation of a key that its scope lacks may hold one of those.
    """

    rows: NDArray[np.int64]
    observations: NDArray[np.int64]
    groups: int


@dataclass(frozen=True)
class Instants:
    """Instants in int64 microseconds UTC; `null` marks the missing ones, which hold 0."""

    microseconds: NDArray[np.int64]
    null: NDArray[np.bool_]


def encode_keys(
    rows: Mapping[str, Arrow],
    observations: Mapping[str, Arrow],
    *,
    row_scope: NDArray[np.int64] | None = None,
    observation_scope: NDArray[np.int64] | None = None,
) -> EncodedKeys:
    """Encode an entity key of one or several parts, the same names on both sides in any order.

    With scopes (integers >= 0, both sides or neither) a row and an observation match only inside the same scope.

    Raises:
        ColumnError: parts differ between the sides in name, length or kind of type; a float or unsupported type; text
            that is not in Unicode normal form C.
    """
    if not rows or set(rows) != set(observations):
        raise ColumnError(
            ", ".join(sorted(set(rows) ^ set(observations))) or "key",
            f"key parts are {sorted(rows)} in the source and {sorted(observations)} in the observations",
            "name the same parts on both sides",
        )
    if (row_scope is None) != (observation_scope is None):
        raise KernelInputError("a scope was given for one side only", "give both or neither")
    parts: list[tuple[Ints, Ints, int]] = []
    if row_scope is not None and observation_scope is not None:
        parts.append(scope_part(row_scope, observation_scope))
    parts.extend(key_part(name, rows[name], observations[name]) for name in rows)
    left, right = 0, 0
    for row_codes, observation_codes, _ in parts:
        left, right = left or len(row_codes), right or len(observation_codes)
        if (len(row_codes), len(observation_codes)) != (left, right):
            raise KernelInputError(
                f"key parts have lengths {left} and {len(row_codes)}, {right} and {len(observation_codes)}"
            )
    row_code, observation_code, size = parts[0]
    for next_rows, next_observations, next_size in parts[1:]:
        if size * max(next_size, 1) >= CODE_LIMIT:
            row_code, observation_code, size = dense(row_code, observation_code, size)
        row_code = paired(row_code, next_rows, next_size)
        observation_code = paired(observation_code, next_observations, next_size)
        size *= max(next_size, 1)
    # Side by side in scopes, most pairs of scope and key have rows; numbering them anew would cost more than it saves.
    if row_scope is None or size > 4 * len(row_code) + 1024:
        row_code, observation_code, size = dense(row_code, observation_code, size)
    return EncodedKeys(row_code, observation_code, size)


def encode_identity(columns: Mapping[str, Arrow]) -> NDArray[np.int64]:
    """Rank of each row's identity (one or several columns, compared in the given order) among the distinct ones.

    Raises:
        ColumnError: a null, a float or unsupported type, or text that is not in Unicode normal form C.
    """
    if not columns:
        raise KernelInputError("a row identity needs a column")
    code: Ints | None = None
    size = 1
    for name, column in columns.items():
        part, _, part_size = key_part(name, column, None)
        if len(part) and int(part.min()) < 0:
            raise ColumnError(
                name, f"row {int(np.argmin(part))} has no row identity", "name columns that are never null"
            )
        if code is None:
            code, size = part, part_size
            continue
        if len(part) != len(code):
            raise ColumnError(name, f"has {len(part)} rows, the columns before have {len(code)}")
        if size * max(part_size, 1) >= CODE_LIMIT:
            code, _, size = dense(code, code[:0], size)
        code = paired(code, part, part_size)
        size *= max(part_size, 1)
    assert code is not None
    return code if len(columns) == 1 else dense(code, code[:0], size)[0]


def to_microseconds(column: Arrow, name: str) -> Instants:
    """Convert a zone-aware timestamp column of any unit exactly to microseconds UTC.

    Raises:
        ColumnError: not a timestamp, without zone, nanoseconds that are no whole microsecond, or a time outside the
            years 1 to 9999 (as the infinities that some databases write are).
    """
    unit, zone = timestamp_type(column, name)
    if zone is None:
        raise ColumnError(name, "timestamps have no zone", "declare the source's zone")
    raw, null = stored_integers(column)
    scale = PER_SECOND[unit]
    if scale <= 1_000_000:
        factor = 1_000_000 // scale
        low, high = -(-YEAR_1 // factor), YEAR_9999_END // factor
    else:
        low, high = YEAR_1 * 1_000, np.iinfo(np.int64).max
        low = max(low, int(np.iinfo(np.int64).min))
    outside = ((raw < low) | (raw > high)) & ~null
    if scale > 1_000_000:
        # Nanoseconds end in 2262 anyway; the outermost numbers are the infinities.
        outside |= ((raw == np.iinfo(np.int64).max) | (raw == np.iinfo(np.int64).min)) & ~null
    if outside.any():
        at = int(np.argmax(outside))
        raise ColumnError(
            name,
            f"row {at} holds {int(raw[at])} {unit} since 1970, outside the years 1 to 9999",
            "use null for no time",
        )
    if scale <= 1_000_000:
        return Instants(raw if scale == 1_000_000 else raw * (1_000_000 // scale), null)
    broken = (raw % 1_000 != 0) & ~null
    if broken.any():
        at = int(np.argmax(broken))
        raise ColumnError(
            name, f"row {at} holds {int(raw[at])} ns since 1970, no whole microsecond", "round in the source, by name"
        )
    return Instants(raw // 1_000, null)


def timestamp_type(column: Arrow, name: str) -> tuple[str, str | None]:
    """Unit and zone of a timestamp column."""
    kind = column.type
    if not pa.types.is_timestamp(kind):
        raise ColumnError(name, f"has type {kind}, needed is a timestamp with a zone")
    return kind.unit, kind.tz


def stored_integers(column: Arrow) -> tuple[Ints, NDArray[np.bool_]]:
    """Stored int64 of a timestamp column, 0 where null, and the null mask."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks)
    integers: pa.Array = whole.view(pa.int64())
    if not integers.null_count:
        return integers.to_numpy(zero_copy_only=False), np.zeros(len(integers), np.bool_)
    null = integers.is_null().to_numpy(zero_copy_only=False)
    return integers.fill_null(0).to_numpy(zero_copy_only=False), null


def scope_part(rows: Ints, observations: Ints) -> tuple[Ints, Ints, int]:
    """Codes of the leading scope."""
    for array in (rows, observations):
        if array.dtype != np.int64 or (len(array) and int(array.min()) < 0):
            raise KernelInputError(f"a scope holds {array.dtype} or a negative number", "use int64 >= 0")
    size = int(rows.max(initial=-1)) + 1
    if size <= BITMAP_LIMIT:
        return rows, np.where(observations < size, observations, UNKNOWN_KEY), size
    values = np.unique(rows)
    return np.searchsorted(values, rows), known_or_unknown(values, observations), len(values)


def known_or_unknown(values: Ints, wanted: Ints) -> Ints:
    """Position of each wanted integer in sorted values, -2 where it is not there; negative ones stay."""
    if not len(values):
        return np.where(wanted < 0, wanted, UNKNOWN_KEY)
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(wanted < 0, wanted, np.where(values[at] == wanted, at, UNKNOWN_KEY))


def key_part(name: str, rows: Arrow, observations: Arrow | None) -> tuple[Ints, Ints, int]:
    """Codes of one part on both sides, and the number of its distinct values in the rows."""
    if pa.types.is_dictionary(rows.type):
        words, indices = dictionary(rows)
        of_words, wanted, size = key_part(name, words, observations)
        return np.where(indices < 0, NULL_KEY, of_words[indices]) if len(words) else indices, wanted, size
    family, row_values = plain(name, rows)
    wanted: Arrow = row_values[:0]
    if observations is not None:
        other, wanted = plain(name, observations)
        if pa.types.is_null(rows.type):
            family, row_values = other, row_values.cast(wanted.type)
        elif pa.types.is_null(observations.type):
            other, wanted = family, wanted.cast(row_values.type)
        if other != family:
            raise ColumnError(
                name,
                f"is {rows.type} in the source and {observations.type} in the observations",
                "declare one type; keys are never converted",
            )
    distinct = pc.drop_null(pc.unique(row_values))
    distinct = distinct.take(pc.array_sort_indices(distinct))
    return codes(row_values, distinct, UNKNOWN_KEY), codes(wanted, distinct, UNKNOWN_KEY), len(distinct)


def dictionary(column: Arrow) -> tuple[pa.Array, Ints]:
    """Values of a dictionary-encoded column, and for each entry the position of its value, -1 where null.

    Encoding the few values once is what makes long columns cheap.
    """
    whole = column.unify_dictionaries().combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks)
    indices = whole.indices
    filled = indices.fill_null(-1) if indices.null_count else indices
    return whole.dictionary, filled.to_numpy(zero_copy_only=False).astype(np.int64)


def codes(column: Arrow, distinct: pa.Array, absent: int) -> Ints:
    """Position of each entry in `distinct`, -1 where null, `absent` where it is not there."""
    found = pc.index_in(column, value_set=distinct)
    if column.null_count:
        fallback = pc.if_else(column.is_null(), pa.scalar(NULL_KEY, pa.int32()), pa.scalar(absent, pa.int32()))
        found = pc.coalesce(found, fallback)
    elif found.null_count:
        found = found.fill_null(absent)
    return (
        found.to_numpy(zero_copy_only=False).astype(np.int64)
        if isinstance(found, pa.Array)
        else (found.to_numpy().astype(np.int64))
    )


def plain(name: str, column: Arrow) -> tuple[str, Arrow]:
    """Kind of a key column, and the column in the one type by which that kind is compared."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return plain(name, column.cast(kind.value_type))
    if pa.types.is_null(kind):
        return "null", column
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        text = column.cast(pa.large_string())
        refuse_other_forms(name, text)
        return "text", text
    if pa.types.is_integer(kind):
        return "integer", checked_cast(name, column, pa.int64())
    if pa.types.is_boolean(kind):
        return "bool", column.cast(pa.int8())
    if pa.types.is_date(kind):
        return "date", checked_cast(name, column, pa.date32())
    if pa.types.is_decimal(kind):
        return f"decimal({kind.scale})", checked_cast(name, column, pa.decimal256(76, kind.scale))
    if pa.types.is_timestamp(kind):
        instants = to_microseconds(column, name)
        return "timestamp", pa.array(instants.microseconds, mask=instants.null)
    raise ColumnError(
        name,
        f"has type {kind}, which cannot be a key",
        "use text, integer, bool, date, timestamp with a zone or decimal",
    )


def checked_cast(name: str, column: Arrow, to: pa.DataType) -> Arrow:
    """Cast inside one kind, refusing values that do not fit."""
    try:
        return column.cast(to)
    except pa.ArrowInvalid as error:
        raise ColumnError(name, f"a value of type {column.type} does not fit {to}") from error


def refuse_other_forms(name: str, text: Arrow) -> None:
    """Refuse text that is not in Unicode normal form C: it looks equal and compares different. Values are not shown."""
    distinct = pc.drop_null(pc.unique(text))
    off = pc.not_equal(pc.utf8_normalize(distinct, form="NFC"), distinct)
    if pc.any(off).as_py():
        row = pc.index(text, distinct.filter(off)[0]).as_py()
        raise ColumnError(name, f"row {row} is not in Unicode normal form C", "normalise the source's text")


def paired(first: Ints, second: Ints, size: int) -> Ints:
    """One code for two; a null in either wins over an unknown in either."""
    if not len(first) or (int(first.min()) >= 0 and int(second.min()) >= 0):
        return first * size + second
    bad = np.where((first == NULL_KEY) | (second == NULL_KEY), NULL_KEY, UNKNOWN_KEY)
    return np.where((first < 0) | (second < 0), bad, first * size + second)


def dense(rows: Ints, observations: Ints, size: int) -> tuple[Ints, Ints, int]:
    """Renumber the codes that rows have to 0 .. k - 1 in order; observations of others become unknown."""
    if size <= max(BITMAP_LIMIT, 2 * len(rows)):
        present = np.zeros(max(size, 1), np.bool_)
        present[rows[rows >= 0]] = True
        if present.all() and size:
            return rows, observations, size
        number = np.cumsum(present) - 1
        lookup = np.where(present, number, UNKNOWN_KEY)
        return (
            np.where(rows < 0, rows, lookup[np.maximum(rows, 0)]),
            np.where(observations < 0, observations, lookup[np.maximum(observations, 0)]),
            int(number[-1]) + 1,
        )
    values = np.unique(rows)
    values = values[values >= 0]
    return known_or_unknown(values, rows), known_or_unknown(values, observations), len(values)


__all__: Sequence[str] = (
    "ColumnError",
    "EncodedKeys",
    "Instants",
    "encode_identity",
    "encode_keys",
    "to_microseconds",
)
