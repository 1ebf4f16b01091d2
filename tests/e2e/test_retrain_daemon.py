"""The daemon retrains on planted reports: exactly one run per cause, gates decide, incidents and seasons train nothing.

Reports are planted in the catalog; how they come about from answers and labels is tested with the reports and in the
replay. Ranks are toys that leave a logistic regression, everything behind them is real.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
from support.retrain_bench import (
    NEXT_AS_OF,
    WEEKS,
    build_champion,
    instant,
    plant,
    plant_drift,
    plant_incident,
    retraining_code_root,
    set_world,
    told,
)
from support.retrain_daemon import running_daemon
from support.retrain_ticks import tick_at_once
from support.training_bench import TrainingBench, end_everything

from assets.retraining import CAUSE_TAG, EVIDENCE_TAG, REQUEST_TAG
from headway.monitoring.retrain import budget_of

WAIT_S = 600
LAST_AS_OF = "2026-05-01"


def test_the_daemon_retrains_once_per_cause(tmp_path: Path) -> None:
    bench = build_champion(tmp_path)
    code_root = retraining_code_root(tmp_path / "code")
    try:
        with running_daemon(tmp_path, bench, code_root) as instance:
            quiet_weeks_and_an_incident_train_nothing(bench, instance)
            drift_is_one_run_and_a_promotion(bench, instance, tmp_path / "asked.jsonl")
            the_promotion_raises_nothing(bench, instance)
            without_a_closed_window_it_waits_and_a_worse_model_is_kept_out(bench, instance)
    finally:
        end_everything(bench)
    result = bench.run("fsck")
    assert result.exit_code == 0, result.output


def quiet_weeks_and_an_incident_train_nothing(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    wait(lambda: decided(bench) == "no_alarm")
    with bench.services() as services:
        for week in ("2026-03-23", "2026-03-30", "2026-04-06", "2026-04-13"):
            plant(services, "drift", week, "none", {"level": 0.4})
        plant_incident(services, "2026-04-20")
    wait(lambda: decided(bench) == "data_incident")
    assert told(bench) == []
    assert instance.get_runs_count() == 0


def drift_is_one_run_and_a_promotion(bench: TrainingBench, instance: dg.DagsterInstance, output: Path) -> None:
    """A hundred ticks at once beside the daemon's own, and kill -9 of some, are one request and one run."""

    def drift() -> None:
        with bench.services() as services:
            plant_drift(services)

    keys = tick_at_once(bench, output, 17, drift, dagster=True)
    assert len(keys) >= 100
    request = wait(lambda: closed(bench, 1))
    assert request["state"] == "promoted", request
    assert (request["as_of"], request["candidate_version"]) == (NEXT_AS_OF, 2)
    assert endpoint(bench) == (2, 1)
    (run,) = instance.get_runs()
    shown = bench.json("retrain", "show", request["request_id"])
    assert set(keys) - {None} <= {shown["cause_digest"]}
    assert run.tags["dagster/run_key"] == shown["cause_digest"]
    assert run.tags[REQUEST_TAG] == request["request_id"]
    assert run.tags[CAUSE_TAG] == "drift"
    assert sorted(run.tags[EVIDENCE_TAG].split()) == sorted(e["report_id"][7:19] for e in shown["evidence"])
    assert [e["week"] for e in shown["evidence"]] == list(WEEKS)
    assert shown["dagster_run_id"] == run.run_id
    trained = [r for r in bench.runs() if r.facts.partition == NEXT_AS_OF]
    assert [r.facts.dagster_run_id for r in trained] == [run.run_id]
    assert budget(bench, "2026-05") == (0, -(-trained[0].worker_seconds // 1))


def the_promotion_raises_nothing(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    """The old version's reports still say drift; the new one is measured against its own reference."""
    wait(lambda: decided(bench) == "reference_switched")
    assert instance.get_runs_count() == 1


def without_a_closed_window_it_waits_and_a_worse_model_is_kept_out(
    bench: TrainingBench, instance: dg.DagsterInstance
) -> None:
    (bench.home / "runs" / "default" / "worse").touch()
    set_world(bench, "2026-06-01T06:00:00+00:00")
    with bench.services() as services:
        plant_drift(services, version=2, weeks=("2026-05-18", "2026-05-25"))
    request = wait(lambda: next(iter(told(bench)[:-1]), None))
    assert request["state"] == "waiting_for_evaluation_window"
    assert instant(request["due_at"]) == instant("2026-06-03T00:00:00+00:00")
    assert instance.get_runs_count() == 1
    set_world(bench, "2026-06-03T00:00:00+00:00")
    request = wait(lambda: closed(bench, 2))
    assert request["state"] == "kept_old", request
    assert (request["as_of"], request["candidate_version"]) == (LAST_AS_OF, 3)
    assert "refused by auc_over_historical_rate" in request["reason"]
    assert endpoint(bench) == (2, 1)
    assert instance.get_runs_count() == 2


def wait(condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the condition gives
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(1.0)
    raise AssertionError("it did not come true")


def decided(bench: TrainingBench) -> str:
    """The code of the newest decision."""
    with bench.services() as services:
        newest = services.catalog.decisions(services.principal, "shop", 1)
        return (newest[0].reason or "").partition(":")[0] if newest else ""


def closed(bench: TrainingBench, count: int) -> dict[str, Any] | None:
    """The newest request, once there are so many and it is closed."""
    requests = told(bench)
    ended = ("promoted", "kept_old", "failed", "rejected", "expired", "needs_human")
    return requests[0] if len(requests) == count and requests[0]["state"] in ended else None


def endpoint(bench: TrainingBench) -> tuple[int | None, int | None]:
    """Stable and previous version."""
    with bench.services() as services:
        found = services.catalog.endpoint(services.principal, "shop")
        assert found is not None
        return found.stable, found.previous


def budget(bench: TrainingBench, period: str) -> tuple[int, int]:
    """Reserved and committed worker-seconds."""
    with bench.services() as services:
        state = services.catalog.budget(services.principal, budget_of("shop"), period)
        assert state is not None
        return state.reserved, state.committed
