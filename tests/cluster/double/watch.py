"""Reading of collections: selectors, pages, watches."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from tests.cluster.double.store import ApiError, Change, Json, Object, Objects, Resource, Store, failure
from tests.cluster.double.validation import Fault, forbidden, invalid_error

_REQUIREMENT = re.compile(r"\s*(!?)\s*([A-Za-z0-9_./-]+)\s*(?:(==|=|!=|in\b|notin\b|>|<)\s*(\([^)]*\)|[^,\s=!]*)\s*)?")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_INVOLVED = "kind namespace name uid apiVersion resourceVersion fieldPath"
_POD_FIELDS = (
    "spec.nodeName spec.restartPolicy spec.schedulerName spec.serviceAccountName spec.hostNetwork "
    "status.phase status.podIP status.nominatedNodeName"
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "jobs": ("status.successful",),
    "pods": tuple(_POD_FIELDS.split()),
    "events": (*(f"involvedObject.{p}" for p in _INVOLVED.split()), "reason", "reportingComponent", "source", "type"),
    "nodes": ("spec.unschedulable",),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
}
_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)
# What an empty object of a kind looks like in a bookmark: Go writes its fields without `omitempty`.
_EMPTY: dict[str, Object] = {
    "jobs": {"spec": {"template": {"metadata": {}, "spec": {"containers": None}}}, "status": {}},
    "pods": {"spec": {"containers": None}, "status": {}},
    "services": {"spec": {}, "status": {"loadBalancer": {}}},
    "namespaces": {"spec": {}, "status": {}},
}
_BOOKMARK_EVERY = 60.0
_BOOKMARK_BEFORE_END = 1.5

Test = Callable[[Object], bool]


class Selection(NamedTuple):
    """Which objects of a collection a request means."""

    namespace: str
    labels: Test
    fields: Test
    filtered: bool

    def holds(self, obj: Object) -> bool:
        """Whether an object is meant."""
        inside = not self.namespace or obj["metadata"].get("namespace") == self.namespace
        return inside and self.labels(obj) and self.fields(obj)


def select(resource: Resource, namespace: str, query: Mapping[str, str], renamed: str = "") -> Selection:
    """Read the selectors of a query.

    Args:
        resource: The kind.
        namespace: Namespace of the path, empty for all.
        query: Query parameters.
        renamed: What `involvedObject` is called (events.k8s.io: `regarding`).

    Raises:
        ApiError: 400 for a selector that cannot be read.
    """
    labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
    if renamed:
        fields = fields.replace(f"{renamed}.", "involvedObject.").replace("reportingController", "reportingComponent")
    return Selection(namespace, parse_labels(labels), _parse_fields(resource, fields), bool(labels or fields))


def _bad(message: str) -> ApiError:
    return failure(400, "BadRequest", message)


def parse_labels(text: str) -> Test:
    """A label selector as a test of objects.

    Raises:
        ApiError: 400.
    """
    tests: list[Callable[[dict[str, str]], bool]] = []
    position = 0
    while position < len(text):
        match = _REQUIREMENT.match(text, position)
        if not match:
            raise _bad(f"found '{text[position]}', expected: !, identifier, or 'end of string'")
        tests.append(_requirement(*match.groups()))
        position = match.end()
        if position < len(text) and text[position] != ",":
            raise _bad(f"found '{text[position]}', expected: ',' or 'end of string'")
        position += 1
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def _requirement(negated: str, key: str, operator: str | None, value: str | None) -> Callable[[dict[str, str]], bool]:
    value = value or ""
    if operator is None:
        return (lambda labels: key not in labels) if negated else (lambda labels: key in labels)
    if operator in ("in", "notin"):
        if not (value.startswith("(") and value.endswith(")")):
            raise _bad(f"unable to parse requirement: found '{value.lstrip('(')}', expected: '(', ',' or ')'")
        values = [item.strip() for item in value.strip("()").split(",")]
        return (
            (lambda labels: labels.get(key) in values)
            if operator == "in"
            else (lambda labels: labels.get(key) not in values)
        )
    if operator in (">", "<"):
        return lambda labels: _compares(labels.get(key, ""), operator, value)
    if not _VALUE.fullmatch(value):
        words = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
        raise _bad(f'unable to parse requirement: values[0][{key}]: Invalid value: "{value}": {words}')
    return (lambda labels: labels.get(key) != value) if operator == "!=" else (lambda labels: labels.get(key) == value)


def _compares(found: str, operator: str, value: str) -> bool:
    if not found.lstrip("-").isdigit():
        return False
    return int(found) > int(value) if operator == ">" else int(found) < int(value)


def _parse_fields(resource: Resource, text: str) -> Test:
    known = ("metadata.name", *(("metadata.namespace",) if resource.namespaced else ()))
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", part)
        if not match:
            raise _bad(f"invalid selector: '{text}'; can't understand '{part}'")
        field, operator, value = match.groups()
        if field not in (*known, *_FIELDS.get(resource.plural, ())):
            if resource.plural == "jobs":
                raise _bad(f'field label "{field}" not supported for Job')
            if resource.plural in _FIELDS:
                raise _bad(f"field label not supported: {field}")
            raise _bad(f'"{field}" is not a known field selector: only "metadata.name", "metadata.namespace"')
        tests.append((field, operator != "!=", value))
    return lambda obj: all((_field(obj, field) == value) == equal for field, equal, value in tests)


def _field(obj: Object, field: str) -> str:
    if field == "status.successful":
        return str(obj.get("status", {}).get("succeeded", 0))
    if field == "source":
        return obj.get("source", {}).get("component", "") or obj.get("reportingComponent", "")
    found: Json = obj
    for part in field.split("."):
        found = found.get(part, "") if isinstance(found, dict) else ""
    if isinstance(found, bool) or field in ("spec.unschedulable", "spec.hostNetwork"):
        return "true" if found else "false"
    return str(found)


# --- lists ----------------------------------------------------------------------------------------------------


def _version(text: str, status: int) -> int:
    if text.isdigit():
        return int(text)
    message = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
    if status == 500:
        raise failure(500, "", message)
    raise _bad(f"invalid resource version: {message}")


def check_options(query: Mapping[str, str]) -> None:
    """Refuse combinations of list options that contradict each other.

    Raises:
        ApiError: 422.
    """
    match, initial, faults = query.get("resourceVersionMatch", ""), query.get("sendInitialEvents"), []
    watching = query.get("watch") in ("true", "1")
    field = "resourceVersionMatch"
    if initial is not None and watching:
        if match != "NotOlderThan":
            faults.append(forbidden(field, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"))
        elif query.get("allowWatchBookmarks") != "true":
            faults.append(forbidden("allowWatchBookmarks", "sendInitialEvents requires setting allowWatchBookmarks"))
    elif initial is not None:
        faults.append(forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"))
    elif match and watching:
        faults.append(
            forbidden(field, "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided")
        )
    elif match and not query.get("resourceVersion"):
        faults.append(forbidden(field, "resourceVersionMatch is forbidden unless resourceVersion is provided"))
    elif match and match not in ("Exact", "NotOlderThan"):
        words = f'Unsupported value: "{match}": supported values: "", "Exact", "NotOlderThan"'
        faults.append(Fault("FieldValueNotSupported", field, words))
    elif match == "Exact" and query.get("resourceVersion") == "0":
        words = 'resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
        faults.append(forbidden(field, words))
    if faults:
        raise invalid_error("meta.k8s.io", "ListOptions", "", faults)


def _expired() -> ApiError:
    return failure(410, "Expired", "The resourceVersion for the provided list is too old.")


async def list_page(store: Store, resource: Resource, selection: Selection, query: Mapping[str, str]) -> Object:
    """A list, or a page of it, as the `List` object.

    Raises:
        ApiError: 400, 410, 422 or 504.
    """
    check_options(query)
    limit, token = int(query.get("limit") or 0), query.get("continue", "")
    asked = query.get("resourceVersion", "")
    version, start = store.version, ""
    if token:
        if asked and asked != "0":
            raise _bad("specifying resource version is not allowed when using continue")
        version, start = _continued(store, token)
    elif asked:
        wanted = _version(asked, 400)
        if wanted > store.version:
            await asyncio.sleep(3 / store.clock.scale)
            causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
            details = {"causes": causes, "retryAfterSeconds": 1}
            message = f"Timeout: Too large resource version: {wanted}, current: {store.version}"
            raise failure(504, "Timeout", message, details, {"Retry-After": "1"})
        exact = query.get("resourceVersionMatch") == "Exact" or (limit and not query.get("resourceVersionMatch"))
        if exact and wanted:
            version = wanted
            if wanted < store.compacted:
                raise _expired()
    objects = store.peek(resource.plural, selection.namespace)
    if version != store.version:
        objects = store.at(resource.plural, selection.namespace, version)
    return _page(resource, selection, objects, version, start, limit)


def _page(resource: Resource, selection: Selection, objects: Objects, version: int, start: str, limit: int) -> Object:
    items: Objects = []
    meta: Object = {"resourceVersion": str(version), **({"continue": ""} if resource.custom else {})}
    rest = [obj for obj in objects if _path(obj, selection.namespace) > start] if start else objects
    for i, obj in enumerate(rest):
        if limit and len(items) == limit:
            meta["continue"] = _token(version, "/" + _path(rest[i - 1], selection.namespace))
            if not selection.filtered:
                meta["remainingItemCount"] = len(rest) - i
            break
        if selection.holds(obj):
            items.append(obj)
    if not resource.custom:
        items = [{key: value for key, value in obj.items() if key not in ("kind", "apiVersion")} for obj in items]
    return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}


def _path(obj: Object, namespace: str) -> str:
    meta = obj["metadata"]
    return meta["name"] if namespace or "namespace" not in meta else f"{meta['namespace']}/{meta['name']}"


def _token(version: int, start: str) -> str:
    content = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": f"{start}\0"}, separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def _continued(store: Store, token: str) -> tuple[int, str]:
    raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    try:
        content = json.loads(raw)
        version, start = content["rv"], content["start"].strip("/\0")
    except (ValueError, KeyError, TypeError):
        letter = raw[:1].decode("latin-1")
        shown = letter if letter.isprintable() else f"\\u{ord(letter):04x}" if letter else ""
        why = f"invalid character '{shown}' looking for beginning of value"
        raise _bad(f"invalid continue token: continue key is not valid: {why}") from None
    if version < 0:
        return store.version, start
    if version < store.compacted:
        error = failure(410, "Expired", _EXPIRED)
        error.body["metadata"] = {"continue": _token(-1, start)}
        raise error
    return version, start


# --- watches --------------------------------------------------------------------------------------------------


def _line(type_: str, obj: Object) -> bytes:
    return json.dumps({"type": type_, "object": obj}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _seen_as(selection: Selection, change: Change) -> tuple[str, Object] | None:
    """How a watch with a selector reports a write: leaving the selection is DELETED, entering it ADDED."""
    now = change.type != "DELETED" and selection.holds(change.new)
    before = change.old is not None and selection.holds(change.old)
    if now:
        return ("MODIFIED" if before else "ADDED"), change.new
    if before and change.old is not None:
        stamped = {**change.old["metadata"], "resourceVersion": str(change.version)}
        return "DELETED", {**change.old, "metadata": stamped}
    return None


def _bookmark(resource: Resource, version: int, initial: bool) -> bytes:
    meta: Object = {"resourceVersion": str(version)}
    if initial:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    empty = _EMPTY.get(resource.plural, {})
    return _line("BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta, **empty})


def watch_start(query: Mapping[str, str]) -> int | None:
    """The version that a watch starts after; None = with everything that exists.

    Raises:
        ApiError: 422 for options that contradict each other; 500 for a version that is no number, as recorded.
    """
    check_options(query)
    asked = query.get("resourceVersion", "")
    version = _version(asked, 500) if asked else 0
    return None if version == 0 or query.get("sendInitialEvents") == "true" else version


async def watch(
    store: Store,
    resource: Resource,
    selection: Selection,
    query: Mapping[str, str],
    ends: Callable[[], bool],
) -> AsyncIterator[bytes]:
    """The lines of a watch.

    Args:
        store: The store.
        resource: The kind.
        selection: Which objects.
        query: `resourceVersion`, `timeoutSeconds`, `allowWatchBookmarks`, `sendInitialEvents`.
        ends: Asked twice a second: whether the watch is to be cut off.
    """
    start, loop = watch_start(query), asyncio.get_running_loop()
    if start is not None and start < store.compacted:
        message = f"too old resource version: {start} ({store.version})"
        yield _line("ERROR", failure(410, "Expired", message).body)
        return
    timeout = float(query.get("timeoutSeconds") or 1800)
    marked = query.get("allowWatchBookmarks") == "true"
    end = loop.time() + timeout
    next_mark = min(loop.time() + _BOOKMARK_EVERY, end - _BOOKMARK_BEFORE_END) if timeout > 2 else end
    queue = store.changes()
    try:
        sent = store.version if start is None else start
        for line in _beginning(store, resource, selection, start, query):
            yield line
        while (now := loop.time()) < end and not ends():
            if marked and now >= next_mark:
                yield _bookmark(resource, store.version, initial=False)
                next_mark = end if end - now < _BOOKMARK_EVERY else now + _BOOKMARK_EVERY
            wait = min(end - now, 0.5, next_mark - now if marked and next_mark > now else 0.5)
            try:
                change = await asyncio.wait_for(queue.get(), max(wait, 0.001))
            except TimeoutError:
                continue
            seen = _seen_as(selection, change) if change.plural == resource.plural else None
            if seen and change.version > sent:
                yield _line(*seen)
    finally:
        store.unsubscribe(queue)


def _beginning(
    store: Store, resource: Resource, selection: Selection, start: int | None, query: Mapping[str, str]
) -> list[bytes]:
    if start is None:
        found = [obj for obj in store.peek(resource.plural, selection.namespace) if selection.holds(obj)]
        lines = [_line("ADDED", obj) for obj in found]
        if query.get("sendInitialEvents") == "true":
            lines.append(_bookmark(resource, store.version, initial=True))
        return lines
    missed = [c for c in store.since(start) if c.plural == resource.plural]
    return [_line(*seen) for change in missed if (seen := _seen_as(selection, change))]
