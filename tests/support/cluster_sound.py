"""What has to be true of a bench when everything has ended, whatever happened before."""

import math
from typing import Any

from support.cluster_bench import ClusterBench

from headway.catalog.budgets import period_of
from headway.catalog.invariants import check


def assert_sound(bench: ClusterBench, *, every_step: bool = True) -> None:
    """One reconcile leaves no object; the catalog holds together; every worker-second is paid for, once."""
    bench.reconcile()
    assert bench.empty(), bench.names()
    with bench.services() as services:
        broken = [finding for finding in check(services.catalog, services.principal, services.store) if not finding.ok]
        assert broken == []
        runs = services.catalog.runs(services.principal)
        period = period_of(services.catalog.clock())
        for budget_id in {run.facts.budget_id for run in runs if run.facts.budget_id is not None}:
            state = services.catalog.budget(services.principal, budget_id, period)
            assert state is not None
            assert state.reserved == 0
            paid = [run for run in runs if run.facts.budget_id == budget_id]
            used = [attempt.worker_seconds for run in paid for attempt in run.attempts]
            assert state.committed == sum(math.ceil(seconds) for seconds in used if seconds is not None)
    for run in runs:
        assert_events_once(bench, run.run_id, every_step=every_step)


def assert_events_once(bench: ClusterBench, run_id: str, *, every_step: bool = True) -> None:
    """The catalog holds every event of each stream once and in order, and each attempt's steps follow one another.

    With `every_step`, as ranks tell them that are no real trainer, none is left out.
    """
    recorded = bench.recorded(run_id)
    for attempt in bench.run(run_id).attempts:
        own = [event for event in recorded if event.attempt == attempt.attempt and event.node is not None]
        for node in {event.node for event in own}:
            numbers = [event.node_seq for event in own if event.node == node]
            assert numbers == list(range(1, len(numbers) + 1))
        steps = steps_of(recorded, attempt.attempt)
        assert steps == sorted(set(steps))
        assert not every_step or steps == list(range(min(steps, default=1), max(steps, default=0) + 1))


def steps_of(recorded: list[Any], attempt: int) -> list[int]:
    """The steps that an attempt reported."""
    return [event.data["step"] for event in recorded if event.kind == "step" and event.attempt == attempt]


def resumed_from(recorded: list[Any], attempt: int) -> int:
    """The step from which an attempt went on."""
    (told,) = [
        event.data["resumed_from"]
        for event in recorded
        if event.kind == "metrics" and event.attempt == attempt and "resumed_from" in event.data
    ]
    return told
