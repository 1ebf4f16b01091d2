"""All definitions of the code location as text: a change of the graph shows as a readable difference.

After an intended change: `.venv/bin/python -m assets.listing tests/definitions.txt`.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from pydantic import BaseModel

from assets.component import PipelineScaffolder
from assets.definitions import defs
from assets.describe import freshness
from assets.listing import listing
from headway.declaration import PartitionSpec

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "tests" / "definitions.txt"
RENEW = ".venv/bin/python -m assets.listing tests/definitions.txt"
COPIES = 200
# The goal is five; beside other work the same instructions cost more (5.8 measured under a load of ten per core).
CPU_LIMIT_S = 12.0
_TABLES = ("dataset_version", "feature_snapshot", "token_snapshot")


class NoParams(BaseModel):
    """What `dg scaffold` passes when a component asks for nothing."""


# Loads as a code server does, and says what it found and what it cost in CPU seconds of this process.
_LOAD = """
import resource, sys
from pathlib import Path
import dagster as dg
import assets.definitions as location
before = resource.getrusage(resource.RUSAGE_SELF)
found = location.defs()
repository = found.get_repository_def()
after = resource.getrusage(resource.RUSAGE_SELF)
loaded = after.ru_utime + after.ru_stime
print(len(repository.asset_graph.get_all_asset_keys()), len(repository.schedule_defs), f"{loaded:.2f}")
assert not {"torch", "great_expectations", "kubernetes"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def graph() -> dg.Definitions:
    return defs()


def test_the_definitions_are_those_that_were_agreed(graph: dg.Definitions) -> None:
    assert listing(graph) == STORED.read_text(encoding="utf-8"), f"intended? renew the file: {RENEW}"


def test_every_asset_says_what_it_is_whose_it_is_and_where_it_is_declared(graph: dg.Definitions) -> None:
    for spec in graph.resolve_all_asset_specs():
        name = spec.key.to_user_string()
        assert spec.description, name
        assert spec.owners, name
        assert spec.kinds, name
        assert spec.group_name == spec.key.path[0], name
        assert spec.tags["headway/stage"] == spec.key.path[1], name
        assert spec.code_version, name
        references = spec.metadata["dagster/code_references"].code_references
        assert any(r.file_path.endswith("defs.yaml") for r in references), name
        assert all(Path(r.file_path).is_file() for r in references), name
        if spec.key.path[1] in _TABLES:
            assert spec.metadata["dagster/column_schema"].columns, name


def test_a_reference_leads_to_the_line_of_the_source(graph: dg.Definitions) -> None:
    specs = {spec.key.to_user_string(): spec for spec in graph.resolve_all_asset_specs()}
    references = specs["flight_delay/dataset_version/weather"].metadata["dagster/code_references"].code_references
    declared = next(r for r in references if r.file_path.endswith("defs.yaml"))
    line = Path(declared.file_path).read_text().splitlines()[declared.line_number - 1]
    assert line.strip().startswith("weather:")


def test_columns_lead_back_to_their_sources_through_derived_features(graph: dg.Definitions) -> None:
    specs = {spec.key.to_user_string(): spec for spec in graph.resolve_all_asset_specs()}
    lineage = specs["flight_delay/feature_snapshot"].metadata["dagster/column_lineage"].deps_by_column
    came_from = {(d.asset_key.path[-1], d.column_name) for d in lineage["plane_age"]}
    assert came_from == {("flights", "scheduled_departure"), ("planes", "year"), ("planes", "tailnum")}
    features = {c.name for c in specs["flight_delay/feature_snapshot"].metadata["dagster/column_schema"].columns}
    assert set(lineage) == features


def test_recorded_data_have_no_deadline_and_open_calendars_have_one(graph: dg.Definitions) -> None:
    for spec in graph.resolve_all_asset_specs():
        assert spec.freshness_policy is None, "the recorded year ends, so nothing of it can become stale"
    open_ended = PartitionSpec(column="t", cadence="daily", start="2026-01-01", zone="Europe/Budapest")
    policy = freshness(open_ended)
    assert policy == dg.FreshnessPolicy.cron(
        "0 6 * * *", lower_bound_delta=timedelta(days=1), timezone="Europe/Budapest"
    )


@pytest.mark.slow
def test_two_hundred_pipelines_load_and_the_code_location_answers(tmp_path: Path) -> None:
    for name in ("assets", "resources", "headway", "trainer", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number in range(COPIES):
        _copy_scaffold(tmp_path / "pipelines" / f"small_{number:03d}")
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    environ |= {"PYTHONPATH": str(tmp_path), "HEADWAY_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", _LOAD], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assets, schedules, seconds = done.stdout.split()
    assert (int(assets), int(schedules)) == (2 * COPIES, COPIES)
    assert float(seconds) < CPU_LIMIT_S


def _copy_scaffold(folder: Path) -> None:
    request = dg.ScaffoldRequest(
        type_name="assets.component.ModelPipeline",
        target_path=folder,
        scaffold_format="yaml",
        project_root=folder.parent,
        params=NoParams(),
    )
    PipelineScaffolder().scaffold(request)
