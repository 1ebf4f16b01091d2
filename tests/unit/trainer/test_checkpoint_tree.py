"""Trees of dicts, lists, scalars and tensors survive as JSON and tensors; other types are refused by name."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.blobs import canonical_json
from trainer.tree import UnknownType, decode_tree, encode_tree

texts = st.text(st.characters(codec="utf-8"), max_size=6)
keys = texts.filter(lambda text: not text.startswith("$"))
tensors = st.sampled_from(
    [
        torch.tensor(3.5),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        torch.zeros(0, 2, dtype=torch.int8),
        torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([math.nan, -0.0, math.inf], dtype=torch.float64),
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees = st.recursive(
    scalars | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:  # noqa: ANN401
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150, deadline=None)
@given(trees)
def test_a_tree_comes_back_from_bytes(tree: Any) -> None:  # noqa: ANN401
    document, table = encode_tree(tree)
    stored = safetensors.torch.load(safetensors.torch.save(table))
    assert same(_sorted(tree), _sorted(decode_tree(json.loads(canonical_json(document)), stored)))


def _sorted(tree: Any) -> Any:  # noqa: ANN401
    """JSON keeps no order of keys."""
    if isinstance(tree, dict):
        return {key: _sorted(tree[key]) for key in sorted(tree)}
    if isinstance(tree, list | tuple):
        return type(tree)(_sorted(item) for item in tree)
    return tree


def test_views_of_one_buffer_are_kept_apart_and_unchanged_by_training() -> None:
    buffer = torch.arange(4.0)
    document, table = encode_tree({"a": buffer[:2], "b": buffer[2:], "a/b": buffer, "a~1b": buffer[1:]})
    buffer.zero_()
    found = decode_tree(document, safetensors.torch.load(safetensors.torch.save(table)))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0.0, 1.0],
        "b": [2.0, 3.0],
        "a/b": [0.0, 1.0, 2.0, 3.0],
        "a~1b": [1.0, 2.0, 3.0],
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(1.0), "/part/0: a numpy.float32 cannot be saved"),
        (Path("x"), "/part/0: a pathlib.PosixPath cannot be saved"),
        ({1: 2}, "/part/0: key 1 (int); a key is text"),
        ({"$tensor": 2}, "/part/0: key '$tensor' (str); a key is text that does not begin with $"),
        (b"x", "/part/0: a builtins.bytes cannot be saved"),
        ({1}, "/part/0: a builtins.set cannot be saved"),
        (torch.nn.Linear(1, 1), "/part/0: a torch.nn.modules.linear.Linear cannot be saved"),
    ],
)
def test_unknown_types_are_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(UnknownType) as caught:
        encode_tree({"part": [value]})
    assert message in str(caught.value)


def test_state_dicts_are_dicts() -> None:
    module = torch.nn.Linear(2, 1)
    document, table = encode_tree(OrderedDict(module.state_dict()))
    assert set(decode_tree(document, table)) == {"weight", "bias"}
