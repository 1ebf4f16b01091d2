"""What one reconciler must not do to other runs, other tenants and processes that are not its own."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.training_bench import AS_OF, TrainingBench, write_shop
from support.training_waits import is_stepping, planned_run_id, wait_for

from assets import training_run
from headway.catalog.errors import CatalogBusy
from headway.loading import load_pipeline
from headway.training.plan import Overrides, plan_run
from headway.training.reconcile import Reconciler
from headway.training.submit import submit


def start(bench: TrainingBench, **overrides: Any) -> str:  # noqa: ANN401 - fields of Overrides
    """Ask for a run whose ranks are held, and wait until they step."""
    with bench.services() as services:
        plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides(**overrides))
        run_id = plan.facts.run_id(services.principal.tenant)
        bench.control(run_id, "hold", "")
        submit(services, bench.launcher(), plan, asker="person")
        wait_for(lambda: Reconciler(services, bench.launcher()).run(run_id) is not None and is_stepping(bench, run_id))
    return run_id


def test_a_run_that_cannot_be_reconciled_stops_no_other(bench: TrainingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = start(bench, seed=1), start(bench, seed=2)
    bench.control(good, "hold", None)
    launcher = bench.launcher()
    wait_for(lambda: launcher.observe(good, 1).state == "ended")
    whole = Reconciler.run

    def fails_for_one(self: Reconciler, run_id: str) -> Any:  # noqa: ANN401
        if run_id == bad:
            raise CatalogBusy("run", "it cannot be reconciled")
        return whole(self, run_id)

    monkeypatch.setattr(Reconciler, "run", fails_for_one)
    told = bench.run("reconcile", "--json")
    assert told.exit_code == 1
    kinds = {a["run_id"]: a["kind"] for a in json.loads(told.stdout)["actions"]}
    assert kinds == {bad: "error", good: "finish"}
    assert launcher.observe(bad, 1).state == "running"


def test_another_catalog_leaves_a_run_alone(bench: TrainingBench, tmp_path: Path) -> None:
    run_id = start(bench)
    before = bench.launcher().strays()
    other = TrainingBench(bench.folder, bench.home, f"sqlite:///{tmp_path / 'other.db'}")
    told = other.run("reconcile", "--json")
    assert told.exit_code == 1
    assert {a["kind"] for a in json.loads(told.stdout)["actions"]} == {"error"}
    bench.run("reconcile")
    assert bench.launcher().strays() == before
    assert bench.launcher().observe(run_id, 1).state == "running"


def test_a_run_folder_deleted_under_a_run_never_runs_it_twice(bench: TrainingBench) -> None:
    run_id = start(bench)
    launcher = bench.launcher()
    first = {pid for _, _, pid in launcher.strays()}
    shutil.rmtree(launcher.run_dir(run_id))
    bench.control(run_id, "hold", "")
    assert bench.run("reconcile").exit_code == 0
    run = bench.runs()[0]
    assert [a.state for a in run.attempts][:1] == ["lost"]
    assert first.isdisjoint({pid for _, _, pid in launcher.strays()})
    bench.control(run_id, "hold", None)


def test_a_stopped_supervisor_does_not_keep_a_cancelled_run_alive(
    bench: TrainingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.training.reconcile._CANCEL_MARGIN_S", -20.0)
    run_id = start(bench)
    supervisor = json.loads((bench.launcher().run_dir(run_id) / "attempts" / "1" / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGSTOP)
    cancelled = bench.run("runs", "cancel", run_id)
    assert "cancelled" in cancelled.output
    assert bench.launcher().strays() == []


def test_end_and_next_attempt_are_one_commit(bench: TrainingBench) -> None:
    """Nobody who looks between two commits finds the run lost while another attempt is due."""
    run_id = start(bench)
    launcher = bench.launcher()
    launcher.kill(run_id, 1)
    with bench.services() as services:
        actions = Reconciler(services, launcher)._attempt
        run = services.catalog.run(services.principal, run_id)
        for action in actions(run, run.last):
            if action.kind in ("finish", "restart"):
                status = services.catalog.run(services.principal, run_id).status
                assert status == "open"
        assert len(services.catalog.run(services.principal, run_id).attempts) == 2
    bench.control(run_id, "hold", None)


def test_cancelling_while_the_run_is_being_submitted(
    bench: TrainingBench, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes after the row is committed and before anybody follows."""
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    whole = submit

    def interrupted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        whole(*arguments, **named)
        raise dg.DagsterExecutionInterruptedError

    monkeypatch.setattr("headway.training.submit.submit", interrupted)
    monkeypatch.setattr(training_run, "is_being_cancelled", lambda context: True)
    thread = threading.Thread(target=lambda: _swallow_interrupt(bench, instance))
    thread.start()
    thread.join(120)
    (run,) = bench.runs()
    assert run.status == "cancelled"
    assert bench.launcher().strays() == []


def _swallow_interrupt(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    try:
        bench.materialize(instance)
    except dg.DagsterExecutionInterruptedError:
        return


@pytest.mark.parametrize(
    ("config", "said"),
    [({"epochs": 0}, "epochs"), ({"nodes": 0}, "nodes"), ({"lr": -1.0}, "lr"), ({"seed": -1}, "seed")],
)
def test_the_launchpad_is_answered_in_words(
    bench: TrainingBench, instance: dg.DagsterInstance, config: dict[str, Any], said: str
) -> None:
    result = bench.materialize(instance, config=config)
    (failed,) = [e for e in result.all_events if e.is_step_failure]
    text = str(failed.event_specific_data)
    assert said in text
    assert "Launchpad" in text
    assert bench.runs() == []


def test_a_damaged_artifact_fails_the_check_of_a_second_ask(bench: TrainingBench, instance: dg.DagsterInstance) -> None:
    assert bench.materialize(instance).success
    (run,) = bench.runs()
    assert run.result is not None
    digest = run.result.artifacts["network"].removeprefix("sha256:")
    blob = bench.home / "store" / "sha256" / digest[:2] / digest[2:]
    blob.unlink()
    blob.write_text("{}")
    again = bench.materialize(instance)
    found = {e.check_name: e.passed for e in again.get_asset_check_evaluations()}
    assert not found["finished"]


def test_two_reconcilers_at_once_give_one_next_attempt(bench: TrainingBench) -> None:
    run_id = start(bench)
    bench.launcher().kill(run_id, 1)
    results: list[str] = []

    def reconcile() -> None:
        with bench.services() as services:
            actions = Reconciler(services, bench.launcher()).all()
        results.extend(action.detail for action in actions if action.kind == "error")

    threads = [threading.Thread(target=reconcile) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == []
    assert len(bench.runs()[0].attempts) == 2
    bench.control(run_id, "hold", None)


def test_the_pipeline_may_change_while_a_run_is_under_way(bench: TrainingBench) -> None:
    run_id = start(bench)
    write_shop(bench.folder, lambda attributes: attributes["training"].update({"seed": 99}))
    bench.control(run_id, "hold", None)
    with bench.services() as services:
        wait_for(
            lambda: (
                Reconciler(services, bench.launcher()).all() is not None
                and services.catalog.run(services.principal, run_id).status != "open"
            )
        )
    assert bench.runs()[0].status == "succeeded"
