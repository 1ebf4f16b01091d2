"""Encoding of keys, identities and times: nothing is coerced, nothing is guessed."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.features.kernel import KernelInputError
from headway.features.kernel.encode import ColumnError, encode_identity, encode_keys, to_microseconds

UTC = dt.UTC
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def codes(rows: pa.Array, observations: pa.Array) -> tuple[list[int], list[int], int]:
    encoded = encode_keys({"k": rows}, {"k": observations})
    return encoded.rows.tolist(), encoded.observations.tolist(), encoded.groups


def test_null_and_unknown_keys_have_their_own_codes() -> None:
    assert codes(pa.array(["b", None, "a", "b"]), pa.array(["a", None, "zz", "b"])) == (
        [1, -1, 0, 1],
        [0, -1, -2, 1],
        2,
    )


@pytest.mark.parametrize(
    ("rows", "observations"),
    [
        (pa.array(["b", "a"]), pa.array(["a", "b"], pa.large_string())),
        (pa.array([2, 1], pa.int16()), pa.array([1, 2], pa.uint32())),
        (pa.array([True, False]), pa.array([False, True])),
        (
            pa.array([dt.date(2013, 1, 2), dt.date(1, 1, 1)]),
            pa.array([dt.date(1, 1, 1), dt.date(2013, 1, 2)], pa.date64()),
        ),
        (
            pa.array([Decimal("2.50"), Decimal("-1.25")], pa.decimal128(5, 2)),
            pa.array([Decimal("-1.25"), Decimal("2.50")], pa.decimal128(9, 2)),
        ),
        (
            pa.array(
                [dt.datetime(2013, 1, 2, tzinfo=UTC), dt.datetime(2013, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")
            ),
            pa.array(
                [dt.datetime(2013, 1, 1, tzinfo=UTC), dt.datetime(2013, 1, 2, tzinfo=UTC)],
                pa.timestamp("s", "America/New_York"),
            ),
        ),
        (
            pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["b", "a"])),
            pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", "b"])),
        ),
    ],
)
def test_kinds_compare_by_value_whatever_their_storage(rows: pa.Array, observations: pa.Array) -> None:
    assert codes(rows, observations) == ([1, 0], [0, 1], 2)


@pytest.mark.parametrize(
    ("rows", "observations"),
    [
        (pa.array(["001"]), pa.array([1])),
        (pa.array([1]), pa.array([1.0])),
        (pa.array([1]), pa.array([True])),
        (pa.array([1.5]), pa.array([1.5])),
        (pa.array([Decimal("1.0")], pa.decimal128(5, 1)), pa.array([Decimal("1.00")], pa.decimal128(5, 2))),
        (pa.array([b"a"]), pa.array([b"a"])),
        (pa.array([2**63], pa.uint64()), pa.array([1])),
        (pa.array([dt.datetime(2013, 1, 1)]), pa.array([dt.datetime(2013, 1, 1)])),  # noqa: DTZ001 - naive on purpose
    ],
)
def test_other_types_are_refused_with_the_column_name(rows: pa.Array, observations: pa.Array) -> None:
    with pytest.raises(ColumnError, match="'tail'"):
        encode_keys({"tail": rows}, {"tail": observations})


def test_leading_zeros_keep_keys_apart() -> None:
    assert codes(pa.array(["007", "7"]), pa.array(["7", "007"])) == ([0, 1], [1, 0], 2)


@pytest.mark.parametrize("side", ["rows", "observations"])
def test_text_must_be_composed_and_the_error_shows_no_value(side: str) -> None:
    good, bad = pa.array(["x", COMPOSED]), pa.array(["x", DECOMPOSED])
    with pytest.raises(ColumnError, match="row 1 is not in Unicode normal form C") as refused:
        encode_keys({"k": bad if side == "rows" else good}, {"k": good if side == "rows" else bad})
    assert DECOMPOSED not in str(refused.value)


def test_composite_keys_ignore_the_order_of_columns_and_a_null_part_is_a_null_key() -> None:
    rows = {"a": pa.array(["x", "x", None, "y"]), "b": pa.array([1, 2, 1, 1])}
    observations = {"b": pa.array([1, 2, 1, 9, None]), "a": pa.array(["y", "x", "z", "x", "nobody"])}
    encoded = encode_keys(rows, observations)
    assert encoded.rows.tolist() == [0, 1, -1, 2]
    assert encoded.observations.tolist() == [2, 1, -2, -2, -1]
    assert encoded.groups == 3


def test_parts_must_have_the_same_names() -> None:
    with pytest.raises(ColumnError, match="origin"):
        encode_keys({"origin": pa.array(["a"])}, {"airport": pa.array(["a"])})


def test_parts_must_have_the_same_length() -> None:
    with pytest.raises(KernelInputError, match="length"):
        encode_keys({"a": pa.array([1]), "b": pa.array([1, 2])}, {"a": pa.array([1]), "b": pa.array([1])})


def test_scopes_keep_rows_apart() -> None:
    encoded = encode_keys(
        {"k": pa.array(["a", "a"])},
        {"k": pa.array(["a", "a", "a"])},
        row_scope=np.array([0, 7], np.int64),
        observation_scope=np.array([7, 0, 3], np.int64),
    )
    first, second = encoded.rows.tolist()
    assert first != second
    assert encoded.observations.tolist()[:2] == [second, first]
    assert encoded.observations[2] not in (first, second), "no row lives in that scope"
    assert max(encoded.rows.tolist()) < encoded.groups


def test_many_wide_parts_do_not_overflow() -> None:
    size = 70_000
    part = pa.array(np.arange(size))
    rows = dict.fromkeys("abcd", part)
    encoded = encode_keys(rows, dict.fromkeys("abcd", part[size - 2 :]))
    assert encoded.rows.tolist() == list(range(size))
    assert encoded.observations.tolist() == [size - 2, size - 1]


def test_a_thousand_chunks_and_empty_columns() -> None:
    chunks = pa.chunked_array([pa.array([str(i % 7)]) for i in range(1_000)])
    whole = chunks.combine_chunks()
    assert encode_keys({"k": chunks}, {"k": whole}).rows.tolist() == [i % 7 for i in range(1_000)]
    assert codes(pa.array([], pa.string()), pa.array(["a", None])) == ([], [-2, -1], 0)
    assert codes(pa.array(["a"]), pa.array([], pa.string())) == ([0], [], 1)
    assert codes(pa.array([None, None]), pa.array(["a", None])) == ([-1, -1], [-2, -1], 0)


PARTS = st.lists(st.tuples(st.sampled_from(["", "a", "b", "é", "\U0001f600", "Z"]), st.integers(-3, 3)), max_size=12)


@settings(deadline=None, max_examples=200)
@given(PARTS, PARTS)
def test_identity_ranks_keep_the_order_of_values_and_of_what_else_is_loaded(
    some: list[tuple[str, int]], more: list[tuple[str, int]]
) -> None:
    def ranks(pairs: list[tuple[str, int]]) -> list[int]:
        return encode_identity(
            {"a": pa.array([p[0] for p in pairs], pa.string()), "b": pa.array([p[1] for p in pairs], pa.int64())}
        ).tolist()

    alone, together = ranks(some), ranks(some + more)[: len(some)]
    for i in range(len(some)):
        for j in range(len(some)):
            assert (alone[i] < alone[j]) == (some[i] < some[j]) == (together[i] < together[j])


def test_identity_is_never_null() -> None:
    with pytest.raises(ColumnError, match="row 1 has no row identity"):
        encode_identity({"id": pa.array([3, None])})


def at(unit: str, *values: int | None, zone: str | None = "UTC") -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp(unit, zone))


def test_units_and_zones_agree_exactly() -> None:
    moment = 1_383_458_400
    expected = [moment * 1_000_000, -1_000_000]
    for unit, scale in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        for zone in ("UTC", "America/New_York", "+02:00"):
            instants = to_microseconds(at(unit, moment * scale, -scale, None, zone=zone), "t")
            assert instants.microseconds.tolist() == [*expected, 0]
            assert instants.null.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (at("us", 0, zone=None), "no zone"),
        (at("ns", 1_000, 1_001), r"row 1 holds 1001 ns"),
        (at("ns", -1), r"row 0 holds -1 ns"),
        (at("us", 2**63 - 1), "outside the years 1 to 9999"),
        (at("us", -(2**63) + 1), "outside the years 1 to 9999"),
        (at("ns", 2**63 - 1), "outside"),
        (at("s", 2**62), "outside the years 1 to 9999"),
        (at("s", 253_402_300_800), "outside the years 1 to 9999"),
        (at("us", -62_135_596_800_000_001), "outside the years 1 to 9999"),
        (pa.array([1.5]), "timestamp"),
        (pa.array(["2013-01-01"]), "timestamp"),
    ],
)
def test_times_that_cannot_be_exact_are_refused(column: pa.Array, message: str) -> None:
    with pytest.raises(ColumnError, match=message) as refused:
        to_microseconds(column, "seen_at")
    assert refused.value.column == "seen_at"


def test_the_edges_of_the_calendar_are_taken() -> None:
    first, last = -62_135_596_800, 253_402_300_799
    assert to_microseconds(at("s", first, last), "t").microseconds.tolist() == [first * 10**6, last * 10**6]
    edge: Any = at("us", first * 10**6, last * 10**6 + 999_999)
    assert to_microseconds(edge, "t").microseconds.tolist() == [first * 10**6, last * 10**6 + 999_999]
    chunked = pa.chunked_array([edge[:1], edge[1:]])
    assert to_microseconds(chunked, "t").microseconds.tolist() == [first * 10**6, last * 10**6 + 999_999]
