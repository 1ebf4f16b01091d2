"""The step's process is killed or stopped while its run goes on: nothing is lost, doubled or orphaned."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
from support.training_bench import AS_OF, TrainingBench
from support.training_waits import is_stepping, planned_run_id, wait_for

from headway.catalog.invariants import check
from trainer.events import read_events

ROOT = Path(__file__).resolve().parents[3]
KILLS = 6


def start(root: Path) -> "subprocess.Popen[bytes]":
    (root / "toy").touch()
    (root / "dagster").mkdir(exist_ok=True)
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "support.training_child", str(root), AS_OF],
        cwd=ROOT,
        env={**environ, "DAGSTER_HOME": str(root / "dagster"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def assert_every_event_once(bench: TrainingBench, run_id: str) -> None:
    """What the nodes wrote and what the catalog holds is the same, event by event."""
    launcher = bench.launcher()
    with bench.services() as services:
        run = services.catalog.run(services.principal, run_id)
        for attempt in run.attempts:
            kept = services.catalog.run_events(services.principal, run_id, attempt=attempt.attempt, limit=100_000)
            for node in range(run.facts.nodes):
                folder = launcher.run_dir(run_id) / "attempts" / str(attempt.attempt) / f"node-{node}"
                written = read_events(folder / "events.jsonl", limit=1_000_000)
                told = [(e.node_seq, e.kind, dict(e.data)) for e in kept if e.node == node]
                assert told == [(e.seq, e.kind, dict(e.data)) for e in written]
        assert [f for f in check(services.catalog, services.principal, services.store) if not f.ok] == []


def test_kill_9_of_the_step_at_random_moments(bench: TrainingBench, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    for _ in range(KILLS):
        process = start(tmp_path)
        time.sleep(moments.uniform(1.0, 6.0))
        process.kill()
        process.communicate()
    last = start(tmp_path)
    wait_for(lambda: is_stepping(bench, run_id))
    bench.control(run_id, "hold", None)
    output = last.communicate(timeout=240)[0].decode()
    assert last.returncode == 0, f"seed {seed}: {output}"
    (run,) = bench.runs()
    assert (run.status, len(run.attempts)) == ("succeeded", 1), f"seed {seed}"
    assert_every_event_once(bench, run_id)
    assert bench.launcher().strays() == []


def test_sigterm_alone_leaves_the_run_to_be_adopted(bench: TrainingBench, tmp_path: Path) -> None:
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    process = start(tmp_path)
    wait_for(lambda: bench.runs() and is_stepping(bench, run_id))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert bench.runs()[0].status == "open"
    assert bench.launcher().observe(run_id, 1).state == "running"
    last = start(tmp_path)
    bench.control(run_id, "hold", None)
    output = last.communicate(timeout=240)[0].decode()
    assert last.returncode == 0, output
    (run,) = bench.runs()
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    assert_every_event_once(bench, run_id)


def test_cancelling_the_dagster_run_ends_every_process(bench: TrainingBench, tmp_path: Path) -> None:
    """What the UI's button does: the run's status becomes CANCELING, then its process gets SIGTERM."""
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    process = start(tmp_path)
    wait_for(lambda: bench.runs() and is_stepping(bench, run_id))
    os.environ["DAGSTER_HOME"] = str(tmp_path / "dagster")
    try:
        with dg.DagsterInstance.get() as instance:
            (run,) = instance.get_runs()
            instance.report_run_canceling(run)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=240)
            ended = instance.get_run_by_id(run.run_id)
    finally:
        del os.environ["DAGSTER_HOME"]
    assert ended is not None
    assert ended.status == dg.DagsterRunStatus.CANCELED
    (trained,) = bench.runs()
    assert (trained.status, [a.state for a in trained.attempts]) == ("cancelled", ["cancelled"])
    assert bench.launcher().strays() == []
    assert_every_event_once(bench, run_id)


def test_the_reconciler_finishes_what_nobody_follows(bench: TrainingBench, tmp_path: Path) -> None:
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    process = start(tmp_path)
    wait_for(lambda: bench.runs() and is_stepping(bench, run_id))
    process.kill()
    process.communicate()
    bench.control(run_id, "hold", None)
    wait_for(lambda: bench.launcher().observe(run_id, 1).state == "ended")
    todo = bench.json("reconcile", "--dry-run")
    assert [a["kind"] for a in todo["actions"]] == ["finish"]
    assert bench.runs()[0].status == "open"
    assert bench.run("reconcile").exit_code == 0
    assert bench.runs()[0].status == "succeeded"
    assert bench.json("reconcile")["actions"] == []
    assert_every_event_once(bench, run_id)


def test_supervisor_killed_is_a_lost_attempt_and_another_follows(bench: TrainingBench, tmp_path: Path) -> None:
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    process = start(tmp_path)
    wait_for(lambda: bench.runs() and is_stepping(bench, run_id))
    launcher = bench.launcher()
    supervisor = _supervisor(launcher.run_dir(run_id))
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: len(bench.runs()[0].attempts) == 2)
    assert {a for _, a, _ in launcher.strays()} <= {2}
    bench.control(run_id, "hold", None)
    output = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, output
    (run,) = bench.runs()
    assert [a.state for a in run.attempts] == ["lost", "succeeded"]
    assert_every_event_once(bench, run_id)


def _supervisor(run_dir: Path) -> int:
    return int(json.loads((run_dir / "attempts" / "1" / "supervisor.json").read_text())["pid"])


def test_a_stream_that_lost_events_ends_the_attempt_and_another_follows(bench: TrainingBench, tmp_path: Path) -> None:
    """As after a power loss: the catalog holds more of a node's stream than the file."""
    run_id = planned_run_id(bench)
    bench.control(run_id, "hold", "")
    process = start(tmp_path)
    wait_for(lambda: bench.runs() and is_stepping(bench, run_id))
    stream = bench.launcher().run_dir(run_id) / "attempts" / "1" / "node-0" / "events.jsonl"
    os.truncate(stream, 0)
    wait_for(lambda: len(bench.runs()[0].attempts) == 2)
    bench.control(run_id, "hold", None)
    output = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, output
    assert [a.state for a in bench.runs()[0].attempts] == ["lost", "succeeded"]
    assert bench.launcher().strays() == []
