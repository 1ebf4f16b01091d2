"""Time is a parameter: every part takes a clock that answers int64 microseconds since 1970-01-01T00:00Z."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]


def system_clock() -> int:
    """Return the machine's time in microseconds UTC."""
    return time.time_ns() // 1_000


def utc_text(moment: int) -> str:
    """Return a time in microseconds as ISO 8601 text with the offset of UTC, as documents carry it."""
    return datetime.fromtimestamp(moment / 1_000_000, UTC).isoformat()
