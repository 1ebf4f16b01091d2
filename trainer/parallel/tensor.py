"""Tensor parallelism by DTensor: linear and embedding layers divided over the ranks as the plan says."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.parallel.plan import ParallelPlan, PlanMismatch, Style, matching


def apply_tensor(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Divide the layers of `module`, or of a stage cut out of it, over the one dimension of `mesh`.

    Every rank holds the same weights before; nothing is sent. Tied layers stay tied. With `vocab` on the output layer
    the model gives logits as a DTensor divided along the vocabulary; see `trainer.parallel.loss`. FSDP2 comes after.

    Raises:
        PlanMismatch: the plan names no layer, or one does not divide by the ranks.
    """
    if not plan.tensor:
        raise PlanMismatch(f"the plan of this {type(module).__name__} names no layer for tensor ranks")
    found: list[tuple[str, nn.Module, Style]] = []
    for pattern, style in plan.tensor.items():
        found.extend((name, layer, style) for name, layer in matching(module, pattern))
    first_of: dict[int, nn.Module] = {}
    tied = [(m, first) for _, m, _ in found if (first := first_of.setdefault(id(m.weight), m)) is not m]
    for name, layer, style in found:
        parallelize_module(layer, mesh, _style(name, layer, style, mesh.size()), src_data_rank=None)
    for layer, first in tied:
        layer.register_parameter("weight", first.get_parameter("weight"))


def _style(name: str, layer: nn.Module, style: Style, ranks: int) -> ParallelStyle:
    weight = layer.get_parameter("weight")
    size = weight.shape[1 if style == "row" else 0]
    if size % ranks:
        raise PlanMismatch(f"{name}: {size} ({style}) cannot be divided over {ranks} tensor ranks")
    if style == "column":
        return ColwiseParallel()
    if style == "row":
        return RowwiseParallel()
    if isinstance(layer, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)
