"""Saves beside the training: killed, corrupted, slow or without space, a run reaches the bits of one left alone."""

import contextlib
import functools
import math
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.beside_ranks import begin, finish, rows_seen
from support.trainer_runs import ENGINES, Run, toy_spec, warm, with_options

from trainer.spec import ExitCode, RunSpec

Undisturbed = Callable[[str], Run]


def beside(engine: str, **schedule: object) -> RunSpec:
    """Saves do not hold the training up; dropout, short batches, two optimizer groups."""
    spec = with_options(toy_spec(engine), rows=37, dropout=0.3, groups=True)
    return replace(spec, schedule=replace(spec.schedule, **{"synchronous": False, **schedule}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Runs whose saves do hold the training up."""

    @functools.cache
    def run(engine: str) -> Run:
        done = Run(tmp_path_factory.mktemp("undisturbed") / "run", beside(engine, synchronous=True))
        assert done.finish() == [0, 0]
        return done

    return run


def assert_same(run: Run, other: Run) -> None:
    assert run.losses() == other.losses()
    assert run.state() == other.state()
    assert run.weights() == other.weights()


def passed_over(run: Run) -> list[str]:
    kinds = ("CheckpointTorn", "CheckpointBroken")
    return [e.data["message"].split(" ")[0] for e in run.events("error") if e.data["kind"] in kinds]


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_at_any_step_it_reaches_the_same_bits(engine: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    step, rank = random.randrange(1, 14), random.randrange(2)
    run = Run(tmp_path / "run", beside(engine))
    codes = finish(run, kill={"rank": rank, "step": step}, slow_s=0.01)
    assert codes[rank] == -signal.SIGKILL, f"step {step}, rank {rank}"
    assert finish(run) == [0, 0], f"step {step}, rank {rank}"
    assert_same(run, undisturbed(engine))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rank", "write"), [(1, 4), (0, 6)], ids=["part", "manifest"])
def test_kill_9_during_a_save(engine: str, rank: int, write: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", beside(engine))
    ranks = begin(run, die={"rank": rank, "write": write})
    assert warm().wait(ranks[rank : rank + 1]) == [-signal.SIGKILL]
    # As the node does; the other rank would wait for this one until the group's timeout.
    with contextlib.suppress(ProcessLookupError):
        ranks[1 - rank].signal(signal.SIGKILL)
    warm().wait(ranks)
    assert run.checkpoints() == ["step-00000002", "step-00000004.1.partial"]
    assert finish(run) == [0, 0]
    assert passed_over(run) == ["step-00000004.1.partial"]
    assert run.events("step")[0].data["step"] == 3
    assert_same(run, undisturbed(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_newest_is_corrupt(engine: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", beside(engine))
    assert finish(run, kill={"rank": 1, "step": 9}, pause_s=0.05)[1] == -signal.SIGKILL
    *_, older, newest = [name for name in run.checkpoints() if not name.endswith(".partial")]
    file = run.folder / "checkpoints" / newest / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert finish(run) == [0, 0]
    assert f"{newest}/rank-1.safetensors:" in passed_over(run)
    assert run.events("step")[0].data["step"] == int(older[5:]) + 1
    assert_same(run, undisturbed(engine))


def test_a_checkpoint_that_was_gone_on_from_gives_its_space_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", beside("fsdp2"))
    assert finish(run, kill={"rank": 1, "step": 5}, pause_s=0.05)[1] == -signal.SIGKILL
    ranks = begin(run, pause_s=0.1)
    run.wait_for_step(9)
    maps = [Path(f"/proc/{rank.pid}/maps").read_text() for rank in ranks]
    assert [line for text in maps for line in text.splitlines() if str(run.folder / "checkpoints") in line] == []
    assert warm().wait(ranks) == [0, 0]


def test_a_loss_that_is_not_finite_keeps_what_was_good_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(beside("ddp"), poison=6))
    assert finish(run, slow_s=0.3) == [ExitCode.USER_CODE, ExitCode.USER_CODE]
    assert run.error(0)["kind"] == "LossNotFinite"
    assert run.checkpoints()[-1] == "step-00000006"
    assert run.events("checkpoint")[-1].data["step"] == 6


@pytest.mark.parametrize("engine", ENGINES)
def test_d13_a_slow_store_and_a_save_after_every_step(engine: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", beside(engine, checkpoint_every=1))
    ranks = begin(run, slow_s=0.1)
    run.wait_for_step(4)
    ranks[1].signal(signal.SIGTERM)
    assert warm().wait(ranks) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    last = run.events("step")[-1].data["step"]
    assert run.checkpoints()[-1] == f"step-{last:08d}"
    told = [e.data["step"] for e in run.events("checkpoint")]
    assert told == list(range(1, last + 1))
    assert finish(run) == [0, 0]
    assert run.events("step")[0].data["step"] == last + 1
    assert_same(run, undisturbed(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_d11_no_space_for_a_save_beside_the_training(engine: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run, whole = Run(tmp_path / "run", beside(engine)), undisturbed(engine)
    newest = whole.folder / "checkpoints" / whole.checkpoints()[-1]
    quota = sum(math.ceil(file.stat().st_size / 4096) * 4096 for file in newest.iterdir()) * 3 // 2
    assert finish(run, quota=quota) == [ExitCode.LOST_PEER, ExitCode.LOST_PEER]
    # The save of step 4 is given up. That of step 5, the best, is missed when the next one is due.
    assert run.checkpoints() == ["step-00000002"]
    skipped, stopped, *_ = [event.data for event in run.events("error")]
    assert skipped["message"].endswith("training goes on without a checkpoint of step 4")
    assert stopped["message"].startswith("disk full: rank ")
    assert run.events("step")[-1].data["step"] == 6
    assert finish(run) == [0, 0]
    assert run.events("step")[0].data["step"] == 3
    assert_same(run, whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_d01_each_epoch_sees_each_row_once_whatever_was_killed(engine: str, tmp_path: Path) -> None:
    spec = with_options(toy_spec(engine), rows=1000)
    schedule = replace(spec.schedule, epochs=2, checkpoint_every=20, synchronous=False)
    spec = replace(spec, batch=replace(spec.batch, global_size=16), schedule=schedule)
    run, whole = Run(tmp_path / "run", spec), Run(tmp_path / "whole", spec)
    assert finish(whole, note=True) == [0, 0]
    assert finish(run, note=True, kill={"rank": 1, "step": 70})[1] == -signal.SIGKILL
    first = begin(run, note=True, kill={"rank": 0, "step": 40})
    assert warm().wait(first)[0] == -signal.SIGKILL
    assert run.events("step")[0].data["step"] in (41, 61, 64)
    assert finish(run, note=True) == [0, 0]
    seen = rows_seen(run)
    assert seen == rows_seen(whole)
    epochs = [[row for step in range(63 * e, 63 * (e + 1)) for row in seen[step]] for e in (0, 1)]
    for rows in epochs:
        assert sorted(rows) == list(range(1000))
    assert epochs[0] != epochs[1]
    assert run.state() == whole.state()
