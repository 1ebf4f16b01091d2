"""What the DeepSpeed engine saves is resumed to the bit on the same layout, and goes on under any other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainer.forked import Warm
from trainer.spec import parse_layout

TREE = Path(__file__).parents[3]
HALF, STEPS = 4, 8
# Losses are about 4, of which fp32 resolves 2.4e-7; training.md's bound for a change of layout.
MOVED = 1.2e-6


@dataclass(frozen=True)
class Ranks:
    """Runs what `zero_cases.go_on` does on as many ranks as the layout has."""

    warm: Warm
    folder: Path

    def __call__(self, layout: str, first: int, last: int, **arguments: object) -> list[dict[str, Any]]:
        world = parse_layout(str(arguments.get("engine", "deepspeed")), layout).world_size
        given = {"layout": layout, "first": first, "last": last, **arguments}
        return self.warm.call(
            "trainer.forked:run_ranks", function="support.zero_cases:go_on", world=world, arguments=given
        )

    def straight(self, name: str, layout: str, **arguments: object) -> list[dict[str, Any]]:
        """All steps; the state of half of them is saved as `name`."""
        return self(layout, 0, STEPS, save=str(self.folder / name), save_at=HALF, **arguments)

    def resumed(self, name: str, layout: str, **arguments: object) -> list[dict[str, Any]]:
        return self(layout, HALF, STEPS, load=str(self.folder / name), **arguments)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("zero-states")
    with pytest.MonkeyPatch.context() as patch:
        # Where DeepSpeed would put what it builds.
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "built"))
        parent = Warm(["trainer.engines.zero", "trainer.parity_ranks", "support.zero_cases"], [TREE / "tests"])
    yield Ranks(parent, folder)
    parent.close()


def difference(first: list[str], second: list[str]) -> float:
    return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def stages(ranks: Ranks) -> dict[int, list[dict[str, Any]]]:
    """Stages 1, 2 and 3 on two ranks, saved as `zero-1` and so on."""
    return {stage: ranks.straight(f"zero-{stage}", f"dp=2,zero={stage}") for stage in (1, 2, 3)}


def assert_resumed_to_the_bit(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(resumed, straight, strict=True):
        for key in ("losses", "norms"):
            assert ours[key] == theirs[key][HALF:], key
        assert ours["evaluated"] == theirs["evaluated"]
        assert ours["state"] == theirs["state"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_layout_resumes_to_the_bit(stage: int, ranks: Ranks, stages: dict[int, Any]) -> None:
    resumed = ranks.resumed(f"zero-{stage}", f"dp=2,zero={stage}")
    assert_resumed_to_the_bit(stages[stage], resumed)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("dp=2,zero=0", {}),
        ("dp=2,zero=1", {"precision": "bf16"}),
        ("dp=2,zero=3", {"precision": "bf16"}),
        ("dp=2,zero=2", {"offload": "optimizer"}),
        ("dp=2,zero=3", {"offload": "parameters"}),
        ("dp=2,tp=2,zero=2", {}),
        ("sp=2,zero=3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_so_do_the_others(layout: str, more: dict[str, str], ranks: Ranks, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    straight = ranks.straight(name, layout, **more)
    assert_resumed_to_the_bit(straight, ranks.resumed(name, layout, **more))
    saved = [rank["saved"] for rank in straight]
    # The master weights are saved, in fp32 whatever the model computes in.
    assert all(s["fp32"] == s["pieces"] for s in saved)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_saves_its_part_and_no_other(stage: int, stages: dict[int, Any], ranks: Ranks) -> None:
    saved = [rank["saved"] for rank in stages[stage]]
    whole = ranks.warm.call("support.zero_cases:put_together", folder=str(ranks.folder / f"zero-{stage}"))
    for key in ("weight", "exp_avg", "exp_avg_sq"):
        held = [s[key] for s in saved]
        assert sum(held) == whole[key] > 40_000
        assert max(held) < 0.52 * whole[key]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_two_ranks_to_four_to_one(stage: int, ranks: Ranks, stages: dict[int, Any]) -> None:
    wanted = stages[stage][0]["losses"]
    name = f"zero-{stage}"
    middle = HALF + 2
    four = ranks(
        f"dp=4,zero={stage}",
        HALF,
        STEPS,
        load=str(ranks.folder / name),
        save=str(ranks.folder / f"{name}-four"),
        save_at=middle,
    )
    assert difference(four[0]["losses"], wanted[HALF:]) <= MOVED
    (one,) = ranks(f"dp=1,zero={stage}", middle, STEPS, load=str(ranks.folder / f"{name}-four"))
    assert difference(one["losses"], wanted[middle:]) <= MOVED
    assert difference([one["evaluated"]], [stages[stage][0]["evaluated"]]) <= MOVED


@pytest.mark.parametrize(
    ("saved", "engine", "layout"),
    [
        (3, "ddp", "dp=2"),
        (3, "ddp", "dp=1"),
        (2, "fsdp2", "shard=2"),
        (1, "deepspeed", "dp=2,zero=3"),
        (3, "deepspeed", "dp=2,zero=0"),
        (3, "deepspeed", "tp=2,zero=1"),
        (2, "deepspeed", "sp=2,zero=3"),
    ],
)
def test_another_engine_or_layout_goes_on(
    saved: int, engine: str, layout: str, ranks: Ranks, stages: dict[int, Any]
) -> None:
    moved = ranks.resumed(f"zero-{saved}", layout, engine=engine)
    assert difference(moved[0]["losses"], stages[saved][0]["losses"][HALF:]) <= MOVED


def test_from_tensor_ranks_and_from_ddp(ranks: Ranks) -> None:
    tensor = ranks.straight("tensor", "dp=2,tp=2,zero=2")
    whole = ranks.warm.call("support.zero_cases:put_together", folder=str(ranks.folder / "tensor"))
    assert len({*whole.values()}) <= 2, whole
    moved = ranks.resumed("tensor", "dp=2,zero=3")
    assert difference(moved[0]["losses"], tensor[0]["losses"][HALF:]) <= MOVED
    ddp = ranks.straight("ddp", "dp=2", engine="ddp")
    moved = ranks.resumed("ddp", "dp=2,zero=3")
    assert difference(moved[0]["losses"], ddp[0]["losses"][HALF:]) <= MOVED


def test_nothing_was_built_meanwhile(ranks: Ranks, stages: dict[int, Any]) -> None:
    assert len(stages) == 3
    assert not (ranks.folder / "built").exists()
