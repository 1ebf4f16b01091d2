"""What the launcher asks of an API server: plain documents, a deadline on every call, and faults told apart.

The `kubernetes` package reads kubeconfig and account, refreshes tokens and keeps the connections. Bodies are sent and
decoded here: its 36.0 returns a pod's log as the text `b'...'` (kubernetes-client/python#2596), and documents are what
the rest of the launcher works on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote, urlencode

from headway.training.launch import AttemptRefused, LaunchError, LauncherUnavailable

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import BaseHTTPResponse

CONNECT_S = 5.0
READ_S = 20.0
# A call that failed is not repeated once so much time went by: whoever waits for it has others to look after.
REPEAT_S = 10.0
WATCH_S = 30
_WATCH_MARGIN_S = 15.0
_PAUSES_S = (0.2, 0.5, 1.0)
_LONGEST_RETRY_AFTER_S = 5.0
_SAME_TIME_S = 2.0
_PAGE = 500

Document = dict[str, Any]

# plural -> (path before the namespace, in a namespace)
RESOURCES: Mapping[str, tuple[str, bool]] = {
    "jobs": ("/apis/batch/v1", True),
    "services": ("/api/v1", True),
    "pods": ("/api/v1", True),
    "events": ("/api/v1", True),
    "persistentvolumeclaims": ("/api/v1", True),
    "serviceaccounts": ("/api/v1", True),
    "nodes": ("/api/v1", False),
    "namespaces": ("/api/v1", False),
    "priorityclasses": ("/apis/scheduling.k8s.io/v1", False),
    "workloads": ("/apis/kueue.x-k8s.io/v1beta2", True),
    "localqueues": ("/apis/kueue.x-k8s.io/v1beta2", True),
    "clusterqueues": ("/apis/kueue.x-k8s.io/v1beta2", False),
    "workloadpriorityclasses": ("/apis/kueue.x-k8s.io/v1beta2", False),
    "selfsubjectaccessreviews": ("/apis/authorization.k8s.io/v1", False),
}

# (API group, resource) -> verbs: everything that the launcher itself does, and so all that its account needs.
PERMISSIONS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("batch", "jobs"): ("create", "get", "list", "watch", "patch", "delete"),
    ("", "services"): ("create", "get", "list", "delete"),
    ("", "pods"): ("get", "list", "watch", "delete"),
    ("", "pods/log"): ("get",),
    ("", "events"): ("list",),
}
QUEUE_PERMISSIONS: Mapping[tuple[str, str], tuple[str, ...]] = {("kueue.x-k8s.io", "workloads"): ("list",)}
# Cluster-wide and optional: without it a lost node is found by silence.
NODE_PERMISSIONS: Mapping[tuple[str, str], tuple[str, ...]] = {("", "nodes"): ("get",)}


class ClusterUnreachable(LauncherUnavailable):
    """The API server is away, overloaded, or answers with a fault of its own."""


class ObjectConflict(LaunchError):
    """409: an object of this name exists, is being deleted, or changed meanwhile."""


class ObjectMissing(LaunchError):
    """404: no such object, namespace or kind."""


class Forbidden(LaunchError):
    """401 or 403: the account may not do this."""


class ManifestRefused(AttemptRefused):
    """400, 422 or an admission rule: the server refuses the document; the message names its fields."""


class Gone(LaunchError):
    """410: the resourceVersion is too old; list again."""


@dataclass(frozen=True)
class Listing:
    """The objects of one list, and the version from which a watch goes on."""

    items: list[Document]
    version: str


@dataclass
class Watch:
    """One open watch: an iterator of (type, object); `close` ends it from any thread."""

    _response: BaseHTTPResponse
    closed: bool = field(default=False)

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        """Yield what happens until the server ends the watch.

        Raises:
            Gone: the version is too old.
            ClusterUnreachable: the connection broke; resume from the last version seen.
        """
        from urllib3.exceptions import HTTPError

        try:
            for line in _lines(self._response):
                if self.closed:
                    return
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(int(event["object"].get("code") or 500), event["object"], "watch", "", "")
                yield event["type"], event["object"]
        except (HTTPError, OSError, ValueError) as error:
            if not self.closed:
                raise ClusterUnreachable(f"the watch broke off: {error}", "it is resumed") from error
        finally:
            self._response.close()

    def close(self) -> None:
        """End the watch; a thread that waits in it goes on at once."""
        self.closed = True
        try:
            self._response.shutdown()
        except (ValueError, RuntimeError, OSError):
            # It ended by itself meanwhile.
            return


class Cluster(Protocol):
    """The verbs that the launcher uses; `ClusterClient` is the one over HTTP."""

    namespace: str

    @property
    def ahead_us(self) -> int:
        """Microseconds that the API server's clock is ahead of ours, as its newest answer showed."""
        ...

    def in_namespace(self, namespace: str) -> Cluster:
        """The same API server, seen from another namespace."""
        ...

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        """Lines of a container's log with their ends."""
        ...

    def get(self, resource: str, name: str) -> Document:
        """One object; raises `ObjectMissing`."""
        ...

    def list(self, resource: str, labels: str = "", fields: str = "") -> Listing:
        """All objects that the selectors choose."""
        ...

    def create(self, resource: str, body: Mapping[str, Any]) -> Document:
        """Make an object; raises `ObjectConflict`, `ManifestRefused`, `Forbidden`."""
        ...

    def patch(self, resource: str, name: str, body: Mapping[str, Any]) -> Document:
        """Merge-patch an object."""
        ...

    def delete(
        self, resource: str, name: str, *, uid: str = "", propagation: str = "Background", grace_s: int | None = None
    ) -> None:
        """Delete an object, only the one with `uid` where one is given; raises `ObjectMissing`, `ObjectConflict`."""
        ...

    def watch(self, resource: str, version: str, labels: str = "", timeout_s: int = WATCH_S) -> Watch:
        """Follow changes after `version`, with bookmarks."""
        ...


class ClusterClient:
    """Calls one API server; namespaced resources are those of `namespace`. Threads may share it.

    It connects when it is first used: by the kubeconfig (`context`, KUBECONFIG as it is now), or by the account of the
    pod that this runs in.
    """

    def __init__(self, context: str = "", namespace: str = "default") -> None:
        self.namespace = namespace
        self._context = context
        self._kubeconfig = os.environ.get("KUBECONFIG")
        self._connected: ApiClient | None = None
        self._ahead_us = 0

    @property
    def ahead_us(self) -> int:
        """Microseconds that the API server's clock is ahead of ours; less than a second either way counts as none."""
        return self._ahead_us

    def in_namespace(self, namespace: str) -> ClusterClient:
        """Return a client of the same API server for another namespace."""
        client = ClusterClient(self._context, namespace)
        client._kubeconfig = self._kubeconfig
        client._connected = self._connected
        return client

    @property
    def _api(self) -> ApiClient:
        if self._connected is None:
            self._connected = _connect(self._context, self._kubeconfig)
        return self._connected

    def get(self, resource: str, name: str) -> Document:
        """Return one object.

        Raises:
            ObjectMissing: there is none.
        """
        return self._json("GET", resource, name)

    def list(self, resource: str, labels: str = "", fields: str = "") -> Listing:
        """Return all objects that the selectors choose, page by page."""
        while True:
            try:
                return self._pages(resource, _given(labelSelector=labels, fieldSelector=fields, limit=_PAGE))
            except Gone:
                # The pages grew too old while they were read.
                continue

    def _pages(self, resource: str, query: dict[str, Any]) -> Listing:
        items: list[Document] = []
        while True:
            page = self._json("GET", resource, query=query)
            items += page["items"] or []
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return Listing(items, metadata["resourceVersion"])
            query = {**query, "continue": metadata["continue"]}

    def create(self, resource: str, body: Mapping[str, Any]) -> Document:
        """Create an object; fields that the server does not know are refused.

        A call that was cut off is repeated, so that `ObjectConflict` may mean this caller's own object: look.

        Raises:
            ObjectConflict: one of this name exists.
            ManifestRefused: the server refuses the document.
            Forbidden: the account may not.
        """
        return self._json("POST", resource, body=body, query={"fieldValidation": "Strict"})

    def patch(self, resource: str, name: str, body: Mapping[str, Any]) -> Document:
        """Merge `body` into an object (RFC 7386)."""
        return self._json("PATCH", resource, name, body=body, content="application/merge-patch+json")

    def delete(
        self, resource: str, name: str, *, uid: str = "", propagation: str = "Background", grace_s: int | None = None
    ) -> None:
        """Delete an object; without `propagation` a Job's pods would be orphaned.

        Raises:
            ObjectMissing: there is none.
            ObjectConflict: the one of this name has another uid.
        """
        options = _given(propagationPolicy=propagation, gracePeriodSeconds=grace_s)
        if uid:
            options["preconditions"] = {"uid": uid}
        self._json("DELETE", resource, name, body=options)

    def watch(self, resource: str, version: str, labels: str = "", timeout_s: int = WATCH_S) -> Watch:
        """Open a watch of what changes after `version`; the server ends it after `timeout_s` seconds."""
        query = _given(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=version,
            labelSelector=labels,
            timeoutSeconds=timeout_s,
        )
        # A server that says nothing at all, not even that the watch is over, is not there.
        return Watch(self._open("GET", self._path(resource), query=query, read_s=timeout_s + _WATCH_MARGIN_S))

    def pod_log(
        self,
        pod: str,
        container: str,
        *,
        since_time: str = "",
        follow: bool = False,
        timestamps: bool = False,
        read_s: float = READ_S,
    ) -> Iterator[bytes]:
        """Yield a container's log line by line, as bytes with their line ends; a torn last line comes as it is.

        Raises:
            ObjectMissing: the pod is gone.
            ManifestRefused: the container has not started.
            ClusterUnreachable: the node does not answer, or the connection broke, or nothing came for `read_s` seconds.
        """
        from urllib3.exceptions import HTTPError

        query = _given(
            container=container,
            sinceTime=since_time,
            follow="true" if follow else "",
            timestamps="true" if timestamps else "",
        )
        response = self._open("GET", f"{self._path('pods', pod)}/log", query=query, read_s=read_s)
        try:
            yield from _lines(response, keep_ends=True)
        except (HTTPError, OSError) as error:
            raise ClusterUnreachable(f"the log of pod {pod} broke off: {error}", "read on from its cursor") from error
        finally:
            response.close()

    def raw(self, path: str) -> Document:
        """Return the document at an absolute path, such as `/apis` or `/version`."""
        return self._decoded(self._call("GET", path))

    def close(self) -> None:
        """Close idle connections."""
        if self._connected is not None:
            self._connected.rest_client.pool_manager.clear()

    def _path(self, resource: str, name: str = "") -> str:
        prefix, namespaced = RESOURCES[resource]
        place = f"/namespaces/{quote(self.namespace, safe='')}" if namespaced else ""
        return f"{prefix}{place}/{resource}" + (f"/{quote(name, safe='')}" if name else "")

    def _json(
        self,
        method: str,
        resource: str,
        name: str = "",
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> Document:
        return self._decoded(self._call(method, self._path(resource, name), body=body, query=query, content=content))

    def _decoded(self, response: BaseHTTPResponse) -> Document:
        try:
            return cast("Document", json.loads(response.data))
        except ValueError as error:
            raise ClusterUnreachable(
                f"the API server answered {response.data[:80]!r}, which is no JSON", "is it an API server?"
            ) from error

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> BaseHTTPResponse:
        """One call with its whole answer, repeated when the fault may pass: every call here may be made twice."""
        began_s = time.monotonic()
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._once(method, path, body=body, query=query, content=content)
            except _Passing as fault:
                if pause_s is None or time.monotonic() - began_s > REPEAT_S:
                    raise fault.error from fault
                time.sleep(max(pause_s, fault.after_s))
        raise AssertionError("unreachable")

    def _once(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        content: str = "application/json",
        read_s: float = READ_S,
        whole: bool = True,
    ) -> BaseHTTPResponse:
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        headers: dict[str, str] = {"Accept": "application/json, */*", "User-Agent": "headway"}
        if body is not None:
            headers["Content-Type"] = content
        try:
            self._api.update_params_for_auth(headers, [], ["BearerToken"])
            response = self._api.rest_client.pool_manager.request(
                method,
                f"{self._api.configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=Timeout(connect=CONNECT_S, read=read_s),
                retries=False,
                preload_content=whole,
            )
            self._compare_clocks(response.headers.get("Date"))
            if 200 <= response.status < 300:
                return response
            status = _status(response.data)
        except (HTTPError, OSError) as error:
            where = f"{method} {path}: {type(error).__name__}: {error}"
            unreachable = ClusterUnreachable(f"the API server does not answer: {where}", "it is asked again")
            raise _Passing(unreachable) from error
        fault = _error(response.status, status, _verb(method, path), path, self.namespace)
        if isinstance(fault, ClusterUnreachable):
            raise _Passing(fault, min(_seconds(response.headers.get("Retry-After")), _LONGEST_RETRY_AFTER_S)) from None
        raise fault

    def _compare_clocks(self, date: str | None) -> None:
        """Take the server's time from its answer; it tells whole seconds, and the answer was a while on its way."""
        try:
            ahead_s = parsedate_to_datetime(date or "").timestamp() - time.time()
        except ValueError:
            # Not every proxy sends one.
            return
        self._ahead_us = int(ahead_s * 1_000_000) if abs(ahead_s) > _SAME_TIME_S else 0

    def _open(self, method: str, path: str, *, query: Mapping[str, Any], read_s: float) -> BaseHTTPResponse:
        try:
            return self._once(method, path, query=query, read_s=read_s, whole=False)
        except _Passing as fault:
            raise fault.error from fault


def _connect(context: str, kubeconfig: str | None) -> ApiClient:
    from kubernetes import client, config
    from kubernetes.config import ConfigException

    settings = client.Configuration()
    try:
        if context or kubeconfig or "KUBERNETES_SERVICE_HOST" not in os.environ:
            config.load_kube_config(kubeconfig, context or None, settings)
        else:
            config.load_incluster_config(client_configuration=settings)
    except (ConfigException, OSError) as error:
        raise ClusterUnreachable(
            f"no cluster is configured: {error}",
            "set KUBECONFIG and the profile's `context`, or run inside the cluster",
        ) from error
    settings.connection_pool_maxsize = 32
    return client.ApiClient(settings)


class _Passing(Exception):
    """A fault that may pass: `error` is what becomes of it when it does not, `after_s` what the server asks for."""

    def __init__(self, error: ClusterUnreachable, after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s


def _given(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value != ""}


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else 0.0


def _status(data: bytes) -> Document:
    """The Status document of a refusal; a proxy or a dying server may have written anything."""
    try:
        found: object = json.loads(data)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return cast("Document", found)
    return {"message": data[:200].decode("utf-8", "backslashreplace")}


def _verb(method: str, path: str) -> str:
    named = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
    return named.get(method, "get" if path.rsplit("/", 1)[-1] not in RESOURCES else "list")


def _error(code: int, status: Document, verb: str, path: str, namespace: str) -> LaunchError:
    message = str(status.get("message") or f"status {code}")
    if code == 404:
        return ObjectMissing(message, f"look whether namespace {namespace!r} and the kind exist in this cluster")
    if code == 409:
        return ObjectConflict(message, "look at the object that is there")
    if code == 410:
        return Gone(message, "list again")
    if code == 401:
        return Forbidden(f"the API server does not know this account: {message}", "renew the token or the kubeconfig")
    if code == 403 and "exceeded quota" in message:
        # A ResourceQuota of the namespace is full now; what others hold comes free.
        return ClusterUnreachable(message, "it is tried again; raise the namespace's ResourceQuota if it never fits")
    if code == 403 and "admission webhook" not in message:
        resource = path.split("/namespaces/", 1)[-1].split("/")[1:2] or [path.rsplit("/", 1)[-1]]
        return Forbidden(
            f"the account may not {verb} {resource[0] or 'this'} in namespace {namespace!r}: {message}",
            "give its Role the verbs of deploy/charts/headway; `headway doctor --cluster` lists what is missing",
        )
    if code in (400, 403, 413, 415, 422):
        causes = cast("list[Document]", (status.get("details") or {}).get("causes") or [])
        fields = [f"{cause['field']}: {cause.get('message', '')}" for cause in causes if cause.get("field")]
        return ManifestRefused("\n".join(fields) or message, "mend the platform profile or the run spec")
    return ClusterUnreachable(f"the API server answered {code} to {verb} {path}: {message}", "it is asked again")


def _lines(response: BaseHTTPResponse, *, keep_ends: bool = False) -> Iterator[bytes]:
    """Lines as they arrive; a line is whole when its end was read, whatever pieces it came in."""
    pending = b""
    for piece in response.stream(1 << 16):
        *whole, pending = (pending + piece).split(b"\n")
        for line in whole:
            yield line + b"\n" if keep_ends else line
    if pending:
        yield pending
