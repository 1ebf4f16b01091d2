"""What people ran into with jobs on Kubernetes, each played through against the launcher.

The numbers are those of the collection of field reports, group E: jobs, logs, eviction.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.cluster_bench import ClusterBench, make_bench
from support.cluster_sound import assert_sound

from tests.cluster.cluster_env import Cluster, conditions, is_label, wait_until
from tests.cluster.conftest import cleaned
from tests.cluster.test_contract_ends import evict
from trainer.events import node_folder, read_events


@pytest.mark.parametrize("final_event", [False, True])
def test_e01_out_of_memory_with_exit_code_0(bench: ClusterBench, final_event: bool) -> None:
    """A pod says OOMKilled, exit 0, Succeeded. Without its node's final event that is a failure, out of memory."""
    run_id = completed_unseen(bench)
    pod = bench.pods()[1]
    status = copy.deepcopy(pod["status"])
    status["containerStatuses"][0]["state"]["terminated"].update(reason="OOMKilled", exitCode=0)
    set_status(bench, pod, status)
    if not final_event:
        take_away_last_event(bench, run_id, node=1)
    run = bench.until(run_id, lambda run: not run.attempts[0].is_open, "the first end")
    first = run.attempts[0]
    if final_event:
        assert (first.state, run.status) == ("succeeded", "succeeded")
    else:
        assert (first.state, first.reason_code, first.counts) == ("failed", "out_of_memory", True)
        bench.succeeded(run_id)
    assert_sound(bench)


def test_e01_a_success_needs_an_artifact_that_verifies(bench: ClusterBench) -> None:
    """Every exit code is 0 and every node said that it is done, and a file of the artifact is damaged."""
    run_id = completed_unseen(bench)
    weights = bench.attempt_file(run_id).parent / "artifact" / "network" / "weights.safetensors"
    weights.write_bytes(b"{}")
    run = bench.until(run_id, lambda run: not run.attempts[0].is_open, "the first end")
    assert (run.attempts[0].state, run.attempts[0].reason_code) == ("failed", "artifact_invalid")
    bench.succeeded(run_id)
    assert_sound(bench)


def test_e03_three_of_four_pods_evicted_three_times(bench: ClusterBench) -> None:
    """Each time the whole attempt is replaced, under a new name, with no delay of its own and nothing counted."""
    run_id = bench.start(nodes=4, max_attempts=1, orders={"hold": True, "every": 100_000})
    jobs: set[str] = set()
    for number in (1, 2, 3):
        bench.stepping(run_id, attempt=number, steps=2)
        job = wait_until(lambda number=number: job_of(bench, number), "the Job of the attempt")
        jobs.add(job["metadata"]["name"])
        # A Job that replaces pods would have made more of them, each later than the one before.
        assert len(bench.pods(number)) == 4
        assert job["spec"]["backoffLimit"] == 0
        hosts = {bench.events(run_id, number, node)[0].data["hostname"] for node in range(4)}
        assert hosts == {f"{job['metadata']['name']}-{node}" for node in range(4)}
        evict(bench, 0, 2, 3, attempt=number)
        bench.until(run_id, lambda run, number=number: len(run.attempts) > number, "the next attempt")
    bench.order(run_id)
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts), len(jobs)) == ("succeeded", 4, 3)
    assert [attempt.counts for attempt in run.attempts] == [False] * 4
    assert_sound(bench)


def test_e05_the_budget_of_time_starts_at_the_first_step(bench: ClusterBench) -> None:
    """Pods wait for a place for longer than the attempt may run; it starts all the same, and ends by its own clock."""
    bench.changes.update(active_deadline_s=4)
    bench.cluster.cordon(unschedulable=True)
    try:
        run_id = bench.start(max_attempts=1, orders={"hold": True})
        bench.until(run_id, lambda run: "unschedulable" in str(run.last.waiting), "the reason of waiting")
        time.sleep(5)
        bench.reconcile(run_id)
        assert bench.run(run_id).last.state == "admitted"
    finally:
        bench.cluster.cordon(unschedulable=False)
    bench.stepping(run_id, steps=3)
    run = bench.finished(run_id)
    assert (run.status, run.last.reason_code) == ("failed", "deadline")
    wait_until(bench.empty, "its pods to have had their grace")
    assert_sound(bench)


def test_e05_the_same_name_waits_until_the_old_object_is_gone(bench: ClusterBench) -> None:
    """The Job was deleted and something still holds it: its name is not taken again before it is truly gone."""
    run_id = bench.start(orders={"hold": True})
    old = bench.job()
    admin, path = bench.cluster.admin, bench.path("jobs", old["metadata"]["name"])
    # Suspended first, so that it goes without an end of its own.
    admin.send("PATCH", path, {"metadata": {"finalizers": ["headway.test/held"]}, "spec": {"suspend": True}})
    wait_until(lambda: not bench.pods(), "the pods to go")
    admin.delete(path)
    # As if nothing of it had been seen yet: the row stands, and the attempt is to be submitted.
    attempts = bench.attempt_file(run_id).parents[1]
    attempts.rename(attempts.with_name("seen before"))
    for _ in range(2):
        bench.reconcile(run_id, bench.launcher())
        assert bench.job()["metadata"]["uid"] == old["metadata"]["uid"]
        assert bench.run(run_id).status == "open"
    admin.send("PATCH", path, {"metadata": {"finalizers": None}})
    bench.order(run_id)
    new = bench.until(run_id, lambda run: run.status != "open", "the end")
    assert new.status == "succeeded"
    assert_sound(bench)


def test_e05_a_new_attempt_has_a_new_name_and_does_not_wait(bench: ClusterBench) -> None:
    """Attempt 1's Job cannot go (something holds it): attempt 2 runs all the same."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    path = bench.path("jobs", bench.job()["metadata"]["name"])
    bench.cluster.admin.send("PATCH", path, {"metadata": {"finalizers": ["headway.test/held"]}})
    bench.order(run_id, hold=True, ranks={"1": {"attempts": [1], "do": "kill"}})
    bench.stepping(run_id, attempt=2)
    assert len({job["metadata"]["name"] for job in bench.things("jobs")}) == 2
    bench.cluster.admin.send("PATCH", path, {"metadata": {"finalizers": None}})
    bench.order(run_id)
    bench.succeeded(run_id)
    assert_sound(bench)


LONG = ["p" * 55, "p" * 60, "p" * 63, "p" * 80, "q" * 70 + "a", "q" * 70 + "b"]


def test_e07_names_are_legal_distinct_and_told_in_full(
    bench: ClusterBench, cluster: Cluster, migrated_sqlite: Path
) -> None:
    """Long pipelines, two that differ at character 70 only, a tenant with dots and umlauts: all stand side by side."""
    bench.changes.update(node_selector={"headway.dev/none": "here"})
    for seed, pipeline in enumerate(LONG, start=1):
        bench.start(seed=seed, pipeline=pipeline)
    other = make_bench(cluster, migrated_sqlite, tenant="acme.eu/münchen", changes=dict(bench.changes))
    other_namespace, other.namespace = other.namespace, bench.namespace
    other.start(seed=1, pipeline=LONG[0])
    jobs = bench.things("jobs")
    names = [job["metadata"]["name"] for job in jobs]
    assert len(set(names)) == len(LONG) + 1
    assert all(len(f"{name}-0") <= 63 and name[0].isalpha() for name in names)
    assert all(is_label(value) for job in jobs for value in job["metadata"]["labels"].values())
    told = [job["metadata"]["annotations"] for job in jobs]
    assert sorted(t["headway.dev/pipeline"] for t in told) == sorted([*LONG, LONG[0]])
    assert {t["headway.dev/tenant-name"] for t in told} == {"default", "acme.eu/münchen"}
    again = bench.launcher()
    for run_id in {t["headway.dev/run-id"] for t in told if t["headway.dev/tenant-name"] == "default"}:
        bench.reconcile(run_id, again)
    assert sorted(job["metadata"]["name"] for job in bench.things("jobs")) == sorted(names)
    bench.close()
    other.namespace = other_namespace
    cleaned(other)


def test_e09_shared_memory_is_sized_counted_and_named(bench: ClusterBench) -> None:
    """A batch of 80 MiB does not go through 64 MiB of shared memory; with 128 MiB it does."""
    bench.changes.update(shared_memory="64Mi", memory="300Mi")
    orders = {"ranks": {"1": {"at": 2, "do": "fill_shm", "mebibytes": 80}}}
    run_id = bench.start(max_attempts=1, orders=orders)
    pod = bench.until(run_id, lambda _: bench.pods(), "pods") and bench.pods()[0]
    shm = {volume["name"]: volume for volume in pod["spec"]["volumes"]}["shm"]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "64Mi"}
    assert pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == "364Mi"
    run = bench.finished(run_id)
    assert (run.status, run.last.reason_code) == ("failed", "shared_memory")
    bench.changes.update(shared_memory="128Mi")
    larger = bench.ask(seed=2, max_attempts=1, orders=orders)
    fresh = bench.launcher()
    wait_until(lambda: bench.reconcile(larger, fresh) is None or bench.run(larger).status != "open", "the end")
    assert bench.run(larger).status == "succeeded"


def test_e11_a_replacement_of_a_node_that_was_done_does_nothing(bench: ClusterBench) -> None:
    """Node 1 was done, its pod is deleted while node 0 works on, and another pod starts in its place."""
    run_id = bench.start(orders={"steps": 3, "ranks": {"0": {"do": "linger"}}})

    def is_done(_: object) -> bool:
        pod = bench.pods().get(1)
        return pod is not None and pod["status"]["phase"] == "Succeeded"

    bench.until(run_id, is_done, "node 1 to be done")
    done = bench.pods()[1]
    stream = node_folder(bench.attempt_file(run_id), 1) / "events.jsonl"
    written = stream.read_bytes()
    bench.cluster.admin.delete(bench.path("pods", done["metadata"]["name"]), gracePeriodSeconds=0)
    again = replacement_of(done)
    bench.cluster.admin.send("POST", bench.path("pods"), again)
    path = bench.path("pods", again["metadata"]["name"])
    wait_until(lambda: ended(bench, path), "the replacement to end")
    assert stream.read_bytes() == written
    bench.order(run_id, steps=3)
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    recorded = bench.recorded(run_id)
    ends = [event.node for event in recorded if event.kind == "node_end"]
    assert sorted(node for node in ends if node is not None) == [0, 1]
    assert len([event for event in recorded if event.kind == "artifact"]) == 1
    bench.cluster.admin.delete(path, gracePeriodSeconds=0)
    assert_sound(bench)


def completed_unseen(bench: ClusterBench) -> str:
    """A run whose Job has completed while nobody looked."""
    run_id = bench.start()
    wait_until(lambda: "Complete" in conditions(bench.job()), "the Job to complete")
    return run_id


def take_away_last_event(bench: ClusterBench, run_id: str, node: int) -> None:
    """Cut the final event of a node off its stream."""
    stream = node_folder(bench.attempt_file(run_id), node) / "events.jsonl"
    lines = stream.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "node_end"
    stream.write_bytes(b"".join(lines[:-1]))
    assert read_events(stream)[-1].kind != "node_end"


def set_status(bench: ClusterBench, thing: dict[str, Any], status: dict[str, Any]) -> None:
    """Write the status of a pod or a Job, as its controller does."""
    kind = "jobs" if "completions" in thing["spec"] else "pods"
    path = bench.path(kind, thing["metadata"]["name"]) + "/status"
    bench.cluster.admin.send("PATCH", path, {"status": status})


def job_of(bench: ClusterBench, attempt: int) -> dict[str, Any] | None:
    """The Job of an attempt."""
    found = [j for j in bench.things("jobs") if j["metadata"]["labels"]["headway.dev/attempt"] == str(attempt)]
    return found[0] if found else None


def replacement_of(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod that runs what another one ran, as a controller makes it that forgot the first."""
    meta = pod["metadata"]
    spec = {key: value for key, value in pod["spec"].items() if key not in ("nodeName", "serviceAccount")}
    labels = {key: value for key, value in meta["labels"].items() if key.startswith("headway.dev/")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{meta['name'][:50]}-again", "labels": labels, "annotations": meta["annotations"]},
        "spec": spec,
    }


def ended(bench: ClusterBench, path: str) -> bool:
    """Whether a pod has ended, or is gone."""
    pod = bench.cluster.admin.find(path)
    return pod is None or pod["status"].get("phase") in ("Succeeded", "Failed")
