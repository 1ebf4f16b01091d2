"""What the page of a language model's version shows: bits per byte beside compressors and by minute, and samples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import curve_metadata, interval_metadata, table
from trainer.blobs import Json

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore

_METRICS = ("bits_per_byte", "gain")


def text_metadata(
    store: "LocalStore", report: Mapping[str, Json], rows: Sequence[Mapping[str, Json]]
) -> dict[str, Any]:
    """Metadata of an evaluation on documents: tables, one plot of intervals and one by training minute, samples."""
    from headway.registry.text_card import coder_name, records, samples_markdown

    named = [{**row, "model": coder_name(str(row["model"]))} for row in rows]
    minutes = records(report, "minutes")
    streams = report.get("streams")
    listed = streams.items() if isinstance(streams, Mapping) else ()
    facts: dict[str, Any] = {
        "documents": report["documents"],
        "bytes": report["bytes"],
        **table("metrics", [with_intervals(row, _METRICS) for row in named]),
        **table("as_one_stream", [{"coder": coder_name(name), "bits_per_byte": bits} for name, bits in listed]),
        **table("by_training_minute", minutes),
        "samples": dg.MetadataValue.md(samples_markdown(report)),
    }
    facts |= interval_metadata(
        store, "Bits per byte of held-out documents, with intervals over documents", intervals(named, "bits_per_byte")
    )
    if minutes:
        known = [(float(str(m["minute"])), float(str(m["bits_per_byte"]))) for m in minutes]
        title = "Validation bits per byte by training minute"
        shown = curve_metadata(store, title, [x for x, _ in known], validation=[y for _, y in known])
        # Each page has room for one inline image.
        facts["by_minute_plot_digest"] = shown["plot_digest"]
    return facts


def intervals(rows: Sequence[Mapping[str, Json]], metric: str) -> list[tuple[str, float, float, float]]:
    """A metric of each model that has one with an interval: name, value, lower and upper end."""
    found: list[tuple[str, float, float, float]] = []
    for row in rows:
        ends = (metric, f"{metric}_lower", f"{metric}_upper")
        numbers = [v for name in ends if isinstance(v := row[name], int | float)]
        if len(numbers) == len(ends):
            found.append((str(row["model"]), numbers[0], numbers[1], numbers[2]))
    return found


def with_intervals(row: Mapping[str, Json], metrics: Sequence[str]) -> dict[str, object]:
    """A row of the card as a person reads it: each number with its interval in one cell."""
    cells: dict[str, object] = {"model": row["model"]}
    for name in metrics:
        value, lower, upper = row[name], row[f"{name}_lower"], row[f"{name}_upper"]
        known = isinstance(lower, int | float) and isinstance(upper, int | float)
        interval = f" [{lower:.4f}, {upper:.4f}]" if known else ""
        cells[name] = f"{value:.4f}{interval}" if isinstance(value, int | float) else ""
    return cells
