"""The platform profile: what a cluster gives to training pods. A YAML file, named by `HEADWAY_PLATFORM`.

It holds what is the same for all runs of a place (image, volume, resources, queue); what a run computes is in its run
spec alone. Secrets are named here and never written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from headway.errors import HeadwayError
from headway.training.kubernetes.validate import (
    label_key_problem,
    label_value_problem,
    name_problem_1123,
    quantity,
)

# A password inside a URL, such as a proxy's.
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SECRET_NAME = re.compile(r"(?i)(password|passwd|secret|token(?!iz)|credential|api_?key|access_?key|private_?key)")
_RESERVED_ENVIRONMENT = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|JOB_COMPLETION_INDEX)"
)
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_LEAST_SHARED_MEMORY = quantity("64Mi")


class ProfileInvalid(HeadwayError):
    """The platform profile says something that it may not say; every fault is named with file, line and field."""


def _quantity(text: str) -> str:
    if quantity(text) <= 0:
        raise ValueError(f"{text!r} is nothing; write a positive quantity such as 500m or 4Gi")
    return text


def _written(value: object) -> object:
    """A plain number in YAML, such as `cpu: 2`, is a quantity as well."""
    return str(value) if type(value) is int else value


def _name(text: str) -> str:
    if problem := name_problem_1123(text):
        raise ValueError(problem)
    return text


def _label_key(text: str) -> str:
    if problem := label_key_problem(text):
        raise ValueError(problem)
    return text


def _label_value(text: str) -> str:
    if problem := label_value_problem(text):
        raise ValueError(problem)
    return text


def _absolute(text: str) -> str:
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts or str(path) == "/" or ":" in text:
        raise ValueError(f"{text!r} is no absolute path of a folder")
    return str(path)


Quantity = Annotated[str, BeforeValidator(_written), AfterValidator(_quantity)]
Name = Annotated[str, AfterValidator(_name)]
LabelKey = Annotated[str, AfterValidator(_label_key)]
LabelValue = Annotated[str, AfterValidator(_label_value)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Seconds = Annotated[int, Field(ge=1, le=86_400 * 30)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Volume(_Part):
    """The volume that Headway and every training pod share, at the same path in both."""

    mount_path: AbsolutePath = Field(description="Where it is mounted; `HEADWAY_HOME` lies below it.")
    claim: Name = Field(default="", validate_default=False, description="A PersistentVolumeClaim (ReadWriteMany).")
    host_path: AbsolutePath = Field(default="", validate_default=False, description="A folder of every node instead.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.claim) == bool(self.host_path):
            raise ValueError("give either `claim` or `host_path`")
        return self


class Gpu(_Part):
    """What each pod gets of the cluster's accelerators."""

    resource: LabelKey = Field(default="nvidia.com/gpu", description="Name of the extended resource.")
    count: int = Field(default=0, ge=0, le=64, description="Devices per pod (node of the run).")


class Toleration(_Part):
    """One toleration of the pods, in the API's own words."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = None


class Topology(_Part):
    """How the pods of one attempt are spread."""

    key: LabelKey = Field(default="kubernetes.io/hostname", description="Node label that names a place.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        default="DoNotSchedule", description="Whether pods wait for a place of their own or share one."
    )


class SecretVariable(_Part):
    """An environment variable whose value is a key of a Secret."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    secret: Name
    key: str = Field(pattern=r"^[-._a-zA-Z0-9]+$")


class Security(_Part):
    """What may be loosened of the security context; everything else is fixed."""

    read_only_root: bool = Field(default=True, description="The root file system is read-only; /tmp is a volume.")


class Queue(_Part):
    """Kueue decides when an attempt starts."""

    local_queue: Name = Field(description="LocalQueue of the namespace.")
    priority_class: Name | None = Field(default=None, description="WorkloadPriorityClass.")


class Platform(_Part):
    """The profile, whole."""

    namespace: Name = Field(description="Where Jobs and Services are made.")
    image: str = Field(min_length=1, description="Image of the trainer, by digest (name@sha256:...).")
    allow_tags: bool = Field(default=False, description="Accept an image that is named by a tag, which may move.")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[Name, ...] = ()
    python: str = Field(default="python", min_length=1, description="The interpreter inside the image.")
    context: str = Field(
        default="", description="Context of the kubeconfig; empty: KUBECONFIG's or the pod's own account."
    )
    volume: Volume
    gpu: Gpu = Gpu()
    cpu: Quantity = Field(default="1", description="CPU that a pod requests; there is no limit.")
    memory: Quantity = Field(default="2Gi", description="Memory of a pod's processes.")
    shared_memory: Quantity = Field(
        default="64Mi",
        description="Size of /dev/shm, for data workers and collectives; added to `memory` in request and limit.",
    )
    service_account: Name = Field(default="default", description="Account of the training pods; they get no token.")
    priority_class: Name | None = Field(default=None, description="PriorityClass of the pods.")
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    topology: Topology = Topology()
    environment: dict[str, str] = Field(default_factory=dict, description="Variables for the ranks, such as NCCL_*.")
    secret_environment: tuple[SecretVariable, ...] = ()
    run_as_user: int = Field(default=65532, ge=1, description="Never root.")
    run_as_group: int = Field(default=65532, ge=1)
    fs_group: int = Field(default=65532, ge=1)
    security: Security = Security()
    grace_s: Seconds = Field(default=120, description="Between SIGTERM and SIGKILL; at least the run's own grace.")
    node_lost_after_s: Seconds = Field(
        default=30, description="How long a pod stays bound to a node that does not answer before it is given up."
    )
    max_pending_s: Seconds | None = Field(
        default=None,
        description="How long a pod may wait for a place (unset: no limit), or for image, Secret, volume (unset: 600).",
    )
    queue: Queue | None = None
    port: int = Field(default=29500, ge=1024, le=65535, description="Port of the rendezvous on node 0.")
    active_deadline_s: Seconds | None = Field(
        default=None, description="Longest time from an attempt's first training step to its end."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.allow_tags and _DIGEST.fullmatch(self.image) is None:
            raise ValueError(f"image: {self.image!r} has no @sha256: digest; a tag may move (or set allow_tags: true)")
        if quantity(self.shared_memory) < _LEAST_SHARED_MEMORY:
            raise ValueError(
                f"shared_memory: {self.shared_memory!r} is less than 64Mi, what every container has anyway"
            )
        for name, value in self.environment.items():
            if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
                what = "name looks like a secret's" if _SECRET_NAME.search(name) else "value holds a password"
                raise ValueError(f"environment.{name}: the {what}; use secret_environment, which only names it")
            if _RESERVED_ENVIRONMENT.fullmatch(name) or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                raise ValueError(f"environment.{name}: the launcher sets this itself, or it is no variable's name")
        return self

    @property
    def memory_bytes(self) -> Decimal:
        """What a pod requests and may use: its processes' memory and /dev/shm, which is charged to them."""
        return quantity(self.memory) + quantity(self.shared_memory)


def load_platform(file: Path) -> Platform:
    """Read a profile.

    Raises:
        ProfileInvalid: names file, line and field of every fault.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileInvalid(f"platform profile {file}: {error}", "set HEADWAY_PLATFORM to a readable file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _invalid([(file, mark.line + 1 if mark else 1, "yaml", str(getattr(error, "problem", error)))]) from error
    if node is None or not isinstance(content, dict):
        raise _invalid([(file, 1, "$", "holds no mapping")])
    if twice := list(_repeated(node, ())):
        raise _invalid([(file, line, _shown(path), "is written twice") for path, line in twice])
    try:
        return Platform.model_validate(_tuples(cast("dict[str, Any]", content)))
    except ValidationError as error:
        raise _invalid([(file, *_fault(found, node)) for found in error.errors()]) from error


def _invalid(faults: Sequence[tuple[Path, int, str, str]]) -> ProfileInvalid:
    lines = [f"{file}:{line}: {field}: {message}" for file, line, field, message in faults]
    return ProfileInvalid("\n".join(lines), "correct the lines named above")


def _tuples(value: object) -> object:
    """YAML's lists as the tuples that a frozen model holds; strict validation turns nothing else into anything."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in cast("dict[object, object]", value).items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in cast("list[object]", value))
    return value


def _fault(error: ErrorDetails, node: yaml.Node) -> tuple[int, str, str]:
    keys = [key for key in error["loc"] if key != "[key]"]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not keys:
        path, colon, rest = message.partition(": ")
        if colon and path.partition(".")[0] in Platform.model_fields:
            keys, message = [*path.split(".")], rest
    if error["type"] == "extra_forbidden":
        message = f"{keys[-1]!r} is not a field here"
    elif error["type"] == "missing":
        message = "is required"
    elif error["type"] != "value_error" and isinstance(error.get("input"), str | int | float | bool):
        message = f"{message}, got {error['input']!r}"
    return _line(node, keys), _shown(keys) or "$", message


def _shown(keys: Sequence[int | str]) -> str:
    return ".".join(map(str, keys))


def _line(node: yaml.Node, keys: Sequence[int | str]) -> int:
    """Line (from 1) of the deepest part of a path that exists."""
    line = node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if str(k.value) == str(key)]
            if not found:
                return line
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
    return line


def _repeated(node: yaml.Node, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    found: list[tuple[tuple[str, ...], int]] = []
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        for index, (key, value) in enumerate(node.value):
            here = (*path, names[index])
            if names[index] in names[:index]:
                found.append((here, key.start_mark.line + 1))
            found += _repeated(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found += _repeated(value, (*path, str(index)))
    return found


def example(overrides: Mapping[str, Any] | None = None) -> Platform:
    """A small complete profile, for `headway kube render` without one; `overrides` are its top-level fields."""
    plain: dict[str, Any] = {
        "namespace": "headway",
        "image": "headway/trainer@sha256:" + "0" * 64,
        "volume": {"claim": "headway-home", "mount_path": "/headway"},
    }
    return Platform.model_validate(plain | dict(overrides or {}))
