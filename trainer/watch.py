"""What a training says of its own speed and memory while it runs: rank 0 tells, the others leave theirs in the store.

A rank's report goes through the store and not through a collective: nobody waits for it. A `step` event carries rank
0's split and the rank that holds the others up; a `ranks` event, at the beginning, once a minute and at the end, has
every rank's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from trainer.batches import Batch
from trainer.blobs import Json
from trainer.checkpoint import Sink
from trainer.engines.base import Engine
from trainer.flops import Peak, flops_per_item, measured_peak, mfu
from trainer.mesh import DIMENSIONS
from trainer.pace import Stragglers
from trainer.process_group import Group
from trainer.spec import RunSpec
from trainer.timing import peak_memory

_ALL_EVERY_S = 60.0
_MOST_TOLD = 64
"""Reports of one `ranks` event; of more ranks those are told that hold the others up."""

_HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class Work:
    """What a step computes: operations per item, items (rows, tokens) of a full step, and a rank's peak."""

    flops_per_item: float
    items: int
    peak: Peak

    @property
    def flops_per_step(self) -> float:
        """Operations of a full step over all ranks."""
        return self.flops_per_item * self.items


def measure_work(spec: RunSpec, model: nn.Module, sample: Batch, items: int) -> Work:
    """Count and measure what a run computes, before its model is divided: a tenth of a second.

    Args:
        spec: The run.
        model: Its model, whole.
        sample: A few of its samples.
        items: Items (rows, tokens) of one sample.
    """
    return Work(flops_per_item(model, sample), spec.batch.global_size * items, measured_peak(spec.precision))


class Watch:
    """One rank's part of it.

    Args:
        group: The ranks.
        engine: Its clock is read, and what it holds.
        sink: Where rank 0 tells.
        work: What a step computes; None where nobody counted (not on rank 0).
        now: Seconds from any origin.
    """

    def __init__(
        self,
        group: Group,
        engine: Engine,
        sink: Sink,
        work: Work | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._engine = engine
        self._sink = sink
        self._work = work
        self._now = now
        self._base_bytes = peak_memory()
        self._held: dict[str, Json] = {}
        self._told_all: float | None = None
        self._stragglers = Stragglers(sink)

    def begin(self) -> None:
        """Say on rank 0 what a step computes; the first step begins now."""
        if self._group.rank == 0 and self._work is not None:
            work = self._work
            self._sink.emit(
                "work",
                {
                    "flops_per_item": work.flops_per_item,
                    "flops_per_step": work.flops_per_step,
                    "peak_flops_per_s": work.peak.flops_per_s,
                    "peak": work.peak.how,
                    "ranks": self._group.world_size,
                },
            )
        self._engine.clock.take()

    def look(self, step: int) -> dict[str, Json]:
        """Take the split since the last look and hand it to rank 0; there, return what a step event says of it."""
        split = self._engine.clock.take()
        if not self._held:
            self._held = _held(self._engine)
        steps = max(split.steps, 1)
        report: dict[str, Json] = {
            "rank": self._group.rank,
            "steps": split.steps,
            "step_s": split.wall_s / steps,
            "busy_s": split.busy_s / steps,
            "split": cast("Json", split.per_step()),
            "base_bytes": self._base_bytes,
            "peak_bytes": peak_memory(),
            **self._held,
        }
        self._group.post("report", report)
        if self._group.rank != 0:
            return {}
        told: dict[str, Json] = {"step_s": report["step_s"], "split": report["split"], "split_steps": split.steps}
        if self._work is not None and split.wall_s > 0:
            ranks, step_s = self._group.world_size, split.wall_s / steps
            told["flops_per_s"] = self._work.flops_per_step / step_s
            told["mfu"] = mfu(self._work.flops_per_step, step_s, ranks, self._work.peak)
        reports = self._group.posted("report")
        if reports is not None:
            told |= self._tell_ranks(step, cast("list[dict[str, Any]]", reports))
        return told

    def end(self, step: int) -> None:
        """Tell of every rank once more."""
        self._told_all = None
        self.look(step)

    def _tell_ranks(self, step: int, reports: list[dict[str, Any]]) -> dict[str, Json]:
        ordered = slowest_first(reports)
        self._stragglers.look(step, reports)
        now = self._now()
        if self._told_all is None or now - self._told_all >= _ALL_EVERY_S:
            self._told_all = now
            kept = sorted(ordered[:_MOST_TOLD], key=lambda report: report["rank"])
            self._sink.emit("ranks", {"step": step, "of": len(reports), "ranks": cast("Json", kept)})
        first = ordered[0]
        return {
            "slowest": {"rank": first["rank"], "busy_s": first["busy_s"]},
            "peak_bytes": max(report["peak_bytes"] for report in reports),
        }


def slowest_first(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ranks' reports, those first that hold the others up: that wait least for the others."""
    return sorted(reports, key=lambda report: (-report["busy_s"], report["rank"]))


def _held(engine: Engine) -> dict[str, Json]:
    """Where the rank stands and what it holds, see `Engine.facts`."""
    facts = engine.facts()
    place: dict[str, Json] = {name: engine.mesh.coordinate(name) for name in DIMENSIONS if engine.mesh.degree(name) > 1}
    held: dict[str, Json] = {name: int(facts[name]) for name in _HELD}
    return {"place": place, **held, "layers": len(facts["layers"]), "experts": facts["experts"]}
