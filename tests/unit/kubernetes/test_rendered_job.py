"""The Job and the Service of an attempt: valid, and with the traits that its fate depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from support.seen_attempts import PLATFORM, QUEUE, platform_with
from support.toy_attempts import toy_attempt, toy_spec

from headway.training.kubernetes.blame import setting_of
from headway.training.kubernetes.manifest import Rendered, owned_by, render
from headway.training.kubernetes.names import names_of
from headway.training.kubernetes.platform import Gpu, Platform, SecretVariable, Topology, Volume
from headway.training.kubernetes.validate import ManifestInvalid, quantity
from trainer.spec import AttemptSpec

RICH = platform_with(
    volume=Volume(mount_path="/data", host_path="/srv/data"),
    gpu=Gpu(count=8),
    shared_memory="16Gi",
    memory="900Gi",
    priority_class="gold",
    node_selector={"zone": "a"},
    image_pull_secrets=("registry",),
    environment={"NCCL_DEBUG": "INFO"},
    secret_environment=(SecretVariable(name="HF_TOKEN", secret="hub", key="token"),),
    topology=Topology(key="rack", when_unsatisfiable="ScheduleAnyway"),
    queue=QUEUE.queue,
)


def rendered(platform: Platform = PLATFORM, **changes: Any) -> Rendered:  # noqa: ANN401
    """The objects of an attempt of two nodes with two ranks each."""
    attempt: AttemptSpec = toy_attempt(Path("/headway/runs/default"), {}, nodes=1)
    attempt = replace(attempt, run_dir="/headway/runs/default/r", nodes=2, processes_per_node=2, **changes)
    spec = toy_spec(2, 2)
    return render(attempt, spec, platform, names_of("i", "default", attempt, spec))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod template's spec."""
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("platform", [PLATFORM, RICH])
def test_both_are_valid(platform: Platform) -> None:
    for document in rendered(platform):
        kubernetes_validate.validate(document, "1.36", strict=True)


def test_a_lone_pod_is_never_replaced_and_nothing_cleans_itself_up() -> None:
    job = rendered().job["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert (job["backoffLimit"], job["podReplacementPolicy"], job["suspend"]) == (0, "Failed", True)
    assert not {"ttlSecondsAfterFinished", "activeDeadlineSeconds", "successPolicy"} & job.keys()
    disrupted, failed = job["podFailurePolicy"]["rules"]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    assert failed["onExitCodes"] == {"containerName": "trainer", "operator": "NotIn", "values": [0, 75]}


def test_pods_find_each_other() -> None:
    job, service = rendered()
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == pod_of(job)["subdomain"] == name
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    (container,) = pod_of(job)["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["MASTER_ADDR"] == f"{name}-0.{name}.headway.svc.cluster.local"
    assert container["command"] == ["python", "-m", "trainer.node"]
    assert container["args"][:4] == [
        "--attempt",
        "/headway/runs/default/r/attempts/1/attempt.json",
        "--node-rank",
        "$(JOB_COMPLETION_INDEX)",
    ]
    # The index comes last among the variables, so that none of them may name it.
    assert not any("JOB_COMPLETION_INDEX" in str(value) for value in variables.values())
    owner = owned_by(service, name, "u")["metadata"]["ownerReferences"]
    assert owner == [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "u"}]


def test_the_pod_may_do_nothing_that_it_need_not() -> None:
    pod = pod_of(rendered(RICH).job)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = pod["containers"][0]["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


@pytest.mark.parametrize("platform", [PLATFORM, RICH])
def test_e09_shared_memory_is_sized_and_counted(platform: Platform) -> None:
    pod = pod_of(rendered(platform).job)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": platform.shared_memory}
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    resources = pod["containers"][0]["resources"]
    whole = quantity(platform.memory) + quantity(platform.shared_memory)
    assert quantity(resources["requests"]["memory"]) == quantity(resources["limits"]["memory"]) == whole


def test_devices_queue_and_secrets_come_from_the_profile() -> None:
    job = rendered(RICH).job
    labels = job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    container = pod_of(job)["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    entry = next(entry for entry in container["env"] if entry["name"] == "HF_TOKEN")
    assert entry["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    lost = [t for t in pod_of(job)["tolerations"] if t.get("key", "").startswith("node.kubernetes.io/")]
    assert [t["tolerationSeconds"] for t in lost] == [30, 30]


def test_values_are_not_expanded_and_the_attempts_own_win() -> None:
    container = pod_of(rendered(RICH, environment={"A": "$(HOME)", "NCCL_DEBUG": "WARN"}).job)["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (variables["A"], variables["NCCL_DEBUG"]) == ("$$(HOME)", "WARN")


def test_ranks_get_the_grace_that_the_run_gives_them() -> None:
    with pytest.raises(ManifestInvalid) as refused:
        rendered(platform_with(grace_s=10))
    assert "terminationGracePeriodSeconds" in refused.value.message
    assert pod_of(rendered(platform_with(grace_s=11)).job)["terminationGracePeriodSeconds"] == 11


def test_e05_another_attempt_is_another_job() -> None:
    one, two = rendered(attempt=1, token=1), rendered(attempt=2, token=2)
    assert one.job["metadata"]["name"] != two.job["metadata"]["name"]
    assert two.job["metadata"]["labels"]["headway.dev/token"] == "2"


# What a user cannot set: the protocol of the launcher.
OURS = ("apiVersion", "kind", "spec.suspend", "spec.podFailurePolicy", "spec.podReplacementPolicy", "spec.clusterIP")
OURS += ("spec.publishNotReadyAddresses", "spec.selector", "spec.template.metadata", "spec.template.spec.subdomain")
OURS += ("spec.template.spec.restartPolicy", "spec.template.spec.enableServiceLinks", "spec.template.spec.auto")
OURS += ("spec.template.spec.securityContext.runAsNonRoot", "spec.template.spec.securityContext.seccomp")
OURS += ("spec.template.spec.containers[0].name", "spec.template.spec.containers[0].args")


def leaves(node: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401
    """The paths of a document as an API server writes them."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path


def test_every_field_is_blamed_on_the_setting_that_makes_it() -> None:
    places = [path for document in rendered(RICH) for path in leaves(document)]
    assert [path for path in places if not setting_of(path) and not path.startswith(OURS)] == []
    assert [path for path in places if setting_of(path) and path.startswith(OURS)] == []
    fields = {name for path in places for name in setting_of(path).removeprefix("profile: ").split(" or ")}
    for name in ("image", "cpu", "memory", "shared_memory", "queue.local_queue", "secret_environment", "grace_s"):
        assert name in fields
