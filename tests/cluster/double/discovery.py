"""Discovery: /version, /api, /apis and the resource lists."""

import base64
import hashlib

from tests.cluster.double.store import RESOURCES, Object, Resource

VERSION: Object = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "98b35193b2ac7a23a673325f5e9b830ecd5ba406",
    "gitTreeState": "clean",
    "buildDate": "2026-08-01T00:00:00Z",
    "goVersion": "go1.26.6",
    "compiler": "gc",
    "platform": "linux/amd64",
}
# What a cluster always has, in the order of /apis; requests below a group that the double does not model get a 501.
GROUPS = {
    "apiregistration.k8s.io": ("v1",),
    "apps": ("v1",),
    "events.k8s.io": ("v1",),
    "authentication.k8s.io": ("v1",),
    "authorization.k8s.io": ("v1",),
    "autoscaling": ("v2", "v1"),
    "batch": ("v1",),
    "certificates.k8s.io": ("v1",),
    "networking.k8s.io": ("v1",),
    "policy": ("v1",),
    "rbac.authorization.k8s.io": ("v1",),
    "storage.k8s.io": ("v1",),
    "admissionregistration.k8s.io": ("v1",),
    "apiextensions.k8s.io": ("v1",),
    "scheduling.k8s.io": ("v1",),
    "coordination.k8s.io": ("v1",),
    "node.k8s.io": ("v1",),
    "discovery.k8s.io": ("v1",),
    "resource.k8s.io": ("v1",),
    "flowcontrol.apiserver.k8s.io": ("v1",),
}
_CORE = "bindings componentstatuses endpoints limitranges podtemplates replicationcontrollers resourcequotas"
UNMODELLED = {"": tuple(_CORE.split()), "batch": ("cronjobs",)}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_STATUS_VERBS = ["get", "patch", "update"]
_POD_PARTS = (
    {"name": "pods/binding", "kind": "Binding", "verbs": ["create"]},
    {"name": "pods/eviction", "group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]},
    {"name": "pods/log", "kind": "Pod", "verbs": ["get"]},
)
_TOKEN = {"name": "serviceaccounts/token", "group": "authentication.k8s.io", "version": "v1", "kind": "TokenRequest"}
REVIEWS = {
    "authentication.k8s.io": (("selfsubjectreviews", "SelfSubjectReview"),),
    "authorization.k8s.io": (
        ("selfsubjectaccessreviews", "SelfSubjectAccessReview"),
        ("selfsubjectrulesreviews", "SelfSubjectRulesReview"),
        ("subjectaccessreviews", "SubjectAccessReview"),
    ),
}


def groups(custom: bool) -> dict[str, tuple[str, ...]]:
    """Every group with its versions; `custom` adds those that CustomResourceDefinitions declare."""
    extra = {r.group: (r.version,) for r in RESOURCES.values() if r.custom} if custom else {}
    return {**GROUPS, **extra}


def _group(name: str, versions: tuple[str, ...]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _entries(resource: Resource) -> list[Object]:
    verbs = [v for v in _VERBS if v != "deletecollection"] if resource.plural == "namespaces" else _VERBS
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": verbs,
    }
    if resource.short:
        entry["shortNames"] = list(resource.short)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    key = f"{resource.group}/{resource.version}/{resource.kind}".encode()
    entry["storageVersionHash"] = base64.b64encode(hashlib.sha256(key).digest()[:8]).decode()
    found = [entry]
    common: Object = {"singularName": "", "namespaced": resource.namespaced}
    if resource.plural == "pods":
        found += [{**common, **part} for part in _POD_PARTS]
    if resource.plural == "serviceaccounts":
        found.append({**common, **_TOKEN, "verbs": ["create"]})
    if resource.plural == "namespaces":
        found.append({**common, "name": "namespaces/finalize", "kind": "Namespace", "verbs": ["update"]})
    if resource.status:
        status = {"name": f"{resource.plural}/status", "kind": resource.kind, "verbs": _STATUS_VERBS}
        found.append({**common, **status})
    return found


def resource_list(group: str, version: str) -> Object:
    """The APIResourceList of one group and version."""
    own = [r for r in RESOURCES.values() if (r.group, r.version) == (group, version)]
    entries = [entry for resource in own for entry in _entries(resource)]
    if group == "events.k8s.io":
        entries = [e for e in _entries(RESOURCES["events"]) if e["name"] == "events"]
    for plural, kind in REVIEWS.get(group, ()):
        name = {"name": plural, "singularName": kind.lower(), "namespaced": False, "kind": kind, "verbs": ["create"]}
        entries.append(name)
    if not group:
        entries.append({"name": "bindings", "singularName": "binding", "namespaced": True, "kind": "Binding"})
        entries[-1]["verbs"] = ["create"]
    entries.sort(key=lambda entry: entry["name"])
    qualified = f"{group}/{version}" if group else version
    listed: Object = {"kind": "APIResourceList", "groupVersion": qualified, "resources": entries}
    return listed if not group else {**listed, "apiVersion": "v1"}


def definition(resource: Resource, now: str) -> Object:
    """The CustomResourceDefinition of a custom resource, established at `now`; its schema accepts everything."""
    names: Object = {"plural": resource.plural, "singular": resource.kind.lower(), "kind": resource.kind}
    names |= {"listKind": f"{resource.kind}List", "shortNames": list(resource.short)}
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version: Object = {"name": resource.version, "served": True, "storage": True, "schema": anything}
    scope = "Namespaced" if resource.namespaced else "Cluster"
    spec = {"group": resource.group, "names": names, "scope": scope, "versions": [version]}
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now, "reason": reason, "message": message}
        for kind, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    status = {"conditions": conditions, "acceptedNames": names, "storedVersions": [resource.version]}
    return {"metadata": {"name": resource.qualified}, "spec": spec, "status": status}


def answer(path: str, address: str, custom: bool) -> Object | None:
    """The discovery document at `path`, None when there is none.

    Args:
        path: Path of the request.
        address: `host:port` of the API server.
        custom: Whether custom resources are installed.
    """
    parts = path.strip("/").split("/")
    known = groups(custom)
    if path == "/version":
        return VERSION
    if path == "/api":
        addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}
    if path == "/api/v1":
        return resource_list("", "v1")
    if path == "/apis":
        listed = [_group(name, versions) for name, versions in known.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in known:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], known[parts[1]])}
    if parts[0] == "apis" and len(parts) == 3 and parts[2] in known.get(parts[1], ()):
        return resource_list(parts[1], parts[2])
    return None
