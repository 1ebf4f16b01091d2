"""A cluster of the launcher's verbs alone: objects in memory, no controllers. A double at the boundary of the client.

It answers as the API server does where the launcher depends on it: uids, versions, names that are taken, finalizers
that hold what is deleted, selectors, watches with too old versions. `faults` are taken one per call, in order: None
lets the call through, an exception is raised instead of it, and `After(exception)` is raised when it has been done.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.training.kubernetes.client import (
    ClusterUnreachable,
    Document,
    Forbidden,
    Gone,
    Listing,
    ObjectConflict,
    ObjectMissing,
)


class Killed(BaseException):
    """The process that called is killed: nothing of it goes on."""


@dataclass(frozen=True)
class After:
    """A fault that comes when the call has had its effect."""

    error: BaseException


class FakeWatch:
    """An open watch; `break_off` ends it as a dropped connection does."""

    def __init__(self, cluster: FakeCluster, resource: str, version: int, labels: str) -> None:
        self._cluster, self._resource, self._version, self._labels = cluster, resource, version, labels
        self.closed = self.broken = False

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        if self._version < self._cluster.oldest:
            raise Gone("too old resource version", "list again")
        while not self.closed:
            if self.broken:
                raise ClusterUnreachable("the watch broke off", "it is resumed")
            for version, kind, resource, item in [] if self._cluster.silent else list(self._cluster.history):
                if version > self._version:
                    self._version = version
                    if resource == self._resource and _chosen(item, self._labels):
                        yield kind, copy.deepcopy(item)
            time.sleep(0.005)

    def close(self) -> None:
        self.closed = True


class FakeCluster:
    """Objects of one namespace, and what was called."""

    def __init__(self, namespace: str = "headway") -> None:
        self.namespace = namespace
        self.ahead_us = 0
        self.objects: dict[tuple[str, str], Document] = {}
        self.history: list[tuple[int, str, str, Document]] = []
        self.calls: list[tuple[str, str]] = []
        self.faults: list[BaseException | After | None] = []
        self.forbidden: set[tuple[str, str]] = set()
        self.watches: list[FakeWatch] = []
        self.away = False
        # Watches are open and tell nothing.
        self.silent = False
        self.oldest = 0
        self._version = itertools.count(1)
        self._lock = threading.RLock()

    def in_namespace(self, namespace: str) -> FakeCluster:
        assert namespace == self.namespace
        return self

    def get(self, resource: str, name: str) -> Document:
        with self._call("get", resource):
            return copy.deepcopy(self._object(resource, name))

    def list(self, resource: str, labels: str = "", fields: str = "") -> Listing:
        with self._call("list", resource):
            name = fields.partition("involvedObject.name=")[2]
            found = [
                copy.deepcopy(item)
                for (kind, _), item in self.objects.items()
                if kind == resource and _chosen(item, labels) and (not name or item["involvedObject"]["name"] == name)
            ]
            return Listing(found, str(self.history[-1][0] if self.history else 0))

    def create(self, resource: str, body: Mapping[str, Any]) -> Document:
        with self._call("create", resource):
            return copy.deepcopy(self.put(resource, body))

    def put(self, resource: str, body: Mapping[str, Any]) -> Document:
        """Make an object, as somebody else does."""
        key = resource, body["metadata"]["name"]
        if key in self.objects:
            raise ObjectConflict(f"{resource} {key[1]!r} already exists", "look at the object that is there")
        version = next(self._version)
        item: Document = copy.deepcopy(dict(body))
        made = {"uid": f"uid-{version}", "resourceVersion": str(version), "creationTimestamp": "2013-06-01T00:00:00Z"}
        item["metadata"] = {**item["metadata"], **made}
        self.objects[key] = item
        self._tell(version, "ADDED", resource, item)
        return item

    def patch(self, resource: str, name: str, body: Mapping[str, Any]) -> Document:
        with self._call("patch", resource):
            return copy.deepcopy(self.change(resource, name, body))

    def change(self, resource: str, name: str, body: Mapping[str, Any]) -> Document:
        """Merge into an object, as somebody else does."""
        item = self._object(resource, name)
        for part, values in body.items():
            item[part] = {**item.get(part, {}), **copy.deepcopy(values)}
        version = next(self._version)
        item["metadata"]["resourceVersion"] = str(version)
        self._tell(version, "MODIFIED", resource, item)
        return item

    def delete(
        self, resource: str, name: str, *, uid: str = "", propagation: str = "Background", grace_s: int | None = None
    ) -> None:
        with self._call("delete", resource):
            item = self._object(resource, name)
            if uid and item["metadata"]["uid"] != uid:
                raise ObjectConflict("the UID in the precondition does not match", "look at the object that is there")
            if propagation != "Background":
                raise AssertionError(f"{resource} {name} deleted with {propagation}")
            self._let_go(resource, name)

    def remove(self, resource: str, name: str) -> None:
        """Take an object away, and all that it owns."""
        item = self.objects.pop((resource, name))
        self._tell(next(self._version), "DELETED", resource, item)
        for kind, other in list(self.objects):
            owners = self.objects[kind, other]["metadata"].get("ownerReferences") or []
            if item["metadata"]["uid"] in [owner["uid"] for owner in owners]:
                self._let_go(kind, other)

    def _let_go(self, resource: str, name: str) -> None:
        if self._object(resource, name)["metadata"].get("finalizers"):
            self.change(resource, name, {"metadata": {"deletionTimestamp": "2013-06-01T00:00:05Z"}})
        else:
            self.remove(resource, name)

    def watch(self, resource: str, version: str, labels: str = "", timeout_s: int = 30) -> FakeWatch:
        with self._call("watch", resource):
            self.watches.append(FakeWatch(self, resource, int(version), labels))
            return self.watches[-1]

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        raise ObjectMissing(f"pods {pod!r} not found", "")

    def named(self, resource: str) -> list[str]:
        """Names of the objects of one resource."""
        return sorted(name for kind, name in self.objects if kind == resource)

    def counted(self, verb: str, resource: str) -> int:
        """How often a verb was called."""
        return self.calls.count((verb, resource))

    def _object(self, resource: str, name: str) -> Document:
        try:
            return self.objects[resource, name]
        except KeyError:
            raise ObjectMissing(f"{resource} {name!r} not found", "") from None

    def _tell(self, version: int, kind: str, resource: str, item: Document) -> None:
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(version)
        self.history.append((version, kind, resource, item))

    def _call(self, verb: str, resource: str) -> _Call:
        return _Call(self, verb, resource)


class _Call:
    def __init__(self, cluster: FakeCluster, verb: str, resource: str) -> None:
        self._cluster, self._verb, self._resource = cluster, verb, resource
        self._after: BaseException | None = None

    def __enter__(self) -> None:
        cluster = self._cluster
        cluster._lock.acquire()
        try:
            cluster.calls.append((self._verb, self._resource))
            if cluster.away:
                raise ClusterUnreachable("connection refused", "it is asked again")
            if (self._verb, self._resource) in cluster.forbidden:
                raise Forbidden(f"the account may not {self._verb} {self._resource}", "")
            fault = cluster.faults.pop(0) if cluster.faults else None
            if isinstance(fault, BaseException):
                raise fault
            self._after = fault.error if fault is not None else None
        except BaseException:
            cluster._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._cluster._lock.release()
        if self._after is not None and error[0] is None:
            raise self._after


def _chosen(item: Mapping[str, Any], labels: str) -> bool:
    given = item["metadata"].get("labels") or {}
    wanted = (pair.split("=", 1) for pair in labels.split(",") if pair)
    return all(given.get(name) == value for name, value in wanted)
