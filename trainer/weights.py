"""Reads a safetensors file that somebody else may have made: checks its header before any byte becomes a tensor.

The library refuses lengths, offsets and overlaps that do not fit. It accepts a key that stands twice and numbers that
are not finite, so those are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

MAX_HEADER_BYTES = 1 << 20

_LENGTH_BYTES = 8


class WeightsRefused(ValueError):
    """Weights that must not be loaded; the message names the tensor or the place."""


def read_weights(content: bytes, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, when they are exactly the `expected` ones in name, dtype and shape.

    Args:
        content: The whole file.
        expected: The state of the module that the weights are for.

    Raises:
        WeightsRefused: no safetensors file, a header that is too large or holds a key twice, another set of tensors, or
            a number that is not finite.
    """
    _check_header(content)
    try:
        state = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise WeightsRefused(f"no safetensors file: {error}") from error
    if set(state) != set(expected):
        lost, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
        raise WeightsRefused(f"tensors {lost[:10]} are missing, {extra[:10]} belong to no part of the model")
    for name, tensor in state.items():
        wanted = expected[name]
        if tensor.dtype != wanted.dtype or tensor.shape != wanted.shape:
            raise WeightsRefused(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the model has {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefused(f"tensor {name!r} holds numbers that are not finite")
    return state


def _check_header(content: bytes) -> None:
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < _LENGTH_BYTES or size > len(content) - _LENGTH_BYTES:
        raise WeightsRefused(f"no safetensors file: {len(content)} bytes cannot hold a header of {size}")
    if size > MAX_HEADER_BYTES:
        raise WeightsRefused(f"a header of {size} bytes; {MAX_HEADER_BYTES} are the most")
    try:
        json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + size], object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsRefused):
            raise
        raise WeightsRefused(f"no safetensors file: its header is no JSON ({error})") from error


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise WeightsRefused(f"keys {twice[:10]} stand twice in the header")
    return cast("dict[str, object]", document)
