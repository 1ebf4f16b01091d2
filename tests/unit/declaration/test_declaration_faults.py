"""Every fault of a declaration is one line with file, line, field and what would be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from support.pipelines import source, write_pipeline

from headway.cli.main import main
from headway.loading import DeclarationInvalid, load_pipeline

READINGS = source(
    {"meter": {"type": "string", "required": True}, "at": "timestamp", "kwh": "float64", "note": "string"},
    row_id=["meter", "at"],
    keys=["meter"],
    event_time="at",
    available_time="at",
    partition={"column": "at", "start": "2026-01-01"},
)

Change = Callable[[dict[str, Any]], None]


def _written(folder: Path, change: Change) -> Path:
    write_pipeline(folder, READINGS, files={"data.csv": "meter,at,kwh,note\n", "labels.csv": ""})
    document = yaml.safe_load((folder / "defs.yaml").read_text())
    change(document["attributes"])
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def _checked(folder: Path) -> Result:
    return CliRunner().invoke(main, ["check", str(folder)])


def _line_of(folder: Path, text: str) -> int:
    lines = (folder / "defs.yaml").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def _view(attributes: dict[str, Any], **changes: object) -> dict[str, Any]:
    base = {
        "source": "readings",
        "keys": {"label_id": "meter"},
        "boundary": "lt",
        "features": {"sum": {"window": "kwh", "aggregate": "sum", "duration": "1d"}},
    }
    attributes["features"]["views"]["own"] = base | changes
    return base


@pytest.mark.parametrize(
    ("fields", "place", "line", "said"),
    [
        ({"start": "01/02/2026"}, "start", "start: 01/02/2026", "is no date"),
        ({"end": "2026-13-01"}, "end", "end: '2026-13-01'", "is no date"),
        ({"end": "2026-01-01"}, "end", "end: '2026-01-01'", "is not after"),
        ({"cadence": "monthly", "start": "2026-01-05"}, "start", "start: '2026-01-05'", "write 2026-01-01 or"),
        (
            {"expected_empty": ["2026-01-02", "1999-01-01"]},
            "expected_empty.1",
            "- '1999-01-01'",
            "outside the calendar",
        ),
        ({"expected_empty": ["soon"]}, "expected_empty.0", "- soon", "is no date"),
        ({"zone": "Mars/Olympus"}, "zone", "zone: Mars/Olympus", "is not known"),
    ],
)
def test_a_wrong_calendar_is_one_line_with_its_field(
    tmp_path: Path, fields: dict[str, Any], place: str, line: str, said: str
) -> None:
    folder = _written(tmp_path / "p", lambda a: a["sources"]["readings"]["partition"].update(fields))
    result = _checked(folder)
    assert result.exit_code == 1
    (told,) = result.output.splitlines()
    assert f"defs.yaml:{_line_of(folder, line)}: sources.readings.partition.{place}: " in told
    assert said in told


@pytest.mark.parametrize(
    ("code", "line"), [(b"def one():\n    return 1\n\ndef two(:\n", 4), (b"# \xff\n", 1), (b"x = 1\0\n", 1)]
)
def test_a_file_that_is_no_python_is_one_line(tmp_path: Path, code: bytes, line: int) -> None:
    def refer_twice(attributes: dict[str, Any]) -> None:
        custom = {"function": "features.one", "inputs": ["own__earlier"], "type": "float64"}
        attributes["features"]["derived"] = {"first": custom, "second": custom | {"function": "features.two"}}

    folder = _written(tmp_path / "p", refer_twice)
    (folder / "features.py").write_bytes(code)
    result = _checked(folder)
    assert result.exit_code == 1, result.output
    (told,) = result.output.splitlines()
    assert f"features.py:{line}: features: syntax error" in told


def test_a_sound_declaration_is_said_to_be_sound(tmp_path: Path) -> None:
    result = _checked(_written(tmp_path / "p", lambda a: None))
    assert result.exit_code == 0, result.output
    assert "2 sources, 1 feature views, 1 features; nothing wrong" in result.output


def test_unknown_field_is_named_with_line_and_allowed_values(tmp_path: Path) -> None:
    folder = _written(tmp_path / "p", lambda a: a["sources"]["readings"].update(rowid=["meter"]))
    result = _checked(folder)
    assert result.exit_code == 1
    assert f"defs.yaml:{_line_of(folder, 'rowid:')}: sources.readings.rowid" in result.output
    assert "'row_id'" in result.output


def test_two_faults_are_both_reported(tmp_path: Path) -> None:
    def break_two(attributes: dict[str, Any]) -> None:
        attributes["owner"] = "nobody"
        attributes["sources"]["readings"]["partition"]["cadence"] = "fortnightly"

    folder = _written(tmp_path / "p", break_two)
    with pytest.raises(DeclarationInvalid) as caught:
        load_pipeline(folder)
    assert {p.field for p in caught.value.problems} == {"owner", "sources.readings.partition.cadence"}
    assert {p.line for p in caught.value.problems} == {_line_of(folder, "owner:"), _line_of(folder, "cadence:")}
    assert "'hourly', 'daily', 'weekly' or 'monthly'" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda a: _view(a) and a["features"]["views"]["own"].update(lookback="0h"),
            "'0h' is not a duration: write a positive whole number",
        ),
        (lambda a: a["sources"]["readings"].update(sequence="note"), "sequence 'note' is string; it must be int64"),
        (lambda a: a["sources"]["readings"].update(row_id=["kwh"]), "is a float and cannot be part of a key"),
        (lambda a: a["sources"]["readings"].pop("available_time"), "sources.readings.available_time: is required"),
        (lambda a: a["sources"]["readings"].update(keys=["nometer"]), "column 'nometer' is not declared"),
        (
            lambda a: a["sources"]["readings"]["partition"].update(cadence="hourly", zone="America/Los_Angeles"),
            "repeat or skip an hour when clocks change; use UTC",
        ),
        (
            lambda a: a["sources"]["readings"].update(available_time="at", event_time="at", transform="code.gone"),
            "declares the file's own columns under `raw`",
        ),
        (lambda a: a["sources"]["readings"].pop("quality"), "sources.readings.quality: is required"),
        (lambda a: a["label"].update(target="gone"), "column 'gone' is not in labels"),
        (lambda a: _view(a, features={"last": {"latest": "kwh"}}), "needs a lookback"),
        (lambda a: _view(a, keys={"label_id": "note"}), "'note' is not a key of readings; keys are ['meter']"),
        (
            lambda a: _view(a, features={"m": {"window": "note", "aggregate": "mean", "duration": "1d"}}),
            "'mean' of string column 'note' has no meaning",
        ),
        (lambda a: a["label"].update(carry=["target"]), "are known after the observation"),
    ],
)
def test_impossible_combinations_are_refused_in_words(tmp_path: Path, change: Change, said: str) -> None:
    result = _checked(_written(tmp_path / "p", change))
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_view_with_its_own_clock_may_not_read_what_is_known_later(tmp_path: Path) -> None:
    def two_clocks(attributes: dict[str, Any]) -> None:
        columns = attributes["sources"]["readings"]["columns"]
        columns["left"] = {"type": "timestamp"}
        attributes["sources"]["readings"]["partition"].update(before="1d", after="1d")
        _view(attributes, event_time="left", available_time="left")

    result = _checked(_written(tmp_path / "p", two_clocks))
    assert result.exit_code == 1
    assert "look ahead" in result.output


def test_a_key_written_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = _written(tmp_path / "p", lambda a: None)
    text = (folder / "defs.yaml").read_text()
    (folder / "defs.yaml").write_text(text + "  owner: team:other\n")
    result = _checked(folder)
    assert result.exit_code == 1
    assert f"defs.yaml:{len(text.splitlines()) + 1}: attributes.owner: is written twice" in result.output


def test_missing_python_and_suite_are_named(tmp_path: Path) -> None:
    def refer(attributes: dict[str, Any]) -> None:
        readings = attributes["sources"]["readings"]
        readings.update(raw=dict(readings["columns"]), transform="sources.canonical")

    folder = _written(tmp_path / "p", refer)
    (folder / "labels.suite.json").unlink()
    result = _checked(folder)
    assert "there is no sources.py beside defs.yaml" in result.output
    assert "there is no labels.suite.json beside defs.yaml" in result.output
    (folder / "sources.py").write_text("def other():\n    pass\n")
    assert "no function 'sources.canonical'; found ['other']" in _checked(folder).output


def test_an_unknown_pipeline_names_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["snapshots", "list", "--pipeline", "no_such"])
    assert result.exit_code == 2
    assert "no pipeline 'no_such'" in result.output
    assert "flight_delay" in result.output


def _custom_served(attributes: dict[str, Any], carried: bool, filled: bool) -> None:
    _view(attributes)
    once = {"function": "features.one", "source": "readings", "lookback": "1d", "type": "float64"}
    attributes["features"]["custom"] = {"once": once}
    columns = attributes["sources"]["labels"]["columns"]
    columns["size"] = {"type": "int64", "known_at": "asked_at"}
    attributes["label"]["carry"] = ["size"] if carried else []
    request: dict[str, Any] = {
        "label_id": {"type": "string", "column": "label_id"},
        "starts": {"type": "timestamp", "required": True},
    }
    if filled:
        request["size"] = {"type": "int64", "column": "size"}
    attributes["serving"] = {"observed": "starts", "before": "1h", "request": request}


@pytest.mark.parametrize(("carried", "filled"), [(True, False), (True, True), (False, False)])
def test_beside_a_custom_feature_the_request_fills_every_label_input(
    tmp_path: Path, carried: bool, filled: bool
) -> None:
    folder = _written(tmp_path / "p", lambda a: _custom_served(a, carried, filled))
    (folder / "features.py").write_text("def one(labels, rows):\n    return rows\n")
    result = _checked(folder)
    if filled or not carried:
        assert result.exit_code == 0, result.output
        return
    (told,) = result.output.splitlines()
    assert f"defs.yaml:{_line_of(folder, 'request:')}: serving.request: custom features ['once']" in told
    assert "no field of the request fills ['size']" in told
    assert told.endswith("Add fields that fill them, or drop them from label.carry")
