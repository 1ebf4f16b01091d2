"""Plays recorded events through a running server: asks at their time, reports outcomes when they come in.

The clock of the world is moved from event to event; nothing sleeps. The online store is brought up to a request's time
first, unless it was within ten minutes before: a window of an hour would otherwise miss much of its hour.

Called again it goes on from where the clock stands: events until then are done, outcomes that were still to be reported
are reported by the caller's id.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.catalog.clock import utc_text
from headway.datasets.zones import DAY_US
from headway.declaration import duration_us
from headway.home import Settings
from headway.loading import Pipeline
from headway.monitoring.windows import week_bounds, week_key
from headway.replay.client import Reply, ServingClient
from headway.replay.events import Asked, Outcome, ReportDelay, events_of, partitions_between, stops_between
from headway.services import Services
from headway.world import move_clock

if TYPE_CHECKING:
    from headway.features.online.store import OnlineStore
    from trainer.blobs import Json

_LABELS_AT_ONCE = 500
_ONLINE_EVERY = 600_000_000
# Of the error table: what may be asked once more at once.
_RETRIED = (503, 504)


@dataclass(frozen=True)
class Disturbance:
    """Something that goes wrong with a source between two instants (microseconds UTC).

    `held` sources are not brought online meanwhile. `begin` and `finish` run when the clock passes `start` and `end`.
    """

    name: str
    start: int
    end: int
    held: frozenset[str] = frozenset()
    begin: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None


@dataclass
class FeedCount:
    """What a feed did: last answers by HTTP status, requests sent twice, degraded and refused codes, label results."""

    answers: Counter[int] = field(default_factory=Counter[int])
    degraded: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    labels: Counter[str] = field(default_factory=Counter[str])
    retried: int = 0
    syncs: int = 0

    @property
    def requests(self) -> int:
        """Requests that were sent."""
        return sum(self.answers.values())


@dataclass
class Feed:
    """A replay of one pipeline's events against one server.

    `per_day` events of each partition of the label source are asked. `on_day` and `on_week` are called when the clock
    has passed the end of a day (its end in microseconds) or of a week (its key).
    """

    settings: Settings
    services: Services
    pipeline: Pipeline
    online: OnlineStore
    client: ServingClient
    per_day: int
    delay: ReportDelay = field(default_factory=ReportDelay)
    disturbances: Sequence[Disturbance] = ()
    on_day: Callable[[int], None] | None = None
    on_week: Callable[[str], None] | None = None
    count: FeedCount = field(default_factory=FeedCount)
    _reports: list[tuple[int, str, Outcome]] = field(default_factory=list[tuple[int, str, Outcome]], init=False)
    _online_at: int | None = field(default=None, init=False)

    def run(self, until: int) -> FeedCount:
        """Play everything between the clock's time and `until` (microseconds UTC).

        Raises:
            ClockMovesBack: the clock stands later already.
            ServerUnusable: the server went away.
            NotReplayable: the declaration does not say what a request held.
        """
        start = self.services.world()
        asked = self._events(start, until)
        before = start
        for stop in stops_between(start, until):
            self._disturb(before, stop)
            while asked and asked[-1].at < stop:
                self._ask(asked.pop())
            move_clock(self.settings.clock_file, stop)
            self._report(stop)
            self._close_periods(stop)
            before = stop
        self._bring_online(until)
        return self.count

    def _events(self, start: int, until: int) -> list[Asked]:
        """What is to be asked, last first; what is still to be reported of earlier answers waits in a heap."""
        monitoring = self.pipeline.spec.monitoring
        back = duration_us(monitoring.labels.expected_within) if monitoring is not None else 7 * DAY_US
        answered = self._answered(start - back, start)
        asked: list[Asked] = []
        for partition in partitions_between(self.pipeline.spec, start - back, until):
            for event in events_of(self.services, self.pipeline, partition, self.per_day, self.delay):
                if start <= event.at < until:
                    asked.append(event)
                elif event.caller_id in answered and event.outcome is not None and event.outcome.reported_at > start:
                    self._reports.append((event.outcome.reported_at, event.caller_id, event.outcome))
        asked.sort(key=lambda e: (e.at, e.caller_id), reverse=True)
        heapq.heapify(self._reports)
        return asked

    def _answered(self, start: int, end: int) -> set[str]:
        """Ids of the events that an earlier feed asked between two instants, as far as they are shipped."""
        catalog, principal = self.services.catalog, self.services.principal
        found: set[str] = set()
        after = ""
        while page := catalog.predictions(principal, self.pipeline.name, start, end, after=after):
            found |= {p.caller_id for p in page if p.caller_id is not None}
            after = page[-1].prediction_id
        return found

    def _disturb(self, start: int, end: int) -> None:
        for disturbance in self.disturbances:
            if start <= disturbance.start < end and disturbance.begin is not None:
                disturbance.begin()
            if start <= disturbance.end < end and disturbance.finish is not None:
                disturbance.finish()

    def _bring_online(self, moment: int) -> None:
        from headway.features.online.sync import sync_online

        held = {s for d in self.disturbances if d.start <= moment < d.end for s in d.held}
        sync_online(self.services, self.pipeline, self.online, until=moment, hold=held)
        self._online_at = moment
        self.count.syncs += 1

    def _ask(self, event: Asked) -> None:
        move_clock(self.settings.clock_file, event.at)
        if self._online_at is None or event.at - self._online_at >= _ONLINE_EVERY:
            self._bring_online(event.at)
        ask = lambda: self.client.infer(self.pipeline.spec, self.pipeline.name, event.caller_id, event.request)  # noqa: E731
        reply = ask()
        if reply.status in _RETRIED:
            self.count.retried += 1
            reply = ask()
        self.count.answers[reply.status] += 1
        if reply.status != 200:
            self.count.refused[str(reply.body.get("code", reply.status))] += 1
        self.count.degraded.update(degraded_codes(reply))
        if event.outcome is not None:
            heapq.heappush(self._reports, (event.outcome.reported_at, event.caller_id, event.outcome))

    def _report(self, now: int) -> None:
        """Report the outcomes that have come in by now."""
        due: list[dict[str, Json]] = []
        while self._reports and self._reports[0][0] <= now:
            _, caller_id, outcome = heapq.heappop(self._reports)
            due.append(
                {
                    "id": caller_id,
                    "value": outcome.value,
                    "observed_at": utc_text(outcome.known_at).replace("+00:00", "Z"),
                    "source_id": caller_id,
                }
            )
        for first in range(0, len(due), _LABELS_AT_ONCE):
            reply = self.client.labels(self.pipeline.name, due[first : first + _LABELS_AT_ONCE])
            results: list[dict[str, Any]] = reply.body.get("results", [])
            self.count.labels.update(str(r.get("status")) for r in results)
            if reply.status != 200:
                self.count.labels[f"http_{reply.status}"] += len(due)

    def _close_periods(self, stop: int) -> None:
        if stop % DAY_US == 0 and self.on_day is not None:
            self.on_day(stop)
        week = week_key(stop - 1)
        if week_bounds(week)[1] == stop and self.on_week is not None:
            self.on_week(week)


def degraded_codes(reply: Reply) -> set[str]:
    """The codes that an answer, or any of its rows, carries."""
    told: Any = reply.body.get("parameters", {}).get("degraded", [])
    return {str(c) for row in told for c in (row if isinstance(row, list) else [row])}
