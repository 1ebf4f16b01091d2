"""Field reports H01, H03, H07, H09: what other monitors got wrong, on the decision function."""

from dataclasses import replace

import numpy as np
import pytest
from support.monitoring_worlds import DAY, START, calibrated, texts

from headway.monitoring.drift import DriftPolicy, judge_window
from headway.monitoring.reference import Window, column_of, numeric_column, reference_of

POLICY = DriftPolicy()


def test_h01_an_empty_a_constant_and_a_nearly_empty_column_leave_a_report_of_the_other_17() -> None:
    rng = np.random.default_rng(1)
    names = [f"f{i:02d}" for i in range(20)]
    known = {n: numeric_column(rng.normal(size=2_000)) for n in names} | {"f01": numeric_column(np.full(2_000, 7.0))}
    now = {n: numeric_column(rng.normal(size=800)) for n in names}
    one = np.append(0.5, np.full(799, np.nan))
    now |= {"f00": numeric_column(np.full(800, np.nan)), "f01": numeric_column(np.full(800, 7.0))}
    for third in (numeric_column(one), numeric_column(np.array([0.5]))):
        judged = judge_window(reference_of(Window(known)), Window(now | {"f02": third}), POLICY)
        found = {f.name: (f.verdict, f.reason) for f in judged.features}
        assert found["f00"] == ("data_incident", "all_null")
        assert found["f01"] == ("not_possible", "constant")
        assert found["f02"] == ("too_few", "too_few")
        assert [found[n][0] for n in names[3:]] == ["none"] * 17
        assert judged.verdict == "data_incident"


@pytest.mark.parametrize("opposite", [False, True])
def test_h03_a_column_that_goes_missing_or_comes_back_is_an_incident(opposite: bool) -> None:
    full, sparse = texts(("A", 500), ("B", 500)), texts(("A", 25), ("B", 25), (None, 950))
    before, now = (sparse, full) if opposite else (full, sparse)
    judged = judge_window(reference_of(before), now, POLICY)
    assert judged.verdict == "data_incident"
    assert [(i.kind, i.feature) for i in judged.incidents] == [("null_rate", "c")]
    assert judged.moved() == ()
    missing = reference_of(before).bins["c"]
    assert missing.counts[-1] == (950 if opposite else 0)


def test_h07_whole_floats_are_the_same_kind_and_a_fraction_breaks_the_contract() -> None:
    rng = np.random.default_rng(7)
    reference = reference_of(Window({"n": column_of([int(v) for v in rng.integers(0, 9, 1_000)])}))
    assert reference.bins["n"].type == "int64"
    first = judge_window(reference, Window({"n": column_of([3.0, 4.0, None])}), POLICY)
    assert (first.verdict, first.incidents) == ("too_few", ())
    second = judge_window(reference, Window({"n": column_of([3.0, 4.0, None, 3.5])}), POLICY)
    assert second.verdict == "data_incident"
    assert [(i.kind, i.detail) for i in second.incidents] == [("contract", "1 of 3 values are no whole numbers")]
    whole = Window({"n": column_of([float(v) if i % 10 else None for i, v in enumerate(rng.integers(0, 9, 1_000))])})
    judged = judge_window(reference, whole, DriftPolicy(psi=0.5))
    assert [i.kind for i in judged.incidents] == ["null_rate"]


def _seasonal_world(rng: np.random.Generator) -> Window:
    """Ten weeks with a wave over all of them, a slope, and a beat of hours."""
    times = np.sort(rng.integers(0, 70 * DAY, 8_000)) + START
    phase = (times - START) / (70 * DAY)
    hour = (times // 3_600_000_000) % 24
    return Window(
        {
            "wave": numeric_column(np.sin(2 * np.pi * phase) + rng.normal(0, 0.4, len(times))),
            "slope": numeric_column(4 * phase + rng.normal(0, 0.4, len(times))),
            "hour": numeric_column(hour + rng.normal(0, 1.0, len(times))),
        },
        times=times.astype(np.int64),
    )


def test_h09_the_reference_replayed_in_order_is_season_and_shuffled_is_nothing() -> None:
    rng = np.random.default_rng(9)
    world = _seasonal_world(rng)
    reference = calibrated(world, POLICY, 700, span=7 * DAY)
    ordered = [judge_window(reference, world.take(rows), POLICY) for rows in np.array_split(np.arange(world.rows), 10)]
    assert {v.verdict for v in ordered} <= {"none", "season"}
    assert "season" in {v.verdict for v in ordered}
    for judged in ordered:
        assert judged.moved() == ()
        assert (judged.season is not None) == (judged.verdict == "season")
    mixed = np.array_split(rng.permutation(world.rows), 10)
    assert {judge_window(reference, world.take(np.sort(rows)), POLICY).verdict for rows in mixed} == {"none"}


def test_h09_without_calibrated_seasons_a_slice_of_the_reference_still_explains_its_copy() -> None:
    rng = np.random.default_rng(10)
    world = _seasonal_world(rng)
    reference = reference_of(world)
    ordered = [judge_window(reference, world.take(rows), POLICY) for rows in np.array_split(np.arange(world.rows), 10)]
    assert {v.verdict for v in ordered} == {"season"}
    said = [v.season.compared_with for v in ordered if v.season is not None]
    assert all(text.startswith("the reference from 2013-") for text in said)


def test_h09_nights_only_are_the_reference_of_the_same_hours() -> None:
    rng = np.random.default_rng(11)
    world = _seasonal_world(rng)
    flat = replace(world, columns={"hour": world.columns["hour"]})
    assert flat.times is not None
    nights = flat.take(np.flatnonzero((flat.times // 3_600_000_000) % 24 < 8))
    judged = judge_window(reference_of(flat), nights, POLICY)
    assert judged.verdict == "season"
    assert judged.season is not None
    assert "same weekdays and hours" in judged.season.compared_with


def test_what_no_week_of_the_reference_showed_is_drift_in_spite_of_seasons() -> None:
    rng = np.random.default_rng(12)
    world = _seasonal_world(rng)
    reference = calibrated(world, POLICY, 700, span=7 * DAY)
    assert world.times is not None
    week = world.take(np.flatnonzero(world.times < START + 7 * DAY))
    later = replace(week, columns={**week.columns, "slope": numeric_column(week.columns["slope"].values + 9.0)})
    judged = judge_window(reference, later, POLICY)
    assert (judged.verdict, judged.moved()) == ("drift", ("slope",))
    assert judged.false_alarm_per_days is not None


def test_a_quantity_that_doubles_or_rains_more_is_no_change_of_units() -> None:
    rng = np.random.default_rng(13)
    known, now = rng.normal(10, 2, 2_000), rng.normal(10, 2, 800)
    reference = reference_of(Window({"x": numeric_column(known)}))
    for factor in (1.3, 2.0, 5.0, 8.0):
        assert judge_window(reference, Window({"x": numeric_column(now * factor)}), POLICY).verdict == "drift"
    # Nine hours of ten are dry in training: quantiles that are all zero fit any factor.
    rain = np.where(rng.random(2_000) < 0.96, 0.0, rng.exponential(1.0, 2_000))
    wet = np.where(rng.random(800) < 0.5, 0.0, rng.exponential(1.0, 800))
    judged = judge_window(reference_of(Window({"x": numeric_column(rain)})), Window({"x": numeric_column(wet)}), POLICY)
    assert judged.verdict == "drift"
    other = judge_window(
        reference_of(Window({"x": numeric_column(rain)})), Window({"x": numeric_column(wet * 1_000)}), POLICY
    )
    assert [i.kind for i in other.incidents] == ["unit_change"]


def test_unknown_categories_that_training_had_as_well_are_no_news() -> None:
    known = texts(("A", 500), ("B", 300), ("C", 200))
    reference = reference_of(known)
    third = replace(reference.bins["c"], counts=np.array([500.0, 300.0, 0.0, 200.0, 0.0]), cells={"A": 0, "B": 1})
    reference = replace(reference, bins={"c": third})
    assert judge_window(reference, texts(("A", 500), ("B", 300), ("D", 200)), POLICY).verdict == "none"
    judged = judge_window(reference, texts(("A", 450), ("B", 200), ("D", 350)), POLICY)
    assert [i.kind for i in judged.incidents] == ["new_category"]


def test_other_units_are_found_in_a_week_that_is_unlike_the_year() -> None:
    rng = np.random.default_rng(14)
    times = np.sort(rng.integers(0, 364 * DAY, 12_000)) + START
    year = 300 - 10 * np.cos(2 * np.pi * (times - START) / (364 * DAY)) + rng.normal(0, 1.0, len(times))
    reference = reference_of(Window({"x": numeric_column(year)}, times=times))
    cold = rng.normal(290.5, 1.0, 700)
    for factor in (1_000.0, 0.001, 60.0):
        judged = judge_window(reference, Window({"x": numeric_column(cold * factor)}), POLICY)
        assert [i.kind for i in judged.incidents] == ["unit_change"]
    assert judge_window(reference, Window({"x": numeric_column(cold)}), POLICY).incidents == ()
