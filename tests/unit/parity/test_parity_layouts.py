"""Every layout of the table trains as one process does; the comparison sees a lost gradient and shifted data."""

from collections.abc import Iterator
from typing import Any

import pytest

from trainer.forked import Warm
from trainer.layouts import ParityCase, parity_cases
from trainer.spec import LAYOUT_OPTIONS, layout_text

CASES = {case.name: case for case in parity_cases()}
ENGINES = {"ddp": "dp=2", "fsdp2": "shard=2", "deepspeed": "dp=2,zero=2"}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    parent = Warm(["trainer.parity_ranks"])
    yield parent
    parent.close()


def run(warm: Warm, case: ParityCase) -> dict[str, Any]:
    layout = case.layout
    return warm.call(
        "trainer.parity:parity_json",
        engine=layout.engine,
        layout=layout_text(layout),
        precision=case.precision,
        accumulation=case.accumulation,
        schedule=layout.schedule,
        offload=layout.offload,
        options=[name for name in LAYOUT_OPTIONS if getattr(layout, name)],
    )


def failures(result: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: f"{c['value']} > {c['limit']}: {c['where']}" for c in result["checks"] if not c["passed"]}


@pytest.mark.parametrize("name", CASES)
def test_a_supported_layout_trains_as_one_process_does(name: str, warm: Warm) -> None:
    result = run(warm, CASES[name])
    assert failures(result) == {}
    assert result["passed"]
    # A comparison of nothing would pass too.
    assert len(result["ranks"]) == CASES[name].layout.world_size
    assert {len(rank[key]) for rank in result["ranks"] for key in ("losses", "grad_norms")} == {20}


@pytest.mark.parametrize("sabotage", ["gradient", "data"])
@pytest.mark.parametrize(("engine", "layout"), ENGINES.items())
def test_the_comparison_sees_what_one_rank_does_wrong(engine: str, layout: str, sabotage: str, warm: Warm) -> None:
    result = warm.call("trainer.parity:parity_json", engine=engine, layout=layout, sabotage=sabotage)
    assert not result["passed"]
    found = {c["name"]: c for c in result["checks"]}
    for name in ("loss", "gradient norm"):
        assert found[name]["value"] > 100 * found[name]["limit"], name


def test_the_comparison_in_half_precision_sees_a_lost_gradient(warm: Warm) -> None:
    result = warm.call("trainer.parity:parity_json", engine="ddp", layout="dp=2", precision="bf16", sabotage="gradient")
    assert {"loss", "gradient norm"} <= set(failures(result))


def test_the_comparison_sees_the_last_digits_of_one_number_of_one_replica(warm: Warm) -> None:
    result = warm.call("trainer.parity:parity_json", engine="ddp", layout="dp=2", steps=5, sabotage="replica")
    assert "different replicas" in failures(result)
    assert "embed.weight" in failures(result)["different replicas"]
