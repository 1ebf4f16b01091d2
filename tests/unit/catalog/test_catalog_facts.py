"""Facts are checked when they are made: what one database would take and the other not is refused here."""

from dataclasses import replace

import pytest
from support.catalog_facts import ALICE, delivery, digest, evidence, snapshot

from headway.catalog import DatasetVersion, FeatureSetFacts, Principal
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import VersionStatus

LONG = "x" * 256


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset", ""),
        ("dataset", "a\nb"),
        ("dataset", " a"),
        ("dataset", LONG),
        ("partition", "a\0b"),
        ("partition", "\ud800"),
        ("content_digest", "abc"),
        ("schema_hash", "sha256:" + "A" * 64),
        ("manifest_digest", digest("not among the blobs")),
        ("source_digest", ""),
        ("rows", -1),
        ("rows", True),
        ("rows", 1.0),
        ("rows", 2**63),
        ("event_time_min", 2**63),
        ("event_time_max", 1.5),
        ("watermark", "now"),
        ("privacy", ""),
        ("reason", "a\0b"),
        ("reason", "x" * 2_001),
        ("run_id", "\udfff"),
    ],
)
def test_a_delivery_that_a_database_could_not_keep_is_refused_by_field(field: str, value: object) -> None:
    named = "blobs" if field == "manifest_digest" else field
    with pytest.raises(InvalidFact, match=f"^{named}: "):
        delivery(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("field", "value"), [("evaluated", -1), ("suite_digest", "x"), ("quarantine_digest", "y")])
def test_evidence_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidFact, match=field):
        evidence(**{field: value})


@pytest.mark.parametrize(("tenant", "actor"), [("", "a"), ("t", ""), ("t\n", "a"), (LONG, "a")])
def test_a_principal_has_names(tenant: str, actor: str) -> None:
    with pytest.raises(InvalidFact):
        Principal(tenant, actor)


def _version(dataset: str, number: int, status: VersionStatus = "released") -> DatasetVersion:
    return DatasetVersion(delivery(dataset), number, status, "", evidence(), 1)


def test_a_snapshots_identity_is_its_inputs_in_any_order_without_evidence() -> None:
    a, b = _version("flights", 1), _version("weather", 4)
    identity = snapshot((a, b)).snapshot_id("acme")
    assert snapshot((b, a)).snapshot_id("acme") == identity
    assert snapshot((a, replace(b, evidence=evidence("other")))).snapshot_id("acme") == identity
    assert snapshot((a, b), content=2).snapshot_id("acme") == identity
    others = [
        snapshot((a, b)).snapshot_id("rival"),
        snapshot((a,)).snapshot_id("acme"),
        snapshot((a, replace(b, version=5))).snapshot_id("acme"),
        snapshot((a, b), partition="p").snapshot_id("acme"),
        snapshot((a, b), feature_set_version=2).snapshot_id("acme"),
        snapshot((a, b), pipeline="other").snapshot_id("acme"),
    ]
    assert len({identity, *others}) == 7


def test_a_snapshot_names_its_inputs_once_and_at_least_one() -> None:
    a = _version("flights", 1)
    for inputs in ((), (a, a)):
        with pytest.raises(InvalidFact, match="inputs"):
            snapshot(inputs)


def test_evidence_digest_covers_what_was_found_whatever_the_order_of_blobs() -> None:
    first = evidence()
    extra = delivery().blobs
    assert replace(first, blobs=first.blobs + extra).digest == replace(first, blobs=extra + first.blobs).digest
    assert len({first.digest, replace(first, failed=1).digest, replace(first, reason="x").digest}) == 3


def test_facts_and_principal_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ALICE.tenant = "rival"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidFact):
        FeatureSetFacts("delay", "x", digest("code"), {})
