"""Training runs, attempts, run events, checkpoints."""

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

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    append_only(
        "training_run",
        key("run_id"),
        *text("identity_digest", "pipeline", "partition", "inputs"),
        *optional_text("snapshot_id"),
        *text("code_digest", "environment_digest", "config_digest"),
        *integer("seed", "repeat"),
        *text("layout"),
        *optional_text("budget_id", "dagster_run_id", "note"),
        *integer("created_at"),
        *text("created_by"),
        refers([], "tenant"),
        refers(["snapshot_id"], "feature_snapshot"),
        unique("identity_digest"),
    )
    append_only(
        "run_event",
        key("run_id"),
        number("seq"),
        *optional_integer("attempt"),
        *text("kind", "payload", "command_key", "actor"),
        *integer("at"),
        refers(["run_id"], "training_run"),
    )
    mutable(
        "run_attempt",
        key("run_id"),
        number("attempt"),
        *integer("fencing_token"),
        *text("layout", "launcher", "external_name", "state"),
        *optional_text("reason"),
        *integer("created_at"),
        *optional_integer("started_at", "heartbeat_at", "ended_at"),
        refers(["run_id"], "training_run"),
        unique("external_name"),
        one_of("state", "queued", "admitted", "running", "succeeded", "failed", "cancelled", "lost"),
    )
    append_only(
        "checkpoint",
        key("run_id"),
        number("attempt"),
        number("step"),
        *text("manifest_digest", "world_layout"),
        *integer("created_at"),
        refers(["run_id", "attempt"], "run_attempt"),
    )
