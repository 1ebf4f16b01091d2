"""Which part of a whole tensor a rank holds of a DTensor, and which of equal replicas saves it."""

import math
from typing import Any, cast

from torch import Tensor

from trainer.mesh import DIMENSIONS, Mesh


def saved_box(tensor: Tensor, mesh: Mesh | None) -> list[list[int]] | None:
    """The part of the whole that this rank holds of `tensor`, one [start, stop] per dimension.

    With `mesh` None for ranks that do not save it: those that hold nothing, or a replica that is not the first.
    """
    divided: set[str] = {"pp"}
    box = [[0, size] for size in tensor.shape]
    if hasattr(tensor, "to_local"):
        _cut(tensor, box, divided)
    if mesh is not None:
        if math.prod(stop - start for start, stop in box) == 0:
            return None
        if any(mesh.coordinate(name) for name in DIMENSIONS if name not in divided):
            return None
    return box


def _cut(tensor: Tensor, box: list[list[int]], divided: set[str]) -> None:
    # Only a process that has DTensors has imported them.
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    at = mesh.get_coordinate()
    assert at is not None
    dims = list(zip(names, mesh.shape, at, tensor.placements, strict=True))
    # FSDP2 divides what tensor ranks have divided before it: its strided placements come last, though it stands first.
    for strided in (False, True):
        for name, size, index, placement in dims:
            if placement.is_replicate() or hasattr(placement, "split_factor") is not strided:
                continue
            dim: int = cast("Any", placement).dim
            start, stop = box[dim]
            each = -(-(stop - start) // size)
            box[dim] = [min(start + index * each, stop), min(start + (index + 1) * each, stop)]
            divided.update(_dimensions(name))


def _dimensions(name: str) -> list[str]:
    """The dimensions that a mesh dimension stands for: its own, or those it was flattened from."""
    return [part for part in name.split("_") if part in DIMENSIONS]
