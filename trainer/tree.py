"""Nested dicts, lists, scalars and tensors as one JSON document and one table of tensors: no pickle, nothing lost.

A tensor becomes `{"$tensor": key}`, where key is its place in the tree; a tuple `{"$tuple": [...]}`; a float that JSON
cannot say `{"$float": "nan"}`. Any other type is refused by name, at its place.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from torch import Tensor

from trainer.blobs import Json

Tree: TypeAlias = Any
"""None, bool, int, float, str, Tensor, or a list, tuple or dict (with text keys) of trees."""


class UnknownType(TypeError):
    """A value that has no place in a checkpoint; the message gives its place and type."""


def encode_tree(tree: Tree, *, copied: bool = True) -> tuple[Json, dict[str, Tensor]]:
    """Return the JSON document of `tree`, and its tensors (copied, contiguous, on the CPU) by key.

    With `copied` False the tensors are the tree's own, for a caller that copies them to where they belong.

    Raises:
        UnknownType: names the place and the type of what cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    document = _encode(tree, "", tensors)
    if copied:
        # The trainer goes on changing its own, and views of one buffer cannot be saved as they are.
        tensors = {place: tensor.cpu().contiguous().clone() for place, tensor in tensors.items()}
    return document, tensors


def decode_tree(document: Json, tensors: Mapping[str, Any]) -> Tree:
    """Return the tree that `encode_tree` made `document` and `tensors` from.

    Raises:
        KeyError: a tensor of the document is not in `tensors`.
    """
    if isinstance(document, list):
        return [decode_tree(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    given = cast("dict[str, Any]", document)
    if "$tensor" in given:
        return tensors[given["$tensor"]]
    if "$tuple" in given:
        return tuple(decode_tree(item, tensors) for item in given["$tuple"])
    if "$float" in given:
        return float(given["$float"])
    return {key: decode_tree(item, tensors) for key, item in given.items()}


def _encode(value: Tree, place: str, tensors: dict[str, Tensor]) -> Json:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {"$tensor": place}
    if kind is list:
        return [_encode(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {_key(k, place): _encode(v, f"{place}/{_escape(k)}", tensors) for k, v in value.items()}
    raise UnknownType(f"{place or '/'}: a {kind.__module__}.{kind.__qualname__} cannot be saved in a checkpoint")


def _key(key: object, place: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise UnknownType(
            f"{place or '/'}: key {key!r} ({type(key).__name__}); a key is text that does not begin with $"
        )
    return key


def _escape(key: object) -> str:
    # As in JSON Pointer, so that no two places share one key.
    return str(key).replace("~", "~0").replace("/", "~1")
