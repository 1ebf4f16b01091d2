"""What is concluded from the objects of a cluster and from what the nodes wrote: ends, waits, and giving up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.seen_attempts import PLATFORM, QUEUE, S, ended, platform_with, running_pod, seen, working

from headway.training.kubernetes.observe import End, NodeFacts, PodFact, Sight, observe, pod_fact
from headway.training.kubernetes.platform import Platform
from headway.training.launch import Observation
from headway.training.reasons import ENDED, WAITING

DONE = (ended(0, 0, "done"), ended(1, 0, "done"))
SAVED = (ended(0, 75), ended(1, 75))


def end_of(sight: Sight, platform: Platform = PLATFORM) -> End:
    found = observe(sight, platform)
    assert isinstance(found, End), found
    assert found.reason_code in ENDED
    return found


def alive(sight: Sight, platform: Platform = PLATFORM) -> Observation:
    found = observe(sight, platform)
    assert isinstance(found, Observation), found
    assert found.waiting is None or found.waiting.code in WAITING
    return found


def test_every_node_done() -> None:
    end = end_of(seen("success", DONE))
    assert (end.code, end.reason_code, end.exit_codes, end.gives_up) == (0, "done", (0, 0), False)
    assert end.worker_seconds == 15.0


def test_exit_0_without_a_final_event_is_no_success() -> None:
    end = end_of(seen("success", (ended(0, 0, "done"),)))
    assert (end.code, end.reason_code) == (77, "peer_lost")
    assert "node 1 exited with 0 and left no final event" in end.cause


def test_e01_out_of_memory_whatever_the_exit_code() -> None:
    """OOMKilled, exit 0, Succeeded: out of memory without the node's final event; with it the artifact decides."""
    sight = seen("success", (ended(0, 0, "done"),))
    killed = [replace(pod, exit_reason="OOMKilled") if pod.index == 1 else pod for pod in sight.pods]
    sight = replace(sight, pods=tuple(killed))
    end = end_of(sight)
    assert (end.code, end.reason_code, end.cause_node) == (77, "out_of_memory", 1)
    assert "out of memory" in end.cause
    assert end_of(replace(sight, nodes=DONE)).reason_code == "done"


def test_out_of_memory_as_the_cluster_shows_it() -> None:
    end = end_of(seen("oom"))
    assert (end.code, end.reason_code, ENDED[end.reason_code].retry) == (77, "out_of_memory", "counted")
    assert -9 in end.exit_codes


def test_out_of_memory_before_the_node_said_anything() -> None:
    """Its Job was already stopping it: the kernel was faster, and that is the cause."""
    pod = running_pod(0, exit_code=137, exit_reason="OOMKilled", deleted_at=1_000 * S, phase="Failed")
    end = end_of(replace(seen("exit_42"), pods=(pod,), remembered=(replace(pod, index=1),)))
    assert (end.code, end.reason_code) == (77, "out_of_memory")


def test_a_peer_that_the_job_killed_is_no_cause_however_early_it_ended() -> None:
    killed = running_pod(0, exit_code=137, deleted_at=990 * S, finished_at=990 * S, phase="Failed")
    sight = replace(seen("exit_42", (NodeFacts(0), ended(1, 65, at=1_000 * S))), remembered=(killed,))
    end = end_of(sight)
    assert (end.code, end.cause_node, end.exit_codes) == (65, 1, (-9, 65))
    lost = replace(sight, nodes=(NodeFacts(0), ended(1, 77, at=1_000 * S)))
    assert end_of(lost).cause_node == 1


def test_a_rank_killed_for_its_memory_while_its_node_lived() -> None:
    """The kernel took one process of the container: the node says SIGKILL, the pod's status says why."""
    sight = seen("oom", (ended(1, 77, "rank 1 killed by SIGKILL"), ended(0, 75)))
    assert end_of(sight).reason_code == "out_of_memory"


def test_user_code_names_node_and_rank() -> None:
    end = end_of(seen("exit_42", (ended(1, 65, "rank 1 exited with 65: ValueError: x"), ended(0, 75))))
    assert (end.code, end.reason_code, end.cause_node, end.cause_rank) == (65, "code_failed", 1, 1)
    assert "ValueError" in end.cause


def test_a_code_that_no_node_uses_is_a_lost_peer() -> None:
    """Exit 42 of a container without a final event: it was not the user's code that chose it."""
    end = end_of(seen("exit_42"))
    assert (end.code, end.reason_code, end.cause_node) == (77, "peer_lost", 1)
    assert "42" in end.cause


def test_the_container_says_why_in_its_own_words() -> None:
    assert "why it died" in end_of(seen("exit_65")).cause


def test_75_that_nobody_asked_for_is_the_codes_doing() -> None:
    nodes = (ended(0, 75, unasked=True), ended(1, 75, unasked=True))
    end = end_of(replace(seen("success", nodes), pods=()))
    assert (end.code, end.reason_code) == (65, "code_failed")


@pytest.mark.parametrize("name", ["evicted", "preempted"])
def test_a_disruption_is_free(name: str) -> None:
    """All pods are gone from the API: what was seen of them, and the Job's own words, tell why."""
    for nodes in ((ended(0, 75), ended(1, 75)), ()):
        end = end_of(seen(name, nodes))
        assert (end.reason_code, ENDED[end.reason_code].retry) == (name, "free")
    assert end_of(seen("evicted", remembered=())).reason_code == "evicted"


def test_a_failure_of_the_code_stays_one_though_a_pod_was_evicted() -> None:
    assert end_of(seen("evicted", (ended(0, 65), ended(1, 75)))).reason_code == "code_failed"


def test_stop_conditions_before_the_terminal_one_end_nothing() -> None:
    sight = seen("evicting", (working(0), working(1)), hosts={"n1": True, "n2": True})
    found = alive(replace(sight, now=min(pod.deleted_at or 0 for pod in sight.pods)))
    assert (found.state, found.waiting and found.waiting.code) == ("running", "stopping")


@pytest.mark.parametrize("bus", ["rank 1 killed by SIGBUS", "RuntimeError: DataLoader worker killed: Bus error"])
def test_e09_a_bus_error_is_named(bus: str) -> None:
    end = end_of(seen("exit_42", (ended(1, 65, bus), ended(0, 75))))
    assert (end.reason_code, end.code) == ("shared_memory", 77)
    assert "shared memory too small" in end.cause


def test_the_jobs_own_deadline() -> None:
    assert end_of(seen("deadline", SAVED)).reason_code == "deadline"


def test_a_container_that_could_not_start() -> None:
    end = end_of(seen("no_command"))
    assert (end.reason_code, end.worker_seconds) == ("config_error", 0.0)
    assert "/no/such" in end.cause


def test_e05_both_failed_and_complete_is_settled_by_evidence() -> None:
    sight = seen("success", DONE)
    assert sight.job is not None
    both = [*sight.job["status"]["conditions"], {"type": "Failed", "status": "True", "reason": "x", "message": "y"}]
    job = {**sight.job, "status": {**sight.job["status"], "conditions": both}}
    assert end_of(replace(sight, job=job)).reason_code == "done"
    assert end_of(replace(sight, job=job, nodes=(DONE[0], NodeFacts(1)))).reason_code == "peer_lost"


def test_lost_node_where_hosts_may_be_read() -> None:
    """The pod is being deleted, and its host is not ready: nothing is waited for."""
    sight = seen("node_lost", (working(0), working(1)))
    end = end_of(sight)
    assert (end.reason_code, end.gives_up, end.cause_node, end.code) == ("node_lost", True, 1, 77)
    assert ENDED["node_lost"].retry == "free"
    assert end_of(seen("partition", (working(0), working(1)))).reason_code == "node_lost"


def test_a_host_that_is_not_ready_is_no_reason_before_its_pod_is_deleted() -> None:
    assert alive(seen("node_silent", (working(0), working(1)))).state == "running"


def test_lost_node_where_hosts_may_not_be_read() -> None:
    sight = seen("node_lost", (working(0), working(1, silent_s=31.0)), hosts=None)
    assert end_of(sight).reason_code == "node_lost"
    quiet = replace(sight, nodes=(working(0), working(1)))
    assert alive(quiet).waiting is not None
    later = replace(quiet, now=quiet.now + 60 * S)
    assert end_of(later).reason_code == "node_lost"


def test_the_grace_of_a_deletion_is_counted_by_the_clock_that_wrote_it() -> None:
    """Our clock is an hour ahead of the API server's, or behind it: the same is concluded."""
    saving = seen("node_lost", (working(0), working(1)), hosts={"n1": True, "n2": True})
    lost = replace(saving, now=saving.now + 200 * S)
    for ahead in (0, 3600 * S, -3600 * S):
        assert alive(replace(saving, now=saving.now - ahead, ahead_us=ahead)).waiting is not None
        assert end_of(replace(lost, now=lost.now - ahead, ahead_us=ahead)).reason_code == "node_lost"


def test_a_stop_with_all_its_grace_is_not_a_lost_node() -> None:
    """Hosts are ready, and the grace is not over: ranks save."""
    sight = seen("node_lost", (working(0), working(1)), hosts={"n1": True, "n2": True})
    assert alive(sight).waiting is not None


def test_a_node_process_that_stands_still_is_hung() -> None:
    sight = running(working(0), working(1, silent_s=61.0))
    end = end_of(sight)
    assert (end.reason_code, end.code, end.cause_node, end.gives_up) == ("hung", 76, 1, True)
    assert alive(replace(sight, nodes=(working(0), working(1, silent_s=59.0)))).state == "running"
    # A host that is gone is another story, and has its own way.
    assert alive(replace(sight, hosts={"n1": False})).state == "running"


def test_a_node_that_was_never_heard_of_is_hung_at_last() -> None:
    sight = running(working(0), NodeFacts(1))
    assert alive(sight).state in ("starting", "running")
    assert end_of(replace(sight, now=sight.now + 700 * S)).reason_code == "hung"


def test_one_ended_pod_ends_nothing() -> None:
    sight = running(working(0), DONE[1])
    done = replace(sight.pods[1], phase="Succeeded", exit_code=0)
    assert alive(replace(sight, pods=(sight.pods[0], done))).state == "running"


def test_e05_the_budget_of_time_starts_at_the_first_step() -> None:
    limited = platform_with(active_deadline_s=60)
    sight = running(working(0), working(1))
    assert alive(replace(sight, now=sight.now + 10_000 * S), limited).state == "running"
    stepped = (replace(working(0), first_step_at=sight.now), working(1))
    late = replace(sight, nodes=stepped, now=sight.now + 59 * S)
    assert alive(late, limited).state == "running"
    end = end_of(replace(late, now=late.now + 2 * S), limited)
    assert (end.reason_code, end.gives_up, ENDED["deadline"].retry) == ("deadline", True, "never")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("no_gpu", "unschedulable", "Insufficient nvidia.com/gpu"),
        ("image_backoff", "image_pull", "registry.example/nope"),
        ("image_name", "image_pull", "InvalidImageName"),
        ("image_never", "image_pull", "ErrImageNeverPull"),
        ("config_missing", "config_error", 'configmap "absent" not found'),
    ],
)
def test_why_pods_do_not_run_is_told_and_has_a_limit(name: str, code: str, words: str) -> None:
    sight = seen(name)
    found = alive(sight)
    assert found.waiting is not None
    assert (found.state, found.waiting.code) == ("starting", code)
    assert words in found.waiting.message
    late = replace(sight, now=sight.now + 700 * S)
    if code == "unschedulable":
        # A place may be long in coming, unless the profile has a limit.
        assert alive(late).state == "starting"
        end = end_of(late, platform_with(max_pending_s=600))
        assert end.reason_code == "never_started"
    else:
        end = end_of(late)
        assert end.reason_code == code
    assert words in end.cause
    assert end.gives_up
    assert ENDED[end.reason_code].retry == "counted"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("queued", "waiting_for_quota", "insufficient unused quota for cpu"),
        ("no_queue", "queue_misconfigured", "LocalQueue nope doesn't exist"),
        ("no_priority_class", "queue_misconfigured", 'WorkloadPriorityClass "nosuch" not found'),
    ],
)
def test_the_queues_answer_is_told(name: str, code: str, words: str) -> None:
    found = alive(seen(name), QUEUE)
    assert found.waiting is not None
    assert (found.state, found.waiting.code) == ("starting", code)
    assert words in found.waiting.message
    assert alive(seen(name, now=seen(name).now + 10**6 * S), QUEUE).state == "starting"


def test_more_than_the_queue_can_give_ends_it_at_once() -> None:
    end = end_of(seen("exceeds_quota"), QUEUE)
    assert (end.reason_code, end.gives_up, ENDED[end.reason_code].retry) == ("exceeds_quota", True, "never")
    assert "insufficient quota for cpu" in end.cause


def test_preempted_by_the_queue_is_a_new_attempt() -> None:
    end = end_of(seen("queue_preempted", SAVED), QUEUE)
    assert (end.reason_code, end.code, end.gives_up) == ("preempted_by_queue", 75, True)
    assert "Preempted to accommodate" in end.cause
    waits = alive(seen("queue_preempted", SAVED, pods=(running_pod(0),)), QUEUE).waiting
    assert waits is not None
    assert waits.code == "stopping"


def test_what_failed_by_itself_stays_failed_when_the_queue_took_its_place() -> None:
    end = end_of(seen("queue_preempted", (ended(0, 65), ended(1, 75))), QUEUE)
    assert (end.reason_code, end.gives_up) == ("code_failed", True)


def test_a_second_start_of_the_same_attempt_is_given_up() -> None:
    """The queue took it and gave it back before anybody looked: pods run again on nodes that have saved and ended."""
    at = (seen("resumed").pods[0].created_at or 0) - 5 * S
    nodes = (ended(0, 75, at=at), ended(1, 75, at=at))
    end = end_of(seen("resumed", nodes), QUEUE)
    assert (end.reason_code, end.gives_up) == ("preempted_by_queue", True)


def test_suspended_by_a_person_is_a_preemption_too() -> None:
    end = end_of(seen("suspended", SAVED))
    assert (end.reason_code, end.code, end.gives_up) == ("preempted", 75, True)


def test_a_job_that_is_gone_ends_as_its_nodes_said() -> None:
    gone = {"job": None, "pods": (), "remembered": ()}
    assert end_of(seen("success", DONE, **gone)).reason_code == "done"
    assert end_of(seen("success", SAVED, **gone)).reason_code == "preempted"
    end = end_of(seen("success", (DONE[0], working(1)), **gone))
    assert (end.code, end.reason_code) == (None, "lost")
    assert end.worker_seconds == 7.5 + 20.0
    assert end_of(seen("success", **gone)).reason_code == "lost"


def test_a_job_of_another_uid_is_not_ours() -> None:
    sight = seen("success", SAVED, pods=())
    assert sight.marker is not None
    end = end_of(replace(sight, marker=replace(sight.marker, uid="another")))
    assert end.reason_code == "preempted"


def test_while_pods_live_on_after_their_job_nothing_is_concluded() -> None:
    sight = seen("success", SAVED, job=None, pods=(running_pod(0, deleted_at=10**18, grace_s=30),))
    waits = alive(sight).waiting
    assert waits is not None
    assert waits.code == "stopping"


def test_pods_of_a_lost_host_are_not_waited_for_when_their_job_is_gone() -> None:
    lost = running_pod(1, deleted_at=1_000 * S, grace_s=5)
    sight = replace(seen("success", (SAVED[0], working(1)), job=None), pods=(lost,), hosts={"n1": False})
    assert end_of(sight).reason_code in ("node_lost", "lost")


def test_cancelled_attempts_end_as_cancelled() -> None:
    gone = {"job": None, "pods": (), "remembered": (), "wished": True}
    for nodes in (SAVED, (SAVED[0], working(1))):
        end = end_of(seen("success", nodes, **gone))
        assert (end.cancelled, end.reason_code) == (True, "cancelled")
    end = end_of(seen("success", **gone))
    assert (end.cancelled, end.cause) == (True, "cancelled before it started")
    assert not end_of(seen("success", DONE, **gone)).cancelled


def test_nothing_there_is_absent_and_half_a_submission_too() -> None:
    sight = seen("queued", job=None, marker=None, workload=None)
    assert alive(sight).state == "absent"
    half = seen("queued")
    assert half.marker is not None
    assert alive(replace(half, marker=replace(half.marker, submitted=False)), QUEUE).state == "absent"
    assert alive(replace(half, marker=None), QUEUE).state == "absent"
    # A Job that ended under this name before anybody submitted is none of this attempt's ends.
    assert alive(replace(seen("success"), marker=None)).state == "absent"
    assert end_of(replace(seen("success", DONE), marker=None)).reason_code == "done"


def test_a_forced_deletion_shows_no_end_of_the_container() -> None:
    """A pod that never ran: exit 137 of a container that could not be located counts as stopped before it began."""
    pod = PodFact(
        "u", "p", 0, "n1", "Failed", exit_code=137, exit_reason="ContainerStatusUnknown", deleted_at=1_000 * S
    )
    end = end_of(replace(seen("suspended"), pods=(), remembered=(pod, replace(pod, index=1)), job=None))
    assert (end.code, end.reason_code) == (75, "preempted")


def test_times_and_states_of_a_pod_are_read() -> None:
    (pod,) = seen("image_backoff").pods
    assert (pod.index, pod.host, pod.waiting_reason) == (0, "n2", "ImagePullBackOff")
    assert pod.created_at is not None
    assert pod.scheduled_at is not None
    (failed,) = seen("exit_42").pods
    assert (failed.exit_code, failed.ended, failed.started_at is not None) == (42, True, True)
    assert pod_fact({"metadata": {"uid": "u", "name": "n"}}).index == -1


def running(*nodes: NodeFacts) -> Sight:
    """An attempt of two nodes whose pods run on ready hosts."""
    sight = seen("node_silent", nodes, hosts={"n0": True, "n1": True})
    return replace(sight, pods=(running_pod(0), running_pod(1)), now=1_030 * S)


@pytest.mark.parametrize(
    ("message", "max_pending_s", "reason"),
    [
        ("pods is forbidden: violates PodSecurity", None, "config_error"),
        ("pods is forbidden: exceeded quota: gpus", None, ""),
        ("pods is forbidden: exceeded quota: gpus", 60, "never_started"),
    ],
)
def test_pods_that_may_not_be_made_are_not_waited_for_without_end(
    message: str, max_pending_s: int | None, reason: str
) -> None:
    sight = seen("success")
    assert sight.job is not None
    started = {"startTime": "2026-01-01T00:00:00Z", "conditions": []}
    event = {"reason": "FailedCreate", "message": message, "involvedObject": {"name": "hw"}}
    began = 1_767_225_600 * S
    sight = replace(sight, job={**sight.job, "status": started}, pods=(), remembered=(), events=(event,))
    platform = platform_with(max_pending_s=max_pending_s)
    waits = alive(replace(sight, now=began + 30 * S), platform)
    assert waits.waiting is not None
    assert waits.waiting.code == "config_error"
    late = replace(sight, now=began + 700 * S)
    if not reason:
        assert alive(late, platform).waiting == waits.waiting
        return
    end = end_of(late, platform)
    assert (end.reason_code, end.gives_up) == (reason, True)
    assert message in end.cause
