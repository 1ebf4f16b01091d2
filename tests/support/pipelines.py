"""Writes a small pipeline folder: one source `readings` under test, and the rest that a declaration needs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Suite = Mapping[str, Any]

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
