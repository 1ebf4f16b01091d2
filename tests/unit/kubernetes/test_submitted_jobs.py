"""Submitting to a cluster, killed at every step; observing, cancelling, killing and clearing away."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import After, FakeCluster, Killed
from support.toy_attempts import RUN_ID, toy_attempt, toy_spec

from headway.training.kubernetes import facts as recording
from headway.training.kubernetes import launcher as launching
from headway.training.kubernetes.client import ClusterUnreachable, ManifestRefused, ObjectConflict
from headway.training.kubernetes.launcher import KubernetesLauncher
from headway.training.kubernetes.names import INDEX_LABEL
from headway.training.kubernetes.platform import Platform, Queue, example
from headway.training.kubernetes.validate import ManifestInvalid
from headway.training.launch import KillFailed, LauncherUnavailable, LaunchRefused
from trainer.events import EventWriter, HeartbeatFile
from trainer.spec import AttemptSpec, RunSpec

READY = {"conditions": [{"type": "Ready", "status": "True"}]}


@dataclass
class Bench:
    """A home on a volume, a cluster, and launchers over them."""

    root: Path
    cluster: FakeCluster = field(default_factory=FakeCluster)
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    opened: list[KubernetesLauncher] = field(default_factory=list[KubernetesLauncher])

    @property
    def platform(self) -> Platform:
        """The profile in force."""
        volume = {"claim": "home", "mount_path": str(self.root)}
        return example({"volume": volume}).model_copy(update=self.changes)

    def launcher(self, instance: str = "one") -> KubernetesLauncher:
        """A launcher as a process that has just started makes one."""
        runs, store = self.root / "runs" / "default", self.root / "store"
        made = KubernetesLauncher(runs, store, self.root, self.platform, self.cluster, instance, "default")
        self.opened.append(made)
        return made

    def attempt(self, number: int = 1) -> tuple[AttemptSpec, RunSpec]:
        """An attempt of two nodes in this home."""
        attempt = toy_attempt(self.root / "runs" / "default", {}, nodes=2, attempt=number)
        return replace(attempt, code_root=str(self.root / "code"), store_root=str(self.root / "store")), toy_spec(2)

    def submit(self, number: int = 1) -> None:
        """Submit an attempt by a new launcher."""
        self.launcher().submit(*self.attempt(number))

    @property
    def folder(self) -> Path:
        """The first attempt's folder."""
        return self.root / "runs" / "default" / RUN_ID / "attempts" / "1"

    def job(self) -> dict[str, Any]:
        """The one Job."""
        (name,) = self.cluster.named("jobs")
        return self.cluster.objects["jobs", name]

    def add_pod(self, index: int, state: dict[str, Any] | None = None, **metadata: Any) -> str:  # noqa: ANN401
        """Make a pod of the Job as its controller does."""
        job = self.job()
        template = job["spec"]["template"]["metadata"]
        name = f"{job['metadata']['name']}-{index}-abcde"
        owner = {"kind": "Job", "uid": job["metadata"]["uid"]}
        labels = {**template["labels"], INDEX_LABEL: str(index)}
        body = {
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": template["annotations"],
                "ownerReferences": [owner],
                **metadata,
            },
            "spec": {"nodeName": f"n{index}"},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "trainer", "state": state or {"running": {}}}],
            },
        }
        self.cluster.put("pods", body)
        return name

    def end_node(self, node: int, code: int) -> None:
        """Write a node's stream from start to end."""
        stream = EventWriter(self.folder / f"node-{node}" / "events.jsonl", node)
        stream.emit("node_start", {"ranks": [node]})
        end = {"code": code, "cause": "x", "cause_rank": node, "worker_seconds": 2.0, "cause_at": 1}
        stream.emit("node_end", {**end, "consequence": False, "unasked": False})
        stream.close()

    def finish(self, kind: str = "Complete") -> None:
        """Give the Job its terminal condition."""
        conditions = [{"type": kind, "status": "True", "reason": "r", "message": "m"}]
        self.cluster.change("jobs", self.job()["metadata"]["name"], {"status": {"conditions": conditions}})


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(launching, "ADOPT_S", 0.3)
    monkeypatch.setattr(launching, "KILL_S", 0.5)
    made = Bench(tmp_path)
    yield made
    for launcher in made.opened:
        launcher.close()


def test_a_job_is_made_suspended_then_its_service_then_it_starts(bench: Bench) -> None:
    bench.submit()
    wrote = [call for call in bench.cluster.calls if call[0] not in ("get", "list")]
    assert wrote == [("create", "jobs"), ("create", "services"), ("patch", "jobs")]
    kinds = [(kind, resource) for _, kind, resource, _ in bench.cluster.history]
    assert kinds == [("ADDED", "jobs"), ("ADDED", "services"), ("MODIFIED", "jobs")]
    assert bench.cluster.history[0][3]["spec"]["suspend"] is True
    job = bench.job()
    assert job["spec"]["suspend"] is False
    (service,) = bench.cluster.named("services")
    owners = bench.cluster.objects["services", service]["metadata"]["ownerReferences"]
    assert owners[0]["uid"] == job["metadata"]["uid"]
    marker = json.loads((bench.folder / "job.json").read_text())
    assert (marker["uid"], marker["submitted"]) == (job["metadata"]["uid"], True)


def test_a_queue_starts_the_job_itself(bench: Bench) -> None:
    bench.changes["queue"] = Queue(local_queue="team", priority_class="prod")
    bench.submit()
    assert bench.job()["spec"]["suspend"] is True
    assert bench.cluster.counted("patch", "jobs") == 0
    assert bench.job()["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_who_follows_a_job_in_a_queue_asks_for_its_workload_now_and_then(bench: Bench) -> None:
    bench.changes["queue"] = Queue(local_queue="team")
    bench.submit()
    launcher = bench.launcher()
    for _ in range(20):
        assert launcher.observe(RUN_ID, 1).state == "starting"
    assert bench.cluster.counted("list", "workloads") <= 2


def test_a_refused_field_is_told_with_the_setting_that_made_it(bench: Bench) -> None:
    bench.cluster.faults = [ManifestRefused("spec.template.spec.priorityClassName: no such class\nspec.x: odd", "")]
    with pytest.raises(ManifestRefused) as refused:
        bench.submit()
    assert refused.value.message.splitlines() == [
        "spec.template.spec.priorityClassName: no such class [profile: priority_class]",
        "spec.x: odd",
    ]


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("effect", [False, True])
@pytest.mark.parametrize("call", range(4))
def test_killed_at_every_call_and_submitted_again(bench: Bench, call: int, effect: bool, queued: bool) -> None:
    """Before or after the call had its effect: whoever submits next ends with one whole attempt."""
    if queued:
        bench.changes["queue"] = Queue(local_queue="team")
    bench.cluster.faults = [*[None] * call, After(Killed()) if effect else Killed()]
    try:
        bench.submit()
    except Killed:
        # What a killed submitter leaves is no attempt yet, or a whole one.
        state = bench.launcher().observe(RUN_ID, 1).state
        assert state == "absent"
    bench.cluster.faults = []
    for _ in range(2):
        bench.submit()
    assert (len(bench.cluster.named("jobs")), len(bench.cluster.named("services"))) == (1, 1)
    assert len([1 for _, kind, resource, _ in bench.cluster.history if (kind, resource) == ("ADDED", "jobs")]) == 1
    assert bench.job()["spec"]["suspend"] is queued
    assert bench.launcher().observe(RUN_ID, 1).state == "starting"


def test_killed_before_the_marker_and_after_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are steps too."""
    real = launching.AttemptFacts.write_marker
    for when in ("before", "after"):
        for nth in (1, 2):
            calls: list[int] = []

            def write(self: Any, marker: Any, calls: Any = calls, when: str = when, nth: int = nth) -> None:  # noqa: ANN401
                calls.append(1)
                if len(calls) == nth and when == "before":
                    raise Killed
                real(self, marker)
                if len(calls) == nth:
                    raise Killed

            monkeypatch.setattr(launching.AttemptFacts, "write_marker", write)
            with pytest.raises(Killed):
                bench.submit()
            monkeypatch.setattr(launching.AttemptFacts, "write_marker", real)
            uid = bench.job()["metadata"]["uid"]
            bench.submit()
            assert bench.job()["metadata"]["uid"] == uid
            bench.launcher().kill(RUN_ID, 1)
            (bench.folder / "job.json").unlink()


def test_an_answer_that_only_seems_a_failure_is_looked_at(bench: Bench) -> None:
    bench.cluster.faults = [After(ObjectConflict("exists", ""))]
    bench.submit()
    assert len(bench.cluster.named("jobs")) == 1
    assert bench.job()["spec"]["suspend"] is False


def test_somebody_elses_job_is_a_conflict_and_stays(bench: Bench) -> None:
    bench.submit()
    name = bench.job()["metadata"]["name"]
    bench.launcher().kill(RUN_ID, 1)
    (bench.folder / "job.json").unlink()
    bench.cluster.put("jobs", {"metadata": {"name": name, "labels": {"app": "other"}}, "spec": {}})
    before = bench.job()["metadata"]["uid"]
    with pytest.raises(LaunchRefused, match="is not this attempt's"):
        bench.submit()
    bench.launcher().cancel(RUN_ID, 1, "no more")
    bench.launcher().kill(RUN_ID, 1)
    bench.launcher().release(RUN_ID, 1)
    assert bench.job()["metadata"]["uid"] == before
    assert bench.launcher().strays() == []


def test_our_labels_with_another_uid_are_not_adopted(bench: Bench) -> None:
    """Neither while the submission is half done, nor afterwards."""
    bench.submit()
    body = bench.job()
    name = body["metadata"]["name"]
    bench.cluster.remove("jobs", name)
    bench.cluster.put("jobs", body)
    with pytest.raises(LaunchRefused, match="has uid"):
        bench.submit()
    path = bench.folder / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "submitted": False}))
    with pytest.raises(LaunchRefused, match="has uid"):
        bench.submit()
    assert bench.cluster.named("services") == []


def test_another_token_is_not_ours(bench: Bench) -> None:
    bench.submit()
    (bench.folder / "job.json").unlink()
    name = bench.job()["metadata"]["name"]
    labels = {**bench.job()["metadata"]["labels"], "headway.dev/token": "9"}
    bench.cluster.change("jobs", name, {"metadata": {"labels": labels}})
    with pytest.raises(LaunchRefused, match="'9'"):
        bench.submit()


def test_e05_the_same_name_waits_until_it_is_free(bench: Bench) -> None:
    bench.submit()
    (bench.folder / "job.json").unlink()
    name = bench.job()["metadata"]["name"]
    bench.cluster.change("jobs", name, {"metadata": {"finalizers": ["held"]}})
    bench.cluster.delete("jobs", name)
    with pytest.raises(LauncherUnavailable, match="still being deleted"):
        bench.submit()
    assert len(bench.cluster.named("jobs")) == 1
    old = bench.job()["metadata"]["uid"]
    bench.cluster.remove("jobs", name)
    bench.submit()
    assert bench.job()["metadata"]["uid"] != old


def test_a_service_of_an_earlier_job_gives_way(bench: Bench) -> None:
    bench.submit()
    job = bench.job()
    (bench.folder / "job.json").unlink()
    service = {**bench.cluster.objects["services", job["metadata"]["name"]]}
    bench.cluster.remove("jobs", job["metadata"]["name"])
    service["metadata"] = {**service["metadata"], "ownerReferences": [{"uid": "old"}]}
    bench.cluster.put("services", service)
    bench.submit()
    (name,) = bench.cluster.named("services")
    owners = bench.cluster.objects["services", name]["metadata"]["ownerReferences"]
    assert owners[0]["uid"] == bench.job()["metadata"]["uid"]


def test_an_older_attempt_is_fenced_off(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2)
    assert len(bench.cluster.named("jobs")) == 2
    with pytest.raises(LaunchRefused, match="fenced off"):
        bench.submit(1)


def test_nothing_is_made_of_what_is_refused(bench: Bench) -> None:
    attempt, spec = bench.attempt()
    launcher = bench.launcher()
    with pytest.raises(ManifestInvalid, match="grace_s"):
        launcher.submit(attempt, replace(spec, restart=replace(spec.restart, grace_s=1_000.0)))
    with pytest.raises(LaunchRefused, match="volume"):
        launcher.submit(replace(attempt, store_root="/elsewhere"), spec)
    with pytest.raises(LaunchRefused, match="run directory"):
        launcher.submit(replace(attempt, run_dir="/elsewhere"), spec)
    assert bench.cluster.calls == []
    assert not bench.folder.exists()


def test_an_end_is_written_once_and_looked_up_anew(bench: Bench) -> None:
    """What the watch told may be old: an end is concluded from what the server says now."""
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    assert launcher.observe(RUN_ID, 1).state == "starting"
    bench.end_node(0, 0)
    bench.end_node(1, 0)
    bench.finish()
    seen = bench.launcher().observe(RUN_ID, 1)
    assert (seen.state, seen.code, seen.reason_code, seen.worker_seconds) == ("ended", 0, "done", 4.0)
    bench.launcher().release(RUN_ID, 1)
    assert bench.cluster.objects == {}
    assert bench.launcher().observe(RUN_ID, 1) == seen


def test_an_attempt_that_is_given_up_is_fenced_before_its_job_is_deleted(bench: Bench) -> None:
    bench.submit()
    deleted_at = {"deletionTimestamp": "2013-06-01T00:01:00Z", "deletionGracePeriodSeconds": 5}
    bench.add_pod(1, **deleted_at)
    bench.cluster.put("nodes", {"metadata": {"name": "n1"}, "status": {"conditions": []}})
    finals: list[bool] = []
    real = bench.cluster.delete

    def delete(resource: str, name: str, **options: Any) -> None:  # noqa: ANN401
        finals.append((bench.folder / "final.json").exists())
        real(resource, name, **options)

    bench.cluster.delete = delete
    seen = bench.launcher().observe(RUN_ID, 1)
    assert (seen.state, seen.reason_code) == ("ended", "node_lost")
    assert finals == [True]
    assert bench.cluster.named("jobs") == []


def test_the_api_server_away_concludes_nothing(bench: Bench) -> None:
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    bench.cluster.away = True
    for method in (launcher.observe, launcher.kill, bench.launcher().observe):
        with pytest.raises(LauncherUnavailable):
            method(RUN_ID, 1)
    with pytest.raises(LauncherUnavailable):
        launcher.strays()
    assert not (bench.folder / "final.json").exists()
    bench.cluster.away = False
    assert launcher.observe(RUN_ID, 1).state == "starting"


def test_a_cancelled_attempt_loses_its_job_once(bench: Bench) -> None:
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    pod = bench.add_pod(0)
    for _ in range(3):
        launcher.cancel(RUN_ID, 1, "not needed")
    assert bench.cluster.named("jobs") == []
    assert pod not in bench.cluster.named("pods")
    bench.end_node(0, 75)
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.cancelled, seen.reason_code) == ("ended", True, "cancelled")


def test_a_wish_before_the_submission_starts_nothing(bench: Bench) -> None:
    launcher = bench.launcher()
    launcher.cancel(RUN_ID, 1, "not needed")
    launcher.submit(*bench.attempt())
    assert ("create", "jobs") not in bench.cluster.calls
    assert launcher.observe(RUN_ID, 1).cancelled


def test_a_wish_between_job_and_marker_finds_the_job(bench: Bench) -> None:
    """The submitter was killed right after the Job was made: the wish deletes it all the same."""
    bench.cluster.faults = [After(Killed())]
    with pytest.raises(Killed):
        bench.submit()
    bench.launcher().cancel(RUN_ID, 1, "not needed")
    assert bench.cluster.objects == {}


def test_killing_leaves_nothing_but_pods_of_lost_hosts(bench: Bench) -> None:
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    bench.add_pod(0, finalizers=["kubelet"])
    bench.cluster.put("nodes", {"metadata": {"name": "n0"}, "status": READY})
    with pytest.raises(KillFailed, match="pods/"):
        launcher.kill(RUN_ID, 1)
    bench.cluster.change("nodes", "n0", {"status": {"conditions": []}})
    launcher.kill(RUN_ID, 1)
    assert bench.cluster.named("jobs") + bench.cluster.named("services") == []
    assert launcher.strays() == []


def test_strays_are_everything_of_this_instance_and_nothing_else(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2)
    pod = bench.cluster.named("jobs")[0]
    bench.launcher("two").submit(*bench.attempt(3))
    mine = bench.launcher().strays()
    assert sorted({(run_id, attempt) for run_id, attempt, _ in mine}) == [(RUN_ID, 1), (RUN_ID, 2)]
    assert {str(what).split()[0] for _, _, what in mine} == {"Job", "Service"}
    assert f"Job headway/{pod}" in [what for _, _, what in mine]
    assert [attempt for _, attempt, _ in bench.launcher("two").strays()] == [3, 3]


def test_what_was_seen_of_a_pod_outlives_it(bench: Bench) -> None:
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    state = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2013-06-01T00:00:09Z"}}
    name = bench.add_pod(1, state)
    launcher.observe(RUN_ID, 1)
    bench.cluster.remove("pods", name)
    bench.finish("Failed")
    seen = bench.launcher().observe(RUN_ID, 1)
    assert (seen.reason_code, seen.exit_codes) == ("out_of_memory", (None, -9))


def test_the_last_sight_of_a_pod_is_kept(bench: Bench) -> None:
    """It is seen going, then ended, then without its end: a forced deletion shows less than before."""
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    name = bench.add_pod(1, deletionTimestamp="2200-01-01T00:00:00Z", deletionGracePeriodSeconds=5)
    bench.cluster.put("nodes", {"metadata": {"name": "n1"}, "status": READY})
    launcher.observe(RUN_ID, 1)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    for state in (killed, {}):
        status = {"containerStatuses": [{"name": "trainer", "state": state}]}
        bench.cluster.change("pods", name, {"status": status})
        bench.launcher().observe(RUN_ID, 1)
    bench.cluster.remove("pods", name)
    bench.finish("Failed")
    assert bench.launcher().observe(RUN_ID, 1).reason_code == "out_of_memory"


def test_a_watch_that_is_behind_ends_nothing(bench: Bench) -> None:
    """The launcher's copy does not hold the Job yet that another process has made."""
    launcher = bench.launcher()
    launcher.submit(*bench.attempt(1))
    assert launcher.observe(RUN_ID, 1).state == "starting"
    bench.cluster.silent = True
    bench.submit(2)
    assert launcher.observe(RUN_ID, 2).state == "starting"


def test_hosts_that_may_not_be_read_are_asked_for_once(bench: Bench) -> None:
    bench.cluster.forbidden.add(("get", "nodes"))
    launcher = bench.launcher()
    launcher.submit(*bench.attempt())
    # Deleted a moment ago by the server's clock, so that nothing is overdue yet.
    bench.add_pod(0, deletionTimestamp="2200-01-01T00:00:00Z", deletionGracePeriodSeconds=5)
    for _ in range(3):
        assert launcher.observe(RUN_ID, 1).waiting is not None
    assert bench.cluster.counted("get", "nodes") == 1


def test_refusals_of_the_server_pass_through(bench: Bench) -> None:
    bench.cluster.faults = [ClusterUnreachable("500", "")]
    with pytest.raises(LauncherUnavailable):
        bench.submit()
    assert bench.launcher().observe(RUN_ID, 1).state == "absent"
    with pytest.raises(LaunchRefused, match="no run id"):
        bench.launcher().run_dir("../x")


def test_a_queue_that_starts_a_job_before_its_submission_is_whole_gets_the_rest_made(bench: Bench) -> None:
    """Killed right after the Job was made; Kueue let it start, and a node has spoken: its Service is still missing."""
    bench.changes["queue"] = Queue(local_queue="team")
    bench.cluster.faults = [After(Killed())]
    with pytest.raises(Killed):
        bench.submit()
    bench.cluster.change("jobs", bench.job()["metadata"]["name"], {"spec": {"suspend": False}})
    bench.add_pod(0)
    EventWriter(bench.folder / "node-0" / "events.jsonl", 0).emit("node_start", {"ranks": [0]})
    seen = bench.launcher().observe(RUN_ID, 1)
    assert (seen.state, seen.supervisor_alive) == ("absent", True)
    bench.submit()
    assert bench.cluster.named("services") == bench.cluster.named("jobs")
    assert bench.launcher().observe(RUN_ID, 1).state == "starting"


def test_a_second_submitter_that_is_killed_takes_nothing_from_an_attempt_that_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked before the first one had noted anything: the attempt seems unfinished again, and is not gone."""
    whole = launching.AttemptFacts.marker
    bench.submit()
    bench.add_pod(0)
    with monkeypatch.context() as late:
        late.setattr(launching.AttemptFacts, "marker", lambda facts: None)
        bench.cluster.faults = [None, None, Killed()]
        with pytest.raises(Killed):
            bench.submit()
    bench.cluster.faults = []
    assert launching.AttemptFacts.marker is whole
    seen = bench.launcher().observe(RUN_ID, 1)
    assert (seen.state, seen.supervisor_alive) == ("absent", True)
    bench.submit()
    assert bench.launcher().observe(RUN_ID, 1).state == "starting"


def test_a_submitter_that_was_held_up_past_the_end_makes_no_second_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first look was before everything, its Job comes after the end was recorded and the first Job released."""
    late = bench.launcher()
    made = late._make_job

    def held_up(*arguments: Any) -> Any:  # noqa: ANN401
        bench.submit()
        for node in range(2):
            bench.end_node(node, 0)
        bench.finish()
        assert bench.launcher().observe(RUN_ID, 1).code == 0
        bench.launcher().release(RUN_ID, 1)
        return made(*arguments)

    monkeypatch.setattr(late, "_make_job", held_up)
    late.submit(*bench.attempt())
    assert (bench.cluster.named("jobs"), bench.cluster.named("services")) == ([], [])
    assert late.observe(RUN_ID, 1).code == 0


def test_a_volume_that_fails_ends_no_watch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale file handle met while a pod's end was to be kept: what is seen of the cluster goes on being current."""
    bench.submit()
    name = bench.add_pod(0)
    launcher = bench.launcher()
    assert launcher.observe(RUN_ID, 1).state == "starting"
    folder = bench.folder
    real = Path.is_dir

    def stale(path: Path) -> bool:
        if path == folder:
            raise OSError(116, "Stale file handle")
        return real(path)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "is_dir", stale)
        bench.cluster.change("pods", name, {"metadata": {"deletionTimestamp": "2200-01-01T00:00:00Z"}})
        labels = bench.cluster.objects["pods", name]["metadata"]["labels"]
        deadline = time.monotonic() + 60
        while not any(pod["metadata"].get("deletionTimestamp") for pod in launcher._view.pods(labels)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert launcher._view._pods._thread is not None
    assert launcher._view._pods._thread.is_alive()


def test_silent_nodes_are_looked_at_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: one after another they would take minutes."""
    bench.submit()
    looks: list[float] = []
    monkeypatch.setattr(recording, "time", SimpleNamespace(sleep=looks.append, monotonic=time.monotonic))
    nodes = range(40)
    for node in nodes:
        folder = bench.folder / f"node-{node}"
        folder.mkdir()
        heartbeat = HeartbeatFile(folder / "node.heartbeat", clock=lambda: 1)
        heartbeat.beat()
        heartbeat.close()
    attempt = replace(bench.attempt()[0], nodes=len(nodes))
    facts = launching.AttemptFacts(bench.folder).nodes(attempt, launching.Heard(), dict.fromkeys(nodes, 10.0))
    assert all(node.silent_s is not None and node.silent_s > 10.0 for node in facts)
    assert sum(looks) < 2 * recording.LOOK_ON_S
