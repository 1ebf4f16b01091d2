"""A safetensors file built in memory that is kept: tensors are copied straight to the places they have in the file.

Format (huggingface/safetensors): 8 bytes little-endian length of the header, the header as JSON (`dtype`, `shape`,
`data_offsets` of each tensor, padded with blanks to a multiple of 8), then the tensors' bytes without gaps. The larger
types come first, so that every tensor stands where its type can be addressed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.blobs import Json

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8


class UnknownDtype(TypeError):
    """A tensor of a type that checkpoints do not hold; the message names it."""


class Form(NamedTuple):
    """What a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor's bytes are in the file: from `start` to before `stop`."""

    start: int
    stop: int


def layout_file(forms: Mapping[str, Form]) -> tuple[bytes, dict[str, Place]]:
    """The first bytes of the file that holds tensors of these `forms`, up to the first tensor, and all their places.

    Raises:
        UnknownDtype: a type that safetensors or this program does not know.
    """
    header: dict[str, Json] = {}
    offset, offsets = 0, dict[str, int]()
    for name in sorted(forms, key=lambda n: (-forms[n].dtype.itemsize, n)):
        dtype, shape = forms[name]
        if dtype not in _NAMES:
            raise UnknownDtype(f"tensor {name!r} is {dtype}; checkpoints hold {sorted(DTYPES)}")
        offsets[name], end = offset, offset + forms[name].size
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    base = _LENGTH_BYTES + len(text)
    places = {name: Place(base + at, base + at + forms[name].size) for name, at in offsets.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, places


class Image:
    """One file in memory. The memory is kept from save to save as long as it is large enough."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._targets: dict[str, Tensor] = {}

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room for `tensors`, in the place of what was there.

        Raises:
            UnknownDtype: as `layout_file`.
        """
        forms = {name: Form(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        head, places = layout_file(forms)
        self._size = max((place.stop for place in places.values()), default=len(head))
        if self._buffer.numel() < self._size:
            self._buffer = torch.empty(self._size, dtype=torch.uint8)
        self._buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._targets = {
            name: self._buffer[place.start : place.stop].view(forms[name].dtype).view(forms[name].shape)
            for name, place in places.items()
        }

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Copy the tensors of these `names` to their places."""
        for name in names:
            self._targets[name].copy_(tensors[name])

    @property
    def data(self) -> memoryview:
        """The file's bytes; they change with the next `prepare`."""
        return self._buffer.numpy().data[: self._size]
