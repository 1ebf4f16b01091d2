"""Migrations: one schema on both databases, safe to run at once, append-only, behind the tenant wall."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError
from support.catalog_child import exit_code
from support.catalog_facts import ALICE, MALLORY, Ticker, delivery
from support.postgres import Postgres

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog, tables
from headway.catalog.catalog import Catalog
from headway.catalog.database import Database
from headway.catalog.errors import CatalogUnavailable, SchemaTooNew, UnknownTenant, UnsupportedDatabase
from headway.catalog.invariants import check, triggers_missing

NEEDED = tables.APPEND_ONLY | tables.MUTABLE


def test_the_migrations_make_what_the_commands_expect(catalog_url: str) -> None:
    catalog = open_catalog(catalog_url)
    with catalog.database.plain() as connection:
        wanted = tables.metadata.tables.keys()
        context = MigrationContext.configure(
            connection, opts={"include_object": lambda item, name, kind, *_: kind != "table" or name in wanted}
        )
        assert compare_metadata(context, tables.metadata) == []
        assert set(sa.inspect(connection).get_table_names()) == NEEDED | {"alembic_version"}
    catalog.close()


def test_the_known_head_is_the_last_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(tables.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [tables.HEAD]


def test_every_table_is_keyed_by_tenant_first_and_named_by_the_convention(catalog_url: str) -> None:
    catalog = open_catalog(catalog_url)
    with catalog.database.plain() as connection:
        inspector = sa.inspect(connection)
        for name in NEEDED:
            key = inspector.get_pk_constraint(name)
            assert key["constrained_columns"][0] == "tenant_id", name
            assert key["name"] == f"pk_{name}"
            for constraint in inspector.get_foreign_keys(name):
                assert constraint["name"]
                assert constraint["constrained_columns"][0] == "tenant_id", name
    catalog.close()


def test_update_delete_and_truncate_of_a_fact_raise(catalog_url: str) -> None:
    catalog = open_catalog(catalog_url, Ticker())
    catalog.ensure_tenant(ALICE)
    catalog.register_version(ALICE, None, delivery())
    for table in sorted(tables.APPEND_ONLY):
        if catalog.database.dialect == "sqlite":
            _fill(Path(catalog_url.removeprefix("sqlite:///")), table)
        attempts = [f"UPDATE {table} SET tenant_id = 'other'", f"DELETE FROM {table}"]
        if catalog.database.dialect == "postgresql":
            attempts.append(f"TRUNCATE {table} CASCADE")
        for attempt in attempts:
            with (
                pytest.raises(DBAPIError, match="append-only"),
                catalog.database.write("acme", "rewrite") as connection,
            ):
                connection.execute(sa.text(attempt))
    with catalog.database.plain() as connection:
        assert triggers_missing(connection, catalog.database.dialect) == []
    catalog.close()


def _fill(file: Path, table: str) -> None:
    """Put one row into a table whatever its constraints say: SQLite's triggers fire only where there is a row."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints=ON")
    columns = connection.execute(f"SELECT name, type FROM pragma_table_info('{table}')").fetchall()
    # `done` matters for the answered keys, which alone may change before they are answered.
    values = ["done" if name == "status" else "x" if kind == "TEXT" else 77 for name, kind in columns]
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
    connection.close()


def test_sqlite_cannot_replace_a_fact(tmp_path: Path) -> None:
    catalog = open_catalog(f"sqlite:///{tmp_path / 'catalog.db'}", Ticker())
    catalog.ensure_tenant(ALICE)
    catalog.register_version(ALICE, None, delivery())
    for table in ("audit", "blob_ref", "dataset_event", "dataset_version", "idempotency", "lineage_edge", "outbox"):
        replace = sa.text(f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}")
        with pytest.raises(DBAPIError, match="append-only"), catalog.database.write("acme", "rewrite") as connection:
            connection.execute(replace)
    catalog.close()


def test_a_missing_trigger_is_found(catalog_url: str, tmp_path: Path) -> None:
    catalog = open_catalog(catalog_url, Ticker())
    catalog.ensure_tenant(ALICE)
    on = " ON audit" if catalog.database.dialect == "postgresql" else ""
    with catalog.database.write("acme", "damage") as connection:
        connection.execute(sa.text(f"DROP TRIGGER audit_no_delete{on}"))
    found = {f.name: f for f in check(catalog, ALICE, LocalStore(tmp_path / "store")) if not f.ok}
    assert list(found) == ["append-only tables"]
    assert "audit.delete" in found["append-only tables"].detail
    catalog.close()


def _open_and_register(url: str, number: int) -> None:
    catalog = open_catalog(url, Ticker())
    catalog.ensure_tenant(ALICE)
    catalog.register_version(ALICE, None, delivery(partition=f"p{number}"))
    catalog.close()


def test_several_processes_may_open_an_empty_database_at_once(empty_database_url: str, tmp_path: Path) -> None:
    codes: list[int | None] = []
    threads = [
        threading.Thread(target=lambda n=n: codes.append(exit_code(_open_and_register, empty_database_url, n)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == [0, 0, 0, 0]
    catalog = open_catalog(empty_database_url, Ticker())
    assert [v.version for v in catalog.versions(ALICE, "flights")] == [1, 2, 3, 4]
    catalog.close()


def test_a_database_of_newer_code_is_refused(catalog_url: str) -> None:
    database = Database(catalog_url)
    with database.migrating() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(SchemaTooNew, match="9999"):
        open_catalog(catalog_url)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "nonsense", "/tmp/x.db"])
def test_other_databases_are_refused_by_name(url: str) -> None:
    with pytest.raises(UnsupportedDatabase, match="use sqlite:///<path> or postgresql://"):
        open_catalog(url)


def test_sqlite_is_durable_and_strict(tmp_path: Path) -> None:
    catalog = open_catalog(f"sqlite:///{tmp_path / 'new folder' / 'c%41.db'}")
    with catalog.database.plain() as connection:
        told = {
            name: connection.execute(sa.text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "recursive_triggers")
        }
    assert told == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "recursive_triggers": 1}
    catalog.close()


def _two_tenants(url: str) -> Catalog:
    catalog = open_catalog(url, Ticker())
    catalog.ensure_tenant(ALICE)
    catalog.ensure_tenant(MALLORY)
    catalog.register_version(ALICE, "k", delivery())
    catalog.register_version(MALLORY, "k", delivery(content=2))
    return catalog


def test_a_file_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    with closing(open_catalog(f"sqlite:///{tmp_path}/c.db")) as catalog:
        catalog.ensure_tenant(ALICE)
        for file in tmp_path.glob("c.db*"):
            file.rename(tmp_path / f"away-{file.name}")
        for use in (lambda: catalog.endpoints(ALICE), lambda: catalog.ensure_tenant(MALLORY)):
            with pytest.raises(CatalogUnavailable, match=r"there is no .*c\.db"):
                use()
        assert not (tmp_path / "c.db").exists()
        for file in tmp_path.glob("away-*"):
            file.rename(tmp_path / file.name.removeprefix("away-"))
        assert catalog.endpoints(ALICE) == []


def test_tenants_share_names_keys_and_nothing_else(catalog_url: str, tmp_path: Path) -> None:
    catalog = _two_tenants(catalog_url)
    assert [v.content_digest for v in catalog.versions(ALICE, "flights")] == [delivery().content_digest]
    assert [v.content_digest for v in catalog.versions(MALLORY, "flights")] == [delivery(content=2).content_digest]
    assert {row.actor for row in catalog.audit_rows(ALICE)} == {"alice"}
    assert len(catalog.blobs(MALLORY)) == 1
    with pytest.raises(UnknownTenant):
        catalog.register_version(type(ALICE)("nobody", "x"), "k", delivery())
    catalog.close()


def test_row_security_stands_when_the_tenant_predicate_is_forgotten(postgres: Postgres, migrated_postgres: str) -> None:
    url = postgres.fresh_database(migrated_postgres)
    catalog = _two_tenants(url)
    every = sa.select(tables.dataset_version.c.tenant_id)
    with catalog.database.plain() as connection:
        assert connection.execute(every).all() == []
    with catalog.database.read("acme") as connection:
        assert connection.execute(every).scalars().all() == ["acme"]
    forged = sa.insert(tables.dataset).values(
        tenant_id="rival", dataset_id="x", created_at=1, created_by="alice", epoch=1
    )
    with pytest.raises(DBAPIError, match="row-level security"), catalog.database.write("acme", "forge") as connection:
        connection.execute(forged)
    with catalog.database.write("acme", "forge") as connection:
        touched = connection.execute(
            sa.update(tables.dataset).where(tables.dataset.c.tenant_id == "rival").values(epoch=9)
        )
        assert touched.rowcount == 0
    catalog.close()
    postgres.drop_database(url)


def test_a_frozen_server_is_given_up_on(postgres: Postgres, migrated_postgres: str) -> None:
    url = postgres.fresh_database(migrated_postgres)
    database = Database(url, answer_seconds=1.0)
    with database.read("acme") as connection:
        backend = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
    os.kill(backend, signal.SIGSTOP)
    try:
        with pytest.raises(CatalogUnavailable), database.read("acme") as connection:
            connection.execute(sa.text("SELECT 1"))
    finally:
        os.kill(backend, signal.SIGCONT)
    with database.read("acme") as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
    database.close()
    postgres.drop_database(url)


def test_opening_the_package_does_not_import_the_database_layer() -> None:
    program = (
        "import sys, headway.catalog, headway.artifacts.manifest\n"
        "print('sqlalchemy' in sys.modules, 'alembic' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    told = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]
