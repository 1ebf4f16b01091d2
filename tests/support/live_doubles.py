"""Doubles for the engine's parts: features without a store, and a version without a process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from support.serving_bench import REQUEST

from headway.declaration import FeatureGroupSpec, InferenceLogSpec, RequestColumn, ServingSpec
from headway.serving.features import Freshness
from headway.serving.live.answering import Answerer
from headway.serving.live.following import Slot
from headway.serving.live.lane import Asked, Lane
from headway.serving.live.spool import Spool
from headway.serving.live.types import Inference, Served

FRESH = Freshness(1_000, 1.0, "fresh", "", "")
STALE = Freshness(1_000, 9.0, "stale", "too_old", "too_old")


@dataclass
class EchoFeatures:
    """Feature `x` is the request's own `x`; a negative one makes the feature function raise.

    `fault` is raised instead of answering, while it is set; `batches` counts the rows of each computation.
    """

    views: Callable[[int], dict[str, Freshness]] = lambda x: {"v": FRESH}
    fault: Exception | None = None
    rows_independent: bool = True
    batches: list[int] = field(default_factory=list[int])
    before: Callable[[], object] = lambda: None

    def compute(self, requests: pa.Table, now: int) -> Any:  # noqa: ANN401 - a double of `Computed`
        self.before()
        self.batches.append(requests.num_rows)
        if self.fault is not None:
            raise self.fault
        xs = requests.column("x").to_pylist()
        if any(x < 0 for x in xs):
            raise ValueError(f"math domain error: {xs}")
        found = [self.views(x) for x in xs]
        return SimpleNamespace(
            requests=requests,
            asked=[(x,) for x in xs],
            schema=pa.schema({"x": pa.int64()}),
            rows=[(x,) for x in xs],
            moments=[now] * len(xs),
            freshness={name: [f[name] for f in found] for name in found[0]},
            state=SimpleNamespace(inputs_digest="sha256:" + "0" * 64, watermarks={}),
        )


@dataclass
class EchoVersion:
    """The model returns its input, divided by 1,000."""

    score_rows: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda scores: scores
    calls: int = 0

    def score(self, schema: pa.Schema, values: Sequence[tuple[Any, ...]], until: float) -> NDArray[np.float64]:
        """As `Version.score`."""
        self.calls += 1
        return self.score_rows(np.array([row[schema.names.index("x")] for row in values], np.float64) / 1_000)


def slot_of(
    version: EchoVersion, *, policy: str = "serve", log: InferenceLogSpec | None = None, number: int = 1
) -> Slot:
    """A slot that serves a double, with view `v` under a policy."""
    serving = ServingSpec(
        request={n: RequestColumn(**cast("Any", f)) for n, f in REQUEST.items()},
        observed="starts",
        before="60m",
        groups={"v": FeatureGroupSpec(max_staleness="5s", policy=cast("Any", policy))},
        log=log or InferenceLogSpec(),
    )
    spec = cast("Any", SimpleNamespace(serving=serving, name="p", text=None))
    served = Served("m", "m", number, "stable", number, "sha256:a", {"inputs": []}, "sha256:b", 1, (), spec, "r")
    pipeline = cast("Any", SimpleNamespace(spec=spec, name="p"))
    return Slot(cast("Any", SimpleNamespace(name=f"{number}@epoch {number}")), pipeline, cast("Any", version), served)


def answerer_of(features: EchoFeatures, spool: Spool) -> Answerer:
    """An answerer over doubles."""
    return Answerer(features, spool, "t", lambda: 1_000_000, lambda: (), lambda: None)


def asked_of(slot: Slot, xs: Sequence[int], *, seconds: float = 60.0, caller: str | None = None) -> Asked:
    """A request of some rows."""
    requests = pa.table({"x": pa.array(list(xs), pa.int64())})
    answer = asyncio.get_running_loop().create_future()
    now = time.monotonic()
    return Asked(slot, requests, caller, now + seconds, 7, now, answer)


async def outcome(lane: Lane, asked: Asked) -> list[Inference] | BaseException:
    """The answer or the refusal."""
    try:
        return await lane.ask(asked)
    except Exception as error:  # noqa: BLE001 - it is what a test looks at
        return error
