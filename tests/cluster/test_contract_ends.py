"""How attempts end that a cluster took away: each cause by its name, and free or counted as the table says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.cluster_bench import ClusterBench
from support.cluster_sound import assert_sound, resumed_from, steps_of

from tests.cluster.cluster_env import Cluster, Faults, wait_until
from trainer.events import node_folder, read_heartbeat


@pytest.fixture
def three_nodes(cluster: Cluster) -> list[str]:
    """Names of the nodes; a lost one needs two others for the next attempt."""
    nodes = cluster.nodes()
    if len(nodes) < 3:
        pytest.skip("needs three nodes: one is lost, and two go on")
    return nodes


def test_out_of_memory_is_named(bench: ClusterBench) -> None:
    """The same spec will die of it again: it counts."""
    bench.changes.update(memory="256Mi")
    order = {"at": 5, "attempts": [1], "do": "eat"}
    bench_orders = {"ranks": {"1": order}}
    if bench.cluster.faults is not None:
        # What stands behind the faults kills in place of the kernel.
        order["do"] = "wait"
    run_id = bench.start(orders=bench_orders)
    if bench.cluster.faults is not None:
        bench.stepping(run_id, steps=4)
        bench.cluster.faults.set(oom=[bench.pods()[1]["metadata"]["name"]])
        bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
        bench.cluster.faults.clear()
    run = bench.finished(run_id)
    first = run.attempts[0]
    assert (first.state, first.reason_code, first.counts) == ("failed", "out_of_memory", True)
    assert run.status == "succeeded"
    assert_sound(bench)


def test_a_drain_is_a_free_retry_from_the_checkpoint(bench: ClusterBench) -> None:
    """One attempt is all that the declaration allows, and a drain takes none of it."""
    run_id = bench.start(max_attempts=1, orders={"hold": True, "every": 100_000})
    bench.stepping(run_id, steps=3)
    evict(bench, 1)
    bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    bench.order(run_id)
    run = bench.finished(run_id)
    first = run.attempts[0]
    assert (run.status, first.counts, first.retry) == ("succeeded", False, "free")
    assert first.reason_code in ("evicted", "preempted")
    assert resumed_from(bench.recorded(run_id), 2) >= 3
    assert_sound(bench)


def test_a_lost_kubelet_is_given_up_and_its_rank_can_write_nothing_more(
    bench: ClusterBench, faults: Faults, three_nodes: list[str]
) -> None:
    """The node's kubelet is killed and its containers run on: attempt 2 starts elsewhere, and attempt 1 is fenced."""
    bench.changes.update(grace_s=6, node_lost_after_s=5)
    run_id = bench.start(max_attempts=1, grace_s=3.0, orders={"hold": True})
    bench.stepping(run_id, steps=2)
    lost = bench.pods()[1]["spec"]["nodeName"]
    assert lost in three_nodes
    faults.set(nodes={lost: "killed"})
    bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    first = bench.run(run_id).attempts[0]
    assert (first.reason_code, first.retry) == ("node_lost", "free")
    bench.stepping(run_id, attempt=2)
    assert lost not in {pod["spec"]["nodeName"] for pod in bench.pods(attempt=2).values()}
    old = node_folder(bench.attempt_file(run_id, 1), 1)
    wait_until(lambda: is_still(old / "node.heartbeat"), "the old node to see the fence")
    written = (old / "events.jsonl").read_bytes()
    assert b"node_end" not in written
    bench.order(run_id)
    bench.succeeded(run_id)
    assert (old / "events.jsonl").read_bytes() == written
    faults.clear()
    wait_until(bench.empty, "the lost pod to go when its node is back")
    assert_sound(bench)


def test_a_partition_is_found_by_the_hang_detector(bench: ClusterBench, faults: Faults, three_nodes: list[str]) -> None:
    """One node hears nobody: rank 0 stands still, and the attempt ends though no process died."""
    bench.changes.update(grace_s=6, node_lost_after_s=5)
    run_id = bench.start(hang_floor_s=4.0, grace_s=3.0, orders={"hold": True})
    bench.stepping(run_id, steps=2)
    cut = bench.pods()[1]["spec"]["nodeName"]
    assert cut in three_nodes
    faults.set(nodes={cut: "partitioned"})
    bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    first = bench.run(run_id).attempts[0]
    assert first.reason_code in ("hung", "node_lost")
    hangs = [end for node in (0, 1) for end in bench.events(run_id, 1, node) if end.data.get("code") == 76]
    assert hangs
    bench.stepping(run_id, attempt=2)
    bench.order(run_id)
    bench.succeeded(run_id)
    assert steps_of(bench.recorded(run_id), 2)
    faults.clear()
    wait_until(bench.empty, "the cut pod to go when its node is back")
    assert_sound(bench)


def test_waiting_for_an_image_is_told_in_words(bench: ClusterBench, faults: Faults) -> None:
    """Here only a name that no registry has is asked of the cluster; it waits, and says why."""
    del faults
    bench.changes.update(image="registry.invalid/none@sha256:" + "1" * 64)
    run_id = bench.start()
    run = bench.until(run_id, lambda run: "image_pull" in str(run.last.waiting), "the reason of waiting")
    assert (run.status, run.last.state) == ("open", "admitted")
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "wrong image")
    assert bench.finished(run_id).status == "cancelled"
    assert_sound(bench)


def test_waiting_for_a_node_is_told_in_the_schedulers_words(bench: ClusterBench) -> None:
    bench.changes.update(node_selector={"headway.dev/none": "here"})
    run_id = bench.start()
    run = bench.until(run_id, lambda run: "unschedulable" in str(run.last.waiting), "the reason of waiting")
    assert "node" in str(run.last.waiting).partition("unschedulable")[2]
    assert run.status == "open"
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "no such node")
    assert bench.finished(run_id).status == "cancelled"
    assert_sound(bench)


def test_what_the_cluster_refuses_is_shown_as_field_paths(bench: ClusterBench) -> None:
    """422: it ends the run, the reason names the fields of the manifest, and nothing is left behind or sent again."""
    bench.changes.update(
        tolerations=[{"key": "a", "operator": "Exists", "effect": "NoSchedule", "toleration_seconds": 5}]
    )
    run_id = bench.start()
    run = bench.finished(run_id)
    assert (run.status, run.last.reason_code, run.last.retry) == ("failed", "refused_manifest", "never")
    assert run.last.reason is not None
    assert "tolerations[0].effect" in run.last.reason
    assert "NoExecute" in run.last.reason
    assert bench.reconcile() == []
    assert bench.empty()


def evict(bench: ClusterBench, *nodes: int, attempt: int = 1) -> None:
    """Evict pods of an attempt as a drain does."""
    for index, pod in bench.pods(attempt).items():
        if index in nodes:
            name = pod["metadata"]["name"]
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": bench.namespace},
            }
            bench.cluster.admin.send("POST", bench.path("pods", name) + "/eviction", body)


def is_still(heartbeat: Path) -> bool:
    """Whether a node's heartbeat has stopped for longer than it beats."""
    before = read_heartbeat(heartbeat)
    time.sleep(2.5)
    return read_heartbeat(heartbeat) == before
