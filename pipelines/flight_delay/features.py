"""Feature functions of `flight_delay`: pure, one value per label row, from columns of that row alone.

Local times are New York's: every flight leaves from there, and people plan by that clock.
"""

import math

import pyarrow as pa

from headway.datasets.arrow import compute as pc

NEW_YORK = "America/New_York"


def departure_minute(row: pa.Table) -> pa.ChunkedArray:
    """Local minute of the day of the scheduled departure, 0 to 1439."""
    local = _local(row.column("scheduled_departure"))
    return pc.cast(pc.add(pc.multiply(pc.hour(local), 60), pc.minute(local)), pa.int64())


def departure_minute_sin(row: pa.Table) -> pa.ChunkedArray:
    """Sine of the time of day as an angle, so that midnight is not a cliff."""
    return pc.sin(_angle(row))


def departure_minute_cos(row: pa.Table) -> pa.ChunkedArray:
    """Cosine of the time of day as an angle."""
    return pc.cos(_angle(row))


def day_of_week(row: pa.Table) -> pa.ChunkedArray:
    """Local weekday of the scheduled departure, Monday 1 to Sunday 7."""
    return pc.day_of_week(_local(row.column("scheduled_departure")), count_from_zero=False)


def month(row: pa.Table) -> pa.ChunkedArray:
    """Local month of the scheduled departure, 1 to 12."""
    return pc.month(_local(row.column("scheduled_departure")))


def scheduled_minutes(row: pa.Table) -> pa.ChunkedArray:
    """Scheduled gate-to-gate time in minutes."""
    return _minutes(row.column("scheduled_departure"), row.column("scheduled_arrival"))


def plane_age(row: pa.Table) -> pa.ChunkedArray:
    """Years between the aircraft's year of manufacture and the local year of the scheduled departure."""
    return pc.subtract(pc.year(_local(row.column("scheduled_departure"))), row.column("plane__year"))


def minutes_since_departure(row: pa.Table) -> pa.ChunkedArray:
    """Minutes from the aircraft's previous known New York departure to the observation."""
    return _minutes(row.column("aircraft_departure__departed_at"), row.column("observed_at"))


def _local(moments: pa.ChunkedArray) -> pa.ChunkedArray:
    return moments.cast(pa.timestamp("us", tz=NEW_YORK))


def _angle(row: pa.Table) -> pa.ChunkedArray:
    return pc.multiply(pc.cast(departure_minute(row), pa.float64()), 2 * math.pi / 1440)


def _minutes(first: pa.ChunkedArray, last: pa.ChunkedArray) -> pa.ChunkedArray:
    span = pc.subtract(last.cast(pa.int64()), first.cast(pa.int64()))
    return pc.divide(pc.cast(span, pa.float64()), 60_000_000.0)
