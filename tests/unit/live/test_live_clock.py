"""The world's clock is read again when it moved, and only then."""

import os
from pathlib import Path

import pytest

from headway.catalog.clock import system_clock
from headway.world import ClockUnusable, move_clock, world_clock

HOUR = 3_600_000_000


def test_every_move_is_seen_however_soon(tmp_path: Path) -> None:
    file = tmp_path / "clock.json"
    clock = world_clock(file)
    assert abs(clock() - system_clock()) < HOUR, "without a replay it is the machine's"
    for moment in range(HOUR, 40 * HOUR, HOUR):
        for step in range(3):
            move_clock(file, moment + step)
        assert clock() == clock() == moment + 2


def test_a_clock_that_stands_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock.json"
    move_clock(file, HOUR)
    os.utime(file, (1, 1))
    reads: list[Path] = []
    monkeypatch.setattr("headway.world.replayed_time", lambda file: reads.append(file) or HOUR)
    clock = world_clock(file)
    assert [clock() for _ in range(5)] == [HOUR] * 5
    assert len(reads) == 1


def test_a_clock_that_went_or_broke_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "clock.json"
    move_clock(file, HOUR)
    os.utime(file, (1, 1))
    clock = world_clock(file)
    assert clock() == HOUR
    file.write_text("{}")
    with pytest.raises(ClockUnusable):
        clock()
    file.unlink()
    assert abs(clock() - system_clock()) < HOUR
