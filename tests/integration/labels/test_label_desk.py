"""The label desk over SQLite and PostgreSQL: item by item, in any order, by whatever address."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import event
from support.catalog_facts import ALICE, MALLORY
from support.loop_labels import DAY, NOW, Answered, answered, prediction, promote_one, spec_of
from support.registry_facts import ENDPOINT

from headway.catalog import Principal
from headway.monitoring.events import event_keys
from headway.monitoring.label_items import read_label_file
from headway.monitoring.labels import NothingToLabel

CLASSES = ["foo", "101", "0101", "1e2", "True", "", "nan", "None"]
SAID = "2013-06-30T10:00:00Z"
LATER = "2013-06-30T11:00:00Z"
OLD = NOW - 400 * DAY


@pytest.fixture
def world(catalog_url: str, tmp_path: Path) -> Iterator[Answered]:
    with answered(catalog_url, tmp_path, spec_of()) as found:
        yield found


def _event(person: str, starts: str) -> dict[str, Any]:
    return {"person": person, "starts": starts}


def _key(person: str, starts: int = NOW) -> str:
    row = pa.table({"person": pa.array([person]), "starts": pa.array([starts], pa.timestamp("us", tz="UTC"))})
    (found,) = event_keys(spec_of(), row)
    assert found is not None
    return found


def _statuses(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["status"] for answer in answers]


@pytest.mark.parametrize("by", ["prediction_id", "id"])
def test_h11_every_label_of_a_batch_gets_its_own_answer(world: Answered, by: str) -> None:
    world.answer(
        prediction("p-known", caller_id="c-known"),
        prediction("p-twice", caller_id="c-twice"),
        prediction("p-old", asked_at=OLD, caller_id="c-old"),
    )
    promote_one(world.catalog, MALLORY)
    world.answer(prediction("p-other", caller_id="c-other"), who=MALLORY)
    prefix = "p-" if by == "prediction_id" else "c-"
    items = [
        {by: prefix + "known", "value": 1, "observed_at": SAID},
        {by: prefix + "unknown", "value": 1, "observed_at": SAID},
        {by: prefix + "twice", "value": 1, "observed_at": SAID},
        {by: prefix + "twice", "value": 0, "observed_at": LATER},
        {by: prefix + "other", "value": 1, "observed_at": SAID},
        {by: prefix + "old", "value": 1, "observed_at": SAID},
    ]
    first = world.accept(*items)
    assert _statuses(first) == ["accepted", "waiting", "superseded", "accepted", "waiting", "refused"]
    for place in (1, 4):
        assert first[place]["reason"] == "no_prediction", "of another tenant is as unknown as any"
        assert first[place]["message"].startswith("unknown: no such prediction")
        assert "not shipped yet" in first[place]["message"]
    assert first[5]["reason"] == "too_old"
    assert "400d" in first[5]["message"]
    assert first[0]["prediction_id"] == "p-known"
    world.now += DAY
    again = world.accept(*items)
    assert _statuses(again) == ["duplicate"] * 5 + ["refused"]
    assert [a["label_id"] for a in again[:5]] == [a["label_id"] for a in first[:5]]
    assert (world.current("p-known"), world.current("p-twice")) == (1, 0)
    assert len(world.catalog.labels(ALICE, "p-twice")) == 2
    assert len(world.catalog.label_inbox(ALICE, ENDPOINT)) == 2
    world.answer(prediction("p-unknown", caller_id="c-unknown"))
    assert world.current("p-unknown") == 1, "nothing was lost: the label waited"
    assert world.current("p-old") is None
    assert world.catalog.labels(MALLORY, "p-other") == []


def test_h11_an_ambiguous_callers_id_is_refused_with_the_candidates(world: Answered) -> None:
    world.answer(
        prediction("p1", caller_id="same"), prediction("p2", caller_id="same"), prediction("p3", caller_id="x")
    )
    both, single = world.accept({"id": "same", "value": 1}, {"id": "x", "value": 1})
    assert (both["status"], both["reason"], both["candidates"]) == ("refused", "ambiguous", ["p1", "p2"])
    assert "candidates" in both["message"]
    assert single["status"] == "accepted"
    (told,) = world.accept({"prediction_id": both["candidates"][0], "value": 1})
    assert told["status"] == "accepted"
    assert (world.current("p1"), world.current("p2")) == (1, None)


def test_h05_eight_text_classes_stay_text(catalog_url: str, tmp_path: Path) -> None:
    spec = spec_of("string")
    names = [f"c{i}" for i in range(8)]
    with answered(catalog_url, tmp_path, spec, [prediction(f"p{n}", caller_id=n) for n in names]) as world:
        told = world.accept(
            *({"id": n, "value": value, "observed_at": SAID} for n, value in zip(names, CLASSES, strict=True))
        )
        assert _statuses(told) == ["accepted"] * 8
        text = "id,value,observed_at\n" + "".join(f"{n},{v},{SAID}\n" for n, v in zip(names, CLASSES, strict=True))
        world.now += 1
        again = world.accept(*read_label_file("labels.csv", text.encode(), spec))
        assert _statuses(again) == ["duplicate"] * 8, "the same labels by HTTP and by CSV"
        stored = [world.current(f"p{n}") for n in names]
        assert stored == CLASSES
        assert {type(value) for value in stored} == {str}
        refused = world.accept({"id": "c1", "value": 101}, {"id": "c4", "value": True}, {"id": "c6", "value": None})
        assert _statuses(refused) == ["refused"] * 3
        assert "101 is a whole number, needed is text" in refused[0]["message"]


def test_a_persons_correction_wins_and_the_systems_word_is_kept(world: Answered) -> None:
    world.answer(prediction("p"))
    world.accept({"prediction_id": "p", "value": 0, "observed_at": LATER})
    by = {"source": "human", "actor": "ann", "reason": "saw the visitor leave"}
    (told,) = world.accept({"prediction_id": "p", "value": 1, "observed_at": SAID, **by})
    assert told["status"] == "accepted"
    (late,) = world.accept({"prediction_id": "p", "value": 0, "observed_at": "2013-06-30T12:00:00Z"})
    assert late["status"] == "superseded"
    labels = world.catalog.labels(ALICE, "p")
    assert [(label.source, label.value, label.current) for label in labels] == [
        ("human", 1, True),
        ("auto", 0, False),
        ("auto", 0, False),
    ]
    assert (labels[0].facts.actor, labels[0].facts.reason) == ("ann", "saw the visitor leave")
    assert labels[1].facts.actor == ALICE.actor


def test_a_label_finds_the_event_by_its_fields(world: Answered) -> None:
    world.answer(prediction("p", event_key=_key("ann")), prediction("q", event_key=_key("bob")))
    told = world.accept(
        {"match": _event("ann", "2013-07-01T00:00:00Z"), "value": 1},
        {"match": _event("bob", "2013-06-30T20:00:00-04:00"), "value": 1},
        {"match": _event("bob", "2013-07-01T00:00:01Z"), "value": 1},
    )
    assert [(t["status"], t["prediction_id"]) for t in told] == [
        ("accepted", "p"),
        ("accepted", "q"),
        ("waiting", None),
    ]
    world.answer(prediction("p2", event_key=_key("ann")))
    (both,) = world.accept({"match": _event("ann", "2013-07-01T00:00:00Z"), "value": 0})
    assert (both["status"], both["reason"], both["candidates"]) == ("waiting", "ambiguous", ["p", "p2"])


def test_a_label_without_a_time_keeps_the_time_at_which_it_came_first(world: Answered) -> None:
    world.answer(prediction("p", caller_id="c"))
    items = [{"prediction_id": "p", "value": 1}, {"id": "c", "value": 0}, {"id": "later", "value": 1}]
    first = world.accept(*items, items[0])
    assert _statuses(first) == ["superseded", "accepted", "waiting", "duplicate"] or _statuses(first) == [
        "accepted",
        "superseded",
        "waiting",
        "duplicate",
    ]
    world.now += 3 * DAY
    assert _statuses(world.accept(*items)) == ["duplicate"] * 3
    assert {label.observed_at for label in world.catalog.labels(ALICE, "p")} == {NOW}


def test_the_same_source_id_with_another_value_is_a_conflict(world: Answered) -> None:
    world.answer(prediction("p"))
    item = {"prediction_id": "p", "value": 1, "source_id": "row 7", "observed_at": SAID}
    assert _statuses(world.accept(item, item)) == ["accepted", "duplicate"]
    (told,) = world.accept(item | {"value": 0})
    assert (told["status"], told["reason"]) == ("refused", "conflict")
    assert world.current("p") == 1


def test_one_bad_item_stops_no_other(world: Answered) -> None:
    world.answer(prediction("p"), prediction("q"))
    told = world.accept({"prediction_id": "p", "value": "1"}, "?", {"prediction_id": "q", "value": 1}, {"value": 1})
    assert _statuses(told) == ["refused", "refused", "accepted", "refused"]
    assert all(t["message"] and t["reason"] for t in told if t["status"] == "refused")
    assert (world.current("p"), world.current("q")) == (None, 1)


def test_many_labels_take_no_more_statements_than_few(world: Answered) -> None:
    statements: list[str] = []
    engine = world.catalog.database.engine

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    def taken(prefix: str, count: int) -> int:
        statements.clear()
        items = [{"id": f"{prefix}{i}", "value": 1} for i in range(count)]
        items += [{"match": _event(f"{prefix}{i}", "2013-07-01T00:00:00Z"), "value": 1} for i in range(count)]
        assert set(_statuses(world.accept(*items))) == {"waiting"}
        return len(statements)

    event.listen(engine, "before_cursor_execute", note)
    try:
        assert taken("many", 100) <= taken("few", 1)
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_an_endpoint_that_answered_nothing_is_named(world: Answered) -> None:
    with pytest.raises(NothingToLabel, match="endpoint 'nobody' has answered nothing"):
        world.desk.accept(ALICE, "nobody", [{"prediction_id": "p", "value": 1}])
    world.catalog.ensure_tenant(MALLORY)
    with pytest.raises(NothingToLabel):
        world.desk.accept(Principal(MALLORY.tenant, "mallory"), ENDPOINT, [{"prediction_id": "p", "value": 1}])
