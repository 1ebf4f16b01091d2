"""What ends a rank, and what its status and error file say."""

import contextlib
import signal
import time
from pathlib import Path

import pytest
from support.trainer_runs import ENGINES, Run, start_ranks, toy_spec, warm, with_options

from trainer.spec import ExitCode


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_not_finite_names_the_step_on_all_ranks(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(toy_spec(engine), poison=6))
    assert run.finish() == [ExitCode.USER_CODE, ExitCode.USER_CODE]
    for rank in (0, 1):
        assert run.error(rank)["kind"] == "LossNotFinite"
        assert run.error(rank)["message"].startswith("the loss is not finite at step 7 (epoch 2): loss nan")
    assert run.checkpoints()[-1] == "step-00000006"
    assert run.events("error")[0].data["kind"] == "LossNotFinite"


def test_an_error_of_the_model_is_told_with_its_stack(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(toy_spec(), fail=3))
    codes = run.finish()
    # The other rank fails by itself, or sees that one gone first.
    assert ExitCode.USER_CODE in codes
    assert set(codes) <= {ExitCode.USER_CODE, ExitCode.LOST_PEER}
    error = run.error(codes.index(ExitCode.USER_CODE))
    assert (error["kind"], error["message"]) == ("ValueError", "the model of this test fails here")
    assert "trainer_toys.py" in error["stack"]


@pytest.mark.parametrize("status", [0, 75, None, "bye"])
def test_a_model_that_ends_the_process_is_an_error_of_the_code(status: object, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(toy_spec(nodes=1), quit_at=3, quit_with=status))
    assert run.finish() == [ExitCode.USER_CODE]
    error = run.error(0)
    assert (error["kind"], error["code"]) == ("SystemExit", 65)
    assert error["message"] == f"the code ended the process itself: sys.exit({status!r})"
    assert run.events("error")[0].data["message"] == error["message"]


def test_an_error_with_text_that_no_document_takes_is_told_all_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(toy_spec(nodes=1), garble=3))
    assert run.finish() == [ExitCode.USER_CODE]
    assert run.error(0)["message"] == "before \\udcff and \\x00 after"
    assert "trainer_toys.py" in run.error(0)["stack"]
    assert run.events("error")[0].data["message"] == run.error(0)["message"]


def test_d09_a_rank_of_another_attempt_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec())
    old = run.prepare()
    new = run.prepare()
    ranks = start_ranks("support.trainer_runs:run_rank", [new, old], {})
    assert warm().wait(ranks[1:]) == [ExitCode.LOST_PEER]
    run.attempts = 1
    error = run.error(1)
    assert error["kind"] == "WrongAttempt"
    assert '"attempt":1' in error["message"]
    assert '"attempt":2' in error["message"]
    ranks[0].signal(signal.SIGTERM)
    assert warm().wait(ranks[:1]) == [ExitCode.PREEMPTED]


def test_a_stale_attempt_publishes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec())
    ranks = run.begin(pause_s=0.3)
    run.wait_for_step(2)
    (run.folder / "attempts" / "2").mkdir()
    assert warm().wait(ranks) == [ExitCode.LOST_PEER, ExitCode.LOST_PEER]
    assert {run.error(rank)["message"] for rank in (0, 1)} == {"attempt 1 is stale: attempt 2 exists"}
    refused = run.events("step")[-1].data["step"]
    assert all(checkpoint < f"step-{refused:08d}" for checkpoint in run.checkpoints())
    assert run.events("metrics") == []


def test_a_cancelled_attempt_stops_without_saving(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec())
    ranks = run.begin(pause_s=0.3)
    run.wait_for_step(5)
    (run.attempt_folder / "cancel").write_text("{}")
    ranks[0].signal(signal.SIGTERM)
    assert warm().wait(ranks) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    stopped = run.events("step")[-1].data["step"]
    assert f"stopped after step {stopped} (cancel)" in run.error(0)["message"]
    assert f"step-{stopped:08d}" not in run.checkpoints()


def test_a_second_sigint_ends_a_rank_at_once_and_sigusr2_writes_stacks(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec(nodes=1))
    ranks = run.begin(pause_s=5.0)
    stacks = run.attempt_folder / "node-0" / "rank-0.stacks.txt"
    until = time.monotonic() + 60
    while not (stacks.exists() and "in _trouble" in stacks.read_text()):
        assert time.monotonic() < until
        time.sleep(0.1)
        if any(event.data["name"] == "train" for event in run.events("phase")):
            ranks[0].signal(signal.SIGUSR2)
    for _ in range(3):
        with contextlib.suppress(ProcessLookupError):
            ranks[0].signal(signal.SIGINT)
        time.sleep(0.3)
    assert warm().wait(ranks) == [128 + signal.SIGINT]
    assert run.checkpoints() == []
