"""Garbage collection by owner references, and what every namespace has and loses.

Source: `pkg/controller/garbagecollector` and `pkg/controller/namespace` of Kubernetes.
"""

import asyncio

from tests.cluster.double.store import RESOURCES, ApiError, Object, Store, owned_by

_ABSENT = 1.0
# Seconds until it acts on dependents of what is deleted: a client's next request comes before. Without any it is done
# at once.
_REACTION = 0.3
_CERTIFICATE_WORDS = (
    "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the "
    "internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes "
    "clusters."
)


class Collector:
    """Deletes what has lost its owners, and finishes foreground and orphaning deletions."""

    def __init__(self, store: Store, certificate: str) -> None:
        """Work on `store`; `certificate` is the authority that every namespace's pods trust."""
        self._store, self._certificate = store, certificate

    async def run(self) -> None:
        """Follow every object."""
        changes = self._store.subscribe()
        for plural in RESOURCES:
            for obj in self._store.list(plural):
                self._see(plural, "ADDED", obj)
        while True:
            plural, kind, obj = await changes.get()
            self._see(plural, kind, obj)

    def _see(self, plural: str, kind: str, obj: Object) -> None:
        meta = obj["metadata"]
        if plural == "namespaces" and kind != "DELETED":
            self._namespace(obj)
        if plural == "events":
            return
        if kind == "DELETED":
            self._orphaned(meta["uid"])
            for owner in meta.get("ownerReferences", ()):
                self._finish_foreground(owner["uid"])
            return
        if "deletionTimestamp" in meta:
            if {"orphan", "foregroundDeletion"} & set(meta.get("finalizers", ())):
                wait = _REACTION if self._dependents(meta["uid"]) else 0.0
                asyncio.get_running_loop().call_later(wait, self._going, plural, obj)
        elif kind == "ADDED" and meta.get("ownerReferences"):
            loop = asyncio.get_running_loop()
            key = (plural, meta.get("namespace", ""), meta["name"])
            loop.call_later(_ABSENT / self._store.clock.scale, self._check, *key)

    def _going(self, plural: str, obj: Object) -> None:
        if "orphan" in obj["metadata"]["finalizers"]:
            self._release(plural, obj)
        else:
            self._foreground(plural, obj)

    def _find(self, uid: str) -> tuple[str, Object] | None:
        for plural in RESOURCES:
            for obj in self._store.peek(plural):
                if obj["metadata"]["uid"] == uid:
                    return plural, obj
        return None

    def _dependents(self, uid: str) -> list[tuple[str, Object]]:
        return [(plural, obj) for plural in RESOURCES for obj in self._store.list(plural) if owned_by(obj, uid)]

    def _orphaned(self, uid: str) -> None:
        for plural, obj in self._dependents(uid):
            self._check(plural, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])

    def _check(self, plural: str, namespace: str, name: str) -> None:
        """Delete an object whose owners are all gone; else drop the owners that are."""
        obj = self._store.get(plural, namespace, name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            return
        owners = obj["metadata"].get("ownerReferences", [])
        solid = [owner for owner in owners if self._exists(owner, namespace)]
        if not owners or len(solid) == len(owners):
            return
        if solid:
            obj["metadata"]["ownerReferences"] = solid
            self._store.update(plural, obj)
        else:
            self._delete(plural, obj, "Background")

    def _exists(self, owner: Object, namespace: str) -> bool:
        found = self._find(owner["uid"])
        return found is not None and found[1]["metadata"].get("namespace", "") in ("", namespace)

    def _delete(self, plural: str, obj: Object, propagation: str) -> None:
        meta = obj["metadata"]
        try:
            self._store.delete(
                plural, meta.get("namespace", ""), meta["name"], propagation=propagation, uid=meta["uid"]
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _release(self, plural: str, obj: Object) -> None:
        """Orphaning: the dependents lose this owner, then the object its finalizer."""
        uid = obj["metadata"]["uid"]
        for kind, dependent in self._dependents(uid):
            references = dependent["metadata"]["ownerReferences"]
            dependent["metadata"]["ownerReferences"] = [one for one in references if one["uid"] != uid]
            dependent["metadata"].pop("resourceVersion")
            self._store.update(kind, dependent)
        self._drop(plural, obj, "orphan")

    def _foreground(self, plural: str, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        for kind, dependent in self._dependents(uid):
            if "deletionTimestamp" not in dependent["metadata"] and not self._other_owner(dependent, uid):
                # A Service has a dependent that the double does not model: its EndpointSlice.
                owner = kind == "services" or self._dependents(dependent["metadata"]["uid"])
                self._delete(kind, dependent, "Foreground" if owner else "Background")
        self._finish_foreground(uid)

    def _other_owner(self, obj: Object, uid: str) -> bool:
        for owner in obj["metadata"]["ownerReferences"]:
            found = self._find(owner["uid"]) if owner["uid"] != uid else None
            if found is not None and "deletionTimestamp" not in found[1]["metadata"]:
                return True
        return False

    def _finish_foreground(self, uid: str) -> None:
        found = self._find(uid)
        if found is None or "foregroundDeletion" not in found[1]["metadata"].get("finalizers", ()):
            return
        blocking = [
            obj
            for _, obj in self._dependents(uid)
            if any(one["uid"] == uid and one.get("blockOwnerDeletion") for one in obj["metadata"]["ownerReferences"])
        ]
        if not blocking:
            self._drop(*found, "foregroundDeletion")

    def _drop(self, plural: str, obj: Object, finalizer: str) -> None:
        meta = obj["metadata"]
        found = self._store.get(plural, meta.get("namespace", ""), meta["name"])
        if found is not None and finalizer in found["metadata"].get("finalizers", ()):
            found["metadata"]["finalizers"].remove(finalizer)
            self._store.update(plural, found)

    def _namespace(self, namespace: Object) -> None:
        """A new namespace gets its service account and certificate; one that is deleted is emptied and removed."""
        name = namespace["metadata"]["name"]
        if "deletionTimestamp" in namespace["metadata"]:
            self._empty(name)
            return
        wanted = [("serviceaccounts", {"metadata": {"name": "default", "namespace": name}})]
        certificate = {
            "metadata": {
                "name": "kube-root-ca.crt",
                "namespace": name,
                "annotations": {"kubernetes.io/description": _CERTIFICATE_WORDS},
            },
            "data": {"ca.crt": self._certificate},
        }
        for plural, obj in [*wanted, ("configmaps", certificate)]:
            if self._store.get(plural, name, obj["metadata"]["name"]) is None:
                self._store.create(plural, obj)

    def _empty(self, name: str) -> None:
        left = 0
        for plural, resource in RESOURCES.items():
            if not resource.namespaced:
                continue
            for obj in self._store.list(plural, name):
                self._delete(plural, obj, "Background")
            left += len(self._store.list(plural, name)) if plural != "events" else 0
        if left:
            loop = asyncio.get_running_loop()
            loop.call_later(0.3, self._empty_again, name)
            return
        self._store.remove("namespaces", "", name)

    def _empty_again(self, name: str) -> None:
        found = self._store.get("namespaces", "", name)
        if found is not None and "deletionTimestamp" in found["metadata"]:
            self._empty(name)


async def run(store: Store, certificate: str) -> None:
    """Run the garbage collector and the namespace controller."""
    await Collector(store, certificate).run()
