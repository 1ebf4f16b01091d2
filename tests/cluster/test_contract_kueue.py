"""Where Kueue decides when an attempt starts: its answers are shown, and its preemptions cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_bench import ClusterBench, make_bench
from support.cluster_sound import assert_sound, resumed_from

from headway.training.kubernetes.launcher import KubernetesLauncher
from headway.training.launch import Launcher
from tests.cluster.cluster_env import Cluster, Faults, wait_until
from tests.cluster.conftest import cleaned

GROUP = "/apis/kueue.x-k8s.io/v1beta2"


@pytest.fixture
def queue(cluster: Cluster, migrated_sqlite: Path) -> Iterator[ClusterBench]:
    """A bench whose runs queue in `team`; the quota holds one attempt of two nodes."""
    if not cluster.serves(GROUP):
        pytest.skip("needs Kueue")
    bench = make_bench(cluster, migrated_sqlite)
    bench.changes.update(queue={"local_queue": "team"}, cpu="400m", memory="128Mi")
    names = make_queue(bench, cpu="1")
    yield bench
    cleaned(bench)
    for path in names:
        cluster.admin.delete(path)


def make_queue(bench: ClusterBench, cpu: str) -> list[str]:
    """A LocalQueue over a ClusterQueue of its own, and two priorities; paths of what is cluster-wide."""
    name, admin = bench.namespace, bench.cluster.admin
    quota = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "8Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quota}]}
    spec: dict[str, Any] = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    wide = [
        ("resourceflavors", "ResourceFlavor", name, {}),
        ("clusterqueues", "ClusterQueue", name, {"spec": spec}),
        ("workloadpriorityclasses", "WorkloadPriorityClass", f"{name}-prod", {"value": 1000}),
        ("workloadpriorityclasses", "WorkloadPriorityClass", f"{name}-research", {"value": 100}),
    ]
    for plural, kind, called, rest in wide:
        admin.send("POST", f"{GROUP}/{plural}", kueue(kind, called, rest))
    local = kueue("LocalQueue", "team", {"spec": {"clusterQueue": name}})
    admin.send("POST", f"{GROUP}/namespaces/{name}/localqueues", local)
    return [f"{GROUP}/{plural}/{called}" for plural, _, called, _ in wide]


def kueue(kind: str, name: str, rest: dict[str, Any]) -> dict[str, Any]:
    """An object of Kueue's."""
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, **rest}


def launcher_of(bench: ClusterBench, priority: str) -> KubernetesLauncher:
    """A launcher whose attempts have a priority."""
    bench.changes["queue"] = {"local_queue": "team", "priority_class": f"{bench.namespace}-{priority}"}
    return bench.launcher()


def test_why_it_queues_is_shown_until_there_is_room(queue: ClusterBench) -> None:
    first = queue.start(seed=1, orders={"hold": True})
    queue.stepping(first)
    second = queue.start(seed=2)
    run = queue.until(second, lambda run: "waiting_for_quota" in str(run.last.waiting), "the reason of waiting")
    assert (run.last.state, run.last.started_at) == ("admitted", None)
    assert all("-a1" in name for name in queue.names()["jobs"])
    queue.order(first)
    queue.succeeded(first)
    queue.succeeded(second)
    assert_sound(queue)


def test_prod_preempts_research_which_goes_on_from_its_checkpoint(queue: ClusterBench) -> None:
    research, prod = launcher_of(queue, "research"), launcher_of(queue, "prod")
    victim = queue.ask(seed=1, max_attempts=1, orders={"hold": True, "every": 100_000})
    reconciled(queue, victim, research, lambda: steps(queue, victim) >= 3, "steps of the victim")
    urgent = queue.ask(seed=2, orders={"hold": True})
    reconciled(queue, urgent, prod, lambda: steps(queue, urgent) >= 1, "steps of the urgent run")
    reconciled(queue, victim, research, lambda: len(queue.run(victim).attempts) > 1, "the victim's next attempt")
    first = queue.run(victim).attempts[0]
    assert (first.reason_code, first.retry) == ("preempted_by_queue", "free")
    queue.order(urgent)
    reconciled(queue, urgent, prod, lambda: queue.run(urgent).status == "succeeded", "the urgent run's end")
    queue.order(victim)
    reconciled(queue, victim, research, lambda: queue.run(victim).status == "succeeded", "the victim's end")
    assert resumed_from(queue.recorded(victim), 2) >= 3
    assert_sound(queue)


def test_more_than_the_queue_can_ever_give_fails_at_once(queue: ClusterBench) -> None:
    queue.changes["cpu"] = "900m"
    run = queue.finished(queue.start())
    assert (run.status, run.last.reason_code, len(run.attempts)) == ("failed", "exceeds_quota", 1)
    assert "cpu" in str(run.last.reason)
    assert_sound(queue)


def test_a_queue_that_is_not_there_is_named(queue: ClusterBench) -> None:
    queue.changes["queue"] = {"local_queue": "nobody"}
    run_id = queue.start()
    run = queue.until(run_id, lambda run: "queue_misconfigured" in str(run.last.waiting), "the reason of waiting")
    assert "nobody" in str(run.last.waiting)
    with queue.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "wrong queue")
    assert queue.finished(run_id).status == "cancelled"
    assert_sound(queue)


def test_while_the_webhook_is_down_it_is_tried_again(queue: ClusterBench, faults: Faults) -> None:
    faults.set(kueue_webhook="down")
    run_id = queue.ask()
    kinds = [action.kind for action in queue.reconcile(run_id)]
    assert kinds[-1] == "unavailable"
    assert queue.run(run_id).status == "open"
    assert queue.names()["jobs"] == []
    faults.clear()
    queue.succeeded(run_id)
    assert_sound(queue)


def test_a_run_that_ends_while_the_webhook_is_down(queue: ClusterBench, faults: Faults) -> None:
    """What needs no webhook goes on: the end is seen, recorded and cleared away."""
    run_id = queue.start(orders={"hold": True})
    queue.stepping(run_id)
    faults.set(kueue_webhook="down")
    queue.order(run_id)
    queue.succeeded(run_id)
    faults.clear()
    assert_sound(queue)


def reconciled(bench: ClusterBench, run_id: str, launcher: Launcher, look: Any, what: str) -> None:  # noqa: ANN401
    """Reconcile a run by its own launcher until something is true."""

    def reconcile() -> bool:
        bench.reconcile(run_id, launcher)
        return look()

    wait_until(reconcile, what)


def steps(bench: ClusterBench, run_id: str) -> int:
    """How many steps the run's first attempt has made."""
    return len([event for event in bench.events(run_id) if event.kind == "step"])
