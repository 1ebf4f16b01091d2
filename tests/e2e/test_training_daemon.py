"""The daemon runs a backfill of three `as_of`, the page cancels a run, and leaving Dagster leaves the run alive."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.serving import ask
from support.shop_serving import serving_shop
from support.training_bench import TrainingBench, build_shop, end_everything, toy_code_root

WAIT_S = 400
KEY = ["shop", "training_run"]
LAST = "2026-02-01"
BACKFILL = """mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
STATE = """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status } } }"""
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
REEXECUTE = """mutation($params: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
TERMINATE = """mutation($id: String!) { terminateRun(runId: $id) { __typename } }"""
SUCCEEDED = """query { runsOrError(filter: {statuses: [SUCCESS]}, limit: 1) { ... on Runs { results { runId } } } }"""
STATUS = """query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"""


def _wait(condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the condition gives
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.3)
    raise AssertionError("it did not come true")


def _launch(url: str, *months: str) -> str:
    params = {"assetSelection": [{"path": KEY}], "partitionNames": list(months), "tags": []}
    launched = ask(url, BACKFILL, params=params)["launchPartitionBackfill"]
    assert launched["__typename"] == "LaunchBackfillSuccess", launched
    return launched["backfillId"]


def _ended(url: str, backfill: str) -> str:
    return _wait(
        lambda: (
            (status := ask(url, STATE, id=backfill)["partitionBackfillOrError"]["status"]) not in ("REQUESTED",)
            and status
        )
    )


def test_backfill_cancel_and_leaving(tmp_path: Path) -> None:
    bench = build_shop(tmp_path)
    toy = toy_code_root(tmp_path)
    hold = bench.home / "runs" / "default" / "hold"
    try:
        with serving_shop(tmp_path, bench, toy) as url:
            _three_months(url, bench)
            _re_executed(url, bench)
            hold.touch()
            cancelled = _cancelled_from_the_page(url, bench)
            _refused_to_a_machine(url, bench, cancelled)
            _started_again_by_a_person(url, bench, cancelled)
        assert bench.launcher().observe(cancelled, 2).state == "running"
        hold.unlink()
        _wait(lambda: bench.launcher().observe(cancelled, 2).state == "ended")
        with serving_shop(tmp_path, bench, toy):
            # Nobody asks: the sensor, which is declared running, records how the run ended.
            _wait(lambda: _status(bench, cancelled) == "succeeded")
    finally:
        end_everything(bench)


def _three_months(url: str, bench: TrainingBench) -> None:
    months = ("2026-03-01", "2026-04-01", "2026-05-01")
    assert _ended(url, _launch(url, *months)) == "COMPLETED_SUCCESS"
    runs = bench.runs()
    assert sorted(r.facts.partition for r in runs) == list(months)
    assert {(r.status, len(r.attempts)) for r in runs} == {("succeeded", 1)}
    assert _ended(url, _launch(url, *months)) == "COMPLETED_SUCCESS"
    assert len(bench.runs()) == 3


def _re_executed(url: str, bench: TrainingBench) -> None:
    """Re-execution of a run that succeeded, by a person on the page: up to date, and no second training."""
    (newest, *_) = ask(url, SUCCEEDED)["runsOrError"]["results"]
    params = {"parentRunId": newest["runId"], "strategy": "ALL_STEPS"}
    launched = ask(url, REEXECUTE, params=params)["launchRunReexecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    _wait(lambda: ask(url, STATUS, id=launched["run"]["runId"])["runOrError"]["status"] == "SUCCESS")
    runs = bench.runs()
    assert len(runs) == 3
    assert {len(r.attempts) for r in runs} == {1}


def _cancelled_from_the_page(url: str, bench: TrainingBench) -> str:
    before = {r.run_id for r in bench.runs()}
    launched = _launch_as_a_person(url)
    run = _wait(lambda: next((r for r in bench.runs() if r.run_id not in before), None))
    _wait(lambda: _steps_of(bench, run.run_id, 1))
    assert ask(url, TERMINATE, id=launched)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    _wait(lambda: ask(url, STATUS, id=launched)["runOrError"]["status"] == "CANCELED")
    _wait(lambda: _status(bench, run.run_id) == "cancelled")
    assert bench.launcher().strays() == []
    return run.run_id


def _refused_to_a_machine(url: str, bench: TrainingBench, run_id: str) -> None:
    assert _ended(url, _launch(url, LAST)) == "COMPLETED_FAILED"
    with bench.services() as services:
        assert len(services.catalog.run(services.principal, run_id).attempts) == 1


def _started_again_by_a_person(url: str, bench: TrainingBench, run_id: str) -> None:
    _launch_as_a_person(url)
    _wait(lambda: _steps_of(bench, run_id, 2))


def _launch_as_a_person(url: str) -> str:
    params = {
        "selector": {
            "jobName": "__ASSET_JOB",
            "repositoryName": "__repository__",
            "repositoryLocationName": "shop",
            "assetSelection": [{"path": KEY}],
        },
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": LAST}]},
        "runConfigData": {},
    }
    launched = ask(url, LAUNCH, params=params)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    return launched["run"]["runId"]


def _steps_of(bench: TrainingBench, run_id: str, attempt: int) -> bool:
    with bench.services() as services:
        events = services.catalog.run_events(services.principal, run_id, attempt=attempt, kinds=("step",), limit=1)
        return bool(events)


def _status(bench: TrainingBench, run_id: str) -> str:
    with bench.services() as services:
        return services.catalog.run(services.principal, run_id).status
