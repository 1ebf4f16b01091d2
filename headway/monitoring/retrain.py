"""Carries out the retraining decision: gathers its facts, opens and moves the request, follows the run, promotes.

The request's row is the truth, the scheduler (Dagster) only runs what it says. Every step commits first and acts after,
and each act has a name that follows from the row, so that a tick may die anywhere and a hundred may run at once: they
find one request, ask under one run key, and move it by its epoch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from headway.datasets.partitions import PartitionScheme
from headway.datasets.zones import DAY_US
from headway.declaration import MonitoringSpec, RetrainingSpec, duration_us
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.monitoring.retrain_evidence import gather_evidence
from headway.monitoring.retraining import (
    AsOf,
    Champion,
    Cost,
    Decision,
    DecisionInput,
    Money,
    OpenRequest,
    PastRequest,
    decide,
)
from headway.services import Services
from headway.training.window import as_of_calendar, window_of
from headway.words import counted, no_single

if TYPE_CHECKING:
    from headway.catalog.monitoring_facts import RetrainRequest, RetrainState
    from headway.catalog.registry_facts import ModelVersion
    from headway.catalog.run_facts import TrainingRun
    from headway.registry.keys import KeyRing

UNIT = "worker_seconds"
SECOND_US = 1_000_000
# An open-ended calendar is looked at so far ahead: the next month to close is always in it.
_AHEAD_US = 400 * DAY_US
_COSTS = 20
_ASKS = 3
# Open, start, launch: what one tick may do about one request.
_STEPS = 3


class NoRetraining(HeadwayError):
    """The pipeline does not declare that anything retrains by itself."""


class UnclearRequest(HeadwayError):
    """A text that begins the id of no retrain request, or of several."""


@dataclass(frozen=True)
class SchedulerRun:
    """A run of the scheduler on behalf of a request."""

    run_id: str
    state: Literal["open", "succeeded", "failed", "cancelled"]


class Scheduler(Protocol):
    """What carries out a training: it is asked by a run key, and knows its runs of a request."""

    def runs(self, request_id: str) -> Sequence[SchedulerRun]:
        """The runs that bear this request's tag, the oldest first."""
        ...


@dataclass(frozen=True)
class Ask:
    """A run to ask the scheduler for. The same key again is the same run."""

    pipeline: str
    request_id: str
    run_key: str
    as_of: str
    cause: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Tick:
    """What one look at a pipeline came to: the last decision, what was done, and the run to ask for."""

    pipeline: str
    decision: Decision
    acts: tuple[str, ...]
    ask: Ask | None


@dataclass(frozen=True)
class _Act:
    """One step. `goes_on`: the request moved and may move again at once."""

    line: str
    ask: Ask | None = None
    goes_on: bool = False


def retraining_of(pipeline: Pipeline) -> tuple[MonitoringSpec, RetrainingSpec]:
    """What a pipeline declares about retraining.

    Raises:
        NoRetraining: nothing.
    """
    monitoring = pipeline.spec.monitoring
    if monitoring is None or monitoring.retraining is None or pipeline.spec.training is None:
        raise NoRetraining(
            f"pipeline {pipeline.name!r} does not retrain by itself", "declare `monitoring.retraining` in defs.yaml"
        )
    return monitoring, monitoring.retraining


def budget_of(pipeline: str) -> str:
    """The id of a pipeline's retraining budget: beside that of its training runs, which people spend from too."""
    return f"{pipeline}/retraining"


def present_decision(services: Services, pipeline: Pipeline) -> Decision:
    """The decision on the present facts. Nothing is written but code by its digest. Raises `NoRetraining`."""
    return decide(gather(services, pipeline))


def gather(services: Services, pipeline: Pipeline) -> DecisionInput:
    """Everything that the decision rests on, read by index from the catalog.

    Raises:
        NoRetraining: the pipeline declares no retraining.
    """
    from headway.catalog.budgets import period_of

    monitoring, policy = retraining_of(pipeline)
    now = services.world()
    champion = _champion(services, pipeline)
    requests = services.catalog.retrain_requests(services.principal, pipeline.name)
    opened = next((r for r in requests if r.is_open), None)
    evidence = gather_evidence(services, pipeline, champion)
    maturity = duration_us(monitoring.labels.expected_within)
    raised = any(a.state == "raised" for a in evidence.alarms)
    matters = raised if opened is None else opened.state == "waiting_for_evaluation_window"
    return DecisionInput(
        pipeline=pipeline.name,
        now=now,
        policy=policy,
        maturity=maturity,
        stale_after=(monitoring.drift.of + 1) * 7 * DAY_US + maturity,
        champion=champion,
        alarms=evidence.alarms,
        incident=evidence.incident,
        labels=evidence.labels,
        gain=evidence.gain,
        cost=_cost(services, pipeline.name, policy),
        money=_money(services, pipeline.name, policy, period_of(now)),
        open=None if opened is None else _open(opened),
        past=tuple(_past(r) for r in requests if not r.is_open),
        as_ofs=_as_ofs(services, pipeline, champion, now, maturity) if champion is not None and matters else (),
    )


def tick(services: Services, keyring: KeyRing, scheduler: Scheduler, pipeline: Pipeline) -> Tick:
    """Look at a pipeline once: decide, do what was decided, write down what was not.

    Raises:
        NoRetraining: the pipeline declares no retraining.
        HeadwayError: a step was refused for a reason that another look does not mend; what was committed stays.
    """
    from headway.catalog.errors import BudgetExhausted, RetrainMoved, RetrainOpen

    driver = _Driver(services, keyring, scheduler, pipeline)
    acts: list[str] = []
    while True:
        facts = gather(services, pipeline)
        decision = decide(facts)
        try:
            act = driver.act(facts, decision)
        except (RetrainMoved, RetrainOpen, BudgetExhausted) as error:
            act = _Act(f"another look was there first: {error.message}")
        else:
            _note(services, pipeline.name, decision, facts.now)
        acts.append(act.line)
        if not act.goes_on or len(acts) == _STEPS:
            return Tick(pipeline.name, decision, tuple(acts), act.ask)


def find_request(services: Services, reference: str) -> RetrainRequest:
    """The one request whose id begins with a text.

    Raises:
        UnclearRequest: there is none, or more than one.
    """
    requests = services.catalog.retrain_requests(services.principal)
    found = [r for r in requests if reference and r.request_id.startswith(reference)]
    if len(found) != 1:
        raise UnclearRequest(
            no_single("retrain request", [r.request_id for r in found], reference), "`headway retrain list` shows them"
        )
    return found[0]


def approve(services: Services, request: RetrainRequest, reason: str) -> RetrainRequest:
    """A person lets a request go on: one that needs a person is tried again, one that waits takes the next `as_of`.

    Raises:
        RetrainRefused: it does not wait for a person.
        RetrainMoved: it moved since it was read.
    """
    state: RetrainState = "ready" if request.state == "needs_human" else "waiting_for_evaluation_window"
    return services.catalog.move_retrain(
        services.principal, None, request.request_id, expected_epoch=request.epoch, state=state, reason=reason
    )


def reject(services: Services, request: RetrainRequest, reason: str) -> RetrainRequest:
    """A person ends a request that does not run; its reservation comes back.

    Raises:
        RetrainRefused: it runs, or is closed.
        RetrainMoved: it moved since it was read.
    """
    return services.catalog.move_retrain(
        services.principal, None, request.request_id, expected_epoch=request.epoch, state="rejected", reason=reason
    )


class _Driver:
    """The acts of one tick about one pipeline."""

    def __init__(self, services: Services, keyring: KeyRing, scheduler: Scheduler, pipeline: Pipeline) -> None:
        self._services = services
        self._keyring = keyring
        self._scheduler = scheduler
        self._pipeline = pipeline

    def act(self, facts: DecisionInput, decision: Decision) -> _Act:
        """Do what was decided."""
        if decision.action in ("request", "ask_human"):
            return self._open(facts, decision)
        if facts.open is None or decision.action in ("nothing", "wait"):
            return _Act(f"{decision.action}: {decision.sentence}")
        request = self._services.catalog.retrain_request(self._services.principal, facts.open.request_id)
        if request.state != facts.open.state:
            return _Act(f"another look was there first: request {request.request_id} is {request.state} by now")
        match decision.action:
            case "start":
                return self._move(request, "ready", decision.sentence, as_of=decision.as_of, goes_on=True)
            case "expire":
                return self._move(request, "expired", decision.sentence, cost_seconds=0.0, goes_on=True)
            case "launch":
                return self._launch(request)
            case _:
                return self._follow(request)

    def _open(self, facts: DecisionInput, decision: Decision) -> _Act:
        from headway.catalog.monitoring_facts import RetrainFacts

        assert facts.champion is not None
        assert facts.gain is not None
        catalog, principal, money = self._services.catalog, self._services.principal, facts.money
        self._ensure_budget(money)
        request = catalog.open_retrain_request(
            principal,
            None,
            RetrainFacts(
                pipeline=self._pipeline.name,
                endpoint_id=self._pipeline.name,
                model_version=facts.champion.version,
                fingerprint=decision.fingerprint,
                cause_digest=decision.cause_digest,
                cause=decision.cause,
                evidence=decision.evidence,
                reason=decision.sentence,
                expected_gain=facts.gain.auc,
                cost_seconds=facts.cost.reserve,
                budget_id=money.budget_id,
                period=money.period,
                as_of=decision.as_of,
                due_at=decision.due_at,
                state=decision.state,
                made_at=facts.now,
            ),
        )
        return _Act(f"request {request.request_id} is {request.state}: {decision.sentence}", goes_on=request.is_open)

    def _ensure_budget(self, money: Money) -> None:
        catalog, principal = self._services.catalog, self._services.principal
        known = catalog.budget(principal, money.budget_id, money.period)
        if known is None or known.limit != money.limit:
            catalog.set_budget(principal, None, money.budget_id, money.period, UNIT, money.limit)

    def _launch(self, request: RetrainRequest) -> _Act:
        """Ask until a run is seen, then say so: what was asked for may have been lost."""
        runs = self._scheduler.runs(request.request_id)
        if runs and (runs[-1].run_id != request.dagster_run_id or runs[-1].state in ("open", "succeeded")):
            line = f"Dagster run {runs[-1].run_id} trains as_of {request.as_of}"
            return self._move(request, "running", line, dagster_run_id=runs[-1].run_id, goes_on=True)
        return self._ask(request, runs, f"asks for the training of as_of {request.as_of}")

    def _ask(self, request: RetrainRequest, runs: Sequence[SchedulerRun], line: str) -> _Act:
        assert request.as_of is not None
        cause = request.facts.cause_digest
        attempt = len(_known(request, runs)) + 1
        ask = Ask(
            pipeline=self._pipeline.name,
            request_id=request.request_id,
            run_key=cause if attempt == 1 else f"{cause}/{attempt}",
            as_of=request.as_of,
            cause=request.facts.cause,
            evidence=request.facts.evidence,
        )
        return _Act(f"request {request.request_id} {line} (run key {ask.run_key})", ask)

    def _follow(self, request: RetrainRequest) -> _Act:
        runs = self._scheduler.runs(request.request_id)
        newest = runs[-1] if runs else None
        if any(run.state == "open" for run in runs):
            return _Act(f"request {request.request_id}: Dagster run {runs[-1].run_id} is under way")
        training = self._training_run(request, runs)
        versions = [] if training is None else self._versions(training)
        eligible = [v for v in versions if self._standing(v) == "eligible"]
        if eligible:
            return self._promote(request, runs, training, eligible[-1])
        if training is not None and self._all_judged(training, versions):
            said = "; ".join(f"version {v.version} is {self._standing(v)}" for v in versions)
            kept = f"{said}; version {request.facts.model_version} stays"
            return self._close(request, runs, "kept_old", kept, training, versions[-1])
        return self._after_bad_end(request, runs, newest, training)

    def _after_bad_end(
        self,
        request: RetrainRequest,
        runs: Sequence[SchedulerRun],
        newest: SchedulerRun | None,
        training: TrainingRun | None,
    ) -> _Act:
        """A run that ended without a verdict: asked for again, unless that is a person's or changes nothing."""
        cancelled = (newest is not None and newest.state == "cancelled") or (
            training is not None and training.status == "cancelled"
        )
        if cancelled:
            said = (
                f"the training of as_of {request.as_of} was cancelled, and only a person starts it again: materialize "
                "training_run and model_version, then approve; or reject"
            )
            return self._move(request, "needs_human", said, run_id=None if training is None else training.run_id)
        if training is not None and training.failed_by_code:
            said = f"run {training.run_id} failed by its code: {training.last.reason}"
            return self._close(request, runs, "failed", said, training)
        if len(_known(request, runs)) >= _ASKS:
            detail = "" if training is None else f"; run {training.run_id} is {training.status}: {training.last.reason}"
            return self._close(request, runs, "failed", f"{_ASKS} Dagster runs ended badly{detail}", training)
        ended = "is not there any more" if newest is None else f"{newest.run_id} {newest.state}"
        return self._ask(request, runs, f"asks again for as_of {request.as_of}: the Dagster run {ended}")

    def _promote(
        self,
        request: RetrainRequest,
        runs: Sequence[SchedulerRun],
        training: TrainingRun | None,
        version: ModelVersion,
    ) -> _Act:
        from headway.catalog.errors import PromotionRefused
        from headway.registry.evidence import EvidenceMissing
        from headway.registry.promote import promote

        try:
            endpoint = promote(self._services, self._keyring, self._pipeline.name, version.model_id, version.version)
        except (EvidenceMissing, PromotionRefused) as error:
            return self._move(
                request,
                "needs_human",
                f"version {version.version} passed its gates and is not promoted: {error.message}",
                candidate_version=version.version,
                run_id=version.run_id,
            )
        said = f"version {version.version} passed its gates and serves from epoch {endpoint.epoch} on"
        return self._close(request, runs, "promoted", said, training, version)

    def _close(
        self,
        request: RetrainRequest,
        runs: Sequence[SchedulerRun],
        state: RetrainState,
        reason: str,
        training: TrainingRun | None,
        version: ModelVersion | None = None,
    ) -> _Act:
        """Close with what it cost: a run that somebody else had asked for costs this request nothing."""
        mine = training is not None and training.facts.dagster_run_id in _known(request, runs)
        return self._move(
            request,
            state,
            reason,
            run_id=None if training is None else training.run_id,
            candidate_version=None if version is None else version.version,
            cost_seconds=training.worker_seconds if training is not None and mine else 0.0,
        )

    def _move(
        self,
        request: RetrainRequest,
        state: RetrainState,
        reason: str,
        *,
        as_of: str | None = None,
        run_id: str | None = None,
        dagster_run_id: str | None = None,
        candidate_version: int | None = None,
        cost_seconds: float | None = None,
        goes_on: bool = False,
    ) -> _Act:
        moved = self._services.catalog.move_retrain(
            self._services.principal,
            None,
            request.request_id,
            expected_epoch=request.epoch,
            state=state,
            reason=reason,
            as_of=as_of,
            run_id=run_id,
            dagster_run_id=dagster_run_id,
            candidate_version=candidate_version,
            cost_seconds=cost_seconds,
        )
        return _Act(f"request {request.request_id} is {moved.state}: {reason}", goes_on=goes_on)

    def _training_run(self, request: RetrainRequest, runs: Sequence[SchedulerRun]) -> TrainingRun | None:
        """The training that the request's Dagster runs asked for, or found done by somebody else."""
        catalog, principal = self._services.catalog, self._services.principal
        found = catalog.runs(principal, self._pipeline.name, request.as_of)
        mine = [run for run in found if run.facts.dagster_run_id in _known(request, runs)]
        if mine:
            return mine[0]
        done = [run for run in found if run.status == "succeeded"]
        return done[0] if done and runs and runs[-1].state == "succeeded" else None

    def _versions(self, training: TrainingRun) -> list[ModelVersion]:
        known = self._services.catalog.model_versions(self._services.principal, self._pipeline.name)
        return sorted((v for v in known if v.run_id == training.run_id), key=lambda v: v.version)

    def _all_judged(self, training: TrainingRun, versions: Sequence[ModelVersion]) -> bool:
        """Whether everything that the run made was registered, and every gate has spoken about it."""
        made = set() if training.result is None else {"network", "logistic"} & set(training.result.artifacts)
        judged = {v.kind for v in versions if self._is_judged(v)}
        return bool(made) and made <= judged

    def _is_judged(self, version: ModelVersion) -> bool:
        from headway.registry.dossier import newest_results

        policy = self._services.catalog.gate_policy(self._services.principal, version.model_id)
        wanted = () if policy is None else policy.gates(version.kind)
        return bool(wanted) and set(wanted) <= set(newest_results(self._services, version))

    def _standing(self, version: ModelVersion) -> str:
        from headway.registry.card import standing

        return standing(self._services, version)


def _known(request: RetrainRequest, runs: Sequence[SchedulerRun]) -> set[str]:
    """Every Dagster run that this request is known to have had, also one that Dagster has lost since."""
    return {run.run_id for run in runs} | ({request.dagster_run_id} if request.dagster_run_id else set())


def _note(services: Services, pipeline: str, decision: Decision, now: int) -> None:
    from headway.catalog.monitoring_facts import DecisionFacts

    reason = f"{decision.reason}: {decision.sentence}"
    facts = DecisionFacts(pipeline, pipeline, decision.action, reason, decision.fingerprint, now)
    services.catalog.note_decision(services.principal, None, facts)


def _champion(services: Services, pipeline: Pipeline) -> Champion | None:
    from headway.registry.promote import stable_version

    stable = stable_version(services, pipeline.name)
    return None if stable is None else Champion(stable.version, stable.facts.as_of)


def _cost(services: Services, pipeline: str, policy: RetrainingSpec) -> Cost:
    """What a run costs by its median so far. The declared amount is reserved, or the median where that is more."""
    runs = services.catalog.runs(services.principal, pipeline)
    used = [run.worker_seconds for run in runs if run.status == "succeeded"][:_COSTS]
    declared = duration_us(policy.per_run) // SECOND_US
    if not used:
        return Cost(float(declared), "as declared, no run so far", declared)
    median = statistics.median(used)
    return Cost(median, f"the median of {counted(len(used), 'run')}", max(declared, int(-(-median // 1))))


def _money(services: Services, pipeline: str, policy: RetrainingSpec, period: str) -> Money:
    limit = duration_us(policy.per_month) // SECOND_US
    known = services.catalog.budget(services.principal, budget_of(pipeline), period)
    used = 0 if known is None else known.reserved + known.committed
    return Money(budget_of(pipeline), period, limit, max(0, limit - used))


def _open(request: RetrainRequest) -> OpenRequest:
    state = request.state
    assert state not in ("promoted", "kept_old", "failed", "rejected", "expired")
    facts = request.facts
    return OpenRequest(
        request.request_id,
        state,
        facts.model_version,
        facts.fingerprint,
        facts.cause_digest,
        request.as_of,
        facts.due_at,
    )


def _past(request: RetrainRequest) -> PastRequest:
    state = request.state
    assert state in ("promoted", "kept_old", "failed", "rejected", "expired")
    facts = request.facts
    at = max(facts.made_at, facts.due_at or 0)
    return PastRequest(request.request_id, facts.cause_digest, facts.fingerprint, state, at)


def _as_ofs(services: Services, pipeline: Pipeline, champion: Champion, now: int, maturity: int) -> tuple[AsOf, ...]:
    """The months after the champion's own: when each can be judged, and whether it was trained already."""
    calendar = PartitionScheme.from_spec(as_of_calendar(pipeline.spec))
    found: list[AsOf] = []
    for key in calendar.keys(now + _AHEAD_US):
        if key <= champion.as_of:
            continue
        closes_at = calendar.window(key)[1] + maturity
        trained = _is_trained(services, pipeline, key)
        missing = _missing(services, pipeline, key) if closes_at <= now and not trained else ""
        found.append(AsOf(key, closes_at, trained, missing))
    return tuple(found)


def _is_trained(services: Services, pipeline: Pipeline, as_of: str) -> bool:
    """Whether a run of the identity that would be asked for now has succeeded. What cannot be planned has none."""
    from headway.training.plan import FeatureSetsMixed, InputAlwaysNull, SnapshotsMissing, plan_run

    runs = services.catalog.runs(services.principal, pipeline.name, as_of)
    done = {run.run_id for run in runs if run.status == "succeeded"}
    if not done:
        return False
    try:
        return plan_run(services, pipeline, as_of).facts.run_id(services.principal.tenant) in done
    except (SnapshotsMissing, FeatureSetsMixed, InputAlwaysNull):
        return False


def _missing(services: Services, pipeline: Pipeline, as_of: str) -> str:
    """What keeps an `as_of` from being trained and judged: partitions without a snapshot."""
    window = window_of(pipeline.spec, as_of)
    wanted = (*window.train, *window.evaluate)
    states = services.catalog.current_snapshots(services.principal, pipeline.name, wanted)
    absent = [p for p in wanted if p not in states]
    return f"{len(absent)} of {len(wanted)} partitions have no snapshot, from {absent[0]} on" if absent else ""
