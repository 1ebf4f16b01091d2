"""Edge cases and refusals of the kernel that the case files do not hold."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.kernel_oracle import Label, Row, columns, deviation, observations, values_of

from headway.features.kernel import (
    AGGREGATES,
    AmbiguousTie,
    DistinctTooCostly,
    KernelInputError,
    NonFiniteValue,
    Observations,
    Reason,
    Rows,
    collapse,
    latest,
    window,
)

YEAR_1 = -62_135_596_800_000_000
YEAR_9999 = 253_402_300_799_999_999


def ask(rows: list[Row], labels: list[Label], groups: int = 2, **contract: Any) -> list[tuple[int, str]]:  # noqa: ANN401
    terms: dict[str, Any] = {
        "boundary": "lt",
        "lookback": None,
        "null_policy": "row_wins",
        "tie_break_row_id": True,
        **contract,
    }
    out = latest(columns(rows), observations(labels), groups=groups, null=values_of(rows)[1], **terms)
    return [(int(r), Reason(int(c)).name) for r, c in zip(out.row, out.reason, strict=True)]


def total(rows: list[Row], labels: list[Label], duration: int, **terms: Any) -> list[float]:  # noqa: ANN401
    value, null = values_of(rows)
    (out,) = window(
        columns(rows),
        observations(labels),
        value,
        null,
        groups=1,
        boundary="lt",
        durations=[duration],
        aggregates=["sum"],
        **terms,
    )
    return out.values["sum"].tolist()


def test_collapse_hides_what_only_the_future_tells_apart() -> None:
    future = {Reason.NO_ENTITY, Reason.BEFORE_FIRST, Reason.NOT_YET_AVAILABLE}
    everything = np.array(list(Reason), np.int8)
    expected = [Reason.NONE_VISIBLE if r in future else r for r in Reason]
    assert collapse(everything).tolist() == expected


def test_a_null_key_wins_over_a_bad_time_and_a_bad_time_over_an_unknown_key() -> None:
    assert ask([], [Label(-1, None), Label(-2, None), Label(-2, 5)]) == [
        (-1, "NULL_KEY"),
        (-1, "BAD_OBSERVATION_TIME"),
        (-1, "NO_ENTITY"),
    ]


def test_no_rows_no_labels_and_neither() -> None:
    row = Row(0, 1, 1, value=1.0)
    assert ask([row], []) == []
    assert ask([], []) == []
    assert ask([], [Label(-2, 3)], groups=0) == [(-1, "NO_ENTITY")]
    assert total([row], [], 5) == []


def test_a_correction_to_a_null_key_takes_the_row_away() -> None:
    rows = [Row(0, 10, 11, row_id=1, value=1.0), Row(-1, 10, 20, row_id=1, value=1.0)]
    assert ask(rows, [Label(0, 20), Label(0, 21)]) == [(0, "HIT"), (-1, "BEFORE_FIRST")]
    assert total(rows, [Label(0, 20), Label(0, 21)], 100) == [1.0, 0.0]


def test_a_null_correction_is_not_answered_by_the_version_it_replaced() -> None:
    """Passing over nulls means the last known event, never an old version that was corrected away."""
    rows = [
        Row(0, 5, 5, row_id=1, value=1.0),
        Row(0, 10, 11, row_id=2, value=2.0),
        Row(0, 10, 20, row_id=2, value=None),
    ]
    assert ask(rows, [Label(0, 20), Label(0, 21)], null_policy="last_known") == [(1, "HIT"), (0, "HIT")]
    assert ask(rows[1:], [Label(0, 21)], null_policy="last_known") == [(-1, "NULL_VALUE")]


def test_a_tombstone_is_never_passed_over() -> None:
    rows = [Row(0, 1, 1, value=1.0), Row(0, 2, 2, deleted=True)]
    assert ask(rows, [Label(0, 3)], null_policy="last_known") == [(-1, "DELETED")]


def test_order_by_row_identity_decides_only_the_last_tie() -> None:
    rows = [Row(0, 10, 11, 0, row_id=9, value=1.0), Row(0, 10, 12, 0, row_id=1, value=2.0)]
    assert ask(rows, [Label(0, 20)], tie_break_row_id=False) == [(1, "HIT")]
    tied = [Row(0, 10, 11, 0, row_id=9, value=1.0), Row(0, 10, 11, 0, row_id=1, value=2.0)]
    assert ask(tied, [Label(0, 20)]) == [(0, "HIT")]
    with pytest.raises(AmbiguousTie, match="rows 0 and 1"):
        ask(tied, [], tie_break_row_id=False)


def test_a_tie_with_a_version_that_nobody_could_ever_see_is_none() -> None:
    rows = [
        Row(0, 10, 11, 0, row_id=1, value=1.0),
        Row(0, 10, 11, 1, row_id=1, value=1.5),
        Row(0, 10, 11, 0, row_id=2, value=2.0),
    ]
    assert ask(rows, [Label(0, 20)], tie_break_row_id=False) == [(1, "HIT")]


def test_extreme_times_do_not_wrap() -> None:
    rows = [Row(0, YEAR_1, YEAR_1, value=1.0), Row(0, YEAR_9999, YEAR_9999, value=2.0)]
    labels = [Label(0, YEAR_1), Label(0, YEAR_1 + 1), Label(0, YEAR_9999), Label(0, YEAR_9999 + 1)]
    assert [r for _, r in ask(rows, labels)] == ["BEFORE_FIRST", "HIT", "HIT", "HIT"]
    assert [r for _, r in ask(rows, labels, lookback=2**63 - 1)] == ["BEFORE_FIRST", "HIT", "HIT", "HIT"]
    assert total(rows, labels, 2**63 - 1) == [0.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize("path", ["scan", "tree"])
def test_sums_are_exact_whatever_cancels(path: str) -> None:
    values = [1e308, 1.0, -1e308, 5e-324, 1e16, 1.0, -1e16, 2.0**-1000]
    rows = [Row(0, i, i, value=v) for i, v in enumerate(values)]
    assert total(rows, [Label(0, 100)], 1_000, path=path) == [2.0]
    assert total(rows[3:4], [Label(0, 100)], 1_000, path=path) == [5e-324]
    assert total([Row(0, i, i, value=1.7e308) for i in range(3)], [Label(0, 9)], 99, path=path) == [float("inf")]


def test_halves_round_to_even() -> None:
    for whole, expected in ((2.0**53, 2.0**53), (2.0**53 + 2.0, 2.0**53 + 4.0)):
        rows = [Row(0, 0, 0, value=whole), Row(0, 1, 1, value=1.0)]
        assert total(rows, [Label(0, 9)], 99) == [expected]
        rows.append(Row(0, 2, 2, value=2.0**-80))
        assert total(rows, [Label(0, 9)], 99) == [whole + 2.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_refused_unless_it_is_null(value: float) -> None:
    rows = [Row(0, 1, 1, value=1.0), Row(0, 2, 2, value=value)]
    with pytest.raises(NonFiniteValue, match="row 1"):
        total(rows, [Label(0, 9)], 5)
    numbers, _ = values_of(rows)
    (out,) = window(
        columns(rows),
        observations([Label(0, 9)]),
        numbers,
        np.array([False, True]),
        groups=1,
        boundary="lt",
        durations=[100],
        aggregates=AGGREGATES,
    )
    assert (out.values["count"][0], out.values["sum"][0]) == (2.0, 1.0)


def test_read_only_and_constant_columns_are_taken() -> None:
    key = np.zeros(3, np.int64)
    key.flags.writeable = False
    never = np.broadcast_to(np.False_, 3)
    rows = Rows(key, np.arange(3), np.arange(3)[::1], np.broadcast_to(np.int64(4), 3), never)
    out = latest(
        rows,
        Observations(key, np.array([0, 1, 3]), np.broadcast_to(np.True_, 3)),
        groups=1,
        boundary="lt",
        lookback=None,
        null_policy="row_wins",
        null=None,
        tie_break_row_id=False,
    )
    assert out.row.tolist() == [-1, 0, 2]


def test_windows_of_a_hot_key_that_distinct_cannot_look_through_are_refused() -> None:
    n = 50_000
    zero = np.zeros(n, np.int64)
    rows = Rows(zero, np.arange(n), np.arange(n), zero, np.zeros(n, np.bool_))
    asked = Observations(zero, np.full(n, n, np.int64), np.ones(n, np.bool_))
    with pytest.raises(DistinctTooCostly, match="2,500,000,000"):
        window(
            rows,
            asked,
            np.zeros(n),
            np.zeros(n, np.bool_),
            groups=1,
            boundary="lt",
            durations=[10 * n],
            aggregates=["distinct"],
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lookback": 0}, "lookback is 0"),
        ({"lookback": -5}, "lookback is -5"),
        ({"boundary": "gt"}, "boundary is 'gt'"),
        ({"null_policy": "zero"}, "null_policy is 'zero'"),
        ({"groups": 0}, "allowed is -2..-1"),
    ],
)
def test_contracts_that_cannot_be_meant_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        ask([Row(0, 1, 1, value=1.0)], [Label(0, 2)], **change)


def test_arrays_of_other_length_or_type_are_refused() -> None:
    good = columns([Row(0, 1, 1)])
    for name, array in (("key", good.event_time[:0]), ("event_time", np.zeros(1)), ("deleted", np.zeros(1, np.int64))):
        broken = Rows(**{**good.__dict__, name: array})
        with pytest.raises(KernelInputError, match="rows"):
            latest(
                broken,
                observations([]),
                groups=1,
                boundary="lt",
                lookback=None,
                null_policy="row_wins",
                null=None,
                tie_break_row_id=False,
            )


def test_windows_name_what_they_cannot_do() -> None:
    for change, message in (
        ({"durations": [0]}, "duration is 0"),
        ({"aggregates": ["median"]}, "median"),
        ({"path": "fast"}, "fast"),
    ):
        terms: dict[str, Any] = {"durations": [1], "aggregates": ["sum"], **change}
        with pytest.raises(KernelInputError, match=message):
            window(
                columns([Row(0, 1, 1)]),
                observations([]),
                np.zeros(1),
                np.zeros(1, np.bool_),
                groups=1,
                boundary="lt",
                **terms,
            )


def test_importing_the_kernel_brings_no_compiler() -> None:
    code = "import sys, headway.features.kernel; sys.exit(bool({'numba', 'pyarrow', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_deviation_of_nearly_equal_values_is_that_of_two_passes() -> None:
    """Where the spread is of the size of the mean's own rounding, the exact variance would be another number."""
    values = [0.1, 0.1, 0.1, float(np.nextafter(0.1, 1.0))]
    rows = [Row(0, i, i, value=v) for i, v in enumerate(values)]
    for n in (3, 4):
        numbers, null = values_of(rows[:n])
        (out,) = window(
            columns(rows[:n]),
            observations([Label(0, 9)]),
            numbers,
            null,
            groups=1,
            boundary="lt",
            durations=[100],
            aggregates=["std"],
        )
        mean = math.fsum(values[:n]) / n
        assert out.values["std"][0] == pytest.approx(deviation(values[:n], mean), rel=1e-12, abs=0.0)
        assert out.values["std"][0] > 0.0


def test_minus_zero_is_zero() -> None:
    rows = [Row(0, 1, 1, value=-0.0)]
    numbers, null = values_of(rows)
    (out,) = window(
        columns(rows),
        observations([Label(0, 9)]),
        numbers,
        null,
        groups=1,
        boundary="lt",
        durations=[100],
        aggregates=AGGREGATES,
    )
    assert [name for name in AGGREGATES if np.signbit(out.values[name][0])] == []
