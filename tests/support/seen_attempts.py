"""Objects of attempts as a real Kubernetes 1.36 with Kueue showed them, and what could have been seen beside them.

`tests/cases/kubernetes/seen.json` holds, by name, the Job, the pods that the API showed, those that were gone, the
Workload, warnings and whether hosts were ready, each at one moment of a recording; what no rule looks at is left out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from support.toy_attempts import toy_attempt, toy_spec

from headway.training.kubernetes.observe import Marker, NodeFacts, PodFact, Sight, pod_fact
from headway.training.kubernetes.platform import Platform, Queue, example
from trainer.events import Event

_FILE = Path(__file__).parents[1] / "cases" / "kubernetes" / "seen.json"
PLATFORM = example()
QUEUE = PLATFORM.model_copy(update={"queue": Queue(local_queue="team-a")})
S = 1_000_000


@cache
def _cases() -> dict[str, Any]:
    return json.loads(_FILE.read_text())


def seen(name: str, nodes: tuple[NodeFacts, ...] = (), *, hang_floor_s: float = 60.0, **more: Any) -> Sight:  # noqa: ANN401
    """The sight of a recorded attempt; nodes that are not told left nothing on the volume."""
    case = _cases()[name]
    count = case["job"]["spec"]["completions"]
    told = {facts.node: facts for facts in nodes}
    metadata = case["job"]["metadata"]
    pods = tuple(map(pod_fact, case["pods"]))
    moments = [pod.deleted_at or pod.finished_at or pod.created_at or 0 for pod in pods]
    sight = Sight(
        toy_attempt(Path("/headway/runs/default"), {}, nodes=count),
        toy_spec(count, hang_floor_s=hang_floor_s),
        max(moments, default=1_800_000_000 * S) + 30 * S,
        job=case["job"],
        marker=Marker(metadata["name"], metadata["namespace"], metadata["uid"], metadata["creationTimestamp"], True),
        pods=pods,
        remembered=tuple(map(pod_fact, case["gone"])),
        nodes=tuple(told.get(node, NodeFacts(node)) for node in range(count)),
        workload=case["workload"],
        events=case["events"],
        hosts=case["hosts"],
    )
    return replace(sight, **more)


def ended(node: int, code: int, cause: str = "", *, at: int = 1_000 * S, **more: Any) -> NodeFacts:  # noqa: ANN401
    """What a node left that wrote its final event."""
    data = {
        "code": code,
        "cause": cause or f"rank {node} exited with {code}",
        "cause_rank": node,
        "worker_seconds": 7.5,
        "cause_at": at,
        "consequence": False,
        "unasked": False,
        **more,
    }
    return NodeFacts(node, end=Event(9, node, at, "node_end", data), began_at=at - 10 * S, seen_at=at, silent_s=1.0)


def working(node: int, silent_s: float = 0.5, **more: Any) -> NodeFacts:  # noqa: ANN401
    """What a node left that works, and was heard of a moment ago."""
    return NodeFacts(node, began_at=1_000 * S, seen_at=1_020 * S, silent_s=silent_s, **more)


def running_pod(index: int, **more: Any) -> PodFact:  # noqa: ANN401
    """A pod that runs on a host of its own."""
    pod = PodFact(f"uid-{index}", f"pod-{index}", index, f"n{index}", "Running", created_at=900 * S, started_at=901 * S)
    return replace(pod, **more)


def platform_with(**changes: Any) -> Platform:  # noqa: ANN401
    """The profile with other values."""
    return PLATFORM.model_copy(update=changes)
