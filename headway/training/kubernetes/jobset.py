"""An attempt as a JobSet (`jobset.x-k8s.io/v1alpha2`), from the same pod template as the Job.

The controller makes the Service and the pods' names; its own restarts are switched off, since a gang restart is a new
attempt with a name and a fencing token of its own. Rendered for clusters where JobSets are the rule; the launcher runs
plain Jobs, which every cluster has.
"""

from __future__ import annotations

from typing import Any

from headway.training.kubernetes.manifest import pod_template, queue_labels, render
from headway.training.kubernetes.names import Names
from headway.training.kubernetes.platform import Platform
from headway.training.kubernetes.validate import check, check_schema
from trainer.spec import AttemptSpec, RunSpec

# Pods are called <set>-<part>-<replica>-<index>.
PART = "node"


def render_jobset(attempt: AttemptSpec, spec: RunSpec, platform: Platform, names: Names) -> dict[str, Any]:
    """Render and check the JobSet of one attempt.

    Raises:
        ManifestInvalid: a field that no cluster would take, with its path.
    """
    jobset: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": names.name,
            "namespace": platform.namespace,
            "labels": {**names.labels, **queue_labels(platform)},
            "annotations": dict(names.annotations),
        },
        "spec": {
            # With a queue, Kueue lets it start.
            "suspend": platform.queue is not None,
            "network": {"enableDNSHostnames": True, "subdomain": names.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [
                {
                    "name": PART,
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": dict(names.labels)},
                        "spec": gang_job(attempt, spec, platform, names),
                    },
                }
            ],
        },
    }
    check(jobset)
    check_schema(jobset)
    return jobset


def gang_job(attempt: AttemptSpec, spec: RunSpec, platform: Platform, names: Names) -> dict[str, Any]:
    """The spec of the Job inside: the launcher's own, with pods that are named by the JobSet's controller.

    Raises:
        ManifestInvalid: as `manifest.render`, whose checks it passes first.
    """
    job = render(attempt, spec, platform, names).job["spec"]
    master = f"{names.name}-{PART}-0-0.{names.name}.{platform.namespace}.svc.cluster.local"
    # The set is suspended as a whole.
    kept = {field: value for field, value in job.items() if field != "suspend"}
    return kept | {"template": pod_template(attempt, spec, platform, names, master=master)}
