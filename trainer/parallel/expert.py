"""Expert parallelism without dropped tokens: each rank holds some experts, and tokens travel to them and back.

The expert ranks have different rows, like data ranks. What a rank's experts learn comes from the tokens of all expert
ranks, through the backward pass of the exchange: their gradients are sums already where all other gradients are not.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.parallel.exchange import exchange
from trainer.parallel.plan import ParallelPlan, PlanMismatch, matching


class TokenExchange:
    """Tokens to the ranks that hold their experts, results back: the `exchange` of an experts module.

    Args:
        group: The expert ranks; rank r holds the r-th part of the experts.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._degree = dist.get_world_size(group)

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """Results [n, width] of `rows` [n, width], which stand in the order of their experts.

        Args:
            rows: Tokens of this rank, those of expert 0 first.
            counts: How many belong to each of all experts, int64.
            compute: Results of rows in the order of this rank's experts, given how many belong to each.
        """
        mine = counts.view(self._degree, -1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine.contiguous(), group=self._group)
        sent, received = mine.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = exchange(rows, sent, received, self._group)
        # They arrive by sender, and by expert within each sender.
        expert = torch.arange(mine.shape[1], device=rows.device).repeat(self._degree)
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        results = compute(arrived[order], theirs.sum(0).tolist())
        return exchange(results[order.argsort()], received, sent, self._group)


def apply_experts(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts: their parameters become DTensors divided along the first dimension.

    Every rank holds the same weights before. `mesh` has the one dimension of the expert ranks.

    Raises:
        PlanMismatch: the plan names no experts, or they do not divide by the ranks.
    """
    if not plan.experts:
        raise PlanMismatch(f"the plan of this {type(module).__name__} names no experts")
    for name, experts in matching(module, plan.experts):
        for key, p in list(experts.named_parameters(recurse=False)):
            if p.shape[0] % mesh.size():
                raise PlanMismatch(f"{p.shape[0]} experts of {name} cannot be divided over {mesh.size()} ranks")
            part = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(key, nn.Parameter(part, requires_grad=p.requires_grad))
        cast("Any", experts).exchange = TokenExchange(mesh.get_group())


def expert_parameters(module: nn.Module, plan: ParallelPlan) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of the experts: what data-parallel wrappers leave alone."""
    return [(f"{m}.{n}", p) for m, experts in matching(module, plan.experts) for n, p in experts.named_parameters()]


@torch.no_grad()
def reduce_expert_gradients(module: nn.Module, plan: ParallelPlan, divisor: int, replicas: ProcessGroup | None) -> None:
    """Make the experts' gradients those of the global batch, in place, once the backward passes of a step are done.

    Args:
        module: The model.
        plan: Its plan.
        divisor: What the loss of each rank was multiplied with so that *averages* over the ranks come out right: the
            number of data ranks (times the sequence ranks); 1 where it was not multiplied. Divided by the shard ranks
            where FSDP2 has averaged over them already.
        replicas: The ranks that hold the same experts and have other tokens (without the shard ranks under FSDP2); None
            where there is no other.
    """
    grads = [local(p.grad) for _, p in expert_parameters(module, plan) if p.grad is not None]
    if not grads:
        return
    torch._foreach_div_(grads, divisor)  # pyright: ignore[reportPrivateImportUsage]
    if replicas is not None:
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat, group=replicas)
        torch._foreach_copy_(grads, list(_unflatten_dense_tensors(flat, grads)))  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def balance_experts(module: nn.Module, plan: ParallelPlan, group: ProcessGroup | None) -> None:
    """Move every router's bias by the tokens of the step, over all ranks with tokens of their own (`group`).

    Call it once per optimizer step. No-op for a model without routers.
    """
    routers: list[Any] = [router for _, router in matching(module, plan.routers)]
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    if group is not None:
        dist.all_reduce(loads, group=group)
    for router, load in zip(routers, loads, strict=True):
        router.balance(load)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, itself; to be called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
