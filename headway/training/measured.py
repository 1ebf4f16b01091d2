"""What a run measured of itself: its curves, where the time of its steps went, what its ranks held, its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.services import Services
from headway.training.memory import MemoryEstimate, SizesUnknown, estimate_memory
from trainer.spec import RunSpec, model_facts

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

_PAGE = 1_000
_KINDS = ("step", "epoch", "ranks", "work", "checkpoint", "artifact")


@dataclass(frozen=True)
class StepPoint:
    """One step as rank 0 told of it; NaN where it said nothing, or no number.

    `rate` are `unit` (rows, tokens) per second since the step that was told of before, `step_s` seconds per step and
    `split` seconds per step by part over the same steps.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    rate: float
    unit: str
    step_s: float
    mfu: float
    steps: int
    total: int
    split: Mapping[str, float]
    at: int

    @property
    def eta_s(self) -> float:
        """Seconds until the last step of the schedule, as fast as now; early stopping may end it sooner."""
        return max(self.total - self.step, 0) * self.step_s


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint that was published: how large, under which manifest, and how long saves had held training up."""

    attempt: int
    step: int
    kind: str
    bytes: int
    manifest: str
    stall_s: float


@dataclass(frozen=True)
class Trace:
    """A trace of steps: the artifact's manifest, and where the file lies below the run's directory."""

    attempt: int
    manifest: str
    path: str
    bytes: int


@dataclass
class Measured:
    """What the events of a run say so far; of what happened twice, the later attempt counts.

    `judged` are the validation losses by step (by epoch where no step is told). `ranks` is the newest report of every
    rank, `work` what a step computes and the peak that was measured.
    """

    points: dict[int, StepPoint] = field(default_factory=dict[int, StepPoint])
    judged: dict[int, float] = field(default_factory=dict[int, float])
    ranks: Sequence[Mapping[str, Any]] = ()
    work: Mapping[str, Any] = field(default_factory=dict[str, Any])
    checkpoints: list[SavedStep] = field(default_factory=list[SavedStep])
    traces: list[Trace] = field(default_factory=list[Trace])

    def take(self, event: RunEvent) -> None:
        """Take in the next event of the run."""
        data: Mapping[str, Any] = event.data
        if event.kind == "step" and isinstance(data.get("step"), int):
            self.points[data["step"]] = _point(data, event.at)
        elif event.kind == "epoch":
            place = data.get("step") or max(self.points, default=0)
            self.judged[int(place)] = _float(data.get("valid_loss"))
        elif event.kind == "ranks":
            self.ranks = data["ranks"]
        elif event.kind == "work":
            self.work = data
        elif event.kind == "checkpoint":
            self.checkpoints.append(_saved(event.attempt or 0, data))
        elif event.kind == "artifact" and data.get("name") == "profile":
            path = f"{data['path']}/{data['file']}"
            self.traces.append(Trace(event.attempt or 0, str(data["manifest"]), path, int(data["bytes"])))

    @property
    def ordered(self) -> list[StepPoint]:
        """The steps that were told of, in order."""
        return [self.points[step] for step in sorted(self.points)]

    def split(self) -> dict[str, float]:
        """Mean seconds per step by part on rank 0 over all steps that were told of."""
        steps = sum(p.steps for p in self.points.values())
        sums: dict[str, float] = {}
        for point in self.ordered:
            for part, seconds in point.split.items():
                sums[part] = sums.get(part, 0.0) + seconds * point.steps
        return {part: seconds / steps for part, seconds in sums.items()} if steps else {}


def measured(services: Services, run: TrainingRun) -> Measured:
    """Everything that a run has told of itself so far."""
    found = Measured()
    for event in _events(services, run):
        found.take(event)
    return found


@dataclass(frozen=True)
class MemoryKind:
    """Bytes of one kind on the rank with most of them; None where it is not known."""

    kind: str
    estimated: int | None
    measured: int | None


def memory_by_kind(spec: RunSpec, ranks: Sequence[Mapping[str, Any]]) -> tuple[list[MemoryKind], str]:
    """What was estimated before the launch beside what the ranks told; and why there is no estimate ("" when there is).

    Measured by kind is what a rank keeps between steps; `total` is how far its process grew above what it held before
    there was an engine, copies of checkpoints and memory of the allocator included.
    """
    estimate, unknown = _estimate(spec)

    def most(name: str) -> int | None:
        return max((int(rank[name]) for rank in ranks if name in rank), default=None)

    grown = max((int(r["peak_bytes"]) - int(r["base_bytes"]) for r in ranks if "base_bytes" in r), default=None)
    told = {"parameters": most("parameter_bytes"), "gradients": most("gradient_bytes")}
    told |= {"optimizer": most("optimizer_bytes"), "total": grown}
    kinds = ("parameters", "gradients", "optimizer", "activations", "transient", "total")
    rows = [
        MemoryKind(kind, None if estimate is None else int(getattr(estimate, kind)), told.get(kind)) for kind in kinds
    ]
    return rows, unknown


def _estimate(spec: RunSpec) -> tuple[MemoryEstimate | None, str]:
    try:
        return estimate_memory(model_facts(spec.model.options), spec.layout, spec.precision, spec.batch), ""
    except SizesUnknown as error:
        return None, str(error)


def _events(services: Services, run: TrainingRun) -> Iterable[RunEvent]:
    after = 0
    while page := services.catalog.run_events(services.principal, run.run_id, after=after, limit=_PAGE, kinds=_KINDS):
        yield from page
        after = page[-1].seq


def _point(data: Mapping[str, Any], at: int) -> StepPoint:
    unit = "tokens" if "tokens_per_s" in data else "rows"
    split: Mapping[str, Any] = data.get("split") or {}
    return StepPoint(
        step=data["step"],
        epoch=int(data.get("epoch") or 0),
        loss=_float(data.get("loss")),
        grad_norm=_float(data.get("grad_norm")),
        lr=_float(data.get("lr")),
        rate=_float(data.get(f"{unit}_per_s")),
        unit=unit,
        step_s=_float(data.get("step_s")),
        mfu=_float(data.get("mfu")),
        steps=int(data.get("split_steps") or 0),
        total=int(data.get("steps_total") or 0),
        split={part: _float(seconds) for part, seconds in split.items()},
        at=at,
    )


def _saved(attempt: int, data: Mapping[str, Any]) -> SavedStep:
    return SavedStep(
        attempt=attempt,
        step=int(data.get("step") or 0),
        kind=str(data.get("kind")),
        bytes=int(data.get("bytes") or 0),
        manifest=str(data.get("manifest")),
        stall_s=_float(data.get("stall_s")),
    )


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
