"""From source text to a planned training: dataset version, token snapshot and run spec, by Dagster and the CLI."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.text_pipelines import Change, pages, write_text_pipeline

from assets.component import declared_defs
from headway.cli.main import main
from headway.datasets.ingest import ingest
from headway.declaration import NoLabelRows
from headway.features.inputs import InputMissing
from headway.features.reading import read_values
from headway.features.snapshot import SnapshotBuilder
from headway.home import load_settings
from headway.loading import Pipeline, load_pipeline
from headway.services import Services, open_services
from headway.text.snapshot import TextSnapshotBuilder, read_snapshot_files, verify_text
from headway.training.plan import LayoutRefused, Overrides, SnapshotsMissing, config_digest, plan_run
from headway.training.window import NoTraining
from resources.platform import Platform
from trainer.spec import TokenDataSpec, parse_run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def services(home: Path) -> Iterator[Services]:
    with open_services(load_settings({"HEADWAY_HOME": str(home)})) as opened:
        yield opened


def _slice(attributes: dict[str, Any]) -> None:
    """The library of the interpreter, 60 files of it, under the suite and the columns of the test pipeline."""
    attributes["sources"]["pages"]["files"] = {"interpreter": "stdlib", "limit": 60}
    attributes["sources"]["pages"]["quality"]["suite"] = "library.suite.json"
    attributes["text"]["tokenizer"]["vocab"] = 400


def _library(folder: Path) -> Pipeline:
    write_text_pipeline(folder, {}, _slice)
    rule = {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "path"}, "severity": "critical"}
    (folder / "library.suite.json").write_text(json.dumps({"name": "library", "expectations": [rule]}))
    return load_pipeline(folder)


def _pages(folder: Path, texts: dict[str, str] | None = None, change: Change | None = None) -> Pipeline:
    return load_pipeline(write_text_pipeline(folder, texts, change))


def _materialize(pipeline: Pipeline, home: Path, *, upto: str) -> dg.ExecuteInProcessResult:
    assets = [a for a in declared_defs(pipeline).assets or [] if isinstance(a, dg.AssetsDefinition)]
    wanted = [a for a in assets if a.key.path[1] in ("dataset_version", "feature_snapshot", upto)]
    return dg.materialize(
        wanted,
        instance=dg.DagsterInstance.ephemeral(),
        resources={"platform": Platform(home=str(home))},
        raise_on_error=False,
    )


def _headway(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"HEADWAY_HOME": str(home)})


def test_dagster_shows_only_the_stages_of_text(tmp_path: Path) -> None:
    assets = declared_defs(_pages(tmp_path / "pages")).assets or []
    keys = {"/".join(a.key.path) for a in assets if isinstance(a, dg.AssetsDefinition)}
    stages = {"pages/dataset_version/pages", "pages/feature_snapshot", "pages/training_run"}
    assert stages <= keys <= stages | {"pages/model_version"}
    assert all(a.partitions_def is None for a in assets if isinstance(a, dg.AssetsDefinition))


def test_a_slice_of_the_library_becomes_a_proved_snapshot_and_a_run_spec(
    tmp_path: Path, home: Path, services: Services
) -> None:
    pipeline = _library(tmp_path / "pages")
    result = _materialize(pipeline, home, upto="feature_snapshot")
    assert result.success
    assert {c.check_name: c.passed for c in result.get_asset_check_evaluations()} == {
        "quality": True,
        "schema_contract": True,
        "privacy": True,
        "leakage_proof": True,
        "row_count": True,
    }
    state = services.catalog.current_snapshots(services.principal, "pages")[""]
    snapshot = state.snapshot
    assert snapshot is not None
    assert (state.status, snapshot.rows) == ("published", 60)
    tokenizer, files = read_snapshot_files(services, snapshot)
    assert (tokenizer.kind, tokenizer.vocab) == ("bpe", 400)
    proof = json.loads(services.store.get_bytes(snapshot.facts.proof_digest))
    assert proof["passed"]
    assert proof["pairs"] > 100
    # The tokens give back the files as they lie in the library.
    rows = read_values(services, snapshot).to_pylist()
    version = services.catalog.current(services.principal, "pages/pages", "")
    assert version is not None
    assert version.rows == len(rows)
    streams = {s.name: np.frombuffer(s.data, "<u2") for s in files.shards}
    for row in rows[:5]:
        tokens = streams[row["shard"]][row["offset"] : row["offset"] + row["tokens"]].tolist()
        assert len(tokenizer.decode(tokens)) == row["bytes"]

    plan = plan_run(services, pipeline, "", Overrides(steps=9))
    spec = parse_run(services.store.get_bytes(plan.facts.spec_digest))
    assert isinstance(spec.data, TokenDataSpec)
    assert (spec.data.vocab, spec.data.context, spec.data.end_token) == (400, 32, 256)
    assert spec.data.tokenizer == tokenizer.digest
    assert services.store.get_bytes(spec.data.tokenizer) == tokenizer.dump()
    assert {f.sha256: f.tokens for f in spec.data.files} == {
        services.store.put_bytes(s.data, "x").digest: s.tokens for s in files.shards
    }
    assert (spec.schedule.steps, spec.schedule.judge_every) == (9, 3)
    assert (spec.model.options["vocab"], spec.model.options["sequence"]) == (400, 32)
    assert plan.facts.inputs == (snapshot.snapshot_id,)
    assert (plan.facts.partition, plan.pinned.rows) == ("", 60)


def test_two_homes_give_the_same_bits_and_a_second_build_nothing_new(tmp_path: Path) -> None:
    pipeline = _pages(tmp_path / "pages")
    digests: list[str] = []
    for name in ("one", "two"):
        with open_services(load_settings({"HEADWAY_HOME": str(tmp_path / name)})) as services:
            ingest(services, pipeline, "pages", None)
            first = TextSnapshotBuilder(services, pipeline).build()
            again = TextSnapshotBuilder(services, pipeline).build()
            assert (first.status, again.status) == ("published", "up_to_date")
            assert first.snapshot is not None
            assert again.snapshot == first.snapshot
            digests += [first.snapshot.content_digest, first.snapshot.manifest_digest]
    assert digests[:2] == digests[2:]


def test_other_held_out_text_moves_neither_tokenizer_nor_training_tokens(tmp_path: Path, services: Services) -> None:
    pipeline = _pages(tmp_path / "pages")
    before = _built(services, pipeline)
    apart = [d for d, (split, _) in before.parts.items() if split == "held_out"]
    assert apart
    changed = {d: f"{d} says something else entirely, in other words\n" * 20 for d in apart}
    after = _built(services, _pages(tmp_path / "pages", pages() | changed))
    assert after.snapshot_id != before.snapshot_id
    assert after.tokenizer == before.tokenizer
    assert after.shards["train"] == before.shards["train"]
    assert after.shards["valid"] == before.shards["valid"]
    assert after.shards["held_out"] != before.shards["held_out"]


class _Seen:
    """What one build stored."""

    def __init__(self, services: Services, pipeline: Pipeline) -> None:
        outcome = TextSnapshotBuilder(services, pipeline).build()
        assert outcome.status == "published", outcome.reason
        assert outcome.snapshot is not None
        tokenizer, files = read_snapshot_files(services, outcome.snapshot)
        self.snapshot_id = outcome.snapshot.snapshot_id
        self.tokenizer = tokenizer.digest
        self.shards = {
            part: [s.data for s in files.shards if s.split == part] for part in ("train", "valid", "held_out")
        }
        self.parts = {r["document"]: (r["split"], r["group"]) for r in files.documents.to_pylist()}


def _built(services: Services, pipeline: Pipeline) -> _Seen:
    outcomes = ingest(services, pipeline, "pages", None)
    assert [o.status for o in outcomes] == ["released"]
    return _Seen(services, pipeline)


def test_another_declaration_gives_another_snapshot_and_another_context_only_another_run(
    tmp_path: Path, services: Services
) -> None:
    pipeline = _pages(tmp_path / "pages")
    first = _built(services, pipeline)
    plan = plan_run(services, pipeline, "")

    def longer(attributes: dict[str, Any]) -> None:
        attributes["text"]["context"] = 64

    wider = _pages(tmp_path / "pages", change=longer)
    assert TextSnapshotBuilder(services, wider).build().status == "up_to_date"
    other = plan_run(services, wider, "")
    assert config_digest(other.spec) != config_digest(plan.spec)

    def bytewise(attributes: dict[str, Any]) -> None:
        attributes["text"]["tokenizer"] = {"kind": "bytes"}

    second = _Seen(services, _pages(tmp_path / "pages", change=bytewise))
    assert second.snapshot_id != first.snapshot_id
    assert {d: p for d, (p, _) in second.parts.items()} == {d: p for d, (p, _) in first.parts.items()}


def test_a_published_snapshot_is_verified_and_damage_is_found(tmp_path: Path, home: Path, services: Services) -> None:
    pipeline = _pages(tmp_path / "pages")
    ingest(services, pipeline, "pages", None)
    built = _headway(home, "snapshots", "build", "-p", str(pipeline.folder), "--json")
    assert built.exit_code == 0, built.output
    snapshot_id = json.loads(built.stdout)["snapshots"][0]["snapshot_id"]
    verified = _headway(home, "snapshots", "verify", snapshot_id, "-p", str(pipeline.folder))
    assert verified.exit_code == 0, verified.output
    assert verified.stdout.rstrip().endswith("verified")
    shown = _headway(home, "snapshots", "show", snapshot_id, "--rows", "2")
    assert "docs/p" in shown.stdout

    def rarer(attributes: dict[str, Any]) -> None:
        attributes["text"]["split"]["seed"] = 1

    moved = _headway(home, "snapshots", "verify", snapshot_id, "-p", str(_pages(tmp_path / "p2", change=rarer).folder))
    assert moved.exit_code == 2
    assert "was made by version 1 of the text rules" in moved.stderr
    snapshot = services.catalog.snapshot(services.principal, snapshot_id)
    assert verify_text(services, pipeline, snapshot).problems == ()


def test_what_is_not_there_is_refused_in_words(tmp_path: Path, home: Path, services: Services) -> None:
    pipeline = _pages(tmp_path / "pages")
    with pytest.raises(InputMissing, match=r"pages \(whole table\)"):
        TextSnapshotBuilder(services, pipeline).build()
    with pytest.raises(SnapshotsMissing, match="the snapshot of 'pages' was never built"):
        plan_run(services, pipeline, "")
    with pytest.raises(NoTraining, match="has no as_of '2026-01-01'"):
        plan_run(services, pipeline, "2026-01-01")
    with pytest.raises(NoLabelRows, match="learns from text: it has no features"):
        SnapshotBuilder(services, pipeline)
    partition = _headway(home, "snapshots", "build", "-p", str(pipeline.folder), "--partition", "2026-01-01")
    assert partition.exit_code == 2
    assert "pages has no partitions" in partition.output


def test_a_quarantined_source_refuses_the_snapshot_by_name(tmp_path: Path, home: Path, services: Services) -> None:
    def elsewhere(attributes: dict[str, Any]) -> None:
        attributes["sources"]["pages"]["files"] = {"paths": ["strays/*.txt"]}

    strays = {name.replace("docs/", "strays/"): text for name, text in pages().items()}
    pipeline = _pages(tmp_path / "pages", strays, elsewhere)
    result = _materialize(pipeline, home, upto="feature_snapshot")
    assert not result.success
    outcome = TextSnapshotBuilder(services, pipeline).build()
    assert (outcome.status, outcome.reason) == ("refused", "input quarantined: pages")
    state = services.catalog.current_snapshots(services.principal, "pages")[""]
    assert (state.status, state.blocking) == ("refused", ("pages",))
    with pytest.raises(SnapshotsMissing, match="was refused: input quarantined"):
        plan_run(services, pipeline, "")


def test_a_batch_that_does_not_divide_is_refused_before_launch(tmp_path: Path, home: Path, services: Services) -> None:
    pipeline = _pages(tmp_path / "pages")
    checked = _headway(home, "train", "check", str(pipeline.folder), "--json")
    assert checked.exit_code == 0, checked.output
    assert json.loads(checked.stdout)["memory"]["total"] > 0
    _built(services, pipeline)
    with pytest.raises(LayoutRefused, match=r"batch\.global_size: 4 rows do not divide by 3"):
        plan_run(services, pipeline, "", Overrides(nodes=3))
