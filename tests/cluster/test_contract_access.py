"""What the launcher's account may do on a cluster, and what happens to one that may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from support.charts import example_values, find, manifests
from support.cluster_bench import ClusterBench
from support.cluster_sound import assert_sound

from headway.training.kubernetes.client import Forbidden
from tests.cluster.cluster_env import Admin

GROUP = "/apis/rbac.authorization.k8s.io/v1"


def test_the_charts_role_is_enough(bench: ClusterBench, tmp_path: Path) -> None:
    """A whole life, a killed rank and a cancellation, with the token of the account that the chart makes."""
    account(bench, "launcher", launcher_rules())
    bench.kubeconfig = kubeconfig_of(bench, "launcher", tmp_path)
    first = bench.start(seed=1, orders={"ranks": {"1": {"at": 5, "attempts": [1], "do": "kill"}}})
    bench.succeeded(first)
    second = bench.start(seed=2, orders={"hold": True})
    bench.stepping(second)
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, second, "not needed")
    assert bench.finished(second).status == "cancelled"
    assert_sound(bench)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/namespaces/{}/secrets"),
        ("GET", "/api/v1/namespaces/{}/configmaps"),
        ("POST", "/api/v1/namespaces/{}/pods"),
        ("POST", "/api/v1/namespaces/{}/serviceaccounts/launcher/token"),
        ("PATCH", "/api/v1/namespaces/{}/services/any"),
        ("PATCH", "/api/v1/namespaces/{}/pods/any"),
        ("DELETE", "/api/v1/namespaces/{}/events/any"),
        ("GET", "/apis/batch/v1/namespaces/default/jobs"),
        ("GET", "/apis/batch/v1/jobs"),
        ("DELETE", "/api/v1/nodes/any"),
        ("GET", GROUP + "/namespaces/{}/roles"),
        ("POST", GROUP + "/namespaces/{}/rolebindings"),
    ],
)
def test_the_charts_role_is_no_more_than_that(bench: ClusterBench, tmp_path: Path, method: str, path: str) -> None:
    account(bench, "launcher", launcher_rules())
    token = Admin(kubeconfig_of(bench, "launcher", tmp_path))
    body = None if method in ("GET", "DELETE") else {"metadata": {"name": "any"}}
    with pytest.raises(ApiException) as refused:
        token.send(method, path.format(bench.namespace), body)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("resource", "verb"), [("jobs", "create"), ("jobs", "patch"), ("services", "create"), ("pods", "list")]
)
def test_a_missing_verb_is_named_and_the_run_waits_for_it(
    bench: ClusterBench, tmp_path: Path, resource: str, verb: str
) -> None:
    """Nothing is concluded from a refusal: when the right is granted, the same run goes on, with one Job."""
    rules = launcher_rules()
    account(bench, "launcher", [without(rule, resource, verb) for rule in rules])
    bench.kubeconfig = kubeconfig_of(bench, "launcher", tmp_path)
    run_id = bench.ask()
    refused = refusal(bench, run_id)
    assert resource in refused
    assert verb in refused
    run = bench.run(run_id)
    assert (run.status, len(run.attempts)) == ("open", 1)
    path = f"{GROUP}/namespaces/{bench.namespace}/roles/launcher"
    bench.cluster.admin.send("PATCH", path, {"rules": rules})
    bench.succeeded(run_id)
    assert_sound(bench)


def test_a_token_without_any_right_starts_nothing(bench: ClusterBench, tmp_path: Path) -> None:
    account(bench, "stranger", [])
    bench.kubeconfig = kubeconfig_of(bench, "stranger", tmp_path)
    run_id = bench.ask()
    with pytest.raises(Forbidden) as refused:
        bench.reconcile(run_id)
    assert bench.namespace in str(refused.value)
    assert bench.empty()
    assert bench.run(run_id).status == "open"


def refusal(bench: ClusterBench, run_id: str) -> str:
    """What a refused launcher says, at the latest when it has tried a few times."""
    for _ in range(5):
        try:
            bench.reconcile(run_id)
        except Forbidden as error:
            return str(error)
    raise AssertionError("nothing was refused")


def launcher_rules() -> list[dict[str, Any]]:
    """The rules of the chart's Role for the launcher."""
    return find(manifests(example_values()), "Role", "headway-launcher")["rules"]


def account(bench: ClusterBench, name: str, rules: list[dict[str, Any]]) -> None:
    """A ServiceAccount with a Role of its own."""
    admin, space = bench.cluster.admin, bench.namespace
    meta = {"name": name, "namespace": space}
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}
    admin.send("POST", f"/api/v1/namespaces/{space}/serviceaccounts", body)
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules}
    admin.send("POST", f"{GROUP}/namespaces/{space}/roles", role)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": space}],
    }
    admin.send("POST", f"{GROUP}/namespaces/{space}/rolebindings", binding)


def kubeconfig_of(bench: ClusterBench, name: str, folder: Path) -> Path:
    """A kubeconfig with a token of a ServiceAccount."""
    path = f"/api/v1/namespaces/{bench.namespace}/serviceaccounts/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    token = bench.cluster.admin.send("POST", path, request)["status"]["token"]
    document = yaml.safe_load(bench.cluster.kubeconfig.read_text())
    current = next(c for c in document["contexts"] if c["name"] == document["current-context"])["context"]
    document["users"] = [{"name": name, "user": {"token": token}}]
    document["contexts"] = [{"name": name, "context": {"cluster": current["cluster"], "user": name}}]
    document["current-context"] = name
    file = folder / f"{name}.kubeconfig"
    file.write_text(yaml.safe_dump(document))
    return file


def without(rule: dict[str, Any], resource: str, verb: str) -> dict[str, Any]:
    """The rule, less one verb where it is about the resource."""
    if resource not in rule["resources"]:
        return rule
    return {**rule, "verbs": [v for v in rule["verbs"] if v != verb]}
