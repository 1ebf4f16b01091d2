"""The estimate of what a rank holds against what the ranks of real runs hold."""

from collections.abc import Iterator
from typing import Any

import pytest

from headway.training.memory import estimate_memory
from trainer.forked import Warm
from trainer.parity import GLOBAL_BATCH, Case
from trainer.spec import BatchSpec, model_facts, parse_layout


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    parent = Warm(["trainer.parity", "trainer.parity_ranks"])
    yield parent
    parent.close()


@pytest.mark.parametrize(
    ("engine", "text"),
    [("ddp", "dp=2"), ("ddp", "tp=2"), ("ddp", "pp=2"), ("ddp", "sp=2"), ("fsdp2", "shard=2"), ("fsdp2", "ep=2")],
)
def test_ranks_hold_what_was_estimated(warm: Warm, engine: str, text: str) -> None:
    layout = parse_layout(engine, text)
    said: Any = warm.call("trainer.parity:parity_json", engine=engine, layout=text, steps=1)
    estimate = estimate_memory(model_facts(Case(layout).model), layout, "fp32", BatchSpec(GLOBAL_BATCH, layout.pp))
    for kind, expected in (
        ("parameter", estimate.parameters),
        ("gradient", estimate.gradients),
        ("optimizer", estimate.optimizer),
    ):
        measured = max(rank["facts"][f"{kind}_bytes"] for rank in said["ranks"])
        assert measured == pytest.approx(expected, rel=0.01), kind
