"""`headway drift cases`: the shipped file agrees, other files are answered, and faults are told with their place."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from headway.cli.main import main

SHIPPED = Path(__file__).resolve().parents[2] / "cases" / "drift.json"


def _run(path: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["drift", "cases", str(path), *more], env={"HEADWAY_HOME": str(path.parent)})


def _file(folder: Path, *cases: dict[str, Any], **document: Any) -> Path:  # noqa: ANN401
    path = folder / "cases.json"
    path.write_text(json.dumps({"kind": "drift", "cases": list(cases)} | document))
    return path


def _case(**more: Any) -> dict[str, Any]:  # noqa: ANN401
    rng = np.random.default_rng(0)
    known, now = (rng.normal(size=600).round(3).tolist() for _ in range(2))
    return {"name": "one", "reference": {"x": known}, "current": {"x": now}} | more


def test_every_shipped_case_is_judged_as_a_person_expects() -> None:
    found = _run(SHIPPED, "--json")
    assert found.exit_code == 0, found.output
    answers = json.loads(found.stdout)["cases"]
    assert len(answers) >= 15
    assert all(a["agree"] for a in answers)
    assert {a["verdict"] for a in answers} == {"none", "drift", "data_incident", "season", "too_few"}


def test_a_case_without_expectation_is_answered_and_not_compared(tmp_path: Path) -> None:
    found = _run(_file(tmp_path, _case()), "--json")
    assert found.exit_code == 0
    (answer,) = json.loads(found.stdout)["cases"]
    assert (answer["verdict"], answer["expected"], answer["agree"]) == ("none", None, None)


@pytest.mark.parametrize(
    "expected",
    [
        {"verdict": "drift"},
        {"incidents": ["unit_change"]},
        {"incidents": [{"kind": "null_rate", "feature": "x"}]},
        {"features": {"x": "drift"}},
        {"features": {"y": "none"}},
        {"features": {"x": {"verdict": "none", "reason": "other"}}},
    ],
)
def test_a_difference_is_shown_and_exits_1(tmp_path: Path, expected: dict[str, Any]) -> None:
    found = _run(_file(tmp_path, _case(expected=expected)))
    assert found.exit_code == 1
    assert "DIFFERS" in found.output
    assert "1 cases judged, 1 not as expected" in found.output


def test_an_incident_that_nobody_expects_is_a_difference(tmp_path: Path) -> None:
    case = _case(expected={"incidents": ["null_rate:x"]})
    case["current"] = {"x": [None] * 600, "y": [1] * 600}
    case["reference"]["z"] = [1, 2] * 300
    found = _run(_file(tmp_path, case), "--json")
    assert found.exit_code == 1
    said = json.loads(found.stdout)["cases"][0]["judgement"]["incidents"]
    assert {(i["kind"], i["feature"]) for i in said} == {("schema", "z"), ("null_rate", "x")}


def test_entities_times_and_policies_are_read(tmp_path: Path) -> None:
    rows = range(600)
    beside = {
        "entity": {"reference": [i // 5 for i in rows], "current": [i // 5 for i in rows]},
        "times": {"reference": [i * 10**9 for i in rows], "current": ["2013-01-01T00:00:00Z"] * 600},
    }
    by_name = _case(entity="who", expected={"features": {"x": "none"}})
    for side in ("reference", "current"):
        by_name[side]["who"] = [f"e{i // 5}" for i in rows]
    strict = _case(policy={"minimum": 601}, expected={"verdict": "too_few"})
    found = _run(_file(tmp_path, _case(**beside), by_name, strict, policy={"psi": 0.25}), "--json")
    assert found.exit_code == 0, found.output
    answers = json.loads(found.stdout)["cases"]
    assert [a["verdict"] for a in answers] == ["none", "none", "too_few"]
    assert [f["name"] for f in answers[1]["judgement"]["features"]] == ["x"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"reference": {"x": "text"}}, "(one), reference: column 'x' is a str"),
        ({"current": {"x": [[1]]}}, "lists or objects"),
        ({"current": 3}, "field 'current' is 3"),
        ({"policy": {"psy": 1}}, "unknown fields ['psy']"),
        ({"policy": {"psi": -1}}, "policy psi: is -1"),
        ({"entity": "who"}, "column 'who', which a side lacks"),
        ({"entity": {"current": [1]}}, "entity has 1 entries for 600 rows"),
        ({"times": {"current": ["2013-01-01T00:00:00"] * 600}}, "no offset"),
        ({"times": {"current": ["noon"] * 600}}, "'noon'"),
        ({"stale": {"v": 2}}, "stale of 'v' is 2"),
        ({"name": 1}, "field 'name' is 1"),
        ({"times": {"current": [10**19] * 600}}, "outside the years 1 to 9999"),
        ({"times": {"current": [-(2**63)] * 600}}, "outside the years 1 to 9999"),
        ({"expected": {"verdikt": "drift"}}, "expected holds only ['verdikt']"),
        ({"expected": {"incidents": 5}}, "field 'incidents' is 5, needed is list"),
        ({"expected": {"features": ["x"]}}, "field 'features' is ['x'], needed is dict"),
    ],
)
def test_a_fault_is_told_with_its_place_before_anything_is_judged(
    tmp_path: Path, case: dict[str, Any], message: str
) -> None:
    found = _run(_file(tmp_path, _case(), _case(**case)))
    assert found.exit_code == 2
    assert message in found.output
    assert "case 1" in found.output


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    for text, message in (
        ("{", "cannot be read as JSON"),
        ('{"kind": "latest", "cases": []}', "unknown kind 'latest'"),
        ('{"kind": "drift", "cases": [{"name": "a", "reference": {"x": [NaN]}, "current": {}}]}', "NaN"),
        ("[]", "needed is an object"),
    ):
        path.write_text(text)
        found = _run(path)
        assert found.exit_code == 2
        assert message in found.output
