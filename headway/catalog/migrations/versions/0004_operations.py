"""Predictions, labels, drift reports, retrain requests, budgets, jobs."""

import sqlalchemy as sa
from alembic import op

from headway.catalog.migrations.support import (
    append_only,
    integer,
    key,
    mutable,
    number,
    one_of,
    optional_integer,
    optional_real,
    optional_text,
    real,
    refers,
    text,
)

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _inference()
    _monitoring()
    _budgets()
    _jobs()


def _inference() -> None:
    append_only(
        "prediction",
        key("prediction_id"),
        *text("endpoint_id"),
        *integer("endpoint_epoch", "model_version"),
        *text("arm"),
        *optional_integer("feature_as_of"),
        *text("feature_status", "feature_row_digest", "request_digest", "output", "status"),
        *integer("latency_us", "at"),
        refers(["endpoint_id", "endpoint_epoch"], "endpoint_event", ["endpoint_id", "epoch"]),
        one_of("arm", "stable", "candidate", "shadow"),
    )
    op.create_index(None, "prediction", ["tenant_id", "endpoint_id", "at"])
    append_only(
        "label",
        key("prediction_id"),
        number("seq"),
        *text("source", "value"),
        *integer("observed_at", "received_at"),
        *text("actor"),
        *optional_integer("supersedes"),
        refers(["prediction_id"], "prediction"),
        one_of("source", "auto", "human", "backfill"),
    )
    mutable(
        "label_inbox",
        key("label_id"),
        *text("prediction_id", "payload", "state"),
        *integer("received_at"),
        refers([], "tenant"),
        one_of("state", "waiting", "attached", "refused"),
    )


def _monitoring() -> None:
    append_only(
        "drift_report",
        key("endpoint_id"),
        number("version"),
        key("time_window"),
        key("segment"),
        key("metric"),
        *optional_real("value", "threshold"),
        *text("verdict"),
        *integer("n"),
        *real("label_coverage"),
        *integer("at"),
        refers(["endpoint_id"], "endpoint"),
    )
    mutable(
        "retrain_request",
        key("request_id"),
        *text("model_id", "cause_digest", "evidence", "state"),
        *optional_text("run_id", "reason"),
        *integer("created_at"),
        *optional_integer("closed_at"),
        refers(["model_id"], "model"),
        refers(["run_id"], "training_run"),
        one_of("state", "open", "running", "done", "refused", "expired"),
        sa.CheckConstraint("(state IN ('open', 'running')) = (closed_at IS NULL)", name="closed"),
    )
    open_only = sa.text("closed_at IS NULL")
    op.create_index(
        "uq_retrain_request_open",
        "retrain_request",
        ["tenant_id", "model_id"],
        unique=True,
        postgresql_where=open_only,
        sqlite_where=open_only,
    )


def _budgets() -> None:
    mutable(
        "budget",
        key("budget_id"),
        key("period"),
        *text("unit"),
        *integer("amount", "created_at"),
        refers([], "tenant"),
        sa.CheckConstraint("amount >= 0", name="amount"),
    )
    append_only(
        "budget_entry",
        key("entry_id"),
        *text("budget_id", "period", "kind", "owner_kind", "owner_id"),
        *integer("amount", "at"),
        *text("command_key"),
        refers(["budget_id", "period"], "budget"),
        one_of("kind", "reserve", "commit", "release"),
    )


def _jobs() -> None:
    mutable(
        "job",
        key("queue"),
        key("job_id"),
        *integer("run_at"),
        *optional_integer("lease_until"),
        *integer("attempt"),
        *text("payload_digest", "state"),
        *optional_text("dedupe_key", "result"),
        *integer("created_at"),
        refers([], "tenant"),
        one_of("state", "ready", "leased", "done", "dead"),
    )
    open_only = sa.text("state IN ('ready', 'leased')")
    op.create_index(
        "uq_job_dedupe",
        "job",
        ["tenant_id", "queue", "dedupe_key"],
        unique=True,
        postgresql_where=open_only,
        sqlite_where=open_only,
    )
    op.create_index("ix_job_due", "job", ["tenant_id", "queue", "state", "run_at"])
