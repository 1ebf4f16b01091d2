"""The one way the kernel compiles a function. Imported by the compiled modules only, since it brings numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Indices = NDArray[np.int32]
Codes = NDArray[np.int8]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

# Options that numba takes and its type hints do not know.
INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "cache": True, "nogil": True}

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile on first call, keep the machine code on disk, and release the interpreter's lock while it runs."""
    return cast("F", njit(cache=True, nogil=True)(function))


def inner(function: F) -> F:
    """Like `compiled`, for functions that only compiled ones call: without the entry from Python, built much faster."""
    return cast("F", njit(**INNER)(function))
