"""Tenants, blobs, datasets, feature sets, snapshots, lineage, idempotency, outbox, audit."""

import sqlalchemy as sa
from alembic import op

from headway.catalog.migrations.support import (
    append_only,
    claims,
    integer,
    key,
    mutable,
    number,
    one_of,
    optional_integer,
    optional_text,
    prepare,
    refers,
    serial,
    text,
    unique,
)

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    prepare()
    mutable("tenant", *integer("created_at"), *text("created_by"))
    _blobs()
    _datasets()
    _snapshots()
    _commands()


def _blobs() -> None:
    mutable(
        "blob",
        key("digest"),
        *integer("size"),
        *text("media_type", "state"),
        *optional_integer("verified_at"),
        *integer("created_at"),
        refers([], "tenant"),
        one_of("state", "staged", "live", "doomed", "erased"),
    )
    append_only(
        "blob_ref",
        key("digest"),
        key("owner_kind"),
        key("owner_id"),
        *integer("created_at"),
        refers(["digest"], "blob"),
    )
    op.create_index(None, "blob_ref", ["tenant_id", "owner_kind", "owner_id"])


def _datasets() -> None:
    mutable("dataset", key("dataset_id"), *integer("created_at"), *text("created_by"), refers([], "tenant"))
    append_only(
        "dataset_version",
        key("dataset_id"),
        number("version"),
        *text("partition", "content_digest", "schema_hash", "manifest_digest"),
        *integer("row_count"),
        *optional_integer("event_time_min", "event_time_max", "watermark"),
        *text("privacy"),
        *optional_text("reason"),
        *text("source_digest"),
        *optional_text("run_id"),
        *text("blobs", "metadata"),
        *integer("created_at"),
        *text("created_by"),
        refers(["dataset_id"], "dataset"),
        unique("dataset_id", "partition", "content_digest"),
        sa.CheckConstraint("version >= 1", name="version"),
        sa.CheckConstraint("row_count >= 0", name="row_count"),
    )
    append_only(
        "dataset_event",
        key("dataset_id"),
        number("version"),
        number("seq"),
        *text("partition", "kind"),
        *optional_text("from_status"),
        *text("to_status", "reason"),
        *optional_text("suite_digest", "evidence", "evidence_digest"),
        *optional_integer("partition_epoch"),
        *text("command_key", "actor"),
        *integer("at"),
        refers(["dataset_id", "version"], "dataset_version"),
        unique("dataset_id", "partition", "partition_epoch"),
        one_of("to_status", "registered", "validating", "released", "quarantined", "retired", "erased"),
    )
    mutable(
        "dataset_partition",
        key("dataset_id"),
        key("partition"),
        *integer("version", "updated_at"),
        refers(["dataset_id", "version"], "dataset_version"),
    )


def _snapshots() -> None:
    append_only(
        "feature_set_version",
        key("feature_set"),
        number("version"),
        *text("contract_digest", "code_digest", "contract"),
        *integer("created_at"),
        *text("created_by"),
        refers([], "tenant"),
        unique("feature_set", "contract_digest", "code_digest"),
        sa.CheckConstraint("version >= 1", name="version"),
    )
    append_only(
        "feature_snapshot",
        key("snapshot_id"),
        *text("pipeline", "partition", "feature_set"),
        *integer("feature_set_version"),
        *text("inputs", "content_digest", "manifest_digest"),
        *integer("row_count"),
        *optional_integer("as_of_min", "as_of_max"),
        *text("source_watermarks", "proof_digest", "excluded"),
        *optional_text("run_id"),
        *text("blobs", "metadata"),
        *integer("created_at"),
        *text("created_by"),
        refers(["feature_set", "feature_set_version"], "feature_set_version", ["feature_set", "version"]),
    )
    op.create_index(None, "feature_snapshot", ["tenant_id", "pipeline", "partition"])
    append_only(
        "snapshot_event",
        key("pipeline"),
        key("partition"),
        number("seq"),
        *text("kind"),
        *optional_text("snapshot_id"),
        *text("reason", "blocking"),
        *optional_text("evidence_digest"),
        *text("command_key", "actor"),
        *integer("at"),
        refers(["snapshot_id"], "feature_snapshot"),
        sa.CheckConstraint("(kind = 'published') = (snapshot_id IS NOT NULL)", name="kind"),
    )
    append_only("lineage_edge", key("child"), key("parent"), key("role"), *integer("created_at"), refers([], "tenant"))
    op.create_index(None, "lineage_edge", ["tenant_id", "parent"])


def _commands() -> None:
    claims(
        "idempotency",
        key("key"),
        *text("operation", "fingerprint", "status"),
        *optional_text("response"),
        *integer("created_at"),
        sa.CheckConstraint("(status = 'done') = (response IS NOT NULL)", name="status"),
    )
    append_only(
        "outbox",
        serial("seq"),
        *text("aggregate"),
        *integer("aggregate_seq"),
        *text("topic", "payload", "command_key"),
        *integer("at"),
        unique("aggregate", "aggregate_seq"),
        unique("command_key"),
    )
    append_only(
        "audit",
        serial("seq"),
        *text("actor", "action", "resource", "outcome", "command_key", "fingerprint"),
        *integer("at"),
        unique("command_key"),
        one_of("outcome", "allow", "deny"),
    )
