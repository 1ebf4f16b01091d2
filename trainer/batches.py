"""Which rows every step learns from: a pure function of (rows, batch, seed, epoch), and of nothing that happened.

The order of an epoch depends on (seed, epoch) alone. An epoch takes every row exactly once; its last batch, when rows
are left over, is filled up to the full size with rows of weight 0, and the loss of a batch is the mean over its real
rows. So any row count above 0 works on any number of ranks, and all ranks take the same number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.loss import token_loss_sum

_MASK = 2**64 - 1


class BadOutput(RuntimeError):
    """What the model gave does not fit the batch; the message says both shapes."""


class NotDivisible(ValueError):
    """A batch that sequence ranks cannot divide; the message says why."""


class Batch(Protocol):
    """One micro-batch of one data rank: what goes into the model, and what its output is held against."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The positional inputs of the module; the first dimension of each is that of the rows."""
        ...

    @property
    def items(self) -> int:
        """Real items (rows, tokens): those that the loss counts, filling left out."""
        ...

    def loss_sum(self, output: Tensor) -> Tensor:
        """Sum of the losses of the real items, float32, given the module's output.

        Raises:
            BadOutput: the output has not the shape that the batch asks for.
        """
        ...

    def sequence_part(self, rank: int, degree: int) -> Batch:
        """The `rank`-th of `degree` equal parts along the sequence.

        Raises:
            NotDivisible: there is no sequence, or it does not divide.
        """
        ...


@dataclass(frozen=True)
class RowBatch:
    """Rows of a table: `numeric` [b, N] float32, `categorical` [b, K] int64, `target` [b] float32, 0 or 1.

    `weight` [b] is 1 for real rows and 0 for filling; None means that all rows are real.
    """

    numeric: Tensor
    categorical: Tensor
    target: Tensor
    weight: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """`numeric` and `categorical`."""
        return self.numeric, self.categorical

    @property
    def items(self) -> int:
        """Real rows."""
        return len(self.target) if self.weight is None else int(self.weight.sum())

    def loss_sum(self, output: Tensor) -> Tensor:
        """Binary cross-entropy in nats of the logits `output` [b]; see `Batch`."""
        if output.shape != self.target.shape:
            raise BadOutput(f"the model gave logits {tuple(output.shape)}, expected {tuple(self.target.shape)}")
        return F.binary_cross_entropy_with_logits(output.float(), self.target, weight=self.weight, reduction="sum")

    def sequence_part(self, rank: int, degree: int) -> RowBatch:
        """Rows have no sequence; see `Batch`."""
        raise NotDivisible(f"rows have no sequence that part {rank} of {degree} could be taken of")


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of tokens: `given` [b, T] int64 goes in, `target` [b, T] int64 is the next token at each position.

    `weight` [b, T] float32 is 0 where a token does not count; None means that all do.
    """

    given: Tensor
    target: Tensor
    weight: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor, weight: Tensor | None = None) -> TokenBatch:
        """The batch of `tokens` [b, T+1] int64; `weight` [b, T] is that of the tokens from the second on."""
        return cls(tokens[:, :-1], tokens[:, 1:], weight)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """`given`."""
        return (self.given,)

    @property
    def items(self) -> int:
        """Tokens that count."""
        return self.target.numel() if self.weight is None else int(torch.count_nonzero(self.weight))

    def loss_sum(self, output: Tensor) -> Tensor:
        """Cross-entropy in nats of the logits `output` [b, T, vocabulary]; see `Batch`."""
        if output.shape[:-1] != self.target.shape:
            raise BadOutput(f"the model gave logits {tuple(output.shape)} for tokens {tuple(self.target.shape)}")
        return token_loss_sum(output, self.target, self.weight)

    def sequence_part(self, rank: int, degree: int) -> TokenBatch:
        """Positions `rank * T / degree` on; see `Batch`."""
        positions = self.given.shape[1]
        if positions % degree:
            raise NotDivisible(f"{positions} positions do not divide by {degree} sequence ranks")
        part = slice(rank * positions // degree, (rank + 1) * positions // degree)
        weight = None if self.weight is None else self.weight[:, part]
        return TokenBatch(self.given[:, part], self.target[:, part], weight)


@dataclass(frozen=True)
class BatchPlan:
    """How `rows` rows are cut into steps of `global_size`, and each step into ranks and micro-batches.

    `global_size` divides by `data_ranks * accumulation` (the run spec sees to it).
    """

    rows: int
    global_size: int
    data_ranks: int
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
        """Row positions and weights of the micro-batches of data rank `rank` in `step`; `order` is its epoch's."""
        start = self.place(step)[1]
        share = self.global_size // self.data_ranks
        size = share // self.accumulation
        first = start + rank * share
        return [self._cut(order, first + m * size, size) for m in range(self.accumulation)]

    def _cut(self, order: Tensor, first: int, size: int) -> tuple[Tensor, Tensor | None]:
        if first + size <= self.rows:
            return order[first : first + size], None
        places = torch.arange(first, first + size)
        return order[places % self.rows], (places < self.rows).to(torch.float32)
