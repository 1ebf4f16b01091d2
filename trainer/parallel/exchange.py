"""All-to-all of rows between the ranks of a group, through which gradients flow back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the first `sent[0]` of `rows` [n, ...] to the first rank of `group`, and so on; every rank calls it.

    Args:
        rows: What to send, in the order of the receivers.
        sent: Rows for each rank of the group; their sum is n.
        received: Rows that come from each.
        group: The ranks.

    Returns:
        Tensor: [sum(received), ...], in the order of the senders.
    """
    return _Exchange.apply(rows, list(sent), list(received), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.way_back = (received, sent, group)
        return _send(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        return _send(grads[0], *ctx.way_back), None, None, None


def _send(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
