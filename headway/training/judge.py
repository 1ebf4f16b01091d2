"""How an attempt ended, told from how its nodes ended: which one's end is the cause, and which are consequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainer.events import Event, now_us
from trainer.spec import ExitCode

_ORDERLY = (ExitCode.DONE, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class NodeEnd:
    """How a node ended, or why all have to; `exit` is its status, negative for a signal, None when it has none.

    `unasked`: it ended with 75 though its node was not asked to stop and published no checkpoint. That is in order only
    where another node was asked.
    """

    node: int | None
    exit: int | None
    code: ExitCode
    cause: str
    rank: int | None = None
    at: int = field(default_factory=now_us)
    consequence: bool = False
    worker_seconds: float = 0.0
    unasked: bool = False


def said_end(node: int, status: int, event: Event | None) -> NodeEnd | None:
    """What the node's last event says of its end; None when it is no end, or not the one that `status` tells of."""
    if event is None or event.kind != "node_end" or event.data["code"] != status:
        return None
    said = event.data
    return NodeEnd(
        node,
        status,
        ExitCode(status),
        f"node {node}: {said['cause']}",
        said["cause_rank"],
        said["cause_at"],
        said["consequence"],
        said["worker_seconds"],
        # A trainer of an earlier day does not tell; it is believed.
        said.get("unasked", False),
    )


def bad_ends(ends: Sequence[NodeEnd]) -> list[NodeEnd]:
    """The ends that forbid the attempt to go on."""
    return [end for end in ends if end.code not in _ORDERLY]


def explained(ends: Sequence[NodeEnd]) -> bool:
    """Whether one of the bad ends is a cause of its own, so that there is no better explanation to wait for."""
    return any(not end.consequence for end in bad_ends(ends))


def judge(ends: Sequence[NodeEnd], *, stop_was_asked: bool) -> NodeEnd:
    """The end of an attempt none of whose nodes goes on: 0, 75, or the earliest bad end that is no consequence.

    Args:
        ends: one per node, at least one.
        stop_was_asked: whether somebody beside the nodes asked for the stop. A 75 that nobody asked for, and that saved
            nothing, would restart for ever: it counts as 65.
    """
    saved = [end for end in ends if end.code == ExitCode.PREEMPTED]
    if not (stop_was_asked or any(not end.unasked for end in saved)):
        ends = [replace(end, code=ExitCode.USER_CODE) if end.unasked else end for end in ends]
    if bad := bad_ends(ends):
        return min([end for end in bad if not end.consequence] or bad, key=lambda end: end.at)
    if saved:
        return min(saved, key=lambda end: end.at)
    return NodeEnd(None, 0, ExitCode.DONE, "done")
