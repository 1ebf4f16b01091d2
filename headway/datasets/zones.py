"""Local wall-clock times to UTC instants and back, exactly and for whole columns.

Times are int64 microseconds since 1970-01-01; a local time is written as if its clock were UTC. Zones come from
`zoneinfo`. Days without a clock change share one offset; only values on other days are looked at one by one.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
NO_LOCAL_TIME = np.iinfo(np.int64).max
OK, NONEXISTENT, AMBIGUOUS, OUT_OF_RANGE = 0, 1, 2, 3
START_OF_TIME_US = -62_135_596_800_000_000  # 0001-01-01T00:00Z
END_OF_TIME_US = 253_402_300_800_000_000  # 9999-12-31T24:00Z, where the calendar ends
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a wall clock, deliberately without a zone
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_PROBES_PER_DAY = 8  # no zone has changed its offset and changed it back within three hours


class UnknownZone(HeadwayError):
    """A declared time zone is not in the IANA database."""


@dataclass(frozen=True, slots=True)
class Instants:
    """What local times mean.

    `utc` holds the instant (the earlier one when ambiguous, the reading with the offset before the gap when
    nonexistent), `later` the second reading of ambiguous times, `status` one of OK, NONEXISTENT, AMBIGUOUS and
    OUT_OF_RANGE.
    """

    utc: NDArray[np.int64]
    later: NDArray[np.int64]
    status: NDArray[np.uint8]


def zone_of(name: str) -> ZoneInfo:
    """The zone with an IANA name.

    Raises:
        UnknownZone: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UnknownZone(f"time zone {name!r} is not known", "write an IANA name such as America/New_York") from error


def local_to_utc(local: NDArray[np.int64], zone: str) -> Instants:
    """Instants of wall-clock times in a zone."""
    utc, later = local.copy(), local.copy()
    status = np.zeros(len(local), dtype=np.uint8)
    offsets, regular = _offsets(local, zone, margin=1)
    utc[regular] -= offsets[regular]
    later[regular] = utc[regular]
    slow, places = np.unique(local[~regular], return_inverse=True)
    if len(slow):
        found = np.array([_one_local(int(value), zone_of(zone)) for value in slow], dtype=np.int64)[places]
        utc[~regular], later[~regular], status[~regular] = found.T
    return Instants(utc, later, status)


def utc_to_local(utc: NDArray[np.int64], zone: str) -> NDArray[np.int64]:
    """Wall-clock times of instants in a zone; `NO_LOCAL_TIME` where the clock would show a year outside 1-9999."""
    if zone == "UTC":
        return utc
    offsets, regular = _offsets(utc, zone, margin=0)
    local = utc + offsets
    slow, places = np.unique(utc[~regular], return_inverse=True)
    if len(slow):
        local[~regular] = np.array([_local_or_none(int(v), zone_of(zone)) for v in slow], dtype=np.int64)[places]
    return local


def iso(instant: int) -> str:
    """An instant as ISO 8601 text in UTC, for messages."""
    if instant == END_OF_TIME_US:
        return "9999-12-31T24:00:00Z"
    text = (_EPOCH_UTC + timedelta(microseconds=instant)).isoformat(timespec="auto")
    return text.replace("+00:00", "Z")


def wall(value: datetime) -> int:
    """Microseconds of a datetime without zone, as a wall clock."""
    return (value - _EPOCH) // timedelta(microseconds=1)


def instant(value: datetime) -> int:
    """Microseconds UTC of a datetime with zone."""
    return (value - _EPOCH_UTC) // timedelta(microseconds=1)


def _offsets(times: NDArray[np.int64], zone: str, margin: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Offset per time, and where it is certain because no clock changes within `margin` days."""
    days, places = np.unique(np.floor_divide(times, DAY_US), return_inverse=True)
    found = [_shared_offset(zone, int(day), margin) for day in days]
    offsets = np.array([0 if o is None else o for o in found], dtype=np.int64)
    certain = np.array([o is not None for o in found], dtype=np.bool_)
    return offsets[places], certain[places]


def _shared_offset(zone: str, day: int, margin: int) -> int | None:
    around = {_offset_of_day(zone, d) for d in range(day - margin, day + margin + 1)}
    return around.pop() if len(around) == 1 else None


@lru_cache(maxsize=200_000)
def _offset_of_day(zone: str, day: int) -> int | None:
    """The offset in microseconds that holds through a whole UTC day, or None when there is a change or no such day."""
    rules = zone_of(zone)
    step = DAY_US // _PROBES_PER_DAY
    try:
        found = {_offset_at(day * DAY_US + i * step, rules) for i in range(_PROBES_PER_DAY + 1)}
    except OverflowError:
        return None
    return found.pop() if len(found) == 1 else None


def _offset_at(utc: int, zone: tzinfo) -> int:
    return _local_of(utc, zone) - utc


def _local_of(utc: int, zone: tzinfo) -> int:
    return wall((_EPOCH_UTC + timedelta(microseconds=utc)).astimezone(zone).replace(tzinfo=None))


def _local_or_none(utc: int, zone: tzinfo) -> int:
    try:
        return _local_of(utc, zone)
    except OverflowError:
        return NO_LOCAL_TIME


def _one_local(local: int, zone: ZoneInfo) -> tuple[int, int, int]:
    try:
        clock = _EPOCH + timedelta(microseconds=local)
        readings = [instant(clock.replace(tzinfo=zone, fold=fold)) for fold in (0, 1)]
        valid = [_local_of(reading, zone) == local for reading in readings]
    except OverflowError:
        return local, local, OUT_OF_RANGE
    if not any(valid):
        return readings[0], readings[0], NONEXISTENT
    if readings[0] != readings[1]:
        return readings[0], readings[1], AMBIGUOUS
    return readings[0], readings[0], OK
