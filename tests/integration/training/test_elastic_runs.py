"""An elastic run: a node is lost, the machine carries fewer, and the next attempt goes on with what there is."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training_bench import AS_OF, TrainingBench, copy_bench, end_everything, write_shop
from support.training_waits import wait_for

from headway.catalog.run_facts import TrainingRun
from headway.loading import load_pipeline
from headway.training.describe import loss_curve
from headway.training.follow import Follower, follow
from headway.training.local import LocalLauncher
from headway.training.plan import LayoutRefused, Overrides, plan_run
from headway.training.reconcile import Action, Reconciler
from headway.training.submit import submit


def _elastic(attributes: dict[str, Any]) -> None:
    attributes["training"] |= {"nodes": {"min": 1, "max": 2}, "epochs": 30, "checkpoint_every": 20}
    attributes["training"]["early_stopping"] = {"last": "7d", "patience": 30}
    # What dropout draws depends on how the rows are spread.
    attributes["training"]["options"] |= {"dropout": 0.0}


def _start(bench: TrainingBench, launcher: LocalLauncher) -> str:
    with bench.services() as services:
        plan = plan_run(services, load_pipeline(bench.folder), AS_OF)
        return submit(services, launcher, plan, asker="person").run.run_id


def _finish(bench: TrainingBench, launcher: LocalLauncher, run_id: str) -> tuple[TrainingRun, list[Action]]:
    told: list[Action] = []
    with bench.services() as services:
        run = follow(services, launcher, run_id, Follower(lambda event: None, told.append))
    assert run.status == "succeeded", run.last.reason
    return run, told


def _saved(bench: TrainingBench, launcher: LocalLauncher, run_id: str) -> bool:
    with bench.services() as services:
        Reconciler(services, launcher).run(run_id)
        return bool(services.catalog.run_events(services.principal, run_id, kinds=("checkpoint",), limit=1))


def _node(launcher: LocalLauncher, rank: int) -> int:
    """The process of a node."""
    for _, _, pid in launcher.strays():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"trainer.node" in words and words[words.index(b"--node-rank") + 1] == str(rank).encode():
            return int(pid)
    raise AssertionError(f"node {rank} does not run")


@pytest.mark.xdist_group("spine")
def test_a_lost_node_leaves_a_run_on_one_node_from_the_last_checkpoint(
    shop: TrainingBench, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    bench, alone = copy_bench(shop, tmp_path / "lost"), copy_bench(shop, tmp_path / "alone")
    for one in (bench, alone):
        write_shop(one.folder, _elastic)
    roots = bench.launcher()
    small = LocalLauncher(roots.run_dir("x").parent, roots.store_root, roots.code_root, nodes=1)
    try:
        # The machine has lost a node by the time that the next attempt is made; the first one takes the most.
        run_id = _start(bench, small)
        wait_for(lambda: _saved(bench, small, run_id))
        os.kill(_node(small, 0), signal.SIGKILL)
        run, told = _finish(bench, small, run_id)
        assert [(a.state, a.layout["nodes"], a.layout["dp"]) for a in run.attempts] == [
            ("failed", 2, 2),
            ("succeeded", 1, 1),
        ]
        assert [a.detail for a in told if a.kind == "restart"] == ["attempt 2 follows on 1 nodes instead of 2"]
        shown = bench.json("runs", "show", run_id)
        assert [a["nodes"] for a in shown["attempt"]] == [2, 1]
        (restart,) = shown["restarts"]
        assert (restart["attempt"], restart["after"]) == (2, "peer_lost")
        assert restart["from_step"] >= 1
        # A checkpoint is made every 20 steps; those that the attempt told of last may lie a save further.
        assert restart["lost_steps"] is None or restart["lost_steps"] <= 40
        assert set(restart["seconds"]) >= {"launch", "imports", "data", "group"}
        record_property("restart", json.dumps(restart))
        whole, _ = _finish(alone, alone.launcher(), _start(alone, alone.launcher()))
        assert len(whole.attempts) == 1
        with bench.services() as services, alone.services() as others:
            curve, undisturbed = loss_curve(services, run), loss_curve(others, whole)
            first = services.catalog.run_events(services.principal, run_id, attempt=2, kinds=("step", "epoch"))[0]
        assert len(curve) == len(undisturbed) == 30
        for mine, theirs in zip(curve, undisturbed, strict=True):
            assert abs(mine.train_loss - theirs.train_loss) < 1e-5
            assert abs(mine.valid_loss - theirs.valid_loss) < 1e-5
        assert first.data["step"] > restart["from_step"]
    finally:
        end_everything(bench)
        end_everything(alone)


def test_a_range_that_does_not_divide_the_batch_is_refused_before_launch(shop: TrainingBench, tmp_path: Path) -> None:
    bench = copy_bench(shop, tmp_path)
    with bench.services() as services, pytest.raises(LayoutRefused, match="3 nodes cannot train"):
        plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides(nodes=4, min_nodes=3))
