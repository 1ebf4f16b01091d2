"""The tables that commands use, as SQLAlchemy Core sees them. The migrations make them; a test compares the two.

Every primary key starts with the tenant. Facts are inserted once (append-only tables carry triggers); a mutable row
has an `epoch` and moves by compare-and-set. Times are int64 microseconds UTC; JSON is stored canonically as text.
"""

from typing import Any

import sqlalchemy as sa

HEAD = "0007"

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
        "endpoint_event",
        "feature_set_version",
        "feature_snapshot",
        "gate_policy",
        "gate_result",
        "idempotency",
        "inference_segment",
        "label",
        "lineage_edge",
        "model_version",
        "model_version_event",
        "outbox",
        "prediction",
        "report",
        "retrain_decision",
        "retrain_event",
        "run_event",
        "run_result",
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


def _optional_real(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Double, nullable=True)


def _where(condition: str) -> dict[str, Any]:
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


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

training_run = sa.Table(
    "training_run",
    metadata,
    _key("tenant_id"),
    _key("run_id"),
    _text("identity_digest"),
    _text("pipeline"),
    _text("partition"),
    _text("inputs"),
    _optional_text("snapshot_id"),
    _text("code_digest"),
    _text("environment_digest"),
    _text("config_digest"),
    _int("seed"),
    _int("repeat"),
    _text("layout"),
    _optional_text("budget_id"),
    _optional_text("dagster_run_id"),
    _optional_text("note"),
    _int("created_at"),
    _text("created_by"),
    _text("spec_digest"),
    _text("datasets"),
    _text("blobs"),
    _int("code_dirty"),
    _int("nodes"),
    _int("max_attempts"),
    _refers([], "tenant"),
    _refers(["snapshot_id"], "feature_snapshot"),
    sa.UniqueConstraint("tenant_id", "identity_digest"),
    sa.Index(None, "tenant_id", "pipeline", "partition"),
    sa.Index(None, "tenant_id", "created_at"),
)

run_event = sa.Table(
    "run_event",
    metadata,
    _key("tenant_id"),
    _key("run_id"),
    _number("seq"),
    _optional_int("attempt"),
    _text("kind"),
    _text("payload"),
    _text("command_key"),
    _text("actor"),
    _int("at"),
    _optional_int("node"),
    _optional_int("node_seq"),
    _refers(["run_id"], "training_run"),
    sa.Index("uq_run_event_node", "tenant_id", "run_id", "attempt", "node", "node_seq", unique=True),
    sa.Index("ix_run_event_own", "tenant_id", "run_id", "seq", **_where("node IS NULL")),
)

run_attempt = sa.Table(
    "run_attempt",
    metadata,
    _key("tenant_id"),
    _key("run_id"),
    _number("attempt"),
    _int("fencing_token"),
    _text("layout"),
    _text("launcher"),
    _text("external_name"),
    _text("state"),
    _optional_text("reason"),
    _int("created_at"),
    _optional_int("started_at"),
    _optional_int("heartbeat_at"),
    _optional_int("ended_at"),
    _int("epoch"),
    _int("reserved"),
    _optional_int("code"),
    _optional_real("worker_seconds"),
    _optional_text("cancel_reason"),
    _optional_text("budget_id"),
    _optional_text("budget_period"),
    _optional_text("waiting"),
    _optional_text("reason_code"),
    _optional_text("retry"),
    _refers(["run_id"], "training_run"),
    sa.UniqueConstraint("tenant_id", "external_name"),
    sa.CheckConstraint(
        "state IN ('queued', 'admitted', 'running', 'succeeded', 'failed', 'cancelled', 'lost')", name="state"
    ),
    sa.Index("ix_run_attempt_open", "tenant_id", "run_id", **_where("state IN ('queued', 'admitted', 'running')")),
)

run_result = sa.Table(
    "run_result",
    metadata,
    _key("tenant_id"),
    _key("run_id"),
    _int("attempt"),
    _text("artifacts"),
    _text("metrics"),
    _optional_int("best_step"),
    _text("blobs"),
    _int("at"),
    _refers(["run_id", "attempt"], "run_attempt"),
)

checkpoint = sa.Table(
    "checkpoint",
    metadata,
    _key("tenant_id"),
    _key("run_id"),
    _number("attempt"),
    _number("step"),
    _text("manifest_digest"),
    _text("world_layout"),
    _int("created_at"),
    _refers(["run_id", "attempt"], "run_attempt"),
)

budget = sa.Table(
    "budget",
    metadata,
    _key("tenant_id"),
    _key("budget_id"),
    _key("period"),
    _text("unit"),
    _int("amount"),
    _int("created_at"),
    _int("epoch"),
    _refers([], "tenant"),
    sa.CheckConstraint("amount >= 0", name="amount"),
)

budget_entry = sa.Table(
    "budget_entry",
    metadata,
    _key("tenant_id"),
    _key("entry_id"),
    _text("budget_id"),
    _text("period"),
    _text("kind"),
    _text("owner_kind"),
    _text("owner_id"),
    _int("amount"),
    _int("at"),
    _text("command_key"),
    _refers(["budget_id", "period"], "budget"),
    sa.CheckConstraint("kind IN ('reserve', 'commit', 'release')", name="kind"),
    sa.Index(None, "tenant_id", "budget_id", "period"),
)

model = sa.Table(
    "model",
    metadata,
    _key("tenant_id"),
    _key("model_id"),
    _text("pipeline"),
    _text("created_by"),
    _int("created_at"),
    _int("epoch"),
    _refers([], "tenant"),
)

model_version = sa.Table(
    "model_version",
    metadata,
    _key("tenant_id"),
    _key("model_id"),
    _number("version"),
    _text("manifest_digest"),
    _text("run_id"),
    _text("contract_hash"),
    _text("feature_set"),
    _int("feature_set_version"),
    _int("created_at"),
    _text("metadata"),
    _text("created_by"),
    _text("kind"),
    _text("contract"),
    _text("as_of"),
    _text("blobs"),
    _refers(["model_id"], "model"),
    _refers(["run_id"], "training_run"),
    _refers(["feature_set", "feature_set_version"], "feature_set_version", ["feature_set", "version"]),
    sa.UniqueConstraint("tenant_id", "run_id", "manifest_digest"),
)

model_version_event = sa.Table(
    "model_version_event",
    metadata,
    _key("tenant_id"),
    _key("model_id"),
    _number("version"),
    _number("seq"),
    _text("kind"),
    _text("reason"),
    _text("command_key"),
    _text("actor"),
    _int("at"),
    _refers(["model_id", "version"], "model_version"),
    sa.CheckConstraint("kind IN ('retired')", name="kind"),
)

attestation = sa.Table(
    "attestation",
    metadata,
    _key("tenant_id"),
    _key("statement_digest"),
    _text("subject_digest"),
    _text("predicate_type"),
    _text("key_id"),
    _text("role"),
    _text("envelope_digest"),
    _int("created_at"),
    _text("blobs"),
    _refers([], "tenant"),
    sa.Index(None, "tenant_id", "subject_digest"),
)

gate_policy = sa.Table(
    "gate_policy",
    metadata,
    _key("tenant_id"),
    _key("model_id"),
    _number("policy_version"),
    _text("policy"),
    _text("policy_digest"),
    _text("created_by"),
    _int("created_at"),
    _text("command_key"),
    _refers(["model_id"], "model"),
)

gate_result = sa.Table(
    "gate_result",
    metadata,
    _key("tenant_id"),
    _key("model_id"),
    _number("version"),
    _key("gate"),
    _number("attempt"),
    _text("verdict"),
    _text("reason"),
    _text("metrics"),
    _int("policy_version"),
    _optional_text("statement_digest"),
    _text("artifact_digest"),
    _int("at"),
    _text("command_key"),
    _refers(["model_id", "version"], "model_version"),
    _refers(["model_id", "policy_version"], "gate_policy"),
    _refers(["statement_digest"], "attestation"),
    sa.CheckConstraint("verdict IN ('pass', 'fail', 'undecided')", name="verdict"),
    sa.Index(None, "tenant_id", "statement_digest"),
)

endpoint = sa.Table(
    "endpoint",
    metadata,
    _key("tenant_id"),
    _key("endpoint_id"),
    _text("model_id"),
    _int("contract_major"),
    _optional_int("stable"),
    _optional_int("previous"),
    _optional_int("candidate"),
    _text("phase"),
    _text("arm_salt"),
    _text("budgets"),
    _int("basis_points"),
    _int("updated_at"),
    _int("epoch"),
    _refers(["model_id"], "model"),
    _refers(["model_id", "stable"], "model_version", ["model_id", "version"]),
    _refers(["model_id", "previous"], "model_version", ["model_id", "version"]),
    _refers(["model_id", "candidate"], "model_version", ["model_id", "version"]),
    sa.CheckConstraint("phase IN ('steady', 'shadow', 'canary')", name="phase"),
    sa.CheckConstraint("basis_points BETWEEN 0 AND 10000", name="basis_points"),
    sa.CheckConstraint("(phase = 'steady') = (candidate IS NULL)", name="candidate"),
    sa.CheckConstraint("candidate IS NULL OR stable IS NULL OR candidate <> stable", name="arms"),
)

endpoint_event = sa.Table(
    "endpoint_event",
    metadata,
    _key("tenant_id"),
    _key("endpoint_id"),
    _number("epoch"),
    _text("row"),
    _text("operation"),
    _text("actor"),
    _text("command_key"),
    _int("at"),
    _optional_text("reason"),
    _optional_text("evidence"),
    _optional_text("promotion_statement"),
    _refers(["endpoint_id"], "endpoint"),
    sa.Index("uq_endpoint_event_promotion", "tenant_id", "promotion_statement", unique=True),
)

rollout = sa.Table(
    "rollout",
    metadata,
    _key("tenant_id"),
    _key("rollout_id"),
    _text("endpoint_id"),
    _int("candidate"),
    _optional_int("baseline"),
    _text("plan_digest"),
    _text("state"),
    _int("created_at"),
    _optional_int("closed_at"),
    _optional_text("reason"),
    _int("epoch"),
    _refers(["endpoint_id"], "endpoint"),
    sa.CheckConstraint("state IN ('open', 'promoted', 'aborted', 'expired')", name="state"),
    sa.CheckConstraint("(state = 'open') = (closed_at IS NULL)", name="closed"),
    sa.Index("uq_rollout_open", "tenant_id", "endpoint_id", unique=True, **_where("closed_at IS NULL")),
)

prediction = sa.Table(
    "prediction",
    metadata,
    _key("tenant_id"),
    _key("prediction_id"),
    _text("endpoint_id"),
    _int("endpoint_epoch"),
    _int("model_version"),
    _text("arm"),
    _optional_int("feature_as_of"),
    _text("feature_status"),
    _text("feature_row_digest"),
    _text("request_digest"),
    _text("output"),
    _text("status"),
    _int("latency_us"),
    _int("at"),
    _text("detail_digest"),
    _int("detail_row"),
    _optional_int("asked_at"),
    _optional_int("observed_at"),
    _optional_text("caller_id"),
    _optional_text("event_key"),
    _optional_real("score"),
    _optional_text("log_server"),
    _optional_text("log_segment"),
    _text("segments"),
    _text("source"),
    _refers(["endpoint_id", "endpoint_epoch"], "endpoint_event", ["endpoint_id", "epoch"]),
    sa.CheckConstraint("arm IN ('stable', 'candidate', 'shadow')", name="arm"),
    sa.Index(None, "tenant_id", "endpoint_id", "at"),
    sa.Index(None, "tenant_id", "endpoint_id", "asked_at"),
    sa.Index(None, "tenant_id", "endpoint_id", "caller_id"),
    sa.Index(None, "tenant_id", "endpoint_id", "event_key"),
)

inference_segment = sa.Table(
    "inference_segment",
    metadata,
    _key("tenant_id"),
    _key("server"),
    _key("segment"),
    _number("from_offset"),
    _int("to_offset"),
    _int("records"),
    _int("torn"),
    _int("dropped"),
    _int("at"),
    _text("command_key"),
    _refers([], "tenant"),
    sa.CheckConstraint("to_offset > from_offset", name="range"),
)


def _label_facts() -> "tuple[sa.schema.SchemaItem, ...]":
    return (
        _text("endpoint_id"),
        _text("address_kind"),
        _text("address"),
        _text("value"),
        _text("source"),
        _text("actor"),
        _int("observed_at"),
        _int("received_at"),
        _int("at"),
        _optional_text("reason"),
        sa.CheckConstraint("source IN ('auto', 'human', 'backfill')", name="source"),
        sa.CheckConstraint("address_kind IN ('prediction_id', 'caller_id', 'event_key')", name="address_kind"),
    )


label = sa.Table(
    "label",
    metadata,
    _key("tenant_id"),
    _key("label_id"),
    _text("prediction_id"),
    *_label_facts(),
    _text("command_key"),
    _refers(["prediction_id"], "prediction"),
    sa.Index(None, "tenant_id", "prediction_id"),
)

label_inbox = sa.Table(
    "label_inbox",
    metadata,
    _key("tenant_id"),
    _key("label_id"),
    *_label_facts(),
    _text("waiting_for"),
    _text("state"),
    _int("epoch"),
    _refers(["endpoint_id"], "endpoint"),
    sa.CheckConstraint("waiting_for IN ('no_prediction', 'ambiguous')", name="waiting_for"),
    sa.CheckConstraint("state IN ('waiting', 'attached')", name="state"),
    sa.Index(
        "ix_label_inbox_waiting",
        "tenant_id",
        "endpoint_id",
        "address_kind",
        "address",
        **_where("state = 'waiting'"),
    ),
)

report = sa.Table(
    "report",
    metadata,
    _key("tenant_id"),
    _key("report_id"),
    _text("kind"),
    _text("endpoint_id"),
    _int("version"),
    _text("time_window"),
    _int("seq"),
    _int("start_at"),
    _int("end_at"),
    _text("verdict"),
    _text("reason"),
    _text("document_digest"),
    _text("metrics"),
    _text("blobs"),
    _int("made_at"),
    _int("created_at"),
    _text("command_key"),
    _refers(["endpoint_id"], "endpoint"),
    sa.CheckConstraint("kind IN ('quality', 'drift', 'labels', 'predictions')", name="kind"),
    sa.UniqueConstraint("tenant_id", "endpoint_id", "kind", "version", "time_window", "seq"),
)

retrain_request = sa.Table(
    "retrain_request",
    metadata,
    _key("tenant_id"),
    _key("request_id"),
    _text("pipeline"),
    _text("endpoint_id"),
    _text("facts"),
    _text("state"),
    _text("reason"),
    _optional_text("as_of"),
    _optional_text("run_id"),
    _optional_text("dagster_run_id"),
    _optional_int("candidate_version"),
    _optional_real("cost_seconds"),
    _int("created_at"),
    _optional_int("closed_at"),
    _int("epoch"),
    _refers(["endpoint_id"], "endpoint"),
    _refers(["run_id"], "training_run"),
    sa.CheckConstraint(
        "state IN ('waiting_for_evaluation_window', 'waiting_for_approval', 'ready', 'running', 'needs_human', "
        "'promoted', 'kept_old', 'failed', 'rejected', 'expired')",
        name="state",
    ),
    sa.CheckConstraint(
        "(state IN ('promoted', 'kept_old', 'failed', 'rejected', 'expired')) = (closed_at IS NOT NULL)",
        name="closed",
    ),
    sa.Index(None, "tenant_id", "pipeline", "created_at"),
    sa.Index("uq_retrain_request_open", "tenant_id", "pipeline", unique=True, **_where("closed_at IS NULL")),
)

retrain_event = sa.Table(
    "retrain_event",
    metadata,
    _key("tenant_id"),
    _key("request_id"),
    _number("epoch"),
    _text("row"),
    _text("command_key"),
    _text("actor"),
    _int("at"),
    _refers(["request_id"], "retrain_request"),
)

retrain_decision = sa.Table(
    "retrain_decision",
    metadata,
    _key("tenant_id"),
    _key("pipeline"),
    _number("seq"),
    _text("endpoint_id"),
    _text("decision"),
    _text("reason"),
    _text("fingerprint"),
    _int("made_at"),
    _int("at"),
    _text("command_key"),
    _text("actor"),
    _refers([], "tenant"),
)
