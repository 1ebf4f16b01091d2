"""Field reports of group C: partitions, automation, cancelled runs and metadata, through a real Dagster instance."""

import json
import math
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from support.dagster_runs import catalog_state, definitions, run
from support.workbench import Workbench, write_workbench

from assets.describe import guarded, table
from assets.partitions import partitions_definition
from headway.cli.main import main
from headway.datasets.partitions import PartitionScheme
from headway.declaration import PartitionSpec, SourceSpec
from headway.loading import load_pipeline

DAYS = [f"2026-03-{day:02d}" for day in range(2, 10)]
LABELS = dg.AssetKey(["pipeline", "dataset_version", "labels"])
EXTRA = dg.AssetKey(["pipeline", "dataset_version", "data"])
SNAPSHOT = dg.AssetKey(["pipeline", "feature_snapshot"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with two sources cut into days, everything materialised in one range run, to copy from."""
    root = tmp_path_factory.mktemp("c")
    bench = _write(root)
    (root / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(root / "dagster")) as instance:
        assert run(bench, instance, DAYS).success
    return root


@pytest.fixture
def bench(built: Path, tmp_path: Path) -> Workbench:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return Workbench(tmp_path / "pipeline", tmp_path / "home")


@pytest.fixture
def instance(bench: Workbench) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(bench.folder.parent / "dagster")) as found:
        yield found


def test_c01_hours_and_days_of_a_zone_over_both_clock_changes() -> None:
    zone = "America/Los_Angeles"
    hourly = PartitionSpec(column="t", cadence="hourly", start="2023-11-05", end="2023-11-07")
    daily = PartitionSpec(column="t", cadence="daily", start="2023-11-05", end="2023-11-06", zone=zone)
    hours, days = PartitionScheme.from_spec(hourly), PartitionScheme.from_spec(daily)
    for day, count in (("2023-11-05", 25), ("2024-03-10", 23)):
        local = PartitionSpec(column="t", cadence="daily", start=day, end=_after(day), zone=zone)
        start, end = PartitionScheme.from_spec(local).window(day)
        assert (end - start) // 3_600_000_000 == count
        assert partitions_definition(local).get_partition_keys() == [day]
    # Both 01:30 of the local night are distinct hours, and of one local day.
    both = [datetime(2023, 11, 5, h, 30, tzinfo=UTC) for h in (8, 9)]
    instants = [round(t.timestamp() * 1_000_000) for t in both]
    assert [hours.keys_between(t, t) for t in instants] == [("2023-11-05-08:00",), ("2023-11-05-09:00",)]
    assert {days.keys_between(t, t) for t in instants} == {("2023-11-05",)}
    assert list(hours.keys()) == list(partitions_definition(hourly).get_partition_keys())
    with pytest.raises(ValidationError, match="hourly"):
        SourceSpec.model_validate(
            {
                "files": {"paths": ["x.csv"]},
                "format": {"type": "csv"},
                "columns": {"i": {"type": "string"}, "t": {"type": "timestamp"}},
                "row_id": ["i"],
                "keys": ["i"],
                "event_time": "t",
                "available_time": "t",
                "partition": {"column": "t", "cadence": "hourly", "start": "2023-11-05", "zone": zone},
                "quality": {"suite": "x.suite.json"},
            }
        )


def test_c03_a_day_that_is_not_over_is_refused_with_the_time_it_closes(bench: Workbench) -> None:
    today = datetime.now(UTC).date()
    _change(bench, "end: '2026-03-10'", f"end: '{today + timedelta(days=3)}'")
    for day in (today, today + timedelta(days=1)):
        command = ("datasets", "ingest", "--pipeline", str(bench.folder), "--source", "labels")
        refused = bench.run(*command, "--partition", str(day))
        assert refused.exit_code != 0
        assert f"it closes at {day + timedelta(days=1)}T00:00:00" in refused.output
    partition = load_pipeline(bench.folder).spec.sources["labels"].partition
    assert partition is not None
    open_ended = partition.model_copy(update={"end": None})
    assert str(today) not in partitions_definition(open_ended).get_partition_keys(), "the page does not offer it"


def test_c05_what_is_no_number_is_shown_by_name_and_every_event_stays_readable(instance: dg.DagsterInstance) -> None:
    @dg.asset
    def measured() -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        rows = [{"name": n, "mean": v} for n, v in (("a", math.nan), ("b", math.inf), ("c", -math.inf), ("d", None))]
        return dg.MaterializeResult(metadata=guarded({"loss": math.nan, "rows": 3, **table("cells", rows)}))

    done = dg.materialize([measured], instance=instance)
    (record,) = instance.fetch_materializations(measured.key, limit=1).records
    assert record.asset_materialization is not None
    shown = record.asset_materialization.metadata
    assert shown["loss"].value == "nan"
    assert [r.data["mean"] for r in shown["cells"].value.records] == ["nan", "inf", "-inf", ""]  # pyright: ignore
    for entry in instance.all_logs(done.run_id):
        json.dumps(json.loads(dg.serialize_value(entry)), allow_nan=False)


def test_c07_zero_false_and_empty_count_as_set(tmp_path: Path) -> None:
    given = {"HEADWAY_UI_PORT": "0", "HEADWAY_SERVE_PORT": "0", "HEADWAY_DEBUG": "true", "HEADWAY_PLATFORM": ""}
    for environ in (given, {**given, "HEADWAY_DEBUG": "false"}, {**given, "HEADWAY_DEBUG": ""}):
        told = CliRunner().invoke(
            main,
            ["status", "--json", "--settings"],
            env={"HEADWAY_HOME": str(tmp_path), **environ, "HEADWAY_PROT": "1"},
        )
        document = json.loads(told.stdout)
        rows = {r["variable"]: (r["value"], r["origin"]) for r in document["settings"]}
        assert rows["HEADWAY_UI_PORT"] == rows["HEADWAY_SERVE_PORT"] == ("0", "environment")
        assert rows["HEADWAY_DEBUG"] == ("true" if environ["HEADWAY_DEBUG"] == "true" else "false", "environment")
        assert rows["HEADWAY_PLATFORM"] == ("", "environment")
        assert document["unknown"] == ["HEADWAY_PROT"]


def test_c09_a_repaired_old_day_asks_for_the_snapshots_it_reaches_and_no_others(
    bench: Workbench, instance: dg.DagsterInstance
) -> None:
    graph = definitions(bench)
    first = dg.evaluate_automation_conditions(graph, instance)
    assert first.total_requested == 0, "what was there before is nothing new"
    file = bench.folder / "data.csv"
    file.write_text(file.read_text().replace(f"{DAYS[2]}-0,p0,1", f"{DAYS[2]}-0,p0,77"))
    assert run(bench, instance, [DAYS[2]], selection=["pipeline/dataset_version/data"]).success
    asked = dg.evaluate_automation_conditions(graph, instance, cursor=first.cursor)
    assert asked.get_requested_partitions(SNAPSHOT) == set(DAYS[2:5]), "the day, and those whose window reaches back"


def test_c13_a_cancelled_repeat_changes_nothing(
    bench: Workbench, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = catalog_state(bench)

    def interrupted(*_: object, **__: object) -> object:
        raise dg.DagsterExecutionInterruptedError

    with monkeypatch.context() as patch:
        patch.setattr("headway.datasets.ingest.ingest", interrupted)
        assert not run(bench, instance, [DAYS[1]], selection=["pipeline/dataset_version/labels"]).success
    assert catalog_state(bench) == before
    assert DAYS[1] in instance.get_materialized_partitions(LABELS)
    (cancelled,) = instance.get_runs(limit=1)
    instance.delete_run(cancelled.run_id)
    assert DAYS[1] in instance.get_materialized_partitions(LABELS)
    assert run(bench, instance, [DAYS[1]], selection=["pipeline/feature_snapshot"]).success
    assert run(bench, instance, [DAYS[1]], selection=["pipeline/dataset_version/labels"]).success
    assert catalog_state(bench) == before


def test_c15_once_the_bad_source_is_repaired_the_snapshot_starts_by_itself(
    bench: Workbench, instance: dg.DagsterInstance
) -> None:
    graph = definitions(bench)
    file = bench.folder / "data.csv"
    good = file.read_text()
    broken = good.replace(f"{DAYS[-1]}-0,p0,1", f"{DAYS[-1]}-0,p0,-1")
    file.write_text(broken)
    started = dg.evaluate_automation_conditions(graph, instance)
    selection = ["pipeline/dataset_version/data", "pipeline/dataset_version/labels"]
    assert not run(bench, instance, [DAYS[-1]], selection=selection).success
    waiting = dg.evaluate_automation_conditions(graph, instance, cursor=started.cursor)
    assert waiting.get_num_requested(SNAPSHOT) == 0, "a failed blocking check holds it"
    read = len(instance.fetch_materializations(LABELS, limit=100).records)
    file.write_text(good)
    assert run(bench, instance, [DAYS[-1]], selection=selection[:1]).success
    asked = dg.evaluate_automation_conditions(graph, instance, cursor=waiting.cursor)
    assert asked.get_requested_partitions(SNAPSHOT) == {DAYS[-1]}
    assert len(instance.fetch_materializations(LABELS, limit=100).records) == read, "the good source is not read again"


def _write(root: Path) -> Workbench:
    rows = [f"{d}-{i},{d}T{6 * i + 1:02d}:00:00Z,p{i % 2},{i}" for d in DAYS for i in range(3)]
    amounts = [f"{d}-{i},p{i % 2},{i + 1},{d}T{5 * i + 2:02d}:00:00Z" for d in DAYS for i in range(3)]
    data = {
        "files": {"paths": ["data.csv"]},
        "format": {"type": "csv", "missing": [""]},
        "columns": {
            "amount_id": "string",
            "person": "string",
            "amount": "float64",
            "at": {"type": "timestamp", "required": True},
        },
        "row_id": ["amount_id"],
        "keys": ["person"],
        "event_time": "at",
        "available_time": "at",
        "partition": {"column": "at", "start": DAYS[0], "end": "2026-03-10"},
        "quality": {"suite": "data.suite.json", "max_quarantined_share": 0.0},
    }
    view = {
        "source": "data",
        "keys": {"person": "person"},
        "boundary": "lt",
        "features": {"sum": {"window": "amount", "aggregate": "sum", "duration": "2d"}},
    }
    bench = write_workbench(
        root,
        sources={"data": data},
        views={"own": view},
        files={
            "labels.csv": "label_id,t,person,target\n" + "\n".join(rows) + "\n",
            "data.csv": "amount_id,person,amount,at\n" + "\n".join(amounts) + "\n",
        },
        label_columns={"person": "string"},
        partition={"start": DAYS[0], "end": "2026-03-10"},
        label_keys=["label_id", "person"],
    )
    suite = json.loads((bench.folder / "data.suite.json").read_text())
    suite["expectations"].append(
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "amount", "min_value": 0},
            "severity": "critical",
        }
    )
    (bench.folder / "data.suite.json").write_text(json.dumps(suite))
    return bench


def _change(bench: Workbench, old: str, new: str) -> None:
    file = bench.folder / "defs.yaml"
    text = file.read_text()
    assert old in text, text
    file.write_text(text.replace(old, new))


def _after(day: str) -> str:
    return str(datetime.fromisoformat(day).date() + timedelta(days=1))
