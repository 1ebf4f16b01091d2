"""A cluster to be looked at: objects, what the account may not do, and Jobs whose pod runs as a process here."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from headway.training.kubernetes.client import ClusterUnreachable, Document, Forbidden, Listing, ObjectMissing


def whole() -> dict[tuple[str, str], Document]:
    """Everything that the large profile of the golden cases names, in order."""
    active = {"conditions": [{"type": "Active", "status": "True", "message": "can admit new workloads"}]}
    allocatable = {"cpu": "128", "memory": "2000Gi", "nvidia.com/gpu": "8"}
    node = {
        "metadata": {"name": "n1", "labels": {"node.kubernetes.io/instance-type": "h200"}},
        "status": {"allocatable": allocatable},
    }
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    return {
        ("namespaces", "team-a"): {"status": {"phase": "Active"}},
        ("namespaces", "headway"): {"status": {"phase": "Active"}},
        ("localqueues", "team-a"): {"spec": {"clusterQueue": "whole"}, "status": active},
        ("clusterqueues", "whole"): {"spec": {"stopPolicy": "None"}, "status": active},
        ("workloadpriorityclasses", "research"): {},
        ("priorityclasses", "headway-training"): {},
        ("serviceaccounts", "headway-trainer"): {},
        ("serviceaccounts", "default"): {},
        ("persistentvolumeclaims", "headway-home"): claim,
        ("nodes", "n1"): node,
    }


class LookedAt:
    """`checks.Cluster` in memory."""

    def __init__(self) -> None:
        self.objects = whole()
        self.denied: set[tuple[str, str]] = set()
        self.groups = {"kueue.x-k8s.io": "v1beta2", "jobset.x-k8s.io": "v1alpha2", "trainer.kubeflow.org": "v1alpha1"}
        self.away = False
        self.waiting: Mapping[str, str] | None = None
        self.unschedulable = ""
        self.elsewhere = False
        self.reviews: list[Document] = []
        self.pods: list[Document] = []
        self.log = b""

    def get(self, resource: str, name: str) -> Document:
        self.allow("get", resource)
        if (resource, name) not in self.objects:
            raise ObjectMissing(f'{resource} "{name}" not found', "")
        return self.objects[resource, name]

    def list(self, resource: str, labels: str = "", fields: str = "") -> Listing:
        self.allow("list", resource)
        if resource == "pods":
            assert labels.startswith("batch.kubernetes.io/job-name=hw-doctor-")
            return Listing(self.pods, "1")
        return Listing([o for (kind, _), o in self.objects.items() if kind == resource], "1")

    def create(self, resource: str, body: Mapping[str, Any]) -> Document:
        if resource == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            self.reviews.append(asked)
            part = f"/{asked['subresource']}" if "subresource" in asked else ""
            return {"status": {"allowed": (asked["verb"], asked["resource"] + part) not in self.denied}}
        self.allow("create", resource)
        job = dict(body) | {"status": {"conditions": []}}
        self.objects[resource, body["metadata"]["name"]] = job
        status: Document = {"phase": "Pending"}
        if self.unschedulable:
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status["conditions"] = [scheduled | {"message": self.unschedulable}]
        elif self.waiting:
            status["containerStatuses"] = [{"name": "trainer", "state": {"waiting": dict(self.waiting)}}]
        else:
            self.run(job)
        self.pods = [{"metadata": {"name": "hw-doctor-x"}, "status": status}]
        return job

    def run(self, job: Document) -> None:
        """Run the pod's command to its end."""
        container = job["spec"]["template"]["spec"]["containers"][0]
        command = container["command"]
        if self.elsewhere:
            command = [*command[:2], "pass"]
        ended = subprocess.run([sys.executable, *command[1:]], cwd=container["workingDir"], capture_output=True)
        self.log = ended.stderr
        kind = "Complete" if ended.returncode == 0 else "Failed"
        job["status"]["conditions"].append({"type": kind, "status": "True"})

    def delete(
        self, resource: str, name: str, *, uid: str = "", propagation: str = "Background", grace_s: int | None = None
    ) -> None:
        self.allow("delete", resource)
        del self.objects[resource, name]

    def raw(self, path: str) -> Document:
        if self.away:
            raise ClusterUnreachable("the API server does not answer", "it is asked again")
        if path == "/version":
            return {"gitVersion": "v1.36.2"}
        return {"groups": [{"name": n, "versions": [{"version": v}]} for n, v in self.groups.items()]}

    def pod_log(
        self, pod: str, container: str, *, since_time: str = "", follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        yield from self.log.splitlines(keepends=True)

    def allow(self, verb: str, resource: str) -> None:
        if (verb, resource) in self.denied:
            raise Forbidden(f"the account may not {verb} {resource}", "")
