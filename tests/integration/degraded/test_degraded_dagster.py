"""Dagster's storage is deleted while a training runs: the run goes on, the catalog ends it, and a sync shows it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.training_bench import AS_OF, TrainingBench, build_shop, end_everything
from support.training_waits import is_stepping, wait_for

from assets.sync import sync
from headway.home import write_dagster_instance
from headway.loading import load_pipeline

ROOT = Path(__file__).resolve().parents[3]
KEY = dg.AssetKey(["shop", "training_run"])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[TrainingBench]:
    found = build_shop(tmp_path)
    (tmp_path / "toy").touch()
    yield found
    end_everything(found)


def _step(bench: TrainingBench, root: Path) -> "subprocess.Popen[bytes]":
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    own = {
        **bench.environment,
        "DAGSTER_HOME": str(write_dagster_instance(bench.settings)),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    command = [sys.executable, "-m", "support.training_child", str(root), AS_OF]
    with (root / "step.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=inherited | own, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("killed", [True, False], ids=["step killed", "step lives"])
def test_dagsters_storage_is_deleted_while_a_training_runs(bench: TrainingBench, tmp_path: Path, killed: bool) -> None:
    hold = bench.home / "runs" / "default" / "hold"
    hold.parent.mkdir(parents=True)
    hold.touch()
    step = _step(bench, tmp_path)
    try:
        (run,) = wait_for(bench.runs)
        wait_for(lambda: is_stepping(bench, run.run_id))
        shutil.rmtree(bench.home / "dagster")
        if killed:
            step.kill()
        hold.unlink()
        wait_for(lambda: bench.json("reconcile")["actions"] == [] and bench.runs()[0].status == "succeeded")
    finally:
        step.kill()
        step.wait()
    (ended,) = bench.runs()
    assert (ended.run_id, [a.state for a in ended.attempts]) == (run.run_id, ["succeeded"])
    with dg.DagsterInstance.from_config(str(write_dagster_instance(bench.settings))) as instance:
        assert instance.get_materialized_partitions(KEY) == set()
    assert sync(bench.settings, [load_pipeline(bench.folder)], check=False) == 0
    with dg.DagsterInstance.from_config(str(write_dagster_instance(bench.settings))) as instance:
        assert instance.get_materialized_partitions(KEY) == {AS_OF}
        (record,) = instance.fetch_materializations(KEY, limit=5).records
        assert record.asset_materialization is not None
        assert record.asset_materialization.metadata["run_id"].value == run.run_id
        finished = instance.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(KEY, "finished"))
        assert finished is not None
        assert finished.evaluation is not None
        assert finished.evaluation.passed
    assert bench.run("fsck").exit_code == 0
