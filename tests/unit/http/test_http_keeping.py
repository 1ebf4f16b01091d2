"""The online store is kept current without the catalog's help being needed, and trouble is told once."""

import errno
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.exc import DatabaseError

from headway.catalog.errors import CatalogUnavailable
from headway.home import Settings, load_settings
from headway.serving.http import keeping
from headway.serving.http.keeping import LateServices, OnlineKeeper
from headway.world import move_clock

PIPELINE = cast("Any", SimpleNamespace(name="late"))
WAIT_SECONDS = 60


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"HEADWAY_HOME": str(tmp_path)})


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What was logged, by event."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    keeping_log = logging.getLogger("headway.serve")
    keeping_log.addHandler(handler)
    keeping_log.setLevel(logging.INFO)
    yield found
    keeping_log.removeHandler(handler)
    keeping_log.setLevel(logging.NOTSET)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def report(rows: int) -> Any:  # noqa: ANN401
    return SimpleNamespace(rows_read=rows, rows_written=rows, versions_read=1, skipped={}, seconds=0.1)


@pytest.mark.parametrize(
    "trouble",
    [CatalogUnavailable("away"), OSError(errno.ENOSPC, "No space left on device"), DatabaseError("", {}, Exception())],
)
def test_trouble_is_told_once_and_its_end_as_well(
    settings: Settings, events: list[str], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    turns: list[int] = []

    def sync(*_: object) -> Any:  # noqa: ANN401
        turns.append(1)
        if len(turns) <= 3:
            raise trouble
        return report(7 if len(turns) == 4 else 0)

    monkeypatch.setattr(keeping, "sync_online", sync)
    monkeypatch.setattr(keeping, "EVERY_S", 0.01)
    monkeypatch.setattr(keeping, "LOOK_S", 0.002)
    late = cast("LateServices", SimpleNamespace(get=lambda: None))
    keeper = OnlineKeeper(settings, late, [PIPELINE], cast("Any", None))
    keeper.start()
    until(lambda: len(turns) >= 6)
    keeper.stop(WAIT_SECONDS)
    assert events[:3] == ["online_sync_failed", "online_sync_works_again", "online_synced"]
    assert set(events[3:]) <= {"online_synced"}
    done = len(turns)
    time.sleep(0.03)
    assert len(turns) == done


def test_a_replayed_clock_that_moves_is_followed_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    monkeypatch.setattr(keeping, "sync_online", lambda *_: turns.append(1) or report(0))
    monkeypatch.setattr(keeping, "EVERY_S", 3600.0)
    monkeypatch.setattr(keeping, "LOOK_S", 0.002)
    late = cast("LateServices", SimpleNamespace(get=lambda: None))
    keeper = OnlineKeeper(settings, late, [PIPELINE], cast("Any", None))
    keeper.start()
    time.sleep(0.05)
    assert turns == []
    move_clock(settings.clock_file, 1_000_000)
    until(lambda: len(turns) == 1)
    move_clock(settings.clock_file, 2_000_000)
    until(lambda: len(turns) == 2)
    settings.clock_file.write_text(json.dumps({"format": "other"}))
    until(lambda: len(turns) == 3)
    keeper.stop(WAIT_SECONDS)


def test_a_catalog_that_is_away_is_asked_again_after_a_while_and_then_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    services = SimpleNamespace(close=lambda: asked.append(-1))

    def connect(_: Settings) -> Any:  # noqa: ANN401
        asked.append(1)
        if len(asked) == 1:
            raise CatalogUnavailable("away")
        return services

    monkeypatch.setattr(keeping, "connect", connect)
    late = LateServices(settings)
    for _ in range(3):
        with pytest.raises(CatalogUnavailable):
            late.get()
    assert asked == [1]
    monkeypatch.setattr(keeping, "AGAIN_S", 0.0)
    assert late.get() is services
    assert late.get() is services
    assert asked == [1, 1]
    late.close()
    assert asked == [1, 1, -1]
