"""Artifacts: which files, what they say, and that the same model gives the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_data import CATEGORICAL, NUMERIC, ROOT, quiet, training_run, write_models

from trainer.artifact import ArtifactExists, write_network
from trainer.baselines import fit_logistic
from trainer.blobs import parse_manifest
from trainer.data import Dataset
from trainer.models.factory import CodeRefused, build_model
from trainer.predictor import FILES, load_artifact
from trainer.spec import RunSpec


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Dataset, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    spec = training_run(folder / "store", days=4, rows=60)
    return spec, write_models(spec, folder / "store", folder), folder


def document(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_bytes())


@pytest.mark.parametrize("kind", ["network", "logistic"])
def test_an_artifact_is_these_files_and_its_manifest_says_where_it_came_from(
    made: tuple[RunSpec, Dataset, Path], kind: str
) -> None:
    spec, _, folder = made
    assert {p.name for p in (folder / kind).iterdir()} == FILES | {"manifest.json"}
    manifest = parse_manifest((folder / kind / "manifest.json").read_bytes())
    assert manifest.facts == {
        "kind": kind,
        "run_id": "a" * 24,
        "spec_digest": spec.digest,
        "code_digest": spec.model.code_digest,
    }
    model = document(folder / kind, "model.json")
    assert (model["format"], model["kind"], model["output"]) == ("headway.model/1", kind, {"name": "probability"})
    assert (model["factory"] is None) == (kind == "logistic")


def test_the_contract_lists_every_input_with_its_type(made: tuple[RunSpec, Dataset, Path]) -> None:
    contract = document(made[2] / "network", "contract.json")
    assert [i["name"] for i in contract["inputs"]] == [*CATEGORICAL, *NUMERIC]
    types = {i["name"]: i["type"] for i in contract["inputs"]}
    assert (types["carrier"], types["distance"], types["weather__temp"]) == ("string", "int64", "float64")
    assert contract["inputs"][1]["values"] == ["EWR", "JFK", "LGA"]
    assert contract["output"] == {"name": "probability", "type": "float64", "range": [0, 1]}
    assert contract["feature_set"] is None
    assert contract == document(made[2] / "logistic", "contract.json")


def test_the_reference_counts_training_rows_and_validation_scores(made: tuple[RunSpec, Dataset, Path]) -> None:
    _, dataset, folder = made
    reference = document(folder / "network", "reference.json")
    assert set(reference["features"]) == {*CATEGORICAL, *NUMERIC}
    assert reference["n"] == len(dataset.train)
    for histogram in reference["features"].values():
        assert sum(histogram["counts"]) + histogram["missing"] + histogram.get("other", 0) == len(dataset.train)
    assert sum(reference["score"]["counts"]) == reference["score"]["n"] == len(dataset.valid)


def test_the_same_model_gives_the_same_identity_and_another_another(
    made: tuple[RunSpec, Dataset, Path], tmp_path: Path
) -> None:
    spec, dataset, folder = made
    state = load_artifact(folder / "network").module.state_dict()
    again = write_network(state, spec, dataset, {}, tmp_path / "again", run_id="a" * 24, code_root=ROOT)
    assert again.digest == parse_manifest((folder / "network" / "manifest.json").read_bytes()).digest
    changed = {n: t.clone() for n, t in state.items()}
    changed["leave.bias"] += 1e-7
    other = write_network(changed, spec, dataset, {}, tmp_path / "other", run_id="a" * 24, code_root=ROOT)
    assert other.digest != again.digest
    logistic = fit_logistic(spec, dataset, tmp_path / "logistic", quiet, run_id="a" * 24)
    assert logistic.digest == parse_manifest((folder / "logistic" / "manifest.json").read_bytes()).digest


def test_numbers_that_are_not_finite_are_null_in_the_metrics(
    made: tuple[RunSpec, Dataset, Path], tmp_path: Path
) -> None:
    spec, dataset, _ = made
    state = build_model(spec, dataset.inputs, ROOT).state_dict()
    metrics = {"valid_auc": float("nan"), "best": [1.0, float("inf")]}
    write_network(state, spec, dataset, metrics, tmp_path / "a", run_id="r", code_root=ROOT)
    written = document(tmp_path / "a", "metrics.json")
    assert (written["valid_auc"], written["best"]) == (None, [1.0, None])
    assert written["rows"]["train"] == len(dataset.train)


def test_an_artifact_is_never_written_over(made: tuple[RunSpec, Dataset, Path]) -> None:
    spec, dataset, folder = made
    before = (folder / "logistic" / "weights.safetensors").read_bytes()
    with pytest.raises(ArtifactExists):
        fit_logistic(spec, dataset, folder / "logistic", quiet, run_id="b" * 24)
    assert (folder / "logistic" / "weights.safetensors").read_bytes() == before


def test_weights_of_another_module_are_not_packed(made: tuple[RunSpec, Dataset, Path], tmp_path: Path) -> None:
    spec, dataset, _ = made
    with pytest.raises(RuntimeError, match="Missing key"):
        write_network({"x": torch.zeros(1)}, spec, dataset, {}, tmp_path / "a", run_id="r", code_root=ROOT)
    assert not (tmp_path / "a").exists()


def test_code_that_changed_since_the_run_was_planned_is_refused(
    made: tuple[RunSpec, Dataset, Path], tmp_path: Path
) -> None:
    spec, dataset, folder = made
    state = load_artifact(folder / "network").module.state_dict()
    tree = tmp_path / "tree"
    for path in ("trainer/spec.py", "pipelines/flight_delay/model.py"):
        (tree / path).parent.mkdir(parents=True)
        (tree / path).write_bytes((ROOT / path).read_bytes())
    with pytest.raises(CodeRefused, match="digest"):
        write_network(state, spec, dataset, {}, tmp_path / "a", run_id="r", code_root=tree)
    assert not (tmp_path / "a").exists()
