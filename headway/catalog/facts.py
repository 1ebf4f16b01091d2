"""What goes into the catalog and comes out of it: frozen records, each checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from headway.artifacts.digests import InvalidDigest, Json, check_digest, digest_json
from headway.artifacts.store import Blob
from headway.catalog.errors import InvalidFact

VersionStatus: TypeAlias = Literal["registered", "validating", "released", "quarantined", "retired", "erased"]
Direction: TypeAlias = Literal["upstream", "downstream"]

NO_DATA_PUBLISHED = "no_data_published"
MAX_TEXT = 2_000
MAX_NAME = 255
_INT64 = 1 << 63


def dataset_node(dataset: str, version: int) -> str:
    """Return the lineage node of a dataset version."""
    return f"dataset_version:{dataset}@{version}"


def delivery_node(source_digest: str) -> str:
    """Return the lineage node of a raw delivery."""
    return f"delivery:{source_digest}"


def feature_set_node(feature_set: str, version: int) -> str:
    """Return the lineage node of a feature set version."""
    return f"feature_set:{feature_set}@{version}"


def snapshot_node(snapshot_id: str) -> str:
    """Return the lineage node of a feature snapshot."""
    return f"feature_snapshot:{snapshot_id}"


def run_node(run_id: str) -> str:
    """Return the lineage node of a training run."""
    return f"training_run:{run_id}"


def model_node(model_id: str, version: int) -> str:
    """Return the lineage node of a model version."""
    return f"model_version:{model_id}@{version}"


@dataclass(frozen=True)
class Principal:
    """Who acts: the tenant whose rows are seen, and the actor that the audit row keeps."""

    tenant: str
    actor: str

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("actor", self.actor)


@dataclass(frozen=True)
class DatasetVersionFacts:
    """What one delivery of one partition is.

    `content_digest` is the identity: canonical rows and schema, whatever the file's encoding. `partition` is "" when
    the dataset has none. Times are microseconds UTC; `event_time_max` is inclusive. `source_digest` names the raw
    delivery; `blobs` are the stored bytes, the manifest's blob among them. `reason` says why a partition is empty.
    """

    dataset: str
    partition: str
    content_digest: str
    schema_hash: str
    manifest_digest: str
    rows: int
    event_time_min: int | None
    event_time_max: int | None
    watermark: int | None
    privacy: str
    reason: str | None
    source_digest: str
    run_id: str | None
    blobs: tuple[Blob, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict[str, "Json"])

    def __post_init__(self) -> None:
        check_name("dataset", self.dataset)
        check_name("partition", self.partition, empty=True)
        for name in ("content_digest", "schema_hash", "manifest_digest", "source_digest"):
            check_hash(name, getattr(self, name))
        check_count("rows", self.rows)
        for name in ("event_time_min", "event_time_max", "watermark"):
            check_time(name, getattr(self, name))
        check_name("privacy", self.privacy)
        check_text("reason", self.reason)
        check_text("run_id", self.run_id)
        check_blobs(self.blobs, self.manifest_digest)


@dataclass(frozen=True)
class Evidence:
    """What a validation found. `suite_digest` names the rules, `report_digest` the full report in the store."""

    suite_digest: str
    report_digest: str
    evaluated: int
    failed: int
    quarantined_rows: int
    quarantine_digest: str | None
    reason: str
    blobs: tuple[Blob, ...] = ()

    def __post_init__(self) -> None:
        for name in ("suite_digest", "report_digest"):
            check_hash(name, getattr(self, name))
        if self.quarantine_digest is not None:
            check_hash("quarantine_digest", self.quarantine_digest)
        for name in ("evaluated", "failed", "quarantined_rows"):
            check_count(name, getattr(self, name))
        check_text("reason", self.reason)
        check_blobs(self.blobs, None)

    def document(self) -> dict[str, Json]:
        """Return the evidence as JSON: what its digest covers."""
        return {
            "suite_digest": self.suite_digest,
            "report_digest": self.report_digest,
            "evaluated": self.evaluated,
            "failed": self.failed,
            "quarantined_rows": self.quarantined_rows,
            "quarantine_digest": self.quarantine_digest,
            "reason": self.reason,
            "blobs": blob_documents(self.blobs),
        }

    @property
    def digest(self) -> str:
        """The digest that snapshots cite as the evidence of their input."""
        return digest_json(self.document())


@dataclass(frozen=True)
class DatasetVersion:
    """A registered version: its facts as first delivered, and the state that its events fold to."""

    facts: DatasetVersionFacts
    version: int
    status: VersionStatus
    status_reason: str
    evidence: Evidence | None
    created_at: int

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.facts.dataset

    @property
    def partition(self) -> str:
        """The partition, "" when the dataset has none."""
        return self.facts.partition

    @property
    def content_digest(self) -> str:
        """The identity of the content."""
        return self.facts.content_digest

    @property
    def schema_hash(self) -> str:
        """The digest of the schema."""
        return self.facts.schema_hash

    @property
    def manifest_digest(self) -> str:
        """The digest of the manifest of the stored bytes."""
        return self.facts.manifest_digest

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.facts.rows

    @property
    def event_time_min(self) -> int | None:
        """The first event time, microseconds UTC; None when there is none."""
        return self.facts.event_time_min

    @property
    def event_time_max(self) -> int | None:
        """The last event time, microseconds UTC; None when there is none."""
        return self.facts.event_time_max

    @property
    def watermark(self) -> int | None:
        """The time up to which the version is complete, microseconds UTC."""
        return self.facts.watermark

    @property
    def privacy(self) -> str:
        """The declared privacy disposition."""
        return self.facts.privacy

    @property
    def reason(self) -> str | None:
        """Why the version is empty, when it is."""
        return self.facts.reason

    @property
    def source_digest(self) -> str:
        """The digest of the raw delivery that first gave this content."""
        return self.facts.source_digest

    @property
    def run_id(self) -> str | None:
        """The run that first delivered this content."""
        return self.facts.run_id

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The stored bytes, the manifest's blob among them."""
        return self.facts.blobs

    @property
    def metadata(self) -> Mapping[str, Json]:
        """Small facts that the catalog does not interpret."""
        return self.facts.metadata

    @property
    def evidence_digest(self) -> str | None:
        """The digest of the evidence in force."""
        return None if self.evidence is None else self.evidence.digest

    @property
    def node(self) -> str:
        """The lineage node."""
        return dataset_node(self.dataset, self.version)


@dataclass(frozen=True)
class FeatureSetFacts:
    """A feature contract.

    `contract` is its canonical form and `contract_digest` that form's digest; `code_digest` names the code.
    """

    feature_set: str
    contract_digest: str
    code_digest: str
    contract: Json

    def __post_init__(self) -> None:
        check_name("feature_set", self.feature_set)
        check_hash("contract_digest", self.contract_digest)
        check_hash("code_digest", self.code_digest)


@dataclass(frozen=True)
class FeatureSetVersion:
    """A registered feature contract; versions of one feature set count 1, 2, ..."""

    facts: FeatureSetFacts
    version: int
    created_at: int

    @property
    def feature_set(self) -> str:
        """The feature set's name."""
        return self.facts.feature_set

    @property
    def contract_digest(self) -> str:
        """The digest of the contract."""
        return self.facts.contract_digest

    @property
    def code_digest(self) -> str:
        """The digest of the code."""
        return self.facts.code_digest

    @property
    def contract(self) -> Json:
        """The contract's canonical form."""
        return self.facts.contract

    @property
    def node(self) -> str:
        """The lineage node."""
        return feature_set_node(self.feature_set, self.version)


@dataclass(frozen=True, order=True)
class SnapshotInput:
    """A dataset version that a snapshot read, with the evidence on which the reader trusted it.

    `quarantine_digest` names the rows that the evidence kept back: with the content it decides what was read.
    """

    dataset: str
    version: int
    content_digest: str
    evidence_digest: str
    quarantine_digest: str | None = None

    def __post_init__(self) -> None:
        check_name("dataset", self.dataset)
        check_hash("content_digest", self.content_digest)
        check_hash("evidence_digest", self.evidence_digest)
        if self.quarantine_digest is not None:
            check_hash("quarantine_digest", self.quarantine_digest)

    @property
    def rows_read(self) -> tuple[str, int, str, str | None]:
        """What identifies the rows that were read; another suite that keeps back the same rows changes nothing."""
        return self.dataset, self.version, self.content_digest, self.quarantine_digest


@dataclass(frozen=True)
class SnapshotFacts:
    """What one feature snapshot of one partition is. Times are microseconds UTC; `as_of_max` is inclusive.

    `excluded` counts label rows left out, by reason. `proof_digest` names the leakage proof in the store.
    """

    pipeline: str
    partition: str
    feature_set: str
    feature_set_version: int
    inputs: tuple[SnapshotInput, ...]
    content_digest: str
    manifest_digest: str
    rows: int
    as_of_min: int | None
    as_of_max: int | None
    source_watermarks: Mapping[str, int | None]
    proof_digest: str
    proof_passed: bool
    excluded: Mapping[str, int]
    run_id: str | None
    blobs: tuple[Blob, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict[str, "Json"])

    def __post_init__(self) -> None:
        check_name("pipeline", self.pipeline)
        check_name("partition", self.partition, empty=True)
        check_name("feature_set", self.feature_set)
        for name in ("content_digest", "manifest_digest", "proof_digest"):
            check_hash(name, getattr(self, name))
        check_count("rows", self.rows)
        for name in ("as_of_min", "as_of_max"):
            check_time(name, getattr(self, name))
        for source, watermark in self.source_watermarks.items():
            check_time(f"source_watermarks[{source!r}]", watermark)
        for reason, count in self.excluded.items():
            check_count(f"excluded[{reason!r}]", count)
        check_text("run_id", self.run_id)
        check_blobs(self.blobs, self.manifest_digest)
        object.__setattr__(self, "inputs", tuple(sorted(self.inputs, key=lambda i: (i.dataset, i.version))))
        if len({(item.dataset, item.version) for item in self.inputs}) != len(self.inputs) or not self.inputs:
            raise InvalidFact("inputs", self.inputs, "each dataset version once, and at least one")

    def snapshot_id(self, tenant: str) -> str:
        """Return the identity: the digest of tenant, pipeline, partition, feature set version and pinned inputs.

        Of the evidence only the rows that it kept back count: validating the same content again, with the same rows
        kept back, gives the same snapshot.
        """
        return digest_json(
            {
                "tenant": tenant,
                "pipeline": self.pipeline,
                "partition": self.partition,
                "feature_set": self.feature_set,
                "feature_set_version": self.feature_set_version,
                "inputs": [list(item.rows_read) for item in self.inputs],
            }
        )


@dataclass(frozen=True)
class FeatureSnapshot:
    """A published snapshot: immutable, named by its identity."""

    facts: SnapshotFacts
    snapshot_id: str
    created_at: int

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self.facts.pipeline

    @property
    def partition(self) -> str:
        """The partition."""
        return self.facts.partition

    @property
    def feature_set(self) -> str:
        """The feature set's name."""
        return self.facts.feature_set

    @property
    def feature_set_version(self) -> int:
        """The feature set's version."""
        return self.facts.feature_set_version

    @property
    def inputs(self) -> tuple[SnapshotInput, ...]:
        """The pinned inputs, sorted."""
        return self.facts.inputs

    @property
    def content_digest(self) -> str:
        """The digest of the snapshot's canonical rows."""
        return self.facts.content_digest

    @property
    def manifest_digest(self) -> str:
        """The digest of the manifest of the stored bytes."""
        return self.facts.manifest_digest

    @property
    def rows(self) -> int:
        """The number of label rows."""
        return self.facts.rows

    @property
    def proof_digest(self) -> str:
        """The digest of the leakage proof."""
        return self.facts.proof_digest

    @property
    def source_watermarks(self) -> Mapping[str, int | None]:
        """The watermark of each source when the snapshot was made, microseconds UTC."""
        return self.facts.source_watermarks

    @property
    def excluded(self) -> Mapping[str, int]:
        """Label rows left out, counted by reason."""
        return self.facts.excluded

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The stored bytes."""
        return self.facts.blobs

    @property
    def metadata(self) -> Mapping[str, Json]:
        """Small facts that the catalog does not interpret."""
        return self.facts.metadata

    @property
    def node(self) -> str:
        """The lineage node."""
        return snapshot_node(self.snapshot_id)


@dataclass(frozen=True)
class SnapshotState:
    """The state of one partition of a pipeline's snapshots: its last event.

    `snapshot` is None when it was refused; `blocking` then names what stood in the way.
    """

    pipeline: str
    partition: str
    status: Literal["published", "refused"]
    snapshot: FeatureSnapshot | None
    reason: str
    blocking: tuple[str, ...]
    at: int


@dataclass(frozen=True)
class LineageEdge:
    """`child` was made from `parent`, which played `role` (source, input, features)."""

    child: str
    parent: str
    role: str


@dataclass(frozen=True)
class OutboxRow:
    """A committed change for subscribers; `aggregate_seq` counts 1, 2, ... per aggregate."""

    seq: int
    aggregate: str
    aggregate_seq: int
    topic: str
    payload: Json
    key: str
    at: int


@dataclass(frozen=True)
class AuditRow:
    """One executed command: who did what to which resource."""

    seq: int
    actor: str
    action: str
    resource: str
    outcome: str
    key: str
    fingerprint: str
    at: int


@dataclass(frozen=True)
class BlobRow:
    """A blob that the catalog knows, with its state and its owners as (kind, id)."""

    blob: Blob
    state: Literal["staged", "live", "doomed", "erased"]
    owners: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DatasetEvent:
    """One step in the life of a dataset version. `partition_epoch` is set when the partition moved to this version."""

    version: int
    seq: int
    kind: str
    from_status: str | None
    to_status: VersionStatus
    reason: str
    evidence_digest: str | None
    partition_epoch: int | None
    actor: str
    at: int


def blob_documents(blobs: tuple[Blob, ...]) -> list[dict[str, Json]]:
    """Return `blobs` as JSON, sorted by digest."""
    return [
        {"digest": blob.digest, "size": blob.size, "media_type": blob.media_type}
        for blob in sorted(blobs, key=lambda blob: (blob.digest, blob.size, blob.media_type))
    ]


def check_name(field_name: str, value: str, *, empty: bool = False) -> None:
    """Refuse a name that is not 1 to 255 printable characters (or "" where `empty` allows it).

    Raises:
        InvalidFact: it is something else; control characters and lone surrogates would differ between databases.
    """
    if empty and value == "":
        return
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or not 0 < len(value) <= MAX_NAME
        or value != value.strip()
    ):
        raise InvalidFact(field_name, value, f"1 to {MAX_NAME} printable characters without blanks around them")


def check_text(field_name: str, value: str | None) -> None:
    """Refuse a text of more than `MAX_TEXT` characters, or that a database cannot hold. Raises: InvalidFact."""
    if value is None:
        return
    if (
        not isinstance(value, str)
        or len(value) > MAX_TEXT
        or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
    ):
        raise InvalidFact(field_name, value, f"at most {MAX_TEXT} characters, no NUL, no lone surrogates")


def check_hash(field_name: str, value: str) -> None:
    """Refuse what is no sha256 digest. Raises: InvalidFact."""
    try:
        check_digest(value)
    except InvalidDigest as error:
        raise InvalidFact(field_name, value, "'sha256:' and 64 lower-case hex digits") from error


def check_count(field_name: str, value: int) -> None:
    """Refuse what is no whole number from 0 to 2^63-1. Raises: InvalidFact."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _INT64:
        raise InvalidFact(field_name, value, "a whole number from 0 to 2^63-1 (a Python int)")


def check_time(field_name: str, value: int | None) -> None:
    """Refuse what is no time in int64 microseconds UTC (None is allowed). Raises: InvalidFact."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not -_INT64 <= value < _INT64:
        raise InvalidFact(field_name, value, "int64 microseconds UTC (a Python int)")


def check_blobs(blobs: tuple[Blob, ...], manifest_digest: str | None) -> None:
    """Refuse malformed blobs, or blobs without the manifest's when one is named. Raises: InvalidFact."""
    for blob in blobs:
        check_hash("blobs", blob.digest)
        check_count("blobs", blob.size)
        check_name("blobs", blob.media_type)
    digests = [blob.digest for blob in blobs]
    if manifest_digest is not None and manifest_digest not in digests:
        raise InvalidFact("blobs", digests, f"the manifest's blob {manifest_digest} among them")
