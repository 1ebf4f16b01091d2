"""What is rendered: equal to the golden files, and acceptable to every schema that speaks about it."""

import difflib
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from support.golden_manifests import BACKENDS, CASES, PROFILES, golden, rendered

from headway.cli.kube import command
from headway.home import load_settings
from headway.training.kubernetes.validate import ManifestInvalid, check_schema, quantity

KUBERNETES = "1.36"
KUBEFLOW = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
}
CASE = [(backend, profile) for backend in BACKENDS for profile in PROFILES]


def documents(backend: str, profile: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(golden(backend, profile).read_text()))


def jobs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Specs of the Jobs that a document stands for."""
    spec = document["spec"]
    if document["kind"] == "Job":
        yield spec
    for part in spec.get("replicatedJobs", spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])):
        yield part["template"]["spec"]


def without_quantities(value: Any) -> Any:  # noqa: ANN401 - any document
    """The models take a quantity as a text nowhere; the API does, and other checks look at them."""
    if isinstance(value, dict):
        left_out = ("resources", "resourcesPerNode", "sizeLimit")
        return {key: without_quantities(item) for key, item in value.items() if key not in left_out}
    return [without_quantities(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("backend", "profile"), CASE)
def test_a_manifest_is_its_golden_one(backend: str, profile: str) -> None:
    file = golden(backend, profile)
    difference = difflib.unified_diff(
        file.read_text().splitlines(), rendered(backend, profile).splitlines(), str(file), "now", lineterm="", n=4
    )
    shown = "\n".join(difference)
    assert not shown, f"{shown}\nIf that is meant: PYTHONPATH=.:tests python -m support.golden_manifests"


@pytest.mark.parametrize(("backend", "profile"), CASE)
def test_a_manifest_passes_the_schemas(backend: str, profile: str) -> None:
    for document in documents(backend, profile):
        if document["kind"] in KUBEFLOW:
            check_schema(document)
            KUBEFLOW[document["kind"]].model_validate(without_quantities(document))
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        for spec in jobs(document):
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
            kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_backends_run_one_and_the_same_container(profile: str) -> None:
    """What differs is the name of the container and of node 0, and whether a controller names the pods."""
    (job,) = jobs(documents("job", profile)[0])
    (jobset,) = jobs(documents("jobset", profile)[0])
    runtime, train_job = documents("trainjob", profile)
    (inside,) = jobs(runtime)
    name = train_job["metadata"]["name"]
    pods = [deepcopy(spec["template"]["spec"]) for spec in (job, jobset, inside)]
    trainer = train_job["spec"]["trainer"]
    pods[2]["containers"][0] |= {
        **{field: trainer[field] for field in ("image", "command", "args", "env")},
        "resources": trainer["resourcesPerNode"],
        "name": "trainer",
    }
    assert pods[0].pop("subdomain") == name
    masters = []
    for pod in pods:
        (master,) = [entry for entry in pod["containers"][0]["env"] if entry["name"] == "MASTER_ADDR"]
        masters.append(master.pop("value").split(".")[0])
    assert masters == [f"{name}-0", f"{name}-node-0-0", f"{name}-node-0-0"]
    assert pods[0] == pods[1] == pods[2]
    assert trainer["numNodes"] == job["completions"] == inside["completions"] == jobset["completions"] == 2
    for spec in (job, jobset, inside):
        container = spec["template"]["spec"]["containers"][0]["name"]
        assert [r["onExitCodes"]["containerName"] for r in spec["podFailurePolicy"]["rules"][1:]] == [container]
        assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
        assert "ttlSecondsAfterFinished" not in spec


@pytest.mark.parametrize(("backend", "profile"), CASE)
def test_e09_shared_memory_is_a_sized_volume_within_the_memory_request(backend: str, profile: str) -> None:
    given = yaml.safe_load((CASES / f"profile_{profile}.yaml").read_text())
    found = documents(backend, profile)
    (spec,) = [spec for document in found for spec in jobs(document)]
    pod = spec["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert {"name": volume["name"], "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    resources = pod["containers"][0].get("resources") or found[1]["spec"]["trainer"]["resourcesPerNode"]
    shared = quantity(volume["emptyDir"]["sizeLimit"])
    assert shared == quantity(given.get("shared_memory", "64Mi"))
    for side in ("requests", "limits"):
        assert quantity(resources[side]["memory"]) == quantity(given.get("memory", "2Gi")) + shared


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["spec"].update(failurePolice={}), "spec: Additional properties are not allowed ('failurePolice'"),
        (lambda d: d["spec"]["failurePolicy"].update(maxRestarts="0"), "spec.failurePolicy.maxRestarts: '0' is not"),
        (lambda d: d["spec"]["replicatedJobs"][0].pop("name"), "spec.replicatedJobs[0]: 'name' is a required property"),
        (
            lambda d: d["spec"]["successPolicy"].update(operator="Most"),
            "successPolicy.operator: 'Most' is not one",
        ),
        (lambda d: d.update(apiVersion="jobset.x-k8s.io/v1"), "apiVersion: 'jobset.x-k8s.io/v1alpha2' was expected"),
    ],
)
def test_a_jobset_of_another_shape_is_refused_by_field(change: Any, problem: str) -> None:  # noqa: ANN401
    document = documents("jobset", "small")[0]
    change(document)
    with pytest.raises(ManifestInvalid) as refused:
        check_schema(document)
    assert problem in str(refused.value)


def kube(tmp_path: Path, *arguments: str) -> Result:
    settings = load_settings({"HEADWAY_HOME": str(tmp_path / "home")})
    return CliRunner().invoke(command, ["render", *arguments], obj=settings)


def test_without_a_profile_an_example_is_rendered_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    result = kube(tmp_path, str(CASES / "spec.json"), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "an example is used" in result.stderr
    assert [document["kind"] for document in yaml.safe_load_all(out.read_text())] == ["Job", "Service"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["layout"].update(dp=3), "layout.dp: the product of dp, shard, tp, pp, sp, ep is 3"),
        (lambda s: s.pop("seed"), "seed: missing"),
        (lambda s: s.update(speed=1), "speed: unknown field"),
        (lambda s: s["restart"].update(grace_s=600.0), "spec.template.spec.terminationGracePeriodSeconds: "),
    ],
)
def test_a_spec_that_cannot_run_is_refused_by_field(tmp_path: Path, change: Any, words: str) -> None:  # noqa: ANN401
    spec = json.loads((CASES / "spec.json").read_text())
    change(spec)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    result = kube(tmp_path, str(tmp_path / "spec.json"))
    assert words in str(result.exception)


def test_a_profile_is_refused_by_file_line_and_field(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text((CASES / "profile_small.yaml").read_text() + "shared_memory: 1 GB\n")
    result = kube(tmp_path, str(CASES / "spec.json"), "--platform", str(profile))
    assert f"{profile}:7: shared_memory: '1 GB' is no quantity" in str(result.exception)


def test_an_attempt_is_rendered_for_the_devices_of_the_profile(tmp_path: Path) -> None:
    for size, device in (("large", "cuda"), ("small", "cpu")):
        result = kube(tmp_path, str(CASES / "spec.json"), "--platform", str(CASES / f"profile_{size}.yaml"))
        job = next(yaml.safe_load_all(result.stdout))
        environment = {e["name"]: e.get("value") for e in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert environment["DS_ACCELERATOR"] == device
