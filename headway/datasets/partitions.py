"""The calendar of a source: keys, their exact instants, and which partition a time belongs to.

Keys are written as Dagster writes them: daily and monthly `2013-01-01` (a month by its first day), weekly by its
Monday, hourly `2013-01-01-00:00`. A calendar is arithmetic: it is never built as a list beyond `MAX_PARTITIONS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.datasets.zones import (
    DAY_US,
    END_OF_TIME_US,
    HOUR_US,
    UnknownZone,
    iso,
    local_to_utc,
    utc_to_local,
    zone_of,
)
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.declaration import PartitionSpec

MAX_PARTITIONS = 20_000

_EPOCH_DAY = date(1970, 1, 1)


class UnknownPartition(HeadwayError):
    """A key that the declared calendar does not have."""


class PartitionNotClosed(HeadwayError):
    """A partition whose time is not over yet; it would be read incomplete."""


class TooManyPartitions(HeadwayError):
    """A calendar or a file that spans more partitions than can be handled."""


class CalendarError(HeadwayError):
    """A partition declaration that contradicts its cadence; `field` is the path of the field below `partition`."""

    def __init__(self, field: tuple[str | int, ...], problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.field = field


@dataclass(frozen=True, slots=True)
class Assigned:
    """Partition of each time: `code` indexes `keys`, -1 is outside the calendar."""

    keys: tuple[str, ...]
    code: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PartitionScheme:
    """One source's calendar. `start` and `end` are local dates; `end` is the first day that is no partition."""

    cadence: str
    zone: str
    start: date
    end: date | None
    expected_empty: frozenset[str]

    @classmethod
    def from_spec(cls, spec: "PartitionSpec") -> "PartitionScheme":
        """The calendar of a declaration.

        Raises:
            CalendarError: the zone is not known, a date is malformed or off its cadence's boundary, the range is
                empty, or a partition that is expected to be empty is not in the calendar.
        """
        _require_zone(spec.zone)
        start = _date("start", spec.start)
        end = None if spec.end is None else _date("end", spec.end)
        scheme = cls(spec.cadence, spec.zone, start, end, frozenset(spec.expected_empty))
        for field, day in (("start", start), ("end", end)):
            if day is not None and scheme._floor(day) != day:
                raise CalendarError(
                    (field,),
                    f"partition.{field} {day} is no boundary of {spec.cadence} partitions",
                    f"write {scheme._floor(day)} or {scheme._next(scheme._floor(day))}",
                )
        if end is not None and end <= start:
            raise CalendarError(
                ("end",), f"partition.end {end} is not after partition.start {start}", "give a later end"
            )
        for index, key in enumerate(spec.expected_empty):
            try:
                scheme.window(key)
            except UnknownPartition as error:
                raise CalendarError(("expected_empty", index), error.message, error.remedy) from error
        return scheme

    def window(self, key: str) -> tuple[int, int]:
        """The exact instants [start, end) of a partition, int64 microseconds UTC.

        Raises:
            UnknownPartition: the calendar has no such key.
        """
        day, hour = self._parse(key)
        if day < self.start or (self.end is not None and day >= self.end):
            last = f"the calendar ends before {self.end}" if self.end else "it is open-ended"
            raise UnknownPartition(f"partition {key!r} is outside the calendar", f"it starts at {self.start}; {last}")
        if self.cadence == "hourly":
            start = _day_number(day) * DAY_US + hour * HOUR_US
            return start, start + HOUR_US
        return self._midnight(day), self._end_of(day)

    def keys(self, now: int | None = None) -> tuple[str, ...]:
        """All keys in order, up to `end`, or those closed at `now` when there is no end.

        Raises:
            TooManyPartitions: more than `MAX_PARTITIONS`; nothing is built.
        """
        if self.end is None and now is None:
            raise CalendarError(
                ("end",), "the calendar is open-ended", "give the time up to which partitions are wanted"
            )
        until = self.end if self.end is not None else _EPOCH_DAY + timedelta(days=(now or 0) // DAY_US + 1)
        per_day = {"hourly": 24.0, "daily": 1.0, "weekly": 1 / 7, "monthly": 1 / 31}[self.cadence]
        if (until - self.start).days * per_day > MAX_PARTITIONS:
            raise TooManyPartitions(
                f"{self.cadence} partitions from {self.start} to {until} are more than {MAX_PARTITIONS}",
                "declare a shorter calendar or a longer cadence",
            )
        found: list[str] = []
        day = self.start
        while day < until:
            found += self._keys_of(day)
            day = self._next(day)
        return tuple(k for k in found if now is None or self.end is not None or self.window(k)[1] <= now)

    def assign(self, times: NDArray[np.int64]) -> Assigned:
        """The partition of each time (int64 microseconds UTC).

        Raises:
            TooManyPartitions: the times spread over more than `MAX_PARTITIONS` partitions.
        """
        local = utc_to_local(times, self.zone)
        units = self._units(local)
        found, code = np.unique(units, return_inverse=True)
        if len(found) > MAX_PARTITIONS:
            raise TooManyPartitions(
                f"the rows spread over {len(found)} {self.cadence} partitions, from {iso(int(times.min()))} to "
                f"{iso(int(times.max()))}; the limit is {MAX_PARTITIONS}",
                "check the partition column for open dates, or declare a longer cadence",
            )
        keys: list[str] = []
        position = np.full(len(found), -1, dtype=np.int32)
        for index, unit in enumerate(found):
            day, hour = self._day_of_unit(int(unit))
            if day is not None and day >= self.start and (self.end is None or day < self.end):
                position[index] = len(keys)
                keys.append(self._key(day, hour))
        return Assigned(tuple(keys), position[code].astype(np.int32))

    def keys_between(self, first: int, last: int) -> tuple[str, ...]:
        """Keys of all partitions that hold an instant of [first, last], int64 microseconds UTC, inside the calendar."""
        local = utc_to_local(np.array([first, last], dtype=np.int64), self.zone)
        day = max(self._floor(_EPOCH_DAY + timedelta(days=int(local[0] // DAY_US))), self.start)
        end = _EPOCH_DAY + timedelta(days=int(local[1] // DAY_US))
        found: list[str] = []
        while day <= end and (self.end is None or day < self.end):
            found += self._keys_of(day)
            day = self._next(day)
        return tuple(k for k in found if self.window(k)[1] > first and self.window(k)[0] <= last)

    def require_closed(self, keys: Sequence[str], clock: Callable[[], int]) -> None:
        """Refuse partitions whose time is not over.

        Raises:
            PartitionNotClosed: names the partition and the time at which it closes.
        """
        now = clock()
        for key in keys:
            closes = self.window(key)[1]
            if closes > now:
                raise PartitionNotClosed(
                    f"partition {key!r} is not over: it closes at {iso(closes)}", "ask for it again after that time"
                )

    def _parse(self, key: str) -> tuple[date, int]:
        text, hour = key, 0
        if self.cadence == "hourly":
            if len(key) != 16 or key[10] != "-" or key[13:] != ":00" or not key[11:13].isdigit() or key[11:13] > "23":
                raise UnknownPartition(f"partition {key!r} is no hour", "write it as 2013-01-01-00:00")
            text, hour = key[:10], int(key[11:13])
        try:
            day = date.fromisoformat(text)
        except ValueError as error:
            raise UnknownPartition(f"partition {key!r} is no date", "write it as 2013-01-01") from error
        if text != day.isoformat() or self._floor(day) != day:
            raise UnknownPartition(f"partition {key!r} is no {self.cadence} partition", f"write {self._floor(day)}")
        return day, hour

    def _floor(self, day: date) -> date:
        if self.cadence == "weekly":
            return day - timedelta(days=day.weekday())
        return day.replace(day=1) if self.cadence == "monthly" else day

    def _next(self, day: date) -> date:
        if self.cadence == "monthly":
            return (day.replace(day=1) + timedelta(days=32)).replace(day=1)
        return day + timedelta(days=7 if self.cadence == "weekly" else 1)

    def _end_of(self, day: date) -> int:
        try:
            return self._midnight(self._next(day))
        except OverflowError:
            return END_OF_TIME_US

    def _midnight(self, day: date) -> int:
        """First instant of a local day. A midnight that a clock change skips or repeats is its first instant."""
        local = np.array([_day_number(day) * DAY_US], dtype=np.int64)
        return int(local_to_utc(local, self.zone).utc[0])

    def _keys_of(self, day: date) -> list[str]:
        return [self._key(day, hour) for hour in range(24)] if self.cadence == "hourly" else [self._key(day, 0)]

    def _key(self, day: date, hour: int) -> str:
        return f"{day.isoformat()}-{hour:02d}:00" if self.cadence == "hourly" else day.isoformat()

    def _units(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Hours, or days floored to the start of their week or month, since 1970."""
        if self.cadence == "hourly":
            return np.floor_divide(local, HOUR_US)
        days = np.floor_divide(local, DAY_US)
        if self.cadence == "weekly":
            return days - (days + 3) % 7  # 1970-01-01 was a Thursday
        if self.cadence == "monthly":
            return days.astype("datetime64[D]").astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
        return days

    def _day_of_unit(self, unit: int) -> tuple[date | None, int]:
        days, hour = divmod(unit, 24) if self.cadence == "hourly" else (unit, 0)
        try:
            return _EPOCH_DAY + timedelta(days=days), hour
        except OverflowError:
            return None, hour


def _day_number(day: date) -> int:
    return (day - _EPOCH_DAY).days


def _require_zone(zone: str) -> None:
    try:
        zone_of(zone)
    except UnknownZone as error:
        raise CalendarError(("zone",), error.message, error.remedy) from error


def _date(field: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise CalendarError((field,), f"partition.{field} {text!r} is no date", "write it as 2013-01-01") from error
