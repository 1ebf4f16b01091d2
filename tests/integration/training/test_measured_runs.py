"""A run as it measured itself: on its asset's page, in `runs show`, beside another run; one real training behind it."""

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.training_bench import AS_OF, TrainingBench, copy_bench, end_everything

import assets.training_live
from assets.training_facts import layout_diagram
from assets.training_live import live_facts
from headway.training.measured import StepPoint
from trainer.spec import LayoutSpec

KEY = dg.AssetKey(["shop", "training_run"])


@dataclass(frozen=True)
class Trained:
    """Two runs of one pipeline that differ in their rate; the first was traced."""

    bench: TrainingBench
    metadata: Any
    observations: list[dg.AssetObservation]
    runs: list[str]


@pytest.fixture(scope="module")
def trained(shop: TrainingBench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Trained by real ranks, through Dagster."""
    bench = copy_bench(shop, tmp_path_factory.mktemp("measured"))
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        # Every step that is told of, instead of one a minute.
        patch.setattr(assets.training_live, "OBSERVE_EVERY_S", 0.0)
        # Both cores are others' too; a trace needs the first steps.
        config: dict[str, Any] = {"nodes": 1, "profile": "steps=2:4", "epochs": 3}
        results = [
            bench.materialize(instance, config=config),
            bench.materialize(instance, config={"nodes": 1, "lr": 0.003, "epochs": 3}),
        ]
        assert all(result.success for result in results)
        made = results[0].asset_materializations_for_node("shop__training_run")[0]
        yield Trained(bench, made.metadata, _observations(results[0]), [run.run_id for run in bench.runs()])
    end_everything(bench)


def _observations(result: dg.ExecuteInProcessResult) -> list[dg.AssetObservation]:
    return [
        event.event_specific_data.asset_observation  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        for event in result.all_events
        if event.event_type_value == "ASSET_OBSERVATION"
    ]


def test_the_page_shows_what_the_run_measured(trained: Trained) -> None:
    metadata = {name: entry.value for name, entry in trained.metadata.items()}
    assert metadata["step_seconds"] > 0
    assert 0 < metadata["mfu"] < 1
    assert metadata["rows_per_second"] > 0
    assert metadata["flops_per_step"] > 0
    assert "GFLOP/s per rank" in metadata["mfu_peak"]
    split = {row.data["part"]: row.data["seconds_per_step"] for row in metadata["step_time"].records}
    assert {"data", "forward", "backward", "optimizer"} <= set(split)
    (rank,) = (row.data for row in metadata["ranks"].records)
    assert rank["parameter_mb"] > 0
    assert rank["peak_mb"] > 10
    memory = {row.data["kind"]: row.data for row in metadata["memory"].records}
    assert memory["parameters"]["measured_mb"] == rank["parameter_mb"]
    # The estimate is made from the sizes of a decoder; here it says why there is none.
    assert "state no" in metadata["memory_estimate"]
    checkpoints = [row.data for row in metadata["checkpoints"].records]
    assert {row["kind"] for row in checkpoints} >= {"best"}
    assert all(row["mb"] > 0 and row["manifest"].startswith("sha256:") for row in checkpoints)
    assert Path(metadata["curves"]).read_bytes().startswith(b"\x89PNG")
    assert "ddp dp=1" in metadata["layout"]
    assert metadata["artifact/profile"].startswith("sha256:")


def test_one_image_at_most_is_inline(trained: Trained) -> None:
    texts = [str(entry.value) for entry in trained.metadata.values()]
    assert sum("data:image" in text for text in texts) <= 1


def test_observations_are_plain_numbers_while_it_trains(trained: Trained) -> None:
    assert trained.observations
    for observation in trained.observations:
        assert observation.asset_key == KEY
        assert observation.partition == AS_OF
        values = {name: entry.value for name, entry in observation.metadata.items()}
        assert Path(str(values.pop("live_plot"))).read_bytes().startswith(b"\x89PNG")
        assert {"step", "loss", "rows_per_second", "eta_minutes", "learning_rate", "gradient_norm"} <= set(values)
        assert all(isinstance(value, float) and math.isfinite(value) for value in values.values())


def test_the_trace_is_named_and_holds_the_steps(trained: Trained) -> None:
    shown = trained.bench.json("runs", "show", trained.runs[0])
    (trace,) = shown["trace"]
    folder = trained.bench.launcher().run_dir(trained.runs[0])
    document = json.loads(gzip.decompress((folder / trace.split(" ")[0]).read_bytes()))
    names = {event["name"] for event in document["traceEvents"] if event.get("ph") == "X"}
    assert {"step 2", "step 3", "step 4"} <= names
    assert not {"step 1", "step 5"} & names
    assert shown["newest_step"]["step"] > 0
    assert sum(shown["step_time"].values()) > 0
    assert "trace" not in trained.bench.json("runs", "show", trained.runs[1])


def test_two_runs_are_compared(trained: Trained, tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    result = trained.bench.run("runs", "compare", *trained.runs, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = trained.bench.json("runs", "compare", *trained.runs)
    assert found["runs"] == trained.runs
    # A trace is no part of what a run is: the rate alone differs.
    assert found["config"] == {"optimizer.lr": [0.01, 0.003]}
    assert (found["data"], found["code"], found["environment"]) == ({}, {}, {})
    assert found["results"]["status"] == ["succeeded", "succeeded"]
    losses = found["results"]["metric valid_loss"]
    assert losses[0] != losses[1]
    for curve in found["curves"]:
        assert len(curve["step"]) == len(curve["loss"]) == len(curve["lr"]) >= 1
        assert curve["validation"]
    assert "optimizer.lr" in result.output
    assert "data: the same" in result.output


def test_one_run_is_no_comparison(trained: Trained) -> None:
    result = trained.bench.run("runs", "compare", trained.runs[0], trained.runs[0])
    assert result.exit_code != 0
    assert "name 2 to 6 different runs" in result.output


def test_a_run_that_has_ended_is_not_traced(trained: Trained) -> None:
    result = trained.bench.run("runs", "profile", trained.runs[1], "3:4")
    assert result.exit_code != 0
    assert "is succeeded: it takes no steps" in result.output
    assert not (trained.bench.launcher().run_dir(trained.runs[1]) / "profile.json").exists()


def test_a_profile_that_means_nothing_is_refused_before_anything_starts(trained: Trained) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        result = trained.bench.materialize(instance, config={"nodes": 1, "profile": "5:2", "seed": 99})
    assert not result.success
    assert len(trained.bench.runs()) == 2


def test_an_observation_leaves_out_what_is_no_number() -> None:
    point = StepPoint(5, 1, math.nan, 1.0, 0.1, 100.0, "tokens", 0.5, math.nan, 2, 25, {}, 0)
    assert live_facts(point) == {
        "step": 5.0,
        "gradient_norm": 1.0,
        "learning_rate": 0.1,
        "tokens_per_second": 100.0,
        "eta_minutes": pytest.approx(20 * 0.5 / 60),
    }


def test_a_layout_is_drawn_rank_by_rank() -> None:
    from support.trainer_runs import toy_spec

    layout = LayoutSpec(engine="fsdp2", nodes=2, processes_per_node=2, shard=2, tp=2)
    drawn = layout_diagram(toy_spec(layout=layout))
    assert "| 0 | `0: shard 0, tp 0` `1: shard 0, tp 1` |" in drawn
    assert "| 1 | `2: shard 1, tp 0` `3: shard 1, tp 1` |" in drawn
