"""The engine of `headway serve`: what answers requests, as `headway.serving.live.types.Engine` says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from headway.errors import HeadwayError
from headway.serving.live.answering import Answerer, Features
from headway.serving.live.following import Followed, Following, Slot
from headway.serving.live.lane import Asked, Lane
from headway.serving.live.spool import Spool, SpoolLimits
from headway.serving.live.types import (
    DeadlineExceeded,
    EngineStatus,
    Inference,
    NotReady,
    Served,
    UnknownModel,
    VersionNotServed,
)
from headway.serving.requests import RequestProblem, RequestsRefused, example_rows, is_asked_at
from headway.world import world_clock

if TYPE_CHECKING:
    from headway.declaration import PipelineSpec
    from headway.features.online.store import OnlineStore
    from headway.home import Settings
    from headway.loading import Pipeline


logger = logging.getLogger(__name__)

# A catalog's name, less the number of a row.
MAX_CALLER_ID = 240
_RETRY_SECONDS = 1.0
_DRAIN_TICK_SECONDS = 0.01


FeaturesOf = Callable[["Pipeline"], Features]


@dataclass(frozen=True)
class EngineLimits:
    """Rows that may wait per endpoint, rows of a batch, and how the log is cut.

    `spare`: a process with torch waits warm (some 300 MB), so that a promoted version answers within a second.
    """

    queue_rows: int = 4096
    batch_rows: int = 64
    spare: bool = True
    spool: SpoolLimits = field(default_factory=SpoolLimits)


class EngineStarted(HeadwayError):
    """An engine starts once."""


class LiveEngine:
    """Answers with what signed pointers name. All its methods are called from one event loop.

    The catalog need not answer, not even at the start: then the pointers on disk are followed.

    Args:
        settings: where everything is.
        pipelines: the tree's pipelines by name.
        online: the store of feature rows.
        name: the server's name; of one name one server runs at a time.
        endpoints: only these; None: every endpoint that serves one of the pipelines.
        limits: sizes of queue, batch and log.
        features_of: makes the online features of a pipeline; None: those of `headway.features.online`.
    """

    def __init__(
        self,
        settings: Settings,
        pipelines: Mapping[str, Pipeline],
        online: OnlineStore,
        *,
        name: str = "default",
        endpoints: Collection[str] | None = None,
        limits: EngineLimits = EngineLimits(),
        features_of: FeaturesOf | None = None,
    ) -> None:
        self._settings = settings
        self._pipelines = pipelines
        self._online = online
        self._limits = limits
        self._features_of = features_of or self._online_features
        self._folder = settings.serving_folder / name
        self._only = endpoints
        self._clock = world_clock(settings.clock_file)
        self._following: Following | None = None
        self._spool: Spool | None = None
        self._lanes: dict[str, Lane] = {}
        self._answerers: dict[str, Answerer] = {}
        self._draining = False

    def now(self) -> int:
        """The world's time, microseconds UTC."""
        return self._clock()

    def models(self) -> tuple[str, ...]:
        """Names of the endpoints that are known."""
        known = () if self._following is None else self._following.endpoints
        return tuple(sorted({*known, *(self._only or ())}))

    def served(self, model: str, version: int | None = None) -> Served:
        """What answers for a model now. Raises `UnknownModel`, `VersionNotServed`, `NotReady`."""
        if model not in self.models():
            raise UnknownModel(model, self.models())
        followed = None if self._following is None else self._following.endpoints.get(model)
        if self._draining:
            raise NotReady("draining", _RETRY_SECONDS)
        if followed is None or followed.current is None:
            raise NotReady(self._why_not(followed), _RETRY_SECONDS)
        served = followed.current.served
        if version not in (None, served.version):
            raise VersionNotServed(model, int(version or 0), served.version)
        degraded = self._degraded(followed)
        return replace(served, degraded=degraded) if degraded else served

    def ready(self) -> tuple[bool, str]:
        """Whether requests are taken: at least one endpoint answers and none is still being loaded."""
        if self._draining:
            return False, "draining"
        if self._following is None:
            return False, "starting"
        known = list(self._following.endpoints.values())
        if any(f.current is not None for f in known) and all(f.current or f.settled for f in known):
            return True, ""
        return False, self._why_not(known[0] if known else None)

    async def start(self) -> None:
        """Take the log, follow the pointers, load what they name.

        Raises:
            EngineStarted: it was started before.
            ServerRunning: another server of this name runs.
            OSError: the server's folder cannot be written.
        """
        if self._spool is not None:
            raise EngineStarted("the engine was started before", "make another one")
        self._spool = await asyncio.to_thread(Spool, self._folder / "spool", self._limits.spool)
        self._following = Following(
            self._settings, self._pipelines, self._only, self._folder, self._prepare, spare=self._limits.spare
        )
        self._following.start()
        await asyncio.to_thread(self._following.wait_settled)

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish what is in flight within `drain_s` seconds, flush the log, end every process."""
        self._draining = True
        until = time.monotonic() + drain_s
        while time.monotonic() < until and not all(lane.idle for lane in self._lanes.values()):
            await asyncio.sleep(_DRAIN_TICK_SECONDS)
        for lane in self._lanes.values():
            lane.refuse()
        if self._following is not None:
            # Without its process, a batch that is still under way ends with an error.
            await asyncio.to_thread(self._following.stop)
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.close)
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)

    async def infer(
        self, served: Served, requests: pa.Table, *, caller_id: str | None, deadline: float
    ) -> list[Inference]:
        """Answer requests, all or none, each logged before this returns. Raises as `Engine.infer`."""
        if self._draining:
            raise NotReady("draining", _RETRY_SECONDS)
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("queue")
        _check_caller(caller_id)
        slot = self._slot(served)
        if not requests.num_rows:
            return []
        asked = Asked(
            slot=slot,
            requests=requests,
            caller_id=caller_id,
            deadline=deadline,
            asked_at=self.now(),
            arrived=time.monotonic(),
            answer=asyncio.get_running_loop().create_future(),
        )
        return await self._lanes[served.endpoint_id].ask(asked)

    def status(self) -> EngineStatus:
        """Figures of this moment."""
        if self._following is None or self._spool is None:
            raise NotReady("starting", _RETRY_SECONDS)
        known = self._following.endpoints
        spool = replace(self._spool.status(), limit=self._spool_limit())
        return EngineStatus(
            epochs={n: f.current.pointer.endpoint.epoch for n, f in known.items() if f.current},
            loaded={
                n: tuple(s.served.version for s in (f.current, f.previous) if s is not None) for n, f in known.items()
            },
            degraded={n: self._degraded(f) for n, f in known.items()},
            catalog_age_s=self._following.catalog_age_s,
            spool=spool,
            queue_rows=sum(lane.rows for lane in self._lanes.values()),
            watermarks=self._watermarks(),
        )

    def _online_features(self, pipeline: Pipeline) -> Features:
        from headway.features.online.answer import OnlineFeatures

        return OnlineFeatures(pipeline, self._online, self._settings.tenant)

    def _prepare(self, slot: Slot) -> None:
        """Make what answers for an endpoint, before its first version does; in the thread that loads."""
        name = slot.served.endpoint_id
        if name in self._lanes:
            return
        assert self._spool is not None
        assert self._following is not None
        following = self._following
        features = self._features_of(slot.pipeline)
        _warm(features, slot.pipeline.spec, self.now())
        answerer = Answerer(
            features=features,
            spool=self._spool,
            tenant=self._settings.tenant,
            clock=self._clock,
            degraded=lambda: following.degraded(following.endpoints[name]),
            process_lost=following.notify,
        )
        self._answerers[name] = answerer
        self._lanes[name] = Lane(name, answerer, self._limits.queue_rows, self._limits.batch_rows)

    def _slot(self, served: Served) -> Slot:
        assert self._following is not None
        followed = self._following.endpoints[served.endpoint_id]
        for slot in (followed.current, followed.previous, *followed.leaving):
            if slot is not None and slot.served.endpoint_epoch == served.endpoint_epoch:
                return slot
        stable = followed.current.served.version if followed.current else 0
        raise VersionNotServed(served.model_id, served.version, stable)

    def _degraded(self, followed: Followed) -> tuple[str, ...]:
        assert self._following is not None
        answerer = self._answerers.get(followed.endpoint_id)
        full = ("log_full",) if answerer is not None and answerer.log_full else ()
        return (*self._following.degraded(followed), *full)

    def _why_not(self, followed: Followed | None) -> str:
        if followed is not None and followed.problem:
            return followed.problem
        if followed is not None and followed.wanted is not None:
            return "loading"
        if self._following is None:
            return "starting"
        return "no_pointer" if self._following.away else "nothing_promoted"

    def _spool_limit(self) -> int:
        specs = [p.spec.serving for p in self._pipelines.values()]
        return max((s.log.max_bytes for s in specs if s is not None), default=0)

    def _watermarks(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name, answerer in self._answerers.items():
            state = answerer.state
            if state is not None:
                found |= {f"{name}/{source}": at for source, at in state.watermarks.items()}
        return found


def _warm(features: Features, spec: PipelineSpec, now: int) -> None:
    """Compute once, unrecorded: what is compiled and imported at a first use takes longer than a deadline."""
    if not is_asked_at(spec, now):
        return
    try:
        features.compute(example_rows(spec, now), now)
    except Exception as error:  # noqa: BLE001 - feature functions are a pipeline's own, and may raise anything
        logger.warning("the features of %s are not warm: %s", spec.name, type(error).__name__)


def _check_caller(caller_id: str | None) -> None:
    """Refuse an id under which an answer could not be recorded later."""
    if caller_id is None:
        return
    if not caller_id.isprintable() or caller_id != caller_id.strip() or not 0 < len(caller_id) <= MAX_CALLER_ID:
        said = f"{caller_id!r:.80} is no id"
        remedy = f"1 to {MAX_CALLER_ID} printable characters without blanks around them"
        raise RequestsRefused("request", [RequestProblem(1, "id", said, remedy)])
