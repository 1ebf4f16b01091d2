"""What a replay asks and when outcomes come in is a function of the event, and moments are read as people type them."""

from pathlib import Path

import numpy as np
import pytest
from support.loop_bench import write_loop_bench
from support.serving_bench import amend, pipeline_of

from headway.replay.compare import AnsweredRows, Compared, Strategy, auc_gap, month_of, quality
from headway.replay.events import NotReplayable, ReportDelay, request_columns, stops_between
from headway.replay.moments import MomentRefused, moment_of
from headway.world import ClockMovesBack, ClockUnusable, move_clock, replayed_time, world_clock

HOUR = 3_600_000_000


def test_a_delay_is_drawn_by_the_identity_alone() -> None:
    delay = ReportDelay(median=2.0, spread=1.0, longest=36.0)
    drawn = np.array([delay.of(f"event {i}".encode()) for i in range(4_000)]) / HOUR
    again = np.array([delay.of(f"event {i}".encode()) for i in range(4_000)]) / HOUR
    assert (drawn == again).all()
    assert 1.8 < np.median(drawn) < 2.2
    assert drawn.max() <= 36.0
    assert drawn.min() > 0


def test_a_feed_stops_at_full_hours_and_at_its_end() -> None:
    assert list(stops_between(HOUR, 3 * HOUR)) == [2 * HOUR, 3 * HOUR]
    assert list(stops_between(HOUR + 1, 3 * HOUR - 1)) == [2 * HOUR, 3 * HOUR - 1]
    assert list(stops_between(HOUR, HOUR)) == []


@pytest.mark.parametrize("text", ["2013-12-16", "2013-12-16T00:00", "2013-12-16T01:00+01:00"])
def test_a_moment_is_a_date_or_a_time(text: str) -> None:
    assert moment_of(text) == 1_387_152_000_000_000


def test_what_is_no_moment_is_refused() -> None:
    with pytest.raises(MomentRefused, match="tomorrow"):
        moment_of("tomorrow")


def test_the_clock_is_the_machines_until_a_replay_sets_it_and_never_goes_back(tmp_path: Path) -> None:
    file = tmp_path / "clock.json"
    clock = world_clock(file)
    assert clock() > 1_700_000_000_000_000
    move_clock(file, 5)
    assert (clock(), replayed_time(file)) == (5, 5)
    with pytest.raises(ClockMovesBack):
        move_clock(file, 4)
    move_clock(file, 5)
    file.write_text('{"format": "headway.clock/1", "now": "2013-12-16T00:00:00"}')
    with pytest.raises(ClockUnusable):
        clock()


def test_a_request_field_is_found_by_its_column_its_match_or_its_name(tmp_path: Path) -> None:
    bench = write_loop_bench(tmp_path)
    assert request_columns(pipeline_of(bench).spec) == {"k": "k", "size": "size", "starts": "starts", "number": "size"}
    request = {"unknown": {"type": "string", "required": True}}
    spec = pipeline_of(bench).spec
    assert spec.serving is not None
    amend(
        bench,
        serving=spec.serving.model_dump(mode="json", exclude_defaults=True)
        | {"request": {n: f.model_dump(exclude_defaults=True) for n, f in spec.serving.request.items()} | request},
    )
    with pytest.raises(NotReplayable, match="unknown"):
        request_columns(pipeline_of(bench).spec)


def test_quality_and_the_paired_gap_of_two_habits() -> None:
    rng = np.random.default_rng(0)
    days, label = np.repeat(np.arange(30), 40), rng.integers(0, 2, 1_200).astype(float)
    good, chance = np.clip(0.5 + 0.3 * (label - 0.5) + rng.normal(0, 0.2, 1_200), 0, 1), rng.random(1_200)
    import pyarrow as pa

    rows = AnsweredRows(pa.table({"x": np.zeros(1_200)}), days * 24 * HOUR, good, label)
    strategy = Strategy("one", ())
    gap = auc_gap(rows, Compared(strategy, {}, None, good), Compared(strategy, {}, None, chance))
    assert gap is not None
    assert gap.lower is not None
    assert gap.lower > 0.2
    found = quality(good, label)
    assert found is not None
    assert found.rows == 1_200
    assert found.auc == pytest.approx(gap.value + (quality(chance, label) or found).auc)  # pyright: ignore[reportOperatorIssue]
    assert quality(good[:0], label[:0]) is None
    assert month_of(1_387_152_000_000_000) == "2013-12"
