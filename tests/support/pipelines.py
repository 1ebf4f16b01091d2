"""Writes a small pipeline folder: one source `readings` under test, and the rest that a declaration needs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from headway.cli.main import main

Suite = Mapping[str, Any]


@dataclass(frozen=True)
class DatasetBench:
    """A pipeline folder with its own home, driven through `headway datasets` as a person would."""

    folder: Path

    @property
    def home(self) -> Path:
        """The home of this bench's catalog and store."""
        return self.folder.parent / "home"

    def write(self, readings: Mapping[str, Any], data: str | bytes = "", **more: Any) -> None:  # noqa: ANN401
        """Write the pipeline with `data` as data.csv; further arguments as `write_pipeline`."""
        files = {"data.csv": data, **more.pop("files", {})}
        write_pipeline(self.folder, readings, files=files, **more)

    def run(self, command: str, *arguments: str, source: str = "readings") -> Result:
        """`headway datasets COMMAND --pipeline FOLDER --source SOURCE ...`; an unexpected exception fails the test."""
        options = ["--pipeline", str(self.folder), "--source", source]
        return self.headway("datasets", command, *options, *arguments)

    def headway(self, *arguments: str) -> Result:
        """The `headway` command in this bench's home."""
        result = CliRunner().invoke(main, list(arguments), env={"HEADWAY_HOME": str(self.home), "COLUMNS": "200"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def canonical(self, *names: str) -> dict[str, Any]:
        """What `canonical --json` says about files of the folder (data.csv by default)."""
        return json.loads(self.run("canonical", *self._paths(names), "--json", "--limit", "0").stdout)

    def ingest(self, *names: str) -> list[dict[str, Any]]:
        """What `ingest --json` says."""
        return json.loads(self.run("ingest", *self._paths(names), "--json").stdout)

    def ingest_declared(self) -> list[dict[str, Any]]:
        """What `ingest --json` says when no file is named: the whole calendar from the declared files."""
        return json.loads(self.run("ingest", "--json").stdout)

    def digest(self, *names: str) -> str:
        """The content digest that `digest` prints."""
        result = self.run("digest", *self._paths(names))
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()[0]

    def refusal(self, command: str = "ingest", *names: str) -> str:
        """The one line of a refusal; the test fails when the command is not refused."""
        result = self.run(command, *self._paths(names))
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        return result.stderr

    def show(self, partition: str = "") -> dict[str, Any]:
        """What `show --json` says about the current version of a partition."""
        reference = f"{self.folder.name}/readings" + (f"/{partition}" if partition else "")
        return json.loads(self.headway("datasets", "show", reference, "--json").stdout)

    def versions(self) -> list[dict[str, Any]]:
        """The current versions of the source."""
        return json.loads(self.run("list", "--json").stdout)

    def _paths(self, names: Sequence[str]) -> list[str]:
        return [str(self.folder / name) for name in names or ("data.csv",)]


NOT_NULL = {"type": "expect_column_values_to_not_be_null", "severity": "critical"}
LABEL_SOURCE: dict[str, Any] = {
    "files": {"paths": ["labels.csv"]},
    "format": {"type": "csv"},
    "columns": {
        "label_id": {"type": "string", "required": True},
        "asked_at": {"type": "timestamp"},
        "known_at": {"type": "timestamp"},
        "target": {"type": "float64"},
    },
    "row_id": ["label_id"],
    "keys": ["label_id"],
    "event_time": "asked_at",
    "available_time": "known_at",
    "partition": {"column": "asked_at", "start": "2020-01-01"},
    "quality": {"suite": "labels.suite.json"},
}
STATIC = {"static_from": "1970-01-01T00:00:00Z", "reason": "a table of the test without times"}


def suite(*rules: Mapping[str, Any], name: str = "rules") -> dict[str, Any]:
    """A suite document."""
    return {"name": name, "expectations": list(rules)}


def not_null(column: str) -> dict[str, Any]:
    """A critical rule that a column has no nulls."""
    return {**NOT_NULL, "kwargs": {"column": column}}


def source(
    columns: Mapping[str, Any],
    *,
    row_id: Sequence[str],
    keys: Sequence[str] | None = None,
    files: Sequence[str] = ("data.csv",),
    **more: object,
) -> dict[str, Any]:
    """A source declaration; column types may be given as plain words. Static unless `event_time` is given."""
    clocks = {} if "event_time" in more else {"event_time": STATIC, "available_time": STATIC}
    return {
        "files": {"paths": list(files)},
        "format": {"type": "csv"},
        "columns": {n: {"type": c} if isinstance(c, str) else dict(c) for n, c in columns.items()},
        "row_id": list(row_id),
        "keys": list(keys or row_id),
        "quality": {"suite": "readings.suite.json"},
        **clocks,
        **more,
    }


def write_pipeline(
    folder: Path,
    readings: Mapping[str, Any],
    *,
    rules: Suite | None = None,
    files: Mapping[str, str | bytes] | None = None,
    code: str | None = None,
    more_sources: Mapping[str, Any] | None = None,
) -> Path:
    """Write `defs.yaml`, suites, `code` as sources.py and data files into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    attributes = {
        "name": folder.name,
        "owner": "team:tests",
        "sources": {"readings": dict(readings), "labels": LABEL_SOURCE, **(more_sources or {})},
        "label": {"source": "labels", "observation_time": "asked_at", "target": "target", "known_at": "known_at"},
        "features": {"version": 1, "views": {"own": _OWN_VIEW}},
    }
    document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    write_suite(folder, rules or suite(not_null(readings["row_id"][0])))
    (folder / "labels.suite.json").write_text(json.dumps(suite(not_null("label_id"))), encoding="utf-8")
    if code is not None:
        (folder / "sources.py").write_text(code, encoding="utf-8")
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_suite(folder: Path, rules: Suite, name: str = "readings.suite.json") -> None:
    """Write a suite file."""
    (folder / name).write_text(json.dumps(rules), encoding="utf-8")


_OWN_VIEW = {
    "source": "labels",
    "keys": {"label_id": "label_id"},
    "boundary": "lt",
    "features": {"earlier": {"window": "target", "aggregate": "count", "duration": "1d"}},
}
