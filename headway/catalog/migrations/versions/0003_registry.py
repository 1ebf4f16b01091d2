"""Models, attestations, gates, endpoints, rollouts."""

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
    optional_text,
    refers,
    text,
    unique,
)

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _models()
    _evidence()
    _endpoints()


def _models() -> None:
    mutable("model", key("model_id"), *text("pipeline", "created_by"), *integer("created_at"), refers([], "tenant"))
    append_only(
        "model_version",
        key("model_id"),
        number("version"),
        *text("manifest_digest", "run_id", "contract_hash", "feature_set"),
        *integer("feature_set_version", "created_at"),
        *text("metadata", "created_by"),
        refers(["model_id"], "model"),
        refers(["run_id"], "training_run"),
        refers(["feature_set", "feature_set_version"], "feature_set_version", ["feature_set", "version"]),
        unique("run_id", "manifest_digest"),
    )


def _evidence() -> None:
    append_only(
        "attestation",
        key("statement_digest"),
        *text("subject_digest", "predicate_type", "key_id", "role", "envelope_digest"),
        *integer("created_at"),
        refers([], "tenant"),
    )
    op.create_index(None, "attestation", ["tenant_id", "subject_digest"])
    append_only(
        "gate_policy",
        key("model_id"),
        number("policy_version"),
        *text("policy", "policy_digest", "created_by"),
        *integer("created_at"),
        refers(["model_id"], "model"),
    )
    append_only(
        "gate_result",
        key("model_id"),
        number("version"),
        key("gate"),
        number("attempt"),
        *text("verdict", "reason", "metrics"),
        *integer("policy_version"),
        *optional_text("statement_digest"),
        *text("artifact_digest"),
        *integer("at"),
        refers(["model_id", "version"], "model_version"),
        refers(["model_id", "policy_version"], "gate_policy"),
        refers(["statement_digest"], "attestation"),
        one_of("verdict", "pass", "fail", "undecided"),
    )


def _endpoints() -> None:
    mutable(
        "endpoint",
        key("endpoint_id"),
        *text("model_id"),
        *integer("contract_major"),
        *optional_integer("stable", "previous", "candidate"),
        *text("phase", "arm_salt", "budgets"),
        *integer("basis_points", "updated_at"),
        refers(["model_id"], "model"),
        refers(["model_id", "stable"], "model_version", ["model_id", "version"]),
        refers(["model_id", "previous"], "model_version", ["model_id", "version"]),
        refers(["model_id", "candidate"], "model_version", ["model_id", "version"]),
        one_of("phase", "steady", "shadow", "canary"),
        sa.CheckConstraint("basis_points BETWEEN 0 AND 10000", name="basis_points"),
        sa.CheckConstraint("(phase = 'steady') = (candidate IS NULL)", name="candidate"),
        sa.CheckConstraint("candidate IS NULL OR stable IS NULL OR candidate <> stable", name="arms"),
    )
    append_only(
        "endpoint_event",
        key("endpoint_id"),
        number("epoch"),
        *text("row", "operation", "actor", "command_key"),
        *integer("at"),
        refers(["endpoint_id"], "endpoint"),
    )
    mutable(
        "rollout",
        key("rollout_id"),
        *text("endpoint_id"),
        *integer("candidate"),
        *optional_integer("baseline"),
        *text("plan_digest", "state"),
        *integer("created_at"),
        *optional_integer("closed_at"),
        *optional_text("reason"),
        refers(["endpoint_id"], "endpoint"),
        one_of("state", "open", "promoted", "aborted", "expired"),
        sa.CheckConstraint("(state = 'open') = (closed_at IS NULL)", name="closed"),
    )
    open_only = sa.text("closed_at IS NULL")
    op.create_index(
        "uq_rollout_open",
        "rollout",
        ["tenant_id", "endpoint_id"],
        unique=True,
        postgresql_where=open_only,
        sqlite_where=open_only,
    )
