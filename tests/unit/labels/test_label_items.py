"""What a label may say, by JSON and by CSV, and what is refused by name."""

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loop_labels import NOW, spec_of

from headway.monitoring.events import event_keys
from headway.monitoring.label_items import LabelFileRefused, LabelRefused, read_item, read_label_file

CLASSES = ["foo", "101", "0101", "1e2", "True", "", "nan", "None"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["prediction_id", "id", "match", "value", "observed_at", "source", "source_id", "actor", "reason", "more"]


@pytest.mark.parametrize(
    ("target", "value", "code"),
    [
        ("int64", 1, None),
        ("int64", 0, None),
        ("int64", -7, None),
        ("int64", "1", "value"),
        ("int64", True, "value"),
        ("int64", 1.0, "value"),
        ("int64", 2**63, "value"),
        ("int64", None, "value"),
        ("bool", True, None),
        ("bool", 1, "value"),
        ("bool", "true", "value"),
        ("float64", 1, None),
        ("float64", 0.5, None),
        ("float64", float("nan"), "value"),
        ("float64", "0.5", "value"),
        ("string", "", None),
        ("string", "101", None),
        ("string", 101, "value"),
        ("string", True, "value"),
        ("string", ["foo"], "value"),
    ],
)
def test_a_value_has_the_targets_type_and_is_never_converted(target: str, value: object, code: str | None) -> None:
    item = {"prediction_id": "p", "value": value}
    if code is None:
        found = read_item(spec_of(target), item, NOW).value
        assert (found, type(found)) == (value, float if target == "float64" else type(value))
        return
    with pytest.raises(LabelRefused, match="value") as refused:
        read_item(spec_of(target), item, NOW)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ("text", "malformed"),
        ({"value": 1}, "address"),
        ({"prediction_id": "p", "id": "c", "value": 1}, "address"),
        ({"prediction_id": "p"}, "value"),
        ({"prediction_id": "p", "value": 1, "score": 3}, "unknown_field"),
        ({"prediction_id": 7, "value": 1}, "prediction_id"),
        ({"prediction_id": "p", "value": 1, "observed_at": "2013-07-01T00:00:01Z"}, "future"),
        ({"prediction_id": "p", "value": 1, "observed_at": "2013-06-30T10:00:00"}, "observed_at"),
        ({"prediction_id": "p", "value": 1, "observed_at": 5}, "observed_at"),
        ({"prediction_id": "p", "value": 1, "source": "backfill"}, "source"),
        ({"prediction_id": "p", "value": 1, "source": "human"}, "human"),
        ({"prediction_id": "p", "value": 1, "source": "human", "actor": "ann"}, "human"),
        ({"prediction_id": "p", "value": 1, "source": "human", "actor": " ", "reason": "seen"}, "actor"),
        ({"match": {"person": "ann"}, "value": 1}, "match"),
        ({"match": {"person": "ann", "starts": None}, "value": 1}, "match"),
        ({"match": {"person": "ann", "starts": "2013-06-30T10:00:00Z", "x": 1}, "value": 1}, "match"),
        ({"match": {"person": 4, "starts": "2013-06-30T10:00:00Z"}, "value": 1}, "match"),
        ({"match": "ann", "value": 1}, "match"),
    ],
)
def test_an_item_is_refused_by_name(item: object, code: str) -> None:
    with pytest.raises(LabelRefused) as refused:
        read_item(spec_of(), item, NOW)
    assert refused.value.code == code
    assert refused.value.remedy


def test_without_a_declared_match_events_cannot_be_named() -> None:
    with pytest.raises(LabelRefused, match=r"declares no monitoring.labels.match"):
        read_item(spec_of(match=False), {"match": {"person": "ann"}, "value": 1}, NOW)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_anything_is_read_or_refused(item: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(LabelRefused):
        assert read_item(spec_of(), item, NOW).value is not None


def test_h05_text_classes_come_by_csv_as_text() -> None:
    text = "id,value,observed_at\n" + "".join(f"c{i},{c},2013-06-30T10:00:00Z\n" for i, c in enumerate(CLASSES))
    spec = spec_of("string")
    read = [read_item(spec, item, NOW) for item in read_label_file("labels.csv", text.encode(), spec)]
    assert [item.value for item in read] == CLASSES
    assert [item.caller_id for item in read] == [f"c{i}" for i in range(8)]


def test_csv_cells_become_the_declared_types() -> None:
    text = "match.person,match.starts,value,source,actor,reason\nann,2013-06-30T10:00:00Z,1,human,bob,saw it\n"
    (item,) = [read_item(spec_of(), i, NOW) for i in read_label_file("a.csv", text.encode(), spec_of())]
    assert (item.match, item.value, item.source, item.actor) == (
        {"person": "ann", "starts": 1_372_586_400_000_000},
        1,
        "human",
        "bob",
    )
    for cell in ("1.0", "01", "true", "", " 1", "1e2"):
        (item,) = read_label_file("a.csv", f"id,value\nc,{cell}\n".encode(), spec_of())
        with pytest.raises(LabelRefused, match="value"):
            read_item(spec_of(), item, NOW)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "no CSV in UTF-8"),
        (b"prediction_id\np\n", "no column `value`"),
        (b"prediction_id,value,value\np,1,1\n", "stand twice"),
        (b"prediction_id,value,label\np,1,1\n", r"\['label'\]"),
        (b"match.flight,value\n1,1\n", r"\['match.flight'\]"),
        (b"prediction_id,value\np,1,2\n", r"a.csv:2 has 3 cells"),
        (b'prediction_id,value\n"p,1\n', "no CSV"),
    ],
)
def test_a_file_that_holds_no_labels_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(LabelFileRefused, match=message):
        read_label_file("a.csv", data, spec_of())


def test_an_event_has_one_key_however_its_fields_are_ordered_and_none_when_one_is_missing() -> None:
    moment = pa.array([NOW, None], pa.timestamp("us", tz="UTC"))
    people = pa.array(["ann", "ann"])
    one, missing = event_keys(spec_of(), pa.table({"person": people, "starts": moment}))
    other = event_keys(spec_of(), pa.table({"starts": moment, "more": people, "person": people.dictionary_encode()}))
    assert missing is None
    assert one is not None
    assert other == [one, None]
    assert event_keys(spec_of(match=False), pa.table({"person": people})) == [None, None]
    zone = moment.cast(pa.timestamp("us", tz="America/New_York"))
    assert event_keys(spec_of(), pa.table({"person": people, "starts": zone}))[0] == one
    assert event_keys(spec_of(), pa.table({"person": pa.array(["bob", "bob"]), "starts": moment}))[0] != one
