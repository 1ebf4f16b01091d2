"""What holds for every window: bins stay, order does not matter, p-values are honest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.monitoring_worlds import DAY, START, calibrated, correlated, numbers, resampled, texts

from headway.monitoring.calibrate import calibrate
from headway.monitoring.drift import DriftPolicy, PolicyRefused, adjusted, judge_window
from headway.monitoring.effects import block_counts, critical_psi, effects, layout_of
from headway.monitoring.incidents import Incident, episodes
from headway.monitoring.reference import (
    Bins,
    ReferenceUnusable,
    Window,
    as_kind,
    bins_of,
    column_of,
    frozen_bins,
    numeric_column,
    reference_of,
    sampled_blocks,
    text_column,
)
from headway.monitoring.windows import UnknownWeek, week_bounds, week_key, weeks

POLICY = DriftPolicy(minimum=50)
# Values keep to one float32, so that hypothesis meets ties and edges often.
VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, width=32), st.integers(-5, 5).map(float)), max_size=120)


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES)
def test_every_value_falls_in_one_frozen_bin(known: list[float | None], now: list[float | None]) -> None:
    bins = bins_of("x", column_of([1.0, *known]))
    before = (bins.counts.tolist(), bins.edges.tolist())
    column = as_kind(column_of(now), bins)
    assert column is not None
    codes = bins.codes(column)
    assert len(codes) == len(now)
    assert ((codes == bins.size - 1) == column.missing).all()
    assert (codes >= 0).all()
    assert (codes < bins.size).all()
    assert bins.rows == 1 + len(known)
    assert (bins.counts.tolist(), bins.edges.tolist()) == before


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_rows_and_columns_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = correlated(rng, entities=40, rows=3, features=4, rho=0.4)
    now = correlated(rng, entities=30, rows=3, features=4, rho=0.4)
    now.columns["f2"].values[:] += rng.choice([0.0, 0.8])
    reference = reference_of(world)
    mixed = now.take(rng.permutation(now.rows))
    turned = replace(mixed, columns=dict(reversed(list(mixed.columns.items()))))
    first, second = judge_window(reference, now, POLICY), judge_window(reference, turned, POLICY)
    assert first.verdict == second.verdict
    for one, other in zip(first.features, second.features, strict=True):
        assert (one.name, one.effect, one.psi) == (other.name, other.effect, other.psi)


def test_p_values_of_dealt_entities_are_uniform_where_those_of_dealt_rows_are_not() -> None:
    rng = np.random.default_rng(4)
    tiny = DriftPolicy(minimum=50, psi=1e-9, distance=1e-9, permutations=100)
    world = correlated(rng, entities=150, rows=6, features=2, rho=0.8)
    reference = reference_of(replace(world, columns={"f1": world.columns["f1"]}))
    by_entity: list[float] = []
    by_row: list[float] = []
    for _ in range(60):
        now = correlated(rng, entities=30, rows=6, features=2, rho=0.8)
        now = replace(now, columns={"f1": now.columns["f1"]})
        # The PSI's own critical value would hide small effects; the distance has none.
        for window, found in ((now, by_entity), (replace(now, entity=None), by_row)):
            alone = replace(reference, sample=replace(reference.sample, entity=None))
            (verdict,) = judge_window(reference if window.entity is not None else alone, window, tiny).features
            assert verdict.p is not None
            found.append(verdict.p)
    assert np.mean(np.array(by_entity) <= 0.05) <= 0.12
    assert np.mean(np.array(by_row) <= 0.05) >= 0.3


def test_the_score_needs_no_sampled_rows_and_counts_entities_not_rows() -> None:
    rng = np.random.default_rng(5)
    scores = rng.beta(2, 6, 4_000)
    score = frozen_bins("(score)", _histogram(bins_of("(score)", numeric_column(scores))), "float64", None)
    inputs = numbers(rng.normal(size=2_000))
    reference = replace(reference_of(inputs), bins={**reference_of(inputs).bins, "(score)": score})
    moved = Window({"x": numeric_column(rng.normal(size=1_000)), "(score)": numeric_column(rng.beta(4, 6, 1_000))})
    judged = judge_window(reference, moved, DriftPolicy())
    assert judged.moved() == ("(score)",)
    # A score follows its inputs and is told, and never decides alone.
    assert judged.verdict == "none"
    twenty = np.repeat(rng.beta(2, 6, 20), 50)
    same = replace(moved, columns={**moved.columns, "(score)": numeric_column(twenty)}, entity=np.repeat(range(20), 50))
    assert judge_window(reference, same, DriftPolicy()).moved() == ()


def _histogram(bins: Bins) -> dict[str, object]:
    counts = [int(c) for c in bins.counts]
    return {"kind": "numeric", "edges": bins.edges.tolist(), "counts": counts[:-1], "missing": counts[-1]}


def test_psi_of_undrifted_windows_is_as_large_as_its_critical_value_says() -> None:
    """With 10 bins and 500 rows on both sides, PSI is chi-squared with 9 degrees of freedom times 1/250."""
    rng = np.random.default_rng(6)
    item = bins_of("x", column_of([str(i) for i in range(9)]))
    layout = layout_of([item])
    level = float(critical_psi(layout, np.array([500.0]), np.array([500.0]))[0])
    assert level == pytest.approx(29.588 * 2 / 500, rel=1e-3)
    shares = np.append(np.full(9, 1 / 9), [0, 0])
    known, now = rng.multinomial(500, shares, size=4_000), rng.multinomial(500, shares, size=4_000)
    found = effects(layout, known.astype(float), now.astype(float), 1.0, 1.0).psi[:, 0]
    assert found.mean() == pytest.approx(8 * 2 / 500, rel=0.1)
    assert (found > level).mean() <= 0.002


def test_one_new_value_in_an_empty_bin_is_no_effect() -> None:
    now = texts(("A", 499), ("B", 500), ("never seen", 1))
    judged = judge_window(reference_of(texts(("A", 500), ("B", 500))), now, DriftPolicy())
    assert judged.verdict == "none"
    assert judged.features[0].psi is not None
    assert judged.features[0].psi < 0.02


def test_rare_categories_share_a_bin_and_many_new_ones_are_expected_of_names_seen_once() -> None:
    rng = np.random.default_rng(7)
    names = [f"u{i}" for i in rng.integers(0, 5_000, 2_000)]
    reference = reference_of(Window({"c": text_column(names)}))
    assert reference.bins["c"].size <= 5
    again = Window({"c": text_column([f"u{i}" for i in rng.integers(0, 5_000, 1_000)])})
    assert judge_window(reference, again, DriftPolicy()).incidents == ()


def test_another_kind_is_an_incident_and_nothing_is_turned_into_it() -> None:
    rng = np.random.default_rng(8)
    number = reference_of(numbers(rng.normal(size=500)))
    text = reference_of(Window({"x": text_column(["101", "0101"] * 250)}))
    for reference, values in (
        (number, ["1.5"] * 500),
        (number, [True] * 500),
        (number, [1, "1"] * 250),
        (text, [101] * 500),
        (text, [None, 101] * 250),
    ):
        judged = judge_window(reference, Window({"x": column_of(values)}), DriftPolicy())
        assert [i.kind for i in judged.incidents] == ["schema"]


def test_calibration_is_a_function_of_reference_levels_and_seed() -> None:
    reference = reference_of(correlated(np.random.default_rng(9), entities=200, rows=5, features=5, rho=0.7))
    first = calibrate(reference, 0.1, 0.1, [200, 400], pairs=300)
    assert first == calibrate(reference, 0.1, 0.1, [200, 400], pairs=300)
    assert first != calibrate(reference, 0.1, 0.1, [200, 400], pairs=300, seed=1)
    assert first.thresholds[200] > first.thresholds[400] > 1
    assert first.size_for(399) == 200
    assert first.size_for(100) == 200
    with pytest.raises(ValueError, match="too few"):
        calibrate(reference, 0.1, 0.1, [200], pairs=199)


def test_every_verdict_of_a_calibrated_reference_says_how_often_chance_raises_one() -> None:
    world = correlated(np.random.default_rng(10), entities=300, rows=4, features=3, rho=0.3)
    reference = calibrated(world, DriftPolicy())
    judged = judge_window(reference, resampled(np.random.default_rng(1), world, 150), DriftPolicy())
    assert judged.false_alarm_per_days is not None
    assert judged.false_alarm_per_days >= 90
    assert judge_window(reference_of(world), world, DriftPolicy()).false_alarm_per_days is None


def test_a_segment_that_moves_is_told_and_raises_no_alarm_alone() -> None:
    rng = np.random.default_rng(11)
    groups = np.array(["a", "b"] * 4_000, object)
    world = replace(numbers(rng.normal(size=8_000)), segments={"k": groups})
    now = replace(numbers(rng.normal(size=8_000)), segments={"k": groups})
    low = np.flatnonzero(groups == "a")[:1_500]
    kept = np.sort(np.concatenate([low, np.flatnonzero(groups == "b")[:600]]))
    now = now.take(kept)
    now.columns["x"].values[now.segments["k"] == "b"] *= 0.45
    judged = judge_window(reference_of(world), now, DriftPolicy(psi=0.25, distance=0.25))
    assert judged.verdict == "none"
    assert judged.moved("k=b") == ("x",)
    assert judged.moved("k=a") == ()


def test_sampled_blocks_are_whole_and_do_not_depend_on_order() -> None:
    rng = np.random.default_rng(12)
    names = [f"e{i}" for i in rng.integers(0, 300, 3_000)]
    kept = sampled_blocks(names, 1_000)
    assert 900 < kept.sum() <= 1_000
    inside, outside = {n for n, k in zip(names, kept, strict=True) if k}, set()
    outside = {n for n, k in zip(names, kept, strict=True) if not k}
    assert not inside & outside
    order = rng.permutation(3_000)
    assert (sampled_blocks([names[i] for i in order], 1_000) == kept[order]).all()


def test_blocks_are_an_entity_s_rows_of_one_week() -> None:
    times = START + np.array([0, 1, 8, 8, 0]) * DAY
    window = Window({"x": numeric_column(np.zeros(5))}, np.array(["a", "a", "a", "b", "b"]), times)
    blocks = window.blocks.tolist()
    assert blocks[0] == blocks[1]
    assert len(set(blocks)) == 4
    layout = layout_of([bins_of("x", window.columns["x"])])
    assert block_counts(layout, [bins_of("x", window.columns["x"])], window.columns, window.blocks).sum() == 5


def test_adjusted_p_values_are_benjamini_and_hochberg_s() -> None:
    found = adjusted(np.array([0.01, 0.04, 0.03, 0.5]))
    assert found.tolist() == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert adjusted(np.empty(0)).tolist() == []


def test_episodes_end_where_a_window_is_sound() -> None:
    broken = [Incident("null_rate", "x", "all missing")]
    found = episodes([("1", broken), ("2", []), ("3", broken), ("4", [*broken, Incident("schema", "y", "is absent")])])
    assert [(e.feature, e.first, e.last, e.windows) for e in found] == [
        ("x", "1", "1", 1),
        ("x", "3", "4", 2),
        ("y", "4", "4", 1),
    ]


@pytest.mark.parametrize(
    "wrong", [{"minimum": 0}, {"psi": -1}, {"psi": True}, {"permutations": 1.5}, {"weeks": 5}, {"false_discovery": 0.5}]
)
def test_a_policy_without_sense_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyRefused, match=next(iter(wrong))):
        DriftPolicy(**wrong)  # pyright: ignore[reportArgumentType]


def test_a_reference_of_another_form_is_refused() -> None:
    for document in ({}, {"kind": "numeric", "edges": [1.0, 1.0], "counts": [1, 1, 1], "missing": 0}):
        with pytest.raises(ReferenceUnusable, match="'x'"):
            frozen_bins("x", document, "float64", None)


@given(st.integers(-(10**16), 10**16))
def test_a_week_starts_on_monday_and_holds_its_moments(moment: int) -> None:
    key = week_key(moment)
    start, end = week_bounds(key)
    assert start <= moment < end
    assert weeks(moment, moment + 1) == (key,)
    assert week_key(end) == weeks(start, end + 1)[-1] != key


def test_weeks_that_are_none_are_refused_with_the_one_that_is_meant() -> None:
    assert week_bounds("2013-09-02") == (1_378_080_000_000_000, 1_378_684_800_000_000)
    assert weeks(5, 5) == ()
    with pytest.raises(UnknownWeek, match="2013-09-02"):
        week_bounds("2013-09-04")
    for wrong in ("", "2013-W36", "20130902", "2013-09"):
        with pytest.raises(UnknownWeek):
            week_bounds(wrong)
