"""Filling the store: incremental, whatever the steps, corrections and kills; what it refuses, clips and leaves out."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.online_bench import DAY, HOUR, LATEST, OnlineBench, online_bench, us, view, write_asked
from support.serving_bench import amend

from headway.features.inputs import InputMissing
from headway.features.online import OnlineNotReady, OnlineStore, online_store_at
from headway.features.online.erase import NothingToErase, erase_entity
from headway.features.online.store import StoreKey
from headway.serving.features import InputQuarantined
from headway.serving.requests import RequestsRefused

DAYS = ("2026-03-01", "2026-03-02", "2026-03-03")
END = us("2026-03-04")
KEY = StoreKey("default", "pipeline", 1)
PARTITIONED = {"partition": {"column": "at", "start": DAYS[0]}}
VIEWS = {
    "v": view(lookback="12h", allowed_lateness="6h"),
    "w": view(features={"n": {"window": "value", "aggregate": "count", "duration": "1d"}}),
}


def _data(*rows: str) -> str:
    return "k,id,at,known,value\n" + "".join(f"{row}\n" for row in rows)


def _hourly(days: tuple[str, ...] = DAYS, *, without: int = -1) -> list[str]:
    rng = np.random.default_rng(2)
    rows = [
        f"{'ab'[h % 2]},{24 * d + h},{day}T{h:02d}:10:00Z,{day}T{h:02d}:{rng.integers(10, 60)}:00Z,{h}"
        for d, day in enumerate(days)
        for h in range(0, 24, 3)
    ]
    return [r for i, r in enumerate(rows) if i != without]


def _bench(root: Path, online: OnlineStore, rows: list[str], now: int) -> OnlineBench:
    bench = write_asked(root, _data(*rows), VIEWS, source=PARTITIONED, start=DAYS[0])
    bench.ingest("data", partitions=[d for d in DAYS if any(f",{d}T" in r for r in rows)])
    live = online_bench(bench, online, now)
    return live.__enter__()


def _held(online: OnlineStore) -> list[tuple[object, ...]]:
    """Rows that are held; what the marks say of times depends on when the last sync was."""
    return [row for row in online.dump(KEY) if row[0] != "online_mark"]


def _value(live: OnlineBench, k: str, t: str) -> object:
    return live.ask({"k": k, "t": t}).values.column("v__value")[0].as_py()


def test_many_steps_and_one_step_hold_the_same_and_steps_read_only_what_may_be_new(
    tmp_path: Path, online: OnlineStore, embedded: OnlineStore
) -> None:
    live = _bench(tmp_path, online, _hourly(), END)
    other = OnlineBench(live.bench, live.services, live.pipeline, embedded, END)
    whole = other.sync(retain=4 * DAY)
    assert whole.rows_written == 24, "one scope serves both views"
    written = [live.at(t).sync(retain=4 * DAY).rows_written for t in range(us(DAYS[0]), END + 1, 5 * HOUR)]
    written.append(live.at(END).sync(retain=4 * DAY).rows_written)
    assert sum(written) == 24
    assert _held(online) == _held(embedded)
    again = live.sync(retain=4 * DAY)
    assert (again.rows_read, again.rows_written, again.versions_read) == (0, 0, 0)
    assert again.state.watermarks == whole.state.watermarks == {"data": us("2026-03-03T21:10:00")}


def test_what_is_known_later_is_not_there_yet(tmp_path: Path, embedded: OnlineStore) -> None:
    rows = ["a,1,2026-03-01T01:00:00Z,2026-03-01T05:00:00Z,1", "a,2,2026-03-01T02:00:00Z,2026-03-01T02:00:00Z,2"]
    live = _bench(tmp_path, embedded, rows, us("2026-03-01T04:00:00"))
    report = live.sync()
    assert report.rows_written == 1
    assert report.state.watermarks == {"data": us("2026-03-01T02:00:00")}
    live.at(us("2026-03-01T06:00:00"))
    assert live.ask({"k": "a", "t": "2026-03-01T05:30:00Z"}).values.column("w__n").to_pylist() == [1], "it is behind"
    live.sync()
    assert live.ask({"k": "a", "t": "2026-03-01T05:30:00Z"}).values.column("w__n").to_pylist() == [2]


def test_a_new_version_of_a_partition_replaces_the_old_one_and_its_dropped_rows(
    tmp_path: Path, online: OnlineStore
) -> None:
    live = _bench(tmp_path, online, _hourly(), END)
    live.sync(retain=4 * DAY)
    reader = live.features()
    asked = live.requests([{"k": "a", "t": "2026-03-02T13:00:00Z"}])
    assert reader.compute(asked, END).values.column("v__value").to_pylist() == [12]
    dropped = _data(*_hourly(without=8 + 4))
    live.deliver("data", "data.csv", dropped, "2026-03-02")
    report = live.sync(retain=4 * DAY)
    assert report.versions_read == 1
    assert reader.compute(asked, END).values.column("v__value").to_pylist() == [6], "the reader notices"
    fresh = online_store_at(f"sqlite:///{tmp_path / 'fresh.db'}")
    OnlineBench(live.bench, live.services, live.pipeline, fresh, END).sync(retain=4 * DAY)
    assert _held(online) == _held(fresh)
    fresh.close()


def test_a_correction_that_moves_key_or_event_time_supersedes_where_the_row_stood(
    tmp_path: Path, online: OnlineStore
) -> None:
    rows = [
        "a,1,2026-03-01T01:00:00Z,2026-03-01T01:00:00Z,1",
        "a,2,2026-03-01T00:30:00Z,2026-03-01T00:30:00Z,2",
        "b,1,2026-03-02T01:00:00Z,2026-03-02T01:00:00Z,3",
    ]
    live = _bench(tmp_path, online, rows, us("2026-03-01T02:00:00"))
    live.sync()
    assert _value(live, "a", "2026-03-01T02:00:00Z") == 1
    live.at(us("2026-03-02T01:30:00")).sync()
    found = live.ask({"k": "a", "t": "2026-03-02T00:30:00Z"}, {"k": "a", "t": "2026-03-02T01:10:00Z"})
    assert found.values.column("w__n").to_pylist() == [2, 0], "from then on it stands with b"
    assert _value(live, "b", "2026-03-02T01:30:00Z") == 3


@pytest.mark.parametrize(
    ("online_url", "kill_at"),
    [*(("sqlite", point) for point in (1, 3, 4, 6, 7, 8)), ("postgresql", 5)],
    indirect=["online_url"],
)
def test_a_sync_killed_anywhere_is_ended_by_the_next(tmp_path: Path, online_url: str, kill_at: int) -> None:
    """The killed sync had a correction, a partition that came late and new rows to bring."""
    online = online_store_at(online_url)
    live = _bench(tmp_path, online, _hourly(DAYS[:2]), us("2026-03-02T09:00:00"))
    live.sync(retain=4 * DAY)
    before = _answers(live, "2026-03-02T08:00:00Z")
    live.deliver("data", "data.csv", _data(*_hourly(without=3)), "2026-03-01", "2026-03-03")
    online.close()
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, str(live.bench.folder), str(live.bench.home), online_url, str(kill_at)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode in (-signal.SIGKILL, 0), child.stderr
    live.at(us("2026-03-03T10:00:00"))
    if child.returncode:
        assert _answers(live, "2026-03-02T08:00:00Z") == before, "a part of a sync changes no answer"
    live.sync(retain=4 * DAY)
    fresh = online_store_at(f"sqlite:///{tmp_path / 'fresh.db'}")
    OnlineBench(live.bench, live.services, live.pipeline, fresh, live.now).sync(retain=4 * DAY)
    assert _held(online) == _held(fresh)
    fresh.close()
    online.close()


def _answers(live: OnlineBench, t: str) -> list[object]:
    found = live.ask(*({"k": k, "t": t} for k in "ab")).values
    return [found.column(c).to_pylist() for c in ("v__value", "w__n", "v__incomplete")]


_KILLED = """
import os, signal, sys
sys.path[:0] = ["tests", "."]
from pathlib import Path
from dataclasses import replace
from support.online_bench import DAY, us
from headway.features.online import online_store_at, sql_store
from headway.features.online.sync import sync_online
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.services import open_services
folder, home, url, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
calls = 0
def dying(function):
    def run(*arguments, **named):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return run
for name in ("_empty", "_note_moves", "_move_state"):
    setattr(sql_store, name, dying(getattr(sql_store, name)))
with open_services(load_settings({"HEADWAY_HOME": home})) as services:
    services = replace(services, world=lambda: us("2026-03-03T10:00:00"))
    sync_online(services, load_pipeline(folder), online_store_at(url), retain=4 * DAY)
"""


def test_a_held_source_stays_where_it_was_and_says_so(tmp_path: Path, embedded: OnlineStore) -> None:
    live = _bench(tmp_path, embedded, _hourly(), us("2026-03-02T10:00:00"))
    live.sync()
    live.at(us("2026-03-02T23:00:00"))
    report = live.sync(hold=["data"])
    assert report.held == ("data",)
    assert report.rows_written == 0
    assert report.state.until == live.now
    assert report.state.known_until == {"data": us("2026-03-02T10:00:00")}
    behind = live.ask({"k": "a", "t": "2026-03-02T22:00:00Z"})
    assert behind.values.column("v__value").to_pylist() == [None], "expired: the last one it knows is of 06:10"
    assert behind.freshness["v"][0].incomplete == "watermark_behind"
    live.sync()
    after = live.ask({"k": "a", "t": "2026-03-02T22:00:00Z"})
    assert after.freshness["v"][0].status == "fresh"
    assert after.values.column("v__value").to_pylist() == [18]


def test_a_source_held_from_the_start_is_not_taken_for_read(tmp_path: Path, embedded: OnlineStore) -> None:
    live = _bench(tmp_path, embedded, _hourly(), us("2026-03-02T10:00:00"))
    live.sync(hold=["data"])
    found = live.ask({"k": "a", "t": "2026-03-02T09:00:00Z"})
    assert [found.freshness[v][0].incomplete for v in "vw"] == ["watermark_behind", "partition_not_read"]


def test_quarantined_partitions_are_left_out_by_name_and_flagged(tmp_path: Path, embedded: OnlineStore) -> None:
    live = _bench(tmp_path, embedded, _hourly(), END)
    live.sync(retain=4 * DAY)
    current = live.services.catalog.current_many(live.services.principal, "pipeline/data", ["2026-03-02"])
    version = current["2026-03-02"]
    live.services.catalog.retire_version(
        live.services.principal, None, version.dataset, version.version, "a wrong delivery"
    )
    report = live.sync(retain=4 * DAY)
    assert report.skipped == {"data": ("2026-03-02",)}
    found = live.ask({"k": "a", "t": "2026-03-02T13:00:00Z"})
    assert found.values.column("w__n").to_pylist() == [1], "that of the day before"
    assert found.freshness["w"][0].incomplete == "partition_not_read"
    amend(live.bench, features={**_features(live), "on_quarantined_input": "refuse"})
    strict = _reopened(live)
    strict.sync(retain=4 * DAY)
    with pytest.raises(InputQuarantined, match="data 2026-03-02"):
        strict.ask({"k": "a", "t": "2026-03-02T13:00:00Z"})


def _features(live: OnlineBench) -> dict[str, object]:
    return live.pipeline.spec.features.model_dump(mode="json", exclude_defaults=True)


def _reopened(live: OnlineBench) -> OnlineBench:
    return online_bench(live.bench, live.online, live.now).__enter__()


def test_rows_that_no_observation_can_need_are_dropped_and_earlier_questions_refused(
    tmp_path: Path, embedded: OnlineStore
) -> None:
    live = _bench(tmp_path, embedded, _hourly(), END)
    kept = live.sync(retain=4 * DAY)
    assert kept.state.since == END - 5 * DAY
    assert live.ask({"k": "a", "t": "2026-03-01T13:00:00Z"}).values.column("v__value").to_pylist() == [12]
    live.at(END + 12 * HOUR)
    pruned = live.sync()
    assert {m.partition for m in pruned.state.marks} == {"2026-03-02", "2026-03-03"}
    assert {row[7] for row in _held(embedded)} == {"2026-03-02", "2026-03-03"}
    with pytest.raises(RequestsRefused, match="before what is kept online"):
        live.ask({"k": "a", "t": "2026-03-03T11:00:00Z"})
    found = live.ask({"k": "a", "t": "2026-03-03T13:00:00Z"})
    assert found.values.column("w__n").to_pylist() == [4]


def test_another_feature_set_is_not_answered_from_this_ones_rows(tmp_path: Path, embedded: OnlineStore) -> None:
    live = _bench(tmp_path, embedded, _hourly(), END)
    with pytest.raises(OnlineNotReady, match="fill it"):
        live.ask({"k": "a", "t": "2026-03-03T13:00:00Z"})
    live.sync()
    old = live.features()
    assert old.state().feature_set_version == 1
    amend(live.bench, features={**_features(live), "views": {"v": view(lookback="1h", features=LATEST)}})
    changed = _reopened(live)
    with pytest.raises(OnlineNotReady):
        changed.features().state()
    assert changed.sync().state.feature_set_version == 2
    asked = changed.requests([{"k": "a", "t": "2026-03-03T20:00:00Z"}])
    assert changed.features().compute(asked, END).values.column("v__value").to_pylist() == [None]
    assert old.compute(asked, END).values.column("v__value").to_pylist() == [18], "both until the cutover"


def test_a_whole_table_without_a_version_is_refused_by_name(tmp_path: Path, embedded: OnlineStore) -> None:
    bench = write_asked(tmp_path, _data(), {"v": view(boundary="le")})
    with online_bench(bench, embedded, END) as live, pytest.raises(InputMissing, match="data of pipeline"):
        live.sync()


def test_an_erased_entity_is_not_brought_back_by_a_late_delivery(tmp_path: Path, online: OnlineStore) -> None:
    live = _bench(tmp_path, online, _hourly(), us("2026-03-03T06:00:00"))
    live.sync()
    assert _value(live, "a", "2026-03-03T02:00:00Z") == 0
    assert erase_entity(live.pipeline, online, "default", "data", {"k": "a"}, live.now) > 0
    for key in ({"k": None}, {"id": 3}, {}):
        with pytest.raises(NothingToErase, match="keys: k"):
            erase_entity(live.pipeline, online, "default", "data", key, live.now)
    live.deliver("data", "data.csv", _data(*_hourly(without=23)), "2026-03-03")
    live.at(END).sync()
    found = live.ask({"k": "a", "t": "2026-03-03T20:00:00Z"}, {"k": "b", "t": "2026-03-03T20:00:00Z"})
    assert found.values.column("w__n").to_pylist() == [0, 4]
    assert found.values.column("v__value__reason").to_pylist() == ["none_visible", "hit"]


def test_processes_that_sync_at_once_end_as_one(tmp_path: Path, online_url: str) -> None:
    online = online_store_at(online_url)
    live = _bench(tmp_path, online, _hourly(), us("2026-03-03T10:00:00"))
    arguments = [sys.executable, "-c", _KILLED, str(live.bench.folder), str(live.bench.home), online_url, "0"]
    children = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    for child in children:
        _, said = child.communicate(timeout=120)
        assert child.returncode == 0, said
    fresh = online_store_at(f"sqlite:///{tmp_path / 'fresh.db'}")
    OnlineBench(live.bench, live.services, live.pipeline, fresh, live.now).sync(retain=4 * DAY)
    assert _held(online) == _held(fresh)
    fresh.close()
    online.close()
