"""Contracts: compatible means that every request that was valid stays valid and means the same."""

import copy
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.registry_cases import contract

from headway.catalog import FeatureSetFacts, FeatureSetVersion
from headway.declaration import ServingSpec
from headway.registry.contract import (
    ContractInvalid,
    compatibility,
    contract_hash,
    parse_contract,
    registered_contract,
)

Row = dict[str, Any]

_NAMES = ("a", "b", "c")
_SETS = [["x"], ["x", "y"], ["x", "y", "z"]]


@st.composite
def _column(draw: st.DrawFn, name: str) -> Row:
    kind = draw(st.sampled_from(["int64", "float64", "string"]))
    column: Row = {"name": name, "type": kind, "required": draw(st.booleans()), "nullable": draw(st.booleans())}
    if kind == "string" and draw(st.booleans()):
        column |= {"values": draw(st.sampled_from(_SETS)), "closed": draw(st.booleans())}
    if kind != "string" and draw(st.booleans()):
        column["range"] = draw(st.sampled_from([[0, 1], [0, 5], [-5, 5]]))
    if draw(st.integers(0, 4)) == 0:
        column["unit"] = draw(st.sampled_from(["km", "miles"]))
    return column


@st.composite
def _contract(draw: st.DrawFn) -> Row:
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, min_size=1))
    return contract(*[draw(_column(name)) for name in names], semantics_version=draw(st.sampled_from([1, 1, 1, 2])))


@st.composite
def _changed(draw: st.DrawFn, base: Row) -> Row:
    """The contract with a few small changes, so that compatible pairs are common."""
    changed = copy.deepcopy(base)
    for _ in range(draw(st.integers(0, 2))):
        column = draw(st.sampled_from(changed["inputs"]))
        match draw(st.sampled_from(["flip", "null", "widen", "open", "add", "range", "drop"])):
            case "flip":
                column["required"] = not column["required"]
            case "null":
                column["nullable"] = not column["nullable"]
            case "widen" if column["type"] == "int64":
                column["type"] = "float64"
            case "open":
                column.pop("closed", None)
            case "range":
                column.pop("range", None)
            case "drop" if len(changed["inputs"]) > 1:
                changed["inputs"].remove(column)
            case "add":
                free = [n for n in _NAMES if n not in {c["name"] for c in changed["inputs"]}]
                changed["inputs"] += [draw(_column(n)) for n in free[:1]]
            case _:
                pass
    return changed


_PAIRS = _contract().flatmap(lambda a: st.tuples(st.just(a), _changed(a)))
_TRIPLES = _PAIRS.flatmap(lambda p: st.tuples(st.just(p[0]), st.just(p[1]), _changed(p[1])))
_SAMPLES: dict[str, list[Any]] = {
    "string": ["x", "y", "z", "w"],
    "int64": [-5, 0, 1, 5, 9],
    "float64": [-5.0, -0.5, 0.0, 1.0, 5.0, 9.5],
}


def _valid(document: Row, row: Row) -> bool:
    """Whether a request is valid, read from the words of the contract and not from the code under test."""
    columns = {c["name"]: c for c in document["inputs"]}
    if set(row) - set(columns) or any(c["required"] and name not in row for name, c in columns.items()):
        return False
    for name, value in row.items():
        column = columns[name]
        if value is None:
            if not column["nullable"]:
                return False
            continue
        kinds = {"string": str, "int64": int, "float64": (int, float)}
        if not isinstance(value, kinds[column["type"]]):
            return False
        if column.get("closed") and value not in column["values"]:
            return False
        if "range" in column and not column["range"][0] <= value <= column["range"][1]:
            return False
    return True


@given(_contract())
@settings(max_examples=60, deadline=None)
def test_every_contract_may_follow_itself_and_nothing(document: Row) -> None:
    assert compatibility(document, document).verdict == "compatible"
    assert compatibility(None, document).verdict == "compatible"


@given(_TRIPLES)
@settings(max_examples=150, deadline=None)
def test_compatible_is_transitive(three: tuple[Row, Row, Row]) -> None:
    first, second, third = three
    assume(compatibility(first, second).verdict == compatibility(second, third).verdict == "compatible")
    assert compatibility(first, third).verdict == "compatible"


@given(_PAIRS, st.data())
@settings(max_examples=300, deadline=None)
def test_requests_valid_for_stable_are_valid_for_a_compatible_candidate(
    pair: tuple[Row, Row], data: st.DataObject
) -> None:
    stable, candidate = pair
    assume(compatibility(stable, candidate).verdict == "compatible")
    row: Row = {}
    for column in stable["inputs"]:
        if column["required"] or data.draw(st.booleans()):
            row[column["name"]] = data.draw(st.sampled_from([None, *_SAMPLES[column["type"]]]))
    assume(_valid(stable, row))
    assert _valid(candidate, row)


_A = {"name": "a", "type": "int64", "required": False, "range": [0, 5]}
_S = {"name": "s", "type": "string", "required": True, "values": ["x", "y"], "closed": True}

_FOLLOWS: list[tuple[str, dict[str, Any], str]] = [
    ("new optional column", {"inputs": [_A, _S, {"name": "b", "type": "bool", "required": False}]}, "compatible"),
    ("wider type", {"inputs": [{**_A, "type": "float64"}, _S]}, "compatible"),
    ("wider range", {"inputs": [{**_A, "range": [-1, 5]}, _S]}, "compatible"),
    ("more values", {"inputs": [_A, {**_S, "values": ["x", "y", "z"]}]}, "compatible"),
    ("open set", {"inputs": [_A, {**_S, "closed": False}]}, "compatible"),
    ("other order", {"inputs": [_S, _A]}, "compatible"),
    ("new output field", {"output": {"name": "p", "type": "float64", "range": [0, 1], "note": "x"}}, "compatible"),
    ("new feature set version", {"feature_set": {"name": "delay", "version": 9}}, "compatible"),
    ("new required column", {"inputs": [_A, _S, {"name": "b", "type": "bool", "required": True}]}, "breaking"),
    ("column gone", {"inputs": [_S]}, "breaking"),
    ("renamed", {"inputs": [{**_A, "name": "A"}, _S]}, "breaking"),
    ("required now", {"inputs": [{**_A, "required": True}, _S]}, "breaking"),
    ("null refused now", {"inputs": [{**_A, "nullable": False}, _S]}, "breaking"),
    ("narrower range", {"inputs": [{**_A, "range": [0, 4]}, _S]}, "breaking"),
    ("fewer values", {"inputs": [_A, {**_S, "values": ["x"]}]}, "breaking"),
    ("other type", {"inputs": [{**_A, "type": "string", "range": None}, _S]}, "breaking"),
    ("output range", {"output": {"name": "p", "type": "float64", "range": [0, 100]}}, "breaking"),
    ("output name", {"output": {"name": "q", "type": "float64", "range": [0, 1]}}, "breaking"),
    ("calibration", {"output": {"name": "p", "type": "float64", "range": [0, 1], "calibration": "none"}}, "breaking"),
    ("meaning", {"semantics_version": 2}, "breaking"),
    ("feature set", {"feature_set": {"name": "other", "version": 1}}, "breaking"),
    ("unit", {"inputs": [{**_A, "unit": "km"}, _S]}, "forbidden"),
    ("unit with a new meaning", {"inputs": [{**_A, "unit": "km"}, _S], "semantics_version": 2}, "breaking"),
    ("no inputs", {"inputs": None}, "invalid"),
]


@pytest.mark.parametrize(("what", "change", "verdict"), _FOLLOWS, ids=[f[0] for f in _FOLLOWS])
def test_each_change_has_its_verdict(what: str, change: dict[str, Any], verdict: str) -> None:
    stable = contract(_A, _S, output={"name": "p", "type": "float64", "range": [0, 1]})
    found = compatibility(stable, {**stable, **change})
    assert found.verdict == verdict, what
    assert bool(found.problems) == (verdict != "compatible")


def test_values_that_training_happened_to_see_limit_nothing() -> None:
    seen = {"name": "carrier", "type": "string", "required": True, "values": ["AA", "HA"]}
    assert compatibility(contract(seen), contract({**seen, "values": ["AA"]})).verdict == "compatible"


def test_what_callers_send_decides_where_the_platform_computes_the_inputs() -> None:
    request = [{"name": "carrier", "type": "string", "required": True}]
    before = contract({"name": "delay_mean", "type": "float64", "required": True}, request=request)
    after = contract({"name": "delay_median", "type": "float64", "required": True}, request=request)
    assert compatibility(before, after).verdict == "compatible"
    assert compatibility(before, {**after, "request": []}).verdict == "breaking"
    assert [c.name for c in parse_contract(before).accepted] == ["carrier"]


_BAD_COLUMNS: list[Any] = [
    {"name": "a", "type": "int64"},
    {"name": "", "type": "int64", "required": True},
    {"name": "a", "type": "decimal", "required": True},
    {"name": "a", "type": "int64", "required": "yes"},
    {"name": "a", "type": "int64", "required": True, "shape": [1]},
    {"name": "a", "type": "int64", "required": True, "range": [2, 1]},
    {"name": "a", "type": "int64", "required": True, "range": [1]},
    {"name": "a", "type": "string", "required": True, "closed": True},
    {"name": "a", "type": "string", "required": True, "values": [["x"]]},
    "a",
]


@pytest.mark.parametrize("column", _BAD_COLUMNS)
def test_a_malformed_column_is_no_contract(column: Any) -> None:  # noqa: ANN401
    with pytest.raises(ContractInvalid):
        parse_contract(contract() | {"inputs": [column]})


def test_a_contract_is_whole_or_refused() -> None:
    whole = contract()
    for field in whole:
        with pytest.raises(ContractInvalid):
            parse_contract({k: v for k, v in whole.items() if k != field})
    for change in ({"more": 1}, {"format": "x"}, {"output": {}}, {"semantics_version": "1"}):
        with pytest.raises(ContractInvalid):
            parse_contract(whole | change)
    with pytest.raises(ContractInvalid, match="twice"):
        parse_contract(contract(*[{"name": "a", "type": "int64", "required": False}] * 2))


def test_registration_completes_the_artifacts_contract() -> None:
    facts = FeatureSetFacts("delay", "sha256:" + "1" * 64, "sha256:" + "2" * 64, {"a": 1})
    serving = ServingSpec.model_validate(
        {
            "observed": "t",
            "before": "1h",
            "request": {
                "carrier": {"type": "string", "required": True},
                "t": {"type": "timestamp", "required": True},
                "tailnum": {"type": "string"},
            },
        }
    )
    artifact = contract() | {"feature_set": None}
    made = registered_contract(artifact, FeatureSetVersion(facts, 4, 0), 7, serving)
    assert made["feature_set"] == {
        "name": "delay",
        "version": 4,
        "contract_digest": facts.contract_digest,
        "code_digest": facts.code_digest,
    }
    read = parse_contract(made)
    assert read.semantics_version == 7
    assert [(c.name, c.required, c.nullable) for c in read.accepted] == [
        ("carrier", True, False),
        ("t", True, False),
        ("tailnum", False, True),
    ]
    assert contract_hash(made) != contract_hash(artifact)
    with pytest.raises(ContractInvalid):
        registered_contract(None, FeatureSetVersion(facts, 4, 0), 7, serving)
