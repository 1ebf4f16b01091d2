"""How long a collective may take, from how long steps take, and which rank holds the others up.

A collective's timeout is all that notices a peer that is silent without being dead. It begins as
`restart.group_timeout_s`; once the attempt has taken `MEASURED_STEPS` steps, it is `restart.group_timeout_factor` times
the slowest of them on any rank, what was saved and judged between them included, and never less than it began with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trainer.blobs import Json
from trainer.checkpoint import Sink
from trainer.process_group import Group
from trainer.spec import RestartSpec

MEASURED_STEPS = 8
SLOW_FACTOR = 1.5
"""How many times as long as the others a rank is busy before it is told of."""

SLOW_LOOKS = 2
"""For how many looks in a row."""


class Pace:
    """Measures the first steps of an attempt, then sets the timeout of its collectives; all ranks do so together."""

    def __init__(
        self, group: Group, sink: Sink, policy: RestartSpec, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`now` gives seconds from any origin."""
        self._group = group
        self._sink = sink
        self._policy = policy
        self._now = now
        self._since: float | None = None
        self._slowest_s = 0.0
        self._left = MEASURED_STEPS

    def step_done(self) -> None:
        """Note that a step ended. The first one only starts the clock: it pays for what is made once.

        Raises:
            PeerLost: a rank did not come to the agreement about the slowest step.
        """
        if self._left == 0:
            return
        now = self._now()
        if self._since is not None:
            self._slowest_s = max(self._slowest_s, now - self._since)
            self._left -= 1
        self._since = now
        if self._left == 0:
            self._derive()

    def _derive(self) -> None:
        slowest = cast("float", self._group.agree("pace", self._slowest_s, lambda told: max(cast("list[float]", told))))
        seconds = max(self._policy.group_timeout_s, self._policy.group_timeout_factor * slowest)
        self._group.allow(seconds)
        if self._group.rank == 0:
            told: dict[str, Json] = {
                "seconds": seconds,
                "slowest_step_s": slowest,
                "factor": self._policy.group_timeout_factor,
                "floor_s": self._policy.group_timeout_s,
            }
            self._sink.emit("collective_timeout", told)


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for: busy seconds per step, its own and the median of the others."""

    rank: int
    busy_s: float
    others_s: float


def slow_rank(reports: Sequence[Mapping[str, Any]]) -> Slow | None:
    """The rank that is busy `SLOW_FACTOR` times as long as the others; None when there is none.

    Args:
        reports: `rank` and `busy_s` of each rank, see `trainer.watch`.
    """
    if len(reports) < 2:
        return None
    first = max(reports, key=lambda report: (report["busy_s"], -report["rank"]))
    others = statistics.median(report["busy_s"] for report in reports if report["rank"] != first["rank"])
    if first["busy_s"] <= SLOW_FACTOR * others:
        return None
    return Slow(first["rank"], first["busy_s"], others)


class Stragglers:
    """Tells of a rank once it was slow for `SLOW_LOOKS` looks in a row, and again only when it was not in between."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rank: int | None = None
        self._looks = 0

    def look(self, step: int, reports: Sequence[Mapping[str, Any]]) -> None:
        """Look at one report of each rank; nobody is ended for being slow."""
        slow = slow_rank(reports)
        rank = slow.rank if slow is not None else None
        self._looks = self._looks + 1 if rank == self._rank else 1
        self._rank = rank
        if slow is not None and self._looks == SLOW_LOOKS:
            told: dict[str, Json] = {"busy_s": slow.busy_s, "others_s": slow.others_s, "factor": SLOW_FACTOR}
            self._sink.emit("straggler", {"rank": slow.rank, "step": step, **told})
