"""What a run of several attempts claims, and what a restart says that it cost."""

from dataclasses import replace
from typing import Any

from support.trainer_runs import toy_spec

from headway.catalog.run_facts import Attempt
from headway.training.claims import claimed_level
from headway.training.restarts import Restart
from trainer.spec import layout_on

SPEC = toy_spec()
TWO = SPEC.layout.to_json()
ONE = layout_on(replace(SPEC.layout, min_nodes=1), 1).to_json()


def attempts(*layouts: Any, reason: str = "peer_lost") -> list[Attempt]:  # noqa: ANN401
    return [
        Attempt(
            run_id="r",
            attempt=number,
            token=number,
            state="failed",
            reason=None,
            code=77,
            layout=layout,
            launcher="local",
            external_name=f"run-r-{number}",
            created_at=1,
            started_at=1,
            heartbeat_at=None,
            ended_at=2,
            worker_seconds=1.0,
            cancel_reason=None,
            reason_code=reason,
        )
        for number, layout in enumerate(layouts, start=1)
    ]


def test_bits_on_one_layout_tolerance_on_several() -> None:
    assert claimed_level(SPEC, attempts(TWO, TWO)) == "bit"
    assert claimed_level(SPEC, attempts(TWO, ONE)) == "tolerance"


def test_an_attempt_that_never_started_computed_nothing() -> None:
    never = attempts(TWO, reason="never_started")
    assert claimed_level(SPEC, [*never, *attempts(ONE, ONE)]) == "bit"


def test_operations_that_differ_from_run_to_run_promise_the_mean_only() -> None:
    assert claimed_level(replace(SPEC, determinism="fast"), attempts(TWO)) == "statistical"


def test_what_was_lost_is_counted_from_what_was_told() -> None:
    restart = Restart(2, "peer_lost", 47, 40, {"imports": 1.234})
    assert restart.to_json() == {
        "attempt": 2,
        "after": "peer_lost",
        "lost_steps": 7,
        "from_step": 40,
        "seconds": {"imports": 1.23},
    }
    assert replace(restart, reached=None).lost_steps is None
    assert replace(restart, reached=39).lost_steps == 0
