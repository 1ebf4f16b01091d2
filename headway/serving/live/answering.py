"""Answers a batch in the lane's thread: features, scores, the log; a fault of one request stays with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from headway.catalog.clock import Clock, system_clock
from headway.declaration import duration_us
from headway.errors import HeadwayError
from headway.features.online.store import OnlineNotReady
from headway.features.online.store import OnlineUnavailable as StoreUnavailable
from headway.serving.features import InputQuarantined
from headway.serving.live.child import ChildLost, ChildRefused, WrongRowCount
from headway.serving.live.lane import Asked, Outcome
from headway.serving.live.records import Logged, Schemas, encode_record, views_of
from headway.serving.live.spool import Spool, SpoolFull
from headway.serving.live.types import (
    DeadlineExceeded,
    FeaturesUnavailable,
    Inference,
    LogFull,
    NotReady,
    OnlineUnavailable,
    ScoringFailed,
)
from headway.serving.predict import new_ids
from headway.serving.requests import serving_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headway.features.online.store import OnlineState
    from headway.serving.features import Freshness

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
# A view that is behind catches up with the next sync.
_FEATURES_RETRY_SECONDS = 5.0


class Computed(Protocol):
    """Features of requests, as `headway.features.online.answer` gives them."""

    @property
    def requests(self) -> pa.Table:
        """The requests as they may be kept."""
        ...

    @property
    def asked(self) -> Sequence[tuple[Any, ...]]:
        """The rows of `requests` as plain values (`headway.features.online.plain`)."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The columns of the feature values."""
        ...

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """The feature values of each request, as plain values."""
        ...

    @property
    def moments(self) -> Sequence[int]:
        """The observations, microseconds UTC."""
        ...

    @property
    def freshness(self) -> Mapping[str, Sequence[Freshness]]:
        """By view, one per row."""
        ...

    @property
    def state(self) -> OnlineState:
        """What the store held."""
        ...


class Features(Protocol):
    """Online features of one pipeline, as `headway.features.online.answer` computes them."""

    @property
    def rows_independent(self) -> bool:
        """Whether a row's features are the same whatever is computed with it."""
        ...

    def compute(self, requests: pa.Table, now: int) -> Computed:
        """Compute every feature of every request as of its observation."""
        ...


class Answerer:
    """Answers batches of one endpoint.

    Args:
        features: the pipeline's online features.
        spool: the inference log.
        tenant: whose answers they are.
        clock: the world's.
        degraded: the codes of the server at this moment.
        process_lost: called when a scoring process was lost.
    """

    def __init__(
        self,
        features: Features,
        spool: Spool,
        tenant: str,
        clock: Clock,
        degraded: Callable[[], tuple[str, ...]],
        process_lost: Callable[[], None],
    ) -> None:
        self._features = features
        self._spool = spool
        self._schemas = Schemas(spool.folder)
        self._tenant = tenant
        self._clock = clock
        self._degraded = degraded
        self._process_lost = process_lost
        self.log_full = False
        self.state: OnlineState | None = None

    def __call__(self, batch: Sequence[Asked]) -> list[Outcome]:
        """An outcome for each request. When a batch fails, each request is tried alone, so that only a bad one fails.

        What no request is to blame for (the store, the log, a model that answers with another number of rows) fails
        all of them at once.
        """
        try:
            return self._answer(batch)
        except (NotReady, OnlineUnavailable, OnlineNotReady, LogFull) as error:
            return [error] * len(batch)
        except WrongRowCount as error:
            logger.error("%s of %s: %s", batch[0].slot.served.model_id, batch[0].slot.pointer.name, error.message)
            failed = ScoringFailed("wrong_row_count", error.message)
            return [failed] * len(batch)
        except Exception as error:  # noqa: BLE001 - feature functions are a pipeline's own, and may raise anything
            if len(batch) == 1:
                return [_named(batch[0], error)]
            logger.warning("a batch of %d requests is tried one by one: %r", len(batch), error)
            return [outcome for asked in batch for outcome in self([asked])]

    def _answer(self, batch: Sequence[Asked]) -> list[Outcome]:
        outcomes: dict[Asked, Outcome] = {}
        times = _Times(time.monotonic())
        going = _in_time(batch, outcomes, "features")
        if going:
            computed = self._compute(going)
            times.feature_us = _us(time.monotonic() - times.begun)
            rows = _rows(going)
            usable = [a for a in going if self._usable(a, computed, rows[a], outcomes)]
            usable = _in_time(usable, outcomes, "compute")
            if usable:
                self._score(usable, computed, rows, times, outcomes)
        return [outcomes[asked] for asked in batch]

    def _compute(self, batch: Sequence[Asked]) -> _Rows:
        requests = batch[0].requests if len(batch) == 1 else pa.concat_tables([a.requests for a in batch])
        alone = not self._features.rows_independent and requests.num_rows > 1
        parts = [requests.slice(i, 1) for i in range(requests.num_rows)] if alone else [requests]
        try:
            computed = [self._features.compute(part, self._clock()) for part in parts]
        except StoreUnavailable as error:
            raise OnlineUnavailable(error.message, _RETRY_SECONDS) from error
        self.state = computed[-1].state
        return _together(computed)

    def _usable(self, asked: Asked, computed: _Rows, rows: slice, outcomes: dict[Asked, Outcome]) -> bool:
        """Whether every view that the declaration requires is there for every row of the request."""
        for view, group in serving_of(asked.slot.pipeline.spec).groups.items():
            if group.policy == "fail":
                bad = [f for f in computed.freshness[view][rows] if f.status in ("stale", "missing")]
                if bad:
                    limit = None if group.max_staleness is None else duration_us(group.max_staleness) / 1_000_000
                    worst = bad[0]
                    outcomes[asked] = FeaturesUnavailable(
                        view, worst.status, worst.reason, worst.age, limit, _FEATURES_RETRY_SECONDS
                    )
                    return False
        return True

    def _score(
        self,
        going: Sequence[Asked],
        computed: _Rows,
        rows: Mapping[Asked, slice],
        times: _Times,
        outcomes: dict[Asked, Outcome],
    ) -> None:
        values = [row for asked in going for row in computed.rows[rows[asked]]]
        for asked in going:
            asked.stage = "compute"
        started = time.monotonic()
        scores = self._scores(going, computed.schema, values)
        times.compute_us = _us(time.monotonic() - started)
        answered: dict[Asked, list[Inference]] = {}
        degraded = self._degraded()
        place = 0
        for asked in going:
            mine = scores[place : place + asked.rows]
            place += asked.rows
            if not ((mine >= 0) & (mine <= 1)).all():
                outcomes[asked] = _failed(asked, "not_finite", f"{mine.tolist()!r:.200} is no probability")
            elif asked.gone:
                outcomes[asked] = DeadlineExceeded("compute")
            else:
                answered[asked] = _inferences(asked, computed, rows[asked], mine, degraded, times)
        try:
            self._log(answered, computed, rows)
        except LogFull as error:
            outcomes |= dict.fromkeys(answered, error)
        else:
            outcomes |= answered

    def _scores(
        self, going: Sequence[Asked], schema: pa.Schema, values: Sequence[tuple[Any, ...]]
    ) -> NDArray[np.float64]:
        """The model's scores. A process that died is replaced, and the rows are scored once more."""
        version, until = going[0].slot.version, max(a.deadline for a in going)
        try:
            return version.score(schema, values, until)
        except ChildLost:
            self._process_lost()
            return version.score(schema, values, until)

    def _log(self, answered: Mapping[Asked, Sequence[Inference]], computed: _Rows, rows: Mapping[Asked, slice]) -> None:
        """Append every answer to the inference log. Raises `LogFull` where the declaration lets none go unlogged."""
        if not answered:
            return
        log = serving_of(next(iter(answered)).slot.pipeline.spec).log
        try:
            self._spool.append(list(self._records(answered, computed, rows)), log.max_bytes)
        except (SpoolFull, OSError) as error:
            if not self.log_full:
                logger.error("the inference log takes no record: %s", error)
            self.log_full = True
            why = error.why if isinstance(error, SpoolFull) else f"disk ({error.strerror})"
            if log.policy == "must_log":
                raise LogFull(why, _RETRY_SECONDS) from error
            self._spool.drop(sum(asked.rows for asked in answered))
        else:
            self.log_full = False

    def _records(
        self, answered: Mapping[Asked, Sequence[Inference]], computed: _Rows, rows: Mapping[Asked, slice]
    ) -> Iterator[bytes]:
        schema = self._schemas.keep(computed.kinds, computed.schema)
        requests, values = computed.asked, computed.rows
        now, wall = time.monotonic(), system_clock()
        for asked, inferences in answered.items():
            for number, (row, inference) in enumerate(
                zip(range(*rows[asked].indices(len(values))), inferences, strict=True)
            ):
                served = inference.served
                caller = asked.caller_id
                yield encode_record(
                    Logged(
                        prediction_id=inference.prediction_id,
                        asked_at=asked.asked_at,
                        wall_at=wall,
                        tenant=self._tenant,
                        pipeline=asked.slot.pipeline.name,
                        endpoint=served.endpoint_id,
                        epoch=served.endpoint_epoch,
                        version=served.version,
                        arm=served.arm,
                        artifact_digest=served.artifact_digest,
                        feature_set_version=served.feature_set_version,
                        inputs_digest=computed.inputs_digests[row],
                        caller_id=caller if caller is None or asked.rows == 1 else f"{caller}/{number}",
                        observed=inference.observed,
                        schema=schema,
                        request=requests[row],
                        values=values[row],
                        views=views_of(inference.views),
                        probability=inference.probability,
                        degraded=inference.degraded,
                        latency_us=_us(now - asked.arrived),
                    )
                )


@dataclass(frozen=True)
class _Rows:
    """Features of a batch's rows, asked in columns of `kinds`; `inputs_digests` names the pins that each rests on."""

    kinds: pa.Schema
    asked: Sequence[tuple[Any, ...]]
    schema: pa.Schema
    rows: Sequence[tuple[Any, ...]]
    moments: Sequence[int]
    freshness: Mapping[str, Sequence[Freshness]]
    inputs_digests: Sequence[str]


def _together(computed: Sequence[Computed]) -> _Rows:
    first = computed[0]
    digests = [c.state.inputs_digest for c in computed for _ in c.rows]
    if len(computed) == 1:
        kinds = first.requests.schema
        return _Rows(kinds, first.asked, first.schema, first.rows, first.moments, first.freshness, digests)
    return _Rows(
        kinds=first.requests.schema,
        asked=[row for c in computed for row in c.asked],
        schema=first.schema,
        rows=[row for c in computed for row in c.rows],
        moments=[moment for c in computed for moment in c.moments],
        freshness={view: [f for c in computed for f in c.freshness[view]] for view in first.freshness},
        inputs_digests=digests,
    )


@dataclass
class _Times:
    """When a batch was begun (`time.monotonic()` seconds), and what its parts took."""

    begun: float
    feature_us: int = 0
    compute_us: int = 0


def _inferences(
    asked: Asked,
    computed: _Rows,
    rows: slice,
    scores: NDArray[np.float64],
    degraded: tuple[str, ...],
    times: _Times,
) -> list[Inference]:
    found: list[Inference] = []
    ids = new_ids(asked.rows)
    for number, row in enumerate(range(rows.start, rows.stop)):
        views = {name: freshness[row] for name, freshness in computed.freshness.items()}
        behind = (f"{name}:{f.incomplete}" for name, f in views.items() if f.incomplete)
        found.append(
            Inference(
                prediction_id=ids[number],
                probability=float(scores[number]),
                observed=computed.moments[row],
                views=views,
                degraded=(*degraded, *behind),
                served=asked.slot.served,
                queue_wait_us=_us(times.begun - asked.arrived),
                feature_us=times.feature_us,
                compute_us=times.compute_us,
            )
        )
    return found


def _in_time(
    batch: Sequence[Asked], outcomes: dict[Asked, Outcome], stage: Literal["features", "compute"]
) -> list[Asked]:
    """Those whose time is not over; the others are not computed."""
    now = time.monotonic()
    going: list[Asked] = []
    for asked in batch:
        if asked.gone or now >= asked.deadline:
            outcomes[asked] = DeadlineExceeded(stage)
        else:
            asked.stage = stage
            going.append(asked)
    return going


def _rows(batch: Sequence[Asked]) -> dict[Asked, slice]:
    found: dict[Asked, slice] = {}
    place = 0
    for asked in batch:
        found[asked] = slice(place, place + asked.rows)
        place += asked.rows
    return found


def _named(asked: Asked, error: Exception) -> BaseException:
    """What a caller is told of an error that its own request met."""
    if isinstance(error, ChildRefused):
        return _failed(asked, "model_refused", error.message)
    if isinstance(error, ChildLost):
        return _failed(asked, "model_died", error.message)
    if isinstance(error, InputQuarantined):
        return FeaturesUnavailable("*", "quarantined", error.message, None, None, _FEATURES_RETRY_SECONDS)
    if isinstance(error, HeadwayError):
        return error
    # Its text may hold what the caller sent; the log of the server has the stack.
    return _failed(asked, "feature_code", type(error).__name__, error)


def _failed(asked: Asked, code: str, message: str, cause: Exception | None = None) -> ScoringFailed:
    """A failure under ids that the caller and the server's log both have."""
    ids = tuple(new_ids(asked.rows))
    logger.error("predictions %s were not given (%s)", ", ".join(ids[:10]), code, exc_info=cause)
    return ScoringFailed(code, message, ids)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))
