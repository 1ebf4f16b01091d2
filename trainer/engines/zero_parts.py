"""What each rank holds of a model under DeepSpeed's stages, read from DeepSpeed's own tables, with its places.

Below stage 3 the parameters of an optimizer group stand one after the other in a flat buffer that is cut into equal
parts, one per rank. Stage 3 cuts each parameter by itself; the parts of a group stand one after the other. Either way
a rank's part is one flat fp32 tensor per group, on which AdamW works; bf16 weights are a copy of it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn


class Part(NamedTuple):
    """Elements of one parameter that this rank's AdamW works on.

    They are those from `start` on of the flattened parameter (of what this tensor rank has of it), and the elements
    `taken` of the flattened `partition`, by which the optimizer's state is keyed.
    """

    name: str
    partition: Tensor
    start: int
    taken: slice

    @property
    def stop(self) -> int:
        """The parameter's element after the last of these."""
        return self.start + self.taken.stop - self.taken.start

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor that is laid out as the partition is."""
        return tensor.detach().view(-1)[self.taken]


def parts_of(optimizer: Any, stage: int, rank: int, model: nn.Module) -> Iterator[Part]:  # noqa: ANN401 - untyped
    """The parts of all parameters on this rank; that of a frozen one is by itself, and in no state of the optimizer.

    Args:
        optimizer: DeepSpeed's optimizer; torch's own at stage 0.
        stage: DeepSpeed's stage.
        rank: This rank among those that the stage divides over.
        model: The model.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    if stage == 0:
        yield from (
            Part(names[id(p)], p, 0, slice(0, p.numel())) for group in optimizer.param_groups for p in group["params"]
        )
    elif stage == 3:
        yield from _parts_of_each(optimizer, rank, names)
    else:
        yield from _parts_of_buffers(optimizer, rank, names)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            yield _part_of_frozen(name, p, rank)


def partitions_of(optimizer: Any, stage: int) -> list[Tensor]:  # noqa: ANN401 - untyped
    """The flat fp32 tensors that this rank's AdamW works on."""
    if stage == 0:
        return [p for group in optimizer.param_groups for p in group["params"]]
    return list(optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups)


def whole_shape(p: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter that stage 3 may have divided; under tensor ranks that of this rank's part."""
    return tuple(getattr(p, "ds_shape", p.shape))


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[list[list[int]]]:
    """Boxes that together are the elements `start` to before `stop` of a flattened tensor of `shape`, in order.

    Each is the [first, last + 1] of every dimension. A matrix takes at most three: part of a row, rows, part of a row.
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [[[start, stop]]] if shape else [[]]
    inner, each = shape[1:], math.prod(shape[1:])
    first, last = -(-start // each), stop // each
    boxes = list[list[list[int]]]()
    if start % each:
        end = min(stop, first * each)
        boxes += _in_row(inner, first - 1, start - (first - 1) * each, end - (first - 1) * each)
    if first < last:
        boxes.append([[first, last], *([0, size] for size in inner)])
    if stop % each and last >= first:
        boxes += _in_row(inner, last, 0, stop - last * each)
    return boxes


def _in_row(inner: Sequence[int], row: int, start: int, stop: int) -> list[list[list[int]]]:
    return [[[row, row + 1], *box] for box in boxes_of(inner, start, stop)]


def _parts_of_buffers(zero: Any, rank: int, names: dict[int, str]) -> Iterator[Part]:  # noqa: ANN401 - untyped
    for index, partition in enumerate(zero.single_partition_of_fp32_groups):
        first = rank * zero.partition_size[index]
        end = first + zero.partition_size[index]
        offsets = zero.round_robin_bit16_offsets[index]
        for parameter, offset in zip(zero.round_robin_bit16_groups[index], offsets, strict=True):
            low, high = max(first, offset), min(end, offset + parameter.numel())
            if low < high:
                yield Part(names[id(parameter)], partition, low - offset, slice(low - first, high - first))


def _parts_of_each(zero: Any, rank: int, names: dict[int, str]) -> Iterator[Part]:  # noqa: ANN401 - untyped
    for partition, members in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        sizes = [p.partition_numel() for p in members]
        for parameter, offset in zip(members, accumulate(sizes, initial=0), strict=False):
            start, count = _cut(parameter, rank)
            if count > 0:
                yield Part(names[id(parameter)], partition, start, slice(offset, offset + count))


def _part_of_frozen(name: str, p: Any, rank: int) -> Part:  # noqa: ANN401 - has what DeepSpeed adds
    if not hasattr(p, "ds_tensor"):
        return Part(name, p, 0, slice(0, p.numel()))
    start, count = _cut(p, rank)
    return Part(name, p.ds_tensor, start, slice(0, count))


def _cut(p: Any, rank: int) -> tuple[int, int]:  # noqa: ANN401 - as above
    """First element and number of elements of a parameter that stage 3 leaves a rank; the last ranks may have none."""
    start = rank * p.partition_numel()
    return start, max(0, min(p.partition_numel(), p.ds_numel - start))
