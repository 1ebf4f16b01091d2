"""The three kinds of PATCH: JSON patch (RFC 6902), merge patch (RFC 7386), strategic merge patch (Kubernetes)."""

import copy
from typing import Any

from tests.cluster.double.schema import DecodeError, definition_of, definitions, parse_json
from tests.cluster.double.store import ApiError, Json, Object, Resource, failure

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"


def apply(resource: Resource, kind: str, body: bytes, current: Object) -> Object:
    """The object that a PATCH asks for.

    Args:
        resource: Its kind.
        kind: Content type of the patch.
        body: The patch.
        current: The object as it is stored.

    Raises:
        ApiError: 400, 415 or 422.
    """
    kinds = (JSON_PATCH, MERGE_PATCH) if resource.custom else (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH)
    if kind not in kinds:
        raise failure(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
    try:
        patch = parse_json(body)
    except DecodeError as error:
        raise failure(400, "BadRequest", f"error decoding patch: {error}") from None
    if kind == JSON_PATCH:
        return _json_patch(patch, current)
    if not isinstance(patch, dict):
        names = {list: "array", str: "string", bool: "bool"}
        found = names.get(type(patch), "number")
        why = f"json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
        raise failure(400, "BadRequest", f"error decoding patch: {why}")
    if kind == MERGE_PATCH:
        return merge(current, patch)
    name = definition_of(resource.group, resource.version, resource.kind)
    return _strategic(current, patch, {"$ref": f"#/$defs/{name}"})


def merge(current: Json, patch: Json) -> Json:
    """Merge patch: objects merge, null deletes, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(current) if isinstance(current, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _refused() -> ApiError:
    return failure(422, "Invalid", "the server rejected our request due to an error in our request", {})


def _json_patch(patch: Json, current: Object) -> Object:
    if not isinstance(patch, list):
        why = "json: cannot unmarshal object into Go value of type jsonpatch.Patch"
        raise failure(400, "BadRequest", f"error decoding patch: {why}")
    document: Json = copy.deepcopy(current)
    for step in patch:
        try:
            document = _step(document, step)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise _refused() from error
    return document


def _step(document: Json, step: dict[str, Any]) -> Json:
    operation, path = step["op"], _pointer(step["path"])
    if operation == "test":
        if _find(document, path) != step.get("value"):
            raise ValueError("test failed")
        return document
    if operation in ("move", "copy"):
        source = _pointer(step["from"])
        value = copy.deepcopy(_find(document, source))
        document = _remove(document, source) if operation == "move" else document
        return _add(document, path, value)
    if operation == "add":
        return _add(document, path, step["value"])
    if operation == "remove":
        return _remove(document, path)
    if operation == "replace":
        _find(document, path)
        return _add(_remove(document, path), path, step["value"]) if path else step["value"]
    raise ValueError(f"unknown operation {operation}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError("a pointer starts with /")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _find(document: Json, path: list[str]) -> Json:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _add(document: Json, path: list[str], value: Json) -> Json:
    if not path:
        return value
    parent = _find(document, path[:-1])
    if isinstance(parent, list):
        position = len(parent) if path[-1] == "-" else int(path[-1])
        if position > len(parent):
            raise IndexError("outside the list")
        parent.insert(position, value)
    else:
        parent[path[-1]] = value
    return document


def _remove(document: Json, path: list[str]) -> Json:
    parent = _find(document, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    return document


def _strategic(current: Json, patch: Json, schema: dict[str, Any]) -> Json:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    merged = dict(current) if isinstance(current, dict) and directive != "replace" else {}
    fields = _fields(schema)
    for key, value in patch.items():
        if key.startswith("$"):
            _directive(merged, key, value)
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, list):
            merged[key] = _strategic_list(merged.get(key, []), value, fields.get(key, {}))
        else:
            merged[key] = _strategic(merged.get(key), value, fields.get(key, {}))
    return merged


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return definitions()[schema["$ref"].rsplit("/", 1)[1]].get("properties", {})
    return {}


def _directive(merged: Object, key: str, value: Json) -> None:
    if key.startswith("$deleteFromPrimitiveList/"):
        name = key.split("/", 1)[1]
        merged[name] = [item for item in merged.get(name, []) if item not in value]
    elif key == "$retainKeys":
        for name in [name for name in merged if name not in value]:
            del merged[name]


def _strategic_list(current: list[Json], patch: list[Json], schema: dict[str, Any]) -> list[Json]:
    if "merge" not in str(schema.get("x-kubernetes-patch-strategy", "")):
        return copy.deepcopy(patch)
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [copy.deepcopy(item) for item in patch if item.get("$patch") != "replace"]
    key = schema.get("x-kubernetes-patch-merge-key")
    if not key:
        return current + [item for item in patch if item not in current]
    merged = copy.deepcopy(current)
    for item in patch:
        found = next((i for i, old in enumerate(merged) if old.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            merged = [old for old in merged if old.get(key) != item.get(key)]
        elif found is None:
            merged.insert(0, copy.deepcopy(item))
        else:
            merged[found] = _strategic(merged[found], item, schema["items"])
    return merged
