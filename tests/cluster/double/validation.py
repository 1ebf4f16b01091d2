"""Validation with the fields, reasons and words of the API server (`k8s.io/kubernetes/pkg/apis/*/validation`)."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.cluster.double.schema import parse_quantity
from tests.cluster.double.store import ApiError, Json, Object, Resource, failure

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_EDGES = "and must start and end with an alphanumeric character"
_LABEL_WORDS = (
    f"a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', {_EDGES} "
    "(e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_WORDS = (
    f"a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', {_EDGES} "
    "(e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_VALUE_WORDS = (
    f"a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', {_EDGES} "
    "(e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_NAME_WORDS = (
    f"must consist of alphanumeric characters, '-', '_' or '.', {_EDGES} "
    "(e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_KEY_WORDS = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',"
    "  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)
_PORT = "must be between 1 and 65535, inclusive"
_LONG = "must be no more than 63 bytes"
_FIXED = "field is immutable"
_LABELLED_NAMES = ("namespaces", "services")
_ANY_NAMES = ("roles", "rolebindings", "clusterroles", "clusterrolebindings")
_STANDARD = ("cpu", "memory", "ephemeral-storage")
_SCHEDULING = ("affinity", "nodeSelector", "tolerations", "schedulingGates")


class Fault(NamedTuple):
    """One cause of a 422: reason, path of the field, message without the path."""

    reason: str
    field: str
    message: str


def _json(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def required(field: str, detail: str = "") -> Fault:
    """A value that is missing."""
    return Fault("FieldValueRequired", field, "Required value" + (f": {detail}" if detail else ""))


def invalid(field: str, value: Json, detail: str) -> Fault:
    """A value that is not allowed."""
    return Fault("FieldValueInvalid", field, f"Invalid value: {_json(value)}: {detail}")


def unsupported(field: str, value: Json, supported: Iterable[str]) -> Fault:
    """A value outside an enumeration."""
    words = ", ".join(f'"{s}"' for s in supported)
    return Fault("FieldValueNotSupported", field, f"Unsupported value: {_json(value)}: supported values: {words}")


def forbidden(field: str, detail: str) -> Fault:
    """A field that may not be set or changed."""
    return Fault("FieldValueForbidden", field, f"Forbidden: {detail}")


def duplicate(field: str, value: Json) -> Fault:
    """A value given twice."""
    return Fault("FieldValueDuplicate", field, f"Duplicate value: {_json(value)}")


def invalid_error(group: str, kind: str, name: str, faults: list[Fault]) -> ApiError:
    """The 422 that reports `faults`."""
    words = list(dict.fromkeys(f"{fault.field}: {fault.message}" for fault in faults))
    said = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    details: Object = {"name": name, "group": group, "kind": kind}
    details = {key: value for key, value in details.items() if value}
    causes = [{"reason": f.reason, "message": f.message, "field": f.field} for f in faults]
    qualified = f"{kind}.{group}" if group else kind
    message = f'{qualified} "{name}" is invalid: {said}'
    return failure(422, "Invalid", message, {**details, "causes": causes})


def check(resource: Resource, new: Object, old: Object | None = None) -> None:
    """Refuse an object that the API server would refuse.

    Args:
        resource: Its kind.
        new: The object, with defaults.
        old: What is stored, for an update.

    Raises:
        ApiError: 422 with every cause.
    """
    faults = _metadata_update(new, old) if old is not None else []
    faults += _metadata(resource, new)
    checker = _CHECKS.get(resource.plural)
    faults += checker(new) if checker else []
    updater = _UPDATES.get(resource.plural)
    if old is not None:
        # The API server checks metadata before every update, and each kind's own check of updates does so again.
        faults += _metadata_update(new, old)
        faults += updater(new, old) if updater else []
    if faults:
        raise invalid_error(resource.group, resource.kind, new["metadata"].get("name", ""), faults)


def check_job_status(new: Object) -> list[Fault]:
    """Faults of a Job status that a client writes."""
    status, faults = new.get("status", {}), []
    true = {c["type"] for c in status.get("conditions", ()) if c.get("status") == "True"}
    if "Complete" in true and not status.get("completionTime"):
        faults.append(required("status.completionTime", "completionTime is required for Complete jobs"))
    if {"Complete", "Failed"} <= true:
        words = "cannot set Complete=True and Failed=true conditions"
        faults.append(Fault("FieldValueInvalid", "status.conditions", f"Invalid value: {words}"))
    for last, first in (("Complete", "SuccessCriteriaMet"), ("Failed", "FailureTarget")):
        if last in true and first not in true:
            words = f"cannot set {last}=True condition without the {first}=true condition"
            faults.append(Fault("FieldValueInvalid", "status.conditions", f"Invalid value: {words}"))
    return faults


# --- metadata -------------------------------------------------------------------------------------------------


def _name(value: str, field: str, label: bool) -> list[Fault]:
    pattern, words, longest = (_LABEL, _LABEL_WORDS, 63) if label else (_SUBDOMAIN, _SUBDOMAIN_WORDS, 253)
    faults = [] if len(value) <= longest else [invalid(field, value, f"must be no more than {longest} bytes")]
    return faults + ([] if pattern.fullmatch(value) else [invalid(field, value, words)])


def _qualified(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if slash and (not _SUBDOMAIN.fullmatch(prefix) or "/" in prefix):
        return f"prefix part {_SUBDOMAIN_WORDS}" if "/" not in prefix else f"a qualified name {_NAME_WORDS}"
    if not name:
        return "name part must be non-empty"
    if len(name) > 63:
        return f"name part {_LONG}"
    return "" if _NAME_PART.fullmatch(name) else f"name part {_NAME_WORDS}"


def _labels(labels: dict[str, str], field: str) -> list[Fault]:
    faults = []
    for key, value in sorted(labels.items()):
        if words := _qualified(key):
            faults.append(invalid(field, key, words))
        if len(value) > 63:
            faults.append(invalid(field, value, _LONG))
        if not _VALUE.fullmatch(value):
            faults.append(invalid(field, value, _VALUE_WORDS))
    return faults


def _metadata(resource: Resource, obj: Object) -> list[Fault]:
    meta, faults = obj["metadata"], []
    name = meta.get("name", "")
    if not name and not meta.get("generateName"):
        faults.append(required("metadata.name", "name or generateName is required"))
    elif name and resource.plural not in _ANY_NAMES:
        faults += _name(name, "metadata.name", resource.plural in _LABELLED_NAMES)
    faults += _labels(meta.get("labels", {}), "metadata.labels")
    for key in sorted(meta.get("annotations", {})):
        if words := _qualified(key.lower()):
            faults.append(invalid("metadata.annotations", key, words))
    for owner in meta.get("ownerReferences", ()):
        for part in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(part):
                faults.append(invalid(f"metadata.ownerReferences.{part}", "", "must not be empty"))
    for i, finalizer in enumerate(meta.get("finalizers", ())):
        if words := _qualified(finalizer):
            faults.append(invalid(f"metadata.finalizers[{i}]", finalizer, words))
        elif "/" not in finalizer and finalizer not in ("orphan", "foregroundDeletion", "kubernetes"):
            words = "name is neither a standard finalizer name nor is it fully qualified"
            faults.append(invalid(f"metadata.finalizers[{i}]", finalizer, words))
    return faults


def _metadata_update(new: Object, old: Object) -> list[Fault]:
    uid = new["metadata"].get("uid") or old["metadata"]["uid"]
    return [invalid("metadata.uid", uid, _FIXED)] if uid != old["metadata"]["uid"] else []


# --- pods -----------------------------------------------------------------------------------------------------


def _pod(obj: Object) -> list[Fault]:
    return _pod_spec(obj["spec"], "spec")


def _template(template: Object, field: str) -> list[Fault]:
    meta = template.get("metadata", {})
    return _labels(meta.get("labels", {}), f"{field}.labels") + _pod_spec(template["spec"], f"{field}.spec")


def _pod_spec(spec: Object, field: str) -> list[Fault]:
    volumes = [volume.get("name", "") for volume in spec.get("volumes", ())]
    faults = _volumes(spec.get("volumes", []), f"{field}.volumes")
    if not spec.get("containers"):
        faults.append(required(f"{field}.containers"))
    seen: set[str] = set()
    for group in ("containers", "initContainers"):
        for i, container in enumerate(spec.get(group, ())):
            faults += _container(container, f"{field}.{group}[{i}]", volumes)
            name = container.get("name", "")
            if name and name in seen:
                faults.append(duplicate(f"{field}.{group}[{i}].name", name))
            seen.add(name)
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        faults.append(unsupported(f"{field}.restartPolicy", spec["restartPolicy"], ("Always", "OnFailure", "Never")))
    policies = ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None")
    if spec["dnsPolicy"] not in policies:
        faults.append(unsupported(f"{field}.dnsPolicy", spec["dnsPolicy"], policies))
    faults += _labels(spec.get("nodeSelector", {}), f"{field}.nodeSelector")
    faults += _users(spec.get("securityContext", {}), f"{field}.securityContext")
    faults += _spread(spec.get("topologySpreadConstraints", []), f"{field}.topologySpreadConstraints")
    if spec.get("serviceAccountName"):
        faults += _name(spec["serviceAccountName"], f"{field}.serviceAccountName", False)
    for part in ("hostname", "subdomain"):
        if spec.get(part):
            faults += _name(spec[part], f"{field}.{part}", True)
    faults += _tolerations(spec.get("tolerations", []), f"{field}.tolerations")
    if spec.get("priorityClassName"):
        faults += _name(spec["priorityClassName"], f"{field}.priorityClassName", False)
    return faults


def _volumes(volumes: list[Object], field: str) -> list[Fault]:
    faults, seen = [], set()
    needed = {"hostPath": "path", "configMap": "name", "secret": "secretName", "persistentVolumeClaim": "claimName"}
    for i, volume in enumerate(volumes):
        here, name = f"{field}[{i}]", volume.get("name", "")
        sources = [key for key in volume if key != "name"]
        if len(sources) > 1:
            faults += [forbidden(f"{here}.{key}", "may not specify more than 1 volume type") for key in sources[1:]]
        for source in sources[:1]:
            part = needed.get(source)
            if part and not volume[source].get(part):
                faults.append(required(f"{here}.{source}.{part}"))
        faults += _name(name, f"{here}.name", True) if name else [required(f"{here}.name")]
        if name in seen:
            faults.append(duplicate(f"{here}.name", name))
        seen.add(name)
    return faults


def _container(container: Object, field: str, volumes: list[str]) -> list[Fault]:
    name, image = container.get("name", ""), container.get("image", "")
    faults = _name(name, f"{field}.name", True) if name else [required(f"{field}.name")]
    if not image:
        faults.append(required(f"{field}.image"))
    elif image != image.strip():
        faults.append(invalid(f"{field}.image", image, "must not have leading or trailing whitespace"))
    faults += _ports(container.get("ports", []), f"{field}.ports")
    for i, entry in enumerate(container.get("env", ())):
        faults += _env(entry, f"{field}.env[{i}]")
    paths: set[str] = set()
    for i, mount in enumerate(container.get("volumeMounts", ())):
        here, path = f"{field}.volumeMounts[{i}]", mount.get("mountPath", "")
        if not mount.get("name"):
            faults.append(required(f"{here}.name"))
        elif mount["name"] not in volumes:
            faults.append(Fault("FieldValueNotFound", f"{here}.name", f"Not found: {_json(mount['name'])}"))
        if not path:
            faults.append(required(f"{here}.mountPath"))
        elif path in paths:
            faults.append(invalid(f"{here}.mountPath", path, "must be unique"))
        paths.add(path)
    policies = ("Always", "IfNotPresent", "Never")
    if container["imagePullPolicy"] not in policies:
        faults.append(unsupported(f"{field}.imagePullPolicy", container["imagePullPolicy"], policies))
    faults += _resources(container["resources"], f"{field}.resources")
    return faults + _users(container.get("securityContext", {}), f"{field}.securityContext")


def _ports(ports: list[Object], field: str) -> list[Fault]:
    faults, names = [], set()
    for i, port in enumerate(ports):
        number, name = port.get("containerPort", 0), port.get("name")
        if name and name in names:
            faults.append(duplicate(f"{field}[{i}].name", name))
        names.add(name)
        if not number:
            faults.append(required(f"{field}[{i}].containerPort"))
        elif not 1 <= number <= 65535:
            faults.append(invalid(f"{field}[{i}].containerPort", number, _PORT))
        if port["protocol"] not in ("SCTP", "TCP", "UDP"):
            faults.append(unsupported(f"{field}[{i}].protocol", port["protocol"], ("SCTP", "TCP", "UDP")))
    return faults


def _env(entry: Object, field: str) -> list[Fault]:
    name, faults = entry.get("name", ""), []
    if not name:
        faults.append(required(f"{field}.name"))
    elif "=" in name or not all(32 <= ord(letter) < 127 for letter in name):
        words = "a valid environment variable name must consist only of printable ASCII characters other than '='"
        faults.append(invalid(f"{field}.name", name, words))
    if entry.get("value") and "valueFrom" in entry:
        faults.append(invalid(f"{field}.valueFrom", "", "may not be specified when `value` is not empty"))
    return faults


def _resources(resources: Object, field: str) -> list[Fault]:
    limits, requests, faults = resources.get("limits", {}), resources.get("requests", {}), []
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in sorted(amounts.items()):
            here = f"{field}.{kind}[{name}]"
            if "/" not in name and name not in _STANDARD and not name.startswith("hugepages-"):
                faults.append(invalid(here, name, "must be a standard resource type or fully qualified"))
            value = parse_quantity(amount)
            if value < 0:
                faults.append(invalid(here, amount, "must be greater than or equal to 0"))
            elif "/" in name and value.denominator != 1:
                faults.append(invalid(here, amount, "must be an integer"))
        if kind == "limits":
            continue
        for name, amount in sorted(requests.items()):
            extended = "/" in name or name.startswith("hugepages-")
            if name in limits and extended and parse_quantity(amount) != parse_quantity(limits[name]):
                words = f"must be equal to {name} limit of {limits[name]}"
                faults.append(invalid(f"{field}.requests", amount, words))
            elif name in limits and not extended and parse_quantity(amount) > parse_quantity(limits[name]):
                words = f"must be less than or equal to {name} limit of {limits[name]}"
                faults.append(invalid(f"{field}.requests", amount, words))
            elif extended and name not in limits:
                faults.append(required(f"{field}.limits", "Limit must be set for non overcommitable resources"))
    return faults


def _users(context: Object, field: str) -> list[Fault]:
    words = "must be between 0 and 2147483647, inclusive"
    ids = {key: context[key] for key in ("runAsUser", "runAsGroup", "fsGroup") if key in context}
    return [invalid(f"{field}.{key}", value, words) for key, value in ids.items() if not 0 <= value < 2**31]


def _spread(constraints: list[Object], field: str) -> list[Fault]:
    faults, actions = [], ("DoNotSchedule", "ScheduleAnyway")
    for i, constraint in enumerate(constraints):
        here = f"{field}[{i}]"
        if constraint.get("maxSkew", 0) <= 0:
            faults.append(invalid(f"{here}.maxSkew", constraint.get("maxSkew", 0), "must be greater than zero"))
        if not constraint.get("topologyKey"):
            faults.append(required(f"{here}.topologyKey", "can not be empty"))
        if constraint.get("whenUnsatisfiable") not in actions:
            faults.append(unsupported(f"{here}.whenUnsatisfiable", constraint.get("whenUnsatisfiable", ""), actions))
    return faults


def _tolerations(tolerations: list[Object], field: str) -> list[Fault]:
    faults, effects = [], ("NoSchedule", "PreferNoSchedule", "NoExecute")
    for i, toleration in enumerate(tolerations):
        here, effect = f"{field}[{i}]", toleration.get("effect", "")
        operator = toleration.get("operator", "Equal")
        if toleration.get("key") and (words := _qualified(toleration["key"])):
            faults.append(invalid(f"{here}.key", toleration["key"], words))
        if not toleration.get("key") and operator != "Exists":
            words = 'operator must be Exists when `key` is empty, which means "match all values and all keys"'
            faults.append(invalid(f"{here}.operator", toleration.get("operator", ""), words))
        if "tolerationSeconds" in toleration and effect != "NoExecute":
            words = "effect must be 'NoExecute' when `tolerationSeconds` is set"
            faults.append(invalid(f"{here}.effect", effect, words))
        if operator == "Exists" and toleration.get("value"):
            faults.append(invalid(f"{here}.operator", toleration, "value must be empty when `operator` is 'Exists'"))
        elif operator not in ("Equal", "Exists"):
            faults.append(unsupported(f"{here}.operator", operator, ("Equal", "Exists")))
        if effect and effect not in effects:
            faults.append(unsupported(f"{here}.effect", effect, effects))
    return faults


def _pod_update(new: Object, old: Object) -> list[Fault]:
    def fixed(obj: Object) -> Object:
        free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")
        spec = {key: value for key, value in obj["spec"].items() if key not in free}
        for group in ("containers", "initContainers"):
            spec[group] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(group, ())]
        return spec

    words = (
        "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
        "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
        "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
    )
    return [] if fixed(new) == fixed(old) else [forbidden("spec", words)]


# --- jobs -----------------------------------------------------------------------------------------------------


def _job(obj: Object) -> list[Fault]:
    spec, meta = obj["spec"], obj["metadata"]
    faults = _selector(obj) + _job_spec(spec)
    last = f"{meta.get('name', '')}-{spec.get('completions', 0) - 1}"
    named = spec.get("completions", 0) > 0 and (not meta.get("generateName") or meta.get("name"))
    if spec["completionMode"] == "Indexed" and named and (len(last) > 63 or not _LABEL.fullmatch(last)):
        words = f"will not able to create pod with invalid DNS label: {last}"
        faults.append(invalid("metadata.name", meta.get("name", ""), words))
    return faults


def _job_spec(spec: Object) -> list[Fault]:
    faults = _counts(spec)
    if "podFailurePolicy" in spec:
        faults += _failure_policy(spec)
    if "successPolicy" in spec:
        faults += _success_policy(spec)
    allowed = ("Failed",) if "podFailurePolicy" in spec else ("Failed", "TerminatingOrFailed")
    if spec["podReplacementPolicy"] not in allowed:
        faults.append(unsupported("spec.podReplacementPolicy", spec["podReplacementPolicy"], allowed))
    faults += _template(spec["template"], "spec.template")
    policy, field = spec["template"]["spec"]["restartPolicy"], "spec.template.spec.restartPolicy"
    if policy == "Always":
        faults.append(required(field, 'valid values: "OnFailure", "Never"'))
    elif policy != "Never" and "podFailurePolicy" in spec:
        faults.append(invalid(field, policy, 'only "Never" is supported when podFailurePolicy is specified'))
    labels, selector = spec["template"].get("metadata", {}).get("labels", {}), spec.get("selector", {})
    if not selector.get("matchLabels", {}).items() <= labels.items():
        faults.append(invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`"))
    return faults


def _selector(obj: Object) -> list[Fault]:
    spec, uid, faults = obj["spec"], obj["metadata"].get("uid", ""), []
    labels = spec["template"].get("metadata", {}).get("labels", {})
    wanted = spec.get("selector", {}).get("matchLabels", {})
    if spec.get("manualSelector"):
        if not wanted:
            faults.append(required("spec.selector"))
        return faults
    expected = {"controller-uid": uid, "batch.kubernetes.io/controller-uid": uid}
    for key, value in expected.items():
        if labels.get(key) != value:
            faults.append(invalid(f"spec.template.metadata.labels[{key}]", labels, f"must be '{value}'"))
    if wanted != {"batch.kubernetes.io/controller-uid": uid}:
        faults.append(invalid("spec.selector", spec.get("selector"), "`selector` not auto-generated"))
    return faults


def _counts(spec: Object) -> list[Fault]:
    whole = ("parallelism", "completions", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished")
    faults = []
    for key in (*whole, "backoffLimitPerIndex", "maxFailedIndexes"):
        if spec.get(key, 0) < 0:
            faults.append(invalid(f"spec.{key}", spec[key], "must be greater than or equal to 0"))
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        faults.append(required("spec.backoffLimitPerIndex", "when maxFailedIndexes is specified"))
    mode = spec["completionMode"]
    if mode not in ("NonIndexed", "Indexed"):
        faults.append(unsupported("spec.completionMode", mode, ("NonIndexed", "Indexed")))
    elif mode == "Indexed":
        if "completions" not in spec:
            faults.append(required("spec.completions", "when completion mode is Indexed"))
        if spec["parallelism"] > 100_000:
            words = "must be less than or equal to 100000 when completion mode is Indexed"
            faults.append(invalid("spec.parallelism", spec["parallelism"], words))
    else:
        for key in ("backoffLimitPerIndex", "maxFailedIndexes"):
            if key in spec:
                faults.append(invalid(f"spec.{key}", spec[key], "requires indexed completion mode"))
    return faults


def _failure_policy(spec: Object) -> list[Fault]:
    pod, faults = spec["template"]["spec"], []
    names = [c.get("name") for c in (*pod.get("containers", ()), *pod.get("initContainers", ()))]
    actions = ("Count", "FailIndex", "FailJob", "Ignore")
    for i, rule in enumerate(spec["podFailurePolicy"].get("rules", ())):
        here, action = f"spec.podFailurePolicy.rules[{i}]", rule.get("action", "")
        if not action:
            faults.append(required(f"{here}.action", f"valid values: [{' '.join(_json(a) for a in actions)}]"))
        elif action == "FailIndex" and "backoffLimitPerIndex" not in spec:
            faults.append(invalid(f"{here}.action", action, "requires the backoffLimitPerIndex to be set"))
        elif action not in actions:
            faults.append(unsupported(f"{here}.action", action, actions))
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if codes is not None:
            faults += _exit_codes(codes, f"{here}.onExitCodes", names)
        for j, condition in enumerate(conditions or ()):
            if condition.get("status") not in ("False", "True", "Unknown"):
                field = f"{here}.onPodConditions[{j}].status"
                faults.append(unsupported(field, condition.get("status", ""), ("False", "True", "Unknown")))
        if codes is not None and conditions:
            words = "specifying both OnExitCodes and OnPodConditions is not supported"
            faults.append(Fault("FieldValueInvalid", here, f"Invalid value: {words}"))
        if codes is None and not conditions:
            words = "specifying one of OnExitCodes and OnPodConditions is required"
            faults.append(Fault("FieldValueInvalid", here, f"Invalid value: {words}"))
    return faults


def _exit_codes(codes: Object, field: str, names: list[str | None]) -> list[Fault]:
    operator, values, faults = codes.get("operator", ""), codes.get("values", []), []
    if not operator:
        faults.append(required(f"{field}.operator", 'valid values: ["In" "NotIn"]'))
    elif operator not in ("In", "NotIn"):
        faults.append(unsupported(f"{field}.operator", operator, ("In", "NotIn")))
    if codes.get("containerName") is not None and codes["containerName"] not in names:
        words = "must be one of the container or initContainer names in the pod template"
        faults.append(invalid(f"{field}.containerName", codes["containerName"], words))
    if not values:
        faults.append(invalid(f"{field}.values", values, "at least one value is required"))
    for i, value in enumerate(values):
        if operator == "In" and value == 0:
            faults.append(invalid(f"{field}.values[{i}]", value, "must not be 0 for the In operator"))
        if value in values[:i]:
            faults.append(duplicate(f"{field}.values[{i}]", value))
    if values != sorted(values):
        faults.append(invalid(f"{field}.values", values, "must be ordered"))
    return faults


def _success_policy(spec: Object) -> list[Fault]:
    if spec["completionMode"] != "Indexed":
        return [invalid("spec.successPolicy", spec["successPolicy"], "requires indexed completion mode")]
    rules, faults, completions = spec["successPolicy"].get("rules", []), [], spec.get("completions", 0)
    if not rules:
        words = "at least one rules must be specified when the successPolicy is specified"
        faults.append(required("spec.successPolicy.rules", words))
    for i, rule in enumerate(rules):
        here, indexes, count = (
            f"spec.successPolicy.rules[{i}]",
            rule.get("succeededIndexes"),
            rule.get("succeededCount"),
        )
        if indexes is None and count is None:
            faults.append(required(here, "at least one of succeededCount or succeededIndexes must be specified"))
        if indexes is not None and (words := _indexes(indexes, completions)):
            words = f"error parsing succeededIndexes: {words}"
            faults.append(invalid(f"{here}.succeededIndexes", indexes, words))
        if count is not None and count < 0:
            faults.append(invalid(f"{here}.succeededCount", count, "must be greater than or equal to 0"))
        elif count is not None and count > completions:
            words = f"must be less than or equal to {completions} (the number of specified completions)"
            faults.append(invalid(f"{here}.succeededCount", count, words))
    return faults


def _indexes(text: str, completions: int) -> str:
    last = -1
    for interval in text.split(","):
        limits = interval.split("-")
        if len(limits) > 2:
            words = "violates the requirement that an index interval can have at most two parts separated by '-'"
            return f'the fragment "{interval}" {words}'
        for limit in limits:
            if not limit.isdigit():
                return f'cannot convert string to integer for index: "{limit}"'
            if int(limit) >= completions:
                return f'too large index: "{limit}"'
            if int(limit) <= last:
                return f"non-increasing order, previous: {last}, current: {limit}"
            last = int(limit)
    return ""


def _job_update(new: Object, old: Object) -> list[Fault]:
    spec, before = new["spec"], old["spec"]
    faults = _job_spec(spec)
    if spec.get("completions") != before.get("completions"):
        if spec["completionMode"] != "Indexed":
            faults.append(invalid("spec.completions", spec.get("completions"), _FIXED))
        elif spec.get("completions") != spec["parallelism"]:
            words = "can only be modified in tandem with spec.parallelism"
            faults.append(invalid("spec.completions", spec.get("completions"), words))
    if spec.get("selector") != before.get("selector"):
        faults.append(invalid("spec.selector", spec.get("selector"), _FIXED))
    faults += _template_update(spec, before, old)
    for key in ("completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy", "successPolicy"):
        if spec.get(key) != before.get(key):
            faults.append(invalid(f"spec.{key}", spec.get(key), _FIXED))
    return faults


def _template_update(spec: Object, before: Object, old: Object) -> list[Fault]:
    template, fixed = spec["template"], json.loads(json.dumps(before["template"]))
    idle = before.get("suspend") and not old.get("status", {}).get("active")
    if not idle:
        return [] if template == fixed else [invalid("spec.template", template, _FIXED)]
    fixed["metadata"] = template["metadata"]
    for key in _SCHEDULING:
        fixed["spec"].pop(key, None)
        if key in template["spec"]:
            fixed["spec"][key] = template["spec"][key]
    for group in ("containers", "initContainers"):
        for was, now in zip(fixed["spec"].get(group, ()), template["spec"].get(group, ()), strict=False):
            was["resources"] = now.get("resources", {})
    return [] if template == fixed else [invalid("spec.template.spec", template["spec"], _FIXED)]


# --- the rest -------------------------------------------------------------------------------------------------


def _service(obj: Object) -> list[Fault]:
    spec, faults, names = obj["spec"], [], set()
    headless = spec.get("clusterIP") == "None" or spec["type"] == "ExternalName"
    if not spec.get("ports") and not headless:
        faults.append(required("spec.ports"))
    for i, port in enumerate(spec.get("ports", ())):
        here = f"spec.ports[{i}]"
        if len(spec["ports"]) > 1 and not port.get("name"):
            faults.append(required(f"{here}.name"))
        elif port.get("name") in names:
            faults.append(duplicate(f"{here}.name", port.get("name")))
        names.add(port.get("name"))
        if not 1 <= port.get("port", 0) <= 65535:
            faults.append(invalid(f"{here}.port", port.get("port", 0), _PORT))
        if port["protocol"] not in ("SCTP", "TCP", "UDP"):
            faults.append(unsupported(f"{here}.protocol", port["protocol"], ("SCTP", "TCP", "UDP")))
        target = port["targetPort"]
        if isinstance(target, int) and not 1 <= target <= 65535:
            faults.append(invalid(f"{here}.targetPort", target, _PORT))
    kinds = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
    if spec["type"] not in kinds:
        faults.append(unsupported("spec.type", spec["type"], kinds))
    return faults + _labels(spec.get("selector", {}), "spec.selector")


def _service_update(new: Object, old: Object) -> list[Fault]:
    before, now = old["spec"].get("clusterIP"), new["spec"].get("clusterIP")
    if before == now:
        return []
    return [invalid("spec.clusterIPs[0]", [now], "may not change once set")]


def _config(obj: Object) -> list[Fault]:
    faults, size = [], 0
    for part in ("data", "binaryData"):
        for key, value in obj.get(part, {}).items():
            size += len(value.encode())
            if not _KEY.fullmatch(key):
                faults.append(invalid(f"{part}[{key}]", key, _KEY_WORDS))
    if size > 1024 * 1024:
        faults.append(Fault("FieldValueTooLong", "[]", "Too long: may not be more than 1048576 bytes"))
    return faults


def _config_update(new: Object, old: Object) -> list[Fault]:
    if not old.get("immutable") or new.get("data") == old.get("data"):
        return []
    return [forbidden("data", "field is immutable when `immutable` is set")]


def _binding_update(new: Object, old: Object) -> list[Fault]:
    same = new.get("roleRef") == old.get("roleRef")
    return [] if same else [invalid("roleRef", new.get("roleRef"), "cannot change roleRef")]


_CHECKS = {"jobs": _job, "pods": _pod, "services": _service, "configmaps": _config, "secrets": _config}
_UPDATES = {"jobs": _job_update, "pods": _pod_update, "services": _service_update, "configmaps": _config_update}
_UPDATES |= {"secrets": _config_update, "rolebindings": _binding_update, "clusterrolebindings": _binding_update}
