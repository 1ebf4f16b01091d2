"""What a server asks of its engine, and what the engine answers or refuses.

Times of the world (`asked`, `observed`) are int64 microseconds UTC; deadlines are seconds of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headway.errors import HeadwayError

if TYPE_CHECKING:
    import pyarrow as pa

    from headway.declaration import PipelineSpec
    from headway.serving.features import Freshness


class UnknownModel(HeadwayError):
    """A name that no endpoint of this server has (404)."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no model {model!r:.80} is served here", f"served are {', '.join(known) or 'none'}")


class VersionNotServed(HeadwayError):
    """A version that the endpoint does not serve now (404); only the stable one answers."""

    def __init__(self, model: str, version: int, stable: int) -> None:
        super().__init__(f"{model} serves version {stable}, not {version}", "leave the version out to ask the stable")


class Retryable(HeadwayError):
    """A refusal that passes: ask again after `retry_after_s` seconds."""

    def __init__(self, message: str, remedy: str, retry_after_s: float) -> None:
        super().__init__(message, remedy)
        self.retry_after_s = retry_after_s


class NotReady(Retryable):
    """Nothing can answer yet or any more (503); `reason` is a code, with a detail after a colon.

    Codes: `starting`, `loading`, `load_failed`, `nothing_promoted`, `no_pointer`, `model_restarting`, `draining`.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"not ready: {reason}", "ask again shortly", retry_after_s)
        self.reason = reason


class QueueFull(Retryable):
    """More rows wait than the queue takes, or than can be answered by the request's deadline (503)."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} rows wait, {limit} is the limit", "ask again shortly", retry_after_s)


class LogFull(Retryable):
    """The inference log takes no record, and the pipeline declares that nothing is answered unlogged (503)."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(
            f"the inference log takes no more: {why}", "ship it, or free space; see `policy`", retry_after_s
        )


class OnlineUnavailable(Retryable):
    """The online store did not answer (503)."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(f"the online store does not answer: {why}", "ask again shortly", retry_after_s)


class DeadlineExceeded(HeadwayError):
    """The request's time was spent before an answer (504); `where` says before or in which part."""

    def __init__(self, where: Literal["features", "queue", "compute"]) -> None:
        super().__init__(f"the deadline passed ({where})", "ask once more, with more time")
        self.where = where


class FeaturesUnavailable(Retryable):
    """A view that the declaration requires is missing or too old (424). `age_s` is None when it has no value at all."""

    def __init__(
        self, view: str, status: str, reason: str, age_s: float | None, limit_s: float | None, retry_after_s: float
    ) -> None:
        age = "" if age_s is None else f", {age_s:.0f} s old"
        limit = "" if limit_s is None else f", limit {limit_s:.0f} s"
        super().__init__(
            f"features of {view!r} are {status} ({reason}{age}{limit}), and the pipeline declares policy fail",
            "ask again when the source has caught up",
            retry_after_s,
        )
        self.view, self.status, self.reason, self.age_s, self.limit_s = view, status, reason, age_s, limit_s


class ScoringFailed(HeadwayError):
    """The model gave this request no usable answer (500); `code` names how.

    Codes: `model_refused` (an input that it does not take, or its code raised), `model_died`, `wrong_row_count`,
    `not_finite`, `feature_code`. `prediction_ids` are what the rows would have been called; the server's log names
    them.
    """

    def __init__(self, code: str, message: str, prediction_ids: tuple[str, ...] = ()) -> None:
        super().__init__(f"{code}: {message}", "the request was not answered; the server's log has the cause")
        self.code = code
        self.prediction_ids = prediction_ids


@dataclass(frozen=True)
class Served:
    """The version that answers now. `degraded` lists what a caller should know, such as `catalog_unreachable`.

    Codes of `degraded`: `catalog_unreachable`, `load_failed:<version>@epoch <epoch>`, `log_full`.
    `contract` is the model's contract document (`inputs` and `output`), `contract_hash` its digest. `run_id` is the
    training run that made the version.
    """

    model_id: str
    endpoint_id: str
    endpoint_epoch: int
    arm: Literal["stable"]
    version: int
    artifact_digest: str
    contract: Mapping[str, Any]
    contract_hash: str
    feature_set_version: int
    degraded: tuple[str, ...]
    spec: PipelineSpec = field(repr=False)
    run_id: str


@dataclass(frozen=True)
class Inference:
    """One answered row. `degraded` holds the server's codes and `<view>:<why>` of every incomplete view.

    `served` is what answered: a pointer may move between a request's arrival and its answer. `observed` is the as-of
    of its features.
    """

    prediction_id: str
    probability: float
    observed: int
    views: Mapping[str, Freshness]
    degraded: tuple[str, ...]
    served: Served
    queue_wait_us: int
    feature_us: int
    compute_us: int


@dataclass(frozen=True)
class SpoolStatus:
    """The inference log: what waits on disk, its limit, and what was lost (`dropped`) or found torn."""

    records: int
    bytes: int
    limit: int
    dropped: int
    torn: int
    segments: int


@dataclass(frozen=True)
class EngineStatus:
    """What `/metrics` and a person see. `epochs` and `loaded` are by endpoint; ages are seconds.

    `catalog_age_s` is the time since the catalog last answered, None: it has not answered since the start.
    """

    epochs: Mapping[str, int]
    loaded: Mapping[str, tuple[int, ...]]
    degraded: Mapping[str, tuple[str, ...]]
    catalog_age_s: float | None
    spool: SpoolStatus
    queue_rows: int
    watermarks: Mapping[str, int | None]


class Engine(Protocol):
    """Answers requests with the version that a signed pointer names. One event loop, one engine."""

    def served(self, model: str, version: int | None = None) -> Served:
        """What answers for a model now.

        Raises:
            UnknownModel, VersionNotServed, NotReady: as they say.
        """
        ...

    def models(self) -> tuple[str, ...]:
        """Names that `served` knows, which are those of the endpoints."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether requests are taken, and why not (a code of `NotReady`), else an empty text."""
        ...

    async def infer(
        self, served: Served, requests: pa.Table, *, caller_id: str | None, deadline: float
    ) -> list[Inference]:
        """Answer requests (as `read_requests` gives them), all or none, each logged before this returns.

        Raises:
            RequestsRefused: an observation that is still to come.
            ContractNotMet: an input that the model requires is null in a row.
            DeadlineExceeded, QueueFull, NotReady, FeaturesUnavailable, LogFull, OnlineUnavailable: as they say.
            OnlineNotReady: the store was never filled for these features (headway.features.online).
            ScoringFailed: only this request's rows are concerned.
        """
        ...

    def now(self) -> int:
        """The world's time, microseconds UTC."""
        ...

    def status(self) -> EngineStatus:
        """Figures of this moment; cheap."""
        ...

    async def start(self) -> None:
        """Load what the pointer names; returns when it is ready or known not to be. A second start is refused."""
        ...

    async def stop(self, drain_s: float) -> None:
        """Readiness off, new requests refused; what is in flight is finished within `drain_s`, the log flushed."""
        ...
