"""What Dagster's chart makes of deploy/values/dagster.yaml, as far as pods and the instance follow from it.

The chart is not in this repository. Its templates `_run-launcher.tpl`, `_postgresql.tpl`, `deployment-*.yaml` and the
helper `k8sContainerContext` copy values field by field; the same copying stands here, and dagster-k8s makes the pods.
"""

from types import SimpleNamespace
from typing import Any

import kubernetes.client
import kubernetes.config
import pytest
import yaml
from dagster._serdes.config_class import ConfigurableClassData
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import construct_dagster_k8s_job
from dagster_k8s.launcher import K8sRunLauncher
from support.charts import DEPLOY, Manifest

FILE = DEPLOY / "values" / "dagster.yaml"
NAMESPACE = "growth"


def values() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def code_location(chart: dict[str, Any]) -> dict[str, Any]:
    (found,) = chart["dagster-user-deployments"]["deployments"]
    return found


def image(parts: dict[str, Any]) -> str:
    return f"{parts['repository']}:{parts['tag']}"


def launcher_config(chart: dict[str, Any]) -> dict[str, Any]:
    said = chart["runLauncher"]["config"]["k8sRunLauncher"]
    raw = said["runK8sConfig"]
    return {
        "load_incluster_config": said["loadInclusterConfig"],
        "job_namespace": NAMESPACE,
        "image_pull_policy": said["imagePullPolicy"],
        "service_account_name": chart["serviceAccount"]["name"],
        "dagster_home": chart["global"]["dagsterHome"],
        "instance_config_map": "dagster-instance",
        "postgres_password_secret": chart["global"]["postgresqlSecretName"],
        "env_config_maps": ["dagster-pipeline-env", *(m["name"] for m in said["envConfigMaps"])],
        "env_secrets": [s["name"] for s in said["envSecrets"]],
        "volumes": said["volumes"],
        "volume_mounts": said["volumeMounts"],
        "labels": said["labels"],
        "fail_pod_on_run_failure": said["failPodOnRunFailure"],
        "security_context": said["securityContext"],
        "resources": said["resources"],
        "run_k8s_config": {
            "container_config": raw["containerConfig"],
            "pod_spec_config": raw["podSpecConfig"],
            "pod_template_spec_metadata": raw["podTemplateSpecMetadata"],
            "job_spec_config": raw["jobSpecConfig"],
        },
    }


def container_context(chart: dict[str, Any]) -> dict[str, Any]:
    location = code_location(chart)
    return {
        "k8s": {
            "image_pull_policy": location["image"]["pullPolicy"],
            "env_config_maps": ["headway-user-env", *(m["name"] for m in location["envConfigMaps"])],
            "env_secrets": [s["name"] for s in location["envSecrets"]],
            "volume_mounts": location["volumeMounts"],
            "volumes": location["volumes"],
            "resources": location["resources"],
            "namespace": NAMESPACE,
            "service_account_name": chart["dagster-user-deployments"]["serviceAccount"]["name"],
            "run_k8s_config": {"pod_spec_config": {"automount_service_account_token": True}},
        }
    }


def run_launcher(chart: dict[str, Any], patched: pytest.MonkeyPatch) -> K8sRunLauncher:
    """The launcher of the instance; its configuration passes Dagster's own schema on the way."""
    patched.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    config = yaml.safe_dump(launcher_config(chart))
    launcher = ConfigurableClassData("dagster_k8s.launcher", "K8sRunLauncher", config).rehydrate(as_type=K8sRunLauncher)
    assert launcher is not None
    return launcher


def dagster_job(chart: dict[str, Any], launcher: K8sRunLauncher, component: str) -> Manifest:
    """The Job of a run or of a step, as dagster-k8s makes it."""
    origin = SimpleNamespace(repository_origin=SimpleNamespace(container_context=container_context(chart)))
    run: Any = SimpleNamespace(job_code_origin=origin, tags={})
    context = K8sContainerContext.create_for_run(run, launcher, include_run_tags=False)
    job = construct_dagster_k8s_job(
        context.get_k8s_job_config(image(code_location(chart)["image"]), launcher),
        args=["dagster", "api", "execute_run"],
        job_name="dagster-run-1",
        component=component,
        user_defined_k8s_config=context.run_k8s_config,
    )
    plain: Any = kubernetes.client.ApiClient().sanitize_for_serialization(job)
    return plain


def standing_pods(chart: dict[str, Any]) -> dict[str, Manifest]:
    """Pod templates of the Deployments, reduced to what the values decide."""
    parts = {
        "webserver": chart["dagsterWebserver"],
        "daemon": chart["dagsterDaemon"],
        "code-location": code_location(chart),
    }
    account = {"code-location": chart["dagster-user-deployments"]["serviceAccount"]["name"]}
    return {
        name: {
            "spec": {
                "serviceAccountName": account.get(name, chart["serviceAccount"]["name"]),
                "securityContext": part["podSecurityContext"],
                "volumes": part["volumes"],
                "containers": [
                    {
                        "name": name,
                        "image": image(part["image"]),
                        "securityContext": part["securityContext"],
                        "resources": part["resources"],
                        "volumeMounts": part["volumeMounts"],
                    }
                ],
            }
        }
        for name, part in parts.items()
    }
