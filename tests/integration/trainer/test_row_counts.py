"""Field report D03: row counts that do not divide by ranks, batch and accumulation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.trainer_runs import ENGINES, Run, start_ranks, toy_spec, warm, with_options

from trainer.spec import BatchSpec, ExitCode, RunSpec


def spec_of(engine: str, rows: int, valid: int) -> RunSpec:
    """Two ranks, 2 rows each in each of 2 micro-batches: 8 rows a step."""
    spec = toy_spec(engine, batch=BatchSpec(global_size=8, accumulation=2))
    return with_options(replace(spec, schedule=replace(spec.schedule, epochs=2)), rows=rows, valid=valid)


def loss_of_one_process(folder: Path, spec: RunSpec) -> float:
    """The mean loss over the real rows of the first batch."""
    folder.mkdir()
    given = {"spec_json": json.dumps(spec.to_json()), "steps": 1, "out": str(folder / "bare")}
    assert warm().wait(start_ranks("support.trainer_toys:bare_steps", [folder / "attempt.json"], given)) == [0]
    return json.loads((folder / "bare-0.json").read_bytes())["losses"][0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rows", "valid"), [(1, 1), (3, 2), (5, 3), (17, 5)])
def test_d03_any_row_count_trains_by_the_stated_rule(engine: str, rows: int, valid: int, tmp_path: Path) -> None:
    spec = spec_of(engine, rows, valid)
    run = Run(tmp_path / "run", spec)
    assert run.finish() == [0, 0]
    per_epoch = -(-rows // 8)
    metrics = run.events("metrics")[0].data
    assert (metrics["steps"], metrics["samples"]) == (2 * per_epoch, 2 * rows)
    steps = [event.data for event in run.events("step")]
    assert [step["samples"] for step in steps[:per_epoch]] == [min(8 * (i + 1), rows) for i in range(per_epoch)]
    # Filling counts in no mean.
    assert abs(steps[0]["loss"] - loss_of_one_process(tmp_path / "bare", spec)) < 1e-6
    weights = [8] * (rows // 8) + [rows % 8]
    mean = sum(weight * step["loss"] for weight, step in zip(weights, steps, strict=False)) / rows
    assert abs(run.events("epoch")[0].data["train_loss"] - mean) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rows", "valid"), [(0, 3), (3, 0)])
def test_d03_no_rows_are_refused_before_training(engine: str, rows: int, valid: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", spec_of(engine, rows, valid))
    assert run.finish() == [ExitCode.REFUSED_SPEC, ExitCode.REFUSED_SPEC]
    assert f"0 rows (train {rows}, valid {valid}, batch 8 on 2 ranks)" in run.error(0)["message"]
    assert "train" not in [event.data["name"] for event in run.events("phase")]
