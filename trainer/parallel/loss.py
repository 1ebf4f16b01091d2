"""Cross-entropy of tokens, also where each tensor rank holds the logits of its part of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def token_loss_sum(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum of the cross-entropy in nats over the tokens, in float32; the same on every tensor rank.

    Args:
        logits: [..., vocabulary]; plain, or a DTensor divided evenly along the vocabulary.
        targets: [...] int64.
        weight: [...] of each token, 0 for filling; None counts all.

    Raises:
        TypeError: a DTensor that is divided otherwise.
    """
    losses = _plain(logits, targets) if type(logits) is Tensor else _divided(logits, targets)
    return losses.sum() if weight is None else (losses * weight).sum()


def _plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none").view_as(targets)


def _divided(logits: Tensor, targets: Tensor) -> Tensor:
    # Costs two seconds; only ranks that have imported it already come here.
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(logits, DTensor) or logits.placements != (Shard(logits.ndim - 1),):
        raise TypeError(f"logits are a {type(logits).__name__}, expected a Tensor or a DTensor divided by its last dim")
    part = logits.to_local().float()
    group = logits.device_mesh.get_group()
    losses: Any = _DividedCrossEntropy.apply(part, targets, dist.get_rank(group) * part.shape[-1], group)
    return losses


class _DividedCrossEntropy(torch.autograd.Function):
    """Two all-reduces: the largest logit; the sums of exponentials with the target's logit (as Megatron-LM does)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, targets: Tensor, start: int, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        top = part.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = part - top[..., None]
        own = (targets >= start) & (targets < start + part.shape[-1])
        index = torch.where(own, targets - start, 0)[..., None]
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), shifted.gather(-1, index)[..., 0] * own])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials / sums[0][..., None], index, own)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        share, index, own = ctx.saved_tensors
        grad = grads[0][..., None]
        return (share * grad).scatter_add(-1, index, -grad * own[..., None]), None, None, None
