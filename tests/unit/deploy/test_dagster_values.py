"""Dagster on the cluster: the pods that follow from deploy/values/dagster.yaml, and what they share with our chart."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.charts import DEPLOY, Manifest, example_values, find, manifests, of_kind, pod_faults, references
from support.dagster_chart import (
    FILE,
    code_location,
    dagster_job,
    image,
    run_launcher,
    standing_pods,
    values,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ours() -> list[Manifest]:
    return manifests(example_values())


@pytest.fixture
def run_job(monkeypatch: pytest.MonkeyPatch) -> Manifest:
    return dagster_job(values(), run_launcher(values(), monkeypatch), "run_worker")


@pytest.fixture
def step_job(monkeypatch: pytest.MonkeyPatch) -> Manifest:
    return dagster_job(values(), run_launcher(values(), monkeypatch), "step_worker")


def test_run_and_step_pods_are_hardened_and_valid(run_job: Manifest, step_job: Manifest) -> None:
    for job in (run_job, step_job):
        kubernetes_validate.validate(job, "1.36", strict=True)
        assert pod_faults(job["spec"]["template"]) == []
        # A step that ran twice by itself would be repeated behind the catalog's back.
        assert job["spec"]["backoffLimit"] == 0
        assert job["spec"]["ttlSecondsAfterFinished"] == 86400


def test_standing_pods_are_hardened() -> None:
    pods = standing_pods(values())
    assert {name: pod_faults(pod) for name, pod in pods.items()} == {name: [] for name in pods}


def test_a_run_pod_has_each_volume_and_setting_once(run_job: Manifest) -> None:
    """Volumes said for the launcher and for the code location both would be in the pod twice: Kubernetes refuses it."""
    pod = run_job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    names = [v["name"] for v in pod["volumes"]]
    paths = [m["mountPath"] for m in container["volumeMounts"]]
    sources = [str(s) for s in container["envFrom"]]
    for found in (names, paths, sources):
        assert len(set(found)) == len(found)
    assert {m["name"] for m in container["volumeMounts"]} == set(names)


def test_pods_name_what_our_chart_makes_or_the_installation_brings(ours: list[Manifest], run_job: Manifest) -> None:
    made = {(m["kind"], m["metadata"]["name"]) for m in ours}
    of_dagster = {("ConfigMap", "dagster-pipeline-env"), ("ConfigMap", "headway-user-env")}
    assert references(run_job["spec"]["template"]) - made - of_dagster == {
        ("PersistentVolumeClaim", "headway-home"),
        ("PersistentVolumeClaim", "headway-keys"),
        ("Secret", "headway-database"),
        ("Secret", "headway-dagster-postgresql"),
    }
    accounts = {name: pod["spec"]["serviceAccountName"] for name, pod in standing_pods(values()).items()}
    assert accounts == {"webserver": "headway-dagster", "daemon": "headway-dagster", "code-location": "headway-runs"}
    assert run_job["spec"]["template"]["spec"]["serviceAccountName"] == "headway-runs"
    assert {("ServiceAccount", name) for name in accounts.values()} <= made


def test_home_and_settings_lie_where_the_reconciler_has_them(ours: list[Manifest], run_job: Manifest) -> None:
    def mounts(template: Manifest) -> dict[str, str]:
        return {m["mountPath"]: m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]}

    reconciler = mounts(find(ours, "Deployment", "headway-reconciler")["spec"]["template"])
    assert reconciler.items() <= mounts(run_job["spec"]["template"]).items()
    # Training pods get the home at the same path, as the profile says.
    profile = yaml.safe_load(find(ours, "ConfigMap", "headway-platform")["data"]["platform.yaml"])
    assert profile["volume"]["mount_path"] in reconciler


def test_labels_of_pods_are_those_that_the_walls_select(
    ours: list[Manifest], run_job: Manifest, step_job: Manifest
) -> None:
    selected = {
        m["metadata"]["name"]: m["spec"]["podSelector"].get("matchLabels", {}) for m in of_kind(ours, "NetworkPolicy")
    }
    for name, job in (("headway-runs-egress", run_job), ("headway-steps-egress", step_job)):
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert selected[name].items() <= labels.items()
        # They are no training pods, whose wall lets nothing out.
        assert not any(label.startswith("headway.dev/") for label in labels)


def test_ports_are_those_that_the_walls_open(ours: list[Manifest]) -> None:
    chart = values()
    assert (
        chart["dagsterWebserver"]["service"]["port"] == chart["dagsterWebserver"]["readinessProbe"]["httpGet"]["port"]
    )
    for policy, port in (
        ("headway-webserver", chart["dagsterWebserver"]["service"]["port"]),
        ("headway-code-location", code_location(chart)["port"]),
    ):
        (rule,) = find(ours, "NetworkPolicy", policy)["spec"]["ingress"]
        assert [p["port"] for p in rule["ports"]] == [port]


def test_the_code_server_starts_with_these_arguments() -> None:
    from dagster._cli.api import grpc_command

    location = code_location(values())
    arguments = ["-h", "0.0.0.0", "-p", str(location["port"]), *location["dagsterApiGrpcArgs"]]
    parsed = grpc_command.make_context("grpc", arguments).params
    assert (parsed["module_name"], parsed["working_directory"]) == ("assets.definitions", "/app")
    workspace = yaml.safe_load((ROOT / "workspace.yaml").read_text(encoding="utf-8"))
    assert workspace["load_from"][0]["python_module"]["location_name"] == location["name"]


def test_the_storage_takes_a_driver_that_dagster_speaks() -> None:
    from dagster_postgres.utils import pg_url_from_config

    said = values()["postgresql"]
    url = pg_url_from_config(
        {
            "postgres_db": {
                "username": said["postgresqlUsername"],
                "password": "filled-in-by-a-secret",
                "hostname": said["postgresqlHost"],
                "db_name": said["postgresqlDatabase"],
                "port": said["service"]["port"],
                "params": said["postgresqlParams"],
                "scheme": said["postgresqlScheme"],
            }
        }
    )
    assert url.startswith("postgresql+psycopg2://dagster:")


def test_the_chart_gives_no_rights_and_makes_no_secrets() -> None:
    chart = values()
    assert chart["rbacEnabled"] is False
    assert chart["serviceAccount"]["create"] is chart["dagster-user-deployments"]["serviceAccount"]["create"] is False
    assert chart["generatePostgresqlPasswordSecret"] is chart["generateCeleryConfigSecret"] is False
    assert chart["postgresql"]["postgresqlPassword"] == ""
    assert not any(chart[part]["enabled"] for part in ("postgresql", "rabbitmq", "redis", "flower", "telemetry"))


def images(value: object) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for item in value for found in images(item)]
    if not isinstance(value, dict):
        return []
    here = [value] if "repository" in value else []
    return here + [found for item in value.values() for found in images(item)]


def test_every_image_is_pinned_by_digest() -> None:
    found = images(values())
    assert len(found) == 4
    for parts in found:
        assert re.fullmatch(r"[^@:]+:[^@:]+@sha256:[0-9a-f]{64}", image(parts))
        assert parts["pullPolicy"] == "IfNotPresent"


def test_the_chart_version_is_that_of_the_pinned_dagster() -> None:
    pinned = re.search(r"^dagster==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for file in (FILE, ROOT / "docs" / "operate.md"):
        assert re.findall(r"--version (\S+)", file.read_text(encoding="utf-8")) == [pinned[1]]


def test_monitoring_does_not_resume_and_retries_nothing() -> None:
    """A resumed run would execute steps again silently: the catalog adopts, and asking again is a new run."""
    daemon = values()["dagsterDaemon"]
    assert daemon["runMonitoring"]["maxResumeRunAttempts"] == 0
    assert daemon["runRetries"] == {"enabled": False}


def test_files_of_values_hold_nothing_secret() -> None:
    for file in (DEPLOY / "values").iterdir():
        text = file.read_text(encoding="utf-8")
        assert re.search(r"://[^\s/@]+:[^\s/@]+@", text) is None
        assert re.search(r"(?im)^\s*[a-z_]*(password|token|access_key|secret_key):\s*['\"]?[^\s'\"#{]", text) is None
