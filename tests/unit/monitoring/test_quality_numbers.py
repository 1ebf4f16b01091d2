"""Quality by segment, confusion of text classes (H05), and the estimate without labels with its assumptions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitoring.estimate import estimate_quality
from headway.monitoring.quality import Judged, confusion, measure_quality, measure_segments
from headway.registry.metrics import auc, calibration_error, log_loss

CLASSES = ("foo", "101", "0101", "1e2", "True", "", "nan", "None")


def test_h05_eight_text_classes_make_a_table_of_eight_by_eight() -> None:
    rng = np.random.default_rng(5)
    truth = [CLASSES[i] for i in rng.integers(0, 8, 400)]
    said = [t if rng.random() < 0.7 else CLASSES[rng.integers(0, 8)] for t in truth]
    table = confusion(truth, said, CLASSES)
    assert table.classes == CLASSES
    assert [len(row) for row in table.counts] == [8] * 8
    for t, row in zip(CLASSES, table.counts, strict=True):
        for s, count in zip(CLASSES, row, strict=True):
            assert count == sum(a == t and b == s for a, b in zip(truth, said, strict=True))
    assert confusion(truth, said).classes == tuple(sorted(CLASSES))
    assert confusion(["foo"], ["foo"], CLASSES).counts[0][0] == 1


@pytest.mark.parametrize("number", [101, 101.0, True, None])
def test_h05_a_number_is_no_text_class_and_is_refused_by_name(number: object) -> None:
    with pytest.raises(TypeError, match=repr(number)):
        confusion(["101"], [number], CLASSES)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'102'"):
        confusion(["102"], ["101"], CLASSES)
    with pytest.raises(ValueError, match="1 labels and 2 answers"):
        confusion(["101"], ["101", "101"], CLASSES)


def _judged(rng: np.random.Generator, rows: int) -> Judged:
    scores = rng.uniform(0, 1, rows)
    labels = (rng.random(rows) < scores).astype(np.float64)
    groups = np.array(["a" if i % 10 else "b" for i in range(rows)], object)
    return Judged(scores, labels, np.arange(rows, dtype=np.int64) % 7, {"k": groups})


def test_quality_is_the_evaluation_s_metrics_with_an_interval_by_days() -> None:
    judged = _judged(np.random.default_rng(1), 2_000)
    found = measure_quality(judged)
    for name, metric in (("auc", auc), ("log_loss", log_loss), ("calibration_error", calibration_error)):
        interval = found.metrics[name]
        assert interval is not None
        assert interval.lower is not None
        assert interval.upper is not None
        assert interval.value == pytest.approx(metric(judged.scores, judged.labels))
    area = found.metrics["auc"]
    assert area is not None
    assert area.lower is not None
    assert area.upper is not None
    assert area.lower < area.value < area.upper
    assert (found.rows, found.days, found.positives) == (2_000, 7, int(judged.labels.sum()))


def test_a_segment_below_its_minimum_is_unknown_and_one_class_has_no_auc() -> None:
    judged = _judged(np.random.default_rng(2), 1_000)
    found = measure_segments(judged, {"k": 101})["k"]
    assert found["b"] is None
    assert found["a"] is not None
    assert measure_segments(judged, {"k": 100})["k"]["b"] is not None
    one = Judged(judged.scores, np.ones(1_000), judged.day)
    assert measure_quality(one).metrics["auc"] is None
    nothing = Judged(np.empty(0), np.empty(0), np.empty(0, np.int64))
    assert measure_quality(nothing).rate is None


def test_calibrated_scores_estimate_the_quality_that_their_labels_then_show() -> None:
    judged = _judged(np.random.default_rng(3), 20_000)
    found = estimate_quality(judged.scores, 0.01, 0.0)
    assert found.broken == ()
    assert found.auc == pytest.approx(auc(judged.scores, judged.labels), abs=0.01)
    assert found.log_loss == pytest.approx(log_loss(judged.scores, judged.labels), abs=0.01)
    assert found.rate == pytest.approx(judged.labels.mean(), abs=0.01)


def test_an_assumption_that_does_not_hold_leaves_no_number() -> None:
    scores = np.random.default_rng(4).uniform(0, 1, 1_000)
    for found, reason in (
        (estimate_quality(scores[:499], 0.01, 0.0), "too_few_rows"),
        (estimate_quality(scores, None, 0.0), "calibration_unknown"),
        (estimate_quality(scores, 0.051, 0.0), "not_calibrated"),
        (estimate_quality(scores, 0.01, 0.051), "unseen_region"),
        (estimate_quality(scores, 0.01, 0.0, ["unit_change"]), "data_incident"),
    ):
        assert found.broken == (reason,)
        assert (found.auc, found.log_loss, found.rate) == (None, None, None)


@given(st.lists(st.sampled_from(CLASSES), max_size=40), st.randoms(use_true_random=False))
def test_a_confusion_table_counts_every_pair_once(truth: list[str], random: object) -> None:
    said = list(reversed(truth))
    table = confusion(truth, said, CLASSES)
    assert sum(map(sum, table.counts)) == len(truth)
    turned = confusion(said, truth, CLASSES)
    assert np.array_equal(np.array(table.counts).T, np.array(turned.counts))
