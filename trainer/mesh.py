"""Where each rank stands in a layout, and the groups of ranks that work together."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.process_group import Group
from trainer.spec import LayoutSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pp", "dp", "shard", "ep", "sp", "tp")
"""The degrees from outer to inner: neighbours in rank differ in the last one that is above 1."""

DATA = ("dp", "shard", "ep")
"""Ranks that differ in these have rows of their own."""

REPLICAS = ("dp", "shard", "ep", "sp")
"""Ranks that differ in these have tokens of their own: gradients are summed over them."""


class Mesh:
    """The ranks of a layout as a grid of `DIMENSIONS`.

    Process groups are made when they are first asked for; all ranks have to ask for the same ones in the same order.
    """

    def __init__(self, layout: LayoutSpec, group: Group) -> None:
        self.layout = layout
        self.rank = group.rank
        self._groups: dict[tuple[str, ...], DeviceMesh] = {}

    def degree(self, *names: str) -> int:
        """Ranks that differ in the dimensions `names` only."""
        return math.prod(getattr(self.layout, name) for name in names)

    def coordinate(self, name: str) -> int:
        """This rank's place along dimension `name`, from 0."""
        return self._place(self.rank, name)

    @property
    def data_ranks(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.layout.data_ranks

    @property
    def data_index(self) -> int:
        """Which part of a global batch this rank takes."""
        return self._data_index(self.rank)

    @property
    def data_firsts(self) -> list[int]:
        """The first rank of each part of a global batch."""
        firsts: dict[int, int] = {}
        for rank in range(self.layout.world_size):
            firsts.setdefault(self._data_index(rank), rank)
        return [firsts[index] for index in range(self.data_ranks)]

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The dimensions above 1 as torch's mesh; a plain `dp` where there is none."""
        # Costs two seconds; a plain replica does without.
        from torch.distributed.device_mesh import init_device_mesh

        names = self._present(DIMENSIONS) or ("dp",)
        return init_device_mesh("cpu", tuple(self.degree(n) for n in names), mesh_dim_names=names)

    def submesh(self, *names: str) -> DeviceMesh:
        """One dimension over the ranks that differ in `names` only, of which one is above 1 or FSDP2's shard."""
        present = self._present(names)
        if present not in self._groups:
            mesh = self.device_mesh[present]
            self._groups[present] = mesh if len(present) == 1 else mesh._flatten("_".join(present))
        return self._groups[present]

    def process_group(self, *names: str) -> ProcessGroup | None:
        """The ranks that differ from this one in the dimensions `names` only; None when there is no other."""
        size = self.degree(*names)
        if size == 1:
            return None
        if size == self.layout.world_size:
            return dist.group.WORLD
        return self.submesh(*names).get_group()

    def _present(self, names: tuple[str, ...]) -> tuple[str, ...]:
        # FSDP2 divides over its dimension, be it one rank long.
        always = "shard" if self.layout.engine == "fsdp2" else ""
        return tuple(name for name in DIMENSIONS if name in names and (self.degree(name) > 1 or name == always))

    def _place(self, rank: int, name: str) -> int:
        inner = DIMENSIONS[DIMENSIONS.index(name) + 1 :]
        return rank // self.degree(*inner) % self.degree(name)

    def _data_index(self, rank: int) -> int:
        index = 0
        for name in DATA:
            index = index * self.degree(name) + self._place(rank, name)
        return index
