"""The API server misbehaves: whatever it answers, there is one Job and the right end; nothing is concluded early."""

from __future__ import annotations

from typing import Any

import pytest
from support.cluster_bench import ClusterBench
from support.cluster_sound import assert_events_once, assert_sound

from headway.catalog.run_facts import TrainingRun
from tests.cluster.cluster_env import Faults, wait_until

JOBS, SERVICES = r"/apis/batch/v1/namespaces/[^/]+/jobs$", r"/api/v1/namespaces/[^/]+/services$"
ANY = r"/(api|apis)/.*"


def rule(method: str, path: str, do: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """One fault of HTTP."""
    return {"method": method, "path": path, "do": do, **more}


@pytest.mark.parametrize(
    "fault",
    [
        rule("POST", JOBS, "error", status=500, times=2),
        rule("POST", JOBS, "after_error", status=500, times=1),
        rule("POST", JOBS, "after_error", status=409, times=1),
        rule("POST", JOBS, "after_error", status=504, times=1),
        rule("POST", JOBS, "drop", times=1),
        rule("POST", JOBS, "after_drop", times=1),
        rule("POST", JOBS, "timeout", times=1, seconds=3),
        rule("POST", SERVICES, "after_error", status=500, times=1),
        rule("POST", SERVICES, "error", status=429, times=2),
        rule("PATCH", JOBS.replace("jobs$", "jobs/.*"), "after_error", status=500, times=1),
        rule("DELETE", JOBS.replace("jobs$", "jobs/.*"), "after_error", status=500, times=1),
    ],
    ids=lambda fault: f"{fault['method']}-{fault['path'].split('/')[5]}-{fault['do']}-{fault.get('status', '')}",
)
def test_a_request_that_fails_or_only_seems_to(bench: ClusterBench, faults: Faults, fault: dict[str, Any]) -> None:
    faults.set(http=[fault])
    run_id = bench.start()
    uids: set[str] = set()

    def ended(run: TrainingRun) -> bool:
        uids.update(job["metadata"]["uid"] for job in bench.things("jobs"))
        return run.status != "open"

    run = bench.until(run_id, ended, "the end")
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    assert len(uids) == 1
    assert_sound(bench)


def test_a_watch_that_breaks_again_and_again(bench: ClusterBench, faults: Faults) -> None:
    """Each time it goes on where it was: no change is missed, none is taken for another."""
    run_id = bench.start(orders={"steps": 20})

    def broken_again(run: TrainingRun) -> bool:
        faults.set(http=[rule("WATCH", ANY, "close_watch")])
        return run.status != "open"

    assert bench.until(run_id, broken_again, "the end").status == "succeeded"
    assert_sound(bench)


def test_a_version_too_old_is_listed_anew(bench: ClusterBench, faults: Faults) -> None:
    """410 Gone to whoever asks for what changed since."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    faults.set(http=[rule("WATCH", ANY, "gone", times=3), rule("WATCH", ANY, "close_watch")])
    bench.order(run_id)
    bench.succeeded(run_id)
    assert_sound(bench)


def test_an_api_server_that_is_slow(bench: ClusterBench, faults: Faults) -> None:
    faults.set(http=[rule("", ANY, "slow", seconds=0.3, times=0)])
    run_id = bench.start()
    bench.succeeded(run_id)
    faults.clear()
    assert_sound(bench)


def test_an_api_server_that_is_away_while_the_attempt_ends(bench: ClusterBench, faults: Faults) -> None:
    """The attempt goes on without being seen; events keep coming over the volume; its end is recorded later."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    faults.set(api="away")
    wait_until(lambda: "unavailable" in [a.kind for a in bench.reconcile(run_id)], "the reconciler to notice")
    bench.order(run_id)
    wait_until(lambda: bench.events(run_id)[-1].kind == "node_end", "the attempt to end unseen")
    for _ in range(2):
        bench.reconcile(run_id)
        run = bench.run(run_id)
        assert (run.status, len(run.attempts), run.last.state) == ("open", 1, "running")
    faults.clear()
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    assert_sound(bench)


def test_an_api_server_that_is_away_when_a_run_is_asked_for(bench: ClusterBench, faults: Faults) -> None:
    faults.set(api="away")
    run_id = bench.ask()
    assert [action.kind for action in bench.reconcile(run_id)][-1] == "unavailable"
    assert bench.run(run_id).status == "open"
    faults.clear()
    bench.succeeded(run_id)
    assert_events_once(bench, run_id)
    assert_sound(bench)
