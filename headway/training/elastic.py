"""On how many nodes the next attempt of an elastic run starts: a pure rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEVER_STARTED = "never_started"


@dataclass(frozen=True)
class Ran:
    """What one attempt tells the next: the nodes that it was given, and the code of its end in `reasons.ENDED`."""

    nodes: int
    reason_code: str


def next_nodes(possible: Sequence[int], history: Sequence[Ran], capacity: int | None) -> int:
    """The nodes of the next attempt.

    The first attempt takes the most. A later one takes the most that `capacity` carries. Where nobody knows the
    capacity, as in a cluster whose scheduler decides, it takes as many as the attempt before, and fewer after one that
    waited in vain for its place. Where even the fewest do not fit, they are asked for all the same, and wait.

    Args:
        possible: numbers of nodes that the run may have, ascending, at least one.
        history: the attempts so far, oldest first.
        capacity: nodes that can be had now; None: not known.
    """
    if not history:
        return possible[-1]
    last = history[-1]
    if capacity is None:
        capacity = last.nodes - 1 if last.reason_code == NEVER_STARTED else last.nodes
    return max((nodes for nodes in possible if nodes <= capacity), default=possible[0])
