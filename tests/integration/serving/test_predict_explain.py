"""`headway predict` and `headway explain` on a promoted version: answers, the way back to raw rows, altered rows."""

import csv
import json
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.serving_bench import DAYS, amend, opened, pipeline_of, requests_for
from support.serving_model import GATES, Served, asked
from support.workbench import Workbench

from headway.artifacts.manifest import Manifest, manifest_entry, put_manifest, read_manifest
from headway.catalog import DatasetVersion
from headway.catalog.facts import blob_documents
from headway.datasets.digest import content_digest
from headway.datasets.rows import ROWS_ENTRY
from headway.registry.keys import KeyRing
from headway.serving.explain import explain
from headway.serving.scoring import score_rows

pytestmark = pytest.mark.usefixtures("served", "scored_here")


def test_every_score_of_a_period_equals_the_snapshot_path_to_the_last_bit(served: Served) -> None:
    with opened(served.bench) as services:
        version = services.catalog.model_version(services.principal, "pipeline", 1)
        scores = score_rows(services, version, served.stored)
    assert [a["probability"] for a in served.answers] == scores.tolist()
    assert len(set(scores.tolist())) > 60, "the scores differ, or equality says little"


def test_an_answer_says_who_gave_it_and_how_good_its_features_are(served: Served) -> None:
    ids = [uuid.UUID(a["prediction_id"]) for a in served.answers]
    assert {i.version for i in ids} == {7}
    assert len(set(ids)) == len(served.stored)
    with opened(served.bench) as services:
        version = services.catalog.model_version(services.principal, "pipeline", 1)
        for answer in served.answers:
            recorded = services.catalog.prediction(services.principal, answer["prediction_id"])
            assert recorded.output == {"probability": answer["probability"], "degraded": answer["degraded"]}
            assert (recorded.endpoint_epoch, recorded.model_version, recorded.arm) == (1, 1, "stable")
            assert recorded.feature_status == answer["feature_status"]
    assert {a["artifact_digest"] for a in served.answers} == {version.manifest_digest}
    for row, answer in zip(served.stored.to_pylist(), served.answers, strict=True):
        newest = answer["features"]["newest"]
        event = row["newest__value__event_time"]
        assert newest["time"] == (None if event is None else event.isoformat().replace("+00:00", "Z"))
        assert newest["age_seconds"] == (None if event is None else (row["t"] - event).total_seconds())
        seen = row["newest__value__reason"] in ("hit", "null_value")
        status = "missing" if not seen else "stale" if row["newest__incomplete"] else "fresh"
        assert (newest["status"], newest["reason"]) == (status, "" if seen else row["newest__value__reason"])
    assert {a["feature_status"] for a in served.answers} == {"fresh", "missing"}


def _known(path: Path, t: datetime) -> dict[str, dict[str, str]]:
    """The latest version of each event that was known at an instant, in plain loops."""
    newest: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(path.open()):
        known = datetime.fromisoformat(row["known"])
        if known <= t and (row["id"] not in newest or newest[row["id"]]["known"] <= row["known"]):
            newest[row["id"]] = row
    return newest


def test_the_rows_of_a_window_are_those_that_plain_loops_find(served: Served) -> None:
    some = [i for i, r in enumerate(served.stored.to_pylist()) if (r["recent__n_2h"] or 0) > 0][:3]
    some += [i for i, r in enumerate(served.stored.to_pylist()) if r["recent__n_2h"] == 0][:2]
    for index in some:
        row = served.stored.slice(index, 1).to_pylist()[0]
        found = {f["feature"]: f for f in served.explained(index, "--rows", "1000")["features"]}
        known = _known(served.bench.folder / "data.csv", row["t"])
        for feature, hours in (("recent__n_2h", 2), ("recent__std_1d", 24)):
            expected = {
                i
                for i, r in known.items()
                if r["k"] == row["k"]
                and r["gone"] == "false"
                and row["t"] - timedelta(hours=hours) <= datetime.fromisoformat(r["at"]) <= row["t"]
            }
            assert {r["identity"]["id"] for r in found[feature]["rows"]} == expected
            assert found[feature]["row_count"] == len(expected)
        assert found["recent__n_2h"]["value"] == found["recent__n_2h"]["row_count"]
        assert found["doubled"]["inputs"] == ["size"]


def test_the_chain_leads_from_the_answer_to_the_data(served: Served) -> None:
    index = served.stored.column("newest__value__reason").to_pylist().index("hit")
    told = served.explained(index)
    with opened(served.bench) as services:
        catalog, who = services.catalog, services.principal
        version = catalog.model_version(who, "pipeline", 1)
        run = catalog.run(who, version.run_id)
        recorded = {(p, v.version): v.content_digest for p, v in catalog.current_many(who, "pipeline/data").items()}
    assert told["verified"]
    assert told["prediction"]["output"]["probability"] == served.answers[index]["probability"]
    assert told["endpoint_event"]["stable"] == 1
    assert told["model_version"]["artifact_digest"] == version.manifest_digest
    assert [(g["gate"], g["verdict"]) for g in told["gates"]] == [(g, "pass") for g in GATES]
    assert told["training_run"]["run_id"] == run.run_id
    assert told["training_run"]["attempts"] == [{"attempt": 1, "state": "succeeded", "reason": None}]
    assert {s["partition"] for s in told["snapshots"]} == set(DAYS)
    assert {d["content_digest"] for d in told["training_datasets"]} == {c for _, _, c in run.facts.datasets}
    row = next(f for f in told["features"] if f["feature"] == "newest__value")["rows"][0]
    assert recorded[(row["partition"], row["version"])] in {i["content_digest"] for i in told["inputs"]}
    known = (served.answers[index]["prediction_id"][:30], "-p", str(served.bench.folder))
    whole, short = (served.bench.run("explain", *known, *more).output for more in (["--all"], []))
    assert row["row_digest"] in whole
    assert all(f["feature"] in whole for f in told["features"])
    assert len(short.splitlines()) <= 40
    assert f"gates       {len(GATES)} of {len(GATES)} passed\n" in short
    assert "features    newest: 2 features of up to " in short
    assert "features    derived: 1 feature\n" in short
    assert " in 1 attempt\n" in short
    assert row["row_digest"] in served.bench.run("explain", *known, "--feature", "newest__value").output
    only = served.explained(index, "--feature", "doubled")
    assert [f["feature"] for f in only["features"]] == ["doubled"]


def test_a_dry_look_says_the_same_and_is_not_recorded(served: Served, tmp_path: Path) -> None:
    index = served.stored.column("k").to_pylist().index("a")
    one = requests_for(pipeline_of(served.bench), served.stored).slice(index, 1)
    pq.write_table(one, tmp_path / "one.parquet")
    before = _predictions(served.bench)
    output = tmp_path / "answers.parquet"
    looked = asked(served.bench, tmp_path / "one.parquet", "--version", "pipeline@1", "--json", "--output", str(output))
    answer = json.loads(looked.stdout)["predictions"][0]
    (written,) = pq.read_table(output).to_pylist()
    assert {**written, "features": json.loads(written["features"])} == answer
    again = asked(served.bench, tmp_path / "one.parquet", "--version", "pipeline@1", "--output", str(output))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    assert (answer["prediction_id"], answer["recorded"], answer["endpoint"]) == (None, False, None)
    assert answer["probability"] == served.answers[index]["probability"], "whatever else was in the file"
    assert answer["features"] == served.answers[index]["features"]
    assert _predictions(served.bench) == before


def _predictions(bench: Workbench) -> int:
    with opened(bench) as services:
        return len(services.catalog.prediction_ids(services.principal, ""))


def _altered(bench: Workbench, version: DatasetVersion, change: Callable[[pa.Table], pa.Table]) -> tuple[Path, bytes]:
    """The stored file of a version's rows, and the bytes of an altered one."""
    with opened(bench) as services:
        digest = read_manifest(services.store, version.manifest_digest).entry(ROWS_ENTRY).sha256
        path = services.store.root / "sha256" / digest[7:9] / digest[9:]
        sink = pa.BufferOutputStream()
        pq.write_table(change(pq.read_table(path)), sink)
    return path, sink.getvalue().to_pybytes()


def _rewrite(bench: Workbench, version: DatasetVersion, change: Callable[[pa.Table], pa.Table]) -> None:
    """Other bytes under the same name."""
    path, data = _altered(bench, version, change)
    path.chmod(0o644)
    path.write_bytes(data)


def _remove(bench: Workbench, version: DatasetVersion, change: Callable[[pa.Table], pa.Table]) -> None:
    """The altered file lies beside, the real one is renamed."""
    path, data = _altered(bench, version, change)
    path.rename(path.with_name("0" * 62))
    path.with_name("1" * 62).write_bytes(data)


def _relink(bench: Workbench, version: DatasetVersion, change: Callable[[pa.Table], pa.Table]) -> None:
    """Blob and manifest are consistent, and the catalog's row names them; its content digest is the old one."""
    _, data = _altered(bench, version, change)
    with opened(bench) as services:
        old = read_manifest(services.store, version.manifest_digest)
        entry = manifest_entry(ROWS_ENTRY, services.store.put_bytes(data))
        entries = tuple(entry if e.name == ROWS_ENTRY else e for e in old.entries)
        manifest = put_manifest(services.store, Manifest(entries, old.facts))
    _forge(bench, version, "manifest_digest", manifest.digest)
    _forge(bench, version, "blobs", json.dumps(blob_documents((manifest,))))


def _restate(bench: Workbench, version: DatasetVersion, change: Callable[[pa.Table], pa.Table]) -> None:
    """As `_relink`, and the catalog's content digest fits the altered rows."""
    _relink(bench, version, change)
    _, data = _altered(bench, version, change)
    spec = pipeline_of(bench).spec.sources["data"]
    _forge(bench, version, "content_digest", content_digest(pq.read_table(pa.BufferReader(data)), spec))


def _forge(bench: Workbench, version: DatasetVersion, column: str, value: str) -> None:
    """Change a fact of the catalog behind its back."""
    with sqlite3.connect(bench.home / "catalog.db") as database:
        triggers = database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'dataset_version'"
        ).fetchall()
        for (name,) in triggers:
            database.execute(f'DROP TRIGGER "{name}"')
        changed = database.execute(
            f"UPDATE dataset_version SET {column} = ? WHERE dataset_id = ? AND version = ?",
            (value, version.dataset, version.version),
        )
        assert changed.rowcount == 1


@pytest.mark.parametrize(
    ("tamper", "names_row"), [(_rewrite, True), (_remove, False), (_relink, True), (_restate, True)]
)
def test_one_altered_raw_row_fails_the_explanation(
    served: Served, tmp_path: Path, tamper: Callable[..., None], names_row: bool
) -> None:
    bench = served.copied(tmp_path)
    index = served.stored.column("newest__value__reason").to_pylist().index("hit")
    answer = served.answers[index]
    told = served.explained(index)
    row = next(f for f in told["features"] if f["feature"] == "newest__value")["rows"][0]
    with opened(bench) as services:
        version = services.catalog.version(services.principal, row["dataset"], row["version"])

    def change(rows: pa.Table) -> pa.Table:
        wanted = pa.array([str(i) == row["identity"]["id"] for i in rows.column("id").to_pylist()])
        values = [0.5 if w else v for w, v in zip(wanted.to_pylist(), rows.column("value").to_pylist(), strict=True)]
        return rows.set_column(rows.column_names.index("value"), "value", pa.array(values, pa.float64()))

    tamper(bench, version, change)
    result = bench.run("explain", answer["prediction_id"], "--pipeline", str(bench.folder))
    assert result.exit_code == 1, result.output
    problems = [line for line in result.output.splitlines() if line.startswith("PROBLEM")]
    assert all(f"{row['dataset']} version {row['version']}" in p for p in problems), problems
    assert any(f"(id={row['identity']['id']})" in p and row["row_digest"] in p for p in problems) == names_row
    assert any("content digest" in p for p in problems) == (tamper in (_relink, _restate))
    if tamper is not _restate:
        pq.write_table(requests_for(pipeline_of(bench), served.stored).slice(index, 1), tmp_path / "one.parquet")
        refused = asked(bench, tmp_path / "one.parquet")
        assert refused.exit_code == 2, "nothing is answered from altered rows: " + refused.output


def test_a_row_that_only_another_prediction_used_fails_too(served: Served, tmp_path: Path) -> None:
    """Every version within reach is held to its digest, so rows that were added or taken away are seen as well."""
    bench = served.copied(tmp_path)
    index = served.stored.column("newest__value__reason").to_pylist().index("null_key")
    told = served.explained(index)
    assert not any(f["row_count"] for f in told["features"] if f["kind"] in ("latest", "window"))
    used = next(i for i in told["inputs"] if i["dataset"] == "pipeline/data")
    with opened(bench) as services:
        version = services.catalog.version(services.principal, used["dataset"], used["version"])
    _relink(bench, version, lambda rows: rows.slice(1))
    result = bench.run("explain", served.answers[index]["prediction_id"], "-p", str(bench.folder), "--json")
    assert result.exit_code == 1
    problems = json.loads(result.stdout)["problems"]
    assert any("rows, recorded are" in p["message"] for p in problems), problems


def _alter_output(bench: Workbench, prediction_id: str, probability: float) -> None:
    """Change an answer in the catalog, behind its back."""
    with sqlite3.connect(bench.home / "catalog.db") as database:
        triggers = database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'prediction'"
        ).fetchall()
        for (name,) in triggers:
            database.execute(f'DROP TRIGGER "{name}"')
        said = json.dumps({"probability": probability, "degraded": []})
        where = (said, prediction_id)
        assert database.execute("UPDATE prediction SET output = ? WHERE prediction_id = ?", where).rowcount == 1


def test_an_altered_answer_fails_the_explanation_and_both_values_are_named(served: Served, tmp_path: Path) -> None:
    bench = served.copied(tmp_path)
    answer = served.answers[0]
    _alter_output(bench, answer["prediction_id"], 0.987654321)
    result = bench.run("explain", answer["prediction_id"], "-p", str(bench.folder), "--json")
    assert result.exit_code == 1, result.output
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["place"] == f"prediction {answer['prediction_id']}, output"
    assert "0.987654321" in problem["message"]
    assert repr(answer["probability"]) in problem["message"]


def test_an_answer_that_the_model_does_not_give_again_fails_the_explanation(served: Served) -> None:
    """One bit off is off."""
    answer = served.answers[0]
    other = np.nextafter(answer["probability"], 1.0)
    with opened(served.bench) as services:
        trust = KeyRing(served.bench.home / "keys").trust()
        pipeline = pipeline_of(served.bench)
        found = explain(services, pipeline, trust, answer["prediction_id"], score=lambda *_: np.array([other]))
    (problem,) = found.problems
    assert problem.place == f"prediction {answer['prediction_id']}, output"
    assert repr(float(other)) in problem.message
    assert repr(answer["probability"]) in problem.message


def test_other_features_than_the_versions_are_never_computed(served: Served, tmp_path: Path) -> None:
    bench = served.copied(tmp_path)
    with (bench.folder / "features.py").open("a") as code:
        code.write("\n\ndef more(row):\n    return row\n")
    pq.write_table(requests_for(pipeline_of(bench), served.stored).slice(0, 1), tmp_path / "one.parquet")
    for result in (
        asked(bench, tmp_path / "one.parquet"),
        bench.run("explain", served.answers[0]["prediction_id"], "-p", str(bench.folder)),
    ):
        assert result.exit_code == 2
        assert "check out the tree of feature set version 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--endpoint", "nowhere"], "no endpoint 'nowhere'"),
        (["--version", "pipeline"], "write MODEL@N"),
        (["--version", "pipeline@9"], "no version 9"),
        (["--endpoint", "pipeline", "--version", "pipeline@1"], "not both"),
        (["--output", "answers.csv"], "write to a .json or .parquet file"),
        (["--output", "/nowhere/answers.json"], "no folder /nowhere"),
    ],
)
def test_a_wrong_call_is_one_line_with_exit_code_2(
    served: Served, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "one.json").write_text('[{"size": 1, "starts": "2026-03-04T10:00:00Z"}]')
    before = _predictions(served.bench)
    result = asked(served.bench, tmp_path / "one.json", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert _predictions(served.bench) == before


def test_faults_found_after_reading_name_the_file_and_stand_in_one_block(served: Served, tmp_path: Path) -> None:
    rows = [{"k": "a", "size": 1, "starts": s} for s in ("2020-01-01T00:00:00Z", "2021-01-01T00:00:00Z")]
    (tmp_path / "two.json").write_text(json.dumps(rows))
    result = asked(served.bench, tmp_path / "two.json")
    assert result.exit_code == 2
    head, first, second = result.stderr.splitlines()
    assert head == "error: two.json: 2 faults"
    assert first.startswith("  row 1, starts: ")
    assert second.startswith("  row 2, starts: ")
    assert "outside the calendar of labels" in second


def test_an_unknown_prediction_or_feature_is_refused(served: Served) -> None:
    for reference, said in (("zz", "no prediction's id begins"), ("", "predictions begin with")):
        result = served.bench.run("explain", reference, "-p", str(served.bench.folder))
        assert result.exit_code == 2
        assert said in result.stderr
    known = served.answers[0]["prediction_id"]
    result = served.bench.run("explain", known, "-p", str(served.bench.folder), "--feature", "nix")
    assert result.exit_code == 2
    assert "features are newest__value" in result.stderr


def test_predicting_and_explaining_import_no_torch() -> None:
    modules = ("cli.predict", "cli.explain", "serving.documents", "serving.scoring", "serving.requests")
    code = "import sys\n" + "".join(f"import headway.{m}\n" for m in modules)
    code += "print([m for m in ('torch', 'deepspeed', 'sklearn', 'dagster', 'great_expectations') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_without_a_version_of_the_pipeline_is_refused(served: Served, tmp_path: Path) -> None:
    bench = served.copied(tmp_path / "other")
    amend(bench, name="elsewhere")
    (tmp_path / "one.json").write_text('[{"size": 1, "starts": "2026-03-04T10:00:00Z"}]')
    result = asked(bench, tmp_path / "one.json")
    assert result.exit_code == 2
    assert "no endpoint of pipeline elsewhere serves a version" in result.stderr
    named = asked(bench, tmp_path / "one.json", "--endpoint", "pipeline")
    assert "belongs to pipeline pipeline, not elsewhere" in named.stderr
