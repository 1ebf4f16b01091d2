"""Small plots of monitoring as PNG: histograms beside the reference, quality by week, the delay of labels.

Heavy libraries are imported inside functions: reports are also read where nothing is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.monitoring.maturity import DelayCurve
from headway.monitoring.reference import Bins, Floats
from headway.monitoring.windows import DAY_US

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE_COLOUR = "#868e96"
CURRENT_COLOUR = "#4f43dd"
ALARM_COLOUR = "#d9730d"
_COLUMNS = 3
_MOST_LABELS = 6


def histogram_plot(title: str, features: Sequence[tuple[Bins, Floats, str]]) -> bytes:
    """One panel per (bins, counts of the window, verdict): shares of the reference as steps, of the window as bars."""
    rows = max(1, -(-len(features) // _COLUMNS))
    figure, axes = _figure((9, 2.0 * rows + 0.4), rows, _COLUMNS)
    for axis in axes[len(features) :]:
        axis.axis("off")
    for axis, (bins, counts, verdict) in zip(axes, features, strict=False):
        places = np.arange(bins.size)
        colour = ALARM_COLOUR if verdict == "drift" else CURRENT_COLOUR
        axis.bar(places, counts / max(counts.sum(), 1), color=colour, alpha=0.55, width=0.9)
        known = bins.counts / max(bins.counts.sum(), 1)
        axis.step(places, known, where="mid", color=REFERENCE_COLOUR, linewidth=1.2)
        names = bin_names(bins)
        shown = [i for i, share in enumerate(known) if share or counts[i]]
        ticks = sorted({shown[round(i * (len(shown) - 1) / _MOST_LABELS)] for i in range(_MOST_LABELS + 1)})
        axis.set_xticks(ticks, [names[i] for i in ticks], rotation=45, ha="right", fontsize=6)
        axis.set_title(f"{bins.name}: {verdict}", fontsize=7, loc="left")
    return _png(figure, title)


def bin_names(bins: Bins) -> list[str]:
    """What each bin holds, in a few characters."""
    if bins.numeric:
        return ["low", *(f"{edge:.3g}" for edge in bins.edges), "missing"]
    by_cell: dict[int, list[str]] = {}
    for value, cell in bins.cells.items():
        by_cell.setdefault(cell, []).append(value)
    known = [by_cell[c][0][:10] if len(by_cell[c]) == 1 else "rare" for c in sorted(by_cell)]
    return [*known, "other", "missing"]


def quality_plot(
    title: str, weeks: Sequence[tuple[str, float | None, float | None, float | None]], evaluation: float | None
) -> bytes:
    """AUC and its interval by week (key, value, lower, upper; None: no number), beside the evaluation's."""
    figure, axes = _figure((7, 2.6), 1, 1)
    axis = axes[0]
    for place, (_, value, lower, upper) in enumerate(weeks):
        if value is None:
            axis.plot([place], [0.5], marker="x", color=REFERENCE_COLOUR, markersize=5)
            continue
        axis.plot([place, place], [lower or value, upper or value], color=CURRENT_COLOUR, linewidth=1.4)
        axis.plot([place], [value], marker="o", markersize=4, color=CURRENT_COLOUR)
    if evaluation is not None:
        axis.axhline(evaluation, color=REFERENCE_COLOUR, linewidth=1, linestyle="--")
        axis.annotate("evaluation", (0, evaluation), xytext=(0, 3), textcoords="offset points", fontsize=7)
    ticks = sorted({round(i * (len(weeks) - 1) / 5) for i in range(6)}) if weeks else []
    axis.set_xticks(ticks, [weeks[i][0] for i in ticks], fontsize=7)
    axis.set_ylabel("AUC", fontsize=8)
    return _png(figure, title)


def delay_plot(title: str, curves: Mapping[str, DelayCurve], due: int) -> bytes:
    """The share of labels that have come, by days since the prediction was asked; the time when they are due."""
    figure, axes = _figure((7, 2.6), 1, 1)
    axis = axes[0]
    for name, curve in curves.items():
        days = np.concatenate([[0.0], curve.delays / DAY_US])
        axis.step(days, np.concatenate([[0.0], curve.shares]), where="post", linewidth=1.2, label=name)
    axis.axvline(due / DAY_US, color=REFERENCE_COLOUR, linewidth=1, linestyle="--")
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("days", fontsize=8)
    axis.set_ylabel("share of labels", fontsize=8)
    if len(curves) > 1:
        axis.legend(fontsize=6, frameon=False, ncols=2)
    return _png(figure, title)


def _figure(size: tuple[float, float], rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=72)
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure, title: str) -> bytes:
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    sink = io.BytesIO()
    # Without the library's version in it, the same numbers are the same bytes and the same digest.
    figure.savefig(sink, format="png", metadata={"Software": None})
    return sink.getvalue()
