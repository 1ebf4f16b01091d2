"""Checks and normal forms of the kernel's input arrays, and the worker threads that run its compiled compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.features.kernel.types import KernelInputError, Observations, Rows

Entry = TypeVar("Entry", np.int64, np.float64, np.bool_)

ROW_LIMIT = 2**31 - 1
NO_INTS = np.empty(0, np.int64)
NO_FLAGS = np.empty(0, np.bool_)


@dataclass(frozen=True)
class Columns:
    """Rows as the compiled loops take them: contiguous; sequence, deleted, row_id are empty where they say nothing."""

    key: NDArray[np.int64]
    event_time: NDArray[np.int64]
    available_time: NDArray[np.int64]
    sequence: NDArray[np.int64]
    deleted: NDArray[np.bool_]
    row_id: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key)


def workers() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def each_worker(count: int, task: Callable[[int], object]) -> None:
    """Run task(0) .. task(count - 1) on threads of their own; the first error is raised."""
    if count == 1:
        task(0)
        return
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(task, range(count)))


def share(cost: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Share groups of the given costs out to `count` workers; the worker of each group."""
    from headway.features.kernel import compiled

    return compiled.hand_out(cost, np.argsort(cost, kind="stable"), count)


def checked_rows(rows: Rows, groups: int) -> Columns:
    """Check the rows' arrays against one length and the number of groups."""
    n = len(rows)
    key = integers("rows.key", rows.key, n)
    check_keys("rows.key", key, groups)
    sequence = NO_INTS if is_constant(rows.sequence) else integers("rows.sequence", rows.sequence, n)
    check_length("rows.sequence", rows.sequence, n)
    row_id = NO_INTS if rows.row_id is None else integers("rows.row_id", rows.row_id, n)
    return Columns(
        key=key,
        event_time=integers("rows.event_time", rows.event_time, n),
        available_time=integers("rows.available_time", rows.available_time, n),
        sequence=sequence,
        deleted=flags("rows.deleted", rows.deleted, n),
        row_id=row_id,
    )


def checked_observations(observations: Observations, groups: int) -> Observations:
    """Check the observations' arrays against one length and the number of groups."""
    m = len(observations)
    key = integers("observations.key", observations.key, m)
    check_keys("observations.key", key, groups)
    return Observations(
        key=key,
        time=integers("observations.time", observations.time, m),
        valid=flags("observations.valid", observations.valid, m, empty_when=True),
    )


def integers(name: str, array: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """A contiguous int64 column of length n."""
    check_length(name, array, n)
    if array.dtype != np.int64:
        raise KernelInputError(f"{name} has dtype {array.dtype}, needed is int64")
    return lent(array)


def flags(name: str, array: NDArray[np.bool_], n: int, *, empty_when: bool = False) -> NDArray[np.bool_]:
    """A contiguous bool column of length n, or an empty one when every entry equals `empty_when`."""
    check_length(name, array, n)
    if array.dtype != np.bool_:
        raise KernelInputError(f"{name} has dtype {array.dtype}, needed is bool")
    if is_constant(array):
        says_nothing = n == 0 or bool(array[0]) is empty_when
    else:
        says_nothing = bool(array.all()) if empty_when else not array.any()
    return NO_FLAGS if says_nothing else lent(array)


class Lent:
    """Memory of a read-only array under numpy's array interface, declared writable."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def lent(array: NDArray[Entry]) -> NDArray[Entry]:
    """The array as one contiguous block that claims to be writable, without a copy where it is contiguous.

    Arrow hands out read-only memory, which to the compiler is another type and costs a second compilation. The
    compiled loops write to no input.
    """
    block: NDArray[Entry] = np.ascontiguousarray(array)
    return block if block.flags.writeable else np.asarray(Lent(block))


def is_constant(array: NDArray[np.int64] | NDArray[np.bool_]) -> bool:
    """True for a column that repeats one stored entry."""
    return len(array) == 0 or array.strides == (0,)


def check_length(name: str, array: NDArray[np.int64] | NDArray[np.bool_] | NDArray[np.float64], n: int) -> None:
    """Refuse arrays that are not one column of length n."""
    if array.shape != (n,):
        raise KernelInputError(f"{name} has shape {array.shape}, needed is ({n},)")
    if n > ROW_LIMIT:
        raise KernelInputError(f"{name} has {n:,} entries, the limit is {ROW_LIMIT:,}", "split the partition")


def check_keys(name: str, key: NDArray[np.int64], groups: int) -> None:
    """Refuse group codes outside -2 .. groups - 1."""
    if len(key) and (int(key.max()) >= groups or int(key.min()) < -2):
        raise KernelInputError(f"{name} spans {int(key.min())}..{int(key.max())}, allowed is -2..{groups - 1}")
