"""A real two-node DeepSpeed job from Dagster's page to a gated model version, every node a pod with its own address."""

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.serving import ask
from support.shop_serving import serving_shop
from support.training_bench import TrainingBench, build_shop

from tests.cluster.cluster_env import Cluster, wait_until

AS_OF = "2026-04-01"
WAIT_S = 500
STAGES = [{"path": ["shop", "training_run"]}, {"path": ["shop", "model_version"]}]
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
STATUS = """query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"""
TERMINATE = """mutation($id: String!) { terminateRun(runId: $id) { __typename } }"""
LOG = """query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection {
  events { ... on MessageEvent { message } } } } }"""
SHOWN = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } } } } }"""


@dataclass
class OnCluster(TrainingBench):
    """A bench whose runs train on a cluster."""

    more: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def environment(self) -> dict[str, str]:
        """The settings of this bench as variables."""
        return {**super().environment, **self.more}


@pytest.fixture
def shop(cluster: Cluster) -> Iterator[OnCluster]:
    """The pipeline with its snapshots, on the volume that pods see, and a namespace for its runs."""
    root = cluster.store / f"two-nodes-{secrets.token_hex(3)}"
    namespace = f"hwt-{secrets.token_hex(4)}"
    local = build_shop(root, change=with_deepspeed)
    cluster.admin.send("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": namespace}})
    document = {
        "namespace": namespace,
        "image": cluster.image,
        "volume": {"host_path": str(root), "mount_path": str(root)},
        "cpu": "1",
        "memory": "4Gi",
        "shared_memory": "256Mi",
    }
    platform = root / "platform.yaml"
    platform.write_text(yaml.safe_dump(document))
    cluster_settings = {
        "HEADWAY_PROFILE": "cluster",
        "HEADWAY_PLATFORM": str(platform),
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    yield OnCluster(local.folder, local.home, more=cluster_settings)
    cluster.admin.delete(f"/api/v1/namespaces/{namespace}")
    shutil.rmtree(root)


def with_deepspeed(attributes: dict[str, Any]) -> None:
    attributes["training"] |= {"engine": "deepspeed", "zero": 1}


def test_a_two_node_deepspeed_job_from_the_page_to_a_gated_version(shop: OnCluster, cluster: Cluster) -> None:
    """First no node has a place for it: the page says why it waits, and takes it back. Then it trains."""
    with serving_shop(shop.folder.parent, shop, None) as url:
        cluster.cordon(unschedulable=True)
        try:
            cancelled_while_it_waits(url, shop, cluster)
        finally:
            cluster.cordon(unschedulable=False)
        launched = launch(url)
        status = ended(url, launched)
        assert status == "SUCCESS", (shop.folder.parent / "dagster.log").read_text()[-4000:]
        node = ask(url, SHOWN, key=STAGES[1])["assetNodeOrError"]
    checks = {c["name"]: c["executionForLatestMaterialization"]["status"] for c in node["assetChecksOrError"]["checks"]}
    assert set(checks.values()) == {"SUCCEEDED"}
    assert {"contract", "leakage_proof", "segments"} <= set(checks)
    (run,) = shop.runs()
    assert [attempt.reason_code for attempt in run.attempts] == ["cancelled", "done"]
    assert (run.status, run.last.launcher) == ("succeeded", "kubernetes")
    assert run.facts.layout["engine"] == "deepspeed"
    hosts = node_hosts(shop, run.run_id)
    assert len(set(hosts.values())) == 2, hosts
    (version,) = shop.json("models", "list")["models"]
    assert version["run_id"] == run.run_id
    assert objects(cluster, Path(shop.more["HEADWAY_PLATFORM"])) == []
    assert shop.run("fsck").exit_code == 0


def cancelled_while_it_waits(url: str, shop: OnCluster, cluster: Cluster) -> None:
    """Launch on a full cluster, read the scheduler's words in Dagster's log, and terminate the run on its page."""
    launched = launch(url)
    wait_until(lambda: "unschedulable: node" in told(url, launched), "the reason in Dagster's log")
    assert "available" in told(url, launched), "the scheduler's own words"
    assert ask(url, TERMINATE, id=launched)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    assert ended(url, launched) == "CANCELED"
    (run,) = shop.runs()
    assert (run.status, run.last.worker_seconds) == ("cancelled", 0.0)
    assert objects(cluster, Path(shop.more["HEADWAY_PLATFORM"])) == []


def told(url: str, launched: str) -> str:
    """What Dagster's log of the run says."""
    return "\n".join(event["message"] for event in ask(url, LOG, id=launched)["logsForRun"]["events"])


def launch(url: str) -> str:
    params = {
        "selector": {
            "jobName": "__ASSET_JOB",
            "repositoryName": "__repository__",
            "repositoryLocationName": "shop",
            "assetSelection": STAGES,
        },
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": AS_OF}]},
        "runConfigData": {},
    }
    launched = ask(url, LAUNCH, params=params)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    return launched["run"]["runId"]


def ended(url: str, launched: str) -> str:
    """How Dagster's run ended; real training on two busy cores takes its time."""
    deadline = time.monotonic() + WAIT_S
    while (status := ask(url, STATUS, id=launched)["runOrError"]["status"]) not in ("SUCCESS", "FAILURE", "CANCELED"):
        assert time.monotonic() < deadline, f"the run is {status}"
        time.sleep(0.5)
    return status


def node_hosts(shop: OnCluster, run_id: str) -> dict[int, str]:
    """Under which name each node of the run worked."""
    with shop.services() as services:
        events = services.catalog.run_events(services.principal, run_id, kinds=("node_start",))
    return {event.node: str(event.data["hostname"]) for event in events if event.node is not None}


def objects(cluster: Cluster, platform: Path) -> list[str]:
    """Jobs and Services that are left in the run's namespace."""
    namespace = yaml.safe_load(platform.read_text())["namespace"]
    paths = (f"/apis/batch/v1/namespaces/{namespace}/jobs", f"/api/v1/namespaces/{namespace}/services")
    return [item["metadata"]["name"] for path in paths for item in cluster.admin.items(path)]
