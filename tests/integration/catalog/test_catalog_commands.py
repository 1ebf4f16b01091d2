"""What the commands promise, in the order in which a pipeline uses them, on both databases."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.catalog_facts import ALICE, Ticker, blob, delivery, digest, evidence, feature_set, payload, snapshot

from headway.artifacts.store import LocalStore
from headway.catalog import DatasetVersion, LineageEdge, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    BlobSizeConflict,
    EvidenceRefused,
    IdempotencyConflict,
    IllegalTransition,
    InputNotReleased,
    InvalidFact,
    Nondeterminism,
    ProofMissing,
    StaleEpoch,
    UnknownFeatureSet,
    UnknownSnapshot,
    UnknownVersion,
)
from headway.catalog.invariants import check

DAY = "2013-06-01"


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    opened = open_catalog(catalog_url, Ticker())
    opened.ensure_tenant(ALICE)
    yield opened
    opened.close()


def _released(catalog: Catalog, dataset: str = "flights", partition: str = DAY, content: object = 1) -> DatasetVersion:
    version = catalog.register_version(ALICE, None, delivery(dataset, partition, content)).version
    catalog.start_validation(ALICE, None, dataset, version, evidence().suite_digest)
    return catalog.release_version(ALICE, None, dataset, version, evidence())


def test_a_delivery_keeps_every_fact(catalog: Catalog) -> None:
    facts = delivery(
        reason="late", run_id="run-1", event_time_min=-(2**63), watermark=None, metadata={"ü": [1, {"x": None}]}
    )
    version = catalog.register_version(ALICE, None, facts)
    assert version.facts == facts
    assert (version.version, version.status, version.status_reason, version.evidence) == (1, "registered", "late", None)
    assert catalog.version(ALICE, "flights", 1) == version
    assert catalog.current(ALICE, "flights", DAY) == version
    assert catalog.current(ALICE, "flights", "2013-06-02") is None


def test_content_seen_before_becomes_current_again_with_its_state(catalog: Catalog) -> None:
    first = _released(catalog)
    second = catalog.register_version(ALICE, None, delivery(content=2))
    again = catalog.register_version(ALICE, None, delivery(source_digest=digest("another file")))
    assert (again, second.version) == (first, 2)
    assert catalog.current(ALICE, "flights", DAY) == first
    events = catalog.dataset_events(ALICE, "flights", 1)
    assert [(e.kind, e.partition_epoch) for e in events][-1] == ("redelivered", 3)
    assert {edge.parent for edge in catalog.lineage(ALICE, first.node, "upstream")} == {
        f"delivery:{first.source_digest}",
        f"delivery:{digest('another file')}",
    }


def test_the_same_call_without_a_key_takes_effect_anew_only_after_something_happened(catalog: Catalog) -> None:
    one, two = delivery(content=1), delivery(content=2)
    for facts in (one, one, two, two, one, one):
        catalog.register_version(ALICE, None, facts)
    assert [e.kind for e in catalog.dataset_events(ALICE, "flights")] == ["registered", "redelivered", "registered"]
    assert catalog.partition_epoch(ALICE, "flights", DAY) == 3


def test_a_second_run_that_delivers_the_same_is_idempotent_too(catalog: Catalog) -> None:
    catalog.register_version(ALICE, None, delivery(run_id="run-1"))
    for _ in range(3):
        catalog.register_version(ALICE, None, delivery(run_id="run-2"))
    assert [e.kind for e in catalog.dataset_events(ALICE, "flights")] == ["registered", "redelivered"]
    assert catalog.partition_epoch(ALICE, "flights", DAY) == 1


def test_a_slow_reader_cannot_overtake_a_newer_delivery(catalog: Catalog) -> None:
    seen = catalog.partition_epoch(ALICE, "flights", DAY)
    catalog.register_version(ALICE, None, delivery(content=2))
    with pytest.raises(StaleEpoch, match="epoch 1, the caller expected 0"):
        catalog.register_version(ALICE, None, delivery(content=1), expected_epoch=seen)
    assert [v.version for v in catalog.versions(ALICE, "flights")] == [1]


@pytest.mark.parametrize("change", [{"rows": 4}, {"schema_hash": digest("other schema")}])
def test_one_content_with_other_rows_or_schema_is_nondeterminism(catalog: Catalog, change: dict[str, object]) -> None:
    catalog.register_version(ALICE, None, delivery())
    with pytest.raises(Nondeterminism, match=next(iter(change))):
        catalog.register_version(ALICE, None, delivery(**change))  # pyright: ignore[reportArgumentType]


def test_one_digest_with_two_sizes_is_refused_and_nothing_is_kept(catalog: Catalog) -> None:
    catalog.register_version(ALICE, None, delivery())
    wrong = replace(delivery().blobs[0], size=1)
    other = blob("manifest", "x")
    with pytest.raises(BlobSizeConflict, match=wrong.digest):
        catalog.register_version(ALICE, None, delivery(content=2, manifest_digest=other.digest, blobs=(other, wrong)))
    assert len(catalog.versions(ALICE, "flights")) == len(catalog.blobs(ALICE)) == 1


def test_a_validation_goes_its_legal_way(catalog: Catalog) -> None:
    suite = evidence().suite_digest
    catalog.register_version(ALICE, None, delivery())
    with pytest.raises(IllegalTransition, match="registered: released is refused; only validating"):
        catalog.release_version(ALICE, None, "flights", 1, evidence())
    catalog.start_validation(ALICE, None, "flights", 1, suite)
    bad = evidence(found="bad", failed=2, quarantined_rows=2, quarantine_digest=digest("rows"))
    assert catalog.quarantine_version(ALICE, None, "flights", 1, bad).status == "quarantined"
    assert catalog.start_validation(ALICE, None, "flights", 1, suite).status == "validating"
    assert catalog.release_version(ALICE, None, "flights", 1, evidence()).evidence == evidence()
    newer = evidence("stricter suite")
    assert catalog.record_validation(ALICE, None, "flights", 1, newer).evidence_digest == newer.digest
    said = "only registered or validating or quarantined or retired may become validating"
    with pytest.raises(IllegalTransition, match=said):
        catalog.start_validation(ALICE, None, "flights", 1, suite)
    worse = evidence("strictest suite", "3 rows fail")
    assert catalog.retire_version(ALICE, None, "flights", 1, "fails the strictest suite", worse).evidence == worse
    with pytest.raises(IllegalTransition, match="is retired"):
        catalog.record_validation(ALICE, None, "flights", 1, newer)
    assert catalog.start_validation(ALICE, None, "flights", 1, suite).status == "validating"
    assert [e.to_status for e in catalog.dataset_events(ALICE, "flights", 1)] == [
        "registered", "validating", "quarantined", "validating", "released", "released", "retired", "validating",
    ]  # fmt: skip


def test_a_validation_that_died_is_begun_again_under_a_newer_suite(catalog: Catalog) -> None:
    catalog.register_version(ALICE, None, delivery())
    catalog.start_validation(ALICE, None, "flights", 1, digest("suite", "old"))
    catalog.start_validation(ALICE, None, "flights", 1, digest("suite", "new"))
    with pytest.raises(EvidenceRefused, match="the validation began under"):
        catalog.release_version(ALICE, None, "flights", 1, evidence("old"))
    assert catalog.release_version(ALICE, None, "flights", 1, evidence("new")).status == "released"


def test_evidence_of_nothing_releases_only_an_expected_empty_partition(catalog: Catalog) -> None:
    nothing = evidence(evaluated=0)
    for partition, facts in (
        ("full", delivery(partition="full")),
        ("empty", delivery(partition="empty", rows=0)),
        ("expected", delivery(partition="expected", rows=0, reason="no_data_published")),
    ):
        number = catalog.register_version(ALICE, None, facts).version
        catalog.start_validation(ALICE, None, "flights", number, nothing.suite_digest)
        if partition == "expected":
            assert catalog.release_version(ALICE, None, "flights", number, nothing).reason == "no_data_published"
        else:
            with pytest.raises(EvidenceRefused, match="no expectation was evaluated"):
                catalog.release_version(ALICE, None, "flights", number, nothing)


def test_a_key_answers_its_command_and_no_other(catalog: Catalog) -> None:
    answer = catalog.register_version(ALICE, "k", delivery())
    catalog.start_validation(ALICE, None, "flights", 1, evidence().suite_digest)
    assert catalog.register_version(ALICE, "k", delivery()) == answer
    with pytest.raises(IdempotencyConflict, match="'k'"):
        catalog.register_version(ALICE, "k", delivery(content=2))
    with pytest.raises(IdempotencyConflict):
        catalog.retire_version(ALICE, "k", "flights", 1, "x")
    with pytest.raises(InvalidFact, match="auto:"):
        catalog.register_version(ALICE, "auto:x", delivery())


def test_a_refused_command_leaves_its_key_free(catalog: Catalog) -> None:
    catalog.register_version(ALICE, None, delivery())
    with pytest.raises(IllegalTransition):
        catalog.retire_version(ALICE, "k", "flights", 1, "old")
    _released(catalog)
    assert catalog.retire_version(ALICE, "k", "flights", 1, "old").status == "retired"


def test_a_feature_set_counts_contract_and_code(catalog: Catalog) -> None:
    assert catalog.register_feature_set(ALICE, None, feature_set()).version == 1
    assert catalog.register_feature_set(ALICE, "k", feature_set()).version == 1
    second = catalog.register_feature_set(ALICE, None, feature_set(contract=2))
    assert catalog.feature_set(ALICE, "delay", 2) == second
    assert second.contract == feature_set(contract=2).contract
    with pytest.raises(Nondeterminism, match="contract"):
        catalog.register_feature_set(ALICE, None, replace(feature_set(), contract={"forged": 1}))
    with pytest.raises(UnknownFeatureSet):
        catalog.feature_set(ALICE, "delay", 3)


def test_a_snapshot_is_published_with_its_lineage(catalog: Catalog) -> None:
    features = catalog.register_feature_set(ALICE, None, feature_set())
    flights, weather = _released(catalog), _released(catalog, "weather")
    facts = snapshot((weather, flights))
    published = catalog.publish_snapshot(ALICE, None, facts)
    assert published.facts == facts
    assert catalog.snapshot(ALICE, published.snapshot_id) == published
    assert catalog.publish_snapshot(ALICE, "again", replace(facts, run_id="other run")) == published
    upstream = catalog.lineage(ALICE, published.node, "upstream")
    assert set(upstream) == {
        LineageEdge(published.node, flights.node, "input"),
        LineageEdge(published.node, weather.node, "input"),
        LineageEdge(published.node, features.node, "features"),
        LineageEdge(flights.node, f"delivery:{flights.source_digest}", "source"),
        LineageEdge(weather.node, f"delivery:{weather.source_digest}", "source"),
    }
    downstream = catalog.lineage(ALICE, f"delivery:{flights.source_digest}", "downstream")
    assert [edge.child for edge in downstream] == [flights.node, published.node]
    with pytest.raises(UnknownSnapshot):
        catalog.snapshot(ALICE, digest("nothing"))


def test_the_same_content_under_new_evidence_is_the_same_snapshot(catalog: Catalog) -> None:
    catalog.register_feature_set(ALICE, None, feature_set())
    before = catalog.publish_snapshot(ALICE, None, snapshot((_released(catalog),)))
    again = catalog.record_validation(ALICE, None, "flights", 1, evidence("stricter suite"))
    assert catalog.publish_snapshot(ALICE, None, snapshot((again,))) == before
    with pytest.raises(Nondeterminism, match="content_digest"):
        catalog.publish_snapshot(ALICE, None, snapshot((again,), content=2))


def _registered(catalog: Catalog) -> None:
    catalog.register_version(ALICE, None, delivery("weather"))


def _quarantined(catalog: Catalog) -> None:
    _registered(catalog)
    catalog.start_validation(ALICE, None, "weather", 1, evidence().suite_digest)
    catalog.quarantine_version(ALICE, None, "weather", 1, evidence(found="wind of 1048 mph"))


def _retired(catalog: Catalog) -> None:
    _released(catalog, "weather")
    catalog.retire_version(ALICE, None, "weather", 1, "wrong zone")


@pytest.mark.parametrize(
    ("prepare", "told"),
    [(_registered, "registered"), (_quarantined, "quarantined: wind of 1048 mph"), (_retired, "retired: wrong zone")],
)
def test_a_snapshot_of_an_unreleased_input_is_refused_by_name(
    catalog: Catalog, prepare: Callable[[Catalog], None], told: str
) -> None:
    catalog.register_feature_set(ALICE, None, feature_set())
    flights = _released(catalog)
    prepare(catalog)
    facts = snapshot((flights, catalog.version(ALICE, "weather", 1)))
    with pytest.raises(InputNotReleased) as refusal:
        catalog.publish_snapshot(ALICE, None, facts)
    assert f"input 'weather' partition '{DAY}' version 1 is {told}" in str(refusal.value)
    assert catalog.current_snapshots(ALICE, "flight_delay") == {}


def test_a_snapshot_on_outdated_evidence_other_content_or_no_proof_is_refused(catalog: Catalog) -> None:
    catalog.register_feature_set(ALICE, None, feature_set())
    flights = _released(catalog)
    facts = snapshot((flights,))
    forged = replace(facts, inputs=(replace(facts.inputs[0], content_digest=digest("other")),))
    with pytest.raises(InputNotReleased, match="its content is"):
        catalog.publish_snapshot(ALICE, None, forged)
    unknown = replace(facts, inputs=(replace(facts.inputs[0], version=2),))
    with pytest.raises(UnknownVersion):
        catalog.publish_snapshot(ALICE, None, unknown)
    with pytest.raises(ProofMissing, match="flight_delay"):
        catalog.publish_snapshot(ALICE, None, replace(facts, proof_passed=False))
    with pytest.raises(UnknownFeatureSet):
        catalog.publish_snapshot(ALICE, None, replace(facts, feature_set_version=9))
    catalog.record_validation(ALICE, None, "flights", 1, evidence("stricter suite"))
    with pytest.raises(InputNotReleased, match="its evidence is"):
        catalog.publish_snapshot(ALICE, None, facts)
    assert len(catalog.outbox(ALICE)) == 6


def test_a_partition_is_refused_repaired_and_published(catalog: Catalog) -> None:
    catalog.register_feature_set(ALICE, None, feature_set())
    catalog.refuse_snapshot(ALICE, None, "flight_delay", DAY, "quarantined", ("flights",), digest("evidence"))
    refused = catalog.refuse_snapshot(ALICE, None, "flight_delay", DAY, "quarantined", ("flights",), digest("evidence"))
    assert (refused.status, refused.snapshot, refused.blocking) == ("refused", None, ("flights",))
    published = catalog.publish_snapshot(ALICE, None, snapshot((_released(catalog),)))
    states = catalog.current_snapshots(ALICE, "flight_delay", [DAY, "2013-06-02"])
    assert list(states) == [DAY]
    assert (states[DAY].status, states[DAY].snapshot) == ("published", published)
    catalog.refuse_snapshot(ALICE, None, "flight_delay", DAY, "quarantined", ("flights",), digest("evidence"))
    assert catalog.current_snapshots(ALICE, "flight_delay")[DAY].status == "refused"


def test_outbox_and_audit_are_read_by_cursor(catalog: Catalog) -> None:
    for number in range(5):
        catalog.register_version(ALICE, None, delivery(partition=f"p{number}"))
    rows = catalog.outbox(ALICE)
    assert [row.aggregate_seq for row in rows if row.aggregate == "dataset:flights"] == [1, 2, 3, 4, 5]
    pages = [row for start in (0, rows[1].seq, rows[3].seq) for row in catalog.outbox(ALICE, start, 2)]
    assert pages == rows
    audit = catalog.audit_rows(ALICE)
    assert {(row.actor, row.outcome) for row in audit} == {("alice", "allow")}
    assert catalog.audit_rows(ALICE, audit[3].seq) == audit[4:]


def test_a_year_of_partitions_is_read_in_one_call(catalog: Catalog) -> None:
    days = [f"2013-{n:03}" for n in range(1, 31)]
    for day in reversed(days):
        catalog.register_version(ALICE, None, delivery(partition=day))
    assert list(catalog.current_many(ALICE, "flights")) == days
    assert list(catalog.current_many(ALICE, "flights", [days[3], "none", days[1]])) == [days[1], days[3]]
    assert [v.partition for v in catalog.versions(ALICE, "flights", days[0])] == [days[0]]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("UPDATE dataset_partition SET epoch = 7", "current versions"),
        ("UPDATE blob SET state = 'doomed'", "blob rows"),
        ("UPDATE blob SET size = 1", "stored bytes"),
        ("INSERT INTO idempotency VALUES ('acme', 'x', 'op', 'f', 'done', '{}', 1)", "one key, one effect"),
        ("INSERT INTO lineage_edge VALUES ('acme', 'a', 'b', 'c', 1)", ""),
        (
            "INSERT INTO dataset_event SELECT tenant_id, dataset_id, version, 9, partition, 'x', 'released', "
            "'validating', '', NULL, NULL, NULL, NULL, 'k', 'x', 1 FROM dataset_event WHERE seq = 1",
            "dataset events",
        ),
    ],
)
def test_damage_is_found_by_name(catalog: Catalog, tmp_path: Path, statement: str, name: str) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_bytes(payload("manifest", "flights", DAY, 1))
    catalog.register_version(ALICE, None, delivery())
    assert [f for f in check(catalog, ALICE, store) if not f.ok] == []
    with catalog.database.write("acme", "damage") as connection:
        connection.execute(sa.text(statement))
    assert [f.name for f in check(catalog, ALICE, store) if not f.ok] == ([name] if name else [])


def test_a_lost_or_damaged_blob_is_found(catalog: Catalog, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    kept = store.put_bytes(payload("manifest", "flights", DAY, 1))
    catalog.register_version(ALICE, None, delivery())
    path = store.read_path(kept.digest)
    path.chmod(0o644)
    path.write_bytes(bytes(kept.size))
    [found] = [f for f in check(catalog, ALICE, store) if not f.ok]
    assert (found.invariant, found.name) == ("I9", "stored bytes")
    assert f"blob {kept.digest} is corrupt" in found.detail
    store.erase(kept.digest)
    [found] = [f for f in check(catalog, ALICE, store) if not f.ok]
    assert f"no blob {kept.digest}" in found.detail
