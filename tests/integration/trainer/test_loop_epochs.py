"""Epochs: early stopping, the step that is exported, validation over ranks, torchrun in the place of our node."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from support.trainer_runs import ROOT, WAIT_S, Run, toy_spec, with_options

from trainer.spec import OptimizerSpec, RunSpec, ScheduleSpec


def overfitting(nodes: int = 2) -> RunSpec:
    """8 rows, learned by heart at a high rate: validation gets worse soon."""
    spec = toy_spec(nodes=nodes, optimizer=OptimizerSpec(lr=0.1, weight_decay=0.0))
    schedule = ScheduleSpec(epochs=40, patience=3, checkpoint_every=1)
    return with_options(replace(spec, schedule=schedule), rows=8, valid=9)


def test_training_stops_early_and_exports_the_best_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", overfitting())
    assert run.finish() == [0, 0]
    epochs = [event.data for event in run.events("epoch")]
    best = max(epoch["epoch"] for epoch in epochs if epoch["best"])
    losses = [epoch["valid_loss"] for epoch in epochs]
    assert losses[best - 1] == min(losses)
    assert len(epochs) == best + 3 < 40
    metrics = run.events("metrics")[0].data
    assert (metrics["best_epoch"], metrics["best_step"], metrics["epochs"]) == (best, best, best + 3)
    assert metrics["valid_loss"] == min(losses)
    assert run.checkpoints() == [f"step-{best:08d}", f"step-{best + 3:08d}"]
    assert json.loads((run.folder / "checkpoints" / "best.json").read_bytes())["step"] == best

    # Killed while it waits for something better: how long it has waited is not forgotten.
    killed = Run(tmp_path / "killed", overfitting())
    assert killed.finish(kill={"rank": 0, "step": best + 1})[0] == -signal.SIGKILL
    assert killed.finish() == [0, 0]
    assert killed.events("metrics")[0].data == metrics
    assert killed.weights() == run.weights()

    patient = Run(tmp_path / "patient", replace(run.spec, schedule=replace(run.spec.schedule, patience=40)))
    assert patient.finish() == [0, 0]
    assert patient.events("metrics")[0].data["epochs"] == 40
    assert [event.data for event in patient.events("epoch")][: len(epochs)] == epochs


def test_validation_is_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    epochs = {}
    for nodes in (1, 2):
        run = Run(tmp_path / str(nodes), replace(toy_spec(nodes=nodes), schedule=ScheduleSpec(epochs=2, patience=2)))
        assert run.finish() == [0] * nodes
        epochs[nodes] = [event.data for event in run.events("epoch")]
    for one, two in zip(epochs[1], epochs[2], strict=True):
        assert abs(one["valid_loss"] - two["valid_loss"]) < 1e-5
        assert abs(one["train_loss"] - two["train_loss"]) < 1e-5
        assert one["valid_auc"] == two["valid_auc"]


def test_torchrun_starts_ranks_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec())
    file = run.prepare()
    environ = {
        **os.environ,
        "TRAINER_ATTEMPT": str(file),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        # Else every restart would use the store of the dead generation.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    rank = [sys.executable, "-c", "import sys; from support.trainer_runs import run_rank; sys.exit(run_rank())"]
    subprocess.run(
        [*torchrun, "--nnodes=1", "--nproc-per-node=2", "--no-python", *rank],
        env=environ,
        check=True,
        timeout=2 * WAIT_S,
        cwd=ROOT,
    )
    assert [event.data["name"] for event in run.events("artifact")] == ["network", "logistic"]
    assert run.checkpoints() == ["step-00000015"]
