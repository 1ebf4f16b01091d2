"""The API server of the double: an ASGI application over the store."""

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import yaml
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tests.cluster.double import discovery, patch, schema, validation, watch
from tests.cluster.double.access import Access, Action, User, review
from tests.cluster.double.faults import Faults, HttpFault
from tests.cluster.double.logs import PodLogs
from tests.cluster.double.store import (
    RESOURCES,
    ApiError,
    Object,
    Resource,
    Store,
    conflict,
    failure,
    not_found,
    random_suffix,
    stamp,
)

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_HEALTH = ("/healthz", "/readyz", "/livez")
_MEDIA = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
_ORPHAN_WARNING = (
    "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set "
    "propagationPolicy=Orphan to suppress this warning"
)
_BODY_LIMIT = 3 * 1024 * 1024
_GRACE_WARNING = "must be >= 0; negative values are invalid and will be treated as 1"
_EVENT_NAMES = {
    "involvedObject": "regarding",
    "message": "note",
    "reportingComponent": "reportingController",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
}

# (CREATE | UPDATE, plural, object, object before) -> object; raises ApiError.
Webhook = Callable[[str, str, Object, Object | None], Object]


class _Cut(Exception):
    """The connection is to be closed without an answer."""


class Target(NamedTuple):
    """What the path of a request names.

    Attributes:
        resource: None for a path of no resource.
        group: API group of the path.
        version: API version of the path.
        plural: Resource of the path, also when it is not known.
        namespace: Namespace, empty for none.
        name: Object, empty for the collection.
        subresource: Part of the object, empty for none.
    """

    resource: Resource | None
    group: str
    version: str
    plural: str
    namespace: str
    name: str
    subresource: str


def target_of(path: str) -> Target | None:
    """Read a path; None when it is no path of a resource."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "", "")[:3]
    known = RESOURCES.get(plural)
    if group == "events.k8s.io" and plural == "events":
        return Target(known, group, version, plural, namespace, name, subresource)
    found = known if known and (known.group, known.version) == (group, version) else None
    if plural == "namespaces":
        namespace = name
    return Target(found, group, version, plural, namespace, name, subresource)


@dataclass
class Reply:
    """An answer that is not streamed."""

    status: int
    body: Object | str
    warnings: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """As Starlette sends it."""
        text = isinstance(self.body, str)
        content = self.body if text else json.dumps(self.body, separators=(",", ":"), ensure_ascii=False)
        media = "text/plain; charset=utf-8" if text else "application/json"
        answer = Response(content, self.status, self.headers, media_type=None)
        answer.headers["content-type"] = media
        for warning in self.warnings:
            quoted = warning.replace("\\", "\\\\").replace('"', '\\"')
            answer.headers.append("Warning", f'299 - "{quoted}"')
        return answer


Answer = Reply | Response


class Server:
    """The ASGI application.

    Attributes:
        store: Every object.
        access: Tokens and rights.
        faults: The fault file.
        logs: Logs of containers; None = no kubelets.
        webhook: Admission by Kueue; None = it is not installed.
        address: `host:port` that discovery tells.
    """

    def __init__(self, store: Store, access: Access, faults: Faults) -> None:
        """Serve `store`."""
        self.store, self.access, self.faults = store, access, faults
        self.logs: PodLogs | None = None
        self.webhook: Webhook | None = None
        self.address = ""
        self._services = 0
        self._compaction = faults.compaction()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if self.faults.compaction() != self._compaction:
            self._compaction = self.faults.compaction()
            self.store.compact()
        try:
            answer = await self._with_faults(request)
            await (answer.response() if isinstance(answer, Reply) else answer)(scope, receive, send)
        except ClientDisconnect:
            return
        except _Cut:
            # Only uvicorn's own cycle knows the transport; ASGI has no message for "hang up without an answer".
            send.__self__.transport.abort()  # type: ignore[attr-defined]

    async def _with_faults(self, request: Request) -> Answer:
        if self.faults.away():
            raise _Cut
        watching = request.query_params.get("watch") in ("true", "1")
        rule = self.faults.http("WATCH" if watching else request.method, request.url.path)
        if rule is None:
            return await self._answer(request)
        if rule.do in ("slow", "timeout"):
            await asyncio.sleep(rule.seconds)
        if rule.do in ("after_error", "after_drop"):
            await self._answer(request)
        if rule.do in ("drop", "after_drop", "timeout"):
            raise _Cut
        if rule.do == "gone":
            line = json.dumps({"type": "ERROR", "object": failure(410, "Expired", "too old resource version").body})
            return Response(line + "\n", 200, media_type="application/json")
        return await self._answer(request) if rule.do == "slow" else _broken(rule)

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._dispatch(request)
        except ApiError as error:
            warnings = error.body.pop("warnings", [])
            return Reply(error.status, error.body, warnings, error.headers)

    async def _dispatch(self, request: Request) -> Answer:
        path, user = request.url.path, self.access.authenticate(request.headers.get("authorization"))
        target = target_of(path)
        if target is None:
            return self._plain(request, user, path)
        self._authorize(request, user, target)
        reviews = dict(discovery.REVIEWS.get(target.group, ()))
        if target.plural in reviews and request.method == "POST":
            return await self._review(request, user, reviews[target.plural], target)
        if target.resource is None or (target.resource.custom and not self.webhook):
            return self._unknown(target)
        if target.subresource:
            return await self._part(request, target, target.resource)
        handlers = _ITEM if target.name else _COLLECTION
        handler = handlers.get(request.method)
        if target.plural == "namespaces" and handler is _COLLECTION["DELETE"]:
            handler = None
        if handler is None:
            message = "the server does not allow this method on the requested resource"
            raise failure(405, "MethodNotAllowed", message, {})
        if target.group == "events.k8s.io" and request.method != "GET":
            raise _not_modelled(f"{request.method} of {path}")
        return await handler(self, request, target, target.resource)

    def _plain(self, request: Request, user: User, path: str) -> Reply:
        self.access.authorize(user, Action(request.method.lower(), path=path))
        if path.rstrip("/") in _HEALTH:
            if "verbose" not in request.query_params:
                return Reply(200, "ok")
            return Reply(200, f"[+]ping ok\n[+]log ok\n[+]etcd ok\n{path.strip('/')} check passed\n")
        if path.startswith("/openapi"):
            raise _not_modelled("OpenAPI")
        found = discovery.answer(path.rstrip("/"), self.address, self.webhook is not None)
        return Reply(200, found) if found is not None else Reply(404, "404 page not found\n")

    def _authorize(self, request: Request, user: User, target: Target) -> None:
        verb = _VERBS.get(request.method, request.method.lower())
        if not target.name:
            watching = request.query_params.get("watch") in ("true", "1")
            verb = {"get": "watch" if watching else "list", "delete": "deletecollection"}.get(verb, verb)
        place = (target.group, target.plural, target.subresource, target.namespace, target.name)
        self.access.authorize(user, Action(verb, *place))

    def _unknown(self, target: Target) -> Reply:
        known = discovery.groups(self.webhook is not None)
        core = not target.group and target.version == "v1"
        if not core and target.version not in known.get(target.group, ()):
            return Reply(404, "404 page not found\n")
        modelled = not target.group or any(r.group == target.group for r in RESOURCES.values())
        if modelled and target.plural not in discovery.UNMODELLED.get(target.group, ()):
            raise failure(404, "NotFound", "the server could not find the requested resource", {})
        raise _not_modelled(f"{target.group}/{target.version} {target.plural}".lstrip("/"))

    # --- reading ----------------------------------------------------------------------------------------------

    async def _get(self, request: Request, target: Target, resource: Resource) -> Answer:
        obj = self._existing(resource, target)
        return Reply(200, _as_events_api(obj) if target.group == "events.k8s.io" else obj)

    async def _list(self, request: Request, target: Target, resource: Resource) -> Answer:
        query = request.query_params
        events_api = target.group == "events.k8s.io"
        selection = watch.select(resource, target.namespace, query, "regarding" if events_api else "")
        if query.get("watch") in ("true", "1"):
            return self._watch(request, resource, selection, events_api)
        found = await watch.list_page(self.store, resource, selection, query)
        if events_api:
            found = {**found, "apiVersion": "events.k8s.io/v1", "items": [_as_events_api(e) for e in found["items"]]}
        return Reply(200, found)

    def _watch(self, request: Request, resource: Resource, selection: watch.Selection, events_api: bool) -> Answer:
        query, path = request.query_params, request.url.path
        watch.watch_start(query)
        since = self.faults.generation

        def ends() -> bool:
            return self.faults.away() or self.faults.closes_watch(path, since)

        async def lines() -> AsyncIterator[bytes]:
            async for line in watch.watch(self.store, resource, selection, query, ends):
                yield _convert_line(line) if events_api else line
            if self.faults.away():
                raise _Cut

        return StreamingResponse(lines(), 200, {"content-type": "application/json"})

    def _existing(self, resource: Resource, target: Target) -> Object:
        namespace = target.namespace if resource.namespaced else ""
        obj = self.store.get(resource.plural, namespace, target.name)
        if obj is None:
            raise not_found(resource, target.name)
        return obj

    # --- writing ----------------------------------------------------------------------------------------------

    async def _create(self, request: Request, target: Target, resource: Resource) -> Answer:
        if resource.namespaced and not target.namespace:
            message = "the server does not allow this method on the requested resource"
            raise failure(405, "MethodNotAllowed", message, {})
        dry = _options("CreateOptions", request.query_params)
        obj, warnings = await self._decoded(request, resource)
        meta = obj["metadata"]
        if resource.namespaced:
            if meta.get("namespace", target.namespace) != target.namespace:
                why = "the namespace of the provided object does not match the namespace sent on the request"
                raise failure(400, "BadRequest", why)
            meta["namespace"] = target.namespace
        else:
            meta.pop("namespace", None)
        for key in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds"):
            meta.pop(key, None)
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + random_suffix()
        if resource.namespaced:
            self._check_namespace(resource, target.namespace, meta.get("name", ""))
        obj = self.admit(resource, obj)
        if meta.get("resourceVersion") and not dry:
            raise failure(500, "", "resourceVersion should not be set on objects to be created")
        created = self.store.create(resource.plural, obj, dry_run=dry)
        return Reply(201, created, warnings + _warnings(resource, created))

    def admit(self, resource: Resource, obj: Object) -> Object:
        """Defaults, admission and validation of a new object.

        Raises:
            ApiError: 403, 422, 500.
        """
        if resource.status and resource.plural not in ("nodes", "persistentvolumes"):
            obj.pop("status", None)
        schema.default(resource, obj)
        if resource.plural == "pods":
            self._admit_pod(obj)
        if self.webhook:
            obj = self.webhook("CREATE", resource.plural, obj, None)
        if resource.plural == "jobs":
            obj["metadata"]["uid"] = schema.new_uid()
            schema.select_job(obj, obj["metadata"]["uid"])
        validation.check(resource, obj)
        if resource.plural == "services":
            self._address(obj["spec"])
        return obj

    def _admit_pod(self, obj: Object) -> None:
        spec, meta = obj["spec"], obj["metadata"]
        account = spec.get("serviceAccountName") or "default"
        details = {"name": meta.get("name", ""), "kind": "pods"}
        prefix = f'pods "{meta.get("name", "")}" is forbidden: '
        if account != "default" and self.store.get("serviceaccounts", meta["namespace"], account) is None:
            why = (
                f'error looking up service account {meta["namespace"]}/{account}: serviceaccount "{account}" not found'
            )
            raise failure(403, "Forbidden", prefix + why, details)
        chosen = spec.get("priorityClassName")
        if chosen and self.store.get("priorityclasses", "", chosen) is None:
            raise failure(403, "Forbidden", f"{prefix}no PriorityClass with name {chosen} was found", details)
        schema.admit_pod(obj, self.store.peek("priorityclasses"))

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.store.get("namespaces", "", namespace)
        if found is None:
            raise not_found(RESOURCES["namespaces"], namespace)
        if found["status"].get("phase") == "Terminating":
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            causes = [{"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}]
            causes[0]["field"] = "metadata.namespace"
            details = {"name": name, "group": resource.group, "kind": resource.plural, "causes": causes}
            details = {key: value for key, value in details.items() if value}
            raise failure(403, "Forbidden", f'{resource.qualified} "{name}" is forbidden: {why}', details)

    def _address(self, spec: Object) -> None:
        if spec["type"] == "ExternalName":
            return
        if not spec.get("clusterIP"):
            self._services += 1
            spec["clusterIP"] = f"10.96.{self._services // 250 + 1}.{self._services % 250 + 1}"
        spec.setdefault("clusterIPs", [spec["clusterIP"]])

    async def _replace(self, request: Request, target: Target, resource: Resource) -> Answer:
        dry = _options("UpdateOptions", request.query_params)
        obj, warnings = await self._decoded(request, resource)
        meta = obj["metadata"]
        if meta.get("name", target.name) != target.name:
            why = f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})"
            raise failure(400, "BadRequest", why)
        meta["name"] = target.name
        if resource.namespaced:
            if meta.get("namespace", target.namespace) != target.namespace:
                why = "the namespace of the object does not match the namespace on the URL"
                raise failure(400, "BadRequest", f"{why} ({meta['namespace']} vs {target.namespace})")
            meta["namespace"] = target.namespace
        old = self._existing(resource, target)
        uid = meta.get("uid") or old["metadata"]["uid"]
        if uid != old["metadata"]["uid"]:
            key = "/".join(filter(None, ("/registry", resource.plural, target.namespace, target.name)))
            why = f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: "
            why += f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            raise conflict(resource, target.name, why)
        return Reply(200, self._store_update(target, resource, obj, old, dry), warnings)

    async def _patch(self, request: Request, target: Target, resource: Resource) -> Answer:
        kind = request.headers.get("content-type", "").split(";")[0]
        if kind == "application/apply-patch+yaml":
            raise _not_modelled("server-side apply")
        dry = _options("PatchOptions", request.query_params)
        old = self._existing(resource, target)
        asked = patch.apply(resource, kind, await request.body(), old)
        mode = request.query_params.get("fieldValidation") or "Warn"
        why, strict = "", []
        try:
            obj, strict = schema.decode_object(resource, asked)
            why = _strict_words(strict) if mode == "Strict" else ""
        except schema.DecodeError as error:
            obj, why = {}, str(error)
        if why:
            text = json.dumps(asked, separators=(",", ":"))
            raise validation.invalid_error("", "", "", [validation.invalid("patch", text, why)])
        if obj["metadata"].get("name") != target.name:
            why = f"the name of the object ({obj['metadata'].get('name', '')}) does not match the name on the URL"
            raise failure(400, "BadRequest", f"{why} ({target.name})")
        updated = self._store_update(target, resource, obj, old, dry)
        return Reply(200, updated, strict if mode == "Warn" else [])

    def _store_update(self, target: Target, resource: Resource, obj: Object, old: Object, dry: bool) -> Object:
        self.store.check_version(resource, old, obj)
        status = target.subresource == "status"
        if status:
            if resource.plural == "jobs" and (faults := validation.check_job_status(obj)):
                raise validation.invalid_error(resource.group, resource.kind, target.name, faults)
        else:
            schema.default(resource, obj)
            if "status" in old:
                obj["status"] = copy.deepcopy(old["status"])
            if self.webhook:
                obj = self.webhook("UPDATE", resource.plural, obj, old)
            validation.check(resource, obj, old)
        return self.store.update(resource.plural, obj, status=status, dry_run=dry)

    async def _decoded(self, request: Request, resource: Resource) -> tuple[Object, list[str]]:
        media = request.headers.get("content-type", "application/json").split(";")[0].strip()
        body = await request.body()
        if media == "application/yaml":
            body = json.dumps(yaml.safe_load(body)).encode()
        elif media != "application/json":
            why = f"the body of the request was in an unknown format - accepted media types include: {_MEDIA}"
            raise failure(415, "UnsupportedMediaType", why)
        if len(body) > _BODY_LIMIT:
            raise failure(413, "RequestEntityTooLarge", f"Request entity too large: limit is {_BODY_LIMIT}", {})
        obj, strict = schema.decode_body(resource, body)
        mode = request.query_params.get("fieldValidation") or "Warn"
        if strict and mode == "Strict":
            handled = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise failure(400, "BadRequest", f"{handled}: {_strict_words(strict)}")
        return obj, strict if mode == "Warn" else []

    # --- deleting ---------------------------------------------------------------------------------------------

    async def _delete(self, request: Request, target: Target, resource: Resource) -> Answer:
        options = await _delete_options(request)
        warnings = _delete_warnings(resource, options)
        namespace = target.namespace if resource.namespaced else ""
        try:
            gone = self.store.delete(resource.plural, namespace, target.name, **_delete_arguments(options))
        except ApiError as error:
            error.body["warnings"] = warnings
            raise
        return Reply(200, gone, warnings)

    async def _delete_all(self, request: Request, target: Target, resource: Resource) -> Answer:
        selection = watch.select(resource, target.namespace, request.query_params)
        options = await _delete_options(request)
        found = await watch.list_page(self.store, resource, selection, request.query_params)
        found = copy.deepcopy(found)
        for obj in found["items"]:
            meta = obj["metadata"]
            self.store.delete(resource.plural, meta.get("namespace", ""), meta["name"], **_delete_arguments(options))
        return Reply(200, found, _delete_warnings(resource, options))

    # --- parts of objects ---------------------------------------------------------------------------------------

    async def _part(self, request: Request, target: Target, resource: Resource) -> Answer:
        part, method = target.subresource, request.method
        if part == "status" and resource.status and method in ("GET", "PUT", "PATCH"):
            handler = {"GET": Server._get, "PUT": Server._replace, "PATCH": Server._patch}[method]
            return await handler(self, request, target, resource)
        if (resource.plural, part, method) == ("pods", "log", "GET"):
            return await self._log(request, target, resource)
        if (resource.plural, part, method) == ("pods", "eviction", "POST"):
            return await self._evict(request, target, resource)
        if (resource.plural, part, method) == ("serviceaccounts", "token", "POST"):
            return await self._token(request, target, resource)
        raise _not_modelled(f"{method} of {resource.plural}/{part}")

    async def _log(self, request: Request, target: Target, resource: Resource) -> Answer:
        query = request.query_params
        arguments = _log_arguments(query, target.name)
        pod = self._existing(resource, target)
        if self.logs is None:
            raise _not_modelled("logs without kubelets")
        pieces = await self.logs.read(pod, query.get("container"), **arguments)
        if pieces is None:
            return Response(status_code=204)
        return StreamingResponse(pieces, 200, {"content-type": "text/plain"})

    async def _evict(self, request: Request, target: Target, resource: Resource) -> Answer:
        body = await request.body()
        options = (json.loads(body) if body else {}).get("deleteOptions") or {}
        pod = self._existing(resource, target)
        ended = pod["status"].get("phase") in ("Succeeded", "Failed", "Pending")
        if not ended and "deletionTimestamp" not in pod["metadata"]:
            self._check_budgets(pod)
        arguments = _delete_arguments(options)
        if not arguments["dry_run"]:
            if "deletionTimestamp" not in pod["metadata"]:
                self._mark_evicted(pod)
            self.store.delete("pods", target.namespace, target.name, **arguments)
        return Reply(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})

    def _mark_evicted(self, pod: Object) -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "lastProbeTime": None}
        condition |= {"lastTransitionTime": stamp(self.store.clock.now()), "reason": "EvictionByEvictionAPI"}
        condition["message"] = "Eviction API: evicting"
        others = [c for c in pod["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
        pod["status"]["conditions"] = [*others, condition]
        self.store.update("pods", pod, status=True)

    def _check_budgets(self, pod: Object) -> None:
        namespace, labels = pod["metadata"]["namespace"], pod["metadata"].get("labels", {})
        for budget in self.store.peek("poddisruptionbudgets", namespace):
            spec = budget["spec"]
            wanted = spec.get("selector", {}).get("matchLabels", {})
            if not wanted.items() <= labels.items():
                continue
            pods = self.store.peek("pods", namespace)
            pods = [p for p in pods if wanted.items() <= p["metadata"].get("labels", {}).items()]
            healthy = sum(_ready(p) for p in pods)
            needed = _share(spec["minAvailable"], len(pods)) if "minAvailable" in spec else None
            if needed is None:
                needed = len(pods) - _share(spec.get("maxUnavailable", 0), len(pods))
            if healthy <= needed:
                name = budget["metadata"]["name"]
                words = f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
                details = {"causes": [{"reason": "DisruptionBudget", "message": words}]}
                message = "Cannot evict pod as it would violate the pod's disruption budget."
                raise failure(429, "TooManyRequests", message, details)

    async def _token(self, request: Request, target: Target, resource: Resource) -> Answer:
        self._existing(resource, target)
        body = await request.body()
        asked = (json.loads(body) if body else {}).get("spec") or {}
        seconds = asked.get("expirationSeconds", 3600)
        now = self.store.clock.now()
        meta = {"name": target.name, "namespace": target.namespace, "creationTimestamp": stamp(now)}
        spec = {"audiences": ["https://kubernetes.default.svc"], **asked, "expirationSeconds": seconds}
        status = {"token": self.access.issue(target.namespace, target.name)}
        status["expirationTimestamp"] = stamp(now + timedelta(seconds=seconds))
        kind = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
        return Reply(201, {**kind, "metadata": meta, "spec": spec, "status": status})

    async def _review(self, request: Request, user: User, kind: str, target: Target) -> Reply:
        obj, warnings = await self._decoded(request, Resource(target.group, target.version, target.plural, kind, False))
        if kind.endswith("AccessReview"):
            spec = obj.get("spec", {})
            if ("resourceAttributes" in spec) == ("nonResourceAttributes" in spec):
                words = "exactly one of nonResourceAttributes or resourceAttributes must be specified"
                fault = validation.invalid("spec.resourceAttributes", spec.get("resourceAttributes"), words)
                raise validation.invalid_error(target.group, kind, "", [fault])
        return Reply(201, review(self.access, user, kind, obj), warnings)


Handler = Callable[[Server, Request, Target, Resource], Awaitable[Answer]]
_ITEM: dict[str, Handler] = {
    "GET": Server._get,
    "PUT": Server._replace,
    "PATCH": Server._patch,
    "DELETE": Server._delete,
}
_COLLECTION: dict[str, Handler] = {"GET": Server._list, "POST": Server._create, "DELETE": Server._delete_all}


def _broken(rule: HttpFault) -> Reply:
    words = {429: "TooManyRequests", 409: "Conflict", 410: "Expired", 503: "ServiceUnavailable", 404: "NotFound"}
    reason = words.get(rule.status, "InternalError")
    body = failure(rule.status, reason, "the fault file asks for this answer").body
    headers = {"Retry-After": "1"} if rule.status in (429, 503) else {}
    return Reply(rule.status, rule.body or body, headers=headers)


def _not_modelled(what: str) -> ApiError:
    return failure(501, "NotImplemented", f"the double does not model {what}")


def _strict_words(strict: list[str]) -> str:
    return f"strict decoding error: {', '.join(strict)}" if strict else ""


def _options(kind: str, query: Mapping[str, str]) -> bool:
    """Check dryRun and fieldValidation; whether it is a dry run."""
    faults = []
    dry, mode = query.get("dryRun", ""), query.get("fieldValidation", "")
    if dry not in ("", "All"):
        faults.append(validation.unsupported("dryRun", [dry], ("All",)))
    if mode not in ("", "Ignore", "Strict", "Warn"):
        faults.append(validation.unsupported("fieldValidation", mode, ("", "Ignore", "Strict", "Warn")))
    if faults:
        raise validation.invalid_error("meta.k8s.io", kind, "", faults)
    return dry == "All"


def _warnings(resource: Resource, obj: Object) -> list[str]:
    path = {"jobs": "spec.template.spec", "pods": "spec"}.get(resource.plural)
    if path is None:
        return []
    spec = obj["spec"]["template"]["spec"] if resource.plural == "jobs" else obj["spec"]
    negative = spec["terminationGracePeriodSeconds"] < 0
    return [f"{path}.terminationGracePeriodSeconds: {_GRACE_WARNING}"] if negative else []


async def _delete_options(request: Request) -> Object:
    query = request.query_params
    body = await request.body()
    options: Object = (json.loads(body) or {}) if body else {}
    for key in ("propagationPolicy", "gracePeriodSeconds", "orphanDependents"):
        if key in query:
            value = query[key]
            options.setdefault(key, value if key == "propagationPolicy" else json.loads(value))
    if "dryRun" in query:
        options.setdefault("dryRun", [query["dryRun"]])
    faults, policy = [], options.get("propagationPolicy")
    if policy is not None and options.get("orphanDependents") is not None:
        words = "orphanDependents and deletionPropagation cannot be both set"
        faults.append(validation.invalid("propagationPolicy", policy, words))
    if policy not in (None, "Foreground", "Background", "Orphan"):
        supported = ("Foreground", "Background", "Orphan", "nil")
        faults.append(validation.unsupported("propagationPolicy", policy, supported))
    if options.get("dryRun") not in (None, [], ["All"]):
        faults.append(validation.unsupported("dryRun", options["dryRun"], ("All",)))
    if faults:
        raise validation.invalid_error("meta.k8s.io", "DeleteOptions", "", faults)
    return options


def _delete_arguments(options: Object) -> dict[str, Any]:
    propagation = options.get("propagationPolicy")
    if options.get("orphanDependents") is not None:
        propagation = "Orphan" if options["orphanDependents"] else "Background"
    conditions = options.get("preconditions") or {}
    return {
        "propagation": propagation,
        "grace": options.get("gracePeriodSeconds"),
        "uid": conditions.get("uid"),
        "resource_version": conditions.get("resourceVersion"),
        "dry_run": bool(options.get("dryRun")),
    }


def _delete_warnings(resource: Resource, options: Object) -> list[str]:
    silent = options.get("propagationPolicy") is not None or options.get("orphanDependents") is not None
    return [] if silent or resource.plural != "jobs" else [_ORPHAN_WARNING]


def _log_arguments(query: Mapping[str, str], name: str) -> dict[str, Any]:
    faults: list[validation.Fault] = []
    since: datetime | None = None
    if "sinceTime" in query:
        moment = query["sinceTime"]
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", moment):
            why = f'parsing time "{moment}" as "2006-01-02T15:04:05Z07:00": cannot parse "{moment}" as "2006"'
            raise failure(400, "BadRequest", why)
        # The kubelet keeps whole seconds of sinceTime.
        since = datetime.fromisoformat(re.sub(r"\.\d+", "", moment))
    numbers: dict[str, int] = {}
    for key, least in (("sinceSeconds", 1), ("tailLines", 0), ("limitBytes", 1)):
        if key not in query:
            continue
        if not re.fullmatch(r"-?\d+", query[key]):
            why = f'strconv.ParseInt: parsing "{query[key]}": invalid syntax'
            raise failure(400, "BadRequest", why)
        numbers[key] = int(query[key])
        if numbers[key] < least:
            words = "must be greater than 0" if least else "must be greater than or equal to 0"
            faults.append(validation.invalid(key, numbers[key], words))
    if "sinceTime" in query and "sinceSeconds" in query:
        words = "at most one of `sinceTime` or `sinceSeconds` may be specified"
        faults.append(validation.forbidden("[]", words))
    if "stream" in query:
        faults.append(validation.forbidden("stream", "may not be specified"))
    if faults:
        raise validation.invalid_error("", "PodLogOptions", name, faults)
    if "sinceSeconds" in numbers:
        since = datetime.now(UTC) - timedelta(seconds=numbers["sinceSeconds"])
    flags = {key: query.get(key) in ("true", "1") for key in ("follow", "timestamps", "previous")}
    return {**flags, "tail": numbers.get("tailLines"), "limit": numbers.get("limitBytes"), "since": since}


def _ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _share(amount: int | str, whole: int) -> int:
    return amount if isinstance(amount, int) else -(-whole * int(amount.rstrip("%")) // 100)


def _as_events_api(event: Object) -> Object:
    """A v1 Event as events.k8s.io/v1 shows it."""
    shown = {_EVENT_NAMES.get(key, key): value for key, value in event.items()}
    shown = {key: value for key, value in shown.items() if value not in ({}, "") or key == "regarding"}
    for key in ("deprecatedFirstTimestamp", "deprecatedLastTimestamp"):
        shown.setdefault(key, None)
    return {**shown, "apiVersion": "events.k8s.io/v1"} if "apiVersion" in event else shown


def _convert_line(line: bytes) -> bytes:
    entry = json.loads(line)
    if entry["object"].get("kind") == "Event":
        entry["object"] = _as_events_api(entry["object"])
    return json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
