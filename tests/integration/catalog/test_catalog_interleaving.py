"""Two transactions at once, held at a labelled point: version numbers, the key claim, check-then-write pairs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.catalog_facts import ALICE, Ticker, delivery, evidence, feature_set, snapshot
from support.catalog_race import race

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import IdempotencyConflict, InputNotReleased
from headway.catalog.invariants import check


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    opened = open_catalog(catalog_url, Ticker())
    opened.ensure_tenant(ALICE)
    yield opened
    opened.close()


@pytest.mark.parametrize("point", ["effect", "before_commit"])
def test_two_deliveries_at_once_get_different_numbers(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor, tmp_path: Path, point: str
) -> None:
    catalog.register_version(ALICE, "zero", delivery(content=0))
    one, two = race(
        catalog_url,
        workers,
        point,
        lambda c: c.register_version(ALICE, "one", delivery(content=1)),
        lambda c: c.register_version(ALICE, "two", delivery(content=2)),
    )
    assert [one.exception(), two.exception()] == [None, None]
    assert [v.version for v in catalog.versions(ALICE, "flights")] == [1, 2, 3]
    current = catalog.current(ALICE, "flights", "2013-06-01")
    assert current is not None
    assert current.content_digest == delivery(content=2).content_digest
    assert catalog.partition_epoch(ALICE, "flights", "2013-06-01") == 3
    broken = [f for f in check(catalog, ALICE, LocalStore(tmp_path / "store")) if not f.ok and f.name != "stored bytes"]
    assert broken == []


@pytest.mark.parametrize("point", ["claimed", "effect", "before_commit"])
@pytest.mark.parametrize("key", ["same", None])
def test_one_key_at_once_has_one_effect(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor, point: str, key: str | None
) -> None:
    send = lambda c: c.register_version(ALICE, key, delivery())  # noqa: E731
    one, two = race(catalog_url, workers, point, send, send)
    assert one.result() == two.result()
    assert len(catalog.dataset_events(ALICE, "flights")) == 1
    assert [row.action for row in catalog.audit_rows(ALICE)] == ["tenant.ensure", "dataset.register"]
    assert len(catalog.outbox(ALICE)) == 2


def test_one_key_at_once_for_two_commands_is_a_conflict(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    one, two = race(
        catalog_url,
        workers,
        "claimed",
        lambda c: c.register_version(ALICE, "same", delivery(content=1)),
        lambda c: c.register_version(ALICE, "same", delivery(dataset="weather")),
    )
    assert one.exception() is None
    assert isinstance(two.exception(), IdempotencyConflict)
    assert catalog.versions(ALICE, "weather") == []


def test_an_input_cannot_be_retired_while_a_snapshot_of_it_is_published(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    _release(catalog)
    facts = snapshot((catalog.version(ALICE, "flights", 1),))
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: c.publish_snapshot(ALICE, "publish", facts),
        lambda c: c.retire_version(ALICE, "retire", "flights", 1, "replaced"),
    )
    assert [one.exception(), two.exception()] == [None, None]
    published = next(row.seq for row in catalog.outbox(ALICE) if row.topic == "snapshot.publish")
    retired = next(row.seq for row in catalog.outbox(ALICE) if row.topic == "dataset.retire")
    assert published < retired


def test_a_snapshot_of_an_input_that_is_being_retired_waits_and_is_refused(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    _release(catalog)
    facts = snapshot((catalog.version(ALICE, "flights", 1),))
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: c.retire_version(ALICE, "retire", "flights", 1, "replaced"),
        lambda c: c.publish_snapshot(ALICE, "publish", facts),
    )
    assert one.exception() is None
    refusal = two.exception()
    assert isinstance(refusal, InputNotReleased)
    assert "'flights' partition '2013-06-01' version 1 is retired: replaced" in str(refusal)


def test_a_reader_of_the_outbox_never_passes_a_row_still_in_flight(
    catalog: Catalog, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    one, two = race(
        catalog_url,
        workers,
        "before_commit",
        lambda c: c.register_version(ALICE, "one", delivery()),
        lambda c: c.outbox(ALICE),
    )
    assert one.exception() is None
    seen = two.result()
    assert isinstance(seen, list)
    assert [row.topic for row in seen] == ["tenant.ensure", "dataset.register"]


def _release(catalog: Catalog) -> None:
    catalog.register_feature_set(ALICE, None, feature_set())
    catalog.register_version(ALICE, None, delivery())
    catalog.start_validation(ALICE, None, "flights", 1, evidence().suite_digest)
    catalog.release_version(ALICE, None, "flights", 1, evidence())
