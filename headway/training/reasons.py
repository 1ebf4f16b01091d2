"""Why an attempt ended or does not run yet: one table of reason codes, what they mean, and whether a retry is free.

`free`: infrastructure took the place away, the failure budget (`max_attempts`) stays as it was. `counted`: what ended
it may do so again, one attempt of the budget is spent. `never`: the same would come of it again, or a person wished it
so; only a person asks for another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.spec import ExitCode

Retry = Literal["free", "counted", "never"]


@dataclass(frozen=True)
class Reason:
    """One way to end: a stable code, what it says to people, and what follows."""

    code: str
    words: str
    retry: Retry


ENDED: dict[str, Reason] = {
    reason.code: reason
    for reason in (
        Reason("done", "every node ended with 0 and the artifact verifies", "never"),
        Reason("code_failed", "the user's code failed: exit 65, with the rank's own words", "never"),
        Reason("refused_spec", "the trainer refused the run spec: exit 64", "never"),
        Reason(
            "refused_manifest",
            "the cluster refuses its manifest, with the paths of the fields: mend the profile",
            "never",
        ),
        Reason("cancelled", "a person asked for the end", "never"),
        Reason("exceeds_quota", "more than the queue can ever give: raise the quota or ask for less", "never"),
        Reason("deadline", "it ran longer than its budget of time, counted from the first step", "never"),
        Reason("preempted", "asked to stop: saved, exit 75", "free"),
        Reason("preempted_by_queue", "the queue took its place for a run of higher priority", "free"),
        Reason("evicted", "a pod was evicted: a drain, a taint, pressure on the node", "free"),
        Reason("node_lost", "the node stopped answering; the attempt was given up and fenced", "free"),
        Reason("lost", "nothing is left that could say how it ended", "counted"),
        Reason("peer_lost", "a rank or node died, or a peer stopped answering: exit 77", "counted"),
        Reason("hung", "no progress for longer than it may take: exit 76, with the stacks of all ranks", "counted"),
        Reason("out_of_memory", "the kernel killed it over its memory limit, and will again", "counted"),
        Reason("shared_memory", "shared memory was too small for the data workers: raise `shared_memory`", "counted"),
        Reason("image_pull", "the image could not be pulled", "counted"),
        Reason("config_error", "a Secret, ConfigMap or volume that the pod names is not there", "counted"),
        Reason("never_started", "it waited for a place longer than the profile allows", "counted"),
        Reason("artifact_invalid", "it ended with 0 and what it left does not verify", "counted"),
    )
}

WAITING: dict[str, str] = {
    "suspended": "its Job is suspended: nobody has let it start yet",
    "waiting_for_quota": "the queue has no room for it now",
    "queue_misconfigured": "the queue that it names is not there, or not usable",
    "queue_on_hold": "the queue is on hold",
    "unschedulable": "no node can take its pods, in the scheduler's words",
    "image_pull": "the image cannot be pulled, and is tried again",
    "config_error": "a Secret, ConfigMap or volume that the pod names is not there yet",
    "starting": "its pods are being started",
    "stopping": "its pods are being stopped",
    "cluster_unreachable": "the cluster does not answer; the attempt goes on without being seen",
}

_OF_EXIT = {
    ExitCode.DONE: "done",
    ExitCode.REFUSED_SPEC: "refused_spec",
    ExitCode.USER_CODE: "code_failed",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.HUNG: "hung",
    ExitCode.LOST_PEER: "peer_lost",
}


def reason_of_exit(code: int | None) -> str:
    """The reason code that an exit code alone stands for; `lost` when there is none, or one that no node uses."""
    return _OF_EXIT.get(ExitCode(code), "lost") if code in set(ExitCode) else "lost"
