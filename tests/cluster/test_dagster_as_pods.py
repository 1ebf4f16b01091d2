"""Dagster on a cluster: a run is a pod, its steps are pods that it owns, and the chart's accounts may do just that."""

import importlib
import secrets
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import kubernetes.client
import kubernetes.config
import pytest
import yaml
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster_k8s.launcher import K8sRunLauncher
from support.charts import Manifest, example_values, find, manifests, merged, of_kind
from support.dagster_chart import launcher_config, values
from support.pipelines import source, write_pipeline

from headway.home import load_settings
from headway.services import open_services
from tests.cluster.cluster_env import Cluster, wait_until

ROOT = Path(__file__).resolve().parents[2]
READINGS = source({"id": "int64", "value": "float64"}, row_id=["id"])
LABELS = "label_id,asked_at,known_at,target\na,2020-01-01T10:00:00Z,2020-01-01T12:00:00Z,1\n"
FILES = {"data.csv": "id,value\n1,2.5\n2,3.5\n", "labels.csv": LABELS}
COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}


@dataclass
class Site:
    """A namespace with the chart's identities and settings, and a home that pods see."""

    cluster: Cluster
    namespace: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """The settings of Headway's processes, as the chart and the Secret give them."""
        settings = find(self.chart, "ConfigMap", "headway-settings")["data"]
        return {**settings, "HEADWAY_DATABASE_URL": f"sqlite:///{self.root / 'catalog.db'}"}

    @property
    def chart(self) -> list[Manifest]:
        """What Headway's chart makes here."""
        given = merged(example_values(), home__mountPath=str(self.root), rbac__readNodes=False, kueue__enabled=False)
        return manifests(given, self.namespace)

    def install(self) -> None:
        """Make the namespace, the chart's accounts, rights and settings, and the Secrets that it names."""
        send = self.cluster.admin.send
        send("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": self.namespace}})
        made = of_kind(self.chart, "ServiceAccount", "ConfigMap", "Role", "RoleBinding")
        made += [
            secret("headway-database", HEADWAY_DATABASE_URL=self.environment["HEADWAY_DATABASE_URL"]),
            secret("headway-dagster-postgresql", **{"postgresql-password": "unused"}),
        ]
        for manifest in made:
            send("POST", COLLECTIONS[manifest["kind"]].format(self.namespace), manifest)

    def instance(self) -> dg.DagsterInstance:
        """An instance whose launcher is that of deploy/values/dagster.yaml, with this site's volume and sizes."""
        home = self.root / "dagster"
        home.mkdir()
        chart = values()
        config = launcher_config(chart)
        small = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}
        config["run_k8s_config"]["container_config"]["resources"] = small
        config |= {
            "job_namespace": self.namespace,
            "job_image": self.cluster.image,
            "dagster_home": str(home),
            "service_account_name": chart["dagster-user-deployments"]["serviceAccount"]["name"],
            "env_config_maps": ["headway-settings"],
            "env_secrets": ["headway-database"],
            "env_vars": [f"PYTHONPATH={ROOT}:{ROOT / 'tests'}", f"PODS_PIPELINE={self.root / 'meter'}"],
            "volumes": [{"name": "home", "host_path": {"path": str(self.root)}}],
            "volume_mounts": [{"name": "home", "mount_path": str(self.root)}],
        }
        launcher = {"module": "dagster_k8s", "class": "K8sRunLauncher", "config": config}
        document = {"telemetry": {"enabled": False}, "run_launcher": launcher}
        (home / "dagster.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        return dg.DagsterInstance.from_config(str(home))

    def objects(self, plural: str, **query: str) -> list[Manifest]:
        """Objects of the namespace."""
        path = {"jobs": "/apis/batch/v1/namespaces/{}/jobs", "pods": "/api/v1/namespaces/{}/pods"}[plural]
        return self.cluster.admin.items(path.format(self.namespace), **query)

    def workers(self, plural: str, component: str) -> list[Manifest]:
        """Dagster's Jobs or pods of one kind of work."""
        return self.objects(plural, labelSelector=f"app.kubernetes.io/component={component}")


def secret(name: str, **data: str) -> Manifest:
    encoded = {key: b64encode(text.encode()).decode() for key, text in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": encoded}


@pytest.fixture
def site(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(cluster, f"hwd-{secrets.token_hex(4)}", cluster.store / f"dagster-{secrets.token_hex(3)}")
    write_pipeline(made.root / "meter", READINGS, files=FILES)
    made.install()
    for name, value in {**made.environment, "PODS_PIPELINE": str(made.root / "meter")}.items():
        monkeypatch.setenv(name, value)
    yield made
    cluster.admin.delete(f"/api/v1/namespaces/{made.namespace}")
    shutil.rmtree(made.root)


def acting_as(account: str, site: Site, patch: pytest.MonkeyPatch) -> None:
    """Give this process the token of an account, as a pod has it; nothing of the kubeconfig's own rights is left."""
    path = f"/api/v1/namespaces/{site.namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = site.cluster.admin.send("POST", path, request)["status"]["token"]
    configuration = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(str(site.cluster.kubeconfig), client_configuration=configuration)
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"authorization": f"Bearer {token}"}

    def load_incluster_config() -> None:
        kubernetes.client.Configuration.set_default(configuration)

    patch.setattr(kubernetes.client.Configuration, "_default", None)
    patch.setattr(kubernetes.config, "load_incluster_config", load_incluster_config)


def created(instance: dg.DagsterInstance, image: str, name: str, **tags: str) -> dg.DagsterRun:
    """A run of the job `name`, as the code location of the image would hand it to the daemon."""
    location = importlib.import_module("support.pods_location")
    origin = RepositoryPythonOrigin(
        sys.executable, ModuleCodePointer("support.pods_location", "defs", str(ROOT)), image, ["dagster"], None
    )
    job = location.defs.resolve_job_def(name)
    return instance.create_run_for_job(job, tags=tags, job_code_origin=JobPythonOrigin(name, origin))


def story(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """What the run's log says, errors included."""
    lines: list[str] = []
    for record in instance.all_logs(run.run_id):
        data = record.dagster_event.event_specific_data if record.dagster_event else None
        lines += [record.message, str(getattr(data, "error", "") or "")]
    return "\n".join(filter(None, lines[-40:]))


def test_a_run_and_its_steps_are_pods_and_steps_go_with_their_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    acting_as("headway-dagster", site, monkeypatch)
    with site.instance() as instance:
        launcher: Any = instance.run_launcher
        assert isinstance(launcher, K8sRunLauncher)
        run = created(instance, site.cluster.image, "data", **{"dagster/partition": "2020-01-01"})
        launcher.launch_run(LaunchRunContext(run, None))

        def ended() -> dg.DagsterRun | None:
            found = instance.get_run_by_id(run.run_id)
            return found if found is not None and found.is_finished else None

        last = wait_until(ended, "the end of Dagster's run", every_s=0.5)
        assert last.status == dg.DagsterRunStatus.SUCCESS, story(instance, last)
        health: CheckRunHealthResult = launcher.check_run_worker_health(last)
        assert health.status in (WorkerStatus.SUCCESS, WorkerStatus.RUNNING)
        # Asks for the Job, its pods, their logs and events.
        told = launcher.get_run_worker_debug_info(last)
        assert told is not None
        assert run.run_id in told

    with open_services(load_settings(site.environment)) as services:
        found = [services.catalog.current_many(services.principal, f"meter/{s}") for s in ("readings", "labels")]
    assert [[version.status for version in versions.values()] for versions in found] == [["released"], ["released"]]

    (pod,) = site.workers("pods", "run_worker")
    steps = site.workers("jobs", "step_worker")
    assert len(steps) == 2
    for step in steps:
        (owner,) = step["metadata"]["ownerReferences"]
        named = (owner["kind"], owner["name"], owner["uid"])
        assert named == ("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])
    accounts = {p["spec"]["serviceAccountName"] for p in site.objects("pods")}
    assert accounts == {"headway-runs"}

    site.cluster.admin.delete(f"/api/v1/namespaces/{site.namespace}/pods/{pod['metadata']['name']}")
    wait_until(lambda: not site.workers("jobs", "step_worker"), "the steps to go with their run's pod")


def test_a_cancelled_run_leaves_no_pod_and_no_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """dagster-k8s deletes the run's Job and pod; the run's process ends its steps, and what it leaves goes with it."""
    acting_as("headway-dagster", site, monkeypatch)
    with site.instance() as instance:
        run = created(instance, site.cluster.image, "waits")
        instance.run_launcher.launch_run(LaunchRunContext(run, None))
        wait_until(lambda: running(site.workers("pods", "step_worker")), "the step's pod", every_s=0.5)
        assert instance.run_launcher.terminate(run.run_id)
        wait_until(lambda: not site.objects("jobs"), "no Job to be left")
        wait_until(lambda: not site.objects("pods"), "no pod to be left")


def running(pods: list[Manifest]) -> bool:
    return any(pod["status"].get("phase") == "Running" for pod in pods)
