"""Training runs, attempts, budgets: frozen records, each checked when it is made. Times are int64 microseconds UTC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from headway.artifacts.digests import Json, canonical_json, digest_json
from headway.artifacts.store import Blob
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import check_blobs, check_count, check_hash, check_name, check_text, run_node

AttemptState: TypeAlias = Literal["queued", "admitted", "running", "succeeded", "failed", "cancelled", "lost"]
FinalState: TypeAlias = Literal["succeeded", "failed", "cancelled", "lost"]
RunStatus: TypeAlias = Literal["open", "succeeded", "failed", "cancelled", "lost"]
Decision: TypeAlias = Literal["started", "adopted", "up_to_date"]
Asker: TypeAlias = Literal["person", "machine"]
Retry: TypeAlias = Literal["free", "counted", "never"]

OPEN_STATES = ("queued", "admitted", "running")
FINAL_STATES: tuple[str, ...] = get_args(FinalState)
# trainer.spec.ExitCode: a refused spec and failed user code come back unchanged however often they are tried.
CODE_FAULTS = frozenset({64, 65})
PREEMPTED = 75


def check_json(field_name: str, value: Json) -> None:
    """Refuse what has no canonical JSON (NaN, infinities, other types). Raises: InvalidFact."""
    try:
        canonical_json(value)
    except (TypeError, ValueError) as error:
        raise InvalidFact(field_name, value, f"JSON ({error})") from error


def sorted_blobs(blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
    """Return the blobs in the one order in which records keep them."""
    return tuple(sorted(set(blobs), key=lambda blob: (blob.digest, blob.size, blob.media_type)))


@dataclass(frozen=True)
class RunFacts:
    """What a training run is: everything that it pins before its first attempt.

    `inputs` are snapshot ids; `datasets` are the dataset versions below them as (dataset, version, content digest).
    `layout` is the declared parallel layout, `nodes` its node count; `spec_digest` names the stored run spec.
    `dagster_run_id` and `note` are attributes, never identity. `budget_id` None: nothing is charged.
    """

    pipeline: str
    partition: str
    inputs: tuple[str, ...]
    datasets: tuple[tuple[str, int, str], ...]
    code_digest: str
    code_dirty: bool
    environment_digest: str
    config_digest: str
    spec_digest: str
    seed: int
    repeat: int
    layout: Mapping[str, Json]
    nodes: int
    budget_id: str | None
    max_attempts: int
    note: str | None
    dagster_run_id: str | None
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        check_name("pipeline", self.pipeline)
        check_name("partition", self.partition, empty=True)
        for name in ("code_digest", "environment_digest", "config_digest", "spec_digest"):
            check_hash(name, getattr(self, name))
        for snapshot_id in self.inputs:
            check_hash("inputs", snapshot_id)
        for dataset, version, content in self.datasets:
            check_name("datasets", dataset)
            _check_positive("datasets", version)
            check_hash("datasets", content)
        if not self.inputs or len(set(self.inputs)) != len(self.inputs):
            raise InvalidFact("inputs", self.inputs, "each snapshot once, and at least one")
        if len({item[:2] for item in self.datasets}) != len(self.datasets):
            raise InvalidFact("datasets", self.datasets, "each dataset version once")
        for name in ("seed", "repeat"):
            check_count(name, getattr(self, name))
        for name in ("nodes", "max_attempts"):
            _check_positive(name, getattr(self, name))
        check_json("layout", self.layout)
        for name in ("budget_id", "dagster_run_id"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        check_text("note", self.note)
        check_blobs(self.blobs, None)
        object.__setattr__(self, "inputs", tuple(sorted(self.inputs)))
        object.__setattr__(self, "datasets", tuple(sorted(self.datasets)))
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))

    def identity_digest(self, tenant: str) -> str:
        """Return the run identity: two asks with one identity are the same run."""
        return digest_json(
            {
                "tenant": tenant,
                "pipeline": self.pipeline,
                "partition": self.partition,
                "inputs": list(self.inputs),
                "datasets": [list(item) for item in self.datasets],
                "code_digest": self.code_digest,
                "environment_digest": self.environment_digest,
                "config_digest": self.config_digest,
                "seed": self.seed,
                "repeat": self.repeat,
            }
        )

    def run_id(self, tenant: str) -> str:
        """Return the run's name: the first 24 hex digits of its identity."""
        return self.identity_digest(tenant).removeprefix("sha256:")[:24]


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run. `token` fences: a smaller one may change nothing any more. Terminal states never change.

    `code` is the exit code observed (None: nobody saw one), `layout` the one that the attempt runs with.
    `worker_seconds` is what was observed at the end. `cancel_reason` is set when somebody asked to stop. `waiting` says
    why an open attempt does not run yet. `reason_code` names the kind of its end and `retry` what follows from it; both
    are None where the exit code says it all.
    """

    run_id: str
    attempt: int
    token: int
    state: AttemptState
    reason: str | None
    code: int | None
    layout: Mapping[str, Json]
    launcher: str
    external_name: str
    created_at: int
    started_at: int | None
    heartbeat_at: int | None
    ended_at: int | None
    worker_seconds: float | None
    cancel_reason: str | None
    waiting: str | None = None
    reason_code: str | None = None
    retry: Retry | None = None

    @property
    def is_open(self) -> bool:
        """Whether its end was not observed yet."""
        return self.state in OPEN_STATES

    @property
    def failed_by_code(self) -> bool:
        """Whether it would fail again: the spec was refused, the user's code failed, or no queue can ever hold it."""
        return self.state == "failed" and (self.code in CODE_FAULTS if self.retry is None else self.retry == "never")

    @property
    def counts(self) -> bool:
        """Whether it counts against `max_attempts`: infrastructure ended it, and nobody asked for that."""
        counted = self.code != PREEMPTED if self.retry is None else self.retry == "counted"
        return self.state in ("failed", "lost") and not self.failed_by_code and counted


@dataclass(frozen=True)
class RunResult:
    """What a succeeded run left: manifest digests of its artifacts by name, metrics (finite or null), best step."""

    artifacts: Mapping[str, str]
    metrics: Mapping[str, Json]
    best_step: int | None
    blobs: tuple[Blob, ...]

    def __post_init__(self) -> None:
        for name, manifest in self.artifacts.items():
            check_name("artifacts", name)
            check_hash(f"artifacts[{name!r}]", manifest)
        check_json("metrics", self.metrics)
        if self.best_step is not None:
            check_count("best_step", self.best_step)
        check_blobs(self.blobs, None)
        object.__setattr__(self, "blobs", sorted_blobs(self.blobs))


@dataclass(frozen=True)
class TrainingRun:
    """A run with its attempts in order. Only `succeeded` is final: every other end may be followed by an attempt.

    `status` follows from the last attempt; one that ended badly after somebody asked to stop is `cancelled`.
    `cancel_requested` says that of the last attempt. `worker_seconds` is the cost of all attempts.
    """

    facts: RunFacts
    run_id: str
    identity_digest: str
    status: RunStatus
    attempts: tuple[Attempt, ...]
    cancel_requested: bool
    result: RunResult | None
    failed_by_code: bool
    created_at: int
    worker_seconds: float

    @property
    def node(self) -> str:
        """The lineage node."""
        return run_node(self.run_id)

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]


@dataclass(frozen=True)
class Submission:
    """What asking for a run came to. `attempt` is the open one; None when the run is up to date."""

    decision: Decision
    run: TrainingRun
    attempt: Attempt | None


@dataclass(frozen=True)
class RunEvent:
    """One event of a run; `seq` counts 1, 2, ... per run.

    Events of a node's stream keep its number as `node_seq`. Those with `node` None are the catalog's own:
    `attempt.created`, `attempt.running`, `attempt.finished`, `cancel.requested`; the state is their fold.
    """

    seq: int
    attempt: int | None
    node: int | None
    node_seq: int | None
    kind: str
    data: Mapping[str, Json]
    at: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of an attempt: its manifest, and the layout that wrote it."""

    run_id: str
    attempt: int
    step: int
    manifest_digest: str
    layout: Mapping[str, Json]
    created_at: int


@dataclass(frozen=True)
class BudgetState:
    """A budget in a period, in `unit`: what may be spent, what open attempts hold, what was spent.

    A reservation is refused unless reserved + committed + asked <= limit. What an attempt really used is committed
    even where it is more than it reserved, so that only such overruns can carry the sum past the limit.
    """

    limit: int
    reserved: int
    committed: int
    unit: str


@dataclass(frozen=True)
class BudgetEntry:
    """One movement of a budget, on behalf of its owner (a run's attempt)."""

    entry_id: str
    kind: Literal["reserve", "commit", "release"]
    owner_kind: str
    owner_id: str
    amount: int
    at: int


def _check_positive(field_name: str, value: int) -> None:
    check_count(field_name, value)
    if value < 1:
        raise InvalidFact(field_name, value, "at least 1")
