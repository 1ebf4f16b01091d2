"""Which rows every step learns from: a pure function of (rows, batch, seed, epoch), and of nothing that happened.

The order of an epoch depends on (seed, epoch) alone. An epoch takes every row exactly once; its last batch, when rows
are left over, is filled up to the full size with rows of weight 0, and the loss of a batch is the mean over its real
rows. So any row count above 0 works on any number of ranks, and all ranks take the same number of steps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch: `numeric` [b, N] float32, `categorical` [b, K] int64, `target` [b] float32.

    `weight` [b] is 1 for real rows and 0 for filling; None means that all rows are real.
    """

    numeric: Tensor
    categorical: Tensor
    target: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class BatchPlan:
    """How `rows` rows are cut into steps of `global_size`, and each step into ranks and micro-batches.

    `global_size` divides by `world_size * accumulation` (the run spec sees to it).
    """

    rows: int
    global_size: int
    world_size: int
    accumulation: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps that it takes to see every row once."""
        return -(-self.rows // self.global_size)

    def order(self, epoch: int) -> Tensor:
        """The rows' positions [rows] int64 in the order of `epoch` (from 0)."""
        key = np.array([self.seed & _MASK, epoch], dtype=np.uint64)
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).permutation(self.rows))

    def place(self, step: int) -> tuple[int, int]:
        """The epoch (from 0) of `step` (from 0), and the first position in that epoch's order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch, index * self.global_size

    def samples(self, steps: int) -> int:
        """Real rows seen after `steps` steps: the position of the training in its data."""
        epochs, index = divmod(steps, self.steps_per_epoch)
        return epochs * self.rows + index * self.global_size

    def real_rows(self, step: int) -> int:
        """Rows of `step` over all ranks, filling not counted."""
        return min(self.global_size, self.rows - self.place(step)[1])

    def micro_batches(self, order: Tensor, step: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
        """Row positions and weights of each micro-batch of `rank` in `step`; `order` is that of the step's epoch."""
        start = self.place(step)[1]
        share = self.global_size // self.world_size
        size = share // self.accumulation
        first = start + rank * share
        return [self._cut(order, first + m * size, size) for m in range(self.accumulation)]

    def _cut(self, order: Tensor, first: int, size: int) -> tuple[Tensor, Tensor | None]:
        if first + size <= self.rows:
            return order[first : first + size], None
        places = torch.arange(first, first + size)
        return order[places % self.rows], (places < self.rows).to(torch.float32)
