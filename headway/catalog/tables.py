"""The tables that commands use, as SQLAlchemy Core sees them. The migrations make them; a test compares the two.

Every primary key starts with the tenant. Facts are inserted once (append-only tables carry triggers); a mutable row
has an `epoch` and moves by compare-and-set. Times are int64 microseconds UTC; JSON is stored canonically as text.
"""

import sqlalchemy as sa

HEAD = "0004"

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# Protected by triggers in every revision; a check reads them back from the database.
APPEND_ONLY = frozenset(
    {
        "attestation",
        "audit",
        "blob_ref",
        "budget_entry",
        "checkpoint",
        "dataset_event",
        "dataset_version",
        "drift_report",
        "endpoint_event",
        "feature_set_version",
        "feature_snapshot",
        "gate_policy",
        "gate_result",
        "idempotency",
        "label",
        "lineage_edge",
        "model_version",
        "outbox",
        "prediction",
        "run_event",
        "snapshot_event",
        "training_run",
    }
)
MUTABLE = frozenset(
    {
        "blob",
        "budget",
        "dataset",
        "dataset_partition",
        "endpoint",
        "job",
        "label_inbox",
        "model",
        "retrain_request",
        "rollout",
        "run_attempt",
        "tenant",
    }
)


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=True)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _optional_text(name: str) -> sa.Column[str | None]:
    return sa.Column(name, sa.Text, nullable=True)


def _int(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _optional_int(name: str) -> sa.Column[int | None]:
    return sa.Column(name, sa.BigInteger, nullable=True)


def _refers(columns: list[str], table: str, target: list[str] | None = None) -> sa.ForeignKeyConstraint:
    own = ["tenant_id", *columns]
    return sa.ForeignKeyConstraint(own, [f"{table}.{name}" for name in ["tenant_id", *(target or columns)]])


tenant = sa.Table("tenant", metadata, _key("tenant_id"), _int("created_at"), _text("created_by"), _int("epoch"))

blob = sa.Table(
    "blob",
    metadata,
    _key("tenant_id"),
    _key("digest"),
    _int("size"),
    _text("media_type"),
    _text("state"),
    _optional_int("verified_at"),
    _int("created_at"),
    _int("epoch"),
    _refers([], "tenant"),
    sa.CheckConstraint("state IN ('staged', 'live', 'doomed', 'erased')", name="state"),
)

blob_ref = sa.Table(
    "blob_ref",
    metadata,
    _key("tenant_id"),
    _key("digest"),
    _key("owner_kind"),
    _key("owner_id"),
    _int("created_at"),
    _refers(["digest"], "blob"),
    sa.Index(None, "tenant_id", "owner_kind", "owner_id"),
)

dataset = sa.Table(
    "dataset",
    metadata,
    _key("tenant_id"),
    _key("dataset_id"),
    _int("created_at"),
    _text("created_by"),
    _int("epoch"),
    _refers([], "tenant"),
)

dataset_version = sa.Table(
    "dataset_version",
    metadata,
    _key("tenant_id"),
    _key("dataset_id"),
    _number("version"),
    _text("partition"),
    _text("content_digest"),
    _text("schema_hash"),
    _text("manifest_digest"),
    _int("row_count"),
    _optional_int("event_time_min"),
    _optional_int("event_time_max"),
    _optional_int("watermark"),
    _text("privacy"),
    _optional_text("reason"),
    _text("source_digest"),
    _optional_text("run_id"),
    _text("blobs"),
    _text("metadata"),
    _int("created_at"),
    _text("created_by"),
    _refers(["dataset_id"], "dataset"),
    sa.UniqueConstraint("tenant_id", "dataset_id", "partition", "content_digest"),
    sa.CheckConstraint("version >= 1", name="version"),
    sa.CheckConstraint("row_count >= 0", name="row_count"),
)

dataset_event = sa.Table(
    "dataset_event",
    metadata,
    _key("tenant_id"),
    _key("dataset_id"),
    _number("version"),
    _number("seq"),
    _text("partition"),
    _text("kind"),
    _optional_text("from_status"),
    _text("to_status"),
    _text("reason"),
    _optional_text("suite_digest"),
    _optional_text("evidence"),
    _optional_text("evidence_digest"),
    _optional_int("partition_epoch"),
    _text("command_key"),
    _text("actor"),
    _int("at"),
    _refers(["dataset_id", "version"], "dataset_version"),
    sa.UniqueConstraint("tenant_id", "dataset_id", "partition", "partition_epoch"),
    sa.CheckConstraint(
        "to_status IN ('registered', 'validating', 'released', 'quarantined', 'retired', 'erased')", name="to_status"
    ),
)

dataset_partition = sa.Table(
    "dataset_partition",
    metadata,
    _key("tenant_id"),
    _key("dataset_id"),
    _key("partition"),
    _int("version"),
    _int("epoch"),
    _int("updated_at"),
    _refers(["dataset_id", "version"], "dataset_version"),
)

feature_set_version = sa.Table(
    "feature_set_version",
    metadata,
    _key("tenant_id"),
    _key("feature_set"),
    _number("version"),
    _text("contract_digest"),
    _text("code_digest"),
    _text("contract"),
    _int("created_at"),
    _text("created_by"),
    _refers([], "tenant"),
    sa.UniqueConstraint("tenant_id", "feature_set", "contract_digest", "code_digest"),
    sa.CheckConstraint("version >= 1", name="version"),
)

feature_snapshot = sa.Table(
    "feature_snapshot",
    metadata,
    _key("tenant_id"),
    _key("snapshot_id"),
    _text("pipeline"),
    _text("partition"),
    _text("feature_set"),
    _int("feature_set_version"),
    _text("inputs"),
    _text("content_digest"),
    _text("manifest_digest"),
    _int("row_count"),
    _optional_int("as_of_min"),
    _optional_int("as_of_max"),
    _text("source_watermarks"),
    _text("proof_digest"),
    _text("excluded"),
    _optional_text("run_id"),
    _text("blobs"),
    _text("metadata"),
    _int("created_at"),
    _text("created_by"),
    _refers(["feature_set", "feature_set_version"], "feature_set_version", ["feature_set", "version"]),
    sa.Index(None, "tenant_id", "pipeline", "partition"),
)

snapshot_event = sa.Table(
    "snapshot_event",
    metadata,
    _key("tenant_id"),
    _key("pipeline"),
    _key("partition"),
    _number("seq"),
    _text("kind"),
    _optional_text("snapshot_id"),
    _text("reason"),
    _text("blocking"),
    _optional_text("evidence_digest"),
    _text("command_key"),
    _text("actor"),
    _int("at"),
    _refers(["snapshot_id"], "feature_snapshot"),
    sa.CheckConstraint("(kind = 'published') = (snapshot_id IS NOT NULL)", name="kind"),
)

lineage_edge = sa.Table(
    "lineage_edge",
    metadata,
    _key("tenant_id"),
    _key("child"),
    _key("parent"),
    _key("role"),
    _int("created_at"),
    _refers([], "tenant"),
    sa.Index(None, "tenant_id", "parent"),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    _key("tenant_id"),
    _key("key"),
    _text("operation"),
    _text("fingerprint"),
    _text("status"),
    _optional_text("response"),
    _int("created_at"),
    sa.CheckConstraint("(status = 'done') = (response IS NOT NULL)", name="status"),
)

outbox = sa.Table(
    "outbox",
    metadata,
    _key("tenant_id"),
    sa.Column("seq", sa.BigInteger, sa.Identity(), primary_key=True),
    _text("aggregate"),
    _int("aggregate_seq"),
    _text("topic"),
    _text("payload"),
    _text("command_key"),
    _int("at"),
    sa.UniqueConstraint("tenant_id", "aggregate", "aggregate_seq"),
    sa.UniqueConstraint("tenant_id", "command_key"),
)

audit = sa.Table(
    "audit",
    metadata,
    _key("tenant_id"),
    sa.Column("seq", sa.BigInteger, sa.Identity(), primary_key=True),
    _text("actor"),
    _text("action"),
    _text("resource"),
    _text("outcome"),
    _text("command_key"),
    _text("fingerprint"),
    _int("at"),
    sa.UniqueConstraint("tenant_id", "command_key"),
    sa.CheckConstraint("outcome IN ('allow', 'deny')", name="outcome"),
)
