"""Sequence parallelism after DeepSpeed-Ulysses: each rank holds a part of every sequence, and attends with some heads.

Four all-to-alls per attention (queries, keys, values; the result) turn "part of the positions, all heads" into "all
positions, part of the heads" and back (Jacobs and others: DeepSpeed Ulysses, 2023). All other layers work on each
position alone. Every rank ends with the gradient of its own positions: the engine sums them over the data ranks *and*
the sequence ranks.
"""

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.parallel.exchange import exchange
from trainer.parallel.plan import ParallelPlan, PlanMismatch, matching


class Ulysses:
    """Attention over whole sequences, for ranks that hold a part of them each: the `exchange` of an attention module.

    Args:
        group: The sequence ranks, in the order of the parts.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._degree = dist.get_world_size(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """`attend` to the whole sequence.

        Args:
            q: Queries [batch, part of the positions, heads, width].
            k: Keys [batch, part of the positions, kv heads, width].
            v: Values, as `k`.
            attend: Causal attention: result [batch, positions, heads, width] of three such tensors.

        Returns:
            Tensor: [batch, part of the positions, heads, width].

        Raises:
            PlanMismatch: the heads do not divide by the sequence ranks.
        """
        whole = attend(self._to_heads(q), self._to_heads(k), self._to_heads(v))
        return self._to_positions(whole)

    def _to_heads(self, x: Tensor) -> Tensor:
        batch, part, heads, width = x.shape
        if heads % self._degree:
            raise PlanMismatch(f"{heads} heads cannot be divided over {self._degree} sequence ranks")
        cut = x.view(batch, part, self._degree, heads // self._degree, width).permute(2, 0, 1, 3, 4)
        return self._swap(cut).permute(1, 0, 2, 3, 4).flatten(1, 2)

    def _to_positions(self, x: Tensor) -> Tensor:
        batch, positions, heads, width = x.shape
        cut = x.view(batch, self._degree, positions // self._degree, heads, width).permute(1, 0, 2, 3, 4)
        return self._swap(cut).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _swap(self, x: Tensor) -> Tensor:
        ones = [1] * self._degree
        return exchange(x, ones, ones, self._group)


def apply_sequence(module: nn.Module, plan: ParallelPlan, group: ProcessGroup) -> None:
    """Let the attentions of `module` work on this rank's part of every sequence.

    The model then takes tokens [batch, positions / ranks]: part r holds the positions from `r * positions / ranks` on.

    Raises:
        PlanMismatch: the plan names no attention.
    """
    if not plan.sequence:
        raise PlanMismatch(f"the plan of this {type(module).__name__} names no attention: its sequences stay whole")
    for _, attention in matching(module, plan.sequence):
        changed = cast("Any", attention)
        changed.exchange = Ulysses(group)
        changed.part = dist.get_rank(group)
