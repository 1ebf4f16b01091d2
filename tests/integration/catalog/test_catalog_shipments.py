"""Answers shipped from log segments, and reading them by the time they were asked."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.catalog_facts import ALICE, MALLORY, Ticker, blob
from support.catalog_monitoring import DAY, NOW, answer, batch, label, serve, shipment
from support.catalog_race import race
from support.registry_facts import ENDPOINT, MODEL

from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import ImpossiblePrediction, InvalidFact, Nondeterminism, SegmentMoved
from headway.catalog.monitoring_facts import SegmentProgress, Shipment


@pytest.fixture
def catalog(served_url: str) -> Iterator[Catalog]:
    opened = open_catalog(served_url, Ticker())
    yield opened
    opened.close()


def test_a_shipped_answer_keeps_every_fact(catalog: Catalog) -> None:
    given = answer("p1")
    assert catalog.record_shipment(ALICE, None, shipment(given)) == 1
    [found] = catalog.predictions(ALICE, ENDPOINT, NOW, NOW + 1)
    assert {name: getattr(found, name) for name in vars(given)} == vars(given)
    assert (found.model_id, found.model_version, found.log_server, found.log_segment) == (MODEL, 1, "main", "000001")
    assert catalog.prediction(ALICE, "p1") == found
    assert catalog.predictions_addressed(ALICE, ENDPOINT, "caller_id", ["caller-p1"]) == [found]
    assert catalog.predictions_addressed(ALICE, ENDPOINT, "event_key", ["event-p1"]) == [found]
    assert catalog.predictions_addressed(ALICE, "other", "caller_id", ["caller-p1"]) == []


def test_a_range_is_recorded_once_and_ranges_follow_each_other(catalog: Catalog) -> None:
    first = shipment(answer("p1"), answer("p2"), torn=1)
    assert catalog.segment_cursor(ALICE, "main", "000001") == 0
    assert catalog.record_shipment(ALICE, None, first) == 2
    assert catalog.record_shipment(ALICE, None, first) == 2
    assert catalog.segment_cursor(ALICE, "main", "000001") == 100
    # Another reading of the same bytes, an overlap, a gap: each is told where to go on, and leaves nothing behind.
    for start, end in ((0, 100), (0, 120), (50, 150), (120, 150)):
        with pytest.raises(SegmentMoved) as refusal:
            catalog.record_shipment(ALICE, None, shipment(answer("p3"), start=start, end=end))
        assert refusal.value.stored == 100
    assert list(catalog.predictions_by_id(ALICE, ["p1", "p2", "p3"])) == ["p1", "p2"]
    assert catalog.record_shipment(ALICE, None, shipment(answer("p3"), start=100, end=150, dropped=4)) == 1
    assert catalog.record_shipment(ALICE, None, shipment(answer("p4"), end=60, segment="000002")) == 1
    assert catalog.record_shipment(ALICE, None, shipment(start=60, end=61, segment="000002", torn=1)) == 0
    assert catalog.shipments(ALICE) == [
        SegmentProgress("main", "000001", 0, 150, 3, 1, 4),
        SegmentProgress("main", "000002", 0, 61, 1, 1, 0),
    ]


def test_a_refused_batch_takes_the_whole_range_with_it(catalog: Catalog) -> None:
    good, wrong = shipment(answer("p1")), replace(batch(answer("p2")), model_version=2)
    progress = replace(good.segment, records=2)
    with pytest.raises(ImpossiblePrediction):
        catalog.record_shipment(ALICE, None, Shipment(progress, (*good.batches, wrong)))
    assert catalog.segment_cursor(ALICE, "main", "000001") == 0
    assert catalog.predictions_by_id(ALICE, ["p1", "p2"]) == {}


@pytest.mark.parametrize(
    "changes", [{"detail_digest": blob("other").digest}, {"asked_at": NOW + 1}, {"segments": {"origin": "LGA"}}]
)
def test_an_answer_that_comes_again_says_the_same(catalog: Catalog, changes: dict[str, object]) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    other = batch(answer("p1", **changes), blobs=(blob("detail"), blob("other")))
    with pytest.raises(Nondeterminism, match=next(iter(changes))):
        catalog.record_predictions(ALICE, None, other)
    with pytest.raises(Nondeterminism, match="log_segment"):
        catalog.record_shipment(ALICE, None, shipment(answer("p1"), segment="000002"))
    assert catalog.segment_cursor(ALICE, "main", "000002") == 0


def test_what_is_no_shipment() -> None:
    for segment, batches, word in (
        (replace(shipment(answer("a")).segment, records=2), (batch(answer("a")),), "number"),
        (replace(shipment(answer("a")).segment, records=2), (batch(answer("a")), batch(answer("a"))), "once"),
        (shipment(answer("a")).segment, (batch(answer("a", source="batch")),), "online"),
    ):
        with pytest.raises(InvalidFact, match=word):
            Shipment(segment, batches)
    with pytest.raises(InvalidFact, match="after"):
        shipment(start=100, end=100)


def test_answers_are_read_by_when_they_were_asked_in_pages(catalog: Catalog) -> None:
    asked = {f"p{n}": NOW + n * DAY for n in range(5)}
    records = tuple(answer(name, asked_at=at) for name, at in reversed(asked.items()))
    catalog.record_shipment(ALICE, None, shipment(*records[:3]))
    # Answers of a batch count like those of a server, answers that nobody timed do not.
    others = (*(replace(item, source="batch") for item in records[3:]), answer("p9", asked_at=None, source="batch"))
    catalog.record_predictions(ALICE, None, batch(*others))
    start, end = asked["p1"], asked["p4"]
    assert [p.prediction_id for p in catalog.predictions(ALICE, ENDPOINT, start, end)] == ["p1", "p2", "p3"]
    assert catalog.prediction_count(ALICE, ENDPOINT, start, end) == 3
    page = catalog.predictions(ALICE, ENDPOINT, start, end, limit=2)
    assert [p.prediction_id for p in page] == ["p1", "p2"]
    rest = catalog.predictions(ALICE, ENDPOINT, start, end, after=page[-1].prediction_id)
    assert [p.prediction_id for p in rest] == ["p3"]
    assert catalog.predictions(ALICE, "other", start, end) == []


def test_more_than_one_statement_can_list(catalog: Catalog) -> None:
    names = [f"p{n:04}" for n in range(600)]
    labels = tuple(label(f"l-{name}", None, caller_id=f"caller-{name}") for name in names)
    assert {item.status for item in catalog.add_labels(ALICE, None, labels)} == {"waiting"}
    assert catalog.record_shipment(ALICE, None, shipment(*(answer(name) for name in names))) == len(names)
    assert catalog.label_inbox(ALICE, ENDPOINT) == []
    current = catalog.current_labels(ALICE, names)
    assert {name: found.label_id for name, found in current.items()} == {name: f"l-{name}" for name in names}
    assert len(catalog.predictions(ALICE, ENDPOINT, NOW, NOW + 1)) == len(names)


@pytest.mark.parametrize("same", [True, False])
def test_two_shippers_of_one_segment(
    catalog: Catalog, served_url: str, workers: ThreadPoolExecutor, same: bool
) -> None:
    mine, other = shipment(answer("p1")), shipment(answer("p1"), end=100 if same else 90)
    one, two = race(
        served_url,
        workers,
        "effect",
        lambda c: c.record_shipment(ALICE, None, mine),
        lambda c: c.record_shipment(ALICE, None, other),
    )
    assert one.result() == 1
    assert two.result() == 1 if same else isinstance(two.exception(), SegmentMoved)
    assert catalog.shipments(ALICE) == [mine.segment]


def test_answers_and_segments_of_another_tenant_are_not_seen(catalog: Catalog) -> None:
    catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    serve(catalog, MALLORY)
    assert catalog.shipments(MALLORY) == []
    assert catalog.segment_cursor(MALLORY, "main", "000001") == 0
    assert catalog.predictions(MALLORY, ENDPOINT, NOW, NOW + 1) == []
    assert catalog.predictions_by_id(MALLORY, ["p1"]) == {}
    assert catalog.predictions_addressed(MALLORY, ENDPOINT, "caller_id", ["caller-p1"]) == []
    assert catalog.record_shipment(MALLORY, None, shipment(answer("p1", score=0.5))) == 1
    assert catalog.prediction(ALICE, "p1").score == 0.25
