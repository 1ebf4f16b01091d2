"""What the API server would refuse, found before anything is sent: names, labels, quantities and sizes of a manifest.

The rules are Kubernetes' own (`k8s.io/apimachinery/pkg/util/validation`, `k8s.io/apimachinery/pkg/api/resource` and the
validation of `batch/v1`), and the Job's index that becomes part of a pod's hostname. Kinds that not every cluster has
are held against the schemas of their CustomResourceDefinitions (`schemas/`, trimmed to what is rendered). Nothing here
needs a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, cast

from headway.training.launch import AttemptRefused

# A DNS label; what Services, Jobs with pods, and hostnames are held to.
NAME_LIMIT = 63
_SUBDOMAIN_LIMIT = 253
# Of all annotations of one object together.
_ANNOTATIONS_LIMIT = 256 << 10

_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]+)|([EPTGMk]i?|Ki|m|u|n)?)")

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_SCHEMAS = Path(__file__).with_name("schemas")
_DIVISIBLE = ("cpu", "memory", "ephemeral-storage")
_MIB = 1 << 20


class Problem(NamedTuple):
    """One fault of a manifest: the field's path in the API's own words, and what is wrong with its value."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class ManifestInvalid(AttemptRefused):
    """A manifest that no cluster would take; `problems` lists every fault with its field path."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)), "mend the platform profile or the run spec; nothing was sent")
        self.problems = list(problems)


def name_problem(name: str, limit: int = NAME_LIMIT) -> str:
    """What keeps `name` from being a DNS-1035 label of at most `limit` characters; "" when nothing does."""
    if len(name) > limit:
        return f"{name!r} has {len(name)} characters; the limit is {limit}"
    if _LABEL_1035.fullmatch(name) is None:
        return f"{name!r} is no DNS label: a lower-case letter first, then a-z, 0-9 and '-', and no '-' at the end"
    return ""


def label_key_problem(key: str) -> str:
    """What keeps `key` from naming a label or an annotation; "" when nothing does."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _SUBDOMAIN_LIMIT or _SUBDOMAIN.fullmatch(prefix) is None):
        return f"prefix {prefix!r} is no DNS name"
    if len(name) > NAME_LIMIT:
        return f"{name!r} has {len(name)} characters; the limit is {NAME_LIMIT}"
    if not name or _QUALIFIED.fullmatch(name) is None:
        return f"{name!r} is no label name: letters, digits, '-', '_' and '.', beginning and ending alphanumerically"
    return ""


def label_value_problem(value: str) -> str:
    """What keeps `value` from being a label's value; "" when nothing does. The empty value is legal."""
    if len(value) > NAME_LIMIT:
        return f"{value!r} has {len(value)} characters; the limit is {NAME_LIMIT}"
    if value and _QUALIFIED.fullmatch(value) is None:
        return f"{value!r} is no label value: letters, digits, '-', '_' and '.', beginning and ending alphanumerically"
    return ""


def quantity(value: str | int) -> Decimal:
    """A quantity (`64Mi`, `500m`, `1.5`, `2e9`) as a number of its base unit: bytes, cores, pieces.

    Raises:
        ValueError: it is no quantity, or a negative one.
    """
    found = _QUANTITY.fullmatch(str(value))
    if found is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is no quantity: write a number with m, k, M, G, T, Ki, Mi, Gi or Ti, such as 64Mi")
    number, exponent, suffix = found.groups()
    if exponent:
        return Decimal(number + exponent)
    if suffix in _BINARY:
        return Decimal(number) * (1 << _BINARY[suffix])
    return Decimal(number).scaleb(_DECIMAL[suffix or ""])


def problems_of(manifest: Mapping[str, Any]) -> list[Problem]:
    """Every fault of one rendered document (Job, Service, JobSet, TrainJob), each with its field path."""
    kind, spec = manifest.get("kind"), manifest.get("spec", {})
    found = list(_metadata(manifest.get("metadata", {}), "metadata", named=True))
    if kind == "Job":
        found += _job(spec, "spec", manifest.get("metadata", {}).get("name", ""))
    elif kind == "JobSet":
        found += _job_set(spec, "spec", manifest["metadata"]["name"])
    elif kind == "TrainingRuntime":
        # The JobSet that is made of it bears the TrainJob's name, which is the runtime's own here.
        found += _job_set(spec["template"]["spec"], "spec.template.spec", manifest["metadata"]["name"])
    elif kind == "TrainJob":
        found += _train_job(spec)
    elif kind == "Service":
        found += _labels(spec.get("selector", {}), "spec.selector")
    return found


def check(manifest: Mapping[str, Any]) -> None:
    """Refuse a document that no cluster would take.

    Raises:
        ManifestInvalid: names every fault.
    """
    if problems := problems_of(manifest):
        raise ManifestInvalid(problems)


def check_schema(manifest: Mapping[str, Any]) -> None:
    """Refuse a JobSet, TrainJob or TrainingRuntime that its CustomResourceDefinition would not take.

    Raises:
        ManifestInvalid: names every fault.
    """
    from jsonschema import Draft202012Validator

    schema = json.loads((_SCHEMAS / f"{manifest['kind'].lower()}.json").read_text(encoding="utf-8"))
    faults = Draft202012Validator(schema).iter_errors(manifest)
    problems = [Problem(fault.json_path.removeprefix("$.").removeprefix("$"), fault.message) for fault in faults]
    if problems:
        raise ManifestInvalid(sorted(problems))


def _metadata(metadata: Mapping[str, Any], path: str, *, named: bool) -> Iterator[Problem]:
    if named:
        yield from _one(f"{path}.name", name_problem(metadata.get("name", "")))
    if "namespace" in metadata:
        yield from _one(f"{path}.namespace", name_problem_1123(metadata["namespace"]))
    yield from _labels(metadata.get("labels", {}), f"{path}.labels")
    annotations = cast("Mapping[str, str]", metadata.get("annotations", {}))
    for key, value in annotations.items():
        # The API server asks this of the lower-cased key.
        yield from _one(f"{path}.annotations[{key}]", label_key_problem(key.lower()) or _text_problem(value))
    size = sum(len(k.encode()) + len(str(v).encode()) for k, v in annotations.items())
    if size > _ANNOTATIONS_LIMIT:
        yield Problem(f"{path}.annotations", f"{size} bytes together; the limit is {_ANNOTATIONS_LIMIT}")


def name_problem_1123(name: str) -> str:
    """As `name_problem`, by the rule of namespaces, volumes and claims: a digit may come first."""
    return "" if name[:1].isdigit() and not name_problem(f"a{name[1:]}") else name_problem(name)


def _labels(labels: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for key, value in labels.items():
        yield from _one(f"{path}[{key}]", label_key_problem(key) or _text_problem(value) or label_value_problem(value))


def _text_problem(value: object) -> str:
    return "" if isinstance(value, str) else f"{value!r} is no text"


def _job_set(spec: Mapping[str, Any], path: str, name: str) -> Iterator[Problem]:
    for i, part in enumerate(spec.get("replicatedJobs", [])):
        # The controller calls the Jobs inside <set>-<part>-<replica>.
        child = f"{name}-{part['name']}-{max(1, part.get('replicas', 1)) - 1}"
        yield from _job(part["template"]["spec"], f"{path}.replicatedJobs[{i}].template.spec", child)


def _job(spec: Mapping[str, Any], path: str, name: str) -> Iterator[Problem]:
    completions, parallelism = spec.get("completions", 1), spec.get("parallelism", 1)
    for field, value in (("completions", completions), ("parallelism", parallelism)):
        if value < 1:
            yield Problem(f"{path}.{field}", f"{value} is less than 1")
    if spec.get("completionMode") == "Indexed":
        host = f"{name}-{max(1, completions) - 1}"
        if len(host) > NAME_LIMIT:
            room = NAME_LIMIT - (len(host) - len(name))
            yield Problem(
                "metadata.name",
                f"pod {completions - 1} would be called {host!r}, {len(host)} characters; the limit is {NAME_LIMIT}, "
                f"so {room} for {name!r}",
            )
    template = spec["template"]
    yield from _metadata(template.get("metadata", {}), f"{path}.template.metadata", named=False)
    yield from _pod(template["spec"], f"{path}.template.spec")


def _pod(spec: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in ("subdomain", "serviceAccountName", "priorityClassName"):
        if name in spec:
            rule = name_problem if name == "subdomain" else _subdomain_problem
            yield from _one(f"{path}.{name}", rule(spec[name]))
    yield from _labels(spec.get("nodeSelector", {}), f"{path}.nodeSelector")
    volumes = cast("list[dict[str, Any]]", spec.get("volumes", []))
    yield from _twice([volume["name"] for volume in volumes], f"{path}.volumes", "name")
    sizes: dict[str, Decimal] = {}
    for i, volume in enumerate(volumes):
        yield from _one(f"{path}.volumes[{i}].name", name_problem_1123(volume["name"]))
        memory = volume.get("emptyDir", {})
        if "sizeLimit" in memory:
            where = f"{path}.volumes[{i}].emptyDir.sizeLimit"
            size, problem = _quantity(memory["sizeLimit"])
            yield from _one(where, problem)
            if memory.get("medium") == "Memory":
                sizes[where] = size
    names = {volume["name"] for volume in volumes}
    for i, container in enumerate(spec.get("containers", [])):
        yield from _container(container, f"{path}.containers[{i}]", names)
        yield from _shared_memory(container, f"{path}.containers[{i}]", sizes)


def _container(container: Mapping[str, Any], path: str, volumes: set[str]) -> Iterator[Problem]:
    yield from _one(f"{path}.name", name_problem_1123(container.get("name", "")))
    if not container.get("image"):
        yield Problem(f"{path}.image", "missing")
    yield from _environment(container.get("env", []), f"{path}.env")
    yield from resources_problems(container.get("resources", {}), f"{path}.resources")
    mounts = cast("list[dict[str, Any]]", container.get("volumeMounts", []))
    yield from _twice([mount["mountPath"] for mount in mounts], f"{path}.volumeMounts", "mountPath")
    for i, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield Problem(f"{path}.volumeMounts[{i}].name", f"{mount['name']!r} is none of the volumes")
        if ":" in mount["mountPath"] or not mount["mountPath"].startswith("/"):
            yield Problem(f"{path}.volumeMounts[{i}].mountPath", f"{mount['mountPath']!r} is no absolute path")


def _environment(entries: Sequence[Mapping[str, Any]], path: str) -> Iterator[Problem]:
    yield from _twice([entry["name"] for entry in entries], path, "name")
    for i, entry in enumerate(entries):
        if _ENV_NAME.fullmatch(entry["name"]) is None:
            yield Problem(f"{path}[{i}].name", f"{entry['name']!r} is no name of a variable")
        if "value" in entry:
            yield from _one(f"{path}[{i}].value", _text_problem(entry["value"]))


def resources_problems(resources: Mapping[str, Mapping[str, str | int]], path: str) -> Iterator[Problem]:
    """Quantities that are none, requests above their limits, and parts of what comes whole (GPUs)."""
    numbers: dict[tuple[str, str], Decimal] = {}
    for side in ("requests", "limits"):
        for name, value in resources.get(side, {}).items():
            where = f"{path}.{side}[{name}]"
            number, problem = _quantity(value)
            numbers[side, name] = number
            if not problem and name not in _DIVISIBLE and number != number.to_integral_value():
                problem = f"{value!r}: {name} comes in whole pieces"
            yield from _one(where, problem or _one_resource(name))
    for (side, name), number in numbers.items():
        limit = numbers.get(("limits", name))
        if side == "requests" and limit is not None and number > limit:
            asked, most = resources["requests"][name], resources["limits"][name]
            yield Problem(f"{path}.requests[{name}]", f"{asked!r} is more than the limit {most!r}")


def _one_resource(name: str) -> str:
    return "" if name in _DIVISIBLE else label_key_problem(name)


def _shared_memory(container: Mapping[str, Any], path: str, sizes: Mapping[str, Decimal]) -> Iterator[Problem]:
    """A memory volume is charged to the container that fills it: more than its limit is an OOM kill in waiting."""
    given = container.get("resources", {}).get("limits", {}).get("memory")
    limit, problem = _quantity(given) if given is not None else (Decimal(0), "none")
    for where, size in sizes.items():
        if not problem and size >= limit:
            yield Problem(where, f"{_mib(size)} of shared memory do not fit into the memory limit {given!r} of {path}")


def _mib(size: Decimal) -> str:
    return f"{size / _MIB:.0f} MiB"


def _train_job(spec: Mapping[str, Any]) -> Iterator[Problem]:
    trainer = spec.get("trainer", {})
    yield from _one("spec.runtimeRef.name", _subdomain_problem(spec.get("runtimeRef", {}).get("name", "")))
    yield from _environment(trainer.get("env", []), "spec.trainer.env")
    yield from resources_problems(trainer.get("resourcesPerNode", {}), "spec.trainer.resourcesPerNode")


def _subdomain_problem(name: str) -> str:
    fits = len(name) <= _SUBDOMAIN_LIMIT and _SUBDOMAIN.fullmatch(name) is not None
    return "" if fits else f"{name!r} is no name of an object: a-z, 0-9, '-' and '.', at most {_SUBDOMAIN_LIMIT}"


def _quantity(value: str | int) -> tuple[Decimal, str]:
    try:
        return quantity(value), ""
    except ValueError as error:
        return Decimal(0), str(error)


def _twice(names: Sequence[str], path: str, field: str) -> Iterator[Problem]:
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Problem(f"{path}[{i}].{field}", f"{name!r} stands twice")


def _one(field: str, problem: str) -> Iterator[Problem]:
    if problem:
        yield Problem(field, problem)
