"""Asks for a run: commits the row first, then starts what the row says, so that a repeat finds both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.services import Services
from headway.training.launch import Launcher
from headway.training.plan import WORKER_SECONDS, RunPlan
from headway.training.reconcile import Reconciler

if TYPE_CHECKING:
    from headway.catalog.run_facts import Submission

Asker = Literal["person", "machine"]


def submit(services: Services, launcher: Launcher, plan: RunPlan, *, asker: Asker, retry: bool = False) -> Submission:
    """Ask for the planned run and make sure that it is under way, unless it is done.

    Asked for again: an open run is adopted, a succeeded one is returned ("up_to_date"), one that infrastructure ended
    gets a new attempt.

    Raises:
        RunRefused: it failed by its code, and nothing has changed since (`retry` asks all the same).
        RunCancelled: it was cancelled, and no person asks.
        AttemptsSpent: infrastructure ended as many attempts as the declaration allows.
        BudgetExhausted: the month's budget does not hold what the run reserves.
    """
    catalog, principal = services.catalog, services.principal
    _ensure_budget(services, plan)
    submission = catalog.submit_run(
        principal,
        None,
        plan.facts,
        asker=asker,
        retry=retry,
        reserve_seconds=plan.reserve_seconds,
        launcher=launcher.name,
    )
    if submission.decision != "up_to_date":
        Reconciler(services, launcher).run(submission.run.run_id)
    return submission


def _ensure_budget(services: Services, plan: RunPlan) -> None:
    from headway.catalog.budgets import period_of

    catalog, principal = services.catalog, services.principal
    period = period_of(catalog.clock())
    known = catalog.budget(principal, plan.spec.pipeline, period)
    if known is None or known.limit != plan.month_seconds:
        catalog.set_budget(principal, None, plan.spec.pipeline, period, WORKER_SECONDS, plan.month_seconds)
