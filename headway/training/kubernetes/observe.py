"""What everything that is known of an attempt says: that it waits, that it runs, or how it ended. Pure functions.

An attempt is over by its Job's terminal condition, by our own decision to give it up, or, when the Job is gone, by the
fenced final events of its nodes; never by one pod. How it ended is told by the nodes' final events first, by the pods'
status where a node left none, and never by the Job: its condition says when, a pod's exit code alone says little (a
container can be killed for its memory and show exit 0).

| what is seen | what follows |
|---|---|
| no Job, no marker, nothing began | absent: submitting is right |
| Job, but its submission was not finished | absent: submitting again finishes it |
| Job Complete or Failed, or both | ended; the nodes' ends decide how |
| Job gone, pods still stopping | running, `stopping`; pods of a lost node are not waited for |
| Job gone, no pod lives, every node left its final event | ended, as the events say |
| Job gone, no pod lives, a final event is missing | lost; cancelled when that was asked for |
| Workload that can never get its quota | given up at once, `exceeds_quota` |
| suspended by the queue after it had begun, no pod lives | given up, `preempted_by_queue`: the next one queues |
| pods of a second start, after its nodes had saved | given up, as above: a gang restart is another attempt |
| pod being deleted on a host that is not ready | given up, `node_lost` |
| pod being deleted, its grace long past, or (hosts unreadable) its node silent | given up, `node_lost` |
| node silent for `restart.hang_floor_s`, its pod running | given up, `hung` |
| image, Secret or volume missing, or pods refused, for too long | given up, `image_pull` or `config_error` |
| longer than `active_deadline_s` since the first step | given up, `deadline` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from headway.training.judge import NodeEnd, judge, said_end
from headway.training.kubernetes.logs import names_shared_memory
from headway.training.kubernetes.names import CONTAINER, INDEX_LABEL
from headway.training.kubernetes.platform import Platform
from headway.training.launch import Observation, Waiting
from headway.training.reasons import ENDED, reason_of_exit
from trainer.events import Event
from trainer.spec import AttemptSpec, ExitCode, RunSpec

# How long a host that is not ready is given to act on a deletion that it most likely never heard of.
UNHEARD_S = 10.0
# How much longer than its grace a pod may take to go while its host looks healthy: volumes are unmounted meanwhile.
OVERDUE_S = 60.0
START_PENDING_S = 600.0
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_VOLUME = ("FailedMount", "FailedAttachVolume")
_NO_PODS = ("FailedCreate",)
_DISRUPTED = {
    "EvictionByEvictionAPI": "evicted",
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "evicted",
    "TerminationByKubelet": "evicted",
    "DeletionByPodGC": "node_lost",
}
# Ends that a disruption explains; any other is the attempt's own doing.
_TAKEN = (None, ExitCode.PREEMPTED, ExitCode.LOST_PEER)
_SUSPENDED_QUEUE = ("Suspended", "Stopped", "Inactive", "Deactivated")


@dataclass(frozen=True)
class Marker:
    """The Job that was made for the attempt; `submitted` once everything beside it stands too."""

    name: str
    namespace: str
    uid: str
    created_at: str
    submitted: bool = False


@dataclass(frozen=True)
class PodFact:
    """What matters of one pod; times are microseconds UTC. `index` is its node of the run, `host` the machine."""

    uid: str
    name: str
    index: int
    host: str = ""
    phase: str = ""
    created_at: int | None = None
    scheduled_at: int | None = None
    unschedulable: str = ""
    waiting_reason: str = ""
    waiting_message: str = ""
    started_at: int | None = None
    finished_at: int | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""
    deleted_at: int | None = None
    grace_s: int = 0
    disruption: str = ""
    disruption_message: str = ""

    @property
    def ended(self) -> bool:
        """Whether its container will not run any more."""
        return self.phase in ("Succeeded", "Failed") or self.exit_code is not None

    @property
    def deletion_asked_at(self) -> int | None:
        """When its deletion was asked for; `deleted_at` is when its grace ends."""
        return None if self.deleted_at is None else self.deleted_at - self.grace_s * 1_000_000


@dataclass(frozen=True)
class NodeFacts:
    """What one node left on the shared volume; times are microseconds UTC by its own clock.

    `silent_s`: for how long its heartbeat has stood still, None before the first one. `first_step_at` is told only
    where a deadline needs it.
    """

    node: int
    end: Event | None = None
    began_at: int | None = None
    seen_at: int | None = None
    silent_s: float | None = None
    first_step_at: int | None = None


@dataclass(frozen=True)
class Sight:
    """Everything that is known of one attempt at `now` (microseconds UTC, by our clock).

    `ahead_us`: how far the API server's clock is ahead of ours; what it wrote is compared with its own time.
    `pods` are those that the API shows, `remembered` what was last seen of those that are gone. `hosts` says of each
    host whether it is ready; None where hosts may not be read. `wished`: a person asked for the end.
    """

    attempt: AttemptSpec
    spec: RunSpec
    now: int
    ahead_us: int = 0
    job: Mapping[str, Any] | None = None
    marker: Marker | None = None
    pods: tuple[PodFact, ...] = ()
    remembered: tuple[PodFact, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    workload: Mapping[str, Any] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    hosts: Mapping[str, bool] | None = None
    wished: bool = False

    @property
    def server_now(self) -> int:
        """The time by the API server's clock."""
        return self.now + self.ahead_us

    @property
    def begun(self) -> bool:
        """Whether any node wrote something: the attempt has run, for however short a time."""
        return any(node.began_at is not None for node in self.nodes)

    @property
    def living(self) -> tuple[PodFact, ...]:
        """Pods whose container runs or may yet."""
        return tuple(pod for pod in self.pods if not pod.ended)

    @property
    def own_job(self) -> Mapping[str, Any] | None:
        """The attempt's Job; one of its name with another uid is somebody else's."""
        if self.job is not None and self.marker is not None and self.job["metadata"]["uid"] != self.marker.uid:
            return None
        return self.job


@dataclass(frozen=True)
class End:
    """How the attempt ended, as `final.json` keeps it; `gives_up`: by our decision, its Job is still to be deleted."""

    code: int | None
    cause: str
    reason_code: str
    exit_codes: tuple[int | None, ...]
    worker_seconds: float
    ended_at: int
    cause_node: int | None = None
    cause_rank: int | None = None
    cancelled: bool = False
    gives_up: bool = False


def observe(sight: Sight, platform: Platform) -> Observation | End:
    """Say what the sight means: see the table of this module."""
    job = sight.own_job
    if job is None:
        return _without_job(sight, platform)
    if sight.marker is None and not sight.begun:
        # Of an earlier submission that nobody noted, or about to be gone: whoever submits finds out.
        return Observation("absent")
    if ended := terminal(job):
        return _verdict(sight, ended)
    if sight.marker is None or not sight.marker.submitted:
        return Observation("absent", supervisor_alive=True)
    if end := _given_up(sight, platform, job):
        return end
    waiting = _waiting(sight, job, platform)
    began = {node.node for node in sight.nodes if node.began_at is not None}
    running = len(began) == sight.attempt.nodes or (sight.begun and waiting is None)
    state = "running" if running else "starting"
    return Observation(state, worker_seconds=_seconds_so_far(sight), supervisor_alive=True, waiting=waiting)


def terminal(job: Mapping[str, Any]) -> str:
    """What the Job's terminal condition says (`Complete: ...`, `Failed: ...`); "" while it has none.

    `FailureTarget` and `SuccessCriteriaMet` come before and are none: pods still live then.
    """
    said = [
        f"{c['type']}: {c.get('reason', '')}: {c.get('message', '')}"
        for c in _conditions(job)
        if c["type"] in ("Complete", "Failed") and c["status"] == "True"
    ]
    return "; ".join(said)


def pod_fact(pod: Mapping[str, Any]) -> PodFact:
    """Read the facts of a pod that the API shows."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    scheduled, disruption = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    container = next((c for c in status.get("containerStatuses") or [] if c["name"] == CONTAINER), {})
    state = container.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    running = state.get("running") or {}
    return PodFact(
        uid=metadata["uid"],
        name=metadata["name"],
        index=int((metadata.get("labels") or {}).get(INDEX_LABEL, -1)),
        host=(pod.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "",
        created_at=_us(metadata.get("creationTimestamp")),
        scheduled_at=_us(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        unschedulable=scheduled.get("message") or "" if scheduled.get("status") == "False" else "",
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        started_at=_us(ended.get("startedAt") or running.get("startedAt")),
        finished_at=_us(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        # An evicted pod may show its reason on itself only.
        exit_reason=ended.get("reason") or status.get("reason") or "",
        exit_message=ended.get("message") or status.get("message") or "",
        deleted_at=_us(metadata.get("deletionTimestamp")),
        grace_s=metadata.get("deletionGracePeriodSeconds") or 0,
        disruption=disruption.get("reason") or "" if disruption.get("status") == "True" else "",
        disruption_message=disruption.get("message") or "",
    )


def _without_job(sight: Sight, platform: Platform) -> Observation | End:
    if sight.marker is None and not sight.begun and not sight.living:
        return Observation("absent")
    if [pod for pod in sight.pods if _goes(pod) and not _is_lost(pod, sight, platform)]:
        waiting = Waiting("stopping", "its Job is gone, and its pods are stopping")
        return Observation("running", worker_seconds=_seconds_so_far(sight), supervisor_alive=True, waiting=waiting)
    end = _verdict(sight, "")
    if sight.living and end.code in _TAKEN and not sight.wished:
        return replace(end, reason_code="node_lost")
    return end


def _goes(pod: PodFact) -> bool:
    """Whether the pod runs or is still being deleted; one that ended and that nobody deletes is only a record."""
    return not pod.ended or pod.deleted_at is not None


def _given_up(sight: Sight, platform: Platform, job: Mapping[str, Any]) -> End | None:
    """Our own decision that the attempt is over though its Job is not; None while it may go on."""
    quota = _condition(sight.workload, "QuotaReserved")
    if quota.get("reason") == "ExceedsMaxQuota" and quota.get("status") == "False":
        return _give_up(sight, "exceeds_quota", ExitCode.REFUSED_SPEC, quota.get("message") or "")
    for pod in sight.living:
        if _is_lost(pod, sight, platform):
            words = f"node {pod.index}: pod {pod.name} is being deleted, and host {pod.host or '?'} does not answer"
            return _give_up(sight, "node_lost", ExitCode.LOST_PEER, words, pod.index)
    if (job["spec"].get("suspend") and sight.begun and not sight.living) or _starts_again(sight):
        return _suspended(sight)
    if end := _hung(sight):
        return end
    if end := _pending_too_long(sight, platform) or _podless_too_long(sight, platform, job):
        return end
    steps = [node.first_step_at for node in sight.nodes if node.first_step_at is not None]
    limit = platform.active_deadline_s
    if limit is not None and steps and sight.now - min(steps) > limit * 1_000_000:
        ran = (sight.now - min(steps)) / 1e6
        return _give_up(
            sight, "deadline", ExitCode.LOST_PEER, f"{ran:.0f} s since the first step; the limit is {limit}"
        )
    return None


def _is_lost(pod: PodFact, sight: Sight, platform: Platform) -> bool:
    """Whether the pod is being deleted and nobody is there to do it."""
    if pod.deletion_asked_at is None or pod.deleted_at is None or not pod.host:
        return False
    asked_s, past_s = ((sight.server_now - at) / 1e6 for at in (pod.deletion_asked_at, pod.deleted_at))
    if sight.hosts is not None and not sight.hosts.get(pod.host, False):
        return asked_s >= min(pod.grace_s, UNHEARD_S)
    if sight.hosts is None and _silence(sight, pod.index) > platform.node_lost_after_s:
        return asked_s >= min(pod.grace_s, UNHEARD_S)
    return past_s > OVERDUE_S


def _silence(sight: Sight, index: int) -> float:
    """Seconds since the node was last heard of; 0 for one that never was."""
    silent = next((node.silent_s for node in sight.nodes if node.node == index), None)
    return silent or 0.0


def _hung(sight: Sight) -> End | None:
    """A node's own process answers no more, though its pod runs: it watches its ranks no longer."""
    limit = sight.spec.restart.hang_floor_s
    for pod in sight.living:
        ready = sight.hosts is None or sight.hosts.get(pod.host, True)
        if pod.phase != "Running" or pod.deleted_at is not None or not ready:
            continue
        facts = next((node for node in sight.nodes if node.node == pod.index), None)
        if facts is None or facts.end is not None:
            continue
        silent = facts.silent_s
        if silent is None and pod.started_at is not None:
            silent = (sight.server_now - pod.started_at) / 1e6 - START_PENDING_S
        if silent is not None and silent > limit:
            words = f"node {pod.index} did not answer for {silent:.0f} s, and its pod runs on host {pod.host}"
            return _give_up(sight, "hung", ExitCode.HUNG, words, pod.index)
    return None


def _starts_again(sight: Sight) -> bool:
    """Whether a pod runs on a node that has saved and ended: the Job was suspended and resumed meanwhile."""
    for facts in sight.nodes:
        if facts.end is None or facts.end.data["code"] != ExitCode.PREEMPTED:
            continue
        for pod in sight.living:
            if pod.index == facts.node and pod.created_at is not None and pod.created_at > facts.end.at:
                return True
    return False


def _suspended(sight: Sight) -> End:
    end = _verdict(sight, "its Job was suspended")
    if end.code in _TAKEN and not sight.wished:
        message = _condition(sight.workload, "Evicted").get("message") or "its Job was suspended"
        reason = "preempted_by_queue" if sight.workload is not None else "preempted"
        end = replace(end, reason_code=reason, cause=f"{message}; {end.cause}")
    return replace(end, gives_up=True)


def _pending_too_long(sight: Sight, platform: Platform) -> End | None:
    for pod in sight.living:
        code, words = _trouble(pod, sight.events)
        since = pod.created_at if code == "unschedulable" else pod.scheduled_at or pod.created_at
        limit = platform.max_pending_s if code == "unschedulable" else platform.max_pending_s or START_PENDING_S
        if not code or since is None or limit is None or sight.server_now - since <= limit * 1_000_000:
            continue
        reason = "never_started" if code == "unschedulable" else code
        return _give_up(sight, reason, ExitCode.LOST_PEER, f"for {limit:.0f} s: {words}", pod.index)
    return None


def _podless_too_long(sight: Sight, platform: Platform, job: Mapping[str, Any]) -> End | None:
    """The Job started, and its pods may not be made: a policy, an account or a class of priority that is not there."""
    since, refused = _us((job.get("status") or {}).get("startTime")), _refused_pods(sight)
    # A namespace's quota is a place to wait for; what others hold comes free.
    full = any("exceeded quota" in words for words in refused)
    limit = platform.max_pending_s if full else platform.max_pending_s or START_PENDING_S
    if sight.pods or sight.begun or not refused or since is None or limit is None or job["spec"].get("suspend"):
        return None
    if sight.server_now - since <= limit * 1_000_000:
        return None
    reason = "never_started" if full else "config_error"
    return _give_up(sight, reason, ExitCode.LOST_PEER, f"for {limit:.0f} s no pod could be made: {refused[-1]}")


def _refused_pods(sight: Sight) -> list[str]:
    return [event.get("message") or "" for event in sight.events if event.get("reason") in _NO_PODS]


def _trouble(pod: PodFact, events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Why the pod does not run: a code of `reasons.WAITING` and the cluster's words, ("", "") when nothing is wrong."""
    if pod.unschedulable and not pod.host:
        return "unschedulable", pod.unschedulable
    words = f"{pod.waiting_reason}: {pod.waiting_message}"
    if pod.waiting_reason in _IMAGE:
        return "image_pull", words
    if pod.waiting_reason in _CONFIG:
        return "config_error", words
    if pod.started_at is None and pod.host:
        # A missing volume shows in events alone: its container waits as `ContainerCreating`.
        for event in events:
            if event["involvedObject"].get("uid") == pod.uid and event.get("reason") in _VOLUME:
                return "config_error", event.get("message") or ""
    return "", ""


def _waiting(sight: Sight, job: Mapping[str, Any], platform: Platform) -> Waiting | None:
    """Why the attempt does not run now; None when it does."""
    if job["metadata"].get("deletionTimestamp") or any(_true(job, c) for c in ("FailureTarget", "SuccessCriteriaMet")):
        return Waiting("stopping", "its pods are being stopped")
    if job["spec"].get("suspend"):
        if sight.living:
            return Waiting("stopping", "it was suspended: its pods save and stop")
        return _queued(sight, platform)
    for pod in sight.living:
        code, words = _trouble(pod, sight.events)
        if code:
            return Waiting(code, f"node {pod.index}: {words}")
    if any(pod.deleted_at is not None for pod in sight.living):
        return Waiting("stopping", "pods of it are being deleted")
    if any(pod.started_at is None for pod in sight.living):
        return Waiting("starting", "its pods are being started")
    if not sight.pods and not sight.begun:
        refused = _refused_pods(sight)
        return Waiting("config_error" if refused else "starting", refused[-1] if refused else "no pod was made yet")
    if not sight.begun:
        return Waiting("starting", "its nodes have not spoken yet")
    return None


def _queued(sight: Sight, platform: Platform) -> Waiting:
    if platform.queue is None:
        return Waiting("suspended", "somebody suspended its Job")
    quota = _condition(sight.workload, "QuotaReserved")
    reason, message = quota.get("reason") or "", quota.get("message") or ""
    if sight.workload is None:
        refused = [e.get("message") or "" for e in sight.events if "NotFound" in (e.get("reason") or "")]
        if refused:
            return Waiting("queue_misconfigured", refused[-1])
        return Waiting("suspended", "the queue has not looked at it yet")
    if not sight.workload["spec"].get("active", True):
        return Waiting("queue_on_hold", _condition(sight.workload, "Evicted").get("message") or "it was deactivated")
    if quota.get("status") == "True":
        return Waiting("starting", "the queue admitted it")
    if reason == "Misconfigured":
        return Waiting("queue_misconfigured", message)
    if reason in _SUSPENDED_QUEUE:
        return Waiting("queue_on_hold", message)
    return Waiting("waiting_for_quota", f"{reason}: {message}" if reason else "the queue has not looked at it yet")


def _verdict(sight: Sight, ended: str) -> End:
    """How an attempt ended whose Job says so, or whose Job is gone."""
    told = [_end_of(sight, node) for node in range(sight.attempt.nodes)]
    missing = [node for node, end in enumerate(told) if end is None]
    pods = (*sight.pods, *sight.remembered)
    disruption = next((pod for pod in pods if pod.disruption), None)
    disrupted = disruption is not None or "has condition DisruptionTarget" in ended
    if missing and not ended and not disrupted and not sight.wished:
        words = f"its Job is gone, and nodes {missing} left no final event"
        return _end(sight, None, words, "lost", told)
    if len(missing) == len(told) and sight.wished:
        return replace(
            _end(sight, ExitCode.PREEMPTED, "cancelled before it started", "cancelled", told), cancelled=True
        )
    ends = [end or _silent(node, sight, ended) for node, end in enumerate(told)]
    asked = sight.wished or disrupted or not ended or _suspends(sight)
    found = judge(ends, stop_was_asked=asked)
    reason = _reason(sight, found, ended, disruption, disrupted)
    # What the place took away is not the user's fault, whatever the ranks made of it.
    code = ExitCode.LOST_PEER if reason == "shared_memory" else found.code
    cause = found.cause if reason in ("done", reason_of_exit(found.code)) else f"{_words(reason)}: {found.cause}"
    if disruption is not None and reason in _DISRUPTED.values():
        cause = f"{cause} ({disruption.disruption_message})"
    end = _end(sight, code, cause, reason, told)
    cancelled = sight.wished and found.code != ExitCode.DONE
    return replace(end, cause_node=found.node, cause_rank=found.rank, cancelled=cancelled)


def _suspends(sight: Sight) -> bool:
    return sight.job is not None and bool(sight.job["spec"].get("suspend"))


def _words(reason: str) -> str:
    return {"out_of_memory": "out of memory", "shared_memory": "shared memory too small"}.get(
        reason, ENDED[reason].words.partition(":")[0]
    )


def _reason(sight: Sight, found: NodeEnd, ended: str, disruption: PodFact | None, disrupted: bool) -> str:
    if found.code == ExitCode.DONE:
        return "done"
    if sight.wished:
        return "cancelled"
    if names_shared_memory(found.cause):
        return "shared_memory"
    pod = _pod_of(sight, found.node)
    taken = found.code in _TAKEN
    if pod is not None and pod.exit_reason == "OOMKilled" and taken:
        return "out_of_memory"
    if "DeadlineExceeded" in ended:
        return "deadline"
    if pod is not None and pod.exit_reason in ("StartError", "ContainerCannotRun"):
        return "config_error"
    if taken and disrupted:
        if disruption is None:
            return "evicted"
        if sight.hosts is not None and disruption.host and not sight.hosts.get(disruption.host, True):
            return "node_lost"
        return _DISRUPTED.get(disruption.disruption, "evicted")
    if taken and pod is not None and pod.exit_reason == "Evicted":
        return "evicted"
    if found.code == ExitCode.PREEMPTED and _condition(sight.workload, "Evicted"):
        return "preempted_by_queue"
    return reason_of_exit(found.code)


def _pod_of(sight: Sight, node: int | None) -> PodFact | None:
    """The pod of a node whose end is known best: an ended one first, and what the API shows before memory."""
    found = [pod for pod in (*sight.pods, *sight.remembered) if pod.index == node]
    return next((pod for pod in found if pod.ended), found[0] if found else None)


def _end_of(sight: Sight, node: int) -> NodeEnd | None:
    """How the node ended: its final event, else what its pod showed; None when neither is there."""
    facts = next((facts for facts in sight.nodes if facts.node == node), None)
    if facts is not None and facts.end is not None:
        # The node's last words outweigh the container's status: it may have been killed right after them.
        return said_end(node, facts.end.data["code"], facts.end)
    pod = _pod_of(sight, node)
    if pod is None or pod.exit_code is None:
        return None
    status = _status(pod.exit_code)
    # Deleted by the Job's own rule, because of another pod; running out of memory is always a pod's own doing.
    consequence = pod.deleted_at is not None and not pod.disruption and pod.exit_reason != "OOMKilled"
    code, words = _meaning(sight, pod, status)
    seconds = 0.0
    if pod.started_at is not None and pod.finished_at is not None and pod.exit_reason != "StartError":
        seconds = max(0.0, (pod.finished_at - pod.started_at) / 1e6) * sight.attempt.processes_per_node
    at = pod.finished_at or sight.now
    return NodeEnd(node, status, code, f"node {node} {words}", at=at, consequence=consequence, worker_seconds=seconds)


def _meaning(sight: Sight, pod: PodFact, status: int) -> tuple[ExitCode, str]:
    """What the end of a container says whose node left no final event."""
    if pod.exit_reason == "OOMKilled":
        return ExitCode.LOST_PEER, f"was killed for its memory (exit {pod.exit_code})"
    if pod.exit_reason == "StartError":
        return ExitCode.LOST_PEER, f"could not be started: {pod.exit_message}"
    if status in (ExitCode.REFUSED_SPEC, ExitCode.HUNG):
        return ExitCode(status), f"exited with {status}"
    never = next((facts.began_at is None for facts in sight.nodes if facts.node == pod.index), True)
    if never and pod.deleted_at is not None:
        return ExitCode.PREEMPTED, "was stopped before it began"
    how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    told = f": {pod.exit_message.strip()}" if pod.exit_message else ""
    return ExitCode.LOST_PEER, f"{how} and left no final event{told}"


def _silent(node: int, sight: Sight, ended: str) -> NodeEnd:
    """The end of a node that left nothing, in an attempt that is over."""
    words = f"node {node} left no final event" + (f" ({ended})" if ended else "")
    return NodeEnd(node, None, ExitCode.LOST_PEER, words, at=sight.now, consequence=True)


def _status(exit_code: int) -> int:
    """A container's exit code as a process's status: 128 + n is death by signal n."""
    return 128 - exit_code if 128 < exit_code < 128 + 65 else exit_code


def _give_up(sight: Sight, reason: str, code: ExitCode, words: str, node: int | None = None) -> End:
    told = [_end_of(sight, index) for index in range(sight.attempt.nodes)]
    cause = f"{_words(reason)}: {words}" if words else _words(reason)
    end = _end(sight, code, cause, "cancelled" if sight.wished else reason, told)
    return replace(end, cause_node=node, cancelled=sight.wished, gives_up=True)


def _end(sight: Sight, code: int | None, cause: str, reason: str, told: Sequence[NodeEnd | None]) -> End:
    seconds = sum(
        end.worker_seconds if end is not None else _node_seconds(sight, node) for node, end in enumerate(told)
    )
    statuses = tuple(end.exit if end is not None else None for end in told)
    return End(code if code is None else int(code), cause, reason, statuses, round(seconds, 3), sight.now)


def _seconds_so_far(sight: Sight) -> float:
    return sum(
        facts.end.data["worker_seconds"] if facts.end is not None else _node_seconds(sight, facts.node)
        for facts in sight.nodes
    )


def _node_seconds(sight: Sight, node: int) -> float:
    """Worker seconds of a node without a known end: from its first to its last sign of life, for each rank."""
    facts = next((facts for facts in sight.nodes if facts.node == node), None)
    if facts is None or facts.began_at is None or facts.seen_at is None:
        return 0.0
    # A clock that was set back makes the last moment earlier than the first.
    return max(0, facts.seen_at - facts.began_at) / 1e6 * sight.attempt.processes_per_node


def _conditions(document: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    status = (document or {}).get("status") or {}
    return cast("list[dict[str, Any]]", status.get("conditions") or [])


def _condition(document: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
    return next((c for c in _conditions(document) if c["type"] == kind), {})


def _true(document: Mapping[str, Any], kind: str) -> bool:
    return _condition(document, kind).get("status") == "True"


def _us(text: str | None) -> int | None:
    """RFC 3339 in microseconds UTC; the API writes seconds, and 1970 for a container that never started."""
    if not text:
        return None
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000) or None
