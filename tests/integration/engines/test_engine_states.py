"""States move between layouts without losing a bit, and training goes on from them as one process would."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.forked import Warm
from trainer.spec import parse_layout

TESTS = Path(__file__).parents[2]
RUN, CASES = "trainer.forked:run_ranks", "support.engine_cases"
GATE = 1e-5
SAVED_AFTER = 3


def asked(engine: str, degrees: str, **more: object) -> dict[str, Any]:
    pp = parse_layout(engine, degrees).pp
    return {"engine": engine, "degrees": degrees, "accumulation": pp, **more}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    parent = Warm([CASES], [TESTS])
    yield parent
    parent.close()


def steps(warm: Warm, case: dict[str, Any], first: int, stop: int, load: str = "", save: str = "") -> dict[str, Any]:
    """What the first rank says; losses and norms are the same on all."""
    world = parse_layout(case["engine"], case["degrees"]).world_size
    given = {"asked": case, "first": first, "stop": stop, "load": load, "save": save}
    ranks = warm.call(RUN, function=f"{CASES}:steps", world=world, arguments=given)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def far(found: list[str], wanted: list[float]) -> float:
    return max(abs(float.fromhex(a) - b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def reference(warm: Warm) -> dict[str, Any]:
    (one,) = warm.call(RUN, function=f"{CASES}:reference", world=1, arguments={"asked": asked("ddp", "dp=1")})
    return one


@pytest.fixture(scope="module")
def saved(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved") / "ddp-2")
    steps(warm, asked("ddp", "dp=2"), 0, SAVED_AFTER, save=folder)
    return folder


OTHERS = {
    "ddp dp=1": asked("ddp", "dp=1"),
    "ddp dp=4": asked("ddp", "dp=4"),
    "ddp tp=2": asked("ddp", "tp=2"),
    "ddp sp=2": asked("ddp", "sp=2"),
    "ddp pp=2 zbv": asked("ddp", "pp=2", layout={"schedule": "zbv"}),
    "ddp tp=2,pp=2": asked("ddp", "tp=2,pp=2"),
    "fsdp2 shard=3": asked("fsdp2", "shard=3"),
    "fsdp2 dp=2,shard=2": asked("fsdp2", "dp=2,shard=2"),
    "fsdp2 shard=2,tp=2": asked("fsdp2", "shard=2,tp=2"),
    "fsdp2 shard=2,pp=2": asked("fsdp2", "shard=2,pp=2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_goes_through_any_layout_unchanged(name: str, warm: Warm, saved: str, tmp_path: Path) -> None:
    steps(warm, OTHERS[name], 0, 0, load=saved, save=str(tmp_path))
    compared = warm.call(f"{CASES}:same_states", one=saved, two=str(tmp_path))
    assert compared == {"names": 39, "different": []}
    # Of replicas one saves, and nobody saves what is another's.
    counts, whole = warm.call(f"{CASES}:elements", folder=str(tmp_path)), warm.call(f"{CASES}:elements", folder=saved)
    assert sum(counts) == sum(whole) == max(whole)


def test_training_goes_on_through_many_layouts_as_one_process_does(
    warm: Warm, saved: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    # A place that is wrong in the same way when read and when written would show only in what is learned from there.
    layouts = ("fsdp2", "shard=2"), ("fsdp2", "shard=2,tp=2"), ("ddp", "tp=2"), ("ddp", "pp=2"), ("ddp", "dp=1")
    chain = [asked(*layout) for layout in layouts]
    losses: list[str] = []
    norms: list[str] = []
    last, step = saved, SAVED_AFTER
    for number, case in enumerate(chain):
        following = str(tmp_path / str(number))
        said = steps(warm, case, step, step + 3, load=last, save=following)
        losses, norms = losses + said["losses"], norms + said["norms"]
        last, step = following, step + 3
    assert far(losses, reference["losses"][SAVED_AFTER:step]) < GATE
    assert far(norms, reference["grad_norms"][SAVED_AFTER:step]) < GATE


def test_experts_move_between_ranks(warm: Warm, tmp_path: Path) -> None:
    first, one, four = (str(tmp_path / name) for name in ("first", "one", "four"))
    steps(warm, asked("fsdp2", "ep=2"), 0, 2, save=first)
    steps(warm, asked("fsdp2", "ep=4"), 2, 2, load=first, save=four)
    assert warm.call(f"{CASES}:same_states", one=first, two=four)["different"] == BIASES
    assert steps(warm, asked("fsdp2", "ep=2"), 2, 4, load=first, save=one) == steps(
        warm, asked("fsdp2", "ep=2"), 2, 4, load=first
    )


BIASES = sorted(f"layers.{i}.feed.router.bias {key}" for i in range(4) for key in ("exp_avg", "exp_avg_sq"))
"""Buffers, which have no moments."""


@pytest.mark.parametrize(
    "case",
    [
        asked("ddp", "dp=2", precision="bf16"),
        asked("ddp", "dp=2", precision="fp16"),
        asked("ddp", "pp=2"),
        asked("fsdp2", "shard=2"),
        asked("fsdp2", "shard=2,tp=2"),
    ],
    ids=str,
)
def test_resume_on_the_same_layout_is_bitwise(case: dict[str, Any], warm: Warm, tmp_path: Path) -> None:
    whole, half, rest = (str(tmp_path / name) for name in ("whole", "half", "rest"))
    undisturbed = steps(warm, case, 0, 5, save=whole)
    before = steps(warm, case, 0, 2, save=half)
    after = steps(warm, case, 2, 5, load=half, save=rest)
    assert {key: before[key] + after[key] for key in before} == undisturbed
    assert warm.call(f"{CASES}:same_states", one=whole, two=rest)["different"] == []


@pytest.mark.parametrize("case", [asked("ddp", "dp=2", precision="fp16"), asked("fsdp2", "shard=2", precision="fp16")])
def test_steps_that_overflow_are_skipped_and_the_scale_falls(case: dict[str, Any], warm: Warm) -> None:
    first, second = warm.call(RUN, function=f"{CASES}:overflow", world=2, arguments={"asked": case, "stop": 12})
    assert first == second
    assert first["skipped"][0], "fp16 cannot hold gradients at this scale"
    assert not first["skipped"][-1]
    for before, after, skipped in zip(first["scales"], first["scales"][1:], first["skipped"], strict=False):
        assert after == (before / 2 if skipped else before)
    # Nothing is learned in a step that is skipped.
    one, two = (float.fromhex(loss) for loss in first["losses"][-2:])
    assert two < one + 1.0


@pytest.mark.parametrize(
    "case",
    [
        asked("ddp", "dp=2"),
        asked("ddp", "tp=2"),
        asked("ddp", "sp=2"),
        asked("ddp", "pp=2", layout={"schedule": "interleaved"}),
        asked("fsdp2", "shard=2"),
    ],
    ids=str,
)
def test_evaluating_gives_the_loss_of_one_process_and_teaches_nothing(
    case: dict[str, Any], warm: Warm, reference: dict[str, Any]
) -> None:
    ranks = warm.call(RUN, function=f"{CASES}:evaluated", world=2, arguments={"asked": case})
    by_part = {rank["index"]: rank for rank in ranks}
    assert all(rank["sums"] == by_part[rank["index"]]["sums"] for rank in ranks)
    items = sum(rank["items"][0] for rank in by_part.values())
    before, after = (sum(rank["sums"][i] for rank in by_part.values()) / items for i in (0, 1))
    assert abs(before - reference["losses"][0]) < GATE
    assert after < before - 0.01
