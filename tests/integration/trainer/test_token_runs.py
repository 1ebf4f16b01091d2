"""Training on tokens: judged alike under every layout, by steps as by epochs; data are verified before it starts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.token_runs import VOCAB, begin, judged, token_spec
from support.trainer_runs import Run, warm

from trainer.spec import BatchSpec, ExitCode, LayoutSpec, ScheduleSpec

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp2": {"shard": 2},
    "zero2": {"engine": "deepspeed", "zero": 2, "dp": 2},
    "tensor": {"tp": 2},
    "sequence": {"sp": 2},
    "pipeline": {"pp": 2},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Validation losses of one process."""
    return losses(tmp_path_factory.mktemp("alone"), LayoutSpec(), "fp32")


def losses(folder: Path, layout: LayoutSpec, precision: Any) -> list[float]:  # noqa: ANN401
    """Validation losses after each of three steps; all ranks have the same bits."""
    schedule = ScheduleSpec(steps=3, judge_every=1, checkpoint_every=10, synchronous=True)
    spec = token_spec(folder / "run" / "store")
    spec = replace(spec, layout=layout, schedule=schedule, precision=precision, batch=BatchSpec(8, layout.pp))
    run = Run(folder / "run", spec)
    assert warm().wait(begin(run, layout.world_size)) == [0] * layout.world_size, run.started[0].log.read_text()
    by_rank = judged(run)
    assert len(by_rank) == layout.world_size
    assert all(rank == by_rank[0] for rank in by_rank)
    epochs = [event.data for event in run.events("epoch")]
    assert [(entry["epoch"], entry["step"]) for entry in epochs] == [(1, 1), (1, 2), (1, 3)]
    assert run.events("metrics")[-1].data["epochs"] == 3
    # Nats per token of a model that knows nothing yet, whatever a sample holds.
    assert run.events("step")[0].data["loss"] == pytest.approx(math.log(VOCAB), abs=0.2)
    return [float.fromhex(text) for text in by_rank[0]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_judges_as_one_process_does(name: str, alone: list[float], tmp_path: Path) -> None:
    given = {"engine": "fsdp2" if name == "fsdp2" else "ddp", "nodes": 2, **LAYOUTS[name]}
    found = losses(tmp_path, LayoutSpec(**given), "fp32")
    assert found == pytest.approx(alone, abs=1e-5)
    assert len(set(found)) == 3


def test_steps_go_on_over_epochs_and_end_where_they_are_told(tmp_path: Path) -> None:
    schedule = ScheduleSpec(epochs=1, steps=11, checkpoint_every=100, synchronous=True)
    spec = replace(token_spec(tmp_path / "run" / "store", nodes=1), schedule=schedule)
    run = Run(tmp_path / "run", spec)
    assert warm().wait(begin(run, 1)) == [0]
    # An epoch has 8 steps; the last judgement is that of the last step.
    assert [(e.data["epoch"], e.data["step"]) for e in run.events("epoch")] == [(1, 8), (2, 11)]
    metrics = run.events("metrics")[-1].data
    assert (metrics["steps"], metrics["samples"]) == (11, 61 + 24)
    assert "valid_auc" not in metrics
    assert [e.data["name"] for e in run.events("artifact")] == ["network"]


def test_an_altered_shard_is_refused_before_the_ranks_meet(tmp_path: Path) -> None:
    spec = token_spec(tmp_path / "run" / "store")
    file = spec.tokens.of_split("train")[1]
    blob = tmp_path / "run" / "store" / "sha256" / file.sha256[7:9] / file.sha256[9:]
    content = bytearray(blob.read_bytes())
    content[100] ^= 1
    blob.write_bytes(content)
    run = Run(tmp_path / "run", spec)
    assert warm().wait(begin(run, 2)) == [ExitCode.REFUSED_SPEC, ExitCode.REFUSED_SPEC]
    assert run.error(0)["message"].startswith(f"shard train 1: the stored bytes of {file.sha256} have the digest ")
