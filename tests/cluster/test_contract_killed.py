"""Whoever watches an attempt is killed: the Job goes on, the next one adopts it, and nothing is lost or doubled."""

from __future__ import annotations

import signal

from support.cluster_bench import ClusterBench
from support.cluster_child import start
from support.cluster_sound import assert_events_once, assert_sound, steps_of

from tests.cluster.cluster_env import wait_until


def recorded_steps(bench: ClusterBench, run_id: str) -> int:
    """How many steps the catalog knows of."""
    return len(bench.recorded(run_id, "step"))


def test_an_op_killed_in_the_middle_is_followed_by_another(bench: ClusterBench) -> None:
    """kill -9 three times while the run steps; the one that is left sees it through, with the same Job."""
    run_id = bench.ask(orders={"hold": True})
    uids: set[str] = set()
    for number in (1, 2, 3):
        op = start("follow", bench, run_id)
        known = recorded_steps(bench, run_id)
        wait_until(lambda known=known: recorded_steps(bench, run_id) > known + 1, f"op {number} to follow")
        op.kill()
        uids |= {job["metadata"]["uid"] for job in bench.things("jobs")}
    assert len(uids) == 1
    assert_events_once(bench, run_id)
    last = start("follow", bench, run_id)
    bench.order(run_id)
    last.join()
    run = bench.run(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    written = [event.data["step"] for event in bench.events(run_id) if event.kind == "step"]
    assert steps_of(bench.recorded(run_id), 1) == written
    assert_sound(bench)


def test_whoever_asks_is_killed_while_asking(bench: ClusterBench) -> None:
    """Killed at any moment between the row and the pods; asked for again, it is the same run and the same Job."""
    orders = {"orders": {"hold": True}}
    run_id = bench.ask(seed=1, **orders)
    uids: set[str] = set()
    for delay in (0.05, 0.1, 0.15, 0.2, 0.3, 0.45):
        asker = start("ask", bench, 1, orders)
        asker.join(delay)
        asker.kill()
        uids |= {job["metadata"]["uid"] for job in bench.things("jobs")}
    bench.stepping(run_id)
    uids |= {job["metadata"]["uid"] for job in bench.things("jobs")}
    assert len(uids) == 1
    bench.order(run_id)
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    assert_sound(bench)


def test_a_reconciler_that_slept_through_a_restart_changes_nothing(bench: ClusterBench) -> None:
    """It was stopped with attempt 1 in its mind, and goes on when attempt 2 runs."""
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    sleeper = start("reconcile", bench)
    wait_until(lambda: recorded_steps(bench, run_id) > 3, "the reconciler to work")
    sleeper.stop(bench)
    bench.order(run_id, hold=True, ranks={"1": {"attempts": [1], "do": "kill"}})
    bench.stepping(run_id, attempt=2)
    sleeper.signal(signal.SIGCONT)
    known = recorded_steps(bench, run_id)
    wait_until(lambda: recorded_steps(bench, run_id) > known + 3, "the reconciler to go on")
    assert [job["metadata"]["labels"]["headway.dev/attempt"] for job in bench.things("jobs")] == ["2"]
    bench.order(run_id)
    bench.succeeded(run_id)
    sleeper.kill()
    assert_sound(bench)
