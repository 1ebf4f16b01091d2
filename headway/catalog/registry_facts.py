"""Model versions, evidence, endpoints, predictions: frozen records, each checked when it is made.

Times are int64 microseconds UTC. A manifest digest is the identity of what is registered, judged and served.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from headway.artifacts.digests import Json, digest_json
from headway.artifacts.store import Blob
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import check_blobs, check_count, check_hash, check_name, check_text, check_time, model_node
from headway.catalog.run_facts import check_json, sorted_blobs

ModelKind: TypeAlias = Literal["network", "logistic", "language"]
Role: TypeAlias = Literal["trainer", "gate", "promoter"]
Verdict: TypeAlias = Literal["pass", "fail", "undecided"]
Phase: TypeAlias = Literal["steady", "shadow", "canary"]
Arm: TypeAlias = Literal["stable", "candidate", "shadow"]
PredictionSource: TypeAlias = Literal["batch", "online"]


def artifact_name(kind: ModelKind) -> str:
    """Return how a run calls the artifact that a version of this kind is made of."""
    return "network" if kind == "language" else kind


@dataclass(frozen=True)
class ModelVersionFacts:
    """What a registered version is. `contract` is the input and output schema, `contract_hash` its digest.

    `as_of` is the end of its training window as the partition's key, "" of a pipeline without months. The manifest's
    blob is among `blobs`.
    """

    model_id: str
    pipeline: str
    kind: ModelKind
    run_id: str
    manifest_digest: str
    contract: Mapping[str, Json]
    contract_hash: str
    feature_set: str
    feature_set_version: int
    as_of: str
    metadata: Mapping[str, Json]
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        for name in ("model_id", "pipeline", "run_id", "feature_set"):
            check_name(name, getattr(self, name))
        check_name("as_of", self.as_of, empty=True)
        check_one_of("kind", self.kind, get_args(ModelKind))
        check_hash("manifest_digest", self.manifest_digest)
        check_hash("contract_hash", self.contract_hash)
        check_json("contract", self.contract)
        if not isinstance(self.contract, Mapping) or not self.contract:
            raise InvalidFact("contract", self.contract, "the input and output schema: no contract, no registration")
        if self.contract_hash != digest_json(self.contract):
            raise InvalidFact("contract_hash", self.contract_hash, "the digest of the contract's canonical JSON")
        check_count("feature_set_version", self.feature_set_version)
        check_json("metadata", self.metadata)
        check_blobs(self.blobs, self.manifest_digest)
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))


@dataclass(frozen=True)
class ModelVersion:
    """A registered version; versions of one model count 1, 2, ... `retired`: it may not serve again."""

    facts: ModelVersionFacts
    version: int
    created_at: int
    retired: bool

    @property
    def model_id(self) -> str:
        """The model's name."""
        return self.facts.model_id

    @property
    def kind(self) -> ModelKind:
        """What kind of model it is."""
        return self.facts.kind

    @property
    def run_id(self) -> str:
        """The run that made it."""
        return self.facts.run_id

    @property
    def manifest_digest(self) -> str:
        """The identity of its artifact."""
        return self.facts.manifest_digest

    @property
    def contract(self) -> Mapping[str, Json]:
        """The input and output schema."""
        return self.facts.contract

    @property
    def node(self) -> str:
        """The lineage node."""
        return model_node(self.model_id, self.version)


@dataclass(frozen=True)
class Model:
    """A model: a name for versions of one pipeline's artifacts."""

    model_id: str
    pipeline: str
    created_at: int


@dataclass(frozen=True)
class AttestationFacts:
    """A signed statement about a manifest digest. The envelope is a blob in the store."""

    statement_digest: str
    subject_digest: str
    predicate_type: str
    key_id: str
    role: Role
    envelope_digest: str
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        for name in ("statement_digest", "subject_digest", "envelope_digest"):
            check_hash(name, getattr(self, name))
        for name in ("predicate_type", "key_id"):
            check_name(name, getattr(self, name))
        check_one_of("role", self.role, get_args(Role))
        check_blobs(self.blobs, self.envelope_digest)
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))


@dataclass(frozen=True)
class Attestation(AttestationFacts):
    """A stored statement."""

    created_at: int


@dataclass(frozen=True)
class GatePolicy:
    """The conditions of promotion in force from a version on; versions of one model's policy count 1, 2, ..."""

    model_id: str
    version: int
    policy: Mapping[str, Json]
    digest: str

    def gates(self, kind: str) -> tuple[str, ...]:
        """Return the gates that a version of this kind must pass: all listed, but those with `unless` its kind."""
        listed = cast("list[Mapping[str, Json]]", self.policy["gates"])
        return tuple(str(item["gate"]) for item in listed if item.get("unless", "") != kind)

    @property
    def allows_immediate(self) -> bool:
        """Whether a version may go to all traffic at once."""
        return self.policy.get("allow_immediate") is True


def check_policy(policy: Json) -> None:
    """Refuse a policy that does not say which gates there are.

    Args:
        policy: {"gates": [{"gate": name, "unless": kind or "", ...}, ...], "allow_immediate": bool, ...}

    Raises:
        InvalidFact: it has another form, lists no gate, or lists one twice.
    """
    check_json("policy", policy)
    listed = policy.get("gates") if isinstance(policy, Mapping) else None
    if not isinstance(listed, list | tuple) or not listed:
        raise InvalidFact("policy", policy, 'an object with "gates": [{"gate": name, ...}, ...], at least one')
    names: list[Json] = [item.get("gate") if isinstance(item, Mapping) else None for item in listed]
    if len(set(map(repr, names))) != len(names):
        raise InvalidFact("policy.gates", names, "each gate once")
    for item, name in zip(listed, names, strict=True):
        if not isinstance(item, Mapping) or not isinstance(name, str):
            raise InvalidFact("policy.gates", item, "an object that names its gate")
        check_name("policy.gates", name)
        if not isinstance(item.get("unless", ""), str):
            raise InvalidFact("policy.gates", item, 'a kind of model, or "", as "unless"')
    if isinstance(policy, Mapping) and not isinstance(policy.get("allow_immediate", False), bool):
        raise InvalidFact("policy.allow_immediate", policy["allow_immediate"], "true or false")


@dataclass(frozen=True)
class GateResultFacts:
    """What one gate found about a version, under a policy version, and the signed statement that says so.

    `artifact_digest` is the manifest digest that was judged.
    """

    model_id: str
    version: int
    gate: str
    verdict: Verdict
    reason: str
    metrics: Mapping[str, Json]
    policy_version: int
    statement_digest: str
    artifact_digest: str

    def __post_init__(self) -> None:
        for name in ("model_id", "gate"):
            check_name(name, getattr(self, name))
        check_one_of("verdict", self.verdict, get_args(Verdict))
        check_text("reason", self.reason)
        check_json("metrics", self.metrics)
        for name in ("version", "policy_version"):
            check_count(name, getattr(self, name))
        for name in ("statement_digest", "artifact_digest"):
            check_hash(name, getattr(self, name))


@dataclass(frozen=True)
class GateResult(GateResultFacts):
    """A recorded result; `attempt` counts 1, 2, ... per version and gate, and the newest one is in force."""

    attempt: int
    at: int


@dataclass(frozen=True)
class PromotionEvidence:
    """What a promotion rests on, its signatures verified at `verified_at` by the registry.

    `statements` names one gate statement per gate of policy version `policy_version`; `promotion_statement` is the
    promoter's own. The catalog compares each with what it holds and believes none of it.
    """

    policy_version: int
    statements: Mapping[str, str]
    promotion_statement: str
    verified_at: int

    def __post_init__(self) -> None:
        check_count("policy_version", self.policy_version)
        for gate, statement in self.statements.items():
            check_name("statements", gate)
            check_hash(f"statements[{gate!r}]", statement)
        check_hash("promotion_statement", self.promotion_statement)
        check_time("verified_at", self.verified_at)


@dataclass(frozen=True)
class Endpoint:
    """What an endpoint serves: versions of one model by name, moved by one conditional update of `epoch`.

    `basis_points` is the candidate's share of traffic (0 to 10000), `salt` what routing keys are hashed with.
    """

    endpoint_id: str
    model_id: str
    contract_major: int
    epoch: int
    stable: int | None
    previous: int | None
    candidate: int | None
    phase: Phase
    basis_points: int
    salt: str


@dataclass(frozen=True)
class EndpointEvent:
    """One move of an endpoint: the row as it became, why, and for a promotion the evidence that it rests on."""

    endpoint_id: str
    epoch: int
    operation: Literal["promote", "rollback"]
    row: Endpoint
    reason: str | None
    evidence: PromotionEvidence | None
    actor: str
    at: int


@dataclass(frozen=True)
class PredictionFacts:
    """One answer that was given.

    `detail_digest` names a stored document (pinned dataset versions, request rows, feature values) and `row` this
    prediction's index in it. `feature_as_of` is the newest time that its features know; `output` is what was said.

    `asked_at` is when it was asked and `observed_at` as of when its features were read, both in the world's time.
    `caller_id` is the request's own id, `event_key` the digest of the fields by which a label source finds the event.
    `segments` are the groups that quality is told by.
    """

    prediction_id: str
    feature_as_of: int | None
    feature_status: str
    feature_row_digest: str
    request_digest: str
    output: Json
    arm: Arm
    status: str
    latency_us: int
    detail_digest: str
    row: int
    asked_at: int | None = field(default=None, kw_only=True)
    observed_at: int | None = field(default=None, kw_only=True)
    caller_id: str | None = field(default=None, kw_only=True)
    event_key: str | None = field(default=None, kw_only=True)
    score: float | None = field(default=None, kw_only=True)
    segments: Mapping[str, Json] = field(default_factory=dict[str, "Json"], kw_only=True)
    source: PredictionSource = field(default="batch", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("prediction_id", "feature_status", "status"):
            check_name(name, getattr(self, name))
        for name in ("feature_as_of", "asked_at", "observed_at"):
            check_time(name, getattr(self, name))
        for name in ("caller_id", "event_key"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        check_json("score", self.score)
        check_json("segments", self.segments)
        check_one_of("source", self.source, get_args(PredictionSource))
        for name in ("feature_row_digest", "request_digest", "detail_digest"):
            check_hash(name, getattr(self, name))
        check_json("output", self.output)
        check_one_of("arm", self.arm, get_args(Arm))
        for name in ("latency_us", "row"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True)
class Prediction(PredictionFacts):
    """A recorded prediction, with the endpoint's epoch and the version that answered.

    `log_server` and `log_segment` name where it was logged; None for one that no server logged.
    """

    endpoint_id: str
    endpoint_epoch: int
    model_id: str
    model_version: int
    at: int
    log_server: str | None
    log_segment: str | None


@dataclass(frozen=True)
class PredictionBatch:
    """Answers of one version of an endpoint at one epoch. `blobs` hold the detail documents."""

    endpoint_id: str
    endpoint_epoch: int
    model_version: int
    records: tuple[PredictionFacts, ...]
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        check_name("endpoint_id", self.endpoint_id)
        for name in ("endpoint_epoch", "model_version"):
            check_count(name, getattr(self, name))
        check_blobs(self.blobs, None)
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))
        ids = {record.prediction_id for record in self.records}
        if len(ids) != len(self.records):
            raise InvalidFact("records", len(self.records) - len(ids), "each prediction id once")
        missing = {record.detail_digest for record in self.records} - {blob.digest for blob in self.blobs}
        if missing:
            raise InvalidFact("blobs", sorted(missing), "the blob of every detail document")


def check_one_of(field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse what is not one of the allowed words. Raises: InvalidFact."""
    if value not in allowed:
        raise InvalidFact(field_name, value, f"one of {', '.join(allowed)}")
