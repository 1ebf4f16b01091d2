"""What asking again means, through Dagster: adopt, up to date, a new attempt, or refused (design.md 3)."""

import threading
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.training_bench import AS_OF, TrainingBench, write_shop
from support.training_waits import WAIT_S, is_stepping, planned_run_id, wait_for

from assets.keys import training_key
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.platform import Platform

KEY = training_key("shop")


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    assert result.success, [e.message for e in result.all_events if e.is_failure]
    event = result.asset_materializations_for_node("shop__training_run")[-1]
    return {name: value.value for name, value in event.metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> str:
    assert not result.success
    messages = [
        str(e.event_specific_data.error.message if e.event_specific_data.error else "")  # pyright: ignore
        + str(getattr(e.event_specific_data, "user_failure_data", "") or "")
        for e in result.all_events
        if e.is_step_failure
    ]
    return " ".join(messages)


def held(bench: TrainingBench, instance: dg.DagsterInstance, **how: Any) -> tuple[threading.Thread, str, list[Any]]:  # noqa: ANN401
    """Start a materialization whose ranks go on until they are let go; return its thread, run id and results."""
    results: list[Any] = []
    before = {r.run_id for r in bench.runs()}
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    thread = threading.Thread(target=lambda: results.append(bench.materialize(instance, **how)))
    thread.start()
    wait_for(lambda: any(e for r in bench.runs() if r.run_id not in before for e in [r]))
    return thread, run_id, results


def test_a_second_materialization_is_up_to_date(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    first = metadata(bench.materialize(instance))
    second = metadata(bench.materialize(instance))
    assert (first["asked"], second["asked"]) == ("started", "up to date")
    assert first["run_id"] == second["run_id"]
    assert first["artifact/network"] == second["artifact/network"]
    (run,) = bench.runs()
    assert (run.status, len(run.attempts)) == ("succeeded", 1)


def test_two_clicks_at_once_are_one_run(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    thread, run_id, results = held(bench, instance)
    with dg.DagsterInstance.ephemeral() as other:
        clicked = threading.Thread(target=lambda: results.append(bench.materialize(other)))
        clicked.start()
        wait_for(lambda: is_stepping(bench, run_id))
        time.sleep(1.0)
        bench.control(run_id, "hold", None)
        thread.join(WAIT_S)
        clicked.join(WAIT_S)
    found = [metadata(r) for r in results]
    assert sorted(f["asked"] for f in found) == ["adopted", "started"]
    (run,) = bench.runs()
    assert (run.status, len(run.attempts)) == ("succeeded", 1)


def test_another_setting_is_another_run_and_a_note_is_not(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    metadata(bench.materialize(instance))
    for config in ({"seed": 4}, {"epochs": 3}, {"lr": 0.02}, {"repeat": 1}):
        assert metadata(bench.materialize(instance, config=config))["asked"] == "started"
    noted = metadata(bench.materialize(instance, config={"note": "looked at again"}))
    assert noted["asked"] == "up to date"
    assert len(bench.runs()) == 5


def test_changed_data_is_another_run(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    first = metadata(bench.materialize(instance))
    lines = (bench.folder / "visits.csv").read_text().replace(",p1,", ",p2,", 1)
    (bench.folder / "visits.csv").write_text(lines)
    month = next(line for line in lines.splitlines() if ",p2," in line)[:7] + "-01"
    for command in ("datasets ingest --source visits", "snapshots build"):
        done = bench.run(*command.split(), "--pipeline", str(bench.folder), "--partition", month)
        assert done.exit_code == 0, done.output
    show = bench.json("runs", "show", first["run_id"])
    assert "replaced" in str(show["out_of_date"])
    second = metadata(bench.materialize(instance))
    assert second["run_id"] != first["run_id"]


def test_infrastructure_failure_gets_a_new_attempt_by_itself(
    bench: TrainingBench, instance: dg.DagsterInstance
) -> None:
    bench.control(planned_run_id(bench), "exit", "77")
    found = metadata(bench.materialize(instance))
    assert found["attempts"] == 2
    (run,) = bench.runs()
    assert [(a.state, a.code) for a in run.attempts] == [("failed", 77), ("succeeded", 0)]


def test_attempts_are_limited(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    bench.control(planned_run_id(bench), "exit_always", "77")
    assert "failed" in failure(bench.materialize(instance))
    (run,) = bench.runs()
    assert [a.state for a in run.attempts] == ["failed"] * 3
    assert "3 attempts" in failure(bench.materialize(instance))
    assert len(bench.runs()[0].attempts) == 3


def test_failure_of_the_code_is_refused_until_something_changes(
    bench: TrainingBench, instance: dg.DagsterInstance
) -> None:
    bench.control(planned_run_id(bench), "exit", "65")
    assert "65" in failure(bench.materialize(instance)) or "failed" in failure(bench.materialize(instance))
    refused = failure(bench.materialize(instance))
    assert "retry" in refused
    (run,) = bench.runs()
    assert len(run.attempts) == 1
    assert metadata(bench.materialize(instance, config={"retry": True}))["attempts"] == 2


def test_cancelled_comes_back_only_when_a_person_asks(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    thread, run_id, results = held(bench, instance)
    wait_for(lambda: is_stepping(bench, run_id))
    cancelled = bench.run("runs", "cancel", run_id[:10])
    assert cancelled.exit_code == 0, cancelled.output
    assert "cancelled" in cancelled.output
    thread.join(WAIT_S)
    assert "cancelled" in failure(results[0])
    assert bench.launcher().strays() == []
    bench.control(run_id, "hold", None)
    for tags in (
        {"dagster/backfill": "abc"},
        {"dagster/sensor_name": "s"},
        {"dagster/schedule_name": "s"},
        {"dagster/retry_number": "1"},
        {"dagster/from_automation_condition": "true"},
    ):
        assert "cancelled" in failure(bench.materialize(instance, tags=tags)), tags
    assert len(bench.runs()[0].attempts) == 1
    assert metadata(bench.materialize(instance))["attempts"] == 2


def test_retry_policy_adopts_what_the_step_had_started(
    bench: TrainingBench, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step dies after the run was committed and started; Dagster's RetryPolicy starts the step again."""
    import assets.training_run

    follow = assets.training_run._follow
    tries: list[int] = []

    def dies_once(*arguments: Any) -> Any:  # noqa: ANN401
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("the step dies here")
        return follow(*arguments)

    monkeypatch.setattr(assets.training_run, "_follow", dies_once)
    job = dg.define_asset_job("train", selection=[KEY], op_retry_policy=dg.RetryPolicy(max_retries=2))
    definitions = dg.Definitions(
        assets=[build_training_run(load_pipeline(bench.folder))],
        jobs=[job],
        resources={"platform": Platform(home=str(bench.home))},
    )
    resolved = definitions.resolve_job_def("train")
    result = resolved.execute_in_process(instance=instance, partition_key=AS_OF, raise_on_error=False)
    assert result.success
    assert len(tries) == 2
    (run,) = bench.runs()
    assert (run.status, len(run.attempts)) == ("succeeded", 1)


def test_a_missing_snapshot_is_named(bench: TrainingBench, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    empty = TrainingBench(tmp_path / "other" / "shop", tmp_path / "other" / "home")
    write_shop(empty.folder)
    refused = failure(empty.materialize(instance))
    assert "2026-01-01" in refused
    assert "materialize feature_snapshot" in refused
    assert empty.runs() == []


def test_budget_is_reserved_settled_and_exhausted_by_name(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    metadata(bench.materialize(instance))
    with bench.services() as services:
        entries = [
            e
            for period in {time.strftime("%Y-%m", time.gmtime())}
            for e in services.catalog.budget_entries(services.principal, "shop", period)
        ]
    assert sorted(e.kind for e in entries) == ["commit", "release", "reserve"]
    by_kind = {e.kind: e.amount for e in entries}
    assert by_kind["reserve"] == by_kind["release"] == 600
    assert 1 <= by_kind["commit"] < 600

    def poor(attributes: dict[str, Any]) -> None:
        attributes["training"]["budget"] = {"per_run": "10m", "per_month": "9m"}

    write_shop(bench.folder, poor)
    refused = failure(bench.materialize(instance, config={"seed": 9}))
    assert "540" in refused
    assert len(bench.runs()) == 1


def test_a_metric_that_is_no_number_fails_its_check(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    bench.control(planned_run_id(bench), "nan", "")
    result = bench.materialize(instance)
    found = {e.check_name: e.passed for e in result.get_asset_check_evaluations()}
    assert found == {"finished": True, "finite_metrics": False}
