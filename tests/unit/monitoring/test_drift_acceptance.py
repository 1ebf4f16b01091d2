"""The acceptance tests of monitoring, on the decision function: false alarms, power, units, gaps, promotion."""

from collections import Counter
from dataclasses import replace

import numpy as np
from support.monitoring_worlds import DAY, START, calibrated, correlated, numbers, resampled

from headway.monitoring.drift import DriftPolicy, judge_window
from headway.monitoring.incidents import episodes
from headway.monitoring.persistence import WeekSummary, persistent, summary
from headway.monitoring.reference import Column, Window, numeric_column, reference_of

POLICY = DriftPolicy()


def test_t1_a_thousand_resamples_of_the_reference_raise_at_most_ten_alarms() -> None:
    rng = np.random.default_rng(20)
    world = correlated(rng, entities=2_000, rows=5, features=50, rho=0.6)
    reference = calibrated(world, POLICY, 600)
    found = Counter(judge_window(reference, resampled(rng, world, 120), POLICY).verdict for _ in range(1_000))
    assert found["drift"] <= 10
    assert set(found) <= {"none", "drift"}


def test_t1_without_calibration_and_dealing_of_entities_there_would_be_many() -> None:
    """Guards the test above: in this world the plain rules do raise alarms."""
    rng = np.random.default_rng(20)
    world = correlated(rng, entities=2_000, rows=5, features=50, rho=0.6)
    alone = replace(world, entity=None)
    reference = reference_of(alone)
    verdicts = [judge_window(reference, replace(resampled(rng, world, 120), entity=None), POLICY) for _ in range(20)]
    assert sum(v.verdict == "drift" for v in verdicts) >= 5


def test_t1_blocks_of_unequal_size_raise_no_more() -> None:
    rng = np.random.default_rng(21)
    world = correlated(rng, entities=3_000, rows=4, features=10, rho=0.5)
    assert world.entity is not None
    kept = rng.random(world.rows) < np.where(world.entity % 7 == 0, 1.0, 0.3)
    uneven = world.take(np.flatnonzero(kept))
    reference = calibrated(uneven, POLICY, 500)
    windows = [resampled(rng, uneven, 420) for _ in range(100)]
    assert sum(judge_window(reference, w, POLICY).verdict == "drift" for w in windows) <= 2


def test_t2_a_shift_of_three_tenths_of_a_deviation_is_drift_within_two_windows() -> None:
    rng = np.random.default_rng(22)
    reference = calibrated(correlated(rng, entities=2_500, rows=4, features=20, rho=0.3), POLICY, 4_000)
    within_two = 0
    for _ in range(20):
        pair = [correlated(rng, entities=1_250, rows=4, features=20, rho=0.3) for _ in range(2)]
        for window in pair:
            window.columns["f1"].values[:] += 0.3
        verdicts = [judge_window(reference, window, POLICY) for window in pair]
        within_two += any(v.verdict == "drift" and v.moved() == ("f1",) for v in verdicts)
    assert within_two >= 19


def test_t3_a_change_of_units_is_an_incident_and_no_drift() -> None:
    rng = np.random.default_rng(23)
    reference = calibrated(correlated(rng, entities=500, rows=4, features=5, rho=0.3), POLICY)
    for factor in (1_000.0, 0.001, 60.0, 1 / 60):
        window = correlated(rng, entities=250, rows=4, features=5, rho=0.3)
        window.columns["f1"].values[:] *= factor
        judged = judge_window(reference, window, POLICY)
        assert judged.verdict == "data_incident"
        assert [(i.kind, i.feature) for i in judged.incidents] == [("unit_change", "f1")]
        assert "f1" not in judged.moved()


def test_t3_a_change_of_units_on_one_day_of_the_week_is_named_by_its_day() -> None:
    rng = np.random.default_rng(24)
    reference = reference_of(numbers(rng.normal(10, 2, 2_000)))
    values, days = rng.normal(10, 2, 1_400), np.arange(1_400) // 200
    window = Window(
        {"x": numeric_column(np.where(days == 3, values * 1_000, values))}, times=(START + days * DAY).astype(np.int64)
    )
    judged = judge_window(reference, window, POLICY)
    assert judged.verdict == "data_incident"
    assert [(i.kind, i.feature) for i in judged.incidents] == [("unit_change", "x")]
    morning = replace(window, columns={"x": numeric_column(np.where(days == 3, values / 1_000, values))})
    assert judge_window(reference, morning, POLICY).incidents[0].days == ("2013-01-10",)


def test_t5_a_feature_missing_for_a_day_is_one_incident_not_24() -> None:
    rng = np.random.default_rng(25)
    reference = reference_of(numbers(rng.normal(size=2_000)))
    hours: list[tuple[str, Column]] = []
    for hour in range(36):
        values = rng.normal(size=600)
        hours.append((f"hour {hour:02d}", numeric_column(np.full(600, np.nan) if 6 <= hour < 30 else values)))
    judged = [(name, judge_window(reference, Window({"x": column}), POLICY).incidents) for name, column in hours]
    assert sum(bool(incidents) for _, incidents in judged) == 24
    (episode,) = episodes(judged)
    assert (episode.kind, episode.first, episode.last, episode.windows) == ("null_rate", "hour 06", "hour 29", 24)


def test_t5_the_same_day_in_a_week_is_one_incident_of_the_week() -> None:
    rng = np.random.default_rng(26)
    reference = reference_of(numbers(rng.normal(size=2_000)))
    days = np.arange(1_400) // 200
    values = np.where(days == 5, np.nan, rng.normal(size=1_400))
    window = Window({"x": numeric_column(values)}, times=(START + days * DAY).astype(np.int64))
    judged = judge_window(reference, window, POLICY)
    assert [(i.kind, i.feature) for i in judged.incidents] == [("null_rate", "x")]
    assert len(episodes([("week", judged.incidents)])) == 1


def test_t6_promotion_switches_the_reference_and_raises_no_alarm() -> None:
    rng = np.random.default_rng(27)
    old = calibrated(numbers(rng.normal(size=3_000)), POLICY)
    new = calibrated(numbers(rng.normal(1.0, 1.0, size=3_000)), POLICY)
    policy = DriftPolicy(weeks=2, of=3)
    weeks = [f"2013-09-{day:02d}" for day in (2, 9, 16, 23)]
    moved = [numbers(rng.normal(1.0, 1.0, size=1_000)) for _ in weeks]
    before = {week: summary(judge_window(old, w, policy)) for week, w in zip(weeks[:2], moved[:2], strict=True)}
    assert persistent(before, policy).state == "raised"
    after = {week: summary(judge_window(new, w, policy)) for week, w in zip(weeks[2:], moved[2:], strict=True)}
    assert persistent(after, policy).state == "clear"


def test_persistence_needs_k_of_n_and_clears_below_seven_tenths() -> None:
    policy = DriftPolicy(weeks=2, of=3)

    def state(*weeks: tuple[str, float | None]) -> str:
        named = {f"2013-{place + 10}-01": WeekSummary(*week) for place, week in enumerate(weeks)}
        return persistent(named, policy).state

    drift, trembling, calm = ("drift", 1.4), ("none", 0.8), ("none", 0.3)
    assert state() == "clear"
    assert state(drift) == "building"
    assert state(drift, calm, calm, drift) == "building"
    assert state(drift, trembling) == "building"
    assert state(drift, calm, drift) == "raised"
    assert state(drift, drift, trembling, trembling) == "raised"
    assert state(drift, drift, calm, calm) == "building"
    assert state(drift, drift, calm, calm, calm) == "clear"
    assert state(drift, ("data_incident", None), ("too_few", None), drift) == "raised"
    assert state(drift, ("season", 9.0), ("season", 9.0)) == "building"
    assert state(drift, ("season", 9.0), ("season", 9.0), ("season", 9.0)) == "clear"
