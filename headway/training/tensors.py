"""Tensors of safetensors files, compared by name and bytes without torch.

The format: eight bytes with the length of a JSON header (little-endian), the header (name to dtype, shape and
data_offsets), then the data; https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


class TensorsUnreadable(HeadwayError):
    """Bytes that are no safetensors file."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it stands in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same; `size` is the largest difference of an element, infinite where it has none."""

    name: str
    size: float


def read_tensors(data: bytes) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
        TensorsUnreadable: it is none.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        start = 8 + length
        return {
            name: StoredTensor(
                told["dtype"],
                tuple(told["shape"]),
                data[start + told["data_offsets"][0] : start + told["data_offsets"][1]],
            )
            for name, told in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorsUnreadable(
            f"these {len(data)} bytes are no safetensors file: {error}", "the file was changed after it was written"
        ) from error


def differences(mine: Mapping[str, StoredTensor], theirs: Mapping[str, StoredTensor]) -> Iterator[Difference]:
    """Every tensor that differs, in order of names; one that stands on one side only differs infinitely."""
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if a != b:
            yield Difference(name, math.inf if a is None or b is None else _distance(a, b))


def _distance(a: StoredTensor, b: StoredTensor) -> float:
    import numpy as np

    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return math.inf
    left, right = _floats(a), _floats(b)
    if left is None or right is None:
        return math.inf
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(left - right), initial=0.0))
    return largest if math.isfinite(largest) else math.inf


def _floats(tensor: StoredTensor) -> NDArray[np.float64] | None:
    import numpy as np

    if tensor.dtype == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if tensor.dtype in _FLOATS:
        return np.frombuffer(tensor.data, _FLOATS[tensor.dtype]).astype(np.float64)
    return None
