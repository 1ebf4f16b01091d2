"""Validation losses by how long a run had trained when they were judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.services import Services

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

_PAGE = 1_000
_KINDS = ("phase", "step", "epoch")


@dataclass(frozen=True)
class Judged:
    """One validation: after how many minutes of training, after which step (None: not told), and its mean loss."""

    minute: float
    step: int | None
    valid_loss: float


def judged_losses(services: Services, run: TrainingRun) -> list[Judged]:
    """The validations of a run in their order; see `timed`."""
    events: list[RunEvent] = []
    after = 0
    while page := services.catalog.run_events(services.principal, run.run_id, after=after, limit=_PAGE, kinds=_KINDS):
        events += page
        after = page[-1].seq
    return timed(events)


def timed(events: Iterable[RunEvent]) -> list[Judged]:
    """The validations among the events of a run.

    The clock of an attempt begins with its phase `train` and goes on from where the attempt before it last told of a
    step: what lay between them, and all that came before the first, is not training. It counts wall time, validation
    and saves included. Of an epoch that ran again, by another attempt, both are told.
    """
    found: list[Judged] = []
    began: dict[int, int] = {}
    before = spent = 0.0
    last: int | None = None
    for event in events:
        if event.attempt is None:
            continue
        if event.kind == "phase":
            if event.data.get("name") == "train" and event.attempt not in began:
                began[event.attempt], before = event.at, before + spent
                spent = 0.0
            continue
        last = event.attempt
        if last in began:
            spent = (event.at - began[last]) / 60e6
        loss, step = event.data.get("valid_loss"), event.data.get("step")
        if event.kind == "epoch" and isinstance(loss, int | float):
            found.append(Judged(before + spent, step if isinstance(step, int) else None, float(loss)))
    return found
