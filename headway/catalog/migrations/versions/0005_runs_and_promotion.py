"""What runs, registry, endpoints and predictions need to be commanded: columns, results, retirements, indexes.

Columns are added in place: no table is rebuilt, so that triggers and row security stay. Required ones carry an empty
default for SQLite's sake; no command wrote these tables before this revision.
"""

import sqlalchemy as sa
from alembic import op

from headway.catalog.migrations.support import append_only, integer, key, number, optional_integer, refers, text

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _runs()
    _results()
    _registry()
    _budgets()


def _runs() -> None:
    _add("training_run", text=("spec_digest", "datasets", "blobs"), integer=("code_dirty", "nodes", "max_attempts"))
    op.create_index(None, "training_run", ["tenant_id", "pipeline", "partition"])
    op.create_index(None, "training_run", ["tenant_id", "created_at"])
    _add("run_attempt", integer=("reserved",))
    for name, kind in (
        ("code", sa.BigInteger),
        ("worker_seconds", sa.Double),
        ("cancel_reason", sa.Text),
        ("budget_id", sa.Text),
        ("budget_period", sa.Text),
    ):
        op.add_column("run_attempt", sa.Column(name, kind, nullable=True))
    _partial("ix_run_attempt_open", "run_attempt", ["run_id"], "state IN ('queued', 'admitted', 'running')")
    for name in ("node", "node_seq"):
        op.add_column("run_event", sa.Column(name, sa.BigInteger, nullable=True))
    op.create_index(
        "uq_run_event_node", "run_event", ["tenant_id", "run_id", "attempt", "node", "node_seq"], unique=True
    )
    _partial("ix_run_event_own", "run_event", ["run_id", "seq"], "node IS NULL")


def _results() -> None:
    append_only(
        "run_result",
        key("run_id"),
        *integer("attempt"),
        *text("artifacts", "metrics"),
        *optional_integer("best_step"),
        *text("blobs"),
        *integer("at"),
        refers(["run_id", "attempt"], "run_attempt"),
    )


def _registry() -> None:
    _add("model_version", text=("kind", "contract", "as_of", "blobs"))
    append_only(
        "model_version_event",
        key("model_id"),
        number("version"),
        number("seq"),
        *text("kind", "reason", "command_key", "actor"),
        *integer("at"),
        refers(["model_id", "version"], "model_version"),
        sa.CheckConstraint("kind IN ('retired')", name="kind"),
    )
    _add("attestation", text=("blobs",))
    # Which of two came first is the order of their audit rows: their times were read before their locks.
    _add("gate_policy", text=("command_key",))
    _add("gate_result", text=("command_key",))
    op.create_index(None, "gate_result", ["tenant_id", "statement_digest"])
    for name in ("reason", "evidence", "promotion_statement"):
        op.add_column("endpoint_event", sa.Column(name, sa.Text, nullable=True))
    # A promoter's statement names endpoint and epoch: it moves an endpoint once.
    promotion = ["tenant_id", "promotion_statement"]
    op.create_index("uq_endpoint_event_promotion", "endpoint_event", promotion, unique=True)
    _add("prediction", text=("detail_digest",), integer=("detail_row",))


def _budgets() -> None:
    op.create_index(None, "budget_entry", ["tenant_id", "budget_id", "period"])


def _add(table: str, *, text: tuple[str, ...] = (), integer: tuple[str, ...] = ()) -> None:
    for name in text:
        op.add_column(table, sa.Column(name, sa.Text, nullable=False, server_default=""))
    for name in integer:
        op.add_column(table, sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    only = sa.text(where)
    op.create_index(name, table, ["tenant_id", *columns], postgresql_where=only, sqlite_where=only)
