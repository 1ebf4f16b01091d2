"""What the loop learns from, whatever it is: samples that can be taken by their places, and judged without learning."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batches import Batch, RowBatch
from trainer.engines.base import Engine
from trainer.process_group import Group

_JUDGED_AT_ONCE = 4096

T = TypeVar("T")


class Examples(Protocol):
    """The samples of one split."""

    @property
    def unit(self) -> str:
        """What a sample is made of: `rows` or `tokens`."""
        ...

    @property
    def items(self) -> int:
        """Items (rows, tokens) that the loss counts in one sample."""
        ...

    def __len__(self) -> int:
        """Samples."""
        ...

    def take(self, places: Tensor, weight: Tensor | None) -> Batch:
        """The samples at `places` [b] int64, in that order; `weight` [b] is 0 for filling, None means all are real."""
        ...

    def judge(self, engine: Engine, group: Group, batch_size: int, beat: Callable[[], None]) -> dict[str, Any]:
        """What `engine` makes of all samples: `valid_loss`, and more; the same bits on every rank.

        All ranks of `group` call it together; `batch_size` is the samples that a rank learns from at once, `beat` is
        called between batches.
        """
        ...


class RowTable(Protocol):
    """Encoded rows; see `trainer.data.Split`."""

    @property
    def numeric(self) -> NDArray[np.float32]:
        """[rows, N]."""
        ...

    @property
    def categorical(self) -> NDArray[np.int64]:
        """[rows, K]."""
        ...

    @property
    def target(self) -> NDArray[np.float32]:
        """[rows]."""
        ...


class RowExamples:
    """Rows of a table, each a sample of one item; see `Examples`."""

    unit = "rows"
    items = 1

    def __init__(self, rows: RowTable) -> None:
        self._numeric = torch.from_numpy(rows.numeric)
        self._categorical = torch.from_numpy(rows.categorical)
        self._target = torch.from_numpy(rows.target)

    def __len__(self) -> int:
        return len(self._target)

    def take(self, places: Tensor, weight: Tensor | None) -> RowBatch:
        """See `Examples`."""
        numeric, categorical = self._numeric.index_select(0, places), self._categorical.index_select(0, places)
        return RowBatch(numeric, categorical, self._target[places], weight)

    def judge(self, engine: Engine, group: Group, batch_size: int, beat: Callable[[], None]) -> dict[str, Any]:
        """`valid_loss` in nats per row and `valid_auc`, None with one class only; see `Examples`.

        Every data rank computes the logits of its part; the sums go over the logits in row order. The batches are
        large, whatever `batch_size` is.
        """
        places = _share(len(self), engine)
        parts: list[Tensor] = []
        for chunk in places.split(_JUDGED_AT_ONCE):
            logits = engine.evaluate(self.take(chunk % len(self), None)).logits
            assert logits is not None, "no layout divides the logits of rows"
            parts.append(logits)
            beat()
        gathered = group.gather(torch.cat(parts)).view(group.world_size, len(places))
        logits = gathered[engine.mesh.data_firsts].flatten()[: len(self)].double()
        target = self._target
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, target.double(), reduction="none")
        return {"valid_loss": losses.mean().item(), "valid_auc": auc(logits.numpy(), target.numpy())}


def judge_sums(
    examples: Examples, engine: Engine, group: Group, batch_size: int, beat: Callable[[], None]
) -> tuple[float, int]:
    """Sum of the losses of all real items in nats, and how many they are; as `Examples.judge`, for any layout.

    Every data rank judges its part in batches of `batch_size`; what is behind the last sample has weight 0. The sums
    of the batches are added in the order of the samples.
    """
    places = _share(len(examples), engine)
    sums: list[list[float]] = []
    for chunk in places.split(batch_size):
        real = chunk < len(examples)
        weight = None if bool(real.all()) else real.to(torch.float32)
        judged = engine.evaluate(examples.take(chunk % len(examples), weight))
        sums.append([judged.loss_sum, judged.items])
        beat()
    mine = torch.tensor(sums, dtype=torch.float64)
    gathered = group.gather(mine.flatten()).view(group.world_size, len(sums), 2)[engine.mesh.data_firsts]
    return math.fsum(gathered[..., 0].flatten().tolist()), int(gathered[..., 1].sum())


def _share(samples: int, engine: Engine) -> Tensor:
    """The places that this data rank judges, as many on every rank; those from `samples` on are filling."""
    share = -(-samples // engine.mesh.data_ranks)
    return torch.arange(engine.mesh.data_index * share, (engine.mesh.data_index + 1) * share)


def auc(scores: NDArray[np.float64], target: NDArray[np.float32]) -> float | None:
    """Area under the ROC curve by rank sums, ties counted half; None when `target` has one class only."""
    positives = int(target.sum())
    negatives = len(target) - positives
    if positives == 0 or negatives == 0:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][target == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


class Ahead(Generic[T]):
    """Makes what the coming steps need in a thread of its own, a few steps ahead of whoever takes it.

    Args:
        make: What a step needs; called for one step after another.
        first: The first step.
        end: The step behind the last one.
        most: So many steps at most are made and not yet taken.
    """

    def __init__(self, make: Callable[[int], T], first: int, end: int, most: int = 2) -> None:
        self._make = make
        self._most = most
        self._made: deque[tuple[int, T]] = deque()
        self._error: BaseException | None = None
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(range(first, end),), name="batches", daemon=True)
        self._thread.start()

    def take(self, step: int) -> T:
        """What `step` needs; steps are taken in their order.

        Raises:
            Exception: what making it raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._error is not None)
            if not self._made:
                assert self._error is not None
                raise self._error
            made, value = self._made.popleft()
            self._changed.notify_all()
        assert made == step, f"step {step} is asked for, {made} comes next"
        return value

    def close(self) -> None:
        """Make nothing more; returns when the thread has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, steps: range) -> None:
        for step in steps:
            with self._changed:
                self._changed.wait_for(lambda: self._over or len(self._made) < self._most)
                if self._over:
                    return
            try:
                value = self._make(step)
            except BaseException as error:  # noqa: BLE001 - whoever takes the step raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._made.append((step, value))
                self._changed.notify_all()
