"""The Job and the headless Service of one attempt.

An Indexed Job, one pod per node of the run, under a name of its own; a gang restart is always another attempt, so the
Job never replaces a pod: no back-off, and either failure rule ends it at once. Exit 75 (saved after a request to stop)
is excepted: a suspended Job would otherwise keep the failure and end when it is resumed.

No TTL: a Job that cleaned itself up while nobody looks would take the evidence along. The run spec lies on the shared
volume, verified by its digest, and not in a ConfigMap, whose 1 MiB it may pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from headway.training.kubernetes.names import CONTAINER, JOB_LABEL, Names
from headway.training.kubernetes.platform import Platform
from headway.training.kubernetes.validate import ManifestInvalid, Problem, check
from trainer.spec import AttemptSpec, ExitCode, RunSpec

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
# Nodes keep the run's own grace; the kubelet's SIGKILL must come later than their last event.
GRACE_MARGIN_S = 1


class Rendered(NamedTuple):
    """What is made for one attempt; the Service gets its owner when the Job has a uid (`owned_by`)."""

    job: dict[str, Any]
    service: dict[str, Any]


def render(attempt: AttemptSpec, spec: RunSpec, platform: Platform, names: Names) -> Rendered:
    """Render and check the objects of one attempt.

    Raises:
        ManifestInvalid: a name, label, quantity or size that no cluster would take, with its field path.
    """
    _refuse_short_grace(spec, platform)
    master = names.host(0, platform.namespace)
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": names.name,
            "namespace": platform.namespace,
            "labels": {**names.labels, **queue_labels(platform)},
            "annotations": dict(names.annotations),
        },
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": attempt.nodes,
            "parallelism": attempt.nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": failure_rules()},
            "template": pod_template(attempt, spec, platform, names, master=master, subdomain=names.name),
        },
    }
    service: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.name,
            "namespace": platform.namespace,
            "labels": dict(names.labels),
            "annotations": dict(names.annotations),
        },
        "spec": {
            "clusterIP": "None",
            # Ranks meet before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: names.name},
            "ports": [{"name": "rendezvous", "port": platform.port}],
        },
    }
    check(job)
    check(service)
    return Rendered(job, service)


def owned_by(service: Mapping[str, Any], job: str, uid: str) -> dict[str, Any]:
    """The Service with the Job of that uid as its owner: it goes when the Job does."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": uid}
    return {**service, "metadata": {**service["metadata"], "ownerReferences": [owner]}}


def failure_rules() -> list[dict[str, Any]]:
    """Both rules of the pod failure policy: a disruption, or an exit that is neither done nor saved, ends the Job."""
    done = [int(ExitCode.DONE), int(ExitCode.PREEMPTED)]
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": done}},
    ]


def queue_labels(platform: Platform) -> dict[str, str]:
    """Kueue's labels; none without a queue."""
    if platform.queue is None:
        return {}
    labels = {QUEUE_LABEL: platform.queue.local_queue}
    if platform.queue.priority_class is not None:
        labels[QUEUE_PRIORITY_LABEL] = platform.queue.priority_class
    return labels


def pod_template(
    attempt: AttemptSpec,
    spec: RunSpec,
    platform: Platform,
    names: Names,
    *,
    master: str,
    subdomain: str = "",
    node_rank: str = "$(JOB_COMPLETION_INDEX)",
) -> dict[str, Any]:
    """The pod of one node.

    Args:
        attempt: what the pod runs.
        spec: its run spec.
        platform: what the place gives.
        names: the attempt's identity.
        master: DNS name of node 0.
        subdomain: the Service that gives pods their names; "" where a controller sets one.
        node_rank: what the node's number expands from; in the command alone, the index comes last among the variables.
    """
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": platform.grace_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "serviceAccountName": platform.service_account,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": platform.run_as_user,
            "runAsGroup": platform.run_as_group,
            "fsGroup": platform.fs_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": _tolerations(platform),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": platform.topology.key,
                "whenUnsatisfiable": platform.topology.when_unsatisfiable,
                # A node that is lost or drained is no place that pods could be spread to.
                "nodeTaintsPolicy": "Honor",
                "labelSelector": {"matchLabels": dict(names.labels)},
            }
        ],
        "containers": [container(attempt, spec, platform, master=master, node_rank=node_rank)],
        "volumes": _volumes(platform),
    }
    if subdomain:
        pod["subdomain"] = subdomain
    if platform.priority_class is not None:
        pod["priorityClassName"] = platform.priority_class
    if platform.node_selector:
        pod["nodeSelector"] = dict(platform.node_selector)
    if platform.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in platform.image_pull_secrets]
    return {"metadata": {"labels": dict(names.labels), "annotations": dict(names.annotations)}, "spec": pod}


def container(
    attempt: AttemptSpec,
    spec: RunSpec,
    platform: Platform,
    *,
    master: str,
    node_rank: str = "$(JOB_COMPLETION_INDEX)",
) -> dict[str, Any]:
    """The one container of a node's pod: it runs `python -m trainer.node` out of the run's own code."""
    return {
        "name": CONTAINER,
        "image": platform.image,
        "imagePullPolicy": platform.image_pull_policy,
        "command": [platform.python, "-m", "trainer.node"],
        "args": [
            "--attempt",
            f"{attempt.run_dir}/attempts/{attempt.attempt}/attempt.json",
            "--node-rank",
            node_rank,
            "--master-addr",
            "$(MASTER_ADDR)",
            "--master-port",
            str(platform.port),
        ],
        # `python -m` looks here first: the image has a `trainer` of its own in its working directory.
        "workingDir": attempt.code_root,
        "env": environment(attempt, spec, platform, master=master),
        "ports": [{"name": "rendezvous", "containerPort": platform.port}],
        "resources": resources(platform),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": platform.security.read_only_root,
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "home", "mountPath": platform.volume.mount_path},
        ],
    }


def environment(attempt: AttemptSpec, spec: RunSpec, platform: Platform, *, master: str) -> list[dict[str, Any]]:
    """The container's variables; the attempt's own win over the profile's."""
    attempt_file = f"{attempt.run_dir}/attempts/{attempt.attempt}/attempt.json"
    plain: dict[str, str] = {
        # The root file system is read-only, and the account has no home.
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        **platform.environment,
        **attempt.environment,
        "PYTHONPATH": attempt.code_root,
        "MASTER_ADDR": master,
        "TRAINER_ATTEMPT": attempt_file,
        "HEADWAY_ATTEMPT": f"{attempt.run_id}/{attempt.attempt}",
    }
    secret = [
        {"name": entry.name, "valueFrom": {"secretKeyRef": {"name": entry.secret, "key": entry.key}}}
        for entry in platform.secret_environment
    ]
    return [{"name": name, "value": _literal(value)} for name, value in plain.items()] + secret


def resources(platform: Platform) -> dict[str, dict[str, str]]:
    """Requests and limits of a pod; /dev/shm is charged to it, so it is counted."""
    memory = _mebibytes(platform.memory_bytes)
    devices = {platform.gpu.resource: str(platform.gpu.count)} if platform.gpu.count else {}
    return {
        "requests": {"cpu": platform.cpu, "memory": memory, **devices},
        "limits": {"memory": memory, **devices},
    }


def _literal(value: str) -> str:
    """A value as the pod shall see it: the kubelet would expand `$(NAME)`."""
    return value.replace("$(", "$$(")


def _mebibytes(size: Decimal) -> str:
    return f"{(size / (1 << 20)).to_integral_value(ROUND_CEILING)}Mi"


def _refuse_short_grace(spec: RunSpec, platform: Platform) -> None:
    needed = spec.restart.grace_s + GRACE_MARGIN_S
    if platform.grace_s < needed:
        raise ManifestInvalid(
            [
                Problem(
                    "spec.template.spec.terminationGracePeriodSeconds",
                    f"the profile's grace_s is {platform.grace_s}; ranks may take {spec.restart.grace_s:g} s to save, "
                    f"so at least {needed:g} is needed",
                )
            ]
        )


def _tolerations(platform: Platform) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = []
    for one in platform.tolerations:
        entry: dict[str, Any] = {"operator": one.operator}
        entry |= {
            key: value for key, value in (("key", one.key), ("value", one.value), ("effect", one.effect)) if value
        }
        if one.toleration_seconds is not None:
            entry["tolerationSeconds"] = one.toleration_seconds
        given.append(entry)
    lost = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": platform.node_lost_after_s,
        }
        for state in ("unreachable", "not-ready")
    ]
    return given + lost


def _volumes(platform: Platform) -> list[dict[str, Any]]:
    volume = platform.volume
    home: dict[str, Any] = (
        {"persistentVolumeClaim": {"claimName": volume.claim}}
        if volume.claim
        else {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    )
    return [
        {"name": "home", **home},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": platform.shared_memory}},
        {"name": "tmp", "emptyDir": {}},
    ]
