"""Decoding of request bodies as Go's typed decoder does it, quantities, and the defaults of every kind.

The field types come from the OpenAPI definitions of Kubernetes 1.36 that `kubernetes_validate` carries.
"""

import base64
import json
import re
import uuid
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate

from tests.cluster.double.store import ApiError, Json, Object, Resource, failure, random_suffix

_DEFINITIONS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema/v1.36.0-local/_definitions.json"
_QUANTITY = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([eEinumkKMGTP]*)([+-]?\d*)")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FORMAT_WRONG = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
# Fields that Go declares without a pointer: a false, empty or zero value is not written back.
_PLAIN_FALSE = {
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "stdin",
    "stdinOnce",
    "tty",
    "readOnly",
    "publishNotReadyAddresses",
}
_POINTER_TEXT = {"storageClassName", "volumeName", "type"}
_NAMED = {"completionMode": "v1.CompletionMode", "restartPolicy": "v1.RestartPolicy", "effect": "v1.TaintEffect"}
_NAMED |= {"imagePullPolicy": "v1.PullPolicy", "podReplacementPolicy": "v1.PodReplacementPolicy"}
_NAMED |= {"dnsPolicy": "v1.DNSPolicy", "protocol": "v1.Protocol", "medium": "v1.StorageMedium"}


class Pairs(dict[str, Any]):
    """A JSON object that remembers keys given twice."""

    twice: tuple[str, ...] = ()


class DecodeError(Exception):
    """A value whose JSON type does not fit its Go field."""


@cache
def definitions() -> dict[str, Any]:
    """The OpenAPI definitions by full name."""
    return json.loads(_DEFINITIONS.read_text())["$defs"]


@cache
def definition_of(group: str, version: str, kind: str) -> str:
    """The name of the definition of a kind; empty for kinds that OpenAPI does not know (custom resources)."""
    for name, definition in definitions().items():
        for known in definition.get("x-kubernetes-group-version-kind", ()):
            if (known["group"], known["version"], known["kind"]) == (group, version, kind):
                return name
    return ""


def parse_quantity(text: str) -> Fraction:
    """The value of a quantity.

    Raises:
        DecodeError: With the API machinery's words.
    """
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise DecodeError(_FORMAT_WRONG)
    sign, number, suffix, exponent = match.groups()
    value = Fraction(number if not number.endswith(".") else number + "0") * (-1 if sign == "-" else 1)
    if suffix in ("e", "E") and exponent:
        return value * Fraction(10) ** int(exponent)
    if exponent:
        raise DecodeError(_FORMAT_WRONG)
    if suffix in _BINARY[1:]:
        return value * 1024 ** _BINARY.index(suffix)
    if suffix not in _DECIMAL:
        raise DecodeError("unable to parse quantity's suffix")
    return value * Fraction(10) ** _DECIMAL[suffix]


def canonical_quantity(text: str) -> str:
    """A quantity as the API writes it back: the largest suffix that leaves a whole number (`1000m` = `1`)."""
    value = parse_quantity(text)
    if value == 0:
        return "0"
    if text.endswith("i") and value.denominator == 1 and abs(value) >= 1024:
        power = max(p for p in range(len(_BINARY)) if value % 1024**p == 0)
        return f"{value / 1024**power}{_BINARY[power]}"
    fitting = [(e, s) for s, e in _DECIMAL.items() if (value / Fraction(10) ** e).denominator == 1]
    exponent, suffix = max(fitting) if fitting else (-9, "n")
    return f"{-(-value // Fraction(10) ** exponent)}{suffix}"


def _unique(pairs: list[tuple[str, Any]]) -> Pairs:
    found = Pairs()
    for key, value in pairs:
        if key in found:
            found.twice += (key,)
        found[key] = value
    return found


def parse_json(body: bytes) -> Json:
    """Parse JSON; objects remember keys given twice.

    Raises:
        DecodeError: With Go's words for the usual faults.
    """
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg:
            raise DecodeError("unexpected end of JSON input") from None
        raise DecodeError(f"invalid character '{text[error.pos]}' looking for beginning of value") from None


class Decoder:
    """Walks one body beside its schema.

    Attributes:
        strict: What strict decoding objects to: fields that are unknown or given twice, in the order of the body.
    """

    def __init__(self) -> None:
        """Start without findings."""
        self.strict: list[str] = []

    def decode(self, value: Json, schema: dict[str, Any], owner: str, path: str, at: str = "") -> Json:
        """The value as the API keeps it: unknown fields, nulls and empty optional fields dropped.

        Args:
            value: Parsed JSON.
            schema: Its OpenAPI schema.
            owner: Go struct that holds the field.
            path: JSON path without indexes, as Go's decoder says it.
            at: JSON path with indexes, as strict errors say it.

        Raises:
            DecodeError: The JSON type does not fit.
        """
        if value is None:
            return None
        if "$ref" in schema:
            return self._reference(value, schema["$ref"].rsplit("/", 1)[1], owner, path, at)
        kind = _json_type(schema)
        if kind == "array":
            self._expect(value, list, schema, owner, path)
            item = schema["items"]
            return [self.decode(v, item, owner, path, f"{at}[{i}]") for i, v in enumerate(value)]
        if kind == "object":
            self._expect(value, dict, schema, owner, path)
            inner = schema.get("additionalProperties")
            if not isinstance(inner, dict):
                return value
            self._twice(value, at)
            return {k: self.decode(v, inner, owner, path, f"{at}.{k}") for k, v in value.items()}
        expected = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}.get(kind)
        if expected:
            self._expect(value, expected, schema, owner, path)
        return value

    def _reference(self, value: Json, name: str, owner: str, path: str, at: str) -> Json:
        short = name.rsplit(".", 1)[1]
        schema = definitions()[name]
        if short == "Quantity":
            text = str(value).strip() if isinstance(value, (str, int, float)) else ""
            parse_quantity(text)
            canonical = path.endswith(("limits", "requests"))
            return canonical_quantity(text) if canonical else text
        if short == "IntOrString" or "properties" not in schema:
            return value if short != "Time" else self.decode(value, {"type": "string"}, owner, path, at)
        if not isinstance(value, dict):
            raise _mismatch(value, f"v1.{short}", owner, path)
        return self.struct(value, schema, short, path, at)

    def struct(self, value: dict[str, Any], schema: dict[str, Any], short: str, path: str, at: str) -> Object:
        """Decode an object of a known Go struct."""
        found: Object = {}
        seen: set[str] = set()
        twice = getattr(value, "twice", ())
        for key, inner in value.items():
            here = f"{at}.{key}" if at else key
            if key not in schema["properties"]:
                self.strict.append(f'unknown field "{here}"')
            else:
                field = schema["properties"][key]
                clean = self.decode(inner, field, short, f"{path}.{key}" if path else key, here)
                if not _omitted(key, clean, field, short) or (clean is not None and key in schema.get("required", ())):
                    found[key] = clean
            if key in twice and key not in seen:
                seen.add(key)
                self.strict.append(f'duplicate field "{here}"')
        return found

    def _twice(self, value: Json, at: str) -> None:
        self.strict += [f'duplicate field "{at}.{key}"' for key in getattr(value, "twice", ())]

    def _expect(self, value: Json, kind: Json, schema: dict[str, Any], owner: str, path: str) -> None:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise _mismatch(value, _NAMED.get(path.rsplit(".", 1)[-1]) or _go_type(schema), owner, path)


def _json_type(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "")
    return next((k for k in kind if k != "null"), "") if isinstance(kind, list) else kind


def _go_type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "v1." + schema["$ref"].rsplit(".", 1)[1]
    kind = _json_type(schema)
    if kind == "array":
        return "[]" + _go_type(schema["items"])
    if kind == "object":
        return "map[string]" + _go_type(schema.get("additionalProperties") or {"type": "string"})
    return {"integer": schema.get("format", "int32"), "boolean": "bool", "number": "float64"}.get(kind, kind)


def _mismatch(value: Json, go_type: str, owner: str, path: str) -> DecodeError:
    names = {dict: "object", list: "array", str: "string", bool: "bool"}
    found = next((name for kind, name in names.items() if isinstance(value, kind)), "number")
    if isinstance(value, float):
        found = f"number {value}"
    return DecodeError(f"json: cannot unmarshal {found} into Go struct field {owner}.{path} of type {go_type}")


def _omitted(key: str, value: Json, schema: dict[str, Any], owner: str) -> bool:
    if value is None:
        return True
    if value in ([], {}) and "$ref" not in schema:
        return True
    if value == "" and _json_type(schema) == "string":
        return key not in _POINTER_TEXT or owner == "ServiceSpec"
    return (value is False and key in _PLAIN_FALSE) or (value == 0 and key == "hostPort")


def _bad_request(message: str) -> ApiError:
    return failure(400, "BadRequest", message)


def decode_body(resource: Resource, body: bytes) -> tuple[Object, list[str]]:
    """Decode a request body as an object of `resource`.

    Returns:
        The object with kind and apiVersion, and what strict decoding objects to.

    Raises:
        ApiError: 400 in the words of the API server.
    """
    prefix = f"the object provided is unrecognized (must be of type {resource.kind}): couldn't get version/kind; "
    try:
        raw = parse_json(body)
    except DecodeError as error:
        raise _bad_request(f"{prefix}json parse error: {error} ({_excerpt(body)})") from None
    if not isinstance(raw, dict):
        name = {list: "array", str: "string", bool: "bool"}.get(type(raw), "number")
        into = 'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
        why = f"json: cannot unmarshal {name} into Go value of type {into}"
        raise _bad_request(f"{prefix}json parse error: {why} ({_excerpt(body)})")
    kind, version = raw.get("kind") or resource.kind, raw.get("apiVersion") or resource.api_version
    handled = f'{kind} in version "{version.rsplit("/", 1)[-1]}" cannot be handled as a {resource.kind}: '
    if (kind, version) != (resource.kind, resource.api_version):
        if definition_of(*_split(version), kind):
            why = f"the API version in the data ({version}) does not match the expected API version"
            raise _bad_request(f"{why} ({resource.api_version})")
        scheme = 'scheme "pkg/api/legacyscheme/scheme.go:30"'
        raise _bad_request(f'{handled}no kind "{kind}" is registered for version "{version}" in {scheme}')
    try:
        found, strict = decode_object(resource, raw)
    except DecodeError as error:
        raise _bad_request(handled + str(error)) from None
    return found, strict


def decode_object(resource: Resource, raw: Object) -> tuple[Object, list[str]]:
    """Decode parsed JSON as an object of `resource`; custom resources pass as they are.

    Raises:
        DecodeError: A value does not fit its field.
    """
    name = definition_of(resource.group, resource.version, resource.kind)
    decoder = Decoder()
    typed = {**raw, "kind": resource.kind, "apiVersion": resource.api_version}
    typed = Pairs(typed)
    typed.twice = getattr(raw, "twice", ())
    if name:
        found = decoder.struct(typed, definitions()[name], resource.kind, "", "")
    else:
        found = json.loads(json.dumps(typed))
        meta = definitions()["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]
        found["metadata"] = decoder.struct(raw.get("metadata") or {}, meta, "ObjectMeta", "metadata", "metadata")
    found.setdefault("metadata", {}).pop("managedFields", None)
    found["metadata"].pop("selfLink", None)
    return found, decoder.strict


def _split(api_version: str) -> tuple[str, str]:
    group, _, version = api_version.rpartition("/")
    return group, version


def _excerpt(body: bytes) -> str:
    if not body:
        return "<empty>"
    if not body.startswith(b"{"):
        return body[:30].hex()
    return body.decode() if len(body) < 30 else body[:30].decode() + " ..."


# --- defaults -------------------------------------------------------------------------------------------------


def default(resource: Resource, obj: Object) -> None:
    """Fill in the defaults of a kind, in place."""
    filler = _DEFAULTS.get(resource.plural)
    if filler:
        filler(obj)


def _pod_spec(spec: Object) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    if "serviceAccountName" in spec:
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        _container(container)
    for volume in spec.get("volumes", ()):
        _volume(volume)


def _container(container: Object) -> None:
    container.setdefault("resources", {})
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    tail = container.get("image", "").rsplit("/", 1)[-1]
    latest = "@" not in tail and (":" not in tail or tail.endswith(":latest"))
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    for port in container.get("ports", ()):
        port.setdefault("protocol", "TCP")
    for entry in container.get("env", ()):
        field = entry.get("valueFrom", {}).get("fieldRef")
        if field:
            field.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in container:
            _probe(container[name])


def _probe(probe: Object) -> None:
    for key, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)):
        probe.setdefault(key, value)
    if "httpGet" in probe:
        probe["httpGet"].setdefault("path", "/")
        probe["httpGet"].setdefault("scheme", "HTTP")


def _volume(volume: Object) -> None:
    if set(volume) == {"name"}:
        volume["emptyDir"] = {}
    for source in ("configMap", "secret", "downwardAPI", "projected"):
        if source in volume:
            volume[source].setdefault("defaultMode", 420)
    if "hostPath" in volume:
        volume["hostPath"].setdefault("type", "")
    for part in volume.get("projected", {}).get("sources", ()):
        if "serviceAccountToken" in part:
            part["serviceAccountToken"].setdefault("expirationSeconds", 3600)
        for item in part.get("downwardAPI", {}).get("items", ()):
            item.get("fieldRef", {}).setdefault("apiVersion", "v1")


def _job(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    template = spec.setdefault("template", {})
    template.setdefault("metadata", {})
    _pod_spec(template.setdefault("spec", {}))
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 2**31 - 1 if "backoffLimitPerIndex" in spec else 6)
    spec.setdefault("manualSelector", False)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        for condition in rule.get("onPodConditions", ()):
            condition.setdefault("status", "True")
    obj.setdefault("status", {})


def _pod(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _pod_spec(spec)
    spec.setdefault("enableServiceLinks", True)
    for container in spec.get("containers", ()):
        resources = container["resources"]
        for name, amount in resources.get("limits", {}).items():
            resources.setdefault("requests", {}).setdefault(name, amount)
    obj.setdefault("status", {}).setdefault("phase", "Pending")


def _service(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    kind = spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports", ()):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port", 0))
    if kind != "ExternalName":
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
        spec.setdefault("internalTrafficPolicy", "Cluster")
    obj.setdefault("status", {}).setdefault("loadBalancer", {})


def _namespace(obj: Object) -> None:
    obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")
    obj["spec"] = {"finalizers": ["kubernetes"]}
    obj["status"] = {"phase": "Active"}


def _priority_class(obj: Object) -> None:
    obj.setdefault("preemptionPolicy", "PreemptLowerPriority")


def _budget(obj: Object) -> None:
    fresh = {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0}
    obj.setdefault("status", fresh)


def _secret(obj: Object) -> None:
    obj.setdefault("type", "Opaque")
    for key, text in obj.pop("stringData", {}).items():
        obj.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()


def _event(obj: Object) -> None:
    for key, value in (("source", {}), ("reportingComponent", ""), ("reportingInstance", "")):
        obj.setdefault(key, value)
    for key in ("firstTimestamp", "lastTimestamp", "eventTime"):
        obj.setdefault(key, None)


def _node(obj: Object) -> None:
    obj.setdefault("spec", {})
    obj.setdefault("status", {})


def _binding(obj: Object) -> None:
    for subject in obj.get("subjects", ()):
        if subject.get("kind") in ("User", "Group"):
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")
    if obj.get("roleRef"):
        obj["roleRef"].setdefault("apiGroup", "rbac.authorization.k8s.io")


def _claim(obj: Object) -> None:
    obj.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")
    obj.setdefault("status", {}).setdefault("phase", "Pending")


_DEFAULTS = {"jobs": _job, "pods": _pod, "services": _service, "namespaces": _namespace, "secrets": _secret}
_DEFAULTS |= {"priorityclasses": _priority_class, "poddisruptionbudgets": _budget, "nodes": _node, "events": _event}
_DEFAULTS |= {"rolebindings": _binding, "clusterrolebindings": _binding, "persistentvolumeclaims": _claim}


def new_uid() -> str:
    """A fresh uid."""
    return str(uuid.uuid4())


def select_job(obj: Object, uid: str) -> None:
    """Give a Job the selector and the template labels that the API generates for `uid`, in place."""
    spec, name = obj["spec"], obj["metadata"].get("name", "")
    template = spec["template"]["metadata"]
    generated = {"controller-uid": uid, "job-name": name}
    generated |= {f"batch.kubernetes.io/{key}": value for key, value in generated.items()}
    if not spec.get("manualSelector"):
        template["labels"] = {**template.get("labels", {}), **generated}
        selector = spec.setdefault("selector", {}).setdefault("matchLabels", {})
        selector["batch.kubernetes.io/controller-uid"] = uid
    if not obj["metadata"].get("labels") and template.get("labels"):
        obj["metadata"]["labels"] = dict(template["labels"])


def admit_pod(obj: Object, priority_classes: list[Object]) -> None:
    """What the admission plugins add to a new Pod: account, token volume, tolerations, priority, QoS class, in place.

    Args:
        obj: The Pod, with defaults.
        priority_classes: Every PriorityClass of the cluster.
    """
    spec = obj["spec"]
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(_tolerates(toleration, key) for toleration in tolerations):
            fresh = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            tolerations.append(fresh)
    chosen = next((c for c in priority_classes if c["metadata"]["name"] == spec.get("priorityClassName")), {})
    spec["priority"] = chosen.get("value", 0)
    spec["preemptionPolicy"] = chosen.get("preemptionPolicy", "PreemptLowerPriority")
    if spec.get("automountServiceAccountToken", True) and not any(_is_token(v) for v in spec.get("volumes", ())):
        _mount_token(spec)
    obj["status"]["qosClass"] = _qos(spec)


def _tolerates(toleration: Object, key: str) -> bool:
    return toleration.get("key", key) == key and toleration.get("effect", "NoExecute") == "NoExecute"


def _is_token(volume: Object) -> bool:
    return volume["name"].startswith("kube-api-access-")


def _mount_token(spec: Object) -> None:
    name = "kube-api-access-" + random_suffix()
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]
    spec.setdefault("volumes", []).append({"name": name, "projected": {"sources": sources, "defaultMode": 420}})
    mount = {"name": name, "readOnly": True, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        mounted = container.setdefault("volumeMounts", [])
        if not any(m["mountPath"] == mount["mountPath"] for m in mounted):
            mounted.append(dict(mount))


def _qos(spec: Object) -> str:
    amounts = [c.get("resources", {}) for c in spec["containers"]]
    both = [{**a.get("limits", {}), **a.get("requests", {})} for a in amounts]
    if not any("cpu" in one or "memory" in one for one in both):
        return "BestEffort"
    for amount in amounts:
        limits, requests = amount.get("limits", {}), amount.get("requests", {})
        if not all(name in limits and requests.get(name, limits[name]) == limits[name] for name in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"
