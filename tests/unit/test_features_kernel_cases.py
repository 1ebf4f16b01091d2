"""The published case files, and what happens to files that are none."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.features.cases import CaseFileError, run_cases

FILES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize("name", ["point_in_time.json", "windows.json"])
def test_every_published_case_passes(name: str) -> None:
    answers = run_cases(FILES / name)
    published = json.loads((FILES / name).read_text(encoding="utf-8"))["cases"]
    assert [a["name"] for a in answers] == [c["name"] for c in published]
    assert [a["name"] for a in answers if not a["passed"]] == []
    for answer, case in zip(answers, published, strict=True):
        assert [set(r) for r in answer["results"]] == [set(r) for r in case["expected"]]


@pytest.mark.parametrize("name", ["point_in_time.json", "windows.json"])
def test_a_wrong_expectation_does_not_pass(name: str, tmp_path: Path) -> None:
    document = json.loads((FILES / name).read_text(encoding="utf-8"))
    for case in document["cases"]:
        cell = case["expected"][0]
        if "values" in cell:
            count = cell["values"]["count"]
            cell["values"]["count"] = 1 if count is None else count + 1
        else:
            cell["value"] = 1.0 if cell["value"] is None else cell["value"] * (1 + 1e-8) + 1e-8
    answers = run_cases(saved(tmp_path, document))
    assert [a["name"] for a in answers if a["passed"]] == []


LATEST: dict[str, Any] = {
    "kind": "latest",
    "cases": [
        {
            "name": "one",
            "contract": {"boundary": "lt", "lookback": None, "null_policy": "row_wins"},
            "rows": [{"key": "a", "event_time": 1, "available_time": 1, "sequence": 0, "value": 2.0}],
            "labels": [{"key": "a", "t": 2}],
            "expected": [{"value": 2.0, "event_time": 1, "reason": "hit"}],
        }
    ],
}


def saved(folder: Path, document: object) -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def changed(**parts: Any) -> dict[str, Any]:  # noqa: ANN401
    document = copy.deepcopy(LATEST)
    document["cases"][0].update(parts)
    return document


def row(**parts: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"key": "a", "event_time": 1, "available_time": 1, "sequence": 0, "value": 2.0, **parts}


def test_keys_of_different_types_never_meet(tmp_path: Path) -> None:
    keys: list[Any] = ["1", 1, True, None, "a", [1, "a"], ["1", "a"]]
    document = changed(
        rows=[row(key=key, value=float(i)) for i, key in enumerate(keys)],
        labels=[{"key": key, "t": 2} for key in keys],
        expected=[
            {"value": None, "event_time": None, "reason": "null_key"}
            if key is None
            else {"value": float(i), "event_time": 1, "reason": "hit"}
            for i, key in enumerate(keys)
        ],
    )
    (answer,) = run_cases(saved(tmp_path, document))
    assert answer["passed"], answer


def test_a_tie_is_refused_unless_the_row_identity_is_declared_to_decide(tmp_path: Path) -> None:
    rows = [row(row_id="x", value=1.0), row(row_id=7, value=3.0)]
    (refused,) = run_cases(saved(tmp_path, changed(rows=rows)))
    assert not refused["passed"]
    assert "tie_break" in refused["error"]
    contract = {
        "boundary": "lt",
        "lookback": None,
        "null_policy": "row_wins",
        "tie_break": ["event_time", "available_time", "sequence", "row_id"],
    }
    (decided,) = run_cases(
        saved(
            tmp_path,
            changed(rows=rows, contract=contract, expected=[{"value": 1.0, "event_time": 1, "reason": "hit"}]),
        )
    )
    assert decided["passed"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "needed is an object"),
        ({"cases": []}, "'kind' is missing"),
        ({"kind": "nearest", "cases": []}, "unknown kind 'nearest'"),
        ({"kind": "latest"}, "'cases' is missing"),
        ({"kind": "latest", "cases": [3]}, "case 0"),
        ({"kind": "latest", "cases": [{"name": "x"}]}, "'expected' is missing"),
        (changed(contract={"boundary": "between"}), "boundary"),
        (changed(contract={"boundary": "lt", "null_policy": "skip"}), "null_policy"),
        (changed(rows=[{"key": "a"}]), r"row 0: field '\w+' is missing"),
        (changed(rows=[row(event_time=1.5)]), "event_time"),
        (changed(rows=[row(event_time=2**70)]), "int64"),
        (changed(rows=[row(key=1.5)]), "float"),
        (changed(rows=[row(value="2")]), "value"),
        (changed(rows=[row(deleted=1)]), "deleted"),
        (changed(rows=[row(value=10**400)]), "row 0: value does not fit float64"),
        (changed(rows=[row(value=math.nan)]), "NaN is no number in JSON"),
        (changed(rows=[row(value=-math.inf)]), "-Infinity is no number in JSON"),
        (changed(expected=[{"value": math.nan}]), "NaN is no number in JSON"),
        (changed(contract={"boundary": "lt", "tie_break": 5}), "'tie_break' is 5, needed is list"),
        (changed(contract={"boundary": "lt", "tie_break": [5]}), "needed is a list of names"),
        (changed(rows=[row(row_id=None)]), "row_id is null"),
        (changed(labels=[{"key": "a"}]), r"label 0: field 't' is missing"),
    ],
)
def test_a_malformed_file_is_refused_by_name(document: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match=message):
        run_cases(saved(tmp_path, document))


def test_a_number_beyond_float64_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, LATEST)
    path.write_text(path.read_text(encoding="utf-8").replace('"value": 2.0', '"value": 1e400', 1), encoding="utf-8")
    with pytest.raises(CaseFileError, match="1e400 does not fit float64"):
        run_cases(path)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text("{", encoding="utf-8")
    with pytest.raises(CaseFileError, match="JSON"):
        run_cases(tmp_path / "cases.json")
