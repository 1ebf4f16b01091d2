"""The whole spine with real torch: train on two nodes, judge, promote on evidence, predict, explain, roll back."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.training_bench import TrainingBench, copy_bench, end_everything, write_shop

from assets.keys import model_version_key
from assets.model_version import build_model_version
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.platform import Platform

pytestmark = pytest.mark.xdist_group("spine")
AS_OF = "2026-04-01"
REQUESTS = [
    {"person": "p1", "shop": "s1", "asked_at": "2026-04-20T12:00:00Z"},
    {"person": "p2", "shop": None, "asked_at": "2026-04-21T13:30:00+02:00"},
]


def materialize(bench: TrainingBench, as_of: str = AS_OF, only: str = "") -> dg.ExecuteInProcessResult:
    pipeline = load_pipeline(bench.folder)
    stages = [build_training_run(pipeline), build_model_version(pipeline)]
    with dg.DagsterInstance.ephemeral() as instance:
        return dg.materialize(
            stages,
            instance=instance,
            partition_key=as_of,
            selection=None if not only else [model_version_key("shop")],
            resources={"platform": Platform(home=str(bench.home))},
            raise_on_error=False,
        )


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    found = result.asset_materializations_for_node("shop__model_version")[-1].metadata
    return {name: value.value for name, value in found.items()}


def checks(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {e.check_name: e.passed for e in result.get_asset_check_evaluations()}


@pytest.fixture(scope="module")
def trained(shop: TrainingBench, tmp_path_factory: pytest.TempPathFactory) -> TrainingBench:
    """The pipeline with a judged version of one month; read-only."""
    bench = copy_bench(shop, tmp_path_factory.mktemp("trained"))
    result = materialize(bench)
    assert result.success, [e.message for e in result.all_events if e.is_failure]
    return bench


@pytest.fixture
def judged(trained: TrainingBench, tmp_path: Path) -> Iterator[TrainingBench]:
    """A copy of the pipeline with a judged version."""
    bench = copy_bench(trained, tmp_path)
    yield bench
    end_everything(bench)


def change(bench: TrainingBench, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the declaration, and nothing else of the folder: the data stay as they were ingested."""
    data = (bench.folder / "visits.csv").read_bytes()
    write_shop(bench.folder, edit)
    (bench.folder / "visits.csv").write_bytes(data)


def test_every_gate_is_a_check_and_a_signed_statement(judged: TrainingBench) -> None:
    card = judged.json("models", "show", "shop@1")
    assert {g["gate"]: g["verdict"] for g in card["gates"]} == dict.fromkeys(
        ["auc_over_historical_rate", "segments", "finite_outputs", "contract", "leakage_proof", "weights_only"], "pass"
    )
    assert card["looks"] == 1
    assert {row["model"] for row in card["metrics"]} == {
        "candidate",
        "historical_rate",
        "logistic",
        "gradient_boosting",
    }
    verified = judged.json("models", "verify", "shop@1")
    assert (verified["verified"], verified["eligible"], verified["problems"]) == (True, True, {})


def test_asked_again_nothing_is_trained_or_judged(judged: TrainingBench) -> None:
    again = materialize(judged)
    assert again.success
    assert metadata(again)["status"] == "up to date"
    assert all(checks(again).values())
    assert len(judged.json("models", "list")["models"]) == 1
    assert len(judged.json("runs", "list")["runs"]) == 1


def test_promote_predict_explain_and_roll_back(judged: TrainingBench, tmp_path: Path) -> None:
    assert judged.run("promote", "shop").exit_code == 0
    file = tmp_path / "requests.json"
    file.write_text(json.dumps(REQUESTS))
    answers = judged.json("predict", "--file", str(file), "--pipeline", str(judged.folder))["predictions"]
    assert len(answers) == 2
    assert all(0.0 <= a["probability"] <= 1.0 for a in answers)
    walked = judged.run("explain", answers[0]["prediction_id"], "--pipeline", str(judged.folder))
    assert walked.exit_code == 0, walked.output
    assert "visits" in walked.output
    nothing = judged.run("rollback", "shop")
    assert nothing.exit_code == 2
    assert "no previous" in nothing.output
    assert judged.run("fsck").exit_code == 0


def test_a_forged_report_in_dagster_promotes_nothing(judged: TrainingBench) -> None:
    """A gate refuses the version; the forger reports a passed check, and one of severity WARN, to Dagster."""

    def strict(attributes: dict[str, Any]) -> None:
        attributes["promotion"]["gates"][0]["margin"] = 0.9

    change(judged, strict)
    refused = materialize(judged, only="model_version")
    assert not checks(refused)["auc_over_historical_rate"]
    before = judged.run("promote", "shop@1")
    assert before.exit_code == 2
    assert "auc_over_historical_rate" in before.output
    with dg.DagsterInstance.ephemeral() as instance:
        for severity in (dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN):
            forged = dg.AssetCheckEvaluation(
                asset_key=model_version_key("shop"),
                check_name="auc_over_historical_rate",
                passed=True,
                metadata={},
                severity=severity,
            )
            instance.report_runless_asset_event(forged)
    after = judged.run("promote", "shop@1")
    assert (after.exit_code, after.output) == (before.exit_code, before.output)
    assert judged.json("status")["pipelines"] is not None


def test_model_version_alone_judges_no_run_that_did_not_succeed(judged: TrainingBench) -> None:
    alone = materialize(judged, as_of="2026-05-01", only="model_version")
    assert not alone.success
    failures = [str(e.event_specific_data) for e in alone.all_events if e.is_step_failure]
    assert any("no training run" in f for f in failures)
    assert [m["version"] for m in judged.json("models", "list")["models"]] == [1]


def test_a_refused_network_gives_way_to_logistic_regression(judged: TrainingBench) -> None:
    def must_beat_logistic(attributes: dict[str, Any]) -> None:
        attributes["promotion"]["gates"].append({"gate": "auc_over_logistic", "margin": 0.9, "unless": "logistic"})

    change(judged, must_beat_logistic)
    result = materialize(judged, only="model_version")
    told = metadata(result)
    assert (told["kind"], told["version"], told["passed"]) == ("logistic", 2, True)
    assert "network (version 1)" in told["refused"]
    promoted = judged.run("promote", "shop")
    assert promoted.exit_code == 0, promoted.output
    assert "shop@2" in promoted.output


def test_the_next_month_is_judged_against_the_champion(judged: TrainingBench) -> None:
    def against_champion(attributes: dict[str, Any]) -> None:
        attributes["promotion"]["gates"].append({"gate": "auc_over_champion", "margin": -1.0})

    change(judged, against_champion)
    assert materialize(judged, only="model_version").success
    assert judged.run("promote", "shop").exit_code == 0
    assert materialize(judged, as_of="2026-05-01").success
    card = judged.json("models", "show", "shop@2")
    assert "champion" in {row["model"] for row in card["metrics"]}
    assert judged.run("promote", "shop").exit_code == 0
    back = judged.run("rollback", "shop")
    assert back.exit_code == 0, back.output
    endpoint = judged.json("models", "list")["models"]
    assert {m["version"]: m["endpoints"][0]["as"] for m in endpoint} == {1: "stable", 2: "previous"}
    assert judged.run("fsck").exit_code == 0


def test_an_altered_blob_stops_promotion(judged: TrainingBench) -> None:
    (model,) = judged.json("models", "list")["models"]
    manifest = judged.home / "store" / "sha256"
    digest = model["manifest_digest"].removeprefix("sha256:")
    entries = json.loads((manifest / digest[:2] / digest[2:]).read_text())["entries"]
    weights = next(e["sha256"] for e in entries if e["name"] == "weights.safetensors").removeprefix("sha256:")
    blob = manifest / weights[:2] / weights[2:]
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.unlink()
    blob.write_bytes(bytes(data))
    refused = judged.run("promote", "shop")
    assert refused.exit_code == 2
    assert "weights.safetensors" in refused.output
