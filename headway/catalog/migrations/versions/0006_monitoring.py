"""Predictions in time, shipped segments, labels and their inbox, reports, retraining.

The tables that revision 0004 made for labels, reports and requests were never written by a command: they are made anew
in the form that the commands need. `prediction` gets its columns in place, so that its triggers and row security stay.
"""

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
    refers,
    text,
    unique,
)

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("label", "label_inbox", "drift_report", "retrain_request"):
        op.drop_table(name)
    _predictions()
    _labels()
    _reports()
    _retraining()


def _predictions() -> None:
    for name, kind in (
        ("asked_at", sa.BigInteger),
        ("observed_at", sa.BigInteger),
        ("caller_id", sa.Text),
        ("event_key", sa.Text),
        ("score", sa.Double),
        ("log_server", sa.Text),
        ("log_segment", sa.Text),
    ):
        op.add_column("prediction", sa.Column(name, kind, nullable=True))
    for name, default in (("segments", "{}"), ("source", "batch")):
        op.add_column("prediction", sa.Column(name, sa.Text, nullable=False, server_default=default))
    for name in ("asked_at", "caller_id", "event_key"):
        op.create_index(None, "prediction", ["tenant_id", "endpoint_id", name])
    append_only(
        "inference_segment",
        key("server"),
        key("segment"),
        number("from_offset"),
        *integer("to_offset", "records", "torn", "dropped", "at"),
        *text("command_key"),
        refers([], "tenant"),
        sa.CheckConstraint("to_offset > from_offset", name="range"),
    )


def _labels() -> None:
    facts = ("endpoint_id", "address_kind", "address", "value", "source", "actor")
    append_only(
        "label",
        key("label_id"),
        *text("prediction_id", *facts),
        *integer("observed_at", "received_at", "at"),
        *optional_text("reason"),
        *text("command_key"),
        refers(["prediction_id"], "prediction"),
        one_of("source", "auto", "human", "backfill"),
        one_of("address_kind", "prediction_id", "caller_id", "event_key"),
    )
    op.create_index(None, "label", ["tenant_id", "prediction_id"])
    mutable(
        "label_inbox",
        key("label_id"),
        *text(*facts),
        *integer("observed_at", "received_at", "at"),
        *optional_text("reason"),
        *text("waiting_for", "state"),
        refers(["endpoint_id"], "endpoint"),
        one_of("source", "auto", "human", "backfill"),
        one_of("address_kind", "prediction_id", "caller_id", "event_key"),
        one_of("waiting_for", "no_prediction", "ambiguous"),
        one_of("state", "waiting", "attached"),
    )
    waiting = sa.text("state = 'waiting'")
    op.create_index(
        "ix_label_inbox_waiting",
        "label_inbox",
        ["tenant_id", "endpoint_id", "address_kind", "address"],
        postgresql_where=waiting,
        sqlite_where=waiting,
    )


def _reports() -> None:
    append_only(
        "report",
        key("report_id"),
        *text("kind", "endpoint_id"),
        *integer("version"),
        *text("time_window"),
        *integer("seq", "start_at", "end_at"),
        *text("verdict", "reason", "document_digest", "metrics", "blobs"),
        *integer("made_at", "created_at"),
        *text("command_key"),
        refers(["endpoint_id"], "endpoint"),
        one_of("kind", "quality", "drift", "labels", "predictions"),
        unique("endpoint_id", "kind", "version", "time_window", "seq"),
    )


def _retraining() -> None:
    mutable(
        "retrain_request",
        key("request_id"),
        *text("pipeline", "endpoint_id", "facts", "state", "reason"),
        *optional_text("as_of", "run_id", "dagster_run_id"),
        *optional_integer("candidate_version"),
        *optional_real("cost_seconds"),
        *integer("created_at"),
        *optional_integer("closed_at"),
        refers(["endpoint_id"], "endpoint"),
        refers(["run_id"], "training_run"),
        one_of(
            "state",
            "waiting_for_evaluation_window",
            "waiting_for_approval",
            "ready",
            "running",
            "needs_human",
            "promoted",
            "kept_old",
            "failed",
            "rejected",
            "expired",
        ),
        sa.CheckConstraint(
            "(state IN ('promoted', 'kept_old', 'failed', 'rejected', 'expired')) = (closed_at IS NOT NULL)",
            name="closed",
        ),
    )
    op.create_index(None, "retrain_request", ["tenant_id", "pipeline", "created_at"])
    open_only = sa.text("closed_at IS NULL")
    op.create_index(
        "uq_retrain_request_open",
        "retrain_request",
        ["tenant_id", "pipeline"],
        unique=True,
        postgresql_where=open_only,
        sqlite_where=open_only,
    )
    append_only(
        "retrain_event",
        key("request_id"),
        number("epoch"),
        *text("row", "command_key", "actor"),
        *integer("at"),
        refers(["request_id"], "retrain_request"),
    )
    append_only(
        "retrain_decision",
        key("pipeline"),
        number("seq"),
        *text("endpoint_id", "decision", "reason", "fingerprint"),
        *integer("made_at", "at"),
        *text("command_key", "actor"),
        refers([], "tenant"),
    )
