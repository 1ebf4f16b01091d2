"""Point-in-time kernel: what was known about a key at an instant, and aggregates over what was known.

Everything works on encoded numpy columns (`encode` makes them from Arrow). Compiled loops are imported on first use.
"""

from headway.features.kernel.as_of import latest
from headway.features.kernel.types import (
    NULL_KEY,
    UNKNOWN_KEY,
    AmbiguousTie,
    Boundary,
    DistinctTooCostly,
    KernelInputError,
    Latest,
    NonFiniteValue,
    NullPolicy,
    Observations,
    Reason,
    Rows,
    Window,
    collapse,
)
from headway.features.kernel.windows import AGGREGATES, window

__all__ = [
    "AGGREGATES",
    "NULL_KEY",
    "UNKNOWN_KEY",
    "AmbiguousTie",
    "Boundary",
    "DistinctTooCostly",
    "KernelInputError",
    "Latest",
    "NonFiniteValue",
    "NullPolicy",
    "Observations",
    "Reason",
    "Rows",
    "Window",
    "collapse",
    "latest",
    "window",
]
