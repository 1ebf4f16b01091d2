"""`headway doctor --cluster`: everything that an attempt needs is looked at, and what is wrong says what mends it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.golden_manifests import CASES
from support.looked_at_cluster import LookedAt

from headway.cli.doctor import command
from headway.findings import Finding
from headway.home import load_settings
from headway.training.kubernetes import checks
from headway.training.kubernetes.checks import cluster_findings, probe_job, try_pod
from headway.training.kubernetes.client import PERMISSIONS, QUEUE_PERMISSIONS
from headway.training.kubernetes.platform import Platform, load_platform

LARGE, SMALL = (load_platform(CASES / f"profile_{name}.yaml") for name in ("large", "small"))
HOME = Path("/headway/home")


def findings(cluster: LookedAt, platform: Platform = LARGE) -> list[Finding]:
    return list(cluster_findings(cluster, platform, HOME))


def wrong(cluster: LookedAt, platform: Platform = LARGE) -> list[Finding]:
    return [finding for finding in findings(cluster, platform) if not finding.ok]


@pytest.mark.parametrize("platform", [LARGE, SMALL])
def test_a_cluster_that_has_everything_is_well(platform: Platform) -> None:
    assert wrong(LookedAt(), platform) == []


def test_exactly_the_launchers_permissions_are_asked_for() -> None:
    cluster = LookedAt()
    findings(cluster)
    asked = {
        (a.get("group", ""), a["resource"] + (f"/{a['subresource']}" if "subresource" in a else ""), a["verb"])
        for a in cluster.reviews
        if a.get("namespace") == "team-a"
    }
    wanted = {(*key, verb) for key, verbs in {**PERMISSIONS, **QUEUE_PERMISSIONS}.items() for verb in verbs}
    assert asked == wanted
    assert [a["resource"] for a in cluster.reviews if "namespace" not in a] == ["nodes"]


Spoil = Callable[[LookedAt], Any]
OBJECTS: list[tuple[Spoil, str, str]] = [
    (lambda c: c.objects.pop(("namespaces", "team-a")), "'team-a' does not exist", "kubectl create namespace team-a"),
    (lambda c: c.denied.add(("delete", "pods")), "pods: may not delete in team-a", "headway-launcher"),
    (lambda c: c.denied.add(("get", "pods/log")), "pods/log: may not get in team-a", "headway-launcher"),
    (lambda c: c.denied.add(("list", "workloads")), "workloads: may not list", "headway-launcher"),
    (lambda c: c.groups.pop("kueue.x-k8s.io"), "Kueue is not installed", "install Kueue, or take `queue` out"),
    (lambda c: c.groups.update({"kueue.x-k8s.io": "v1beta1"}), "Kueue serves v1beta1", "kueue.x-k8s.io/v1beta2"),
    (lambda c: c.groups.update({"jobset.x-k8s.io": "v1"}), "JobSet serves v1", "jobset.x-k8s.io/v1alpha2"),
    (lambda c: c.objects.pop(("localqueues", "team-a")), "LocalQueue team-a/team-a does not", "queue.local_queue"),
    (
        lambda c: c.objects["localqueues", "team-a"]["spec"].update(stopPolicy="Hold"),
        "LocalQueue team-a/team-a is on hold (Hold)",
        "spec.stopPolicy",
    ),
    (
        lambda c: c.objects["clusterqueues", "whole"].update(
            status={"conditions": [{"type": "Active", "status": "False", "message": "no flavor"}]}
        ),
        "ClusterQueue whole: no flavor",
        "mend the queue",
    ),
    (lambda c: c.objects["clusterqueues", "whole"].update(status={}), "ClusterQueue whole has no state yet", "Kueue"),
    (lambda c: c.objects.pop(("workloadpriorityclasses", "research")), "'research' does not", "queue.priority_class"),
    (lambda c: c.objects.pop(("priorityclasses", "headway-training")), "'headway-training' does", "`priority_class`"),
    (lambda c: c.objects.pop(("serviceaccounts", "headway-trainer")), "'headway-trainer' does", "`service_account`"),
    (lambda c: c.objects.pop(("nodes", "n1")), "0 nodes with labels", "node_selector"),
    (
        lambda c: c.objects["nodes", "n1"]["status"]["allocatable"].pop("nvidia.com/gpu"),
        "a pod takes 8 nvidia.com/gpu, the largest node has 0 nvidia.com/gpu",
        "`gpu` of the profile",
    ),
    (
        lambda c: c.objects["nodes", "n1"]["status"]["allocatable"].update(cpu="63500m"),
        "a pod takes 64 cpu, the largest node has 63.5 cpu",
        "`cpu` of the profile",
    ),
]


@pytest.mark.parametrize(("spoil", "detail", "remedy"), OBJECTS)
def test_what_is_wrong_is_named_with_what_mends_it(spoil: Spoil, detail: str, remedy: str) -> None:
    cluster = LookedAt()
    spoil(cluster)
    (found,) = wrong(cluster)
    assert detail in found.detail
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("claim", "detail"),
    [
        (None, "claim headway/headway-home does not exist"),
        ({"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Pending"}}, "headway-home is Pending"),
        ({"spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}}, "headway-home is ReadWriteOnce"),
    ],
)
def test_the_volume_has_to_be_bound_and_shared(claim: dict[str, Any] | None, detail: str) -> None:
    cluster = LookedAt()
    if claim is None:
        del cluster.objects["persistentvolumeclaims", "headway-home"]
    else:
        cluster.objects["persistentvolumeclaims", "headway-home"] = claim
    (found,) = wrong(cluster, SMALL)
    assert detail in found.detail


def test_a_home_outside_the_volume_is_wrong() -> None:
    found = [f for f in cluster_findings(LookedAt(), LARGE, Path("/elsewhere")) if not f.ok]
    assert [(f.name, "volume.mount_path" in f.remedy) for f in found] == [("home", True)]


def test_what_may_not_be_looked_at_is_said_and_is_not_wrong() -> None:
    cluster = LookedAt()
    kinds = ("namespaces", "localqueues", "priorityclasses", "serviceaccounts", "persistentvolumeclaims")
    cluster.denied = {*(("get", kind) for kind in kinds), ("list", "nodes"), ("get", "nodes")}
    assert wrong(cluster) == []
    said = [finding.detail for finding in findings(cluster)]
    assert sum(detail.startswith("not looked at: the account may not") for detail in said) == 5
    assert any("a lost node is found by its silence alone" in detail for detail in said)


def test_a_cluster_that_is_away_is_one_finding() -> None:
    cluster = LookedAt()
    cluster.away = True
    assert [(f.name, f.ok) for f in findings(cluster)] == [("cluster", False)]


def tried(cluster: LookedAt, home: Path, platform: Platform = SMALL, within_s: float = 60.0) -> Finding:
    (found,) = try_pod(cluster, platform, home, within_s)
    assert list((home / "doctor").iterdir()) == []
    assert not [name for kind, name in cluster.objects if kind == "jobs"]
    return found


def test_the_image_starts_the_node_program_and_shares_the_volume(tmp_path: Path) -> None:
    found = tried(LookedAt(), tmp_path)
    assert found.ok, found
    assert "the image starts and shares the volume" in found.detail


@pytest.mark.parametrize(
    ("spoil", "detail", "remedy"),
    [
        (lambda c: setattr(c, "elsewhere", True), "wrote to another volume", "same volume"),
        (
            lambda c: setattr(c, "waiting", {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}),
            "ImagePullBackOff: Back-off pulling image",
            "image_pull_secrets",
        ),
        (
            lambda c: setattr(
                c, "waiting", {"reason": "CreateContainerConfigError", "message": 'secret "w" not found'}
            ),
            'secret "w" not found',
            "secret_environment",
        ),
        (lambda c: setattr(c, "waiting", {"reason": "ContainerCreating"}), "within 1 s: ContainerCreating", "--wait"),
        (
            lambda c: setattr(c, "unschedulable", "0/2 nodes are available: 2 Insufficient memory."),
            "within 1 s: 0/2 nodes are available: 2 Insufficient memory.",
            "findings about nodes",
        ),
        (lambda c: c.denied.add(("create", "jobs")), "may not create jobs", ""),
    ],
)
def test_a_pod_that_does_not_come_says_why(spoil: Spoil, detail: str, remedy: str, tmp_path: Path) -> None:
    cluster = LookedAt()
    spoil(cluster)
    found = tried(cluster, tmp_path, within_s=1.0)
    assert not found.ok
    assert detail in found.detail
    assert remedy in found.remedy


def test_an_image_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PROBE", "import torch_is_missing")
    found = tried(LookedAt(), tmp_path)
    assert found.detail.endswith("ModuleNotFoundError: No module named 'torch_is_missing'")


def test_the_probe_is_an_attempts_pod_without_devices_and_queue() -> None:
    import kubernetes_validate

    job = probe_job(LARGE, Path("/headway/doctor/x"), "x", 60.0)
    kubernetes_validate.validate(job, "1.36", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert "nvidia.com/gpu" not in json.dumps(pod["containers"][0]["resources"])
    assert "kueue" not in json.dumps(job)
    assert not [label for label in job["spec"]["template"]["metadata"]["labels"] if label != checks.PROBE_LABEL]
    assert pod["automountServiceAccountToken"] is False
    assert pod["nodeSelector"] == LARGE.node_selector


def doctor(tmp_path: Path, *arguments: str, **environment: str) -> Any:  # noqa: ANN401 - click's Result
    settings = load_settings({"HEADWAY_HOME": str(tmp_path), **environment})
    return CliRunner().invoke(command, ["--cluster", *arguments], obj=settings)


def test_the_command_names_what_is_missing_before_any_cluster_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = doctor(tmp_path)
    assert result.exit_code == 1
    assert "WRONG   profile       no platform profile is named; set HEADWAY_PLATFORM" in result.output
    result = doctor(tmp_path, "--json", HEADWAY_PLATFORM=str(CASES / "profile_small.yaml"))
    assert result.exit_code == 1
    found = {finding["name"]: finding["ok"] for finding in json.loads(result.output)["findings"]}
    assert found == {"profile": True, "cluster": False, "pod": True}
