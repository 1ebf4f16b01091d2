"""An attempt as a Kubeflow TrainJob (`trainer.kubeflow.org/v1alpha1`) with the TrainingRuntime that it refers to.

A TrainJob alone can say neither volumes nor a security context, so the place's part of the pod template lies in the
runtime, and what the attempt runs in the job: image, command, variables, resources, number of nodes. The runtime has
no ML policy but that number: nodes find each other as in a plain Job, not by torchrun's PET_ variables. The
controller makes a JobSet of both, of the TrainJob's name.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from headway.training.kubernetes.jobset import PART, gang_job
from headway.training.kubernetes.manifest import queue_labels
from headway.training.kubernetes.names import Names
from headway.training.kubernetes.platform import Platform
from headway.training.kubernetes.validate import check, check_schema
from trainer.spec import AttemptSpec, RunSpec

API = "trainer.kubeflow.org/v1alpha1"
# What the controller looks for: the part that is the trainer, and its container, which bears the part's name.
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_OF_THE_ATTEMPT = ("image", "command", "args", "env", "resources")


def render_trainjob(attempt: AttemptSpec, spec: RunSpec, platform: Platform, names: Names) -> list[dict[str, Any]]:
    """Render and check the TrainingRuntime and the TrainJob of one attempt, in the order in which they are made.

    Raises:
        ManifestInvalid: a field that no cluster would take, with its path.
    """
    job = deepcopy(gang_job(attempt, spec, platform, names))
    (container,) = job["template"]["spec"]["containers"]
    container["name"] = PART
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = PART
    runs = {field: container[field] for field in _OF_THE_ATTEMPT}
    # A runtime without an image is refused; the job's own takes its place.
    job["template"]["spec"]["containers"] = [
        {field: value for field, value in container.items() if field == "image" or field not in _OF_THE_ATTEMPT}
    ]
    identity = {"name": names.name, "namespace": platform.namespace, "annotations": dict(names.annotations)}
    runtime: dict[str, Any] = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {**identity, "labels": dict(names.labels)},
        "spec": {
            "mlPolicy": {"numNodes": attempt.nodes},
            "template": {
                "spec": {
                    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                    "failurePolicy": {"maxRestarts": 0},
                    "replicatedJobs": [
                        {"name": PART, "template": {"metadata": {"labels": {**names.labels, **ANCESTOR}}, "spec": job}}
                    ],
                }
            },
        },
    }
    train_job: dict[str, Any] = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {**identity, "labels": {**names.labels, **queue_labels(platform)}},
        "spec": {
            "suspend": platform.queue is not None,
            "runtimeRef": {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": names.name},
            "trainer": {
                "numNodes": attempt.nodes,
                "image": runs["image"],
                "command": runs["command"],
                "args": runs["args"],
                "env": runs["env"],
                "resourcesPerNode": runs["resources"],
            },
        },
    }
    for document in (runtime, train_job):
        check(document)
        check_schema(document)
    return [runtime, train_job]
