"""What every revision needs: a table whose key starts with the tenant, protected on both databases.

A batch migration on SQLite copies the table and loses its triggers: a revision that uses one calls `protect` again.
"""

from typing import Any, TypeAlias

import sqlalchemy as sa
from alembic import op

TableItem: TypeAlias = "sa.Column[Any] | sa.Constraint"

_PG_FUNCTION = """
CREATE OR REPLACE FUNCTION headway_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'append-only table %: % is refused', TG_TABLE_NAME, TG_OP; END $$
"""


def key(name: str) -> "sa.Column[str]":
    """Return a text column of the primary key."""
    return sa.Column(name, sa.Text, primary_key=True)


def number(name: str) -> "sa.Column[int]":
    """Return a whole-number column of the primary key."""
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def serial(name: str) -> "sa.Column[int]":
    """Return a whole-number column of the primary key that PostgreSQL counts (SQLite's writer counts it itself)."""
    return sa.Column(name, sa.BigInteger, sa.Identity(), primary_key=True)


def text(*names: str) -> "list[sa.Column[str]]":
    """Return required text columns."""
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def optional_text(*names: str) -> "list[sa.Column[str | None]]":
    """Return optional text columns."""
    return [sa.Column(name, sa.Text, nullable=True) for name in names]


def integer(*names: str) -> "list[sa.Column[int]]":
    """Return required int64 columns."""
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def optional_integer(*names: str) -> "list[sa.Column[int | None]]":
    """Return optional int64 columns."""
    return [sa.Column(name, sa.BigInteger, nullable=True) for name in names]


def real(*names: str) -> list[sa.Column[Any]]:
    """Return required double columns."""
    return [sa.Column(name, sa.Double, nullable=False) for name in names]


def optional_real(*names: str) -> list[sa.Column[Any]]:
    """Return optional double columns."""
    return [sa.Column(name, sa.Double, nullable=True) for name in names]


def refers(columns: list[str], table: str, target: list[str] | None = None) -> sa.ForeignKeyConstraint:
    """Return a foreign key that stays inside the tenant."""
    own = ["tenant_id", *columns]
    return sa.ForeignKeyConstraint(own, [f"{table}.{name}" for name in ["tenant_id", *(target or columns)]])


def unique(*columns: str) -> sa.UniqueConstraint:
    """Return a unique constraint inside the tenant."""
    return sa.UniqueConstraint("tenant_id", *columns)


def one_of(column: str, *values: str) -> sa.CheckConstraint:
    """Return a check that `column` holds one of `values`."""
    listed = ", ".join(f"'{value}'" for value in values)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=column)


def append_only(name: str, *items: TableItem) -> None:
    """Make a table whose rows never change."""
    _create(name, *items)
    protect(name)


def mutable(name: str, *items: TableItem) -> None:
    """Make a table whose rows move by compare-and-set on `epoch`."""
    _create(name, *items, sa.Column("epoch", sa.BigInteger, nullable=False))


def claims(name: str, *items: TableItem) -> None:
    """Make the table of claimed keys: append-only once a row has its answer, in the transaction that claimed it."""
    _create(name, *items)
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            f"CREATE TRIGGER {name}_no_update BEFORE UPDATE ON {name} FOR EACH ROW "
            "WHEN (OLD.status = 'done') EXECUTE FUNCTION headway_append_only()"
        )
        _pg_statement_trigger(name, "delete", "DELETE OR TRUNCATE")
    else:
        _sqlite_trigger(name, "update", "WHEN OLD.status = 'done'")
        _sqlite_trigger(name, "delete")


def protect(name: str) -> None:
    """Make UPDATE, DELETE and TRUNCATE of the table raise."""
    if op.get_context().dialect.name == "postgresql":
        # Statement triggers fire even when row security hides every row from the statement.
        _pg_statement_trigger(name, "update", "UPDATE")
        _pg_statement_trigger(name, "delete", "DELETE OR TRUNCATE")
    else:
        _sqlite_trigger(name, "update")
        _sqlite_trigger(name, "delete")


def prepare() -> None:
    """Make what the triggers call; the first revision does this once."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(_PG_FUNCTION)


def _create(name: str, *items: TableItem) -> None:
    op.create_table(name, sa.Column("tenant_id", sa.Text, primary_key=True), *items)
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY")
        mine = "tenant_id = current_setting('headway.tenant', true)"
        op.execute(f"CREATE POLICY tenant_isolation ON {name} USING ({mine}) WITH CHECK ({mine})")


def _pg_statement_trigger(table: str, suffix: str, events: str) -> None:
    op.execute(
        f"CREATE TRIGGER {table}_no_{suffix} BEFORE {events} ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION headway_append_only()"
    )


def _sqlite_trigger(table: str, event: str, when: str = "") -> None:
    op.execute(
        f"CREATE TRIGGER {table}_no_{event} BEFORE {event.upper()} ON {table} {when} "
        f"BEGIN SELECT RAISE(ABORT, 'append-only table {table}: {event.upper()} is refused'); END"
    )
