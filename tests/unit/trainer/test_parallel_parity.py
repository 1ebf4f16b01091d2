"""Every model-parallel piece trains as one process does: losses and gradient norms, over a few clipped AdamW steps."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.forked_small import Forks
from support.parallel_cases import BATCH, LIMIT, SMALL, STEPS, spread

_BOUND = 1e-5
_MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "mixture": {"experts": 8, "top_k": 2, "hidden": 32, "balance_rate": 0.01},
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    opened = Forks()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def singles(forks: Forks) -> dict[str, dict[str, Any]]:
    return {name: forks.run("train", 1, model=options)[0] for name, options in _MODELS.items()}


def _train(forks: Forks, model: str, mutant: str = "", **degrees: int) -> list[dict[str, Any]]:
    return forks.run("train", math.prod(degrees.values()), model=_MODELS[model], mutant=mutant, **degrees)


def _owned(results: list[dict[str, Any]], name: str) -> list[int]:
    return [result["owned"].get(name, 0) for result in results]


def test_the_single_process_learns_and_is_clipped(singles: dict[str, dict[str, Any]]) -> None:
    for single in singles.values():
        assert len(single["losses"]) == STEPS
        assert single["losses"][-1] < single["losses"][0] - 0.05
        assert min(single["norms"]) > LIMIT


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("plain", {"tp": 2}),
        ("plain", {"tp": 4}),
        ("tied", {"tp": 2, "shard": 2}),
        ("plain", {"pp": 2, "tp": 2}),
        ("plain", {"pp": 2, "shard": 2}),
        ("plain", {"sp": 2}),
        ("plain", {"sp": 4}),
        ("plain", {"sp": 2, "dp": 2}),
        ("plain", {"sp": 2, "tp": 2}),
        ("mixture", {"ep": 2}),
        ("mixture", {"ep": 4}),
        ("mixture", {"ep": 2, "dp": 2}),
        ("mixture", {"ep": 2, "shard": 2}),
        ("mixture", {"ep": 2, "sp": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items()),
)
def test_a_layout_trains_as_one_process(
    forks: Forks, singles: dict[str, dict[str, Any]], model: str, degrees: dict[str, int]
) -> None:
    results = _train(forks, model, "", **degrees)

    assert spread(results, singles[model]) < _BOUND
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["norms"] == results[0]["norms"]
        assert result["bias"] == singles[model]["bias"]
    for stage in {result["stage"] for result in results}:
        assert len({result["plain"] for result in results if result["stage"] == stage}) == 1


def test_ranks_hold_their_part_only(forks: Forks, singles: dict[str, dict[str, Any]]) -> None:
    whole = singles["plain"]["owned"]
    wq, embed, norm = "layers.0.attention.wq.weight", "embed.weight", "layers.0.attention_norm.weight"
    divided = _train(forks, "plain", tp=2, shard=2)
    assert _owned(divided, wq) == [whole[wq] // 4] * 4
    assert _owned(divided, embed) == [whole[embed] // 4] * 4
    assert _owned(divided, norm) == [whole[norm] // 2] * 4
    staged = _train(forks, "plain", pp=2)
    assert _owned(staged, embed) == [whole[embed], 0]
    assert _owned(staged, wq) == [whole[wq], 0]
    assert _owned(staged, "layers.1.attention.wq.weight") == [0, whole[wq]]
    assert _owned(staged, "head.weight") == [0, whole["head.weight"]]
    experts = "layers.1.feed.experts.w2"
    assert _owned(_train(forks, "mixture", ep=2), experts) == [singles["mixture"]["owned"][experts] // 2] * 2


def test_an_attention_takes_four_exchanges_each_way(forks: Forks) -> None:
    for result in _train(forks, "plain", sp=2):
        assert result["all_to_all"] == STEPS * SMALL["layers"] * 8


def test_experts_take_two_exchanges_each_way_and_one_of_counts(forks: Forks) -> None:
    for result in _train(forks, "mixture", ep=2):
        assert result["all_to_all"] == STEPS * SMALL["layers"] * 5


def test_no_token_is_dropped_when_one_rank_holds_every_chosen_expert(forks: Forks) -> None:
    """All tokens go to the experts of rank 0; rank 1 gets no row, and still takes part."""
    single = forks.run("train", 1, model=_MODELS["mixture"], lean=100.0)[0]

    results = forks.run("train", 2, model=_MODELS["mixture"], lean=100.0, ep=2)

    assert spread(results, single) < _BOUND
    per_step = BATCH * SMALL["sequence"] * 2
    assert single["first_load"] == [per_step // 2] * 2 + [0] * 6


@pytest.mark.parametrize(
    ("mutant", "model", "degrees"),
    [
        ("rope", "plain", {"sp": 2}),
        ("norm", "plain", {"tp": 2}),
        ("norm", "mixture", {"ep": 2}),
        ("stages", "plain", {"pp": 2}),
        ("experts", "mixture", {"ep": 2}),
        ("data", "plain", {"sp": 2}),
    ],
)
def test_the_gate_sees_a_fault(
    forks: Forks, singles: dict[str, dict[str, Any]], mutant: str, model: str, degrees: dict[str, int]
) -> None:
    assert spread(_train(forks, model, mutant, **degrees), singles[model]) > 10 * _BOUND
