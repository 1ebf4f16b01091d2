"""Brings the rows of training attempts and the processes of the world together, in both directions.

Level-triggered: it looks at what is, never at what happened, so it may run at any time, from several processes, and
again after it was killed. Every step is a command or an act that finds its own earlier effect. A state becomes terminal
here and nowhere else, and only by observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.catalog.errors import AttemptsSpent, BudgetExhausted, RunCancelled, RunRefused, StaleAttempt
from headway.services import Services
from headway.training.launch import Launcher, Observation
from headway.training.results import ArtifactInvalid, collect_result
from headway.training.stage import stage_code
from trainer.events import StreamBroken
from trainer.spec import AttemptSpec, ExitCode, RunSpec, parse_run

if TYPE_CHECKING:
    from headway.catalog.run_facts import Attempt, RunResult, TrainingRun

AttemptEnd = Literal["succeeded", "failed", "cancelled", "lost"]

_BY_CODE = (ExitCode.REFUSED_SPEC, ExitCode.USER_CODE)
_BATCH = 1_000
_BEAT_EVERY_US = 5_000_000


@dataclass(frozen=True)
class Verdict:
    """How an observed end is recorded, and whether infrastructure was to blame, so that another attempt may follow."""

    state: AttemptEnd
    reason: str
    infrastructure: bool


@dataclass(frozen=True)
class Action:
    """One thing that reconciling did, or would do: `kind` and a sentence for people."""

    run_id: str
    attempt: int
    kind: Literal["submit", "running", "cancel", "finish", "restart", "give_up", "kill"]
    detail: str


def judge_end(observation: Observation, cancel_requested: bool, artifact_problem: str) -> Verdict:
    """Turn an observed end into a state. The exit code alone never decides: success needs an artifact that verifies."""
    if observation.code == ExitCode.DONE:
        if artifact_problem:
            return Verdict("failed", f"ended with 0, and {artifact_problem}", infrastructure=True)
        return Verdict("succeeded", "done", infrastructure=False)
    cause = observation.cause or "no cause was recorded"
    if cancel_requested and (observation.cancelled or observation.code is None):
        return Verdict("cancelled", cause, infrastructure=False)
    if observation.code is None:
        return Verdict("lost", cause, infrastructure=True)
    return Verdict("failed", cause, infrastructure=observation.code not in _BY_CODE)


class Reconciler:
    """Reconciles attempts of one catalog with one launcher."""

    def __init__(self, services: Services, launcher: Launcher, *, dry_run: bool = False) -> None:
        self._services = services
        self._launcher = launcher
        self._dry_run = dry_run

    def all(self) -> list[Action]:
        """Reconcile every open attempt, then end processes that belong to none."""
        done: list[Action] = []
        for attempt in self._services.catalog.open_attempts(self._services.principal):
            done += self.run(attempt.run_id)
        return done + list(self._strays())

    def run(self, run_id: str) -> list[Action]:
        """Reconcile the newest attempt of one run."""
        catalog, principal = self._services.catalog, self._services.principal
        run = catalog.run(principal, run_id)
        attempt = run.attempts[-1]
        if attempt.launcher != self._launcher.name or run.status != "open":
            return []
        return list(self._attempt(run, attempt))

    def _attempt(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        if run.cancel_requested:
            yield from self._cancel(run, attempt)
        seen = self._launcher.observe(run.run_id, attempt.attempt)
        if seen.state == "absent":
            yield from self._absent(run, attempt, seen)
        elif seen.state == "ended":
            yield from self._ended(run, attempt, seen)
        else:
            yield from self._alive(attempt)

    def _cancel(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        yield Action(run.run_id, attempt.attempt, "cancel", "cancellation was requested: asking the workers to stop")
        if not self._dry_run:
            self._launcher.cancel(run.run_id, attempt.attempt, "requested")

    def _absent(self, run: TrainingRun, attempt: Attempt, seen: Observation) -> Iterator[Action]:
        if run.cancel_requested:
            yield from self._finish(
                run, attempt, Verdict("cancelled", "cancelled before it started", False), seen, None
            )
            return
        yield Action(run.run_id, attempt.attempt, "submit", "the row is there and no process is: starting it")
        if not self._dry_run:
            self.submit(run, attempt)

    def submit(self, run: TrainingRun, attempt: Attempt) -> None:
        """Start an attempt whose row is committed; finds it when it was started before."""
        spec = self.run_spec(run)
        run_dir = self._launcher.run_dir(run.run_id)
        stage_code(self._services.store, spec.model.code_manifest, run_dir / "code")
        self._launcher.submit(
            AttemptSpec(
                run_id=run.run_id,
                attempt=attempt.attempt,
                token=attempt.token,
                nodes=spec.layout.nodes,
                processes_per_node=spec.layout.processes_per_node,
                run_dir=str(run_dir),
                store_root=str(self._services.store.root),
                code_root=str(run_dir / "code"),
                environment={
                    "OMP_NUM_THREADS": str(spec.threads),
                    "DS_ACCELERATOR": "cpu",
                    # Workers import the run's own copy of the code, whatever the tree holds by then.
                    "PYTHONPATH": str(run_dir / "code"),
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            ),
            spec,
        )

    def run_spec(self, run: TrainingRun) -> RunSpec:
        """The stored run spec, read back by its digest."""
        return parse_run(self._services.store.get_bytes(run.facts.spec_digest))

    def _alive(self, attempt: Attempt) -> Iterator[Action]:
        if self._dry_run:
            return
        problem = self._keep_events(attempt)
        if problem:
            # What such an attempt reports can no longer be told from what was lost: it is ended, and another follows.
            yield Action(attempt.run_id, attempt.attempt, "kill", problem)
            self._launcher.kill(attempt.run_id, attempt.attempt)
            return
        catalog, principal = self._services.catalog, self._services.principal
        if attempt.state != "running":
            yield Action(attempt.run_id, attempt.attempt, "running", "its processes are there")
            catalog.mark_running(principal, None, attempt.run_id, attempt.attempt, attempt.token)
        now = catalog.clock()
        if attempt.heartbeat_at is None or now - attempt.heartbeat_at >= _BEAT_EVERY_US:
            catalog.beat(principal, attempt.run_id, attempt.attempt, attempt.token, now)

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
        yield Action(run.run_id, attempt.attempt, "finish", f"{verdict.state}: {verdict.reason}")
        if self._dry_run:
            return
        catalog, principal = self._services.catalog, self._services.principal
        try:
            catalog.finish_attempt(
                principal,
                None,
                run.run_id,
                attempt.attempt,
                attempt.token,
                state=verdict.state,
                reason=verdict.reason,
                code=seen.code,
                worker_seconds=seen.worker_seconds,
                result=result if verdict.state == "succeeded" else None,
            )
        except StaleAttempt:
            # Another reconciler recorded this end and went on; what it recorded stands.
            return
        if verdict.infrastructure and not run.cancel_requested:
            yield from self._restart(run, attempt)

    def _restart(self, run: TrainingRun, attempt: Attempt) -> Iterator[Action]:
        catalog, principal = self._services.catalog, self._services.principal
        _carry_budget(self._services, run)
        try:
            asked = catalog.restart_run(principal, None, run.run_id, reserve_seconds=_reserved(self._services, run))
        except (AttemptsSpent, BudgetExhausted, RunCancelled, RunRefused) as error:
            yield Action(run.run_id, attempt.attempt, "give_up", error.message)
            return
        if asked.attempt is not None and asked.decision != "up_to_date":
            following = asked.attempt
            yield Action(run.run_id, following.attempt, "restart", f"attempt {following.attempt} follows")
            self.submit(asked.run, following)

    def _keep_events(self, attempt: Attempt) -> str:
        """Move the nodes' events into the catalog; return what is wrong with a stream that lost some."""
        for node in () if self._dry_run else range(_nodes(attempt)):
            try:
                _keep(self._services, self._launcher, attempt, node)
            except StreamBroken as error:
                return f"its event stream is broken: {error}"
        return ""

    def _strays(self) -> Iterator[Action]:
        """Processes of an attempt that is over, superseded or unknown: what nobody will ever observe again."""
        catalog, principal = self._services.catalog, self._services.principal
        open_now = {(a.run_id, a.attempt) for a in catalog.open_attempts(principal)}
        for run_id, attempt in sorted({(r, a) for r, a, _ in self._launcher.strays()} - open_now):
            yield Action(run_id, attempt, "kill", "its processes live on after its end: ending them")
            if not self._dry_run:
                self._launcher.kill(run_id, attempt)


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


def _nodes(attempt: Attempt) -> int:
    nodes = attempt.layout.get("nodes")
    assert isinstance(nodes, int)
    return nodes
