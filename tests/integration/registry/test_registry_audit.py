"""Looking back at promotions: what was signed stays signed, and what was not is found."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.catalog_facts import ALICE
from support.registry_bench import GATES, MODEL, Bench, open_bench

from headway.catalog.registry_facts import GateResultFacts, ModelVersion, PromotionEvidence
from headway.registry.audit import audit_moves, check_verdicts
from headway.registry.dossier import newest_results
from headway.registry.promote import promote, rollback
from headway.registry.statements import GATE_VERDICT, PROMOTION, record, sign_now


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path / "home", migrated_sqlite)
    yield opened
    opened.close()


def _served(bench: Bench, seed: int = 1) -> ModelVersion:
    version = bench.version(seed)
    bench.judge(version)
    promote(bench.services, bench.keyring, MODEL, MODEL, version.version)
    return version


def test_promotions_hold_also_after_others_and_a_rollback_and_a_rotation(bench: Bench) -> None:
    _served(bench, 1)
    bench.clock.now += 1_000
    bench.keyring.rotate("gate")
    bench.keyring.rotate("promoter")
    _served(bench, 2)
    rollback(bench.services, bench.keyring, MODEL, "back")
    found = audit_moves(bench.services, bench.keyring.trust())
    moves = ["delay epoch 1: delay@1", "delay epoch 2: delay@2", "delay epoch 3: delay@1 (rollback)"]
    assert [(f.subject, f.problem) for f in found] == [(move, "") for move in moves]


def test_a_rollback_that_nobody_signed_or_whose_key_was_revoked_is_found(bench: Bench) -> None:
    _served(bench, 1)
    _served(bench, 2)
    bench.services.catalog.rollback(ALICE, None, MODEL, expected_epoch=2, reason="by the catalog alone")
    *promotions, back = audit_moves(bench.services, bench.keyring.trust())
    assert {f.problem for f in promotions} == {""}
    assert (back.subject, "unsigned" in back.problem) == ("delay epoch 3: delay@1 (rollback)", True)
    bench.clock.now += 1_000
    bench.keyring.rotate("promoter")
    rollback(bench.services, bench.keyring, MODEL, "forward again")
    assert audit_moves(bench.services, bench.keyring.trust())[-1].problem == ""
    bench.keyring.revoke(bench.keyring.private_key("promoter").public.key_id)
    assert "key_revoked" in audit_moves(bench.services, bench.keyring.trust())[-1].problem


def test_a_rollback_that_was_signed_for_another_epoch_is_found(bench: Bench) -> None:
    _served(bench, 1)
    _served(bench, 2)
    rollback(bench.services, bench.keyring, MODEL, "back")
    bench.services.catalog.rollback(ALICE, None, MODEL, expected_epoch=3, reason="forward")
    bench.services.catalog.rollback(ALICE, None, MODEL, expected_epoch=4, reason="back again")
    found = [f.problem for f in audit_moves(bench.services, bench.keyring.trust())[2:]]
    assert found[0] == ""
    assert "unsigned" in found[1]
    assert "wrong_epoch" in found[2]


def test_a_revoked_key_takes_its_promotions_with_it(bench: Bench) -> None:
    _served(bench)
    bench.keyring.revoke(bench.keyring.private_key("gate").public.key_id)
    (found,) = audit_moves(bench.services, bench.keyring.trust())
    assert found.problem.count("key_revoked") == 8
    assert "promotion:" not in found.problem


def test_a_lost_envelope_is_named(bench: Bench) -> None:
    version = _served(bench)
    lost = next(a for a in bench.services.catalog.attestations(ALICE, version.manifest_digest) if a.role == "promoter")
    bench.services.store.erase(lost.envelope_digest)
    (found,) = audit_moves(bench.services, bench.keyring.trust())
    assert "promotion: it is unsigned" in found.problem
    assert lost.envelope_digest in found.problem


def test_a_move_that_only_the_catalog_believed_is_found(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    statements = {r.gate: r.statement_digest for r in newest_results(bench.services, version).values()}
    predicate = {"endpoint": "other", "epoch": 1, "gates": statements}
    envelope = sign_now(bench.keyring, "promoter", "x", version.manifest_digest, PROMOTION, predicate)
    record(bench.services, envelope, version.manifest_digest, PROMOTION, "promoter")
    evidence = PromotionEvidence(1, statements, envelope.statement_digest, bench.clock.now)
    bench.services.catalog.promote_immediate(
        ALICE, None, MODEL, MODEL, version.version, expected_epoch=0, evidence=evidence
    )
    (found,) = audit_moves(bench.services, bench.keyring.trust())
    assert "wrong_endpoint" in found.problem


def test_a_recorded_verdict_that_its_statement_does_not_say_is_found(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    trust = bench.keyring.trust()
    assert {f.problem for f in check_verdicts(bench.services, trust, version)} == {""}
    digest = version.manifest_digest
    says = {"gate": "contract", "verdict": "fail", "model": MODEL, "version": version.version}
    envelope = sign_now(bench.keyring, "gate", "delay@1", digest, GATE_VERDICT, says)
    record(bench.services, envelope, digest, GATE_VERDICT, "gate")
    facts = GateResultFacts(MODEL, 1, "contract", "pass", "trust me", {}, 1, envelope.statement_digest, digest)
    bench.services.catalog.record_gate_result(ALICE, None, facts)
    problems = {f.subject: f.problem for f in check_verdicts(bench.services, trust, version) if f.problem}
    assert list(problems) == ["gate contract"]
    assert "its statement says" in problems["gate contract"]


class _Killed(Exception):
    pass


def test_a_verdict_that_was_signed_and_not_recorded_is_found_and_recorded_by_the_next_judgement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = bench.version()

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(bench.services.catalog, "record_gate_result", killed)
        with pytest.raises(_Killed):
            bench.judge(version, {"candidate": 0.2})
    (found,) = audit_moves(bench.services, bench.keyring.trust())
    assert found.subject.startswith("delay@1: gate statement sha256:")
    assert "not recorded" in found.problem
    bench.judge(version)
    assert audit_moves(bench.services, bench.keyring.trust()) == []
    results = bench.services.catalog.gate_results(ALICE, MODEL, 1)
    assert [r.verdict for r in results if r.gate == GATES[0]] == ["fail", "pass"]
