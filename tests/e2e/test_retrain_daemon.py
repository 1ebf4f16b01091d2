"""The daemon retrains on computed reports: exactly one run per cause, gates decide, an incident trains nothing.

Weeks are resampled from the rows that the version was trained on: as they are, in other units, or shifted. Their
reports are computed from the recorded answers and labels. Ranks are toys that leave a logistic regression, everything
behind them is real.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
from numpy.typing import NDArray
from support.retrain_bench import (
    NEXT_AS_OF,
    WEEKS,
    build_champion,
    instant,
    retraining_code_root,
    set_world,
    told,
)
from support.retrain_daemon import running_daemon
from support.retrain_ticks import tick_at_once
from support.retrain_windows import AskedRows, answer_week, ask_reference, build_week, report_week
from support.training_bench import TrainingBench, end_everything

from assets.retraining import CAUSE_TAG, EVIDENCE_TAG, REQUEST_TAG
from headway.catalog.monitoring_facts import Report
from headway.monitoring.reports import publish_report
from headway.monitoring.retrain import budget_of

WAIT_S = 600
QUIET_WEEKS = ("2026-03-16", "2026-03-23", "2026-03-30", "2026-04-06", "2026-04-13")
BROKEN_WEEK = "2026-04-20"
# Draws whose loss of quality is too uncertain to be an alarm of its own.
SHIFTS = (100, 104)
LAST_AS_OF = "2026-05-01"


def test_the_daemon_retrains_once_per_cause(tmp_path: Path) -> None:
    bench = build_champion(tmp_path)
    code_root = retraining_code_root(tmp_path / "code")
    try:
        with running_daemon(tmp_path, bench, code_root) as instance:
            usual = asked_rows(bench)
            five_quiet_weeks_raise_nothing(bench, instance, usual)
            a_change_of_units_is_an_incident_and_trains_nothing(bench, instance)
            drift_is_one_run_and_a_promotion(bench, instance, usual, tmp_path / "asked.jsonl")
            the_promotion_raises_nothing(bench, instance, usual)
            without_a_closed_window_it_waits_and_a_worse_model_is_kept_out(bench, instance, usual)
    finally:
        end_everything(bench)
    result = bench.run("fsck")
    assert result.exit_code == 0, result.output


def five_quiet_weeks_raise_nothing(bench: TrainingBench, instance: dg.DagsterInstance, usual: AskedRows) -> None:
    wait(lambda: decided(bench) == "no_alarm")
    for seed, week in enumerate(QUIET_WEEKS):
        drift, quality = reported(bench, usual, week, usual.resampled(seed))
        assert (drift.verdict, quality.verdict) == ("none", "ok")
        looked(instance)
        assert decided(bench) == "no_alarm"
    assert told(bench) == []


def a_change_of_units_is_an_incident_and_trains_nothing(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    larger = asked_rows(bench, factor=1000.0)
    drift, _ = reported(bench, larger, BROKEN_WEEK, larger.resampled(5))
    assert (drift.verdict, drift.reason) == ("data_incident", "unit_change by_person__mean_9d")
    wait(lambda: decided(bench) == "data_incident")
    looked(instance)
    assert told(bench) == []
    assert instance.get_runs_count() == 0


def drift_is_one_run_and_a_promotion(
    bench: TrainingBench, instance: dg.DagsterInstance, usual: AskedRows, output: Path
) -> None:
    """A hundred ticks at once beside the daemon's own, and kill -9 of some, are one request and one run."""
    first, second = WEEKS
    assert reported(bench, usual, first, usual.shifted(SHIFTS[0]))[0].verdict == "drift"
    wait(lambda: decided(bench) == "not_persistent")
    assert told(bench) == []
    with bench.services() as services:
        answer_week(services, usual, second, usual.shifted(SHIFTS[1]))
        built = build_week(services, bench, second)
    assert built[0].verdict == "drift"

    def drift() -> None:
        with bench.services() as services:
            for report in built:
                publish_report(services, report)

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


def the_promotion_raises_nothing(bench: TrainingBench, instance: dg.DagsterInstance, usual: AskedRows) -> None:
    """The old version's reports still say drift; the new one is measured against its own reference."""
    wait(lambda: decided(bench) == "reference_switched")
    set_world(bench, "2026-05-18T06:00:00+00:00")
    drift, _ = reported(bench, usual, "2026-05-11", usual.resampled(6), version=2)
    assert drift.verdict == "none"
    looked(instance)
    assert decided(bench) == "reference_switched"
    assert instance.get_runs_count() == 1


def without_a_closed_window_it_waits_and_a_worse_model_is_kept_out(
    bench: TrainingBench, instance: dg.DagsterInstance, usual: AskedRows
) -> None:
    (bench.home / "runs" / "default" / "worse").touch()
    set_world(bench, "2026-06-01T06:00:00+00:00")
    for seed, week in zip(SHIFTS, ("2026-05-18", "2026-05-25"), strict=True):
        assert reported(bench, usual, week, usual.shifted(seed), version=2)[0].verdict == "drift"
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


def asked_rows(bench: TrainingBench, factor: float = 1.0) -> AskedRows:
    """The rows that weeks are drawn from, with one feature times a factor."""
    with bench.services() as services:
        return ask_reference(services, bench, factor)


def reported(
    bench: TrainingBench, asked: AskedRows, week: str, rows: NDArray[np.intp], version: int = 1
) -> tuple[Report, ...]:
    """Answer and label a week, and publish its drift and its quality."""
    with bench.services() as services:
        answer_week(services, asked, week, rows, version=version)
        return report_week(services, bench, week, version)


def looked(instance: dg.DagsterInstance) -> None:
    """Wait until the sensor has ticked once more, from its beginning on."""
    called = time.time()
    wait(lambda: any(began > called for began in ended_ticks(instance)))


def ended_ticks(instance: dg.DagsterInstance) -> list[float]:
    """When those of the sensor's newest ticks began that have ended well."""
    (sensor,) = (s for s in instance.all_instigator_state() if s.instigator_name == "retrain_on_drift")
    ticks = instance.get_ticks(sensor.instigator_origin_id, sensor.selector_id, limit=5)
    return [t.timestamp for t in ticks if t.status.value in ("SKIPPED", "SUCCESS")]


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
