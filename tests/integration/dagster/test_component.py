"""What a Dagster user finds: ordinary assets and checks, a scaffold that works, extra code beside a pipeline."""

import json
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from assets.component import ModelPipeline, PipelineScaffolder
from assets.definitions import MisplacedModel, defs, refuse_misplaced_models
from assets.partitions import partitions_definition, snapshot_dependency, week_calendar
from headway.cli.main import main
from headway.datasets.partitions import PartitionScheme
from headway.loading import load_pipeline
from headway.monitoring.windows import week_bounds, week_key

KEYS = {
    *(f"flight_delay/dataset_version/{s}" for s in ("airlines", "airports", "flights", "planes", "weather")),
    "flight_delay/feature_snapshot",
    "flight_delay/training_run",
    "flight_delay/model_version",
    "flight_delay/online_features",
    *(f"flight_delay/{stage}" for stage in ("predictions", "labels", "quality_report", "drift_report")),
}
# What informs and blocks nothing.
WARNINGS = {
    "flight_delay/labels:completeness",
    "flight_delay/drift_report:data_incident",
    "flight_delay/drift_report:drift",
}
# One per gate of the policy, beside the two of a training run.
GATES = 8


class NoParams(BaseModel):
    """What `dg scaffold` passes when a component asks for nothing."""


@pytest.fixture(scope="module")
def graph() -> dg.Definitions:
    return defs()


def test_every_stage_is_an_ordinary_asset_with_what_a_page_needs(graph: dg.Definitions) -> None:
    specs = {s.key.to_user_string(): s for s in graph.resolve_all_asset_specs() if s.group_name == "flight_delay"}
    assert set(specs) == KEYS
    for spec in specs.values():
        assert spec.group_name == "flight_delay"
        assert spec.owners == ["team:flights"]
        assert spec.kinds
        assert spec.description
        assert spec.code_version
        if "dataset_version" in spec.key.path or "feature_snapshot" in spec.key.path:
            assert spec.metadata["dagster/column_schema"].columns
    assert "dagster/column_lineage" in specs["flight_delay/feature_snapshot"].metadata


def test_all_checks_block_but_those_that_only_inform(graph: dg.Definitions) -> None:
    checks = {
        f"{key.asset_key.to_user_string()}:{key.name}": spec.blocking
        for asset in graph.assets or []
        if isinstance(asset, dg.AssetsDefinition)
        for key, spec in ((s.key, s) for s in asset.check_specs)
        if key.asset_key.path[0] == "flight_delay"
    }
    # Of the loop: parity of the online store, completeness of predictions and of labels, two of drift.
    assert len(checks) == 5 * 3 + 4 + 2 + GATES + 5
    assert {name for name, blocks in checks.items() if not blocks} == WARNINGS


def test_dagsters_partitions_are_those_of_the_declaration(graph: dg.Definitions) -> None:
    flights = load_pipeline("flight_delay").spec.sources["flights"].partition
    assert flights is not None
    scheme = PartitionScheme.from_spec(flights)
    asset = graph.get_assets_def(dg.AssetKey(["flight_delay", "feature_snapshot"]))
    assert asset.partitions_def is not None
    assert tuple(asset.partitions_def.get_partition_keys()) == scheme.keys()
    assert len(scheme.keys()) == 366


def test_a_training_run_depends_on_the_months_before_it_and_a_version_on_the_month_itself(
    graph: dg.Definitions,
) -> None:
    days = graph.get_assets_def(dg.AssetKey(["flight_delay", "feature_snapshot"])).partitions_def
    for stage, first, last in (
        ("training_run", "2013-01-01", "2013-10-31"),
        ("model_version", "2013-11-01", "2013-11-30"),
    ):
        asset = graph.get_assets_def(dg.AssetKey(["flight_delay", stage]))
        assert asset.partitions_def is not None
        assert days is not None
        mapping = asset.get_partition_mapping(dg.AssetKey(["flight_delay", "feature_snapshot"]))
        assert mapping is not None
        asked = mapping.get_upstream_mapped_partitions_result_for_partitions(
            asset.partitions_def.subset_with_partition_keys(["2013-11-01"]), asset.partitions_def, days
        )
        keys = sorted(asked.partitions_subset.get_partition_keys())
        assert (keys[0], keys[-1]) == (first, last)


def test_what_asks_by_itself_is_declared_running_and_says_why(graph: dg.Definitions) -> None:
    sensors = {s.name: s for s in graph.sensors or [] if isinstance(s, dg.SensorDefinition)}
    assert set(sensors) == {"reconcile_training", "retrain_on_drift", "follow_updates"}
    assert {s.default_status for s in sensors.values()} == {dg.DefaultSensorStatus.RUNNING}
    schedules = {s.name: s for s in graph.schedules or [] if isinstance(s, dg.ScheduleDefinition)}
    assert "flight_delay_nightly" in schedules
    assert {s.default_status for s in schedules.values()} == {dg.DefaultScheduleStatus.RUNNING}
    for description in (d.description for d in (*sensors.values(), *schedules.values())):
        assert "Runs unasked" in (description or "")


def test_answers_are_followed_by_weeks_from_monday_to_monday(graph: dg.Definitions) -> None:
    for stage in ("predictions", "labels", "quality_report", "drift_report"):
        weeks = graph.get_assets_def(dg.AssetKey(["flight_delay", stage])).partitions_def
        assert weeks is not None
        keys = weeks.get_partition_keys()
        assert (keys[0], keys[-1], len(keys)) == ("2013-04-01", "2013-12-30", 40)
        assert [week_key(week_bounds(key)[0]) for key in keys] == list(keys)
    assert graph.get_assets_def(dg.AssetKey(["flight_delay", "online_features"])).partitions_def is None


def test_the_labels_of_a_week_depend_on_its_answers_and_on_its_days(graph: dg.Definitions) -> None:
    asset = graph.get_assets_def(dg.AssetKey(["flight_delay", "labels"]))
    days = graph.get_assets_def(dg.AssetKey(["flight_delay", "dataset_version", "flights"])).partitions_def
    assert asset.partitions_def is not None
    assert days is not None
    mapping = asset.get_partition_mapping(dg.AssetKey(["flight_delay", "dataset_version", "flights"]))
    assert mapping is not None
    for week, first, last in (("2013-11-04", "2013-11-04", "2013-11-10"), ("2013-12-30", "2013-12-30", "2014-01-01")):
        asked = mapping.get_upstream_mapped_partitions_result_for_partitions(
            asset.partitions_def.subset_with_partition_keys([week]), asset.partitions_def, days
        )
        keys = sorted(asked.partitions_subset.get_partition_keys())
        assert (keys[0], keys[-1]) == (first, last)


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        ("2026-03-01", "2026-03-20", "2026-02-23", "2026-03-16"),
        ("2026-06-01", "2026-06-02", "2026-06-01", "2026-06-01"),
        ("2026-02-01", "2026-03-02", "2026-01-26", "2026-02-23"),
    ],
)
def test_weeks_begin_on_the_monday_before_the_first_as_of(start: str, end: str, first: str, last: str) -> None:
    spec = load_pipeline("flight_delay").spec
    label, training = spec.sources["flights"], spec.training
    assert label.partition is not None
    assert training is not None
    assert training.as_of is not None
    partition = label.partition.model_copy(update={"end": end, "expected_empty": ()})
    changed = spec.model_copy(
        update={
            "sources": {**spec.sources, "flights": label.model_copy(update={"partition": partition})},
            "training": training.model_copy(
                update={"as_of": training.as_of.model_copy(update={"start": start, "end": None})}
            ),
        }
    )
    keys = partitions_definition(week_calendar(changed)).get_partition_keys()
    assert (keys[0], keys[-1]) == (first, last)


def test_dagster_asks_for_every_source_day_in_reach() -> None:
    spec = load_pipeline("flight_delay").spec
    offsets = {}
    for source in ("flights", "weather"):
        mapping = snapshot_dependency(spec, source)
        assert isinstance(mapping, dg.TimeWindowPartitionMapping)
        offsets[source] = (mapping.start_offset, mapping.end_offset)
    # 48 h in which a departure shows as expired and 33 h to a late arrival; six hours of weather.
    assert offsets == {"flights": (-4, 1), "weather": (-1, 0)}
    assert snapshot_dependency(spec, "planes") is None


def test_the_scaffold_is_a_pipeline_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "my_model"
    request = dg.ScaffoldRequest(
        type_name="assets.component.ModelPipeline",
        target_path=folder,
        scaffold_format="yaml",
        project_root=tmp_path,
        params=NoParams(),
    )
    PipelineScaffolder().scaffold(request)
    environment = {"HEADWAY_HOME": str(tmp_path / "home")}
    run = CliRunner()
    for arguments in (
        ["check", str(folder)],
        ["datasets", "ingest", "-p", str(folder), "-s", "visits"],
        ["snapshots", "build", "--pipeline", str(folder), "--partition", "2026-01-05", "--partition", "2026-01-06"],
    ):
        result = run.invoke(main, arguments, env=environment)
        assert result.exit_code == 0, result.output
    listed = run.invoke(main, ["snapshots", "list", "--pipeline", str(folder), "--json"], env=environment)
    assert [s["status"] for s in json.loads(listed.stdout)["snapshots"]] == ["published", "published"]


def test_a_model_where_dagster_would_import_it_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "pipelines" / "one"
    good.mkdir(parents=True)
    (good / "defs.yaml").write_text("")
    (good / "model.py").write_text("import torch\n")
    refuse_misplaced_models(tmp_path / "pipelines")
    (good / "extra").mkdir()
    (good / "extra" / "model.py").write_text("import torch\n")
    with pytest.raises(MisplacedModel, match=r"pipelines/one/extra/model.py would be imported .* move it beside"):
        refuse_misplaced_models(tmp_path / "pipelines")


def test_the_schema_of_the_component_is_the_published_one() -> None:
    schema = ModelPipeline.get_model_cls().model_json_schema()
    published = Path(__file__).parents[3] / "docs" / "pipeline.schema.json"
    assert schema == json.loads(published.read_text())
