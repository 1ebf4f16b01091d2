"""Local times and partitions against plain `zoneinfo` arithmetic."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.datasets.partitions import (
    CalendarError,
    PartitionNotClosed,
    PartitionScheme,
    TooManyPartitions,
    UnknownPartition,
)
from headway.datasets.zones import AMBIGUOUS, NONEXISTENT, OK, instant, iso, local_to_utc, utc_to_local, wall
from headway.declaration import PartitionSpec

ZONES = ["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns", "Pacific/Apia"]
YEAR_2013 = (1_356_998_400_000_000, 1_388_534_400_000_000)


def scheme(**fields: object) -> PartitionScheme:
    return PartitionScheme.from_spec(PartitionSpec.model_validate({"column": "t", "start": "2013-01-01", **fields}))


@pytest.mark.parametrize("zone", [*ZONES, "Europe/Paris", "Australia/Sydney", "Africa/Casablanca", "America/Godthab"])
@pytest.mark.parametrize("day", ["2013-03-10", "2013-03-31", "2013-10-06", "2013-10-27", "2013-11-03", "2011-12-30"])
def test_every_clock_time_around_a_change_agrees_with_zoneinfo(zone: str, day: str) -> None:
    around = [datetime.fromisoformat(day) + timedelta(minutes=m) for m in range(-2880, 4320, 15)]
    agree_with_zoneinfo(around, zone)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.datetimes(datetime(1900, 1, 2), datetime(2100, 1, 1)), max_size=8),  # noqa: DTZ001
    st.sampled_from(ZONES),
)
def test_local_times_agree_with_zoneinfo(clocks: list[datetime], zone: str) -> None:
    agree_with_zoneinfo(clocks, zone)


def agree_with_zoneinfo(clocks: list[datetime], zone: str) -> None:
    found = local_to_utc(np.array([wall(c) for c in clocks], dtype=np.int64), zone)
    for i, clock in enumerate(clocks):
        first, second = (clock.replace(tzinfo=ZoneInfo(zone), fold=fold) for fold in (0, 1))
        back = first.astimezone(UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        if back != clock:
            assert found.status[i] == NONEXISTENT
        elif first.utcoffset() != second.utcoffset():
            assert found.status[i] == AMBIGUOUS
            assert (found.utc[i], found.later[i]) == (instant(first), instant(second))
        else:
            assert found.status[i] == OK
            assert found.utc[i] == instant(first)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(*YEAR_2013), max_size=8), st.sampled_from(ZONES))
def test_instants_and_clocks_agree(times: list[int], zone: str) -> None:
    local = utc_to_local(np.array(times, dtype=np.int64), zone)
    for time, clock in zip(times, local, strict=True):
        there = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)).astimezone(ZoneInfo(zone))
        assert clock == wall(there.replace(tzinfo=None))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(*YEAR_2013), min_size=1, max_size=20),
    st.sampled_from(ZONES),
    st.sampled_from(["daily", "weekly", "monthly"]),
)
def test_each_time_lies_in_the_window_of_its_partition(times: list[int], zone: str, cadence: str) -> None:
    calendar = scheme(zone=zone, cadence=cadence, start={"weekly": "2012-12-24"}.get(cadence, "2012-12-01"))
    assigned = calendar.assign(np.array(times, dtype=np.int64))
    for time, code in zip(times, assigned.code, strict=True):
        start, end = calendar.window(assigned.keys[code])
        assert start <= time < end


def test_the_year_of_departures_has_366_days() -> None:
    calendar = scheme(end="2014-01-02")
    keys = calendar.keys()
    assert (len(keys), keys[0], keys[-1]) == (366, "2013-01-01", "2014-01-01")
    assert calendar.assign(np.array([calendar.window("2014-01-01")[1]])).code.tolist() == [-1]


def test_days_of_a_clock_change_are_23_and_25_hours_long() -> None:
    calendar = scheme(zone="America/New_York")
    hours = [
        (calendar.window(d)[1] - calendar.window(d)[0]) / 3.6e9 for d in ("2013-03-10", "2013-11-03", "2013-06-01")
    ]
    assert hours == [23, 25, 24]


def test_months_of_a_zone_and_of_utc_differ() -> None:
    times = np.array(
        [instant(datetime(2024, 12, 31, 23, 30, tzinfo=UTC)), instant(datetime(2025, 1, 31, 22, 30, tzinfo=UTC))]
    )
    local = scheme(cadence="monthly", zone="Europe/Budapest", start="2024-01-01").assign(times)
    assert [local.keys[c] for c in local.code] == ["2025-01-01", "2025-01-01"]
    plain = scheme(cadence="monthly", start="2024-01-01").assign(times)
    assert [plain.keys[c] for c in plain.code] == ["2024-12-01", "2025-01-01"]


def test_keys_are_those_of_dagster() -> None:
    import dagster as dg

    until = datetime(2013, 4, 1, tzinfo=UTC)
    theirs = {
        "daily": dg.DailyPartitionsDefinition("2013-01-01"),
        "weekly": dg.WeeklyPartitionsDefinition("2013-01-07", day_offset=1),
        "monthly": dg.MonthlyPartitionsDefinition("2013-01-01"),
        "hourly": dg.HourlyPartitionsDefinition("2013-01-01-00:00"),
    }
    for cadence, definition in theirs.items():
        start = "2013-01-07" if cadence == "weekly" else "2013-01-01"
        ours = scheme(cadence=cadence, start=start).keys(now=instant(until))
        assert list(ours) == list(definition.get_partition_keys(current_time=until))


def test_unfinished_and_future_partitions_name_the_time_at_which_they_close() -> None:
    calendar = scheme()
    now = instant(datetime(2013, 5, 5, 12, tzinfo=UTC))
    calendar.require_closed(["2013-05-04"], lambda: now)
    for key, closes in (("2013-05-05", "2013-05-06T00:00:00Z"), ("2113-05-05", "2113-05-06T00:00:00Z")):
        with pytest.raises(PartitionNotClosed, match=closes):
            calendar.require_closed([key], lambda: now)


@pytest.mark.parametrize("key", ["2012-12-31", "2014-01-02", "2013-1-1", "20130101", "2013-02-30", "", "latest"])
def test_unknown_keys_are_refused(key: str) -> None:
    with pytest.raises(UnknownPartition):
        scheme(end="2014-01-02").window(key)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cadence": "weekly", "start": "2013-01-01"}, "2012-12-31 or 2013-01-07"),
        ({"cadence": "monthly", "start": "2013-01-05"}, "2013-01-01 or 2013-02-01"),
        ({"end": "2013-01-01"}, "not after"),
        ({"start": "01/02/2013"}, "no date"),
    ],
)
def test_a_calendar_off_its_boundaries_is_refused(fields: dict[str, str], told: str) -> None:
    with pytest.raises(CalendarError, match=told):
        scheme(**fields)


def test_a_calendar_is_never_built_over_eight_thousand_years() -> None:
    endless = scheme(start="0001-01-01", end="9999-12-31")
    with pytest.raises(TooManyPartitions, match="20000"):
        endless.keys()
    spread = np.arange(25_000, dtype=np.int64) * 86_400_000_000
    with pytest.raises(TooManyPartitions, match="25000"):
        endless.assign(spread)
    far = np.array([wall(datetime(1, 1, 1)), wall(datetime(9999, 12, 30))])  # noqa: DTZ001
    assert endless.assign(far).keys == ("0001-01-01", "9999-12-30")


def test_the_last_instant_can_be_written() -> None:
    assert iso(scheme(start="9999-12-31").window("9999-12-31")[1]) == "9999-12-31T24:00:00Z"
