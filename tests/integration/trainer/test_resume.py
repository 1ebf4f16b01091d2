"""A run that was killed, stopped or preempted reaches the very bits of one that was left alone."""

import functools
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.trainer_runs import ENGINES, Run, toy_spec, warm, with_options

from trainer.spec import ExitCode, RunSpec

Undisturbed = Callable[[str], Run]


def spec_of(engine: str) -> RunSpec:
    """Short last batches, dropout, two optimizer groups: whatever a resume could forget."""
    return with_options(toy_spec(engine), rows=37, dropout=0.3, groups=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @functools.cache
    def run(engine: str) -> Run:
        done = Run(tmp_path_factory.mktemp("undisturbed") / "run", spec_of(engine))
        assert done.finish() == [0, 0]
        return done

    return run


def assert_same(run: Run, other: Run) -> None:
    assert run.losses() == other.losses()
    assert run.state() == other.state()
    assert run.weights() == other.weights()
    assert run.events("metrics")[0].data == other.events("metrics", 1)[0].data


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_a_rank(engine: str, rank: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", spec_of(engine))
    codes = run.finish(kill={"rank": rank, "step": 7})
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == ExitCode.LOST_PEER
    assert run.error(1 - rank)["kind"] == "PeerLost"
    # Steps 5 (the best so far) and 6 were saved; killed again later.
    assert run.finish(kill={"rank": 1 - rank, "step": 5})[1 - rank] == -signal.SIGKILL
    assert run.events("step")[0].data["step"] == 7
    assert run.finish() == [0, 0]
    assert run.events("step")[0].data["step"] == 11
    assert_same(run, undisturbed(engine))


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "sigterm"), (signal.SIGUSR1, "preempt"), (signal.SIGINT, "sigterm")]
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    number: signal.Signals, reason: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    spec = spec_of("ddp")
    run = Run(tmp_path / "run", replace(spec, schedule=replace(spec.schedule, checkpoint_every=1000)))
    ranks = run.begin(pause_s=0.3)
    run.wait_for_step(6)
    ranks[1].signal(signal.SIGHUP)
    ranks[1].signal(number)
    assert warm().wait(ranks) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    last = run.events("step")[-1].data["step"]
    assert last >= 7
    assert run.checkpoints()[-1] == f"step-{last:08d}"
    for rank in (0, 1):
        assert run.error(rank)["message"] == f"stopped after step {last} ({reason}), checkpoint published"
    assert run.finish() == [0, 0]
    assert_same(run, undisturbed("ddp"))


def test_a_stopped_peer_ends_the_other_rank_at_the_deadline(tmp_path: Path) -> None:
    spec = toy_spec()
    run = Run(tmp_path / "run", replace(spec, restart=replace(spec.restart, group_timeout_s=5.0)))
    ranks = run.begin(pause_s=0.3)
    run.wait_for_step(3)
    ranks[1].signal(signal.SIGSTOP)
    assert warm().wait(ranks[:1]) == [ExitCode.LOST_PEER]
    ranks[1].signal(signal.SIGKILL)
    warm().wait(ranks)


def test_a_run_that_has_finished_only_exports_again(undisturbed: Undisturbed) -> None:
    run = undisturbed("ddp")
    first, weights = run.attempts, run.weights()
    assert run.finish() == [0, 0]
    assert run.attempts == first + 1
    assert run.events("step") == []
    assert run.weights() == weights


def test_a_run_goes_on_with_another_engine_and_world(undisturbed: Undisturbed, tmp_path: Path) -> None:
    spec = replace(spec_of("deepspeed"), model=with_options(spec_of("ddp"), dropout=0.0).model)
    run = Run(tmp_path / "run", spec)
    assert run.finish(kill={"rank": 0, "step": 8})[0] == -signal.SIGKILL
    saved = run.events("step")
    other = Run(run.folder, replace(spec, layout=toy_spec("ddp", 1).layout), run.attempts)
    assert other.finish() == [0]
    whole = Run(tmp_path / "whole", spec)
    assert whole.finish() == [0, 0]
    theirs = {e.data["step"]: e.data["loss"] for e in whole.events("step")}
    for event in (*saved, *other.events("step")):
        assert abs(event.data["loss"] - theirs[event.data["step"]]) < 1e-5
    assert other.events("step")[0].data["step"] == 9
