"""What runs under DeepSpeed and trains wrongly, shown by running it past the refusal; and that the table refuses it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.forked import Warm
from trainer.layouts import check_layout
from trainer.spec import LayoutConflict, Precision, parse_layout

TREE = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    parent = Warm(["trainer.engines.zero", "trainer.parity_ranks", "support.zero_cases"], [TREE / "tests"])
    yield parent
    parent.close()


def failures(warm: Warm, layout: str, precision: Precision) -> dict[str, float]:
    result = warm.call("support.zero_cases:unrefused", engine="deepspeed", layout=layout, precision=precision)
    return {check["name"]: check["value"] for check in result["checks"] if not check["passed"]}


def refusal(layout: str, precision: Precision, clip_norm: float = 1.0) -> LayoutConflict:
    with pytest.raises(LayoutConflict) as caught:
        check_layout(parse_layout("deepspeed", layout), precision, clip_norm)
    return caught.value


def test_bf16_without_a_stage_drifts(warm: Warm) -> None:
    found = failures(warm, "dp=2,zero=0", "bf16")
    assert found["loss"] > 1e-2, "measured 2.1e-2, where stages 1 to 3 differ by 4e-4"
    said = refusal("dp=2,zero=0", "bf16")
    assert {"layout.zero", "precision"} <= said.fields.keys()
    assert said.nearest.zero == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeeds_ulysses_below_stage_3_parts_the_replicas(stage: int, warm: Warm) -> None:
    found = failures(warm, f"sp=2,zero={stage}", "fp32")
    assert found["loss"] > 0.05, "measured 0.18"
    assert found["different replicas"] > 0
    said = refusal(f"sp=2,zero={stage}", "fp32")
    assert {"layout.sp", "layout.zero"} <= said.fields.keys()


def test_deepspeeds_pipeline_without_a_stage_clips_each_stage_by_itself(warm: Warm) -> None:
    def difference(clip: float) -> float:
        arguments: dict[str, Any] = {"clip": clip, "steps": 20}
        told = warm.call(
            "trainer.forked:run_ranks", function="support.zero_cases:pipeline", world=2, arguments=arguments
        )
        return max(abs(a - b) for rank in told for a, b in zip(rank["pipeline"], rank["alone"], strict=True))

    assert difference(0.0) < 1e-5, "without clipping it is exact"
    assert difference(1.0) > 1e-3
    said = refusal("pp=2,zero=0", "fp32")
    assert {"layout.pp", "layout.zero", "optimizer.clip_norm"} <= said.fields.keys()


def test_experts_of_stage_3_are_refused() -> None:
    said = refusal("ep=2,zero=3", "fp32")
    assert {"layout.ep", "layout.zero"} <= said.fields.keys()
