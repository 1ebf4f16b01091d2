"""Encoders: fitted values, the rules for missing, unseen and absurd values, and row-wise purity."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.encoders import (
    LARGEST_DEVIATION,
    EncodingRefused,
    InputEncoding,
    NumericInput,
    encoding_from_json,
    fit_inputs,
)

TRAIN = pa.table(
    {
        "carrier": ["UA", "AA", None, "UA"],
        "leg": pa.array([10, 2, 2, 10], pa.int64()),
        "delay": [1.0, 3.0, None, 5.0],
        "count": pa.array([4, 4, 4, 4], pa.int64()),
        "holiday": [True, False, False, True],
    }
)
FITTED = fit_inputs(TRAIN, ["carrier", "leg"], ["delay", "count", "holiday"])


def encoded(**columns: object) -> tuple[list[list[float]], list[list[int]]]:
    """One row that is like the training rows but for these columns."""
    row = {"carrier": "UA", "leg": 2, "delay": 3.0, "count": 4, "holiday": True, **columns}
    table = pa.table({n: pa.array([v], TRAIN.schema.field(n).type) for n, v in row.items()})
    numbers, codes = FITTED.encode(table)
    return numbers.tolist(), codes.tolist()


def test_values_and_codes_by_hand() -> None:
    numbers, codes = FITTED.encode(TRAIN)
    spread = math.sqrt(8 / 3)
    expected = [[-2 / spread, 0, 1, 0], [0, 0, -1, 0], [0, 0, -1, 1], [2 / spread, 0, 1, 0]]
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers, np.array(expected, np.float32))
    assert codes.tolist() == [[3, 2], [2, 3], [1, 3], [3, 2]]


def test_sizes_and_names() -> None:
    assert FITTED.columns == ("carrier", "leg", "delay", "count", "holiday")
    assert FITTED.numeric_width == 4
    assert FITTED.category_sizes == (4, 4)
    assert [n.type for n in FITTED.numeric] == ["float64", "int64", "bool"]
    assert [c.type for c in FITTED.categorical] == ["string", "int64"]


def test_categories_that_training_did_not_hold_are_other_and_null_is_missing() -> None:
    assert encoded(carrier="ZZ")[1] == [[0, 3]]
    assert encoded(carrier="")[1] == [[0, 3]]
    assert encoded(carrier=None, leg=None)[1] == [[1, 1]]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_null_nan_and_infinity_are_missing(value: float | None) -> None:
    assert encoded(delay=value)[0] == [[0.0, 0.0, 1.0, 1.0]]


def test_a_value_that_training_never_lacked_has_no_indicator_when_it_is_missing_later() -> None:
    assert encoded(count=None)[0] == encoded(count=4)[0]


@pytest.mark.parametrize(("value", "expected"), [(1e308, LARGEST_DEVIATION), (-1e308, -LARGEST_DEVIATION)])
def test_far_values_are_cut(value: float, expected: float) -> None:
    assert encoded(delay=value)[0][0][0] == expected


def test_the_largest_whole_numbers_are_cut() -> None:
    assert encoded(count=2**63 - 1)[0][0][1] == LARGEST_DEVIATION
    assert encoded(count=-(2**63))[0][0][1] == -LARGEST_DEVIATION


ANY_FLOAT = st.one_of(st.none(), st.floats())
ROWS = st.lists(st.tuples(st.sampled_from(["UA", "AA", "??", None]), ANY_FLOAT), min_size=1, max_size=12)


def small(rows: list[tuple[str | None, float | None]]) -> pa.Table:
    return pa.table(
        {"c": pa.array([c for c, _ in rows], pa.string()), "x": pa.array([x for _, x in rows], pa.float64())}
    )


@given(train=ROWS, rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_whatever_training_held_every_row_encodes_to_finite_numbers(
    train: list[tuple[str | None, float | None]], rows: list[tuple[str | None, float | None]]
) -> None:
    fitted = fit_inputs(small(train), ["c"], ["x"])
    numbers, codes = fitted.encode(small(rows))
    assert np.isfinite(numbers).all()
    assert (np.abs(numbers) <= LARGEST_DEVIATION).all()
    assert ((codes >= 0) & (codes < fitted.category_sizes[0])).all()
    assert encoding_from_json(json.loads(json.dumps(fitted.to_json()))) == fitted


@given(rows=ROWS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_encodes_to_the_same_bits_whatever_stands_beside_it(
    rows: list[tuple[str | None, float | None]], data: st.DataObject
) -> None:
    fitted = fit_inputs(small([("UA", 1.1), ("AA", None), ("UA", 7.3)]), ["c"], ["x"])
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=20))
    numbers, codes = fitted.encode(small(rows))
    some_numbers, some_codes = fitted.encode(small([rows[i] for i in picked]))
    assert numbers[picked].tobytes() == some_numbers.tobytes()
    assert codes[picked].tobytes() == some_codes.tobytes()


def test_chunks_and_dictionaries_encode_like_plain_columns() -> None:
    pieces = pa.concat_tables([TRAIN.slice(0, 1), TRAIN.slice(1)])
    coded = pieces.set_column(0, "carrier", pieces.column("carrier").dictionary_encode())
    assert fit_inputs(coded, ["carrier", "leg"], ["delay", "count", "holiday"]) == FITTED
    for table in (pieces, coded):
        assert all(np.array_equal(a, b) for a, b in zip(FITTED.encode(table), FITTED.encode(TRAIN), strict=True))


def test_a_column_that_is_always_missing_encodes_to_zero_and_its_indicator() -> None:
    empty = pa.table({"x": pa.nulls(3)})
    fitted = fit_inputs(empty, [], ["x"])
    assert fitted.numeric == (NumericInput("x", "float64", 0.0, 1.0, missing=True),)
    assert fitted.encode(empty)[0].tolist() == [[0.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TRAIN.drop_columns(["delay"]), "'delay'.*0 times"),
        (TRAIN.append_column("delay", TRAIN.column("delay")), "'delay'.*2 times"),
        (TRAIN.set_column(2, "delay", pa.array(["1"] * 4)), "'delay'.*string"),
        (TRAIN.set_column(0, "carrier", pa.array([1.5] * 4)), "'carrier'.*double"),
    ],
)
def test_a_table_without_a_usable_input_is_refused_by_name(table: pa.Table, message: str) -> None:
    with pytest.raises(EncodingRefused, match=message):
        FITTED.encode(table)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("numeric", 0, "std"), 0.0, "cannot standardise"),
        (("numeric", 0, "mean"), float("inf"), "cannot standardise"),
        (("numeric", 0, "mean"), "1", "no float"),
        (("numeric", 0, "missing"), 1, "no bool"),
        (("numeric", 0, "name"), "count", "twice"),
        (("categorical", 0, "values"), ["B", "A"], "in order"),
        (("categorical", 0, "values"), ["A", "A"], "distinct"),
        (("categorical", 0, "values"), [1], "texts"),
        (("categorical", 0, "more"), 1, "fields"),
    ],
)
def test_a_damaged_encoding_is_refused(path: tuple[str, int, str], value: object, message: str) -> None:
    document = json.loads(json.dumps(FITTED.to_json()))
    document[path[0]][path[1]][path[2]] = value
    with pytest.raises(EncodingRefused, match=message):
        encoding_from_json(document)


def test_no_inputs_are_no_columns() -> None:
    assert InputEncoding((), ()).encode(TRAIN)[0].shape == (4, 0)
