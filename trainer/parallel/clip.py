"""One gradient norm over all parameters of a model, however each of them is spread, and clipping by it.

torch's own `clip_grad_norm_` refuses plain parameters beside DTensors, and DTensors of two meshes; and it knows nothing
of pipeline stages.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from trainer.parallel.expert import local

_EPS = 1e-6


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], stages: int = 1, group: ProcessGroup | None = None) -> float:
    """Euclidean norm of the gradients of the whole model, the same on every rank; one all-reduce of one number.

    Each rank adds up what it holds, divided by the number of ranks that hold the same elements: a plain parameter is
    held by every rank of its stage, a DTensor by the ranks that differ in dimensions that do not divide it. Gradients
    are final: what had to be summed over replicas is.

    Args:
        parameters: Those that this rank holds (of all its stages).
        stages: Ranks in the pipeline dimension.
        group: All ranks of the layout; None for the default group, or for no group at all.
    """
    shared: dict[int, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            shared.setdefault(_parts(p.grad), []).append(_final(p.grad))
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    total = torch.zeros((), dtype=torch.float64)
    for parts, grads in shared.items():
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))  # pyright: ignore[reportPrivateImportUsage]
        total += norms.double().square().sum().cpu() * (parts * stages) / ranks
    if ranks > 1:
        dist.all_reduce(total, group=group)
    return math.sqrt(total.item())


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale the gradients in place by `limit / (norm + 1e-6)` where that is below one (torch's rule).

    Args:
        parameters: Those that this rank holds.
        norm: What `grad_norm` said.
        limit: The largest norm that is wanted.
    """
    factor = limit / (norm + _EPS)
    if factor < 1:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)  # pyright: ignore[reportPrivateImportUsage]


def _parts(grad: Tensor) -> int:
    if not isinstance(grad, DTensor):
        return 1
    # Whatever is not replicated divides; FSDP2 over tensor ranks has a strided shard, which `is_shard` does not know.
    dims = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, placement in dims if not placement.is_replicate())


def _final(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        raise ValueError(f"a gradient is still to be summed: {grad.placements}")
    return local(grad)
