"""A state in pieces: what each rank holds of each tensor, with its place, so that any layout loads what another saved.

A piece says the whole tensor's `shape` and which part of it this is: a `box` [[start, stop], ...] with one range per
dimension, or a range `flat` [start, stop] of the flattened tensor. It holds `weight` and, after the first step,
AdamW's `exp_avg` and `exp_avg_sq` of that part and `step`. Of equal replicas only the first saves. Pieces of one tensor
may hold different keys: some ranks its weights, others its moments. Their tensors may be those of a file that is read
as far as it is needed (`Stored`), so that no rank reads, or has, more than its own part of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
from torch import Tensor

from trainer.image import DTYPES

FORMAT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")

Box: TypeAlias = Sequence[Sequence[int]]
"""[start, stop] of each dimension."""


class Stored:
    """A tensor of a safetensors file, of which only what is asked for is read, when it is.

    Args:
        file: The open file.
        key: The tensor's name in it.
    """

    def __init__(self, file: Any, key: str) -> None:  # noqa: ANN401 - safetensors declares no type
        self._file = file
        self._key = key
        slices = file.get_slice(key)
        self.dtype = DTYPES[slices.get_dtype()]
        self.shape = tuple(slices.get_shape())

    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """All of it."""
        return self._file.get_tensor(self._key)

    def part(self, places: tuple[slice, ...]) -> Tensor:
        """The part at `places`, one slice per dimension."""
        return self._file.get_slice(self._key)[places] if places else self.read()


class StoredTensors(Mapping[str, Stored]):
    """The tensors of the safetensors file at `path`, by name; the file is mapped into memory, not read."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safetensors.safe_open(path, framework="pt")

    def __getitem__(self, key: str) -> Stored:
        return Stored(self._file, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


Piece: TypeAlias = dict[str, Any]
Pieces: TypeAlias = dict[str, list[Piece]]


class ParameterMismatch(RuntimeError):
    """A saved state and the model at hand disagree about a parameter; the message names it. All ranks find the same."""


class PiecesMissing(RuntimeError):
    """The pieces of a state do not make up a tensor; the message names it."""


def whole_box(shape: Sequence[int]) -> list[list[int]]:
    """The box of a whole tensor."""
    return [[0, size] for size in shape]


def box_piece(shape: Sequence[int], box: Box, **tensors: Tensor | float) -> Piece:
    """A piece of a tensor of `shape`: `tensors` are `weight`, the moments, `step`."""
    return {"shape": list(shape), "box": [list(edge) for edge in box], **tensors}


def flat_piece(shape: Sequence[int], start: int, stop: int, **tensors: Tensor | float) -> Piece:
    """A piece of the flattened tensor of `shape`, from element `start` to before `stop`."""
    return {"shape": list(shape), "flat": [start, stop], **tensors}


def collect(states: Sequence[Mapping[str, Any]]) -> Pieces:
    """The pieces of all ranks by name, from the states in rank order; states of format 1 are read too."""
    found: Pieces = {}
    for state in states:
        pieces = state["pieces"] if "pieces" in state else _pieces_of_format_1(state, states[0]["model"])
        for name, parts in pieces.items():
            found.setdefault(name, []).extend(parts)
    return found


def read(pieces: Sequence[Piece], name: str, key: str, box: Box) -> Tensor | None:
    """The part `box` of what `key` says of tensor `name`, put together; None when no piece holds `key`.

    Raises:
        PiecesMissing: the pieces do not make up the part.
    """
    holding = [piece for piece in pieces if key in piece]
    if not holding:
        return None
    sizes = [stop - start for start, stop in box]
    part = torch.empty(sizes, dtype=holding[0][key].dtype)
    filled = sum(_copy(piece, key, box, part) for piece in holding)
    if filled != part.numel():
        raise PiecesMissing(f"parameter {name!r}: its pieces hold {filled} elements of {key}, of {part.numel()}")
    return part


def step_of(pieces: Sequence[Piece]) -> float | None:
    """How many steps AdamW has done on a parameter; None before the first."""
    return next((float(piece["step"]) for piece in pieces if "step" in piece), None)


def whole_weights(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The model's tensors by name, whole.

    Raises:
        PiecesMissing: the pieces of one do not make it up.
    """
    weights: dict[str, Tensor] = {}
    for name, parts in collect(states).items():
        whole = read(parts, name, "weight", whole_box(parts[0]["shape"]))
        if whole is None:
            raise PiecesMissing(f"parameter {name!r}: no piece holds its weights")
        weights[name] = whole
    return weights


def _copy(piece: Piece, key: str, box: Box, part: Tensor) -> int:
    """Copy into `part` what it shares with `piece`; the number of elements."""
    if "flat" in piece:
        return _copy_flat(piece, key, box, part)
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece["box"], box, strict=True)]
    if any(start >= stop for start, stop in common):
        return 0
    source = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(common, piece["box"], strict=True))
    target = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(common, box, strict=True))
    part[target] = _part_of(piece[key], [stop - start for start, stop in piece["box"]], source)
    return math.prod(stop - start for start, stop in common)


def _part_of(held: Tensor | Stored, shape: Sequence[int], places: tuple[slice, ...]) -> Tensor:
    if isinstance(held, Stored):
        if list(held.shape) == list(shape):
            return held.part(places)
        held = held.read()
    # Moments of a whole parameter may have been saved flat.
    return held.view(shape)[places]


def _copy_flat(piece: Piece, key: str, box: Box, part: Tensor) -> int:
    start, stop = piece["flat"]
    held = piece[key].read() if isinstance(piece[key], Stored) else piece[key]
    if not len(part.shape):
        part.copy_(held.view(()))
        return 1
    places = torch.arange(box[0][0], box[0][1])
    for size, (low, high) in zip(piece["shape"][1:], box[1:], strict=True):
        places = places[..., None] * size + torch.arange(low, high)
    inside = (places >= start) & (places < stop)
    part[inside] = held[places[inside] - start]
    return int(inside.sum())


def _pieces_of_format_1(state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Pieces:
    """Format 1 had whole weights on rank 0, and the moments as one flat range of each parameter and rank."""
    found: Pieces = {name: [box_piece(w.shape, whole_box(w.shape), weight=w)] for name, w in state["model"].items()}
    for name, adam in state["optimizer"].items():
        stop = adam["start"] + adam["exp_avg"].numel()
        kept = {key: adam[key] for key in MOMENTS}
        piece = flat_piece(weights[name].shape, adam["start"], stop, step=float(adam["step"]), **kept)
        found.setdefault(name, []).append(piece)
    return found
