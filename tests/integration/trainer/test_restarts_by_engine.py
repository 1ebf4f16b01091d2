"""Restarts of every engine, ZeRO stages apart: bits after a kill, fewer nodes, a slow rank, a frozen one, no host."""

import functools
import json
import math
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.beside_ranks import finish, rows_seen
from support.slow_ranks import ElasticRun, begin_slow, elastic
from support.trainer_runs import Run, toy_spec, warm, with_options

from headway.training.tensors import read_tensors
from trainer.spec import ExitCode, RunSpec

KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
Undisturbed = Callable[[str], Run]


def spec_of(kind: str, **schedule: object) -> RunSpec:
    """Short batches and two optimizer groups; dropout, whose draws differ by rank, only where the layout stays."""
    engine, zero = ("deepspeed", int(kind[4:])) if kind.startswith("zero") else (kind, 0)
    spec = with_options(toy_spec(engine), rows=37, groups=True)
    changed = replace(spec.schedule, **{"synchronous": False, **schedule})
    return replace(spec, layout=replace(spec.layout, zero=zero), schedule=changed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @functools.cache
    def run(kind: str) -> Run:
        done = Run(tmp_path_factory.mktemp("undisturbed") / "run", spec_of(kind))
        assert done.finish() == [0, 0]
        return done

    return run


def assert_close(run: Run, other: Run, tolerance: float) -> None:
    theirs = {e.data["step"]: e.data["loss"] for e in other.events("step", 1)}
    for attempt in range(1, run.attempts + 1):
        for event in run.events("step", attempt):
            assert abs(event.data["loss"] - theirs[event.data["step"]]) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_d01_killed_at_a_random_step_every_stage_sees_the_same_rows_and_reaches_the_same_bits(
    kind: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    step, rank = random.randrange(1, 14), random.randrange(2)
    run = Run(tmp_path / "run", spec_of(kind))
    codes = finish(run, kill={"rank": rank, "step": step}, slow_s=0.01, note=True)
    assert codes[rank] == -signal.SIGKILL, f"step {step}, rank {rank}"
    reached = max((e.data["step"] for e in run.events("step")), default=0)
    assert finish(run, note=True) == [0, 0], f"step {step}, rank {rank}"
    # Lost: what was taken after the last complete checkpoint, one is made every 2 steps and at each best one.
    assert reached - (run.events("step")[0].data["step"] - 1) <= 4, f"step {step}, rank {rank}"
    assert run.losses() == undisturbed(kind).losses()
    assert run.state() == undisturbed(kind).state()
    assert run.weights() == undisturbed(kind).weights()
    seen = rows_seen(run)
    for epoch in range(3):
        rows = [row for step in range(5 * epoch, 5 * (epoch + 1)) for row in seen[step]]
        assert sorted(rows) == list(range(37))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_node_leaves_the_run_on_one_with_the_losses_of_two(
    kind: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = ElasticRun(tmp_path / "run", elastic(spec_of(kind)))
    # Rank 0 hosts the store where ranks meet: with it the rendezvous is lost too.
    assert run.finish(kill={"rank": 0, "step": 8}, pause_s=0.02)[0] == -signal.SIGKILL
    assert run.finish_on(1) == [0]
    assert 6 <= run.events("step")[0].data["step"] <= 9
    assert_close(run, undisturbed(kind), 1e-5)
    assert run.events("step")[-1].data["step"] == undisturbed(kind).events("step", 1)[-1].data["step"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_rank_is_named_and_changes_no_bit(kind: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", spec_of(kind))
    ranks = begin_slow(run, rank=1, pause_s=0.4)
    assert warm().wait(ranks) == [0, 0]
    assert 1 in [e.data["rank"] for e in run.events("straggler")]
    (timeout,) = run.events("collective_timeout")
    assert timeout.data["slowest_step_s"] >= 0.4
    assert timeout.data["seconds"] == max(60.0, 5.0 * timeout.data["slowest_step_s"])
    assert run.losses() == undisturbed(kind).losses()
    assert run.weights() == undisturbed(kind).weights()


@pytest.mark.parametrize("kind", ["fsdp2", "zero1", "zero2", "zero3"])
def test_a_frozen_peer_costs_the_steps_since_the_checkpoint(
    kind: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    spec = spec_of(kind)
    run = Run(tmp_path / "run", replace(spec, restart=replace(spec.restart, group_timeout_s=8.0)))
    ranks = run.begin(pause_s=0.3)
    run.wait_for_step(3)
    ranks[1].signal(signal.SIGSTOP)
    assert warm().wait(ranks[:1]) == [ExitCode.LOST_PEER]
    ranks[1].signal(signal.SIGKILL)
    warm().wait(ranks)
    reached = run.events("step")[-1].data["step"]
    # A deadline that short is for the frozen attempt alone: a busy machine may need longer to start.
    again = Run(run.folder, spec, run.attempts)
    assert again.finish() == [0, 0]
    assert reached - (again.events("step")[0].data["step"] - 1) <= 4
    assert again.weights() == undisturbed(kind).weights()


@pytest.mark.parametrize("kind", ["fsdp2", "zero1", "zero2", "zero3"])
def test_d07_a_preemption_saves_after_the_same_step_whatever_the_engine(
    kind: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", spec_of(kind, checkpoint_every=1000))
    ranks = run.begin(pause_s=0.2)
    run.wait_for_step(6)
    ranks[1].signal(signal.SIGHUP)
    ranks[1].signal(signal.SIGUSR1)
    assert warm().wait(ranks) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    last = run.events("step")[-1].data["step"]
    assert run.checkpoints()[-1] == f"step-{last:08d}"
    assert run.finish() == [0, 0]
    assert run.events("step")[0].data["step"] == last + 1
    assert run.weights() == undisturbed(kind).weights()


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_rank_holds_whole_is_exported_piece_by_piece(kind: str, undisturbed: Undisturbed) -> None:
    run = undisturbed(kind)
    names = [e.data["name"] for e in run.events("artifact")]
    assert names == ["network", "logistic", *(["weights"] if kind in ("fsdp2", "zero3") else [])]
    folder = run.attempt_folder / "artifact" / "weights"
    assert folder.exists() == ("weights" in names)
    if folder.exists():
        files = sorted(folder.glob("model-*.safetensors"))
        pieces = {k: v for file in files for k, v in read_tensors(file.read_bytes()).items()}
        assert pieces == read_tensors(run.weights())
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        assert set(index["weight_map"]) == set(pieces)


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_the_newest_checkpoint_is_corrupt_and_the_one_before_is_gone_on_from(
    kind: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", spec_of(kind, keep_last=2))
    assert finish(run, kill={"rank": 1, "step": 9}, pause_s=0.05)[1] == -signal.SIGKILL
    *_, older, newest = [name for name in run.checkpoints() if not name.endswith(".partial")]
    file = run.folder / "checkpoints" / newest / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert finish(run) == [0, 0]
    passed = [e.data["message"] for e in run.events("error") if e.data["kind"] == "CheckpointBroken"]
    assert any(message.startswith(f"{newest}/rank-1.safetensors:") for message in passed)
    assert run.events("step")[0].data["step"] == int(older[5:]) + 1
    assert run.weights() == undisturbed(kind).weights()


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_d11_a_full_disk_keeps_the_first_checkpoint(kind: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    whole = undisturbed(kind)
    newest = whole.folder / "checkpoints" / whole.checkpoints()[-1]
    quota = sum(math.ceil(file.stat().st_size / 4096) * 4096 for file in newest.iterdir()) * 3 // 2
    run = Run(tmp_path / "run", spec_of(kind, synchronous=True))
    assert run.finish(quota=quota) == [ExitCode.LOST_PEER, ExitCode.LOST_PEER]
    assert run.checkpoints() == ["step-00000002"]
    assert {e.data["kind"] for e in run.events("error")} == {"DiskFull"}
    assert run.finish() == [0, 0]
    assert run.events("step")[0].data["step"] == 3
    assert run.weights() == whole.weights()


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_d03_five_rows_on_two_ranks_are_each_counted_once(kind: str, tmp_path: Path) -> None:
    spec = with_options(spec_of(kind), rows=5, valid=3)
    run = Run(tmp_path / "run", replace(spec, batch=replace(spec.batch, accumulation=2)))
    assert run.finish() == [0, 0]
    metrics = run.events("metrics")[0].data
    assert (metrics["steps"], metrics["samples"]) == (3, 15)


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_d05_groups_and_frozen_layers_of_zero_stages_come_back(kind: str, tmp_path: Path) -> None:
    spec = with_options(spec_of(kind), frozen=True)
    run, whole = Run(tmp_path / "run", spec), Run(tmp_path / "whole", spec)
    assert whole.finish() == [0, 0]
    assert finish(run, kill={"rank": 1, "step": 7}, slow_s=0.01)[1] == -signal.SIGKILL
    assert run.finish() == [0, 0]
    assert run.state() == whole.state()
    engine = json.loads((run.folder / "checkpoints" / run.checkpoints()[-1] / "rank-0.json").read_bytes())["engine"]
    assert [group["weight_decay"] for group in engine["groups"]] == [0.0, 0.1]
    assert engine["frozen"] == ["enter.weight", "enter.bias"]
