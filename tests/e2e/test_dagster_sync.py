"""Dagster's storage is lost: `headway dagster sync` shows the same again from the catalog, which it only reads."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dagster_runs import run
from support.retrain_bench import CHAMPION_AS_OF, WEEKS, plant_drift, plant_incident, write_champion
from support.workbench import Workbench, write_workbench

from assets.sync import sync
from headway.home import load_settings, write_dagster_instance
from headway.loading import load_pipeline

ROOT = Path(__file__).resolve().parents[2]
DAYS = [f"2026-03-{day:02d}" for day in range(2, 8)]
BAD = DAYS[3]
LABELS = dg.AssetKey(["pipeline", "dataset_version", "labels"])
SNAPSHOT = dg.AssetKey(["pipeline", "feature_snapshot"])
CHECKS = {
    LABELS: ("quality", "schema_contract", "privacy"),
    SNAPSHOT: ("leakage_proof", "watermark", "row_count", "null_budget"),
}
# What the step measured about itself is gone with the storage; everything that names content comes back.
KEPT = ("status", "content_digest", "snapshot_id", "proof_digest", "dagster/partition_row_count", "rows_quarantined")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Six days in one range run: one in quarantine, its snapshot refused."""
    bench = write_workbench(
        tmp_path_factory.mktemp("sync"),
        sources={},
        views={
            "own": {
                "source": "labels",
                "keys": {"person": "person"},
                "boundary": "lt",
                "features": {"sum": {"window": "target", "aggregate": "sum", "duration": "2d"}},
            }
        },
        files={"labels.csv": _rows()},
        label_columns={"person": "string"},
        partition={"start": DAYS[0], "end": "2026-03-08"},
        label_keys=["label_id", "person"],
        label_quality={"max_quarantined_share": 0.1, "max_quarantined_partitions": 0.3},
    )
    suite = bench.folder / "labels.suite.json"
    limit = '{"type": "expect_column_values_to_be_between", "kwargs": {"column": "target", "max_value": 100}'
    suite.write_text(
        suite.read_text().replace('"expectations": [', f'"expectations": [{limit}, "severity": "critical"}}, ')
    )
    with _instance(bench) as instance:
        assert run(bench, instance, DAYS).success
    return bench


def _rows() -> str:
    lines = ["label_id,t,person,target"]
    for day in DAYS:
        lines += [
            f"{day}-{i},{day}T{6 * i + 1:02d}:00:00Z,p{i % 2},{999 if day == BAD and i > 1 else i}" for i in range(4)
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def _instance(bench: Workbench) -> Iterator[dg.DagsterInstance]:
    home = write_dagster_instance(load_settings({"HEADWAY_HOME": str(bench.home)}))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def _copied(bench: Workbench, root: Path) -> Workbench:
    shutil.copytree(bench.home, root / "home")
    return Workbench(bench.folder, root / "home")


@dataclass(frozen=True)
class Told:
    """How a sync ended and what it printed."""

    returncode: int
    stdout: str


def _command(bench: Workbench, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headway.cli.main", "dagster", "sync", *arguments],
        cwd=ROOT,
        env={**os.environ, "HEADWAY_HOME": str(bench.home), "DAGSTER_DISABLE_TELEMETRY": "yes"},
        capture_output=True,
        text=True,
        check=False,
    )


def _sync(bench: Workbench, *arguments: str) -> Told:
    """What the command runs, in this process: importing Dagster each time would cost more than the test."""
    with redirect_stdout(io.StringIO()) as output:
        code = sync(load_settings(_environment(bench)), [load_pipeline(bench.folder)], check="--check" in arguments)
    return Told(code, output.getvalue())


def _environment(bench: Workbench) -> dict[str, str]:
    return {"HEADWAY_HOME": str(bench.home)}


def _shown(bench: Workbench) -> dict[str, Any]:
    """What the pages show: per partition what names its content, per check its verdict."""
    shown: dict[str, Any] = {}
    with _instance(bench) as instance:
        for key, checks in CHECKS.items():
            for partition in sorted(instance.get_materialized_partitions(key)):
                only = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition])
                event = instance.fetch_materializations(only, limit=1).records[0].asset_materialization
                assert event is not None
                metadata = {n: event.metadata[n].value for n in KEPT if n in event.metadata}
                shown[f"{key.path[-1]} {partition}"] = metadata
            for name in checks:
                record = instance.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(key, name))
                evaluation = None if record is None else record.evaluation
                shown[f"{key.path[-1]}:{name}"] = evaluation and (evaluation.passed, evaluation.severity.value)
    return shown


def _catalog(bench: Workbench) -> str:
    return hashlib.sha256((bench.home / "catalog.db").read_bytes()).hexdigest()


def test_a_wiped_instance_shows_the_same_again_and_the_catalog_is_only_read(bench: Workbench, tmp_path: Path) -> None:
    wiped = _copied(bench, tmp_path)
    before, catalog = _shown(wiped), _catalog(wiped)
    assert len([name for name in before if name.startswith(("labels 20", "feature_snapshot 20"))]) == 2 * len(DAYS)
    assert before[f"labels {BAD}"]["status"] == "quarantined"
    shutil.rmtree(wiped.home / "dagster")

    checked = _sync(wiped, "--check")
    assert checked.returncode == 1
    assert f"missing: pipeline/dataset_version/labels {BAD}: " in checked.stdout
    assert "missing check: pipeline/feature_snapshot: leakage_proof passed" in checked.stdout
    assert _shown(wiped) != before

    synced = _sync(wiped)
    assert (synced.returncode, synced.stdout) == (0, f"{len(before)} reported, 0 differences left\n")
    assert _shown(wiped) == before
    assert _catalog(wiped) == catalog
    assert _sync(wiped, "--check").returncode == 0
    assert _sync(wiped).stdout == "0 reported, 0 differences left\n"


def test_versions_of_partitions_are_their_own_content_after_a_sync(bench: Workbench, tmp_path: Path) -> None:
    """A range run stamps one version on all of its partitions; the catalog knows each one's."""
    wiped = _copied(bench, tmp_path)
    shutil.rmtree(wiped.home / "dagster")
    assert _sync(wiped).returncode == 0
    with _instance(wiped) as instance:
        tags = instance.event_log_storage.get_latest_tags_by_partition(
            LABELS, dg.DagsterEventType.ASSET_MATERIALIZATION, ["dagster/data_version"]
        )
    shown = _shown(wiped)
    assert {p: t["dagster/data_version"] for p, t in tags.items()} == {
        d: shown[f"labels {d}"]["content_digest"] for d in DAYS
    }


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, ""])
def test_a_green_partition_without_a_row_is_named_and_left(bench: Workbench, tmp_path: Path, digest: str) -> None:
    forged = _copied(bench, tmp_path)
    metadata: dict[str, Any] = {"content_digest": digest} if digest else {}
    with _instance(forged) as instance:
        event = dg.AssetMaterialization(LABELS, partition=DAYS[0], metadata=metadata)
        instance.report_runless_asset_event(event)
    for arguments in (["--check"], []):
        result = _sync(forged, *arguments)
        assert result.returncode == 1
        assert f"green without a row: pipeline/dataset_version/labels {DAYS[0]}: " in result.stdout
        assert digest in result.stdout


def test_what_is_in_force_replaces_what_was(bench: Workbench, tmp_path: Path) -> None:
    """A version that came past Dagster is shown once it is synced."""
    moved = Workbench(tmp_path / "pipeline", tmp_path / "home")
    shutil.copytree(bench.home, moved.home)
    shutil.copytree(bench.folder, moved.folder)
    corrected = moved.folder / "labels.csv"
    corrected.write_text(corrected.read_text().replace(f"{DAYS[1]}-0,{DAYS[1]}T01", f"{DAYS[1]}-0,{DAYS[1]}T02"))
    moved.ingest("labels", partitions=[DAYS[1]])
    result = _sync(moved, "--check")
    assert result.returncode == 1
    assert [line.partition(": shows")[0] for line in result.stdout.splitlines()[:-1]] == [
        f"outdated: pipeline/dataset_version/labels {DAYS[1]}"
    ]
    assert _sync(moved).returncode == 0
    assert _sync(moved, "--check").returncode == 0


def test_the_command_says_what_differs_and_refuses_what_it_does_not_know(bench: Workbench) -> None:
    told = _command(bench, "--pipeline", str(bench.folder), "--check")
    assert (told.returncode, told.stdout) == (0, "0 differences\n"), told.stderr
    told = _command(bench, "--pipeline", "nowhere")
    assert (told.returncode, "nowhere" in told.stderr) == (2, True)


def test_runs_versions_and_reports_come_back_with_their_checks(tmp_path: Path) -> None:
    """Later stages, of which the catalog holds rows and the store no files: the check says so."""
    champion = write_champion(tmp_path)
    with champion.services() as services:
        plant_drift(services)
        plant_incident(services, "2026-05-11")
        reports = services.catalog.reports(services.principal, "shop", "drift")
        assert sync(champion.settings, [load_pipeline(champion.folder)], check=False) == 0
    with dg.DagsterInstance.from_config(str(write_dagster_instance(champion.settings))) as instance:
        shown = {
            stage: instance.get_materialized_partitions(dg.AssetKey(["shop", stage]))
            for stage in ("training_run", "model_version", "quality_report", "drift_report", "predictions")
        }
        weeks = {*WEEKS, "2026-05-11"}
        assert shown == {
            "training_run": {CHAMPION_AS_OF},
            "model_version": {CHAMPION_AS_OF},
            "quality_report": set(WEEKS),
            "drift_report": weeks,
            "predictions": set(),
        }
        events = instance.fetch_materializations(dg.AssetKey(["shop", "drift_report"]), limit=10).records
        told = {r.partition_key: m.metadata["report_id"].value for r in events if (m := r.asset_materialization)}
        assert told == {r.window: r.report_id for r in reports}
        passed = {
            (stage, name): _passed(instance, dg.AssetKey(["shop", stage]), name)
            for stage, name in (
                ("training_run", "finished"),
                ("training_run", "finite_metrics"),
                ("model_version", "contract"),
                ("drift_report", "drift"),
                ("drift_report", "data_incident"),
            )
        }
    assert passed == {
        ("training_run", "finished"): False,
        # Its metric `cost` has no value.
        ("training_run", "finite_metrics"): False,
        ("model_version", "contract"): True,
        ("drift_report", "drift"): False,
        ("drift_report", "data_incident"): False,
    }
    assert sync(champion.settings, [load_pipeline(champion.folder)], check=True) == 0


def _passed(instance: dg.DagsterInstance, key: dg.AssetKey, name: str) -> bool | None:
    record = instance.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(key, name))
    return None if record is None or record.evaluation is None else record.evaluation.passed
