"""Follows a run to its end: reconciles it, and hands on what its nodes report, from where the last follower stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.services import Services
from headway.training.launch import Launcher
from headway.training.reconcile import Action, Reconciler

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

_POLL_S = 0.3
# While the launcher cannot be reached: it is asked more and more seldom, and told of once.
_AWAY_MOST_S = 10.0
_PAGE = 500


@dataclass(frozen=True)
class Follower:
    """What a follower is told: each event once, in the order of the catalog, and each act of the reconciler.

    Of a launcher that cannot be reached it is told once, until the launcher answers again.
    """

    on_event: Callable[[RunEvent], None]
    on_action: Callable[[Action], None]


def follow(services: Services, launcher: Launcher, run_id: str, follower: Follower, after: int = 0) -> TrainingRun:
    """Follow until the run is not open any more; return the run as it stands then.

    Args:
        services: catalog, store and principal.
        launcher: where the attempts run.
        run_id: the run.
        follower: who is told.
        after: number of the last event that was told already.
    """
    reconciler = Reconciler(services, launcher)
    catalog, principal = services.catalog, services.principal
    pause = _POLL_S
    while True:
        actions = reconciler.run(run_id)
        away = any(action.kind == "unavailable" for action in actions)
        for action in actions:
            if action.kind != "unavailable" or pause == _POLL_S:
                follower.on_action(action)
        pause = min(2 * pause, _AWAY_MOST_S) if away else _POLL_S
        while page := catalog.run_events(principal, run_id, after=after, limit=_PAGE):
            for event in page:
                follower.on_event(event)
            after = page[-1].seq
        run = catalog.run(principal, run_id)
        if run.status != "open":
            return run
        time.sleep(pause)
