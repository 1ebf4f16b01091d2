"""Only a complete, fresh and verifying set of passing statements promotes; a forgery moves no endpoint."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.catalog_facts import ALICE
from support.registry_bench import GATES, GOOD, MODEL, Bench, open_bench, spec, write_scores
from support.registry_cases import contract, scored

from headway.catalog.errors import EndpointMoved, NothingToRollBack, PromotionRefused
from headway.catalog.invariants import check
from headway.catalog.registry_facts import Endpoint, EndpointEvent, GateResultFacts, ModelVersion, PromotionEvidence
from headway.registry.dossier import newest_results
from headway.registry.dsse import sign, statement
from headway.registry.evaluation import EvaluationRefused
from headway.registry.evidence import EvidenceMissing, collect_evidence
from headway.registry.judge import JudgeRefused, judge_version
from headway.registry.keys import VALIDITY_US, KeyRing, Role
from headway.registry.promote import NotPromoted, RollbackRefused, promote, rollback, verify_served
from headway.registry.provenance import OtherRun, sign_provenance
from headway.registry.statements import GATE_VERDICT, PROMOTION, PROVENANCE, record, sign_now
from headway.registry.verdicts import ArtifactCheck

GATE = "auc_over_logistic"


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path / "home", migrated_sqlite)
    yield opened
    opened.close()


def _promote(bench: Bench, version: ModelVersion, endpoint: str = MODEL) -> Endpoint:
    return promote(bench.services, bench.keyring, endpoint, MODEL, version.version)


def _refused(bench: Bench, version: ModelVersion, endpoint: str = MODEL) -> dict[str, str]:
    """Why the version is not promoted; the endpoint must not move meanwhile."""
    before = bench.services.catalog.endpoint(ALICE, endpoint)
    with pytest.raises(EvidenceMissing) as caught:
        _promote(bench, version, endpoint)
    assert bench.services.catalog.endpoint(ALICE, endpoint) == before
    return caught.value.problems


def _forge(
    bench: Bench,
    version: ModelVersion,
    gate: str = GATE,
    *,
    keyring: KeyRing | None = None,
    signed_by: Role = "gate",
    subject: str | None = None,
    says: dict[str, Any] | None = None,
) -> None:
    """Record a gate result as one who can write to the catalog: a `pass` by a statement of this making."""
    policy = bench.services.catalog.gate_policy(ALICE, MODEL)
    assert policy is not None
    digest = version.manifest_digest
    predicate = {
        "gate": gate,
        "verdict": "pass",
        "reason": "trust me",
        "model": MODEL,
        "version": version.version,
        "kind": version.kind,
        "contract_hash": version.facts.contract_hash,
        "policy_version": policy.version,
        "policy_digest": policy.digest,
        "champion": None,
        "metrics": {},
        "run_id": version.run_id,
        "signed_at": bench.clock.now,
    } | (says or {})
    document = statement(f"{MODEL}@{version.version}", subject or digest, GATE_VERDICT, predicate)
    envelope = sign(document, (keyring or bench.keyring).private_key(signed_by))
    record(bench.services, envelope, digest, GATE_VERDICT, "gate")
    bench.services.catalog.record_gate_result(
        ALICE,
        None,
        GateResultFacts(
            MODEL, version.version, gate, "pass", "trust me", {}, policy.version, envelope.statement_digest, digest
        ),
    )


def _verified(bench: Bench) -> EndpointEvent:
    endpoint = bench.services.catalog.endpoint(ALICE, MODEL)
    assert endpoint is not None
    return verify_served(bench.services, bench.keyring.trust(), endpoint)


def test_a_judged_version_is_promoted_once_and_its_promotion_verifies(bench: Bench) -> None:
    version = bench.version()
    judgement = bench.judge(version)
    assert judgement.passed
    assert [r.gate for r in judgement.results] == list(GATES)
    assert (_promote(bench, version).stable, _promote(bench, version).epoch) == (1, 1)
    event = _verified(bench)
    assert (event.epoch, event.operation) == (1, "promote")
    assert event.evidence is not None
    assert set(event.evidence.statements) == set(GATES)
    roles = [a.role for a in bench.services.catalog.attestations(ALICE, version.manifest_digest)]
    assert sorted(roles) == ["gate"] * len(GATES) + ["promoter", "trainer"]
    broken = [f for f in check(bench.services.catalog, ALICE, bench.services.store) if not f.ok]
    # The deliveries of these tests have no bytes.
    assert [f.name for f in broken if f.name != "stored bytes"] == []


def test_the_next_version_is_judged_against_the_champion_and_rollback_returns(bench: Bench) -> None:
    first, second = bench.version(1), bench.version(2)
    bench.judge(first)
    _promote(bench, first)
    results = {r.gate: r for r in bench.judge(second).results}
    assert results["auc_over_champion"].metrics["reference"] == "champion"
    moved = _promote(bench, second)
    assert (moved.stable, moved.previous, moved.epoch) == (2, 1, 2)
    back = rollback(bench.services, bench.keyring, MODEL, "worse on Mondays")
    assert (back.stable, back.previous, back.epoch) == (1, 2, 3)
    # It serves again by the promotion it had, which still verifies.
    assert _verified(bench).epoch == 1
    with pytest.raises(EndpointMoved):
        rollback(bench.services, bench.keyring, MODEL, "once more", expected_epoch=2)


def test_rolling_back_the_first_version_changes_nothing(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    _promote(bench, version)
    with pytest.raises(NothingToRollBack):
        rollback(bench.services, bench.keyring, MODEL, "none")
    assert _verified(bench).epoch == 1


def test_registration_alone_promotes_nothing(bench: Bench) -> None:
    version = bench.version()
    assert "policy" in _refused(bench, version)
    judged = bench.version(2)
    bench.judge(judged)
    assert set(_refused(bench, version)) == {f"gate {gate}" for gate in GATES}


def test_a_refused_version_names_the_gate_and_what_it_said(bench: Bench) -> None:
    version = bench.version()
    assert not bench.judge(version, {"candidate": 0.5, "logistic": 1.5}).passed
    problems = _refused(bench, version)
    assert problems["gate auc_over_logistic"].startswith("fail: AUC")
    assert "gate weights_only" not in problems


def test_an_artifact_that_cannot_be_tried_is_undecided_and_stays_out(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version, check=ArtifactCheck(None, None, ("no torch here",)))
    problems = _refused(bench, version)
    assert problems["gate weights_only"] == "undecided: no evidence: the artifact was not tried (no torch here)"


@pytest.mark.parametrize("how", ["flipped", "missing", "manifest"])
def test_a_tampered_artifact_is_not_promoted(bench: Bench, how: str) -> None:
    version = bench.version()
    bench.judge(version)
    blobs = {b.digest: bench.services.store.get_bytes(b.digest) for b in version.facts.blobs}
    weights = next(d for d, data in blobs.items() if data.startswith(b"weights"))
    target = version.manifest_digest if how == "manifest" else weights
    path = bench.services.store.read_path(target)
    path.chmod(0o644)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    said = " ".join(f"{k}: {v}" for k, v in _refused(bench, version).items())
    assert target in said


def test_a_judge_that_meets_a_tampered_artifact_fails_it(bench: Bench) -> None:
    version = bench.version()
    path = bench.services.store.read_path(
        next(b.digest for b in version.facts.blobs if b.digest != version.manifest_digest)
    )
    path.chmod(0o644)
    path.write_bytes(b"other")
    results = {r.gate: r for r in bench.judge(version).results}
    assert (results["weights_only"].verdict, results["finite_outputs"].verdict) == ("fail", "fail")
    assert "corrupt" in results["weights_only"].reason


def test_a_statement_for_another_digest_proves_nothing(bench: Bench) -> None:
    good, bad = bench.version(1), bench.version(2)
    bench.judge(good)
    bench.judge(bad, {"candidate": 0.5, "logistic": 1.5})
    _forge(bench, bad, subject=good.manifest_digest)
    assert "wrong_subject" in _refused(bench, bad)[f"gate {GATE}"]


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ({"gate": "segments"}, "wrong_gate"),
        ({"version": 2}, "wrong_version"),
        ({"version": True}, "wrong_version"),
        ({"model": "other"}, "wrong_version"),
        ({"kind": "logistic"}, "wrong_version"),
        ({"policy_version": 2}, "wrong_policy"),
        ({"policy_digest": "sha256:" + "0" * 64}, "wrong_policy"),
        ({"contract_hash": "sha256:" + "0" * 64}, "wrong_contract"),
        ({"signed_at": None}, "no_time"),
    ],
)
def test_a_pass_that_speaks_of_something_else_has_its_own_reason(bench: Bench, says: dict[str, Any], code: str) -> None:
    version = bench.version()
    bench.judge(version, {"candidate": 0.5, "logistic": 1.5})
    _forge(bench, version, says=says)
    assert code in _refused(bench, version)[f"gate {GATE}"]


@pytest.mark.parametrize("signed_by", ["trainer", "promoter"])
def test_a_pass_by_the_key_of_another_role_proves_nothing(bench: Bench, signed_by: Role) -> None:
    version = bench.version()
    bench.judge(version, {"candidate": 0.5, "logistic": 1.5})
    _forge(bench, version, signed_by=signed_by)
    assert "wrong_role" in _refused(bench, version)[f"gate {GATE}"]


def test_keys_of_another_home_and_revoked_keys_prove_nothing(bench: Bench, tmp_path: Path) -> None:
    version = bench.version()
    bench.judge(version)
    _forge(bench, version, keyring=KeyRing(tmp_path / "elsewhere", bench.clock))
    assert "unknown_key" in _refused(bench, version)[f"gate {GATE}"]
    bench.keyring.revoke(bench.keyring.private_key("gate").public.key_id)
    problems = _refused(bench, version)
    assert all("key_revoked" in problems[f"gate {gate}"] for gate in GATES if gate != GATE)


def test_an_expired_key_signs_no_evidence_whatever_date_it_writes(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    old = bench.keyring.private_key("gate")
    bench.clock.now += VALIDITY_US
    bench.keyring.private_key("gate")

    class OldKey(KeyRing):
        def private_key(self, role: Role) -> Any:  # noqa: ANN401
            return old if role == "gate" else super().private_key(role)

    ring = OldKey(bench.keyring.folder, bench.clock)
    _forge(bench, version, keyring=ring)
    assert "key_expired" in _refused(bench, version)[f"gate {GATE}"]
    # Dated back: it verifies for that day, and was recorded when the key was no gate's any more.
    _forge(bench, version, keyring=ring, says={"signed_at": bench.clock.now - VALIDITY_US})
    assert "key_expired" in _refused(bench, version)[f"gate {GATE}"]


def test_a_statement_dated_after_it_was_recorded_is_refused(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    _forge(bench, version, says={"signed_at": bench.clock.now + 3_600_000_000})
    assert "from_the_future" in _refused(bench, version)[f"gate {GATE}"]


def test_stale_evidence_is_asked_for_again(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    age, second = 30 * 86_400_000_000, 1_000_000
    bench.clock.now += age + second
    problems = _refused(bench, version)
    assert set(problems) == {f"gate {gate}" for gate in GATES}
    assert "s old" in problems[f"gate {GATE}"]
    collect_evidence(bench.services, bench.keyring.trust(), version, bench.clock.now - 2 * second)
    bench.judge(version)
    assert _promote(bench, version).stable == 1


def test_a_clock_that_was_set_back_promotes_nothing(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    now, year = bench.clock.now, 365 * 86_400_000_000
    with pytest.raises(EvidenceMissing) as caught:
        collect_evidence(bench.services, bench.keyring.trust(), version, now - year)
    assert set(caught.value.problems) == {"clock", *(f"gate {gate}" for gate in GATES)}
    assert "was signed at 2014-05-13" in caught.value.problems[f"gate {GATE}"]


def test_stale_evidence_is_not_made_fresh_by_a_clock_set_back(bench: Bench) -> None:
    """The statements lie before the clock again, and what was recorded since does not."""
    version = bench.version(1)
    bench.judge(version)
    day = 86_400_000_000
    bench.clock.now += 40 * day
    bench.judge(bench.version(2))
    with pytest.raises(EvidenceMissing) as caught:
        collect_evidence(bench.services, bench.keyring.trust(), version, bench.clock.now - 20 * day)
    assert set(caught.value.problems) == {"clock"}
    assert "was set back" in caught.value.problems["clock"]


def test_an_old_statement_recorded_anew_stays_old(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    signed_at = bench.clock.now
    bench.clock.now += 31 * 86_400_000_000
    for gate in GATES:
        _forge(bench, version, gate, says={"signed_at": signed_at})
    assert "s old" in _refused(bench, version)[f"gate {GATE}"]


def test_a_new_policy_asks_for_new_evidence(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    gates = [{"gate": g, "margin": 0.01} for g in GATES]
    bench.services.catalog.set_gate_policy(ALICE, None, MODEL, _document(gates))
    assert "wrong_policy" in _refused(bench, version)[f"gate {GATE}"]


def _document(gates: list[dict[str, Any]]) -> dict[str, Any]:
    from headway.registry.policy import policy_document

    declared = spec(gates=gates)
    assert declared.promotion is not None
    assert declared.evaluation is not None
    return policy_document(declared.promotion, declared.evaluation)


def test_a_policy_that_does_not_allow_it_stops_a_rollout_at_once(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version, declared=spec(allow_immediate=False))
    with pytest.raises(PromotionRefused, match="immediate"):
        _promote(bench, version)
    assert bench.services.catalog.endpoint(ALICE, MODEL) is None


def test_a_version_without_provenance_is_not_promoted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.registry_bench.sign_provenance", lambda *_: None)
    version = bench.version()
    bench.judge(version)
    assert set(_refused(bench, version)) == {"provenance"}


def test_provenance_by_another_role_or_of_another_run_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bench.version(1)
    run = bench.services.catalog.run(ALICE, other.run_id)
    with monkeypatch.context() as patch:
        patch.setattr("support.registry_bench.sign_provenance", lambda *_: None)
        version = bench.version(2)
    bench.judge(version)
    with pytest.raises(OtherRun):
        sign_provenance(bench.services, bench.keyring, version, run)
    document = statement("x", version.manifest_digest, PROVENANCE, {"signed_at": bench.clock.now})
    envelope = sign(document, bench.keyring.private_key("gate"))
    record(bench.services, envelope, version.manifest_digest, PROVENANCE, "trainer")
    assert "wrong_role" in _refused(bench, version)["provenance"]


def test_provenance_names_what_the_artifact_was_made_from_and_is_signed_once(bench: Bench) -> None:
    version = bench.version()
    run = bench.services.catalog.run(ALICE, version.run_id)
    first = sign_provenance(bench.services, bench.keyring, version, run)
    bench.clock.now += 1_000_000
    assert sign_provenance(bench.services, bench.keyring, version, run) == first
    from headway.registry.dsse import payload_of

    predicate: Any = payload_of(bench.services.store.get_bytes(first.envelope_digest))["predicate"]
    named = {d["uri"]: f"sha256:{d['digest']['sha256']}" for d in predicate["buildDefinition"]["resolvedDependencies"]}
    assert named["urn:headway:feature-snapshot"] == run.facts.inputs[0]
    assert named["urn:headway:dataset-version:flights@1"] == run.facts.datasets[0][2]
    assert named["urn:headway:code"] == run.facts.code_digest
    assert predicate["runDetails"]["metadata"]["invocationId"] == run.run_id


def _replay(bench: Bench, version: ModelVersion, endpoint: str, epoch: int, evidence: PromotionEvidence) -> None:
    bench.services.catalog.promote_immediate(
        ALICE, None, endpoint, MODEL, version.version, expected_epoch=epoch, evidence=evidence
    )


def test_a_promotion_statement_is_good_for_one_endpoint_and_epoch(bench: Bench) -> None:
    first, second = bench.version(1), bench.version(2)
    bench.judge(first)
    _promote(bench, first)
    event = _verified(bench)
    assert event.evidence is not None
    with pytest.raises(PromotionRefused, match="already"):
        _replay(bench, first, "other", 0, event.evidence)
    bench.judge(second)
    _promote(bench, second)
    with pytest.raises(PromotionRefused, match="already"):
        _replay(bench, first, MODEL, 2, event.evidence)
    assert (bench.services.catalog.endpoint(ALICE, "other"), bench.services.catalog.endpoints(ALICE)[0].epoch) == (
        None,
        2,
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"endpoint": "other"}, "wrong_endpoint"),
        ({"epoch": 2}, "wrong_epoch"),
        ({"gates": {}}, "wrong_evidence"),
    ],
)
def test_a_move_by_a_statement_made_for_another_place_does_not_verify(
    bench: Bench, change: dict[str, Any], code: str
) -> None:
    version = bench.version()
    bench.judge(version)
    evidence = collect_evidence(bench.services, bench.keyring.trust(), version, bench.clock.now)
    predicate = {"endpoint": MODEL, "epoch": 1, "gates": dict(evidence.statements)} | change
    envelope = sign_now(bench.keyring, "promoter", "x", version.manifest_digest, PROMOTION, predicate)
    record(bench.services, envelope, version.manifest_digest, PROMOTION, "promoter")
    given = PromotionEvidence(1, evidence.statements, envelope.statement_digest, bench.clock.now)
    _replay(bench, version, MODEL, 0, given)
    with pytest.raises(NotPromoted, match=code):
        _verified(bench)


def test_an_endpoint_is_verified_as_it_was_read(bench: Bench) -> None:
    first, second = bench.version(1), bench.version(2)
    bench.judge(first)
    _promote(bench, first)
    read = bench.services.catalog.endpoint(ALICE, MODEL)
    assert read is not None
    bench.judge(second)
    _promote(bench, second)
    assert verify_served(bench.services, bench.keyring.trust(), read).epoch == 1
    with pytest.raises(NotPromoted, match="delay@2 was never promoted"):
        verify_served(bench.services, bench.keyring.trust(), replace(read, stable=2))


def _sound(bench: Bench) -> None:
    broken = [f for f in check(bench.services.catalog, ALICE, bench.services.store) if not f.ok]
    assert [f.name for f in broken if f.name != "stored bytes"] == []


def test_a_version_whose_promotion_does_not_verify_any_more_is_promoted_anew(bench: Bench) -> None:
    first, second = bench.version(1), bench.version(2)
    for version in (first, second):
        bench.judge(version)
        _promote(bench, version)
    # A second endpoint serves it by the same key: neither stands in the other's way.
    _promote(bench, second, "other")
    bench.keyring.revoke(bench.keyring.private_key("promoter").public.key_id)
    with pytest.raises(NotPromoted, match="promote it anew: headway promote delay@2 --endpoint delay"):
        _verified(bench)
    moved = _promote(bench, second)
    assert (moved.stable, moved.previous, moved.epoch) == (2, 1, 3)
    event = _verified(bench)
    assert (event.operation, event.epoch) == ("promote", 3)
    assert _promote(bench, second) == moved
    assert _promote(bench, second, "other").epoch == 2
    _sound(bench)


def test_the_only_version_of_a_home_is_promoted_anew_on_present_evidence_only(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    _promote(bench, version)
    for role in ("promoter", "gate"):
        bench.keyring.revoke(bench.keyring.private_key(role).public.key_id)
    assert "key_revoked" in _refused(bench, version)[f"gate {GATE}"]
    bench.judge(version)
    moved = _promote(bench, version)
    assert (moved.stable, moved.previous, moved.epoch) == (1, None, 2)
    assert _verified(bench).epoch == 2
    _sound(bench)


def _two_served(bench: Bench) -> tuple[ModelVersion, ModelVersion]:
    first, second = bench.version(1), bench.version(2)
    for version in (first, second):
        bench.judge(version)
        _promote(bench, version)
    return first, second


@pytest.mark.parametrize("how", ["file", "manifest", "promotion"])
def test_an_endpoint_returns_only_to_a_version_that_is_whole(bench: Bench, how: str) -> None:
    first, _ = _two_served(bench)
    before = bench.services.catalog.endpoint(ALICE, MODEL)
    if how == "promotion":
        listed = bench.services.catalog.attestations(ALICE, first.manifest_digest)
        lost = next(a.envelope_digest for a in listed if a.role == "promoter")
    else:
        others = [b.digest for b in first.facts.blobs if b.digest != first.manifest_digest]
        lost = first.manifest_digest if how == "manifest" else others[0]
    bench.services.store.erase(lost)
    with pytest.raises(RollbackRefused, match="cannot return to delay@1") as caught:
        rollback(bench.services, bench.keyring, MODEL, "back")
    assert lost in caught.value.message
    assert bench.services.catalog.endpoint(ALICE, MODEL) == before


def test_an_endpoint_does_not_return_to_what_a_revoked_key_promoted(bench: Bench) -> None:
    first = bench.version(1)
    bench.judge(first)
    _promote(bench, first)
    revoked = bench.keyring.private_key("promoter").public.key_id
    bench.clock.now += 1_000
    bench.keyring.rotate("promoter")
    second = bench.version(2)
    bench.judge(second)
    _promote(bench, second)
    bench.keyring.revoke(revoked)
    with pytest.raises(RollbackRefused, match="key_revoked"):
        rollback(bench.services, bench.keyring, MODEL, "back")
    assert _verified(bench).row.stable == 2


def test_the_same_rollback_again_changes_nothing_whatever_happened_to_the_other_version(bench: Bench) -> None:
    _, second = _two_served(bench)
    moved = rollback(bench.services, bench.keyring, MODEL, "back")
    bench.services.store.erase(second.manifest_digest)
    assert rollback(bench.services, bench.keyring, MODEL, "back") == moved


def test_verdicts_against_a_champion_that_was_replaced_do_not_count(bench: Bench) -> None:
    first, second, third = bench.version(1), bench.version(2), bench.version(3)
    bench.judge(first)
    _promote(bench, first)
    bench.judge(second)
    bench.judge(third)
    _promote(bench, second)
    problems = _refused(bench, third)
    assert set(problems) == {"gate auc_over_champion", "gate segments"}
    assert "delay@2 is stable now" in problems["gate segments"]
    bench.judge(third)
    assert _promote(bench, third).stable == 3


def test_a_contract_that_breaks_callers_is_refused_also_when_stable_moved_later(bench: Bench) -> None:
    first = bench.version(1)
    wide = bench.version(2, contract=contract({"name": "carrier", "type": "string", "required": False}))
    bench.judge(first)
    results = {r.gate: r for r in bench.judge(wide).results}
    assert results["contract"].verdict == "pass"
    _promote(bench, first)
    assert "'x' was accepted" in _refused(bench, wide)["contract"]
    assert {r.gate: r.verdict for r in bench.judge(wide).results}["contract"] == "fail"


def test_a_snapshot_whose_proof_failed_or_changed_stops_the_version(bench: Bench) -> None:
    version = bench.version()
    evaluated = bench.services.catalog.snapshot(ALICE, bench.snapshots[1])
    path = bench.services.store.read_path(evaluated.facts.proof_digest)
    path.chmod(0o644)
    path.write_bytes(json.dumps({"passed": True, "findings": [], "partition": "x"}).encode())
    results = {r.gate: r for r in bench.judge(version).results}
    assert results["leakage_proof"].verdict == "fail"
    assert bench.snapshots[1] in results["leakage_proof"].reason
    assert bench.snapshots[0] not in results["leakage_proof"].reason


def test_a_proof_that_is_not_the_one_of_the_snapshots_manifest_proves_nothing(bench: Bench) -> None:
    version = bench.version()
    proof = bench.services.store.put_bytes(b'{"findings":[],"passed":true}', "application/json")
    bench.snapshots.append(bench.snapshot("2013-12-01", recorded=proof))
    results = {r.gate: r for r in bench.judge(version).results}
    assert results["leakage_proof"].verdict == "fail"
    assert f"the catalog recorded {proof.digest}" in results["leakage_proof"].reason


def test_judging_again_finds_the_signed_verdicts_and_another_evaluation_counts_as_a_look(bench: Bench) -> None:
    version = bench.version()
    folder = bench.scores(version)
    first = bench.judge(version, folder=folder)
    bench.clock.now += 1_000_000
    assert bench.judge(version, folder=folder).results == first.results
    assert first.looks == 1
    again = bench.judge(version, {"candidate": 3.5})
    assert again.looks == 2
    assert {r.attempt for r in again.results} == {2}
    sibling = bench.version(2)
    assert bench.judge(sibling).looks == 3
    assert bench.judge(bench.version(3, partition="2013-12-01")).looks == 1


def test_verdicts_past_half_of_their_life_are_signed_again(bench: Bench) -> None:
    version, day = bench.version(), 86_400_000_000
    folder = bench.scores(version)
    first = bench.judge(version, folder=folder)
    bench.clock.now += 14 * day
    assert bench.judge(version, folder=folder).results == first.results
    bench.clock.now += 2 * day
    assert {r.attempt for r in bench.judge(version, folder=folder).results} == {2}


def test_a_version_is_judged_against_the_champion_it_was_evaluated_with(bench: Bench) -> None:
    first, second = bench.version(1), bench.version(2)
    folder = bench.scores(second)
    bench.judge(first)
    _promote(bench, first)

    def judge(champion: ModelVersion | None, scores: Path) -> None:
        judge_version(
            bench.services,
            bench.keyring,
            bench.spec,
            second,
            scores,
            snapshots=bench.snapshots,
            champion=champion,
            try_artifact=lambda _: GOOD,
        )

    with pytest.raises(JudgeRefused, match="delay@1 is stable now"):
        judge(None, folder)
    with pytest.raises(JudgeRefused, match="lacks scores"):
        judge(first, folder)
    assert newest_results(bench.services, second) == {}


@pytest.mark.parametrize("what", ["label", "t", "carrier", "score_candidate", "value", "file"])
def test_a_table_of_scores_that_is_not_whole_is_refused_before_anything_is_signed(bench: Bench, what: str) -> None:
    import pyarrow.parquet as pq

    version = bench.version()
    folder = bench.home / "scores"
    folder.mkdir()
    if what != "file":
        rows = scored(champion=0.0) if what == "x" else scored()
        write_scores(folder, replace(rows, labels=np.full(600, 0.5)) if what == "value" else rows)
    if what not in ("value", "file"):
        table = pq.read_table(folder / "scores.parquet")
        pq.write_table(table.drop_columns([what]), folder / "scores.parquet")
    with pytest.raises(EvaluationRefused):
        bench.judge(version, folder=folder)
    assert newest_results(bench.services, version) == {}
