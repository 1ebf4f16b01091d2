"""Runs in words and rows: one line per event worth reading, the loss by epoch, metrics that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.services import Services
from trainer.blobs import Json

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

_PAGE = 1_000


def event_line(event: RunEvent) -> str:
    """One line for people; empty when the event only marks time."""
    data = event.data
    if event.kind == "attempt.waiting":
        return f"attempt {event.attempt}: waiting: {data.get('code')}: {data.get('message')}"
    where = f"attempt {event.attempt} node {event.node}"
    if event.kind == "epoch":
        best = "  best so far" if data.get("best") else ""
        auc = f", AUC {_number(data.get('valid_auc'))}" if "valid_auc" in data else ""
        step = f" step {data['step']}" if "step" in data else ""
        return (
            f"{where}: epoch {data.get('epoch')}{step}: train loss {_number(data.get('train_loss'))}, validation loss "
            f"{_number(data.get('valid_loss'))}{auc}{best}"
        )
    if event.kind == "step":
        return f"{where}: {_step(data)}"
    if event.kind == "work":
        return (
            f"{where}: {_number(data.get('flops_per_step'))} operations per step on {data.get('ranks')} ranks; peak of "
            f"a rank {_number(data.get('peak_flops_per_s'))} per s ({data.get('peak')})"
        )
    if event.kind == "straggler":
        return f"{where}: {straggler_line(data)}"
    if event.kind == "collective_timeout":
        return (
            f"{where}: collectives may take {_number(data.get('seconds'))} s: {data.get('factor')} times the slowest "
            f"step ({_number(data.get('slowest_step_s'))} s), at least {data.get('floor_s')} s"
        )
    if event.kind == "error":
        return f"{where}: rank {data.get('rank')}: {data.get('kind')}: {data.get('message')}"
    if event.kind == "node_end":
        return f"{where}: ended with {data.get('code')}: {data.get('cause') or 'done'}"
    if event.kind in ("node_start", "phase", "checkpoint", "artifact", "stacks", "stopping", "environment"):
        said = ", ".join(f"{k} {v}" for k, v in data.items() if v is not None and not isinstance(v, dict | list))
        return f"{where}: {event.kind}: {said}"
    return ""


def straggler_line(data: Mapping[str, Json]) -> str:
    """Which rank holds the others up, from a `straggler` event."""
    return (
        f"rank {data.get('rank')} is slow: busy {_number(data.get('busy_s'))} s a step at step {data.get('step')}, the "
        f"others {_number(data.get('others_s'))} s; it goes on"
    )


def stragglers(services: Services, run: TrainingRun) -> list[str]:
    """The ranks that held the others up, as they were told of, newest last."""
    events = services.catalog.run_events(services.principal, run.run_id, kinds=("straggler",))
    return [f"attempt {event.attempt}: {straggler_line(event.data)}" for event in events]


def _step(data: Mapping[str, Json]) -> str:
    unit = "tokens" if "tokens_per_s" in data else "rows"
    said = f"step {data.get('step')}: loss {_number(data.get('loss'))}, {_number(data.get(f'{unit}_per_s'))} {unit}/s"
    if isinstance(data.get("mfu"), float):
        said += f", MFU {_number(data['mfu'])}"
    slowest = data.get("slowest")
    return said + (f", slowest rank {slowest['rank']}" if isinstance(slowest, dict) else "")


@dataclass(frozen=True)
class Epoch:
    """One judgement as it was reported, of which an epoch has several where the run asks so.

    A measure that is no number is NaN; `step` is 0 in runs from before it was told.
    """

    epoch: int
    train_loss: float
    valid_loss: float
    valid_auc: float
    best: bool
    step: int = 0


def loss_curve(services: Services, run: TrainingRun) -> list[Epoch]:
    """Losses by judgement, over all attempts; one that was made again counts as it was made last."""
    epochs: dict[tuple[int, int], Epoch] = {}
    after = 0
    while page := services.catalog.run_events(
        services.principal, run.run_id, after=after, limit=_PAGE, kinds=("epoch",)
    ):
        for event in page:
            number, step = event.data.get("epoch"), event.data.get("step", 0)
            if isinstance(number, int) and isinstance(step, int):
                losses = [_float(event.data.get(name)) for name in ("train_loss", "valid_loss", "valid_auc")]
                epochs[number, step] = Epoch(number, *losses, best=event.data.get("best") is True, step=step)
        after = page[-1].seq
    return [epochs[place] for place in sorted(epochs)]


def non_finite(metrics: Mapping[str, Json]) -> list[str]:
    """Names of metrics that are missing, or no finite number."""
    return [
        name
        for name, value in metrics.items()
        if value is None or (isinstance(value, float) and not math.isfinite(value))
    ]


def _float(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _number(value: Json) -> str:
    return (f"{value:.4g}" if abs(value) >= 1000 else f"{value:.4f}") if isinstance(value, float) else str(value)
