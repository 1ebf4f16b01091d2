"""What `headway fsck` says of shipments, labels, reports and retraining: nothing, until one is damaged."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from support.catalog_damage import damageable, take_guards_off
from support.catalog_facts import ALICE, Ticker
from support.catalog_monitoring import (
    LIMIT,
    PERIOD,
    answer,
    decision,
    label,
    report_facts,
    retrain_facts,
    shipment,
)
from support.registry_facts import BUDGET, UNIT

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog, tables
from headway.catalog.catalog import Catalog
from headway.catalog.database import Database
from headway.catalog.invariants import check, triggers_missing

# The blobs are in no store here, and the damage is done past the triggers.
ASIDE = {"stored bytes", "append-only tables"}


def _populate(catalog: Catalog) -> None:
    """Two ranges of a segment, labels attached at once (l1), after waiting (l3) and not yet (l4), two requests."""
    catalog.add_labels(ALICE, None, (label("l3", None, caller_id="caller-p3"), label("l4", "p9")))
    catalog.record_shipment(ALICE, None, shipment(answer("p1"), answer("p2")))
    catalog.record_shipment(ALICE, None, shipment(answer("p3"), start=100, end=150))
    catalog.add_labels(ALICE, None, (label("l1"), label("l2", source="human", value=False)))
    evidence = catalog.record_report(ALICE, None, report_facts())
    catalog.record_report(ALICE, None, report_facts(name=2))
    for what in ("wait", "retrain"):
        catalog.note_decision(ALICE, None, decision(what))
    catalog.set_budget(ALICE, None, BUDGET, PERIOD, UNIT, LIMIT)
    first = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence))
    catalog.move_retrain(ALICE, None, first.request_id, expected_epoch=1, state="rejected", reason="no need")
    catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, 2))


def _broken(catalog: Catalog, folder: Path) -> dict[str, str]:
    findings = check(catalog, ALICE, LocalStore(folder / "store"))
    return {f.name: f.detail for f in findings if not f.ok and f.name not in ASIDE}


def test_nothing_is_broken_where_nothing_was_damaged(served_url: str, tmp_path: Path) -> None:
    catalog = open_catalog(served_url, Ticker())
    _populate(catalog)
    assert _broken(catalog, tmp_path) == {}
    names = {(f.invariant, f.name) for f in check(catalog, ALICE, LocalStore(tmp_path / "store"))}
    assert {("I1", "retrain requests"), ("I12", "shipped answers"), ("I13", "label inbox")} <= names
    catalog.close()


@pytest.fixture(scope="module")
def populated(tmp_path_factory: pytest.TempPathFactory, served_sqlite: Path) -> Path:
    file = tmp_path_factory.mktemp("populated") / "catalog.db"
    shutil.copy(served_sqlite, file)
    catalog = open_catalog(f"sqlite:///{file}", Ticker())
    _populate(catalog)
    catalog.close()
    take_guards_off(file, "uq_retrain_request_open")
    return file


@pytest.fixture
def damaged(populated: Path, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with damageable(populated, tmp_path) as connection:
        yield connection


@pytest.mark.parametrize(
    ("statement", "name", "why"),
    [
        ("UPDATE inference_segment SET records = 3", "shipped answers", "6 answers were shipped, 3 are recorded"),
        ("DELETE FROM inference_segment WHERE from_offset = 0", "shipped answers", "begins at 100, 0 was reached"),
        ("DELETE FROM prediction WHERE prediction_id = 'p2'", "shipped answers", "3 answers were shipped, 2"),
        ("UPDATE prediction SET log_segment = '9' WHERE prediction_id = 'p2'", "shipped answers", "main/9: 0 answers"),
        ("UPDATE label SET prediction_id = 'p2' WHERE label_id = 'l1'", "attached labels", "which has another"),
        ("UPDATE label SET address = 'caller-p1' WHERE label_id = 'l3'", "attached labels", "label l3: caller_id"),
        ("UPDATE label_inbox SET state = 'waiting' WHERE label_id = 'l3'", "label inbox", "waiting in the inbox, att"),
        ("DELETE FROM label WHERE label_id = 'l3'", "label inbox", "l3: attached in the inbox, not attached"),
        ("UPDATE label SET value = '1' WHERE label_id = 'l3'", "label inbox", "other content"),
        ("UPDATE label_inbox SET address = 'p2' WHERE label_id = 'l4'", "label inbox", "it waits, and prediction p2"),
        ("UPDATE report SET seq = 3 WHERE seq = 2", "report numbers", "2 are numbered 1..3"),
        ("DELETE FROM retrain_decision WHERE seq = 1", "report numbers", "1 are numbered 2..2"),
        ("UPDATE retrain_request SET reason = 'x' WHERE epoch = 2", "retrain requests", "or other facts"),
        ("DELETE FROM retrain_event WHERE epoch = 1", "retrain requests", "its moves have epochs [2]"),
        (
            "UPDATE retrain_event SET row = replace(row, '\"rejected\"', '\"promoted\"')",
            "retrain requests",
            "goes ready -> promoted",
        ),
        (
            "UPDATE retrain_request SET state = 'ready', closed_at = NULL",
            "retrain requests",
            "2 retrain requests are open",
        ),
        ("UPDATE retrain_request SET request_id = 'x' WHERE epoch = 1", "retrain requests", "its cause is that of"),
        (
            "DELETE FROM budget_entry WHERE kind <> 'reserve'",
            "reservations",
            "holds 300 and is over",
        ),
        (
            "DELETE FROM budget_entry WHERE owner_id LIKE 'retrain:%' AND owner_id NOT IN "
            "(SELECT owner_id FROM budget_entry WHERE kind = 'release')",
            "reservations",
            "should hold 300 and holds nothing",
        ),
        ("DELETE FROM blob_ref WHERE owner_kind = 'report'", "blob rows", "is not live and owned by it"),
    ],
)
def test_damage_is_found_by_name(
    damaged: sqlite3.Connection, tmp_path: Path, statement: str, name: str, why: str
) -> None:
    assert damaged.execute(statement).rowcount > 0
    catalog = open_catalog(f"sqlite:///{tmp_path / 'catalog.db'}")
    broken = _broken(catalog, tmp_path)
    catalog.close()
    assert why in broken[name], broken


def test_answers_recorded_before_this_revision_stay_and_stay_protected(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    database = Database(f"sqlite:///{file}")
    config = Config()
    config.set_main_option("script_location", str(Path(tables.__file__).parent / "migrations"))
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
    database.close()
    old = sqlite3.connect(file, isolation_level=None)
    columns = old.execute("SELECT name, type FROM pragma_table_info('prediction')").fetchall()
    values = ["acme" if name == "tenant_id" else "stable" if kind == "TEXT" else 7 for name, kind in columns]
    old.execute(f"INSERT INTO prediction VALUES ({', '.join('?' * len(values))})", values)
    old.close()
    catalog = open_catalog(f"sqlite:///{file}", Ticker())
    with catalog.database.read("acme") as connection:
        [row] = connection.execute(sa.select(tables.prediction)).all()
        assert (row.at, row.source, row.segments, row.asked_at, row.log_server) == (7, "batch", "{}", None, None)
        assert triggers_missing(connection, "sqlite") == []
    catalog.close()
