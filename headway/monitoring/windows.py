"""Weeks: the windows in which labels, quality and drift are reported.

A week starts on Monday 00:00 UTC and is named by that day, whatever zone the data live in: one calendar for all
pipelines of a tenant. Times are int64 microseconds UTC.
"""

from datetime import UTC, date, datetime, timedelta

from headway.datasets.zones import DAY_US
from headway.errors import HeadwayError

WEEK_US = 7 * DAY_US
_EPOCH = date(1970, 1, 1)


class UnknownWeek(HeadwayError):
    """A key that names no week."""


def week_key(moment: int) -> str:
    """The week that holds a moment, as the ISO date of its Monday."""
    day = _EPOCH + timedelta(days=moment // DAY_US)
    return (day - timedelta(days=day.weekday())).isoformat()


def week_bounds(key: str) -> tuple[int, int]:
    """Start (inclusive) and end (exclusive) of a week.

    Raises:
        UnknownWeek: the key is no ISO date of a Monday.
    """
    try:
        day = date.fromisoformat(key)
    except ValueError as error:
        raise UnknownWeek(f"{key!r} is no date: {error}", "write the week's Monday, such as 2013-09-02") from error
    if day.weekday() != 0 or day.isoformat() != key:
        monday = day - timedelta(days=day.weekday())
        raise UnknownWeek(f"{key!r} is no Monday", f"the week that holds it is {monday.isoformat()}")
    start = (day - _EPOCH).days * DAY_US
    return start, start + WEEK_US


def weeks(start: int, end: int) -> tuple[str, ...]:
    """Keys of all weeks that hold a moment of [start, end)."""
    if end <= start:
        return ()
    first, _ = week_bounds(week_key(start))
    return tuple(week_key(at) for at in range(first, end, WEEK_US))


def day_of(moment: int) -> str:
    """The UTC day of a moment as an ISO date."""
    return datetime.fromtimestamp(moment / 1_000_000, UTC).date().isoformat()
