"""The kernel against the plain loops, on small dense worlds where everything collides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_oracle import (
    Cell,
    Label,
    Row,
    Stretch,
    columns,
    latest_cell,
    observations,
    values_of,
    window_cell,
)

from headway.features.kernel import AGGREGATES, AmbiguousTie, Observations, Reason, Rows, latest, window

GROUPS = 3
YEAR_1 = -62_135_596_800_000_000
YEAR_9999 = 253_402_300_799_999_999
EXTREME = st.sampled_from([YEAR_1, YEAR_1 + 1, YEAR_9999 - 1, YEAR_9999])
TIMES = st.one_of(*[st.integers(0, 8)] * 7, EXTREME)
VALUES = st.one_of(
    st.none(),
    st.sampled_from([0.0, -0.0, 0.1, 0.2, -0.3, 1e16, -1e16, 1.0, 1e-300, 5e-324, 1e150]),
    st.floats(-1e6, 1e6),
)
DURATION = st.sampled_from([1, 2, 5, 400_000_000_000_000_000, 2**62])


@st.composite
def worlds(draw: st.DrawFn, *, identified: bool | None = None) -> list[Row]:
    """Rows of a few keys at a few instants: corrections, moves, tombstones, duplicates, late and clock-wrong rows."""
    with_id = draw(st.booleans()) if identified is None else identified
    size = draw(st.integers(0, 12))
    rows = [
        Row(
            key=draw(st.sampled_from([0, 0, 0, 1, -1])),
            event=draw(TIMES),
            available=draw(TIMES),
            sequence=draw(st.integers(0, 2)),
            row_id=draw(st.integers(0, 5)) if with_id else None,
            deleted=draw(st.integers(0, 5)) == 0,
            value=draw(VALUES),
        )
        for _ in range(size)
    ]
    # Versions alike in identity, availability and sequence but not in content are refused before the kernel.
    unique: dict[Any, Row] = {}
    for row in rows:
        name = row.row_id if with_id else (row.key, row.event)
        unique.setdefault((name, row.available, row.sequence), row)
    kept = list(unique.values())
    twice = draw(st.lists(st.sampled_from(kept), max_size=2)) if kept else []
    return list(draw(st.permutations(kept + twice)))


LABELS = st.lists(
    st.builds(Label, key=st.integers(-2, GROUPS - 1), time=st.one_of(st.none(), TIMES, TIMES, TIMES, TIMES)),
    max_size=10,
)
BOUNDARY = st.sampled_from(["lt", "le"])
LOOKBACK = st.one_of(st.none(), DURATION)
POLICY = st.sampled_from(["row_wins", "last_known"])


def cells(rows: Sequence[Row], labels: Sequence[Label], **contract: Any) -> list[Cell]:  # noqa: ANN401
    _, null = values_of(rows)
    out = latest(columns(rows), observations(labels), groups=GROUPS, null=null, tie_break_row_id=True, **contract)
    return [
        Cell(
            int(out.row[i]) if out.row[i] >= 0 else None,
            int(out.event_time[i]) if out.has_event_time[i] else None,
            Reason(int(out.reason[i])).name.lower(),
        )
        for i in range(len(labels))
    ]


def stretches(
    rows: Sequence[Row],
    labels: Sequence[Label],
    durations: Sequence[int],
    boundary: Any,  # noqa: ANN401
    path: Any,  # noqa: ANN401
) -> list[list[Stretch]]:
    value, null = values_of(rows)
    answers = window(
        columns(rows),
        observations(labels),
        value,
        null,
        groups=GROUPS,
        boundary=boundary,
        durations=durations,
        aggregates=AGGREGATES,
        path=path,
    )
    return [
        [
            Stretch(
                {n: None if out.null[n][i] else float(out.values[n][i]) for n in AGGREGATES},
                int(out.event_time[i]) if out.has_event_time[i] else None,
                Reason(int(out.reason[i])).name.lower(),
            )
            for i in range(len(labels))
        ]
        for out in answers
    ]


def bits(answers: list[list[Stretch]]) -> list[Any]:
    return [
        [(c.reason, c.event, [None if v is None else v.hex() for v in c.values.values()]) for c in column]
        for column in answers
    ]


@settings(deadline=None, max_examples=300)
@given(worlds(), LABELS, BOUNDARY, LOOKBACK, POLICY)
def test_latest_equals_plain_loops(
    rows: list[Row], labels: list[Label], boundary: str, lookback: int | None, null_policy: str
) -> None:
    got = cells(rows, labels, boundary=boundary, lookback=lookback, null_policy=null_policy)
    for label, cell in zip(labels, got, strict=True):
        expected = latest_cell(rows, label, boundary=boundary, lookback=lookback, null_policy=null_policy)
        assert (cell.event, cell.reason) == (expected.event, expected.reason)
        # Exact duplicates are one row: which of them is named does not matter.
        assert (cell.row is None) == (expected.row is None)
        if cell.row is not None and expected.row is not None:
            assert rows[cell.row] == rows[expected.row]


@settings(deadline=None, max_examples=300)
@given(worlds(), LABELS, BOUNDARY, st.lists(DURATION, min_size=1, max_size=3), st.sampled_from(["scan", "tree"]))
def test_windows_equal_plain_loops(
    rows: list[Row], labels: list[Label], boundary: str, durations: list[int], path: str
) -> None:
    got = stretches(rows, labels, durations, boundary, path)
    for duration, column in zip(durations, got, strict=True):
        for label, cell in zip(labels, column, strict=True):
            expected = window_cell(rows, label, boundary=boundary, duration=duration)
            assert (cell.event, cell.reason) == (expected.event, expected.reason)
            for name, value in cell.values.items():
                wanted = expected.values.get(name)
                if name == "std" and value is not None and wanted is not None:
                    assert value == pytest.approx(wanted, rel=1e-12, abs=1e-320)
                else:
                    assert value == wanted, name


@settings(deadline=None, max_examples=300)
@given(st.data(), st.booleans(), LABELS, LABELS, BOUNDARY, st.sampled_from([1, 2, 5]))
def test_a_cell_does_not_depend_on_what_else_is_loaded(
    data: st.DataObject, identified: bool, labels: list[Label], more: list[Label], boundary: str, duration: int
) -> None:
    """Rows of another key or out of reach, their magnitudes, other labels and the path taken change no bit."""
    stranger = GROUPS - 1
    rows = data.draw(worlds(identified=identified))
    far = [
        Row(key, event, -9_000, 0, None, False, value)
        for key in (0, 1)
        for event, value in ((-5_000, 1e300), (5_000, 5e-324))
    ]
    others = [replace(r, key=stranger) for r in data.draw(worlds(identified=False))] + far
    if identified:
        others = [replace(r, row_id=100 + i) for i, r in enumerate(others)]
    asked = [x for x in labels if x.key != stranger]
    alone = bits(stretches(rows, asked, [duration], boundary, "scan"))[0]
    cut = data.draw(st.integers(0, len(rows)))
    loaded = [*others, *rows[:cut], *others[::-1], *rows[cut:]] if identified else [*rows[:cut], *others, *rows[cut:]]
    for path in ("scan", "tree"):
        together = bits(stretches(loaded, [*more, *asked], [duration], boundary, path))[0]
        assert together[len(more) :] == alone


@settings(deadline=None, max_examples=300)
@given(worlds(identified=True), LABELS, BOUNDARY)
def test_a_tie_of_identities_is_refused_by_the_rows_alone(
    rows: list[Row],
    labels: list[Label],
    boundary: Any,  # noqa: ANN401
) -> None:
    def visible_ever(row: Row) -> bool:
        later = [
            r.available
            for r in rows
            if r.row_id == row.row_id and (r.available, r.sequence) > (row.available, row.sequence)
        ]
        return not later or min(later) > max(row.event, row.available)

    live = [r for r in rows if r.key >= 0 and visible_ever(r)]
    order = [(r.key, r.event, r.available, r.sequence) for r in live]
    tied = any(order[i] == order[j] and live[i].row_id != live[j].row_id for i in range(len(live)) for j in range(i))
    for asked in (labels, []):
        arguments: dict[str, Any] = {
            "groups": GROUPS,
            "boundary": boundary,
            "lookback": None,
            "null_policy": "row_wins",
            "null": None,
            "tie_break_row_id": False,
        }
        if tied:
            with pytest.raises(AmbiguousTie) as refused:
                latest(columns(rows), observations(asked), **arguments)
            first, second = (rows[i] for i in refused.value.rows)
            assert first.row_id != second.row_id
            assert (first.key, first.event, first.available) == (second.key, second.event, second.available)
        else:
            latest(columns(rows), observations(asked), **arguments)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_group_takes_the_tree_and_gives_the_same_bits(seed: int) -> None:
    """Several levels of the tree, removals at each, against the scan of the same windows."""
    random = np.random.default_rng(seed)
    n, m = 6_000, 400
    event = random.integers(0, 10_000, n)
    rows = [
        Row(
            key=int(random.integers(0, 2)),
            event=int(event[i]),
            available=int(event[i] + random.integers(0, 3_000)),
            sequence=i,
            row_id=int(random.integers(0, n // 2)),
            deleted=bool(random.random() < 0.05),
            value=None if random.random() < 0.1 else float(random.normal() * 10.0 ** random.integers(-8, 8)),
        )
        for i in range(n)
    ]
    labels = [Label(int(random.integers(0, 2)), int(random.integers(0, 13_000))) for _ in range(m)]
    durations = [100, 4_000, 10**9]
    scanned = bits(stretches(rows, labels, durations, "lt", "scan"))
    assert bits(stretches(rows, labels, durations, "lt", "tree")) == scanned
    assert bits(stretches(rows, labels, durations, "lt", "auto")) == scanned
    for i in range(0, m, 40):
        expected = window_cell(rows, labels[i], boundary="lt", duration=4_000)
        assert scanned[1][i][0] == expected.reason
        assert scanned[1][i][2][2] == (None if expected.values["sum"] is None else float(expected.values["sum"]).hex())


@pytest.mark.parametrize("seed", [0, 1])
def test_latest_of_many_rows_equals_plain_search(seed: int) -> None:
    """Enough rows and observations to fill buffers and to cut a hot key into stretches."""
    random = np.random.default_rng(seed)
    n, m, groups = 400_000, 20_000, 50
    key = np.where(random.random(n) < 0.5, 0, random.integers(0, groups, n))
    event = random.integers(0, 10**9, n)
    known = event + random.integers(0, 10**7, n)
    at_key = np.where(random.random(m) < 0.5, 0, random.integers(0, groups, m))
    time = random.integers(0, 10**9, m)
    out = latest(
        Rows(key, event, known, np.zeros(n, np.int64), np.zeros(n, np.bool_)),
        Observations(at_key, time, np.ones(m, np.bool_)),
        groups=groups,
        boundary="lt",
        lookback=None,
        null_policy="row_wins",
        null=None,
        tie_break_row_id=False,
    )
    for i in range(0, m, 100):
        seen = np.flatnonzero((key == at_key[i]) & (event < time[i]) & (known < time[i]))
        if not len(seen):
            assert out.row[i] == -1
            continue
        row = int(out.row[i])
        assert (event[row], known[row]) == max(zip(event[seen].tolist(), known[seen].tolist(), strict=True))
        assert key[row] == at_key[i]
