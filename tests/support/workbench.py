"""A pipeline folder with its own home, driven through the `headway` command as a person would."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from click.testing import CliRunner, Result

from headway.cli.main import main
from headway.features.reading import read_values
from headway.home import load_settings
from headway.services import open_services

LABELS_SUITE = {
    "name": "labels",
    "expectations": [
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "label_id"}, "severity": "critical"}
    ],
}


@dataclass
class Workbench:
    """One pipeline and one home."""

    folder: Path
    home: Path

    def run(self, *arguments: str) -> Result:
        """The `headway` command with these arguments, in this home."""
        return CliRunner().invoke(main, list(arguments), env={"HEADWAY_HOME": str(self.home)})

    def ingest(self, *sources: str, partitions: Sequence[str] = ()) -> None:
        """Materialize sources, whole or some partitions; fails the test when a version is not released."""
        wanted = [a for p in partitions for a in ("--partition", p)]
        for source in sources:
            result = self.run("datasets", "ingest", "--pipeline", str(self.folder), "--source", source, *wanted)
            assert result.exit_code == 0, result.output

    def build(self, *partitions: str) -> Result:
        """Build snapshots; the caller looks at the result."""
        wanted = [a for p in partitions for a in ("--partition", p)]
        return self.run("snapshots", "build", "--pipeline", str(self.folder), *wanted, "--json")

    def outcome(self, partition: str) -> dict[str, Any]:
        """The outcome of building one snapshot."""
        result = self.build(partition)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return json.loads(result.stdout)["snapshots"][0]

    def values(self, *partitions: str) -> list[dict[str, Any]]:
        """Rows of published snapshots, in the order of their labels, partition by partition."""
        return [row for p in partitions for row in self.table(p).to_pylist()]

    def table(self, partition: str) -> pa.Table:
        """The stored values of a partition, built first."""
        outcome = self.outcome(partition)
        assert outcome["status"] in ("published", "up_to_date"), outcome
        with open_services(load_settings({"HEADWAY_HOME": str(self.home)})) as services:
            return read_values(services, services.catalog.snapshot(services.principal, outcome["snapshot_id"]))


def write_workbench(
    root: Path,
    *,
    sources: Mapping[str, Mapping[str, Any]],
    views: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, str | bytes],
    label_columns: Mapping[str, Any] | None = None,
    label: Mapping[str, Any] | None = None,
    partition: Mapping[str, Any] | None = None,
    label_keys: Sequence[str] = ("label_id",),
    label_quality: Mapping[str, Any] | None = None,
    label_source: Mapping[str, Any] | None = None,
    features: Mapping[str, Any] | None = None,
    code: str | None = None,
) -> Workbench:
    """Write a pipeline whose label rows are the file `labels.csv` with `label_id`, `t` and the columns given.

    Further sources get a suite that asks for their first row identity column to be present.
    """
    folder = root / "pipeline"
    folder.mkdir(parents=True)
    columns = {"label_id": "string", "t": {"type": "timestamp", "required": True}, **(label_columns or {})}
    labels = {
        "files": {"paths": ["labels.csv"]},
        "format": {"type": "csv"},
        "columns": _columns({**columns, "target": "float64"}),
        "row_id": ["label_id"],
        "keys": list(label_keys),
        "event_time": "t",
        "available_time": "t",
        "partition": {"column": "t", **(partition or {})},
        "quality": {"suite": "labels.suite.json", **(label_quality or {})},
        **(label_source or {}),
    }
    attributes = {
        "name": "pipeline",
        "owner": "team:tests",
        "sources": {"labels": labels, **{n: {**s, "columns": _columns(s["columns"])} for n, s in sources.items()}},
        "label": {"source": "labels", "observation_time": "t", "target": "target", "known_at": "t", **(label or {})},
        "features": {"version": 1, "views": dict(views), **(features or {})},
    }
    document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "labels.suite.json").write_text(json.dumps(LABELS_SUITE))
    for name, source in sources.items():
        rule = LABELS_SUITE["expectations"][0] | {"kwargs": {"column": _first(source["row_id"])}}
        (folder / source["quality"]["suite"]).write_text(json.dumps({"name": name, "expectations": [rule]}))
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if code is not None:
        (folder / "features.py").write_text(code)
    return Workbench(folder, root / "home")


def table_source(
    columns: Mapping[str, Any], row_id: Sequence[str], keys: Sequence[str], **more: object
) -> dict[str, Any]:
    """An unpartitioned CSV source `data.csv` with event time `at` and availability `known`."""
    base = {
        "files": {"paths": ["data.csv"]},
        "format": {"type": "csv"},
        "columns": dict(columns),
        "row_id": list(row_id),
        "keys": list(keys),
        "event_time": "at",
        "available_time": "known",
        "quality": {"suite": "data.suite.json", "clock_skew": "3650d"},
    }
    return {**base, **more}


def _columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {n: {"type": c} if isinstance(c, str) else dict(c) for n, c in columns.items()}


def _first(names: Sequence[str]) -> str:
    return names[0]
