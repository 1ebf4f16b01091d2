"""A flat range of a tensor, as DeepSpeed cuts them, is a few boxes: the same elements in the same order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.engines.zero_parts import boxes_of


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = boxes_of(shape, start, stop)
    parts = [whole[tuple(slice(a, b) for a, b in box)].flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop))
    assert all(part.numel() for part in parts)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
