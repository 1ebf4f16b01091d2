"""Labels: attached once, in whatever order they and their answers come; the greatest is current."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.catalog_facts import ALICE, MALLORY, Ticker
from support.catalog_monitoring import DAY, NOW, answer, batch, label, promote, serve, shipment
from support.catalog_race import race
from support.registry_facts import ENDPOINT

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import InvalidFact, UnknownEndpoint
from headway.catalog.invariants import check
from headway.catalog.monitoring_facts import LabelFacts, LabelOutcome
from headway.catalog.registry_facts import PredictionFacts


@pytest.fixture
def catalog(served_url: str, tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(served_url, Ticker())
    yield opened
    findings = check(opened, ALICE, LocalStore(tmp_path / "store"))
    opened.close()
    assert [finding for finding in findings if not finding.ok and finding.name != "stored bytes"] == []


def _add(catalog: Catalog, *labels: LabelFacts) -> list[tuple[str, str, str | None]]:
    return [(found.status, found.reason, found.prediction_id) for found in catalog.add_labels(ALICE, None, labels)]


def test_a_label_keeps_every_fact_and_says_what_became_of_it(catalog: Catalog) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    given_ = label("l1", value={"late": None, "minutes": 12.5}, source="human", reason="seen at the gate")
    assert _add(catalog, given_) == [("accepted", "", "p1")]
    [kept] = catalog.labels(ALICE, "p1")
    assert (kept.facts, kept.prediction_id, kept.current) == (given_, "p1", True)
    assert catalog.current_labels(ALICE, ["p1", "unknown"]) == {"p1": kept}
    assert catalog.labels_between(ALICE, ENDPOINT, NOW, NOW + 1) == [("p1", kept)]
    assert catalog.labels_between(ALICE, ENDPOINT, NOW + 1, NOW + DAY) == []


def test_a_persons_word_stands_over_later_ones_of_systems(catalog: Catalog) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    human = label("h", source="human", value=False)
    assert _add(catalog, human, label("a1", observed_at=NOW + 9 * DAY)) == [
        ("accepted", "", "p1"),
        ("superseded", "another label is current", "p1"),
    ]
    assert _add(catalog, label("b", source="backfill", observed_at=NOW + 99 * DAY))[0][0] == "superseded"
    assert [found.label_id for found in catalog.labels(ALICE, "p1")] == ["h", "a1", "b"]
    # Of two of one rank the later outcome stands, of two of one time the greater id.
    assert _add(catalog, label("h2", source="human", observed_at=human.observed_at + 1))[0][0] == "accepted"
    assert _add(catalog, label("h3", source="human", observed_at=human.observed_at + 1))[0][0] == "accepted"
    assert catalog.current_labels(ALICE, ["p1"])["p1"].label_id == "h3"
    assert _add(catalog, human) == [("duplicate", "superseded", "p1")]


def test_a_label_that_comes_again_is_no_second_one(catalog: Catalog) -> None:
    late = label("l1", received_at=NOW + 50 * DAY)
    assert _add(catalog, label("l1"), late) == [("waiting", "no_prediction", None), ("duplicate", "waiting", None)]
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    assert _add(catalog, late) == [("duplicate", "accepted", "p1")]
    # To Python true and 1 are one value, to a label they are not.
    others: list[dict[str, Any]] = [
        {"value": 1},
        {"value": False},
        {"observed_at": NOW},
        {"actor": "x"},
        {"source": "human"},
    ]
    for changes in others:
        assert _add(catalog, label("l1", **changes)) == [("refused", "conflict", "p1")]
    assert _add(catalog, label("l1", "p2")) == [("refused", "conflict", "p1")]
    assert [found.facts for found in catalog.labels(ALICE, "p1")] == [label("l1")]


def test_one_bad_label_does_not_stop_the_others(catalog: Catalog) -> None:
    twins = (answer("p1", caller_id="twin"), answer("p2", caller_id="twin"), answer("p3"))
    catalog.record_shipment(ALICE, None, shipment(*twins))
    given_ = (
        label("l1", None, caller_id="twin"),
        label("l2", "p3"),
        label("l2", "p3", value=False),
        label("l3", "nobody"),
        label("l4", None, event_key="event-p2"),
    )
    assert catalog.add_labels(ALICE, None, given_) == (
        LabelOutcome("l1", "refused", "ambiguous", None, ("p1", "p2")),
        LabelOutcome("l2", "accepted", "", "p3", ()),
        LabelOutcome("l2", "refused", "conflict", "p3", ()),
        LabelOutcome("l3", "waiting", "no_prediction", None, ()),
        LabelOutcome("l4", "accepted", "", "p2", ()),
    )
    assert [found.label_id for found in catalog.label_inbox(ALICE, ENDPOINT)] == ["l3"]


def test_a_label_of_an_event_that_two_answers_are_about_waits_and_says_so(catalog: Catalog) -> None:
    early, late = label("l1", None, event_key="e"), label("l2", None, event_key="e")
    assert _add(catalog, early) == [("waiting", "no_prediction", None)]
    catalog.record_shipment(ALICE, None, shipment(answer("p1", event_key="e"), answer("p2", event_key="e")))
    [outcome] = catalog.add_labels(ALICE, None, (late,))
    assert outcome == LabelOutcome("l2", "waiting", "ambiguous", None, ("p1", "p2"))
    waiting = catalog.label_inbox(ALICE, ENDPOINT)
    assert [(found.label_id, found.reason) for found in waiting] == [("l1", "ambiguous"), ("l2", "ambiguous")]
    assert catalog.current_labels(ALICE, ["p1", "p2"]) == {}


def test_an_attached_label_stays_when_a_second_answer_takes_its_address(catalog: Catalog) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1", caller_id="again")))
    assert _add(catalog, label("l1", None, caller_id="again"))[0][0] == "accepted"
    catalog.record_shipment(ALICE, None, shipment(answer("p2", caller_id="again"), start=100, end=200))
    assert catalog.current_labels(ALICE, ["p1", "p2"])["p1"].label_id == "l1"
    again = label("l1", None, caller_id="again", received_at=NOW + 3 * DAY)
    assert _add(catalog, again) == [("duplicate", "accepted", "p1")]


def test_a_label_finds_only_answers_of_its_own_endpoint(catalog: Catalog) -> None:
    promote(catalog, "other")
    catalog.record_predictions(ALICE, None, batch(answer("o1", caller_id="c"), endpoint_id="other"))
    about = (label("l1", "o1"), label("l2", None, caller_id="c"))
    assert [item[0] for item in _add(catalog, *about)] == ["waiting", "waiting"]
    catalog.record_shipment(ALICE, None, shipment(answer("p1", caller_id="c")))
    assert [found.label_id for found in catalog.labels(ALICE, "p1")] == ["l2"]
    assert [found.label_id for found in catalog.label_inbox(ALICE, ENDPOINT)] == ["l1"]
    assert catalog.labels(ALICE, "o1") == []


def test_what_is_no_label(catalog: Catalog) -> None:
    wrong: list[dict[str, Any]] = [
        {"prediction": None},
        {"caller_id": "c"},
        {"source": "robot"},
        {"value": float("nan")},
        {"observed_at": None},
        {"received_at": 1.5},
        {"actor": ""},
    ]
    for changes in wrong:
        with pytest.raises(InvalidFact):
            label("l1", **changes)
    with pytest.raises(UnknownEndpoint):
        catalog.add_labels(ALICE, None, (label("l1", endpoint_id="other"),))
    with pytest.raises(InvalidFact, match="one endpoint"):
        catalog.add_labels(ALICE, None, (label("l1"), label("l2", endpoint_id="other")))
    assert catalog.add_labels(ALICE, None, ()) == ()
    assert catalog.label_inbox(ALICE, ENDPOINT) == []


def test_labels_of_another_tenant_are_not_seen(catalog: Catalog) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    _add(catalog, label("l1"), label("l2", "later"))
    serve(catalog, MALLORY)
    assert catalog.labels(MALLORY, "p1") == []
    assert catalog.current_labels(MALLORY, ["p1"]) == {}
    assert catalog.label_inbox(MALLORY, ENDPOINT) == []
    assert catalog.labels_between(MALLORY, ENDPOINT, NOW, NOW + 1) == []
    # The same names there are labels and answers of their own.
    [outcome] = catalog.add_labels(MALLORY, None, (label("l1", value=False),))
    assert outcome.status == "waiting"
    catalog.record_shipment(MALLORY, None, shipment(answer("p1"), answer("later")))
    assert [found.value for found in catalog.labels(MALLORY, "p1")] == [False]
    assert [found.label_id for found in catalog.label_inbox(ALICE, ENDPOINT)] == ["l2"]


@pytest.mark.parametrize("order", ["label first", "answer first"])
def test_a_label_and_its_answer_at_once(
    catalog: Catalog, served_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    add = lambda c: c.add_labels(ALICE, None, (label("l1", None, caller_id="caller-p1"),))  # noqa: E731
    ship = lambda c: c.record_shipment(ALICE, None, shipment(answer("p1")))  # noqa: E731
    first, second = (add, ship) if order == "label first" else (ship, add)
    one, two = race(served_url, workers, "effect", first, second)
    assert [one.exception(), two.exception()] == [None, None]
    assert catalog.current_labels(ALICE, ["p1"])["p1"].label_id == "l1"
    assert catalog.label_inbox(ALICE, ENDPOINT) == []


@dataclass(frozen=True)
class Story:
    """Answers and labels, and the commands in which they come: each item at least once."""

    answers: tuple[PredictionFacts, ...]
    labels: tuple[LabelFacts, ...]
    commands: tuple[Sequence[Any], ...]

    def expected(self) -> tuple[dict[str, str], set[str]]:
        """What must be current by answer, and what must wait: by the rule, from the sets alone."""
        attached: dict[str, list[LabelFacts]] = {}
        waiting: set[str] = set()
        for given_ in self.labels:
            about = [
                item.prediction_id
                for item in self.answers
                for kind in ("prediction_id", "caller_id", "event_key")
                if getattr(given_, kind) is not None and getattr(given_, kind) == getattr(item, kind)
            ]
            if len(about) == 1:
                attached.setdefault(about[0], []).append(given_)
            else:
                waiting.add(given_.label_id)
        rank = {"backfill": 0, "auto": 1, "human": 2}
        greatest = {
            name: max(own, key=lambda item: (rank[item.source], item.observed_at, item.label_id)).label_id
            for name, own in attached.items()
        }
        return greatest, waiting


_serial = count()


@st.composite
def stories(draw: st.DrawFn) -> Story:
    mark = f"s{next(_serial)}-"
    names = [f"{mark}p{n}" for n in range(draw(st.integers(1, 4)))]
    answers = [
        answer(
            name,
            caller_id=draw(st.sampled_from([None, f"caller-{name}"])),
            event_key=draw(st.sampled_from([None, f"event-{name}"])),
        )
        for name in names
    ]
    labels: list[LabelFacts] = []
    for number in range(draw(st.integers(1, 6))):
        to = draw(st.sampled_from([*names, f"{mark}nobody"]))
        kind = draw(st.sampled_from(["prediction_id", "caller_id", "event_key"]))
        address = to if kind == "prediction_id" else f"{kind.partition('_')[0]}-{to}"
        source = draw(st.sampled_from(["auto", "human", "backfill"]))
        at = NOW + draw(st.integers(0, 2)) * DAY
        labels.append(label(f"{mark}l{number}", None, source=source, observed_at=at, value=number, **{kind: address}))
    items: list[Any] = [*answers, *labels]
    items = draw(st.permutations(items + draw(st.lists(st.sampled_from(items), max_size=4))))
    commands: list[list[Any]] = []
    for item in items:
        fits = commands and type(commands[-1][0]) is type(item) and item not in commands[-1]
        if fits and draw(st.booleans()):
            commands[-1].append(item)
        else:
            commands.append([item])
    return Story(tuple(answers), tuple(labels), tuple(commands))


def test_any_order_any_duplication_and_any_split_give_one_result(catalog: Catalog) -> None:
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(story=stories())
    def one_result(story: Story) -> None:
        for items in story.commands:
            # A key of its own: without one, the very same command again would only be answered again.
            key = f"command-{next(_serial)}"
            if isinstance(items[0], LabelFacts):
                catalog.add_labels(ALICE, key, tuple(items))
            else:
                catalog.record_predictions(ALICE, key, batch(*items))
        greatest, waiting = story.expected()
        ids = [item.prediction_id for item in story.answers]
        found = catalog.current_labels(ALICE, ids)
        assert {name: one.label_id for name, one in found.items()} == greatest
        mine = {one.label_id for one in story.labels}
        assert {one.label_id for one in catalog.label_inbox(ALICE, ENDPOINT)} & mine == waiting
        kept = [one.label_id for name in ids for one in catalog.labels(ALICE, name)]
        assert sorted(kept) == sorted(mine - waiting)

    one_result()
