"""A run on its asset's page while it trains: an observation a minute, and a plot that is drawn again with each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from headway.training.curves import curves_plot
from headway.training.measured import Measured

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent
    from headway.training.measured import StepPoint

OBSERVE_EVERY_S = 60.0
LIVE_PLOT = "live.png"


class LiveView:
    """Takes in a run's events and reports on it, seldom.

    Args:
        context: The step that follows the run.
        key: The asset.
        partition: Its partition, None where there is none.
        folder: Where the plot is kept: the run's directory.
        now: Seconds from any origin.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        key: dg.AssetKey,
        partition: str | None,
        folder: Path,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._key = key
        self._partition = partition
        self._plot = folder / LIVE_PLOT
        self._now = now
        self._observed = -math.inf
        self._found = Measured()

    def take(self, event: RunEvent) -> None:
        """Take in the next event; a step is reported when the last report is a minute old."""
        self._found.take(event)
        if event.kind != "step" or self._now() - self._observed < OBSERVE_EVERY_S:
            return
        self._observed = self._now()
        point = self._found.points[int(str(event.data["step"]))]
        self._draw()
        self._context.log_event(
            dg.AssetObservation(
                asset_key=self._key,
                partition=self._partition,
                description=f"step {point.step} of {point.total}",
                metadata={**live_facts(point), "live_plot": dg.MetadataValue.path(str(self._plot))},
            )
        )

    def _draw(self) -> None:
        image = curves_plot("so far", {"run": self._found})
        fresh = self._plot.with_name(f".{LIVE_PLOT}")
        fresh.write_bytes(image)
        fresh.replace(self._plot)


def live_facts(point: StepPoint) -> dict[str, Any]:
    """Plain floats, which the page plots over time; what is no number is left out."""
    facts = {
        "step": float(point.step),
        "loss": point.loss,
        "gradient_norm": point.grad_norm,
        "learning_rate": point.lr,
        f"{point.unit}_per_second": point.rate,
        "mfu": point.mfu,
        "eta_minutes": point.eta_s / 60,
    }
    return {name: float(value) for name, value in facts.items() if math.isfinite(value)}
