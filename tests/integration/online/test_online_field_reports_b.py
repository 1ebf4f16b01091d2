"""What people ran into with feature stores, tried online: declaration, files, syncs and request files."""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.online_bench import COLUMNS, DAY, HOUR, LATEST, online_bench, us, view, write_asked

from headway.features.online import OnlineStore
from headway.features.online.scopes import KeyPartMissing, entity_of
from headway.serving.requests import RequestsRefused, read_requests

PARTITIONED = {"partition": {"column": "at", "start": "2026-03-01"}}


def _values(found: Any, column: str = "v__value") -> list[object]:  # noqa: ANN401
    return found.values.column(column).to_pylist()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_b01_the_newest_correction_wins_whatever_the_order_of_files(
    tmp_path: Path, embedded: OnlineStore, order: tuple[int, ...]
) -> None:
    rows = [
        "1001,2022-11-20T20:00:00Z,2022-11-20T20:05:00Z,5",
        "1001,2022-11-20T20:00:00Z,2022-11-20T21:00:00Z,1005",
        "1001,2022-11-20T20:00:00Z,2022-11-20T22:00:00Z,2005",
    ]
    columns = {n: t for n, t in COLUMNS.items() if n != "id"}
    names = [f"part{i}.csv" for i in range(3)]
    bench = write_asked(
        tmp_path, "", {"v": view()}, columns=columns, row_id=["k", "at"], source={"files": {"paths": names}}
    )
    for name, i in zip(names, order, strict=True):
        (bench.folder / name).write_text(f"k,at,known,value\n{rows[i]}\n")
    bench.ingest("data")
    times = ["20:30:00", "21:30:00", "22:30:00", "23:00:42"]
    with online_bench(bench, embedded) as live:
        for time, right in zip(times, [5, 1005, 2005, 2005], strict=True):
            live.at(us(f"2022-11-20T{time}") + 1).sync()
            assert _values(live.ask({"k": "1001", "t": f"2022-11-20T{time}Z"})) == [right]
        together = live.ask(*({"k": "1001", "t": f"2022-11-20T{time}Z"} for time in times))
        assert _values(together) == [5, 1005, 2005, 2005]


def test_b03_an_end_in_the_future_is_clipped_and_poisons_nothing(tmp_path: Path, online: OnlineStore) -> None:
    data = "k,id,at,known,value\na,1,2026-03-01T08:00:00Z,2026-03-01T08:00:00Z,1\n"
    today = data + "a,2,2026-03-01T11:00:00Z,2026-03-01T11:00:00Z,2\n"
    bench = write_asked(tmp_path, data, {"v": view(lookback="1d")}, source=PARTITIONED)
    bench.ingest("data", partitions=["2026-03-01"])
    with online_bench(bench, online, us("2026-03-01T10:00:00")) as live:
        report = live.sync(until=us("2027-04-08"))
        assert report.clipped
        assert report.state.until == live.now
        assert report.state.watermarks == {"data": us("2026-03-01T08:00:00")}, "never beyond the newest row seen"
        live.deliver("data", "data.csv", today, "2026-03-01")
        live.at(us("2026-03-01T12:00:00"))
        normal = live.sync()
        assert not normal.clipped
        assert normal.state.watermarks == {"data": us("2026-03-01T11:00:00")}
        assert _values(live.ask({"k": "a", "t": "2026-03-01T11:30:00Z"})) == [2], "today's run loads today's rows"


def test_b05_a_two_part_key_never_answers_for_another_pair(tmp_path: Path, online: OnlineStore) -> None:
    columns = {"driver": "int64", "customer": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
    time = "2026-03-01T00:00:00Z"
    data = f"driver,customer,at,known,value\n1001,A,{time},{time},0.1\n1001,B,{time},{time},0.9\n"
    bench = write_asked(
        tmp_path,
        data,
        {
            "v": view(keys={"driver": "driver", "customer": "customer"}),
            "other_order": view(keys={"customer": "customer", "driver": "driver"}),
        },
        columns=columns,
        row_id=["driver", "customer"],
        keys=["driver", "customer"],
        request={"driver": "int64", "customer": "string"},
    )
    bench.ingest("data")
    asked = [
        {"driver": 1001, "customer": "B", "t": "2026-03-01T10:00:00Z"},
        {"driver": 1001, "customer": "C", "t": "2026-03-01T10:00:00Z"},
        {"t": "2026-03-01T10:00:00Z", "customer": "B", "driver": 1001},
    ]
    with online_bench(bench, online, us("2026-03-01T12:00:00")) as live:
        live.sync()
        found = live.ask(*asked)
        assert _values(found) == _values(found, "other_order__value") == [0.9, None, 0.9]
        reasons = ["hit", "none_visible", "hit"]
        assert found.values.column("v__value__reason").to_pylist() == reasons
        assert [f.status for f in found.freshness["v"]] == ["fresh", "missing", "fresh"]
        file = tmp_path / "short.json"
        file.write_text(json.dumps([{"driver": 1001, "t": "2026-03-01T10:00:00Z"}]))
        with pytest.raises(RequestsRefused, match="customer"):
            read_requests(file, live.pipeline.spec)
    parts = {"driver": 1001, "customer": "B"}
    assert entity_of(parts, ["driver", "customer"]) == entity_of(dict(reversed(parts.items())), ["customer", "driver"])
    with pytest.raises(KeyPartMissing, match="'customer'") as missing:
        entity_of({"driver": 1001}, ["driver", "customer"])
    assert missing.value.missing == ("customer",)
    # Parts that would run together as text stay apart, and a null part matches nothing.
    assert entity_of({"a": "x,y", "b": "z"}, ["a", "b"]) != entity_of({"a": "x", "b": "y,z"}, ["a", "b"])
    assert entity_of({"a": None, "b": "z"}, ["a", "b"]) == b""


def test_b07_two_roles_of_one_entity_stay_two_columns(tmp_path: Path, online: OnlineStore) -> None:
    time = "2026-03-01T00:00:00Z"
    data = f"k,id,at,known,value\nu1,1,{time},{time},10\nu2,2,{time},{time},20\n"
    bench = write_asked(
        tmp_path,
        data,
        {"buyer_user": view(keys={"buyer": "k"}), "seller_user": view(keys={"seller": "k"})},
        request={"buyer": "string", "seller": "string"},
    )
    bench.ingest("data")
    asked = [
        {"buyer": b, "seller": s, "t": "2026-03-01T10:00:00Z"} for b, s in (("u1", "u2"), ("u2", "u1"), ("u1", "u1"))
    ]
    with online_bench(bench, online, us("2026-03-02")) as live:
        live.sync()
        found = live.ask(*asked)
    assert _values(found, "buyer_user__value") == [10, 20, 10]
    assert _values(found, "seller_user__value") == [20, 10, 10]


def test_b09_todays_table_is_not_known_last_year(tmp_path: Path, embedded: OnlineStore) -> None:
    columns = {"k": "string", "id": "int64", "export": "timestamp", "value": "float64"}
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    data = f"k,id,export,value\na,1,{today}T00:00:00Z,7\n"
    clock = {"event_time": "export", "available_time": "export"}
    bench = write_asked(tmp_path, data, {"v": view()}, columns=columns, source=clock)
    bench.ingest("data")
    with online_bench(bench, embedded, us(f"{today}T00:00:00") + 1) as live:
        live.sync(retain=400 * DAY)
        last_year = live.now - 200 * DAY
        asked = datetime.fromtimestamp(last_year / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = live.ask({"k": "a", "t": asked}, {"k": "a", "t": f"{today}T00:00:00.000001Z"})
    assert _values(found) == [None, 7]
    assert found.values.column("v__value__reason").to_pylist() == ["none_visible", "hit"]


@pytest.mark.parametrize("boundary", ["lt", "le"])
def test_b11_a_day_of_25_hours_is_not_one_day_of_look_back(
    tmp_path: Path, embedded: OnlineStore, boundary: str
) -> None:
    days = range(5, 11)
    midnights = [f"2021-11-{d:02d}T{'05' if d <= 7 else '06'}:00:00Z" for d in days]
    data = "k,id,at,known,value\n" + "".join(f"a,{i},{m},{m},{i + 1}\n" for i, m in enumerate(midnights))
    bench = write_asked(tmp_path, data, {"v": view(boundary=boundary, lookback="24h")}, start="2021-01-01")
    bench.ingest("data")
    with online_bench(bench, embedded, us("2021-12-01")) as live:
        live.sync(retain=60 * DAY)
        asked = [datetime.fromisoformat(m).timestamp() for m in midnights]
        at = [datetime.fromtimestamp(a, UTC).strftime("%Y-%m-%dT%H:%M:%S.000001Z") for a in asked]
        found = live.ask(*({"k": "a", "t": t} for t in at))
    if boundary == "lt":
        assert _values(found) == [None, 1, 2, None, 4, 5]
        assert found.values.column("v__value__reason").to_pylist()[3] == "expired"
    else:
        assert _values(found) == [1, 2, 3, 4, 5, 6]


def test_b13_the_sequence_breaks_ties(tmp_path: Path, embedded: OnlineStore) -> None:
    columns = {**COLUMNS, "seq": "int64", "value": "string"}
    ten, later = "2026-03-01T10:00:00Z", "2026-03-01T10:01:00Z"
    rows = [(ten, 1, "a"), (ten, 10, "c"), (ten, 9, "b"), (later, 1, "d")]
    data = "k,id,at,known,value,seq\n" + "".join(f"x,{i},{t},{t},{v},{s}\n" for i, (t, s, v) in enumerate(rows))
    bench = write_asked(tmp_path, data, {"v": view()}, columns=columns, source={"sequence": "seq"})
    bench.ingest("data")
    with online_bench(bench, embedded, us("2026-03-01T12:00:00")) as live:
        live.sync()
        found = live.ask(*({"k": "x", "t": f"2026-03-01T10:0{m}:00.000001Z"} for m in (0, 1)))
    assert _values(found) == ["c", "d"]


def test_b15_months_in_another_zone_load_the_rows_of_their_instants(tmp_path: Path, embedded: OnlineStore) -> None:
    source = {
        "partition": {"column": "at", "start": "2024-12-01", "cadence": "monthly", "zone": "Europe/Budapest"},
    }
    data = (
        "k,id,at,known,value\na,1,2024-12-31T23:30:00Z,2024-12-31T23:30:00Z,7\n"
        "a,2,2025-01-31T22:30:00Z,2025-01-31T22:30:00Z,5\n"
    )
    features = {"total": {"window": "value", "aggregate": "sum", "duration": "31d"}}
    bench = write_asked(tmp_path, data, {"v": view(features=features)}, source=source, start="2024-01-01")
    bench.ingest("data", partitions=["2025-01-01"])
    with online_bench(bench, embedded, us("2025-02-01")) as live:
        report = live.sync()
        assert {m.partition for m in report.state.marks} == {"2025-01-01"}
        assert report.rows_written == 2, "both are January in Budapest"
        found = live.ask({"k": "a", "t": "2025-01-31T23:00:00Z"})
    assert _values(found, "v__total") == [12]


def test_b17_revised_figures_are_seen_as_they_were_known(tmp_path: Path, online: OnlineStore) -> None:
    data = (
        "k,at,known,value\nunemployment,2023-08-01T00:00:00Z,2023-09-01T00:00:00Z,3.8\n"
        "unemployment,2023-08-01T00:00:00Z,2024-01-05T00:00:00Z,3.7\n"
        "unemployment,2023-03-01T00:00:00Z,2023-04-12T00:00:00Z,4.9\n"
    )
    columns = {n: t for n, t in COLUMNS.items() if n != "id"}
    bench = write_asked(tmp_path, data, {"v": view()}, columns=columns, row_id=["k", "at"])
    bench.ingest("data")
    asked = ["2023-03-31T00:00:00Z", "2023-10-01T00:00:00Z", "2024-02-01T00:00:00Z"]
    with online_bench(bench, online) as live:
        for t, right in zip(asked, [None, 3.8, 3.7], strict=True):
            live.at(us(t) + HOUR).sync()
            assert _values(live.ask({"k": "unemployment", "t": t})) == [right]
        live.sync(retain=400 * DAY)
        again = live.ask(*({"k": "unemployment", "t": t} for t in asked))
        assert _values(again) == [None, 3.8, 3.7], "October's answer is 3.8 for ever"


def test_case_52_writes_out_of_order_end_with_the_newest_event(tmp_path: Path, online: OnlineStore) -> None:
    newer = "a,2,2026-03-01T09:00:00Z,2026-03-01T09:00:00Z,2\n"
    older = "a,1,2026-03-01T08:00:00Z,2026-03-01T09:30:00Z,1\n"
    corrected = "a,2,2026-03-01T09:00:00Z,2026-03-01T09:45:00Z,22\n"
    bench = write_asked(tmp_path, f"k,id,at,known,value\n{older}{corrected}{newer}", {"v": view()})
    bench.ingest("data")
    with online_bench(bench, online) as live:
        for t, right in (("09:20", 2), ("09:40", 2), ("09:50", 22)):
            live.at(us(f"2026-03-01T{t}:00")).sync()
            assert _values(live.ask({"k": "a", "t": f"2026-03-01T{t}:00Z"})) == [right]


def test_case_53_a_value_older_than_the_look_back_is_expired_with_its_age(
    tmp_path: Path, embedded: OnlineStore
) -> None:
    data = "k,id,at,known,value\na,1,2026-03-01T08:00:00Z,2026-03-01T08:00:00Z,1\n"
    views = {"v": view(lookback="1h"), "w": view(features=LATEST)}
    bench = write_asked(tmp_path, data, views, groups={"w": {"max_staleness": "1h"}})
    bench.ingest("data")
    with online_bench(bench, embedded, us("2026-03-01T12:00:00")) as live:
        live.sync()
        found = live.ask(*({"k": "a", "t": f"2026-03-01T{t}.000001Z"} for t in ("09:00:00", "09:30:00", "11:00:00")))
    assert _values(found) == [1, None, None]
    old, expired, forgotten = found.freshness["v"]
    assert (old.status, old.age) == ("fresh", 3600)
    assert (expired.status, expired.reason, expired.age) == ("missing", "expired", 5400)
    assert (forgotten.reason, forgotten.age) == ("none_visible", None)
    assert _values(found, "w__value") == [1, 1, 1]
    told = [(f.status, f.incomplete) for f in found.freshness["w"]]
    assert told == [("fresh", ""), ("stale", "too_old"), ("stale", "too_old")]
