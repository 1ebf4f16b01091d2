"""A model answers only by a promotion that was signed for its endpoint and epoch; a broken signature is told."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.serving_bench import DAYS, opened, pipeline_of, requests_for
from support.serving_model import GATES, Served, asked, judge, keys_of, register, snapshot_of
from support.workbench import Workbench

from headway.catalog.registry_facts import AttestationFacts, GateResultFacts, ModelVersion, PromotionEvidence
from headway.cli.main import main
from headway.registry.evidence import collect_evidence
from headway.registry.promote import promote, rollback
from headway.registry.statements import PROMOTION, record, sign_now
from headway.services import Services
from headway.serving.predict import endpoint_target, predict
from trainer.blobs import digest_bytes

pytestmark = pytest.mark.usefixtures("served", "scored_here")


def _second(bench: Workbench, services: Services) -> ModelVersion:
    """A second version, judged and not promoted."""
    version = register(services, pipeline_of(bench), [snapshot_of(bench, DAYS[0])], seed=1)
    judge(bench, services, version)
    return version


def _move(bench: Workbench, services: Services, version: ModelVersion, statement: str) -> None:
    """Promote in the catalog alone, which cannot tell a signature from any other bytes."""
    first = services.catalog.model_version(services.principal, "pipeline", 1)
    evidence = collect_evidence(services, keys_of(bench).trust(), version, services.catalog.clock(), first)
    given = PromotionEvidence(evidence.policy_version, evidence.statements, statement, evidence.verified_at)
    services.catalog.promote_immediate(
        services.principal, None, "pipeline", "pipeline", version.version, expected_epoch=1, evidence=given
    )


def _attested(services: Services, version: ModelVersion, role: Any) -> str:  # noqa: ANN401
    """A statement that nobody signed."""
    envelope = services.store.put_bytes(f"{role} says so".encode())
    statement = digest_bytes(f"statement of {role}".encode())
    facts = AttestationFacts(statement, version.manifest_digest, PROMOTION, "key", role, envelope.digest, (envelope,))
    services.catalog.add_attestation(services.principal, None, facts)
    return statement


def _forge_row(bench: Workbench) -> None:
    with opened(bench) as services:
        _second(bench, services)
    with sqlite3.connect(bench.home / "catalog.db") as database:
        assert database.execute("UPDATE endpoint SET stable = 2").rowcount == 1


def _make_up(bench: Workbench) -> None:
    with opened(bench) as services:
        version = _second(bench, services)
        _move(bench, services, version, _attested(services, version, "promoter"))


def _sign_for_another_epoch(bench: Workbench) -> None:
    with opened(bench) as services:
        version = _second(bench, services)
        evidence = collect_evidence(services, keys_of(bench).trust(), version, services.catalog.clock())
        says = {"endpoint": "pipeline", "epoch": 3, "gates": dict(evidence.statements)}
        envelope = sign_now(keys_of(bench), "promoter", "pipeline@2", version.manifest_digest, PROMOTION, says)
        record(services, envelope, version.manifest_digest, PROMOTION, "promoter")
        _move(bench, services, version, envelope.statement_digest)


def _sign_as_a_gate(bench: Workbench) -> None:
    with opened(bench) as services:
        version = _second(bench, services)
        evidence = collect_evidence(services, keys_of(bench).trust(), version, services.catalog.clock())
        says = {"endpoint": "pipeline", "epoch": 2, "gates": dict(evidence.statements)}
        envelope = sign_now(keys_of(bench), "gate", "pipeline@2", version.manifest_digest, PROMOTION, says)
        record(services, envelope, version.manifest_digest, PROMOTION, "promoter")
        _move(bench, services, version, envelope.statement_digest)


def _revoke(bench: Workbench, role: Any = "promoter") -> None:  # noqa: ANN401
    keys = keys_of(bench)
    keys.revoke(keys.private_key(role).public.key_id)


def _lose_keys(bench: Workbench) -> None:
    shutil.rmtree(bench.home / "keys")


def _lose_statement(bench: Workbench) -> None:
    with opened(bench) as services:
        manifest = services.catalog.model_version(services.principal, "pipeline", 1).manifest_digest
        listed = services.catalog.attestations(services.principal, manifest)
        services.store.erase(next(a.envelope_digest for a in listed if a.role == "promoter"))


def _one(served: Served, folder: Path) -> Path:
    row = served.stored.column("k").to_pylist().index("a")
    pq.write_table(requests_for(pipeline_of(served.bench), served.stored).slice(row, 1), folder / "one.parquet")
    return folder / "one.parquet"


def _recorded(bench: Workbench) -> tuple[int, int]:
    with opened(bench) as services:
        blobs = sum(1 for path in services.store.root.rglob("*") if path.is_file())
        return len(services.catalog.prediction_ids(services.principal, "")), blobs


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_forge_row, "pipeline@2 was never promoted to endpoint 'pipeline'"),
        (_make_up, "endpoint 'pipeline': signed statement refused (not_json)"),
        (_sign_for_another_epoch, "wrong_epoch"),
        (_sign_as_a_gate, "wrong_role"),
        (_revoke, "key_revoked"),
        (_lose_keys, "unknown_key"),
        (_lose_statement, "sha256:"),
    ],
)
def test_a_promotion_that_does_not_verify_never_answers(
    served: Served, tmp_path: Path, spoil: Callable[[Workbench], None], said: str
) -> None:
    bench = served.copied(tmp_path / "bench")
    spoil(bench)
    before = _recorded(bench)
    result = asked(bench, _one(served, tmp_path))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert said in line
    assert "; " in line, "a remedy follows"
    assert (result.stdout, _recorded(bench)) == ("", before)


def test_after_a_rollback_the_old_promotion_answers_and_explains(served: Served, tmp_path: Path) -> None:
    bench = served.copied(tmp_path / "bench")
    requests = requests_for(pipeline_of(bench), served.stored).slice(0, 1)
    with opened(bench) as services:
        version = _second(bench, services)
        promote(services, keys_of(bench), "pipeline", "pipeline", version.version)
        rollback(services, keys_of(bench), "pipeline", "worse on Mondays")
        target = endpoint_target(services, keys_of(bench).trust(), "pipeline")
        (answer,) = predict(services, pipeline_of(bench), requests, target)
    assert (answer.model_version, answer.endpoint_epoch) == (1, 3)
    told = bench.run("explain", str(answer.prediction_id), "-p", str(bench.folder), "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["endpoint_event"]["operation"] == "rollback"
    fsck = _signed_finding(bench)
    assert (fsck["ok"], "each of 3" in fsck["detail"]) == (True, True)


def _fake_verdict(bench: Workbench) -> None:
    """The newest verdict is one that nobody signed; the promotion rests on older ones."""
    with opened(bench) as services:
        version = services.catalog.model_version(services.principal, "pipeline", 1)
        services.catalog.record_gate_result(
            services.principal,
            None,
            GateResultFacts(
                model_id="pipeline",
                version=1,
                gate="contract",
                verdict="pass",
                reason="trust me",
                metrics={},
                policy_version=1,
                statement_digest=_attested(services, version, "gate"),
                artifact_digest=version.manifest_digest,
            ),
        )


@pytest.mark.parametrize(
    ("spoil", "places", "said"),
    [
        (lambda bench: _revoke(bench, "gate"), [f"gate {g} of pipeline@1" for g in GATES], "key_revoked"),
        (_revoke, ["promotion of pipeline@1"], "key_revoked"),
        (_lose_keys, ["promotion of pipeline@1", *(f"gate {g} of pipeline@1" for g in GATES)], "unknown_key"),
        (_fake_verdict, ["gate contract of pipeline@1"], "not_json"),
    ],
)
def test_a_signature_that_does_not_verify_fails_the_explanation(
    served: Served, tmp_path: Path, spoil: Callable[[Workbench], None], places: list[str], said: str
) -> None:
    bench = served.copied(tmp_path / "bench")
    spoil(bench)
    told = bench.run("explain", served.answers[0]["prediction_id"], "-p", str(bench.folder), "--json")
    assert told.exit_code == 1, told.output
    problems = json.loads(told.stdout)["problems"]
    assert [p["place"] for p in problems] == places
    assert all(said in p["message"] for p in problems), problems


def test_a_lost_statement_fails_the_explanation_by_its_digest(served: Served, tmp_path: Path) -> None:
    bench = served.copied(tmp_path / "bench")
    _lose_statement(bench)
    told = bench.run("explain", served.answers[0]["prediction_id"], "-p", str(bench.folder))
    assert told.exit_code == 1
    problems = [line for line in told.output.splitlines() if line.startswith("PROBLEM")]
    assert len(problems) == 2, problems
    assert "statement sha256:" in problems[0]
    assert "promotion of pipeline@1: it is unsigned" in problems[1]


def _signed_finding(bench: Workbench) -> dict[str, Any]:
    findings = json.loads(bench.run("fsck", "--json").stdout)["findings"]
    (found,) = [f for f in findings if f["name"] == "promotions and rollbacks are signed"]
    assert set(found) == {"invariant", "name", "ok", "detail"}
    assert found["invariant"] == "I4"
    return found


def test_fsck_checks_the_signatures_of_promotions(served: Served, tmp_path: Path) -> None:
    assert _signed_finding(served.bench)["ok"]
    bench = served.copied(tmp_path / "bench")
    _sign_for_another_epoch(bench)
    found = _signed_finding(bench)
    assert not found["ok"]
    assert found["detail"].startswith("1 broken: pipeline epoch 2: pipeline@2: promotion: ")
    assert "wrong_epoch" in found["detail"]
    _revoke(bench, "gate")
    assert "2 broken: pipeline epoch 1: pipeline@1: gate contract: " in _signed_finding(bench)["detail"]
    (bench.home / "keys" / "public.json").write_text("{}")
    told = bench.run("fsck")
    assert told.exit_code == 1
    assert "BROKEN  I4    promotions and rollbacks are signed  public keys: expected an object" in told.output


def test_fsck_of_a_home_without_keys_and_promotions_is_in_order(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["fsck"], env={"HEADWAY_HOME": str(tmp_path)})
    assert told.exit_code == 0, told.output
    assert "ok      I4    promotions and rollbacks are signed  nothing was ever promoted" in told.output
    assert not (tmp_path / "keys").exists()


ROW: dict[str, Any] = {"k": "a", "size": 4, "note": "x", "starts": "2026-03-04T10:00:00Z"}


def test_field_F07_order_and_missing_optional_columns_change_no_answer(served: Served, tmp_path: Path) -> None:
    """Asked as a dry look, which stays possible where the promotion does not verify, and says that it is one."""
    bench = served.copied(tmp_path / "bench")
    _revoke(bench)
    rows = [ROW, dict(reversed(ROW.items())), {n: v for n, v in ROW.items() if n != "note"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    looked = asked(bench, tmp_path / "rows.json", "--version", "pipeline@1", "--output", str(tmp_path / "out.json"))
    assert looked.exit_code == 0, looked.output
    assert "a dry look: no promotion was checked" in looked.output
    answers = json.loads((tmp_path / "out.json").read_text())["predictions"]
    assert len({a["probability"] for a in answers}) == 1
    assert [a["recorded"] for a in answers] == [False] * 3


_REFUSED: list[tuple[str, str]] = [
    (json.dumps([ROW, {**ROW, "dest": 1}]), "row 2, 'dest': is no field of a request"),
    (json.dumps([ROW, {**ROW, "Size": 1}]), "row 2, 'Size': is no field of a request"),
    (json.dumps([ROW, {n: v for n, v in ROW.items() if n != "size"}]), "row 2, size: the required field is missing"),
    (json.dumps([ROW]).replace('"size": 4', '"size": 4, "size": 4'), "row 1, 'size': the field stands twice"),
    (json.dumps([{**ROW, "": 1}]), "row 1, '': is no field of a request"),
    (json.dumps([list(ROW.values())]), "row 1: a list where an object belongs"),
]


@pytest.mark.parametrize(("text", "said"), _REFUSED)
def test_field_F07_every_other_set_of_columns_is_refused_by_name(
    served: Served, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "rows.json").write_text(text)
    before = _recorded(served.bench)
    result = asked(served.bench, tmp_path / "rows.json")
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
    assert _recorded(served.bench) == before
