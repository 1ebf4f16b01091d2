"""What each restart of a run cost: steps that were taken twice, and seconds by phase, as the events tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.services import Services
from trainer.blobs import Json

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

_PAGE = 1_000
_KINDS = ("step", "phase", "position", "node_start", "node_end", "attempt.finished")

PHASES = ("notice", "launch", "imports", "data", "group", "first_step")
"""From the last step that was told to the attempt's end; to the new node; to its data; to the group; to training; to
the first new step that was told."""


@dataclass(frozen=True)
class Restart:
    """One attempt after the first.

    `reached` is the last step that the attempt before told of, `resumed` the one that this attempt went on from; None
    where nothing was told. `seconds` holds the phases of `PHASES` whose both ends were told, by the nodes' clocks.
    """

    attempt: int
    after: str
    reached: int | None
    resumed: int | None
    seconds: dict[str, float]

    @property
    def lost_steps(self) -> int | None:
        """Steps taken twice, at least: what was taken after the last told step is not counted."""
        if self.reached is None or self.resumed is None:
            return None
        return max(0, self.reached - self.resumed)

    def to_json(self) -> dict[str, Json]:
        """The restart as JSON, seconds rounded."""
        return {
            "attempt": self.attempt,
            "after": self.after,
            "lost_steps": self.lost_steps,
            "from_step": self.resumed,
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }


def restarts(services: Services, run: TrainingRun) -> list[Restart]:
    """Every restart of a run so far."""
    told = list(_events(services, run))
    found: list[Restart] = []
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        old = [event for event in told if event.attempt == before.attempt]
        new = [event for event in told if event.attempt == after.attempt]
        reached = [step for event in old if event.kind == "step" and isinstance(step := event.data.get("step"), int)]
        resumed = [
            step for event in new if event.kind == "position" and isinstance(step := event.data.get("step"), int)
        ]
        why = before.reason_code or before.reason or before.state
        found.append(
            Restart(after.attempt, why, max(reached, default=None), min(resumed, default=None), _seconds(old, new))
        )
    return found


def _events(services: Services, run: TrainingRun) -> Iterator[RunEvent]:
    after = 0
    while page := services.catalog.run_events(services.principal, run.run_id, after=after, limit=_PAGE, kinds=_KINDS):
        yield from page
        after = page[-1].seq


def _seconds(old: Sequence[RunEvent], new: Sequence[RunEvent]) -> dict[str, float]:
    """The moments between which the phases lie; a phase is told when both of its ends are."""
    moments = [
        _last(old, "step"),
        _last(old, "attempt.finished"),
        _first(new, "node_start"),
        _first(new, "phase", "data"),
        _first(new, "phase", "group"),
        _first(new, "phase", "train"),
        _first(new, "step"),
    ]
    spans = zip(PHASES, moments, moments[1:], strict=False)
    return {name: (b - a) / 1e6 for name, a, b in spans if a is not None and b is not None}


def _first(events: Sequence[RunEvent], kind: str, name: str = "") -> int | None:
    return next((e.at for e in events if e.kind == kind and (not name or e.data.get("name") == name)), None)


def _last(events: Sequence[RunEvent], kind: str) -> int | None:
    return _first(list(reversed(events)), kind)
