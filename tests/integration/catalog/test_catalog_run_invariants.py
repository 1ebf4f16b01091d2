"""What `headway fsck` says of runs, budgets, registry, endpoints and predictions: nothing, until one is damaged."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.catalog_damage import damageable, take_guards_off
from support.catalog_facts import ALICE, Ticker, blob, digest
from support.registry_facts import (
    BUDGET,
    ENDPOINT,
    MODEL,
    MONTH,
    UNIT,
    ask,
    end,
    judge,
    pass_all,
    prepare_inputs,
    registered,
    run_facts,
)

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.invariants import check
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts

# The blobs are in no store here, and the damage is done past the triggers.
ASIDE = {"stored bytes", "append-only tables"}


def _populate(catalog: Catalog) -> None:
    """Two versions promoted and rolled back, answers, a failed and an open attempt on a budget, events."""
    snapshot_id = prepare_inputs(catalog)
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 1_000)
    lost = ask(catalog, run_facts(snapshot_id, seed=1, budget_id=BUDGET)).attempt
    assert lost is not None
    end(catalog, lost, "lost", worker_seconds=150.0)
    opened = catalog.restart_run(ALICE, None, lost.run_id, reserve_seconds=50).attempt
    assert opened is not None
    catalog.note_waiting(ALICE, opened.run_id, 2, opened.token, "waiting_for_quota", "no room")
    events = [{"kind": "step", "data": {"step": n}, "at": n} for n in range(3)]
    for node in (0, 1):
        catalog.append_events(ALICE, opened.run_id, 2, node, 1, events)
    for seed in (7, 8):
        version = registered(catalog, snapshot_id, seed)
        number, evidence = version.version, pass_all(catalog, version)
        catalog.promote_immediate(ALICE, None, ENDPOINT, MODEL, number, expected_epoch=None, evidence=evidence)
    catalog.rollback(ALICE, None, ENDPOINT, reason="slow")
    # What is found later does not make an earlier promotion wrong.
    judge(catalog, catalog.model_version(ALICE, MODEL, 2), "contract", "fail", look=2)
    detail = blob("detail")
    answer = PredictionFacts("p1", 5, "fresh", digest("r"), digest("q"), 0.5, "stable", "ok", 9, detail.digest, 0)
    catalog.record_predictions(ALICE, None, PredictionBatch(ENDPOINT, 1, 1, (answer,), (detail,)))


def _broken(catalog: Catalog, folder: Path) -> dict[str, str]:
    findings = check(catalog, ALICE, LocalStore(folder / "store"))
    return {f.name: f.detail for f in findings if not f.ok and f.name not in ASIDE}


def test_nothing_is_broken_where_nothing_was_damaged(catalog_url: str, tmp_path: Path) -> None:
    catalog = open_catalog(catalog_url, Ticker())
    _populate(catalog)
    assert _broken(catalog, tmp_path) == {}
    names = [(f.invariant, f.name) for f in check(catalog, ALICE, LocalStore(tmp_path / "store"))]
    assert {"I2", "I3", "I4", "I11", "I14", "I20"} <= {invariant for invariant, _ in names}
    assert len(set(names)) == len(names)
    catalog.close()


@pytest.fixture(scope="module")
def populated(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Path:
    file = tmp_path_factory.mktemp("populated") / "catalog.db"
    shutil.copy(migrated_sqlite, file)
    catalog = open_catalog(f"sqlite:///{file}", Ticker())
    _populate(catalog)
    catalog.close()
    take_guards_off(file, "uq_rollout_open")
    return file


@pytest.fixture
def damaged(populated: Path, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with damageable(populated, tmp_path) as connection:
        yield connection


@pytest.mark.parametrize(
    ("statement", "name", "why"),
    [
        ("DELETE FROM run_event WHERE node = 1 AND node_seq = 1", "run events", "2 events are numbered 2..3"),
        ("UPDATE run_event SET node_seq = 4 WHERE node = 0 AND node_seq = 3", "run events", "numbered 1..4"),
        ("UPDATE run_attempt SET state = 'failed' WHERE state = 'succeeded'", "attempts", "events say succeeded"),
        ("UPDATE run_attempt SET code = 3 WHERE state = 'lost'", "attempts", "its row says otherwise"),
        ("UPDATE run_attempt SET retry = 'free' WHERE state = 'lost'", "attempts", "its row says otherwise"),
        ("UPDATE run_attempt SET waiting = NULL", "attempts", "its row waits for None"),
        ("UPDATE run_attempt SET fencing_token = 1", "attempts", "tokens [1, 1] do not grow"),
        ("UPDATE run_attempt SET cancel_reason = 'x' WHERE state = 'admitted'", "attempts", "request to stop"),
        ("DELETE FROM run_result", "attempts", "it has no result"),
        ("UPDATE run_result SET artifacts = '{}'", "attempts", "without an artifact"),
        ("UPDATE training_run SET seed = 99 WHERE seed = 1", "attempts", "its facts have identity"),
        (
            "UPDATE run_event SET kind = 'attempt.running', payload = '{\"state\":\"running\"}' "
            "WHERE kind = 'attempt.created' AND attempt = 2",
            "attempts",
            "goes nowhere -> running",
        ),
        ("UPDATE budget SET amount = 149", "budgets", "reserved 50 and spent 150 of 149"),
        ("UPDATE budget_entry SET amount = 99 WHERE kind = 'release'", "budgets", "gave back 99"),
        (
            "INSERT INTO budget_entry SELECT tenant_id, 'x', budget_id, period, 'commit', owner_kind, owner_id, 1, 1, "
            "'k' FROM budget_entry WHERE kind = 'commit'",
            "budgets",
            "has commit, commit, release, reserve",
        ),
        (
            "INSERT INTO budget_entry SELECT tenant_id, 'x', budget_id, period, 'reserve', owner_kind, 'gone', 5, 1, "
            "'k' FROM budget_entry WHERE kind = 'commit'",
            "reservations",
            "gone holds 5 and is over",
        ),
        ("UPDATE run_attempt SET reserved = 51 WHERE state = 'admitted'", "reservations", "should hold 51"),
        ("UPDATE endpoint SET stable = 2, previous = 1", "endpoints", "its row says otherwise"),
        ("DELETE FROM endpoint_event WHERE epoch = 2", "endpoints", "epochs are not 1..2"),
        (
            "UPDATE endpoint_event SET operation = 'promote' WHERE epoch = 3",
            "rollouts",
            "epoch 3 has no promoted rollout",
        ),
        ("UPDATE endpoint_event SET operation = 'rollback' WHERE epoch = 2", "endpoints", "epoch 2 is no legal step"),
        (
            "UPDATE endpoint_event SET operation = 'rollback' WHERE epoch = 2",
            "promotion evidence",
            "2 was never promoted",
        ),
        ("DELETE FROM rollout WHERE candidate = 2", "rollouts", "epoch 2 has no promoted rollout"),
        ("UPDATE rollout SET state = 'open', closed_at = NULL", "rollouts", "2 rollouts are open"),
        ("UPDATE endpoint SET basis_points = 10001", "rollouts", "10001 basis points"),
        (
            "INSERT INTO model_version_event VALUES ('acme', 'flight_delay', 2, 1, 'retired', '', 'k', 'x', 1)",
            "served versions",
            "@2, which is retired",
        ),
        ("UPDATE blob SET state = 'doomed'", "served versions", "blobs that are not live"),
        ("UPDATE endpoint SET previous = 9", "served versions", "@9, which does not exist"),
        ("UPDATE gate_result SET verdict = 'fail' WHERE gate = 'contract'", "promotion evidence", "('fail', 1"),
        ("UPDATE gate_result SET artifact_digest = 'x' WHERE version = 2", "promotion evidence", "'x'"),
        ("UPDATE gate_result SET policy_version = 2 WHERE version = 2", "promotion evidence", "('pass', 2"),
        (
            "UPDATE attestation SET role = 'gate' WHERE role = 'promoter'",
            "promotion evidence",
            "no promoter statement",
        ),
        (
            "UPDATE attestation SET subject_digest = envelope_digest WHERE role = 'gate'",
            "promotion evidence",
            "no gate statement",
        ),
        ("UPDATE endpoint_event SET evidence = NULL WHERE epoch = 2", "promotion evidence", "no evidence"),
        ("UPDATE gate_policy SET policy = '{\"gates\":[]}'", "promotion evidence", "does not allow it"),
        (
            "INSERT INTO gate_policy SELECT tenant_id, model_id, 2, policy, policy_digest, created_by, created_at, "
            "command_key FROM gate_policy",
            "promotion evidence",
            "not in force any more",
        ),
        (
            "UPDATE gate_result SET command_key = (SELECT command_key FROM audit WHERE seq = 1) WHERE verdict = 'fail'",
            "promotion evidence",
            "gate contract: its newest result was ('fail'",
        ),
        ("UPDATE model_version SET version = 3 WHERE version = 2", "model version numbers", "2 are numbered 1..3"),
        ("UPDATE gate_result SET attempt = 7 WHERE verdict = 'fail'", "model version numbers", "numbered 1..7"),
        ("UPDATE prediction SET model_version = 2", "predictions", "arm stable was 1"),
        ("UPDATE prediction SET arm = 'candidate'", "predictions", "arm candidate was None"),
        ("DELETE FROM lineage_edge WHERE role = 'training'", "lineage edges", "(training) is missing"),
        ("DELETE FROM lineage_edge WHERE child LIKE 'training_run%'", "lineage edges", "(input) is missing"),
        (
            "UPDATE blob_ref SET owner_id = digest WHERE owner_kind = 'attestation'",
            "blob rows",
            "is not live and owned",
        ),
        (
            "UPDATE blob_ref SET owner_id = digest WHERE owner_kind = 'training_run'",
            "blob rows",
            "is not live and owned",
        ),
        (
            "UPDATE blob_ref SET owner_id = digest WHERE owner_kind = 'model_version'",
            "blob rows",
            "is not live and owned",
        ),
        (
            "UPDATE blob_ref SET owner_id = digest WHERE owner_kind = 'predictions'",
            "blob rows",
            "is not live and owned",
        ),
    ],
)
def test_damage_is_found_by_name(
    damaged: sqlite3.Connection, tmp_path: Path, statement: str, name: str, why: str
) -> None:
    assert damaged.execute(statement).rowcount > 0
    catalog = open_catalog(f"sqlite:///{tmp_path / 'catalog.db'}", Ticker())
    broken = _broken(catalog, tmp_path)
    assert name in broken, broken
    assert why in broken[name]
    catalog.close()
