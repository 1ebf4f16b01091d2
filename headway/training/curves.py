"""Curves of training runs over their steps, one colour per run: losses, gradient norm, rate of learning, throughput."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.training.measured import Measured, StepPoint

_COLOURS = ("#4f43dd", "#d9730d", "#2f9e44", "#c2255c", "#1098ad", "#868e96")
MOST_RUNS = len(_COLOURS)

_PANELS: tuple[tuple[str, Callable[[StepPoint], float]], ...] = (
    ("loss", lambda point: point.loss),
    ("gradient norm", lambda point: point.grad_norm),
    ("learning rate", lambda point: point.lr),
    ("per second", lambda point: point.rate),
)


def curves_plot(title: str, runs: Mapping[str, Measured]) -> bytes:
    """PNG with one panel per measure over the steps; validation losses are points on the first one.

    Args:
        title: Stands above.
        runs: What each run measured, by the name it is shown with; at most `MOST_RUNS`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs; a plot shows {MOST_RUNS}")
    figure = Figure(figsize=(7, 6.4), dpi=72)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for axis, (name, value) in zip(axes, _PANELS, strict=True):
        for colour, (run, found) in zip(_COLOURS, runs.items(), strict=False):
            label = run if name == "loss" else None
            _draw(axis, [(p.step, value(p)) for p in found.ordered], color=colour, linewidth=1.1, label=label)
            if name == "loss":
                _draw(axis, sorted(found.judged.items()), color=colour, linestyle="none", marker="o", markersize=3.5)
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        axes[0].legend(fontsize=7, frameon=False)
    axes[-1].set_xlabel("step (points on the first panel: validation loss)", fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def _draw(axis: Any, points: Sequence[tuple[int, float]], **style: object) -> None:  # noqa: ANN401 - matplotlib's
    kept = [(x, y) for x, y in points if math.isfinite(y)]
    axis.plot([x for x, _ in kept], [y for _, y in kept], **style)
