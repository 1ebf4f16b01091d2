"""Delays with labels still awaited, and cohorts that are judged only when mature."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitoring.maturity import (
    Answered,
    cohort_of,
    completeness_by_age,
    delay_curve,
    expected_share,
    kaplan_meier,
)

HOUR = 3_600_000_000
DAY = 24 * HOUR


def _answered(asked: Sequence[int], received: Sequence[int | None]) -> Answered:
    return Answered(
        np.array(asked, np.int64),
        np.array([r is not None for r in received], np.bool_),
        np.array([r or 0 for r in received], np.int64),
    )


def test_kaplan_meier_counts_those_still_awaited_as_long_as_they_waited() -> None:
    """Worked by hand: 1 of 5 at 1 h, 1 of 3 at 3 h (one left at 2 h), 1 of 2 at 4 h; one is awaited for 5 h."""
    curve = kaplan_meier(np.array([1, 2, 3, 4, 5]) * HOUR, np.array([True, False, True, True, False]))
    assert (curve.delays // HOUR).tolist() == [1, 3, 4]
    assert curve.shares.tolist() == pytest.approx([1 / 5, 1 - 4 / 5 * 2 / 3, 1 - 4 / 5 * 2 / 3 * 1 / 2])
    assert curve.by(HOUR - 1) == 0
    assert curve.by(3 * HOUR) == pytest.approx(1 - 8 / 15)
    assert curve.quantile(0.2) == HOUR
    assert curve.quantile(0.9) is None
    with pytest.raises(ValueError, match="-1"):
        kaplan_meier(np.array([-1]), np.array([True]))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_kaplan_meier_without_censoring_is_the_share_that_came(delays: list[int]) -> None:
    curve = kaplan_meier(np.array(delays), np.ones(len(delays), np.bool_))
    for delay in range(0, 52, 7):
        assert curve.by(delay) == pytest.approx(np.mean(np.array(delays) <= delay))


def test_a_young_cohort_does_not_make_delays_look_short() -> None:
    rng = np.random.default_rng(0)
    asked = rng.integers(0, 2 * DAY, 20_000)
    delays = rng.exponential(DAY, 20_000).astype(np.int64)
    now = 2 * DAY
    came = asked + delays <= now
    curve = delay_curve(Answered(asked, came, asked + delays), now)
    naive = float(np.median(delays[came]))
    median = curve.quantile(0.5)
    assert median is not None
    assert median == pytest.approx(DAY * np.log(2), rel=0.05)
    assert naive < 0.75 * DAY * np.log(2)


def test_t8_a_cohort_is_mature_with_the_declared_share_of_its_expected_labels() -> None:
    asked = [0] * 100
    for labelled, state, reason in (
        (0, "immature", "no_labels"),
        (94, "immature", "labels_missing"),
        (95, "mature", ""),
    ):
        received: list[int | None] = [HOUR] * labelled + [None] * (100 - labelled)
        cohort = cohort_of(_answered(asked, received), 10 * DAY, 1.0, 0.95)
        assert (cohort.state, cohort.reason, cohort.labelled) == (state, reason, labelled)
    assert cohort_of(_answered([], []), 0, 1.0, 0.95).reason == "no_answers"


def test_t8_labels_that_came_after_now_do_not_count() -> None:
    answered = _answered([0] * 100, [HOUR] * 50 + [3 * HOUR] * 50)
    assert cohort_of(answered, 2 * HOUR, 1.0, 0.95).state == "immature"
    assert cohort_of(answered, 3 * HOUR, 1.0, 0.95).state == "mature"


def test_what_earlier_answers_led_to_is_expected() -> None:
    half = _answered([0] * 300, [HOUR] * 180 + [None] * 120)
    share = expected_share(half, 10 * DAY, 3 * DAY)
    assert share == pytest.approx(0.6)
    assert cohort_of(half, 10 * DAY, share, 0.95).state == "mature"
    few = half.take(np.arange(300) % 2 == 0)
    assert expected_share(few, 10 * DAY, 3 * DAY) == 1.0
    assert expected_share(half, 2 * DAY, 3 * DAY) == 1.0
    nothing = _answered([0] * 300, [None] * 300)
    assert expected_share(nothing, 10 * DAY, 3 * DAY) == 1.0


def test_completeness_by_age_looks_at_answers_of_that_age_only() -> None:
    answered = _answered([0, 0, DAY], [HOUR, 2 * DAY, DAY + HOUR])
    found = completeness_by_age(answered, 2 * DAY, {"1h": HOUR, "2d": 2 * DAY, "3d": 3 * DAY})
    assert found == {"1h": pytest.approx(2 / 3), "2d": 1.0, "3d": None}
