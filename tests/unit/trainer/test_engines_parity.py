"""Two ranks compute what one process does with the whole batch, for each engine; the gate sees a lost gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer_runs import ENGINES, start_ranks, toy_spec, warm, with_options

from trainer.batches import BatchPlan
from trainer.spec import BatchSpec, RunSpec

STEPS = 20
GATE = 1e-5


def take_steps(folder: Path, spec: RunSpec, ranks: int, **arguments: object) -> list[dict[str, Any]]:
    """What each rank wrote after `STEPS` steps; one process with plain torch when `ranks` is 0."""
    folder.mkdir()
    function = "support.trainer_toys:engine_steps" if ranks else "support.trainer_toys:bare_steps"
    given = {"spec_json": json.dumps(spec.to_json()), "steps": STEPS, "out": str(folder / "rank"), **arguments}
    assert set(warm().wait(start_ranks(function, [folder / "attempt.json"] * (ranks or 1), given))) == {0}
    return [json.loads((folder / f"rank-{rank}.json").read_bytes()) for rank in range(ranks or 1)]


def difference(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> float:
    return max(abs(a - b) for a, b in zip(ours[what], theirs[what], strict=True))


def short_batches(engine: str) -> RunSpec:
    """37 rows in batches of 8, in 2 micro-batches a rank: the last batch of each epoch is filled up."""
    return with_options(toy_spec(engine, batch=BatchSpec(global_size=8, accumulation=2)), rows=37)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return take_steps(tmp_path_factory.mktemp("bare") / "steps", short_batches("ddp"), 0)[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_equal_one_process(engine: str, bare: dict[str, Any], tmp_path: Path) -> None:
    first, second = take_steps(tmp_path / "two", short_batches(engine), 2)
    assert first == second, "replicas that differ"
    assert difference(first, bare, "losses") < GATE
    # AdamW hides constant factors of the gradient from the losses; the norm shows them.
    assert difference(first, bare, "norms") < GATE


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gate_sees_the_gradient_of_one_rank_dropped(engine: str, bare: dict[str, Any], tmp_path: Path) -> None:
    lame = take_steps(tmp_path / "lame", short_batches(engine), 2, drop_rank=1)[0]
    assert difference(lame, bare, "norms") > 100 * GATE
    assert difference(lame, bare, "losses") > 100 * GATE


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_either_node_change_the_weights(engine: str, tmp_path: Path) -> None:
    spec = toy_spec(engine)
    plan = BatchPlan(40, 8, 2, 1, spec.seed)
    found: set[str] = set()
    # One step, in which only one of the ranks sees the row that is changed.
    for name, rank in (("none", None), ("first", 0), ("second", 1)):
        flip = [] if rank is None else [int(plan.micro_batches(plan.order(0), 0, rank)[0][0][0])]
        found.add(take_steps(tmp_path / name, with_options(spec, flip=flip), 2, steps=1)[0]["weights"])
    assert len(found) == 3
