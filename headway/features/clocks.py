"""When a source row happened and when it could be known, as declared."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.declaration import Delay, FeatureViewSpec, SourceSpec, Static, duration_us
from headway.features.kernel.encode import Arrow, to_microseconds


@dataclass(frozen=True)
class Times:
    """Event and available time per row, int64 microseconds UTC; `admitted` is False where either is missing."""

    event: NDArray[np.int64]
    available: NDArray[np.int64]
    admitted: NDArray[np.bool_]

    @property
    def known(self) -> NDArray[np.int64]:
        """The instant from which a row may be seen: the later of both times."""
        return np.maximum(self.event, self.available)


@dataclass(frozen=True)
class Clock:
    """Where the two times of a source come from. Equal clocks see the same rows."""

    event: str | int
    available: str | int
    delay: int = 0

    def times(self, rows: pa.Table) -> Times:
        """Times of every row. Raises the kernel's error for naive or out-of-range timestamps."""
        event, has_event = _column(rows, self.event)
        available, has_available = _column(rows, self.available)
        return Times(event, available + self.delay, has_event & has_available)

    @property
    def is_static(self) -> bool:
        """Whether every row is known from one declared instant on."""
        return isinstance(self.event, int)


def clock_of(source: SourceSpec, view: FeatureViewSpec | None = None) -> Clock:
    """The declared clock of a source, or of a view that looks at another pair of its columns."""
    if view is not None and view.event_time is not None and view.available_time is not None:
        return Clock(view.event_time, view.available_time)
    event = _instant(source.event_time) if isinstance(source.event_time, Static) else source.event_time
    if isinstance(source.available_time, Delay):
        return Clock(event, event, duration_us(source.available_time.delay))
    if isinstance(source.available_time, Static):
        return Clock(event, _instant(source.available_time))
    return Clock(event, source.available_time)


def instants(column: Arrow, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Microseconds UTC of a timestamp column, and where it has a value."""
    found = to_microseconds(column, name)
    return found.microseconds, ~found.null


def _instant(static: Static) -> int:
    """Microseconds of a declared ISO 8601 instant; `datetime` arithmetic keeps it exact."""
    moment = datetime.fromisoformat(static.static_from)
    if moment.tzinfo is None:
        raise ValueError(f"static_from {static.static_from!r} has no offset; write one, for instance a trailing Z")
    epoch = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    whole = moment - epoch
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds


def _column(rows: pa.Table, column: str | int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if isinstance(column, int):
        return np.full(rows.num_rows, column, dtype=np.int64), np.ones(rows.num_rows, dtype=np.bool_)
    return instants(rows.column(column), column)
