"""The double's object store: what etcd and the generic registry do in a real API server.

Sources: the Kubernetes API conventions and `k8s.io/apiserver/pkg/registry` (deletion, finalizers, generation).
"""

import asyncio
import copy
import random
import time
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

Object = dict[str, Any]
Objects = list[Object]
Json = Any

_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
_FIRST_VERSION = 100
_HISTORY = 20_000
_FIXED = ("uid", "creationTimestamp", "generation", "resourceVersion", "generateName")
_FIXED += ("deletionTimestamp", "deletionGracePeriodSeconds")


@dataclass(frozen=True)
class Resource:
    """One kind that the double serves.

    Attributes:
        group: API group, empty for the core group.
        version: API version.
        plural: Name in paths.
        kind: Name in bodies.
        namespaced: Whether objects live in a namespace.
        status: Whether there is a status subresource.
        generation: Whether `metadata.generation` counts changes of the spec.
        returned: Whether DELETE answers with the object and not with a Status.
        custom: Whether a CustomResourceDefinition declares it.
        short: Short names in discovery.
        categories: Categories in discovery.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    status: bool = False
    generation: bool = False
    returned: bool = False
    custom: bool = False
    short: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """`group/version` as bodies say it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """`plural.group` as messages say it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


# Flags: n namespaced, s status subresource, g counts generations, r DELETE returns the object, c custom resource.
_TABLE = """
-                         v1      namespaces                Namespace                sr   ns
-                         v1      nodes                     Node                     s    no
-                         v1      persistentvolumes         PersistentVolume         sr   pv
-                         v1      pods                      Pod                      nsgr po all
-                         v1      services                  Service                  nsr  svc all
-                         v1      configmaps                ConfigMap                n    cm
-                         v1      secrets                   Secret                   n
-                         v1      events                    Event                    n    ev
-                         v1      serviceaccounts           ServiceAccount           nr   sa
-                         v1      persistentvolumeclaims    PersistentVolumeClaim    nsr  pvc
batch                     v1      jobs                      Job                      nsg  - all
policy                    v1      poddisruptionbudgets      PodDisruptionBudget      nsg  pdb
scheduling.k8s.io         v1      priorityclasses           PriorityClass            g    pc
coordination.k8s.io       v1      leases                    Lease                    n
rbac.authorization.k8s.io v1      roles                     Role                     n
rbac.authorization.k8s.io v1      rolebindings              RoleBinding              n
rbac.authorization.k8s.io v1      clusterroles              ClusterRole              -
rbac.authorization.k8s.io v1      clusterrolebindings       ClusterRoleBinding       -
apiextensions.k8s.io      v1      customresourcedefinitions CustomResourceDefinition sg   crd,crds api-extensions
kueue.x-k8s.io            v1beta2 clusterqueues             ClusterQueue             sgc  cq
kueue.x-k8s.io            v1beta2 localqueues               LocalQueue               nsgc queue,queues,lq
kueue.x-k8s.io            v1beta2 workloads                 Workload                 nsgc wl
kueue.x-k8s.io            v1beta2 resourceflavors           ResourceFlavor           gc   flavor,flavors,rf
kueue.x-k8s.io            v1beta2 workloadpriorityclasses   WorkloadPriorityClass    gc
"""


def _row(line: str) -> Resource:
    group, version, plural, kind, flags, *names = line.split()
    short, categories = (*names, "-", "-")[:2]
    namespaced, status, generation, returned, custom = (flag in flags for flag in "nsgrc")
    shorts = tuple(short.split(",")) if short != "-" else ()
    groups = (categories,) if categories != "-" else ()
    core = "" if group == "-" else group
    return Resource(core, version, plural, kind, namespaced, status, generation, returned, custom, shorts, groups)


RESOURCES: dict[str, Resource] = {row.plural: row for row in map(_row, _TABLE.strip().splitlines())}


class ApiError(Exception):
    """An answer that is not a success.

    Attributes:
        status: HTTP status.
        body: The `v1.Status` object.
        headers: Further response headers, e.g. `Retry-After`.
    """

    def __init__(self, status: int, body: Object, headers: dict[str, str] | None = None) -> None:
        """Keep the answer."""
        super().__init__(body.get("message", ""))
        self.status, self.body, self.headers = status, body, headers or {}


def failure(
    code: int, reason: str, message: str, details: Object | None = None, headers: dict[str, str] | None = None
) -> ApiError:
    """Build an error with a `v1.Status` body.

    Args:
        code: HTTP status.
        reason: Machine-readable reason; left out when empty.
        message: What people read.
        details: `details` of the Status; left out when None.
        headers: Further response headers.
    """
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    if reason:
        body["reason"] = reason
    if details is not None:
        body["details"] = details
    return ApiError(code, {**body, "code": code}, headers)


def _details(resource: Resource, name: str, kind: str = "") -> Object:
    details: Object = {"name": name, "group": resource.group, "kind": kind or resource.plural}
    return {key: value for key, value in details.items() if value}


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for a missing object."""
    return failure(404, "NotFound", f'{resource.qualified} "{name}" not found', _details(resource, name))


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    """409 for an optimistic lock that was lost."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return failure(409, "Conflict", message, _details(resource, name))


class Clock:
    """Real time for stamps; waits of the cluster's own are shortened by `scale`.

    Attributes:
        scale: Factor by which the cluster's own delays are shortened (10 = ten times as fast).
    """

    def __init__(self, scale: float = 1.0) -> None:
        """Set the scale (> 0)."""
        self.scale = scale

    def now(self) -> datetime:
        """The time now, UTC."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of the cluster's time."""
        await asyncio.sleep(seconds / self.scale)


def stamp(moment: datetime) -> str:
    """RFC 3339 with whole seconds, as `metav1.Time` writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(moment: datetime) -> str:
    """RFC 3339 with microseconds, as `metav1.MicroTime` writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def random_suffix(length: int = 5) -> str:
    """Random letters as `generateName` appends them."""
    return "".join(random.choices(_SUFFIX, k=length))


class Change(NamedTuple):
    """One write: `old` is None for ADDED; `new` carries the version of the write, for DELETED too."""

    version: int
    plural: str
    type: str
    new: Object
    old: Object | None


Changes = list[Change]


class Store:
    """Every object of the cluster, with versions, history and deletion semantics.

    Attributes:
        clock: Time for stamps and waits.
        version: Newest resourceVersion.
        compacted: History up to this version is gone.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """Start empty."""
        self.clock = clock or Clock()
        self.version = _FIRST_VERSION
        self.compacted = _FIRST_VERSION - 1
        self._objects: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in RESOURCES}
        self._history: deque[Change] = deque()
        self._queues: list[asyncio.Queue[tuple[str, str, Object]]] = []
        self._changes: list[asyncio.Queue[Change]] = []

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        """A copy of one object, None when it does not exist."""
        return copy.deepcopy(self._objects[plural].get((namespace or "", name)))

    def list(self, plural: str, namespace: str | None = None) -> Objects:
        """Copies of all objects (of one namespace, if given) in order of namespace and name."""
        return [copy.deepcopy(obj) for obj in self.peek(plural, namespace)]

    def peek(self, plural: str, namespace: str | None = None) -> Objects:
        """Like `list` without copies: for reading only."""
        found = self._objects[plural]
        return [found[key] for key in sorted(found) if not namespace or key[0] == namespace]

    def create(self, plural: str, obj: Object, *, dry_run: bool = False) -> Object:
        """Add an object: name (from generateName), uid, version, time and generation are set.

        Raises:
            ApiError: 409 AlreadyExists.
        """
        resource, obj = RESOURCES[plural], copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name"):
            meta["name"] = meta["generateName"] + random_suffix()
        existing = self._objects[plural].get(self._key(resource, obj))
        if existing is not None:
            going = "object is being deleted: " if "deletionTimestamp" in existing["metadata"] else ""
            message = f'{going}{resource.qualified} "{meta["name"]}" already exists'
            raise failure(409, "AlreadyExists", message, _details(resource, meta["name"]))
        if not resource.namespaced:
            meta.pop("namespace", None)
        meta.pop("deletionTimestamp", None)
        meta.pop("deletionGracePeriodSeconds", None)
        meta["uid"] = meta.get("uid") or str(uuid.uuid4())
        meta.setdefault("creationTimestamp", stamp(self.clock.now()))
        if resource.generation:
            meta["generation"] = 1
        obj = {"kind": resource.kind, "apiVersion": resource.api_version, **obj}
        return obj if dry_run else self._write(resource, "ADDED", obj, None)

    def update(self, plural: str, obj: Object, *, status: bool = False, dry_run: bool = False) -> Object:
        """Replace an object, or only its status.

        Without `status` the stored status stays where the resource has a status subresource. A change of nothing
        writes nothing. The last finalizer's removal ends an object whose grace is over.

        Raises:
            ApiError: 404; 409 when `metadata.resourceVersion` is given and not the newest.
        """
        resource, obj = RESOURCES[plural], copy.deepcopy(obj)
        name = obj["metadata"]["name"]
        old = self._objects[plural].get(self._key(resource, obj))
        if old is None:
            raise not_found(resource, name)
        self.check_version(resource, old, obj)
        new = self._merged(resource, old, obj, status)
        if new == old:
            return copy.deepcopy(old)
        meta = new["metadata"]
        if resource.generation and not status and _counted(plural, new) != _counted(plural, old):
            meta["generation"] = meta.get("generation", 0) + 1
        if dry_run:
            return new
        over = "deletionTimestamp" in meta and not meta.get("deletionGracePeriodSeconds")
        if over and not meta.get("finalizers") and old["metadata"].get("finalizers"):
            # Watches see the object as it was before its last finalizer went.
            self._end(resource, copy.deepcopy(old), old)
            return new
        return self._write(resource, "MODIFIED", new, old)

    def bind(self, pod: Object) -> Object:
        """Write `spec.nodeName` and the status of a pod at once, as the binding of a pod does."""
        resource = RESOURCES["pods"]
        old = self._objects["pods"].get(self._key(resource, pod))
        if old is None:
            raise not_found(resource, pod["metadata"]["name"])
        new = copy.deepcopy(old)
        new["spec"]["nodeName"] = pod["spec"]["nodeName"]
        new["status"] = copy.deepcopy(pod["status"])
        return self._write(resource, "MODIFIED", new, old)

    def delete(
        self,
        plural: str,
        namespace: str,
        name: str,
        *,
        propagation: str | None = None,
        grace: int | None = None,
        uid: str | None = None,
        resource_version: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Delete as the API does: preconditions, finalizers of propagation, grace of pods.

        Returns:
            The object (still there, or a kind that answers with itself) or a Status of success.

        Raises:
            ApiError: 404; 409 for a precondition that does not hold.
        """
        resource = RESOURCES[plural]
        old = self._objects[plural].get((namespace or "", name))
        if old is None:
            raise not_found(resource, name)
        self._preconditions(resource, old, uid, resource_version)
        if plural == "namespaces":
            return self._terminate(resource, old, dry_run)
        new = copy.deepcopy(old)
        seconds = _grace(plural, old, grace)
        changed = self._mark(new, seconds)
        changed |= _propagate(plural, new, propagation)
        ends = not new["metadata"].get("finalizers") and not new["metadata"].get("deletionGracePeriodSeconds")
        if not ends:
            if changed and old["metadata"].get("deletionTimestamp") is None and resource.generation:
                new["metadata"]["generation"] = new["metadata"].get("generation", 0) + 1
            return new if dry_run or not changed else self._write(resource, "MODIFIED", new, old)
        last = old
        if plural == "pods" and changed and not dry_run:
            # Pods always go gracefully: the mark is written before they are gone, even without grace.
            if "deletionTimestamp" not in old["metadata"]:
                new["metadata"]["generation"] = new["metadata"].get("generation", 0) + 1
            self._write(resource, "MODIFIED", new, old)
            last = new
        gone = copy.deepcopy(old) if dry_run else self._end(resource, copy.deepcopy(last), last)
        if resource.returned:
            return gone
        details = {**_details(resource, name), "uid": old["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Take an object away at once, whatever its finalizers; nothing happens when it is gone."""
        old = self._objects[plural].get((namespace or "", name))
        if old is not None:
            self._end(RESOURCES[plural], copy.deepcopy(old), old)

    def subscribe(self) -> asyncio.Queue[tuple[str, str, Object]]:
        """A queue of (plural, ADDED | MODIFIED | DELETED, object) of every write from now on."""
        queue: asyncio.Queue[tuple[str, str, Object]] = asyncio.Queue()
        self._queues.append(queue)
        return queue

    def changes(self) -> asyncio.Queue[Change]:
        """A queue of every write from now on with the object before it, for watches."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self._changes.append(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[Any]) -> None:
        """Stop a queue of `subscribe` or `changes`."""
        self._queues = [q for q in self._queues if q is not queue]
        self._changes = [q for q in self._changes if q is not queue]

    def since(self, version: int) -> Changes:
        """Every write after `version`, oldest first; the caller checks `compacted`."""
        return [change for change in self._history if change.version > version]

    def at(self, plural: str, namespace: str | None, version: int) -> Objects:
        """The objects as they were at `version`, which must not be compacted."""
        objects = {self._key(RESOURCES[plural], obj): obj for obj in self._objects[plural].values()}
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.plural != plural:
                continue
            key = self._key(RESOURCES[plural], change.new)
            if change.old is None:
                objects.pop(key, None)
            else:
                objects[key] = change.old
        return [copy.deepcopy(objects[key]) for key in sorted(objects) if not namespace or key[0] == namespace]

    def compact(self) -> None:
        """Forget the history, as etcd does every few minutes."""
        self.version += 1
        self.compacted = self.version
        self._history.clear()

    def record_event(
        self,
        involved: Object,
        type_: str,
        reason: str,
        message: str,
        component: str,
        *,
        host: str = "",
        field_path: str = "",
        action: str = "",
    ) -> Object:
        """Record a v1 Event; the same words about the same object again raise its count.

        Args:
            involved: The object that the event is about.
            type_: `Normal` or `Warning`.
            reason: One word in capitals.
            message: What people read.
            component: The reporting controller.
            host: Its node, for kubelets.
            field_path: Part of the object, e.g. `spec.containers{trainer}`.
            action: Set by reporters of `events.k8s.io` (the scheduler): they leave counts and first times out.
        """
        about = _reference(involved, field_path)
        now, meta = self.clock.now(), involved["metadata"]
        namespace = meta.get("namespace") or "default"
        for event in self._objects["events"].values():
            same = event["involvedObject"].get("uid") == about.get("uid") and event["reason"] == reason
            same = same and event["message"] == message and event["involvedObject"].get("fieldPath", "") == field_path
            if same and not action and event["source"].get("component") == component:
                again = copy.deepcopy(event)
                again["count"] = event["count"] + 1
                again["lastTimestamp"] = stamp(now)
                return self.update("events", again)
        event: Object = {
            "metadata": {"name": f"{meta['name']}.{time.time_ns():x}", "namespace": namespace},
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": type_,
            "reportingComponent": component,
            "reportingInstance": host,
        }
        if action:
            times: Object = {"source": {}, "firstTimestamp": None, "lastTimestamp": None, "action": action}
            return self.create("events", {**event, **times, "eventTime": micro_stamp(now)})
        source = {"component": component, **({"host": host} if host else {})}
        times = {"source": source, "firstTimestamp": stamp(now), "lastTimestamp": stamp(now), "count": 1}
        return self.create("events", {**event, **times, "eventTime": None})

    def _key(self, resource: Resource, obj: Object) -> tuple[str, str]:
        meta = obj["metadata"]
        return (meta.get("namespace") or "" if resource.namespaced else "", meta["name"])

    def check_version(self, resource: Resource, old: Object, obj: Object) -> None:
        """Refuse an object that was read before the newest write.

        Raises:
            ApiError: 409 Conflict.
        """
        version = obj["metadata"].get("resourceVersion")
        if version and version not in ("0", old["metadata"]["resourceVersion"]):
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise conflict(resource, obj["metadata"]["name"], why)

    def _merged(self, resource: Resource, old: Object, obj: Object, status: bool) -> Object:
        if status:
            new = copy.deepcopy(old)
            new["status"] = obj.get("status", {})
            return new
        meta = obj["metadata"]
        for key in _FIXED:
            meta.pop(key, None)
            if key in old["metadata"]:
                meta[key] = old["metadata"][key]
        if resource.namespaced:
            meta["namespace"] = old["metadata"]["namespace"]
        for key in ("finalizers", "labels", "annotations", "ownerReferences"):
            if key in meta and not meta[key]:
                del meta[key]
        if resource.status:
            obj.pop("status", None)
            if "status" in old:
                obj["status"] = copy.deepcopy(old["status"])
        return {"kind": resource.kind, "apiVersion": resource.api_version, **obj}

    def _preconditions(self, resource: Resource, old: Object, uid: str | None, version: str | None) -> None:
        meta, kind = old["metadata"], f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        details = _details(resource, meta["name"], resource.kind)
        prefix = f'Operation cannot be fulfilled on {kind} "{meta["name"]}": the'
        if uid and uid != meta["uid"]:
            why = f"does not match the UID in record ({meta['uid']}). The object might have been deleted and then"
            raise failure(409, "Conflict", f"{prefix} UID in the precondition ({uid}) {why} recreated", details)
        if version and version != meta["resourceVersion"]:
            why = f"does not match the ResourceVersion in record ({meta['resourceVersion']}). The object might have"
            message = f"{prefix} ResourceVersion in the precondition ({version}) {why} been modified"
            raise failure(409, "Conflict", message, details)

    def _terminate(self, resource: Resource, old: Object, dry_run: bool) -> Object:
        """A namespace stays, Terminating, until its controller has emptied and removed it."""
        if "deletionTimestamp" in old["metadata"]:
            return copy.deepcopy(old)
        new = copy.deepcopy(old)
        new["metadata"]["deletionTimestamp"] = stamp(self.clock.now())
        new["status"] = {**new.get("status", {}), "phase": "Terminating"}
        return new if dry_run else self._write(resource, "MODIFIED", new, old)

    def _mark(self, obj: Object, seconds: int) -> bool:
        meta = obj["metadata"]
        if "deletionTimestamp" in meta and seconds >= meta.get("deletionGracePeriodSeconds", 0):
            return False
        begun = datetime.now(UTC)
        if "deletionTimestamp" in meta:
            end = datetime.fromisoformat(meta["deletionTimestamp"])
            begun = end - timedelta(seconds=meta["deletionGracePeriodSeconds"])
        meta["deletionTimestamp"] = stamp(begun + timedelta(seconds=seconds))
        meta["deletionGracePeriodSeconds"] = seconds
        return True

    def _end(self, resource: Resource, gone: Object, old: Object) -> Object:
        del self._objects[resource.plural][self._key(resource, old)]
        return self._publish(resource, "DELETED", gone, old)

    def _write(self, resource: Resource, type_: str, obj: Object, old: Object | None) -> Object:
        self._objects[resource.plural][self._key(resource, obj)] = obj
        return self._publish(resource, type_, obj, old)

    def _publish(self, resource: Resource, type_: str, obj: Object, old: Object | None) -> Object:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, resource.plural, type_, obj, old)
        self._history.append(change)
        if len(self._history) > _HISTORY:
            self.compacted = self._history.popleft().version
        for queue in self._changes:
            queue.put_nowait(change)
        for queue in self._queues:
            queue.put_nowait((resource.plural, type_, copy.deepcopy(obj)))
        return copy.deepcopy(obj)


def _counted(plural: str, obj: Object) -> Object:
    """The part of an object whose changes count as a generation; binding a pod to a node does not count."""
    counted = {key: value for key, value in obj.items() if key not in ("metadata", "status")}
    if plural == "pods":
        counted["spec"] = {key: value for key, value in obj["spec"].items() if key != "nodeName"}
    return counted


def _grace(plural: str, obj: Object, asked: int | None) -> int:
    if plural != "pods":
        return 0
    ended = obj.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if ended or not obj["spec"].get("nodeName"):
        return 0
    if asked is not None:
        return max(asked, 0)
    return obj["spec"].get("terminationGracePeriodSeconds", 30)


def _propagate(plural: str, obj: Object, propagation: str | None) -> bool:
    if propagation is None:
        propagation = "Orphan" if plural == "jobs" else "Background"
    wanted = {"Orphan": "orphan", "Foreground": "foregroundDeletion"}.get(propagation)
    meta = obj["metadata"]
    before = meta.get("finalizers", [])
    after = [f for f in before if f not in ("orphan", "foregroundDeletion")] + ([wanted] if wanted else [])
    if set(after) == set(before):
        return False
    meta["finalizers"] = after
    if not after:
        del meta["finalizers"]
    return True


def _reference(obj: Object, field_path: str) -> Object:
    meta = obj["metadata"]
    reference: Object = {"kind": obj["kind"], "apiVersion": obj["apiVersion"], "name": meta["name"]}
    for key in ("namespace", "uid", "resourceVersion"):
        if meta.get(key):
            reference[key] = meta[key]
    return {**reference, **({"fieldPath": field_path} if field_path else {})}


def owned_by(obj: Object, uid: str) -> bool:
    """Whether `uid` is among the owners of an object."""
    return any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences", ()))
