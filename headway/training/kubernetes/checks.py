"""Can attempts run in this cluster? Each look says what was found and what mends it.

Nothing is changed but by `try_pod`, which runs one short Job of the training image on the shared volume and deletes it.
What the account may not look at is said to be so and counts as well: the launcher needs no more than `PERMISSIONS`.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from headway.findings import Finding
from headway.training.identity import CODE_ROOT
from headway.training.kubernetes.client import (
    NODE_PERMISSIONS,
    PERMISSIONS,
    QUEUE_PERMISSIONS,
    RESOURCES,
    Document,
    Forbidden,
    Listing,
    ObjectMissing,
)
from headway.training.kubernetes.manifest import pod_template
from headway.training.kubernetes.names import CONTAINER, JOB_LABEL, Names
from headway.training.kubernetes.platform import Platform
from headway.training.kubernetes.validate import check, quantity
from headway.training.launch import LaunchError
from trainer.spec import AttemptSpec, DataFile, DataSpec, ModelSpec, RunSpec

PROBE_LABEL = "headway.dev/doctor"
_ROLE = "bind the Role `headway-launcher` of deploy/charts/headway to this account"
_LOOK_EVERY_S = 0.5
# A pod that waits for one of these waits for a person; `ErrImagePull` may pass, and becomes `ImagePullBackOff`.
_STUCK = {
    "ImagePullBackOff": "mend `image` or `image_pull_secrets` of the profile, or the way to the registry",
    "ErrImageNeverPull": "load the image on every node, or let `image_pull_policy` pull it",
    "InvalidImageName": "mend `image` of the profile",
    "CreateContainerConfigError": "make the Secret that `secret_environment` names, or mend the profile",
    "CreateContainerError": "mend `python` or `image` of the profile",
    "RunContainerError": "mend `python` or `image` of the profile",
}
# (API group, version that is spoken, its name, the backend that needs it)
_KINDS = (
    ("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobset"),
    ("trainer.kubeflow.org", "v1alpha1", "Kubeflow Trainer", "trainjob"),
)
_KUEUE, _KUEUE_VERSION = "kueue.x-k8s.io", RESOURCES["workloads"][0].rpartition("/")[2]
# Reads what Headway wrote, answers beside it, and starts the node's program as an attempt would.
_PROBE = (
    "import pathlib, runpy, sys; folder = pathlib.Path(sys.argv[1]); "
    "(folder / 'answer').write_text((folder / 'question').read_text()[::-1]); "
    "sys.argv = ['trainer.node', '--help']; runpy.run_module('trainer.node', run_name='__main__')"
)


class Cluster(Protocol):
    """The calls that are made; `client.Client` offers them."""

    def get(self, resource: str, name: str) -> Document:
        """One object."""
        ...

    def list(self, resource: str, labels: str = "", fields: str = "") -> Listing:
        """Objects by selector."""
        ...

    def create(self, resource: str, body: Mapping[str, Any]) -> Document:
        """Make an object, or ask a review."""
        ...

    def delete(
        self, resource: str, name: str, *, uid: str = "", propagation: str = "Background", grace_s: int | None = None
    ) -> None:
        """Delete an object."""
        ...

    def raw(self, path: str) -> Document:
        """A document at an absolute path."""
        ...

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        """A container's log, line by line."""
        ...


def cluster_findings(client: Cluster, platform: Platform, home: Path) -> Iterator[Finding]:
    """Look at everything that attempts of `platform` need; `home` is Headway's home on this machine."""
    try:
        version = client.raw("/version").get("gitVersion", "of unknown version")
    except LaunchError as error:
        yield Finding("cluster", False, error.message, error.remedy)
        return
    yield Finding("cluster", True, f"it answers: Kubernetes {version}")
    for look in (_namespace, _permissions, _kinds, _queue, _priority_class, _account, _nodes):
        yield from _guarded(look, client, platform)
    yield from _home(platform, home)
    yield from _guarded(_claim, client, platform)


def _guarded(
    look: Callable[[Cluster, Platform], Iterator[Finding]], client: Cluster, platform: Platform
) -> Iterator[Finding]:
    """A look that is refused is a finding, too; one that the account may not make says nothing about the cluster."""
    name = look.__name__.strip("_").replace("_", " ")
    try:
        yield from look(client, platform)
    except Forbidden as error:
        yield Finding(name, True, f"not looked at: {error.message}")
    except LaunchError as error:
        yield Finding(name, False, error.message, error.remedy)


def _namespace(client: Cluster, platform: Platform) -> Iterator[Finding]:
    try:
        phase = client.get("namespaces", platform.namespace).get("status", {}).get("phase", "Active")
    except ObjectMissing:
        remedy = f"kubectl create namespace {platform.namespace}, or mend `namespace` of the profile"
        yield Finding("namespace", False, f"{platform.namespace!r} does not exist", remedy)
        return
    yield Finding("namespace", phase == "Active", f"{platform.namespace} is {phase}", "name another one")


def _permissions(client: Cluster, platform: Platform) -> Iterator[Finding]:
    wanted = dict(PERMISSIONS) | (dict(QUEUE_PERMISSIONS) if platform.queue else {})
    for (group, resource), verbs in wanted.items():
        denied = [verb for verb in verbs if not _may(client, verb, group, resource, platform.namespace)]
        detail = f"{resource}: may not {', '.join(denied)}" if denied else f"{resource}: may {', '.join(verbs)}"
        yield Finding("permission", not denied, f"{detail} in {platform.namespace}", _ROLE)
    for (group, resource), verbs in NODE_PERMISSIONS.items():
        denied = [verb for verb in verbs if not _may(client, verb, group, resource, "")]
        without = f"{resource}: may not {', '.join(denied)}, so a lost node is found by its silence alone"
        yield Finding("permission", True, without if denied else f"{resource}: may {', '.join(verbs)}")


def _may(client: Cluster, verb: str, group: str, resource: str, namespace: str) -> bool:
    kind, _, part = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": part, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}},
    }
    return client.create("selfsubjectaccessreviews", review)["status"]["allowed"] is True


def _kinds(client: Cluster, platform: Platform) -> Iterator[Finding]:
    served = {g["name"]: [v["version"] for v in g["versions"]] for g in client.raw("/apis")["groups"]}
    yield _kueue(served.get(_KUEUE), platform)
    for group, version, name, backend in _KINDS:
        versions = served.get(group)
        if versions is None:
            unused = f"what `headway kube render --backend {backend}` prints cannot be applied; attempts run as Jobs"
            yield Finding("kind", True, f"{name} is not installed: {unused}")
        else:
            right = version in versions
            yield Finding("kind", right, f"{name} serves {', '.join(versions)}", f"rendered is {group}/{version}")


def _kueue(versions: list[str] | None, platform: Platform) -> Finding:
    if platform.queue is None:
        there = "is installed, and the profile names no queue: attempts pass it by"
        return Finding("kind", True, f"Kueue {there if versions else 'is not installed, and the profile needs none'}")
    if versions is None:
        remedy = "install Kueue, or take `queue` out of the profile"
        return Finding("kind", False, "Kueue is not installed, and the profile names a queue", remedy)
    remedy = f"install a Kueue that serves {_KUEUE}/{_KUEUE_VERSION}"
    return Finding("kind", _KUEUE_VERSION in versions, f"Kueue serves {', '.join(versions)}", remedy)


def _queue(client: Cluster, platform: Platform) -> Iterator[Finding]:
    if platform.queue is None:
        return
    name = platform.queue.local_queue
    try:
        queue = client.get("localqueues", name)
    except ObjectMissing:
        remedy = "make it (deploy/charts/headway does), or mend `queue.local_queue` of the profile"
        yield Finding("queue", False, f"LocalQueue {platform.namespace}/{name} does not exist", remedy)
        return
    yield _active(queue, f"LocalQueue {platform.namespace}/{name}")
    whole = queue["spec"]["clusterQueue"]
    try:
        yield _active(client.get("clusterqueues", whole), f"ClusterQueue {whole}")
    except Forbidden as error:
        yield Finding("queue", True, f"ClusterQueue {whole} not looked at: {error.message}")
    if platform.queue.priority_class is not None:
        yield from _exists(
            client, "workloadpriorityclasses", platform.queue.priority_class, "queue", "queue.priority_class"
        )


def _active(queue: Document, name: str) -> Finding:
    held = queue["spec"].get("stopPolicy", "None")
    if held != "None":
        return Finding("queue", False, f"{name} is on hold ({held})", "set its spec.stopPolicy to None")
    for condition in queue.get("status", {}).get("conditions", []):
        if condition["type"] == "Active":
            words = f"{name}: {condition.get('message') or condition.get('reason') or 'active'}"
            return Finding("queue", condition["status"] == "True", words, "mend the queue as its message says")
    return Finding("queue", False, f"{name} has no state yet", "look whether Kueue's controller runs")


def _priority_class(client: Cluster, platform: Platform) -> Iterator[Finding]:
    if platform.priority_class is not None:
        yield from _exists(client, "priorityclasses", platform.priority_class, "priority class", "priority_class")


def _account(client: Cluster, platform: Platform) -> Iterator[Finding]:
    yield from _exists(client, "serviceaccounts", platform.service_account, "account", "service_account")


def _exists(client: Cluster, resource: str, name: str, shown: str, field: str) -> Iterator[Finding]:
    try:
        client.get(resource, name)
    except ObjectMissing:
        yield Finding(shown, False, f"{resource} {name!r} does not exist", f"make it, or mend `{field}` of the profile")
    else:
        yield Finding(shown, True, f"{resource} {name} is there")


def _nodes(client: Cluster, platform: Platform) -> Iterator[Finding]:
    nodes = [node for node in client.list("nodes").items if _fits_selector(node, platform)]
    chosen = f"{len(nodes)} nodes" + (f" with labels {platform.node_selector}" if platform.node_selector else "")
    if not nodes:
        yield Finding("nodes", False, f"{chosen}: none", "mend `node_selector` of the profile, or label nodes")
        return
    wanted = {"cpu": quantity(platform.cpu), "memory": platform.memory_bytes}
    if platform.gpu.count:
        wanted[platform.gpu.resource] = quantity(platform.gpu.count)
    for resource, amount in wanted.items():
        most = max(quantity(node["status"]["allocatable"].get(resource, "0")) for node in nodes)
        field = {"cpu": "cpu", "memory": "memory and shared_memory"}.get(resource, "gpu")
        yield Finding(
            "nodes",
            most >= amount,
            f"{chosen}: a pod takes {_amount(resource, amount)}, the largest node has {_amount(resource, most)}",
            f"ask for less in `{field}` of the profile, or add nodes (a device plugin makes GPUs countable)",
        )


def _amount(resource: str, amount: Decimal) -> str:
    return f"{amount / (1 << 20):.0f} MiB of memory" if resource == "memory" else f"{amount.normalize():f} {resource}"


def _fits_selector(node: Document, platform: Platform) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in platform.node_selector.items())


def _home(platform: Platform, home: Path) -> Iterator[Finding]:
    mount = Path(platform.volume.mount_path)
    below = home.is_relative_to(mount) or home.resolve().is_relative_to(mount.resolve())
    remedy = "mount the volume here at the profile's `volume.mount_path`, and set HEADWAY_HOME to a folder below it"
    yield Finding("home", below, f"{home} {'lies' if below else 'does not lie'} below the shared {mount}", remedy)


def _claim(client: Cluster, platform: Platform) -> Iterator[Finding]:
    name = platform.volume.claim
    if not name:
        yield Finding("volume", True, f"folder {platform.volume.host_path} of every node; it has to be one file system")
        return
    try:
        claim = client.get("persistentvolumeclaims", name)
    except ObjectMissing:
        remedy = "make it, or mend `volume.claim` of the profile"
        yield Finding("volume", False, f"claim {platform.namespace}/{name} does not exist", remedy)
        return
    phase = claim.get("status", {}).get("phase", "Pending")
    yield Finding("volume", phase == "Bound", f"claim {name} is {phase}", "kubectl describe pvc says why it waits")
    modes = claim["spec"].get("accessModes", [])
    shared = "ReadWriteMany" in modes
    remedy = "use a storage class that offers ReadWriteMany: pods on several nodes write to it"
    yield Finding("volume", shared, f"claim {name} is {', '.join(modes)}", remedy)


def try_pod(client: Cluster, platform: Platform, home: Path, within_s: float) -> Iterator[Finding]:
    """Run the training image once: it has to start, find the trainer, and read and write the shared volume.

    The Job passes no queue and takes no devices. It is deleted afterwards, as is the folder below `home` that both
    sides write to.
    """
    nonce = secrets.token_hex(4)
    folder = home / "doctor" / nonce
    folder.mkdir(parents=True)
    not_copied = shutil.ignore_patterns("__pycache__")
    try:
        shutil.copytree(CODE_ROOT / "trainer", folder / "code" / "trainer", ignore=not_copied)
        (folder / "question").write_text(nonce)
        # The pod's account is another one.
        folder.chmod(0o777)
        job = probe_job(platform, folder, nonce, within_s)
        check(job)
        client.create("jobs", job)
        try:
            yield _outcome(client, platform, folder, job["metadata"]["name"], nonce, within_s)
        finally:
            client.delete("jobs", job["metadata"]["name"])
    except LaunchError as error:
        yield Finding("pod", False, error.message, error.remedy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def probe_job(platform: Platform, folder: Path, nonce: str, within_s: float) -> dict[str, Any]:
    """The Job of `try_pod`: one pod of the same template as an attempt's, with another command and no devices."""
    name = f"hw-doctor-{nonce}"
    code = folder / "code"
    attempt = AttemptSpec(nonce, 1, 1, 1, 1, str(folder), str(folder), str(code))
    template = pod_template(attempt, _SPEC, platform, Names(name, {PROBE_LABEL: nonce}, {}), master="localhost")
    template["spec"]["terminationGracePeriodSeconds"] = 1
    container = template["spec"]["containers"][0]
    container["command"] = [platform.python, "-c", _PROBE, str(folder)]
    del container["args"]
    # The image may hold a trainer of its own where it starts.
    container["workingDir"] = str(code)
    for side in container["resources"].values():
        side.pop(platform.gpu.resource, None)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": platform.namespace, "labels": {PROBE_LABEL: nonce}},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(within_s) + 60,
            # Nobody needs it should this process be killed.
            "ttlSecondsAfterFinished": 300,
            "template": template,
        },
    }


def _outcome(client: Cluster, platform: Platform, folder: Path, name: str, nonce: str, within_s: float) -> Finding:
    started = time.monotonic()
    words, remedy = "no pod was made", "look at `kubectl describe job`: an admission rule may refuse its pod"
    while time.monotonic() - started < within_s:
        job = client.get("jobs", name)
        pods = client.list("pods", labels=f"{JOB_LABEL}={name}").items
        ended = {c["type"] for c in job.get("status", {}).get("conditions", []) if c["status"] == "True"}
        if "Complete" in ended:
            return _answered(platform, folder, nonce, time.monotonic() - started)
        if "Failed" in ended:
            said = _said(client, pods)
            return Finding("pod", False, f"the image's pod failed: {said}", "mend `image` or `python` of the profile")
        if job["spec"].get("suspend"):
            words, remedy = (
                "its Job is suspended: something manages Jobs without a queue",
                "let it pass Jobs without one",
            )
        for pod in pods:
            reason, words, remedy = _waits_for(pod)
            if reason in _STUCK:
                return Finding("pod", False, f"{reason}: {words}", _STUCK[reason])
        time.sleep(_LOOK_EVERY_S)
    return Finding("pod", False, f"not started within {within_s:.0f} s: {words}", remedy)


def _answered(platform: Platform, folder: Path, nonce: str, took_s: float) -> Finding:
    try:
        answer = (folder / "answer").read_text()
    except OSError as error:
        answer = str(error)
    if answer == nonce[::-1]:
        return Finding("pod", True, f"the image starts and shares the volume; it took {took_s:.0f} s")
    remedy = f"{platform.volume.mount_path} has to be the same volume here and in pods"
    return Finding("pod", False, f"the pod wrote to another volume than this one: {answer}", remedy)


def _waits_for(pod: Document) -> tuple[str, str, str]:
    """Why a pod does not run yet: a reason, words, and what may mend it."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return (
                condition.get("reason", ""),
                condition.get("message", "not scheduled"),
                "see the findings about nodes",
            )
    for container in status.get("containerStatuses", []):
        if waiting := container["state"].get("waiting"):
            return (
                waiting.get("reason", ""),
                waiting.get("message") or waiting.get("reason", ""),
                "wait longer (--wait)",
            )
    return "", f"its pod is {status.get('phase', 'Pending')}", "wait longer (--wait)"


def _said(client: Cluster, pods: list[Document]) -> str:
    """The last words of a pod that failed."""
    for pod in pods:
        try:
            lines = list(client.pod_log(pod["metadata"]["name"], CONTAINER))
        except LaunchError as error:
            return f"its log cannot be read: {error.message}"
        if lines:
            return lines[-1].decode("utf-8", "backslashreplace").strip()
    return "it said nothing"


# What the template's variables are made of; nothing of it runs.
_SPEC = RunSpec(
    pipeline="doctor",
    data=DataSpec(
        files=(DataFile("none", "sha256:" + "0" * 64, 0, 0),),
        identity=(),
        target="none",
        observed_at="none",
        known_at="none",
        cut=1,
        validation_from=0,
        categorical=(),
        numeric=("none",),
    ),
    model=ModelSpec("none", "none", "none"),
    seed=0,
)
