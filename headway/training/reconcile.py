"""Brings the rows of training attempts and the processes of the world together, in both directions.

Level-triggered: it looks at what is, never at what happened, so it may run at any time, from several processes, and
again after it was killed. Every step is a command or an act that finds its own earlier effect. A state becomes terminal
here and nowhere else, and only by observation.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.catalog.errors import (
    AttemptsSpent,
    BudgetExhausted,
    BudgetMissing,
    InvalidFact,
    RunCancelled,
    RunRefused,
    StaleAttempt,
)
from headway.errors import HeadwayError
from headway.services import Services
from headway.training.attempt import attempt_spec
from headway.training.elastic import Ran, next_nodes
from headway.training.launch import AttemptRefused, KillFailed, Launcher, LauncherUnavailable, Observation, Waiting
from headway.training.reasons import ENDED, Retry, reason_of_exit
from headway.training.results import ArtifactInvalid, collect_result
from headway.training.stage import stage_code
from trainer.blobs import Json
from trainer.events import StreamBroken, one_line
from trainer.spec import ExitCode, RunSpec, layout_on, parse_run

if TYPE_CHECKING:
    from headway.catalog.run_facts import Attempt, RunResult, TrainingRun

AttemptEnd = Literal["succeeded", "failed", "cancelled", "lost"]

_LOST = ("lost", "node_lost")
_BATCH = 1_000
_BEAT_EVERY_US = 5_000_000
# How long after the ranks' own grace an attempt that was asked to stop may live before it is ended by force.
_CANCEL_MARGIN_S = 20.0


@dataclass(frozen=True)
class Verdict:
    """How an observed end is recorded: the state, the cause in words, and its code in `reasons.ENDED`."""

    state: AttemptEnd
    reason: str
    code: str

    @property
    def retry(self) -> Retry:
        """Whether another attempt may follow, and whether this one counts."""
        return ENDED[self.code].retry


@dataclass(frozen=True)
class Action:
    """One thing that reconciling did, or would do: `kind` and a sentence for people."""

    run_id: str
    attempt: int
    kind: Literal[
        "submit", "waiting", "running", "cancel", "finish", "restart", "give_up", "kill", "unavailable", "error"
    ]
    detail: str


def judge_end(observation: Observation, cancel_requested: bool, artifact_problem: str) -> Verdict:
    """Turn an observed end into a state. The exit code alone never decides: success needs an artifact that verifies."""
    if observation.code == ExitCode.DONE:
        if artifact_problem:
            return Verdict("failed", f"ended with 0, and {artifact_problem}", "artifact_invalid")
        return Verdict("succeeded", "done", "done")
    cause = observation.cause or "no cause was recorded"
    if cancel_requested and (observation.cancelled or observation.code is None):
        return Verdict("cancelled", cause, "cancelled")
    code = observation.reason_code or reason_of_exit(observation.code)
    return Verdict("lost" if code in _LOST else "failed", cause, code)


class Reconciler:
    """Reconciles attempts of one catalog with one launcher."""

    def __init__(self, services: Services, launcher: Launcher, *, dry_run: bool = False) -> None:
        self._services = services
        self._launcher = launcher
        self._dry_run = dry_run

    def all(self, within_s: float = math.inf) -> list[Action]:
        """Reconcile every open attempt, then end processes that belong to none; a run that cannot be stops no other.

        Args:
            within_s: after so many seconds nothing more is begun; what is left is for the next call. The order is drawn
                anew each time, so that the same ones are not left every time.
        """
        done: list[Action] = []
        deadline = time.monotonic() + within_s
        attempts = self._services.catalog.open_attempts(self._services.principal)
        if within_s < math.inf:
            random.shuffle(attempts)
        for looked_at, attempt in enumerate(attempts):
            if time.monotonic() > deadline:
                left = f"{len(attempts) - looked_at} attempts were not looked at within {within_s:g} s: the next time"
                return [*done, Action("", 0, "unavailable", left)]
            try:
                done += self.run(attempt.run_id)
            except (HeadwayError, OSError) as error:
                done.append(Action(attempt.run_id, attempt.attempt, "error", str(error)))
        try:
            for action in self._strays(deadline):
                done.append(action)
        except LauncherUnavailable as error:
            done.append(Action("", 0, "unavailable", str(error)))
        return done

    def run(self, run_id: str) -> list[Action]:
        """Reconcile the newest attempt of one run; where its launcher cannot be reached, nothing is concluded."""
        catalog, principal = self._services.catalog, self._services.principal
        run = catalog.run(principal, run_id)
        attempt = run.attempts[-1]
        if attempt.launcher != self._launcher.name or run.status != "open":
            return []
        done: list[Action] = []
        try:
            done.extend(self._attempt(run, attempt))
        except LauncherUnavailable as error:
            done.append(Action(run_id, attempt.attempt, "unavailable", str(error)))
            self._note_unseen(attempt, error)
        except KillFailed as error:
            # Ended further the next time; who follows the run goes on following it.
            done.append(Action(run_id, attempt.attempt, "error", str(error)))
        return done

    def _note_unseen(self, attempt: Attempt, error: LauncherUnavailable) -> None:
        """Show why an attempt does not run yet; the first words stand, since each call fails with others."""
        shown = (attempt.waiting or "").startswith("cluster_unreachable:")
        if self._dry_run or shown or attempt.state == "running":
            return
        who = (attempt.run_id, attempt.attempt, attempt.token)
        with suppress(StaleAttempt):
            message = one_line(error.message)
            self._services.catalog.note_waiting(self._services.principal, *who, "cluster_unreachable", message)

    def _attempt(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        if run.cancel_requested:
            yield from self._cancel(run, attempt)
        seen = self._launcher.observe(run.run_id, attempt.attempt)
        if seen.state == "absent":
            yield from self._absent(run, attempt, seen)
        elif seen.state == "ended":
            yield from self._ended(run, attempt, seen)
        elif problem := self._overdue(run, seen):
            yield from self._kill(attempt, problem)
        else:
            yield from self._alive(attempt, seen)

    def _overdue(self, run: TrainingRun, seen: Observation) -> str:
        """Why an attempt that lives has to be ended by force; "" when it has not."""
        if seen.supervisor_stuck:
            return "its supervisor stands still"
        if not run.cancel_requested:
            return ""
        catalog, principal = self._services.catalog, self._services.principal
        asked = catalog.run_events(principal, run.run_id, run.last.attempt, kinds=("cancel.requested",))
        waited = (catalog.clock() - max(event.at for event in asked)) / 1_000_000 if asked else 0.0
        limit = self.run_spec(run).restart.grace_s + _CANCEL_MARGIN_S
        return f"it was asked to stop {waited:.0f} s ago" if waited > limit else ""

    def _kill(self, attempt: Attempt, problem: str) -> Iterator[Action]:
        """End an attempt by force; its end is recorded when it is seen, the next time."""
        yield Action(attempt.run_id, attempt.attempt, "kill", problem)
        if not self._dry_run:
            self._launcher.kill(attempt.run_id, attempt.attempt)

    def _cancel(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        yield Action(run.run_id, attempt.attempt, "cancel", "cancellation was requested: asking the workers to stop")
        if not self._dry_run:
            self._launcher.cancel(run.run_id, attempt.attempt, "requested")

    def _absent(self, run: TrainingRun, attempt: Attempt, seen: Observation) -> Iterator[Action]:
        if run.cancel_requested:
            never = Verdict("cancelled", "cancelled before it started", "cancelled")
            yield from self._finish(run, attempt, never, seen, None)
            return
        if attempt.state == "running" and not (runs := self._launcher.run_dir(run.run_id).parent).is_dir():
            # An empty mount point says nothing about an attempt.
            raise LauncherUnavailable(f"{runs} is not there", "mount the volume of HEADWAY_HOME; nothing was concluded")
        if attempt.state == "running" and not seen.supervisor_alive:
            # It was there, and nothing that it wrote is: starting it again would run it twice.
            yield from self._kill(attempt, "its files are gone: ending what is left of it")
            yield from self._finish(run, attempt, Verdict("lost", "its files are gone", "lost"), seen, None)
            return
        yield Action(run.run_id, attempt.attempt, "submit", "the row is there and no process is: starting it")
        if not self._dry_run:
            yield from self._submit(run, attempt)

    def _submit(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        """Start an attempt; one that can never be started ends its run, instead of being tried again for ever."""
        try:
            self.submit(run, attempt)
        except AttemptRefused as refused:
            # A part of it may have been made before another part was refused.
            self._launcher.kill(run.run_id, attempt.attempt)
            words = "; ".join(refused.message.splitlines())
            verdict = Verdict("failed", f"the place where it should run refuses it: {words}", "refused_manifest")
            yield from self._finish(run, attempt, verdict, Observation("absent"), None)

    def submit(self, run: TrainingRun, attempt: Attempt) -> None:
        """Start an attempt whose row is committed; finds it when it was started before."""
        spec = self.run_spec(run)
        run_dir = self._launcher.run_dir(run.run_id)
        stage_code(self._services.store, spec.model.code_manifest, run_dir / "code")
        described = attempt_spec(
            spec,
            run.run_id,
            attempt.attempt,
            attempt.token,
            nodes=nodes_of(attempt),
            run_dir=run_dir,
            store_root=self._services.store.root,
            accelerator=self._launcher.accelerator,
        )
        self._launcher.submit(described, spec)

    def run_spec(self, run: TrainingRun) -> RunSpec:
        """The stored run spec, read back by its digest."""
        return parse_run(self._services.store.get_bytes(run.facts.spec_digest))

    def _alive(self, attempt: Attempt, seen: Observation) -> Iterator[Action]:
        if self._dry_run:
            return
        problem = self._keep_events(attempt)
        if problem:
            # What such an attempt reports can no longer be told from what was lost: it is ended, and another follows.
            yield from self._kill(attempt, problem)
            return
        waiting = seen.waiting if seen.state == "starting" else None
        if waiting is not None and attempt.waiting != f"{waiting.code}: {waiting.message}":
            yield Action(attempt.run_id, attempt.attempt, "waiting", f"{waiting.code}: {waiting.message}")
        elif waiting is None and attempt.state != "running":
            yield Action(attempt.run_id, attempt.attempt, "running", "its processes are there")
        try:
            self._note_alive(attempt, waiting)
        except StaleAttempt:
            # Another reconciler saw its end meanwhile; what it recorded stands.
            return

    def _note_alive(self, attempt: Attempt, waiting: Waiting | None) -> None:
        catalog, principal = self._services.catalog, self._services.principal
        who = (attempt.run_id, attempt.attempt, attempt.token)
        if waiting is not None and attempt.waiting != f"{waiting.code}: {waiting.message}":
            catalog.note_waiting(principal, *who, waiting.code, waiting.message)
        elif waiting is None and attempt.state != "running":
            catalog.mark_running(principal, None, *who)
        now = catalog.clock()
        if attempt.heartbeat_at is None or now - attempt.heartbeat_at >= _BEAT_EVERY_US:
            catalog.beat(principal, *who, now)

    def _ended(self, run: TrainingRun, attempt: Attempt, seen: Observation) -> Iterator[Action]:
        result: RunResult | None = None
        if seen.code is None and not self._dry_run:
            # Its keeper is gone; whatever it kept has a few milliseconds left, and must not meet the next attempt.
            self._launcher.kill(run.run_id, attempt.attempt)
        problem = self._keep_events(attempt)
        if seen.code == ExitCode.DONE and not problem and not self._dry_run:
            try:
                result = collect_result(self._services, self._launcher, run, attempt.attempt)
            except ArtifactInvalid as error:
                problem = str(error)
        yield from self._finish(run, attempt, judge_end(seen, run.cancel_requested, problem), seen, result)

    def _finish(
        self, run: TrainingRun, attempt: Attempt, verdict: Verdict, seen: Observation, result: RunResult | None
    ) -> Iterator[Action]:
        unverified = self._dry_run and verdict.state == "succeeded"
        told = (
            "it ended with 0; its artifacts would be verified" if unverified else f"{verdict.state}: {verdict.reason}"
        )
        yield Action(run.run_id, attempt.attempt, "finish", told)
        if self._dry_run:
            return
        _carry_budget(self._services, run)
        catalog, principal = self._services.catalog, self._services.principal
        try:
            finished = catalog.finish_attempt(
                principal,
                None,
                run.run_id,
                attempt.attempt,
                attempt.token,
                state=verdict.state,
                reason=one_line(verdict.reason),
                code=seen.code,
                worker_seconds=seen.worker_seconds,
                result=result if verdict.state == "succeeded" else None,
                restart=verdict.retry != "never",
                reason_code=verdict.code,
                retry=verdict.retry,
                next_layout=self._next_layout(run, verdict.code) if verdict.retry != "never" else None,
            )
        except StaleAttempt:
            # Another reconciler recorded this end and went on; what it recorded stands.
            return
        # Committed: what was kept as evidence may go. Should this fail, the sweep over strays does it.
        self._launcher.release(run.run_id, attempt.attempt)
        if verdict.retry != "never":
            yield from self._follow_up(finished, attempt)

    def _next_layout(self, run: TrainingRun, reason_code: str) -> Mapping[str, Json] | None:
        """The layout of the attempt that follows one which ended by `reason_code`; None: the run is not elastic."""
        spec = self.run_spec(run)
        if not spec.layout.min_nodes:
            return None
        history = [Ran(nodes_of(a), a.reason_code or "") for a in run.attempts]
        history[-1] = Ran(history[-1].nodes, reason_code)
        nodes = next_nodes(spec.possible_nodes(), history, self._launcher.capacity())
        return layout_on(spec.layout, nodes).to_json()

    def _follow_up(self, run: TrainingRun, ended: Attempt) -> Iterator[Action]:
        """Start the attempt that was committed together with the end, or say what forbade one."""
        if run.status == "open":
            before, now = nodes_of(ended), nodes_of(run.last)
            changed = f" on {now} nodes instead of {before}" if now != before else ""
            yield Action(run.run_id, run.last.attempt, "restart", f"attempt {run.last.attempt} follows{changed}")
            yield from self._submit(run, run.last)
            return
        try:
            self._services.catalog.restart_run(
                self._services.principal,
                None,
                run.run_id,
                reserve_seconds=_reserved(self._services, run),
                layout=self._next_layout(run, ended.reason_code or ""),
            )
        except (AttemptsSpent, BudgetExhausted, BudgetMissing, RunCancelled, RunRefused) as error:
            yield Action(run.run_id, ended.attempt, "give_up", error.message)

    def _keep_events(self, attempt: Attempt) -> str:
        """Move the nodes' events into the catalog; return what is wrong with a stream that lost some."""
        for node in () if self._dry_run else range(nodes_of(attempt)):
            try:
                _keep(self._services, self._launcher, attempt, node)
            except (StreamBroken, InvalidFact) as error:
                return f"its event stream is broken: {error}"
        return ""

    def _strays(self, deadline: float) -> Iterator[Action]:
        """Processes of an attempt that is over or superseded: what nobody will ever observe again.

        Those of a run that this catalog does not know are named and left alone: another catalog may know them.
        """
        catalog, principal = self._services.catalog, self._services.principal
        # Processes first: an attempt that is submitted meanwhile must not look as if it had no row.
        living = sorted({(run_id, attempt) for run_id, attempt, _ in self._launcher.strays()})
        open_now = {(a.run_id, a.attempt) for a in catalog.open_attempts(principal)}
        for run_id, attempt in living:
            if (run_id, attempt) in open_now:
                continue
            if run_id not in catalog.run_ids(principal, run_id):
                unknown = "its processes belong to no run of this catalog: look whose they are, then end them by hand"
                yield Action(run_id, attempt, "error", unknown)
                continue
            if time.monotonic() > deadline:
                return
            yield Action(run_id, attempt, "kill", "its processes live on after its end: ending them")
            if not self._dry_run:
                yield from self._end_stray(run_id, attempt)

    def _end_stray(self, run_id: str, attempt: int) -> Iterator[Action]:
        """End what lives on of an attempt; where that fails, the others are ended all the same."""
        try:
            self._launcher.kill(run_id, attempt)
        except LauncherUnavailable:
            raise
        except (HeadwayError, OSError) as error:
            yield Action(run_id, attempt, "error", str(error))


def _keep(services: Services, launcher: Launcher, attempt: Attempt, node: int) -> None:
    """Move what one node's stream holds beyond the stored cursor into the catalog."""
    catalog, principal = services.catalog, services.principal
    after = catalog.event_cursor(principal, attempt.run_id, attempt.attempt, node)
    while events := launcher.stream(attempt.run_id, attempt.attempt, node, after, _BATCH):
        documents = [{"kind": e.kind, "data": e.data, "at": e.at} for e in events]
        catalog.append_events(principal, attempt.run_id, attempt.attempt, node, events[0].seq, documents)
        after = events[-1].seq


def _carry_budget(services: Services, run: TrainingRun) -> None:
    """Give a new month the amount of the month in which the run's newest attempt was paid for."""
    from headway.catalog.budgets import period_of

    catalog, principal, budget_id = services.catalog, services.principal, run.facts.budget_id
    now = period_of(catalog.clock())
    if budget_id is not None and catalog.budget(principal, budget_id, now) is None:
        before = catalog.budget(principal, budget_id, period_of(run.last.created_at))
        if before is not None:
            catalog.set_budget(principal, None, budget_id, now, before.unit, before.limit)


def _reserved(services: Services, run: TrainingRun) -> int:
    """What the newest attempt reserved: the next one may cost as much."""
    from headway.catalog.budgets import period_of

    if run.facts.budget_id is None:
        return 0
    period = period_of(run.last.created_at)
    entries = services.catalog.budget_entries(services.principal, run.facts.budget_id, period)
    mine = [e.amount for e in entries if e.kind == "reserve" and e.owner_id == run.last.external_name]
    return mine[-1] if mine else 0


def nodes_of(attempt: Attempt) -> int:
    """The nodes that an attempt was given: of an elastic run, not always those of its spec."""
    nodes = attempt.layout.get("nodes")
    assert isinstance(nodes, int)
    return nodes
