"""Metrics against loops that anybody can read, and the bootstrap against really repeating the rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.registry_cases import evaluation, scored

from headway.registry.metrics import (
    CALIBRATION_BINS,
    Floats,
    Statistic,
    auc,
    auc_statistic,
    calibration_error,
    calibration_statistic,
    day_counts,
    difference,
    interval,
    log_loss,
    log_loss_statistic,
)


def _slow_auc(scores: Floats, labels: Floats, weights: Floats) -> float | None:
    above, total = 0.0, 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for t, z, v in zip(scores, labels, weights, strict=True):
            if y == 1 and z == 0:
                total += w * v
                above += w * v * (1.0 if s > t else 0.5 if s == t else 0.0)
    return above / total if total else None


def _slow_log_loss(scores: Floats, labels: Floats, weights: Floats) -> float:
    total = 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        p = min(max(s, 1e-15), 1 - 1e-15)
        total -= w * (math.log(p) if y == 1 else math.log1p(-p))
    return total / sum(weights)


@st.composite
def _rows(draw: st.DrawFn) -> tuple[Floats, Floats, Floats, NDArray[np.int64], int]:
    n, days = draw(st.integers(1, 24)), draw(st.integers(1, 40))
    some = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
    scores = np.array(draw(st.lists(some, min_size=n, max_size=n)))
    labels = np.array(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)))
    weights = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=n, max_size=n)))
    day = np.array(draw(st.lists(st.integers(0, days - 1), min_size=n, max_size=n)), dtype=np.int64)
    return scores, labels, weights, day, days


@given(_rows())
@settings(max_examples=150, deadline=None)
def test_weighted_metrics_equal_the_plain_loops(rows: tuple[Floats, Floats, Floats, NDArray[np.int64], int]) -> None:
    scores, labels, weights, _, _ = rows
    found, expected = auc(scores, labels, weights), _slow_auc(scores, labels, weights)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found == pytest.approx(expected, abs=1e-12)
    loss = log_loss(scores, labels, weights)
    assert loss is None if not weights.any() else loss == pytest.approx(_slow_log_loss(scores, labels, weights))


@given(_rows(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_a_resample_equals_repeating_the_rows_of_its_days(
    rows: tuple[Floats, Floats, Floats, NDArray[np.int64], int], seed: int
) -> None:
    scores, labels, weights, day, days = rows
    counts = day_counts(days, 3, seed)
    assert (counts.sum(axis=1) == days).all()
    area = auc_statistic(scores, labels, day, days, weights)
    loss = log_loss_statistic(scores, labels, day, days, weights)
    for i, count in enumerate(counts):
        again = np.repeat(np.arange(len(scores)), count[day])
        slow = _slow_auc(scores[again], labels[again], weights[again])
        if area is not None:
            value = area(counts)[i]
            assert math.isnan(value) if slow is None else value == pytest.approx(slow, abs=1e-12)
        if loss is not None and weights[again].any():
            assert loss(counts)[i] == pytest.approx(_slow_log_loss(scores[again], labels[again], weights[again]))


def test_a_resample_of_calibration_keeps_the_bins_of_all_rows() -> None:
    generator = np.random.default_rng(3)
    n, days = 400, 7
    scores, day = generator.random(n), generator.integers(0, days, n)
    labels = (generator.random(n) < scores**2).astype(float)
    counts = day_counts(days, 5, 1)
    found = _must(calibration_statistic(scores, labels, day, days, np.ones(n)))(counts)
    bins = np.argsort(np.argsort(scores)) * CALIBRATION_BINS // n
    for i, count in enumerate(counts):
        weight = count[day]
        gaps = sum(abs((weight * (scores - labels))[bins == b].sum()) for b in range(CALIBRATION_BINS))
        assert found[i] == pytest.approx(gaps / weight.sum())


def test_calibration_of_a_case_done_by_hand() -> None:
    # 20 bins of one row each: |0.2 - 0| and |0.2 - 1| cancel only inside a bin, and equal scores share theirs.
    assert calibration_error(np.full(10, 0.2), np.array([1.0] * 2 + [0.0] * 8)) == pytest.approx(0.0)
    assert calibration_error(np.array([0.1, 0.9]), np.array([0.0, 1.0])) == pytest.approx(0.1)
    assert calibration_error(np.array([0.1, 0.9]), np.array([1.0, 0.0])) == pytest.approx(0.9)
    assert calibration_error(np.array([0.1, 0.9]), np.array([1.0, 0.0]), np.array([3.0, 1.0])) == pytest.approx(0.9)


@given(_rows(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_does_not_matter(
    rows: tuple[Floats, Floats, Floats, NDArray[np.int64], int], random: "np.random.Generator"
) -> None:
    scores, labels, weights, _, _ = rows
    order = list(range(len(scores)))
    random.shuffle(order)
    for metric in (auc, log_loss, calibration_error):
        one, other = metric(scores, labels, weights), metric(scores[order], labels[order], weights[order])
        assert one == (None if other is None else pytest.approx(other, abs=1e-12))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_leaves_nothing_defined(bad: float) -> None:
    scores, labels = np.array([0.1, bad, 0.9]), np.array([0.0, 1.0, 1.0])
    assert [m(scores, labels) for m in (auc, log_loss, calibration_error)] == [None] * 3


def test_no_rows_and_one_class_leave_auc_undefined() -> None:
    empty = np.array([])
    assert [m(empty, empty) for m in (auc, log_loss, calibration_error)] == [None] * 3
    assert auc(np.array([0.1, 0.9]), np.array([1.0, 1.0])) is None
    assert auc(np.array([0.1, 0.9]), np.array([0.0, 0.0])) is None


def _must(statistic: Statistic | None) -> Statistic:
    assert statistic is not None
    return statistic


def _panel(days: int, rows: int = 2_000) -> tuple[Statistic, Statistic]:
    generator = np.random.default_rng(5)
    labels = (generator.random(rows) < 0.3).astype(float)
    day = generator.integers(0, days, rows)
    base = labels + generator.normal(size=rows)
    made = (base + generator.normal(size=rows) * s for s in (0.1, 2.0))
    good, bad = (_must(auc_statistic(s, labels, day, days, np.ones(rows))) for s in made)
    return good, bad


def test_paired_differences_use_the_same_days_and_the_same_seed_gives_the_same_interval() -> None:
    good, bad = _panel(30)
    counts = day_counts(30, 500, 9)
    gain = interval(difference(good, bad), 30, counts, 0.95)
    assert gain is not None
    assert gain == interval(difference(good, bad), 30, day_counts(30, 500, 9), 0.95)
    assert gain.lower is not None
    assert gain.upper is not None
    assert 0 < gain.lower < gain.value < gain.upper
    nothing = interval(difference(good, good), 30, counts, 0.95)
    assert nothing is not None
    assert (nothing.value, nothing.lower, nothing.upper) == (0.0, 0.0, 0.0)


def test_more_confidence_gives_a_wider_interval_around_the_percentiles() -> None:
    good, _ = _panel(30)
    counts = day_counts(30, 999, 2)
    narrow, wide = (interval(good, 30, counts, c) for c in (0.8, 0.99))
    assert narrow is not None
    assert wide is not None
    drawn = np.sort(good(counts))
    assert narrow.lower == drawn[99]
    assert narrow.upper == drawn[-100]
    assert wide.lower == drawn[4]
    assert wide.upper == drawn[-5]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # Two normals one apart have AUC Phi(1/sqrt 2); days shift scores, so rows of one day are not independent.
    truth, hits, trials = 0.7602499389065233, 0, 60
    generator = np.random.default_rng(11)
    for trial in range(trials):
        days, per_day = 40, 60
        day = np.repeat(np.arange(days), per_day)
        labels = (generator.random(days * per_day) < 0.4).astype(float)
        scores = labels + generator.normal(size=len(labels))
        found = interval(
            _must(auc_statistic(scores, labels, day, days, np.ones(len(labels)))),
            days,
            day_counts(days, 300, trial),
            0.95,
        )
        assert found is not None
        hits += (found.lower or 0) <= truth <= (found.upper or 1)
    # 57 are expected; fewer than 50 has a probability under one in a thousand.
    assert hits >= 50


def test_resamples_without_one_class_count_as_the_worst_at_both_ends() -> None:
    # All positives on one day of three: 8 of 27 resamples have none.
    labels, day = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0, 0, 1, 2])
    statistic = _must(auc_statistic(np.array([0.9, 0.1, 0.2, 0.3]), labels, day, 3, np.ones(4)))
    found = interval(statistic, 3, day_counts(3, 400, 1), 0.95)
    assert found is not None
    assert (found.value, found.lower, found.upper) == (1.0, None, None)


def test_a_segment_is_measured_as_its_rows_alone_would_be() -> None:
    rows = scored(rows=900, skill={"champion": 1.5})
    whole = evaluation(rows)
    for value in set(rows.segments["carrier"].tolist()):
        inside = np.asarray(rows.segments["carrier"] == value)
        segment = whole.segments["carrier"][value]
        for model, scores in rows.scores.items():
            said = {name: None if found is None else found.value for name, found in segment.metrics[model].items()}
            kept, labels = scores[inside], rows.labels[inside]
            assert said["auc"] == pytest.approx(auc(kept, labels), abs=1e-12)
            assert said["log_loss"] == pytest.approx(log_loss(kept, labels), abs=1e-12)
            assert said["calibration_error"] == pytest.approx(calibration_error(kept, labels), abs=1e-12)
            assert said["auc"] == pytest.approx(segment.auc[model], abs=1e-12)
