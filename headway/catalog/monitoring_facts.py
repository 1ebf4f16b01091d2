"""Shipments of answers, labels, reports, retraining: frozen records, each checked when it is made.

Times are int64 microseconds UTC: those of facts are the world's (when a request was asked, an outcome known, a report
made), `at` and `created_at` are the machine's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from headway.artifacts.digests import Json, digest_json
from headway.artifacts.store import Blob
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import check_blobs, check_count, check_hash, check_name, check_text, check_time
from headway.catalog.registry_facts import PredictionBatch, check_one_of
from headway.catalog.run_facts import check_json, sorted_blobs

LabelSource: TypeAlias = Literal["auto", "human", "backfill"]
LabelStatus: TypeAlias = Literal["accepted", "waiting", "superseded", "duplicate", "refused"]
ReportKind: TypeAlias = Literal["quality", "drift", "labels", "predictions"]
RetrainCause: TypeAlias = Literal["drift", "quality", "person"]
RetrainState: TypeAlias = Literal[
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
]

# A person's word stands over what a system sent, and that over what was filled in later.
SOURCE_RANK: Mapping[LabelSource, int] = {"human": 2, "auto": 1, "backfill": 0}
FIRST_STATES = frozenset({"waiting_for_evaluation_window", "waiting_for_approval", "ready"})
CLOSED_STATES = frozenset({"promoted", "kept_old", "failed", "rejected", "expired"})
RETRAIN_MOVES: Mapping[str, frozenset[str]] = {
    "waiting_for_evaluation_window": frozenset({"ready", "rejected", "expired"}),
    "waiting_for_approval": frozenset({"ready", "rejected", "expired", "waiting_for_evaluation_window"}),
    "ready": frozenset({"running", "rejected", "expired"}),
    "running": frozenset({"promoted", "kept_old", "failed", "needs_human"}),
    "needs_human": frozenset({"ready", "rejected"}),
}
_PERIOD = re.compile(r"\d{4}-(0[1-9]|1[0-2])")


@dataclass(frozen=True)
class SegmentProgress:
    """Bytes `from_offset` to `to_offset` of a server's log segment, and what was in them.

    `records` were whole, `torn` could not be read, `dropped` were never written (the log was full) and are told here.
    """

    server: str
    segment: str
    from_offset: int
    to_offset: int
    records: int
    torn: int
    dropped: int

    def __post_init__(self) -> None:
        for name in ("server", "segment"):
            check_name(name, getattr(self, name))
        for name in ("from_offset", "to_offset", "records", "torn", "dropped"):
            check_count(name, getattr(self, name))
        if self.to_offset <= self.from_offset:
            raise InvalidFact("to_offset", self.to_offset, f"an offset after from_offset {self.from_offset}")


@dataclass(frozen=True)
class Shipment:
    """Every answer in a range of a log segment, in one batch per endpoint, epoch and version."""

    segment: SegmentProgress
    batches: tuple[PredictionBatch, ...]

    def __post_init__(self) -> None:
        ids = [record.prediction_id for batch in self.batches for record in batch.records]
        if len(set(ids)) != len(ids):
            raise InvalidFact("batches", len(ids) - len(set(ids)), "each prediction id once")
        if self.segment.records != len(ids):
            raise InvalidFact(
                "segment.records", self.segment.records, f"the number of answers in the batches, {len(ids)}"
            )
        sources = {record.source for batch in self.batches for record in batch.records} - {"online"}
        if sources:
            raise InvalidFact("source", sorted(sources), "online: a log segment holds what a server answered")


@dataclass(frozen=True)
class LabelFacts:
    """What became known about an answer, addressed by exactly one of prediction id, caller's id and event key.

    `observed_at` is when the outcome was known and `received_at` when it came, both in the world's time.
    When it came is no part of what a label says: the same label may come again.
    """

    label_id: str
    endpoint_id: str
    prediction_id: str | None
    caller_id: str | None
    event_key: str | None
    value: Json
    source: LabelSource
    observed_at: int
    received_at: int
    actor: str
    reason: str | None

    def __post_init__(self) -> None:
        for name in ("label_id", "endpoint_id", "actor"):
            check_name(name, getattr(self, name))
        given = [name for name in ("prediction_id", "caller_id", "event_key") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidFact("address", given, "exactly one of prediction_id, caller_id and event_key")
        check_name(given[0], getattr(self, given[0]))
        check_json("value", self.value)
        check_one_of("source", self.source, get_args(LabelSource))
        for name in ("observed_at", "received_at"):
            _check_given_time(name, getattr(self, name))
        check_text("reason", self.reason)

    @property
    def order(self) -> tuple[int, int, str]:
        """The greatest of a prediction's labels is its current one."""
        return SOURCE_RANK[self.source], self.observed_at, self.label_id


@dataclass(frozen=True)
class Label:
    """A stored label. `prediction_id` is the answer that it is attached to; None while it waits, with `reason`."""

    facts: LabelFacts
    prediction_id: str | None
    current: bool
    reason: str

    @property
    def label_id(self) -> str:
        """The label's name."""
        return self.facts.label_id

    @property
    def value(self) -> Json:
        """What it says."""
        return self.facts.value

    @property
    def source(self) -> LabelSource:
        """Who says it: a system, a person, a later fill."""
        return self.facts.source

    @property
    def observed_at(self) -> int:
        """When the outcome was known, world time."""
        return self.facts.observed_at

    @property
    def received_at(self) -> int:
        """When it came, world time."""
        return self.facts.received_at


@dataclass(frozen=True)
class LabelOutcome:
    """What became of one label of a command.

    accepted: attached, and the prediction's current one. superseded: attached, another one is current. waiting: kept
    in the inbox, `reason` is `no_prediction` or `ambiguous`. duplicate: it was there, `reason` is its status now.
    refused: not kept, `reason` is `conflict` (this id came with other content) or `ambiguous` (several answers have
    this caller's id: `candidates`).
    """

    label_id: str
    status: LabelStatus
    reason: str
    prediction_id: str | None
    candidates: tuple[str, ...]


@dataclass(frozen=True)
class ReportFacts:
    """A report about an endpoint's week: `window` is the week's key, `start` and `end` its bounds (end excluded).

    `model_version` None: about all versions. `document_digest` names the whole document in the store, whose blob is
    among `blobs` (with its plots).
    """

    kind: ReportKind
    endpoint_id: str
    model_version: int | None
    window: str
    start: int
    end: int
    verdict: str
    reason: str
    document_digest: str
    metrics: Mapping[str, float | int | None]
    made_at: int
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, get_args(ReportKind))
        for name in ("endpoint_id", "window", "verdict"):
            check_name(name, getattr(self, name))
        _check_version("model_version", self.model_version)
        for name in ("start", "end", "made_at"):
            _check_given_time(name, getattr(self, name))
        if self.end <= self.start:
            raise InvalidFact("end", self.end, f"a time after start {self.start}")
        check_text("reason", self.reason)
        check_hash("document_digest", self.document_digest)
        check_json("metrics", self.metrics)
        check_blobs(self.blobs, self.document_digest)
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))

    @property
    def report_id(self) -> str:
        """The report's identity: what it is about, and its document."""
        about = [self.kind, self.endpoint_id, self.model_version, self.window, self.document_digest]
        return digest_json(["report", *about])


@dataclass(frozen=True)
class Report(ReportFacts):
    """A recorded report; `seq` counts 1, 2, ... per kind, endpoint, version and window, the newest is in force."""

    seq: int
    created_at: int


@dataclass(frozen=True)
class RetrainFacts:
    """Why a pipeline should train again, and what that may cost.

    `model_version` is the champion, `fingerprint` names what was seen, `evidence` the reports. `cost_seconds` are
    reserved from `budget_id` in `period` (a UTC month of world time, as 2013-06). `as_of` is the training window's
    partition, None while it is not known; `due_at` when the request can go on.
    """

    pipeline: str
    endpoint_id: str
    model_version: int
    fingerprint: str
    cause_digest: str
    cause: RetrainCause
    evidence: tuple[str, ...]
    reason: str
    expected_gain: float | None
    cost_seconds: int
    budget_id: str
    period: str
    as_of: str | None
    due_at: int | None
    state: RetrainState
    made_at: int

    def __post_init__(self) -> None:
        for name in ("pipeline", "endpoint_id", "budget_id"):
            check_name(name, getattr(self, name))
        _check_version("model_version", self.model_version)
        check_text("fingerprint", self.fingerprint)
        check_hash("cause_digest", self.cause_digest)
        check_one_of("cause", self.cause, get_args(RetrainCause))
        for report_id in self.evidence:
            check_hash("evidence", report_id)
        check_text("reason", self.reason)
        check_json("expected_gain", self.expected_gain)
        check_count("cost_seconds", self.cost_seconds)
        if not _PERIOD.fullmatch(self.period):
            raise InvalidFact("period", self.period, "a month as 2013-06")
        if self.as_of is not None:
            check_name("as_of", self.as_of)
        check_time("due_at", self.due_at)
        check_one_of("state", self.state, tuple(sorted(FIRST_STATES)))
        _check_given_time("made_at", self.made_at)

    def request_id(self, tenant: str) -> str:
        """Return the request's name: one cause is one request."""
        return digest_json([tenant, self.pipeline, self.cause_digest]).removeprefix("sha256:")[:24]


@dataclass(frozen=True)
class RetrainRequest:
    """A request as it stands: `facts` as it was opened, the rest as its last move left it.

    `epoch` counts its moves from 1. `cost_seconds` is what it used so far, all attempts together.
    """

    facts: RetrainFacts
    request_id: str
    state: RetrainState
    reason: str
    as_of: str | None
    run_id: str | None
    dagster_run_id: str | None
    candidate_version: int | None
    cost_seconds: float | None
    epoch: int
    created_at: int
    closed_at: int | None

    @property
    def pipeline(self) -> str:
        """The pipeline that should train."""
        return self.facts.pipeline

    @property
    def is_open(self) -> bool:
        """Whether it may still move; it holds its reservation so long."""
        return self.state not in CLOSED_STATES


@dataclass(frozen=True)
class RetrainEvent:
    """One move of a request: the request as it became, and who moved it."""

    request: RetrainRequest
    actor: str
    at: int


@dataclass(frozen=True)
class DecisionFacts:
    """What was decided about retraining a pipeline (to do or not to do), why, and on which facts (`fingerprint`)."""

    pipeline: str
    endpoint_id: str
    decision: str
    reason: str
    fingerprint: str
    made_at: int

    def __post_init__(self) -> None:
        for name in ("pipeline", "endpoint_id", "decision"):
            check_name(name, getattr(self, name))
        for name in ("reason", "fingerprint"):
            check_text(name, getattr(self, name))
        _check_given_time("made_at", self.made_at)


@dataclass(frozen=True)
class RetrainDecision(DecisionFacts):
    """A recorded decision; `seq` counts 1, 2, ... per pipeline."""

    seq: int


def current_of(labels: Iterable[LabelFacts]) -> LabelFacts:
    """Return the label in force among those of one prediction: a function of the set, whatever came first."""
    return max(labels, key=lambda label: label.order)


def _check_given_time(name: str, value: int) -> None:
    if value is None:
        raise InvalidFact(name, value, "int64 microseconds UTC (a Python int)")
    check_time(name, value)


def _check_version(name: str, value: int | None) -> None:
    if value is None:
        return
    check_count(name, value)
    if value < 1:
        raise InvalidFact(name, value, "a version, from 1")
