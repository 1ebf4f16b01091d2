"""The life of an attempt on a cluster: submitted once, watched, ended by what is seen, and cleared away."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_bench import ClusterBench, make_bench
from support.cluster_sound import assert_events_once, assert_sound, resumed_from, steps_of
from support.host_processes import host_pids
from support.postgres import Postgres

from headway.training.launch import LaunchError, LaunchRefused
from headway.training.reconcile import Reconciler
from tests.cluster.cluster_env import Cluster, conditions, is_label, wait_until
from tests.cluster.conftest import cleaned
from trainer.spec import parse_attempt


@pytest.fixture
def postgres_bench(cluster: Cluster, postgres: Postgres, migrated_postgres: str) -> Iterator[ClusterBench]:
    """A bench whose catalog is on PostgreSQL."""
    url = postgres.fresh_database(migrated_postgres)
    made = make_bench(cluster, url)
    yield made
    cleaned(made)
    postgres.drop_database(url)


def test_two_nodes_make_one_artifact(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    (name,) = bench.names()["jobs"]
    assert bench.names()["services"] == [name]
    hosts = {node: bench.events(run_id, node=node)[0].data["hostname"] for node in (0, 1)}
    assert hosts == {0: f"{name}-0", 1: f"{name}-1"}
    placed = {pod["spec"]["nodeName"] for pod in bench.pods().values()}
    assert len(placed) == 2
    bench.order(run_id)
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts), run.last.code) == ("succeeded", 1, 0)
    assert run.result is not None
    assert list(run.result.artifacts) == ["network"]
    assert run.worker_seconds > 0
    assert [e.node for e in bench.recorded(run_id, "node_end")] in ([0, 1], [1, 0])
    assert_sound(bench)


def test_the_same_on_postgresql(postgres_bench: ClusterBench) -> None:
    run_id = postgres_bench.start()
    postgres_bench.succeeded(run_id)
    assert_sound(postgres_bench)


def test_objects_say_whose_they_are(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    job = bench.job()
    service = bench.things("services")[0]
    labels = job["metadata"]["labels"]
    assert {key: labels[key] for key in ("headway.dev/attempt", "headway.dev/token")} == {
        "headway.dev/attempt": "1",
        "headway.dev/token": "1",
    }
    assert all(is_label(value) for value in labels.values())
    assert job["metadata"]["annotations"]["headway.dev/run-id"] == run_id
    (owner,) = service["metadata"]["ownerReferences"]
    assert owner["uid"] == job["metadata"]["uid"]
    assert service["spec"]["clusterIP"] == "None"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert (job["spec"]["backoffLimit"], job["spec"]["completionMode"]) == (0, "Indexed")


def test_submitting_again_finds_the_job(bench: ClusterBench) -> None:
    """Several processes submit at the same moment, each with a launcher of its own; afterwards one more does."""
    run_id = bench.ask(orders={"hold": True})
    failures: list[LaunchError] = []

    def submit() -> None:
        try:
            bench.reconcile(run_id, bench.launcher())
        except LaunchError as error:
            failures.append(error)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    bench.stepping(run_id)
    uid = bench.job()["metadata"]["uid"]
    resubmit(bench, run_id)
    assert bench.job()["metadata"]["uid"] == uid
    assert len(bench.pods()) == 2
    bench.order(run_id)
    bench.succeeded(run_id)
    assert_sound(bench)


def test_a_submit_that_stopped_half_way_goes_on(bench: ClusterBench) -> None:
    """The Job stands suspended without its Service and without a note of it: what a kill after creation leaves."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    job = bench.job()
    name = job["metadata"]["name"]
    bench.cluster.admin.send("PATCH", bench.path("jobs", name), {"spec": {"suspend": True}})
    bench.cluster.admin.delete(bench.path("services", name))
    (bench.attempt_file(run_id).parent / "job.json").unlink()
    resubmit(bench, run_id)
    again = bench.job()
    assert (again["metadata"]["uid"], again["spec"]["suspend"]) == (job["metadata"]["uid"], False)
    assert bench.names()["services"] == [name]


def test_somebody_elses_job_under_our_name_is_a_clear_conflict(bench: ClusterBench) -> None:
    """It is named in the error and left as it is."""
    other = foreign_job(bench, labels={})
    run_id = bench.ask()
    before = bench.cluster.admin.send("POST", bench.path("jobs"), renamed(other, expected_name(bench, run_id)))
    with pytest.raises(LaunchRefused) as refused:
        resubmit(bench, run_id)
    assert before["metadata"]["name"] in str(refused.value)
    assert bench.job()["metadata"]["uid"] == before["metadata"]["uid"]
    assert bench.names()["services"] == []


def test_a_job_of_ours_with_another_uid_is_not_adopted(bench: ClusterBench) -> None:
    """Somebody deleted the Job and made one of the same name and labels; what it runs is not what was submitted."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    job = bench.job()
    admin, path = bench.cluster.admin, bench.path("jobs", job["metadata"]["name"])
    admin.delete(path)
    wait_until(lambda: admin.find(path) is None, "the Job to be gone")
    wait_until(lambda: not bench.pods(), "the pods to be gone")
    # The submitter was killed before it was through: whoever submits next meets the name again.
    marker = bench.attempt_file(run_id).parent / "job.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "submitted": False}))
    imposter = {"labels": job["metadata"]["labels"], "annotations": job["metadata"]["annotations"]}
    admin.send("POST", bench.path("jobs"), renamed(foreign_job(bench, **imposter), job["metadata"]["name"]))
    with pytest.raises(LaunchRefused):
        resubmit(bench, run_id)
    seen = bench.shared.observe(run_id, 1)
    assert seen.state == "ended"


def test_one_pod_that_is_done_ends_nothing(bench: ClusterBench) -> None:
    """Node 1 is done while node 0 works on: the attempt goes on until its Job has ended."""
    run_id = bench.start(orders={"steps": 3, "ranks": {"0": {"do": "linger"}}})
    wait_until(lambda: phase(bench, 1) == "Succeeded", "node 1 to be done")
    for _ in range(5):
        # Who watches learns of a pod's end a moment after it.
        threading.Event().wait(0.5)
        bench.reconcile(run_id)
        seen = bench.shared.observe(run_id, 1)
        assert (seen.state, bench.run(run_id).status) == ("running", "open")
    bench.order(run_id, steps=3)
    bench.succeeded(run_id)
    assert_sound(bench)


def test_an_ended_job_is_kept_until_its_end_is_recorded(bench: ClusterBench) -> None:
    """Headway is away when the Job ends: the evidence waits for it, and goes when the row is committed."""
    run_id = bench.start()
    name = bench.job()["metadata"]["name"]
    wait_until(lambda: "Complete" in conditions(gone_or(bench, name)), "the Job to complete")
    pods = wait_until(lambda: bench.pods(), "pods")
    # A Job that cleans itself up does so within a second.
    threading.Event().wait(3)
    assert bench.names()["jobs"] == [name]
    assert len(bench.pods()) == len(pods)
    bench.succeeded(run_id)
    wait_until(bench.empty, "what is not needed any more to be gone")
    assert_sound(bench)


def test_an_older_attempt_is_refused_and_its_late_writes_too(bench: ClusterBench) -> None:
    """A submitter that slept through a restart must not bring the old attempt back."""
    run_id = bench.start(orders={"hold": True, "ranks": {"0": {"at": 4, "attempts": [1], "do": "kill"}}})
    bench.stepping(run_id, attempt=2)
    with pytest.raises(LaunchRefused):
        resubmit(bench, run_id, attempt=1)
    (job,) = bench.things("jobs")
    assert job["metadata"]["labels"]["headway.dev/token"] == "2"
    final = bench.attempt_file(run_id, 1).parent / "final.json"
    assert final.exists()
    bench.order(run_id)
    bench.succeeded(run_id)
    assert_sound(bench)


def test_exit_code_on_rank_1_ends_rank_0_within_its_grace(bench: ClusterBench) -> None:
    """Rank 0 hears nothing of it and ignores SIGTERM; the failure is the code's, named with node and rank."""
    run_id = bench.start(orders={"ranks": {"0": {"at": 2, "do": "sleep"}, "1": {"at": 2, "do": "exit", "code": 65}}})
    run = bench.finished(run_id)
    assert (run.status, run.last.code, run.last.reason_code) == ("failed", 65, "code_failed")
    assert "rank 1" in str(run.last.reason)
    assert "told to exit with 65" in str(run.last.reason)
    assert len(run.attempts) == 1
    assert_sound(bench)


def test_a_killed_rank_is_replaced_with_its_whole_gang(bench: ClusterBench) -> None:
    """The next attempt has a new name and goes on from what was saved; ranks of two attempts never mix."""
    run_id = bench.start(orders={"ranks": {"1": {"at": 5, "attempts": [1], "do": "kill"}}})
    run = bench.finished(run_id)
    assert [(a.state, a.reason_code) for a in run.attempts] == [("failed", "peer_lost"), ("succeeded", "done")]
    assert "SIGKILL" in str(run.attempts[0].reason)
    recorded = bench.recorded(run_id)
    assert resumed_from(recorded, 2) == 3
    assert steps_of(recorded, 2) == [4, 5, 6]
    assert_sound(bench)


def test_a_killed_node_process_is_replaced_with_its_whole_gang(bench: ClusterBench) -> None:
    """The node's process is the container's first, so it is killed from the host: nothing is left to write an end."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id, steps=4)
    pids = host_pids(bench.attempt_file(run_id), node=1)
    if not pids:
        pytest.skip("needs pods whose processes this machine sees")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    bench.stepping(run_id, attempt=2)
    bench.order(run_id)
    run = bench.finished(run_id)
    assert [a.state for a in run.attempts] == ["failed", "succeeded"]
    assert run.attempts[0].reason_code in ("peer_lost", "lost")
    assert resumed_from(bench.recorded(run_id), 2) >= 3
    assert_sound(bench)


def test_a_stopped_rank_is_found_to_hang(bench: ClusterBench) -> None:
    """SIGSTOP: nothing dies, nothing moves. The trainer sees it, the stacks are kept, another attempt follows."""
    run_id = bench.start(hang_floor_s=4.0, orders={"ranks": {"1": {"at": 5, "attempts": [1], "do": "stop"}}})
    run = bench.finished(run_id)
    assert [(a.state, a.reason_code) for a in run.attempts] == [("failed", "hung"), ("succeeded", "done")]
    assert bench.recorded(run_id, "stacks")
    assert_sound(bench)


def test_cancelling_saves_and_takes_job_service_and_pods_away(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"hold": True, "every": 100_000})
    bench.stepping(run_id, steps=2)
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "not needed")
    run = bench.finished(run_id)
    assert (run.status, run.last.state) == ("cancelled", "cancelled")
    assert list((bench.run_dir(run_id) / "checkpoints").glob("*.step"))
    assert bench.empty(), bench.names()
    assert_sound(bench)


def test_cancelling_what_nobody_submitted_yet(bench: ClusterBench) -> None:
    run_id = bench.ask()
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "not needed")
    assert bench.finished(run_id).status == "cancelled"
    assert_sound(bench)


def test_a_job_deleted_by_hand_ends_as_its_nodes_say(bench: ClusterBench) -> None:
    """The Job is gone, and with it every condition: the fenced last events of the nodes decide."""
    run_id = bench.start(orders={"hold": True, "every": 100_000})
    bench.stepping(run_id, steps=2)
    bench.cluster.admin.delete(bench.path("jobs", bench.job()["metadata"]["name"]))
    bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    bench.order(run_id)
    run = bench.finished(run_id)
    assert run.status == "succeeded"
    assert run.attempts[0].reason_code == "preempted"
    assert resumed_from(bench.recorded(run_id), 2) >= 2
    assert_sound(bench)


def test_an_orphan_of_a_finished_run_is_cleared_away(bench: ClusterBench) -> None:
    """A Job of ours that belongs to no open attempt (a submitter that was frozen for long) goes at one reconcile."""
    run_id = bench.start()
    job = bench.job()
    bench.succeeded(run_id)
    wait_until(bench.empty, "the Job to be gone")
    meta = job["metadata"]
    late = foreign_job(bench, marked_pods=True, labels=meta["labels"], annotations=meta["annotations"])
    bench.cluster.admin.send("POST", bench.path("jobs"), renamed(late, meta["name"]))
    assert_sound(bench)


def test_another_homes_objects_are_left_alone(bench: ClusterBench, cluster: Cluster, migrated_sqlite: Path) -> None:
    """Two homes share a namespace: neither ends what is the other's."""
    other = make_bench(cluster, migrated_sqlite)
    own_namespace, other.namespace = other.namespace, bench.namespace
    try:
        theirs = other.start(seed=1, orders={"hold": True})
        other.stepping(theirs)
        before = bench.names()
        assert bench.reconcile() == []
        assert bench.names() == before
    finally:
        bench.close()
        other.namespace = own_namespace
        cleaned(other)


def test_a_second_reconciler_sees_what_the_first_did(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    with bench.services() as services:
        fresh = Reconciler(services, bench.launcher())
        assert [action.kind for action in fresh.run(run_id)] == []
    assert len(bench.things("jobs")) == 1
    assert_events_once(bench, run_id)


def resubmit(bench: ClusterBench, run_id: str, attempt: int = 0) -> None:
    """Submit an attempt again by a launcher that knows nothing yet."""
    run = bench.run(run_id)
    wanted = run.attempts[attempt - 1] if attempt else run.last
    with bench.services() as services:
        reconciler = Reconciler(services, bench.launcher())
        if attempt and attempt != run.last.attempt:
            described = parse_attempt(bench.attempt_file(run_id, attempt).read_bytes())
            bench.launcher().submit(described, reconciler.run_spec(run))
        else:
            reconciler.submit(run, wanted)


def expected_name(bench: ClusterBench, run_id: str) -> str:
    """The name that the run's first Job will have, told by submitting it once and taking it away."""
    resubmit(bench, run_id)
    name = bench.job()["metadata"]["name"]
    bench.cluster.admin.delete(bench.path("jobs", name), gracePeriodSeconds=0)
    wait_until(bench.empty, "the Job to be gone")
    (bench.attempt_file(run_id).parent / "job.json").unlink()
    return name


def foreign_job(bench: ClusterBench, *, marked_pods: bool = False, **metadata: Any) -> dict[str, Any]:  # noqa: ANN401
    """A Job that sleeps; it belongs to nobody unless `metadata` says otherwise, its pods unless they are marked too."""
    container = {"name": "main", "image": bench.cluster.image, "command": ["sleep", "600"]}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "foreign", **metadata},
        "spec": {"template": {"metadata": metadata if marked_pods else {}, "spec": pod}},
    }


def renamed(job: dict[str, Any], name: str) -> dict[str, Any]:
    """The same under another name."""
    return {**job, "metadata": {**job["metadata"], "name": name}}


def phase(bench: ClusterBench, index: int) -> str:
    """The phase of the pod of a node; empty without one."""
    pod = bench.pods().get(index)
    return pod["status"]["phase"] if pod else ""


def gone_or(bench: ClusterBench, name: str) -> dict[str, Any]:
    """The Job as it stands."""
    job = bench.cluster.admin.find(bench.path("jobs", name))
    assert job is not None, "the Job is gone before its end was recorded"
    return job
