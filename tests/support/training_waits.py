"""Looks at runs of a training bench from outside, and waits for what has to come true."""

import time
from collections.abc import Callable
from typing import Any

from support.training_bench import AS_OF, TrainingBench

from headway.loading import load_pipeline
from headway.training.plan import plan_run

WAIT_S = 120.0


def wait_for(condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the condition gives
    """The condition's value once it is true; fails after a generous wait."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come true")


def planned_run_id(bench: TrainingBench, as_of: str = AS_OF) -> str:
    """The id that the run of an `as_of` will have, as things stand."""
    with bench.services() as services:
        plan = plan_run(services, load_pipeline(bench.folder), as_of)
        return plan.facts.run_id(services.principal.tenant)


def is_stepping(bench: TrainingBench, run_id: str) -> bool:
    """Whether the catalog holds a training step of the run."""
    with bench.services() as services:
        return bool(services.catalog.run_events(services.principal, run_id, kinds=("step",), limit=1))
