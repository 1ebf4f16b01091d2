"""The short form of `make demo-lm`: text to a judged, promoted and then challenged language model, through Dagster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner
from support.language_pipeline import NAME, TRAINED, failures, materialize, write_pipeline

from assets.keys import model_version_key
from headway.catalog.registry_facts import ModelVersion
from headway.cli.main import main
from headway.declaration import TEXT_GATES
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.registry.evidence import EvidenceMissing
from headway.registry.judge import evaluation_report
from headway.registry.keys import KeyRing
from headway.registry.promote import promote
from headway.registry.text_candidates import HELD_OUT, read_text
from headway.registry.text_card import records
from headway.registry.text_evaluation import BITS_PER_BYTE
from headway.services import Services, open_services
from headway.serving.requests import NotServed, serving_of

pytestmark = pytest.mark.xdist_group("language_version")


@dataclass
class Judged:
    """A home with a promoted version 1, and version 2 that was judged against it by stricter gates."""

    folder: Path
    home: Path
    instance: dg.DagsterInstance
    first: Any
    second: Any
    services: Services
    verified: str

    def version(self, number: int) -> ModelVersion:
        return self.services.catalog.model_version(self.services.principal, NAME, number)

    def run(self, *arguments: str) -> str:
        return _run(self.home, *arguments)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    root = tmp_path_factory.mktemp("language")
    folder, home = write_pipeline(root), root / "home"
    _margins(folder, -100.0)
    settings = load_settings({"HEADWAY_HOME": str(home)})
    with dg.DagsterInstance.ephemeral() as instance, open_services(settings) as services:
        first = materialize(folder, home, instance)
        assert failures(first) == []
        promote(services, KeyRing(settings.keys_folder), NAME, NAME, 1)
        verified = _run(home, "models", "verify", f"{NAME}@1")
        _margins(folder, 0.0)
        _change(folder, "training", {"engine": "ddp", "zero": None, "nodes": 1, "steps": 4, "judge_every": 4})
        second = materialize(folder, home, instance, *TRAINED)
        assert failures(second) == []
        yield Judged(folder, home, instance, first, second, services, verified)


def _run(home: Path, *arguments: str) -> str:
    """What a command printed, whether or not it ended well."""
    return CliRunner(env={"HEADWAY_HOME": str(home)}).invoke(main, list(arguments)).output


def _margins(folder: Path, margin: float) -> None:
    gates = [{"gate": gate, "margin": margin} for gate in TEXT_GATES]
    gates += [{"gate": gate} for gate in ("finite_outputs", "contract", "leakage_proof", "weights_only")]
    _change(folder, "promotion", {"gates": gates})


def _change(folder: Path, section: str, changes: dict[str, Any]) -> None:
    document: dict[str, Any] = yaml.safe_load((folder / "defs.yaml").read_text())
    merged = document["attributes"][section] | changes
    document["attributes"][section] = {name: value for name, value in merged.items() if value is not None}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


def _metadata(result: Any) -> dict[str, Any]:  # noqa: ANN401
    found = result.asset_materializations_for_node("__".join((NAME, "model_version")))
    return {name: value.value for name, value in found[0].metadata.items()}


def test_text_becomes_a_version_that_passes_its_gates(judged: Judged) -> None:
    assert judged.first.success
    results = judged.services.catalog.gate_results(judged.services.principal, NAME, 1)
    assert {r.gate: r.verdict for r in results} == dict.fromkeys(
        [*TEXT_GATES, "finite_outputs", "contract", "leakage_proof", "weights_only"], "pass"
    )
    assert judged.version(1).kind == "language"
    assert judged.verified.endswith("verified; every gate passed\n")


def test_the_page_shows_bits_per_byte_beside_compressors_by_minute_and_samples(judged: Judged) -> None:
    facts = _metadata(judged.first)
    coders = [record.data["model"] for record in facts["metrics"].records]
    assert coders[0] == "candidate"
    assert {"gzip -9", "zlib -9", "lzma -9 (xz)", "unigram bytes"} <= set(coders)
    assert [record.data["coder"] for record in facts["as_one_stream"].records]
    minutes = [record.data for record in facts["by_training_minute"].records]
    assert [m["step"] for m in minutes] == [8, 16, 24]
    assert minutes == sorted(minutes, key=lambda m: m["minute"])
    assert all(0 < m["bits_per_byte"] < 10 for m in minutes)
    assert facts["samples"].count("goes on") == 3


def test_the_reported_bits_are_those_of_the_text_that_the_snapshot_held_out(judged: Judged) -> None:
    catalog, principal = judged.services.catalog, judged.services.principal
    run = catalog.run(principal, judged.version(1).run_id)
    held_out = read_text(judged.services, catalog.snapshot(principal, run.facts.inputs[0])).part(HELD_OUT)
    report: Any = evaluation_report(judged.services, judged.version(1))
    assert report["bytes"] == sum(map(len, held_out.column("content").to_pylist()))
    assert report["documents"] == held_out.num_rows
    # A model of a few steps is far from text, and nearer to it than equally likely bytes.
    assert 2 < report["metrics"]["candidate"][BITS_PER_BYTE]["value"] < 8


def test_a_worse_version_is_judged_against_the_champion_on_the_same_documents_and_refused(judged: Judged) -> None:
    results = {r.gate: r for r in judged.services.catalog.gate_results(judged.services.principal, NAME, 2)}
    over = results["bits_per_byte_over_champion"]
    assert over.verdict == "fail"
    assert over.metrics["reference"] == "champion"
    first: Any = evaluation_report(judged.services, judged.version(1))
    assert over.metrics["reference_bits_per_byte"] == pytest.approx(
        first["metrics"]["candidate"][BITS_PER_BYTE]["value"], abs=1e-5
    )
    assert results["bits_per_byte_over_gzip"].verdict == "fail"
    assert {results[g].verdict for g in ("finite_outputs", "contract", "leakage_proof", "weights_only")} == {"pass"}
    settings = load_settings({"HEADWAY_HOME": str(judged.home)})
    with pytest.raises(EvidenceMissing, match="bits_per_byte_over_gzip"):
        promote(judged.services, KeyRing(settings.keys_folder), NAME, NAME, 2)


def test_asked_again_the_signed_verdicts_still_stand(judged: Judged) -> None:
    before = judged.services.catalog.gate_results(judged.services.principal, NAME, 2)
    again = materialize(judged.folder, judged.home, judged.instance, model_version_key(NAME))
    assert _metadata(again)["status"] == "up to date"
    assert judged.services.catalog.gate_results(judged.services.principal, NAME, 2) == before


def test_the_card_and_the_comparison_speak_of_bits_per_byte(judged: Judged) -> None:
    shown = judged.run("models", "show", f"{NAME}@1")
    assert "bits per byte" in shown
    assert "gzip -9" in shown
    assert "by training minute" in shown
    document = json.loads(judged.run("models", "show", f"{NAME}@1", "--json"))
    assert document["evaluation"]["streams"].keys() == {"gzip", "zlib", "lzma"}
    assert "bits per byte" in judged.run("models", "compare", f"{NAME}@1", f"{NAME}@2")
    assert len(records(evaluation_report(judged.services, judged.version(1)) or {}, "samples")) == 3


def test_a_language_model_answers_no_requests_and_says_so(judged: Judged, tmp_path: Path) -> None:
    with pytest.raises(NotServed, match="learns from text"):
        serving_of(load_pipeline(judged.folder).spec)
    requests = tmp_path / "requests.json"
    requests.write_text("[{}]")
    said = judged.run("predict", "--file", str(requests), "--pipeline", str(judged.folder))
    assert "learns from text: its models answer no requests" in said
    served = judged.run("serve", "--pipeline", str(judged.folder), "--port", "0")
    assert "its models answer no requests" in served
