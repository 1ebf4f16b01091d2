"""Time is a parameter: every part takes a clock that answers int64 microseconds since 1970-01-01T00:00Z."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]


def system_clock() -> int:
    """Return the machine's time in microseconds UTC."""
    return time.time_ns() // 1_000
