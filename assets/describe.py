"""What Dagster's pages show: metadata of reasonable size, tables by partition, small plots.

Heavy libraries are imported inside functions: this module is part of loading the code location.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from headway.declaration import ColumnSpec, PartitionSpec, PipelineSpec
from headway.loading import DEFS_FILE, Pipeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headway.artifacts.store import LocalStore

MAX_METADATA_BYTES = 64_000
MAX_INLINE_IMAGE_BYTES = 30_000
MAX_TABLE_ROWS = 400

# The nightly schedule asks at three; what is not there by six will not come by itself.
_DEADLINES = {
    "hourly": ("45 * * * *", timedelta(hours=1)),
    "daily": ("0 6 * * *", timedelta(days=1)),
    "weekly": ("0 6 * * 1", timedelta(days=7)),
    "monthly": ("0 6 1 * *", timedelta(days=28)),
}


class MetadataTooLarge(ValueError):
    """More metadata than the event log should carry; curves and rows belong in the store."""


def guarded(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata unchanged, if it is small enough for the event log."""
    size = sum(len(json.dumps(str(getattr(v, "value", v)))) for v in metadata.values())
    if size > MAX_METADATA_BYTES + MAX_INLINE_IMAGE_BYTES * 4 // 3:
        raise MetadataTooLarge(f"metadata of {size:,} bytes, the limit is {MAX_METADATA_BYTES:,}: put it in the store")
    return {name: finite(value) for name, value in metadata.items()}


def finite(value: Any) -> Any:  # noqa: ANN401 - any metadata value
    """The value, or its name where it is a float that is no finite number: JSON has none, and pages would not load."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def code_references(pipeline: Pipeline, *names: str) -> dg.CodeReferencesMetadataValue:
    """Links to where a stage is declared: `defs.yaml` at the first of `names` that stands there, and files beside it.

    A name with a suffix is a file of the pipeline's folder; another one is a key of the declaration.
    """
    files = [pipeline.folder / name for name in names if "." in name]
    keys = [name for name in names if "." not in name]
    declared = pipeline.folder / DEFS_FILE
    references: list[Any] = [_reference(declared, _line_of(declared, keys))]
    references += [_reference(file, 1) for file in files if file.is_file()]
    return dg.CodeReferencesMetadataValue(code_references=references)


def _reference(file: Path, line: int) -> dg.LocalFileCodeReference:
    return dg.LocalFileCodeReference(file_path=str(file), line_number=line, label=f"{file.parent.name}/{file.name}")


def _line_of(file: Path, keys: Sequence[str]) -> int:
    """The first line that begins with one of the keys, in the order of the keys; 1 without any."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for key in keys:
        for number, line in enumerate(lines, 1):
            if line.strip().startswith(f"{key}:"):
                return number
    return 1


def freshness(partition: PartitionSpec | None) -> dg.FreshnessPolicy | None:
    """When a partitioned table should have its newest partition: some hours after it has closed.

    None without partitions, and for a calendar with an end: recorded data cannot become stale.
    """
    if partition is None or partition.end is not None:
        return None
    deadline, span = _DEADLINES[partition.cadence]
    return dg.FreshnessPolicy.cron(deadline_cron=deadline, lower_bound_delta=span, timezone=partition.zone)


def column_schema(columns: Mapping[str, ColumnSpec]) -> dg.TableSchema:
    """Dagster's table schema of declared columns."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name,
                type=column.type,
                description=" ".join(filter(None, [column.description, column.unit and f"[{column.unit}]"])) or None,
                constraints=dg.TableColumnConstraints(nullable=not column.required),
            )
            for name, column in columns.items()
        ]
    )


def feature_schema(spec: PipelineSpec) -> dg.TableSchema:
    """Dagster's table schema of a snapshot's features."""
    columns: list[dg.TableColumn] = []
    for view_name, view in spec.features.views.items():
        for name, feature in view.features.items():
            said = feature.model_dump()
            what = (
                f"latest {said['latest']}"
                if "latest" in said
                else (f"{said['aggregate']} of {said['window']} over {said['duration']}")
            )
            by = ", ".join(view.keys.values())
            columns.append(dg.TableColumn(f"{view_name}__{name}", description=f"{what} of {view.source} by {by}"))
    columns += [dg.TableColumn(n, type=f.type, description=f"{f.function}") for n, f in spec.features.custom.items()]
    columns += [
        dg.TableColumn(n, type=f.type, description=f"{f.function} of {', '.join(f.inputs)}")
        for n, f in spec.features.derived.items()
    ]
    return dg.TableSchema(columns=columns)


def column_lineage(spec: PipelineSpec, key_of_source: Mapping[str, dg.AssetKey]) -> dg.TableColumnLineage:
    """Which source columns each feature of the snapshot comes from."""
    lineage: dict[str, list[dg.TableColumnDep]] = {}
    for view_name, view in spec.features.views.items():
        for name, feature in view.features.items():
            said = feature.model_dump()
            column = said["latest"] if "latest" in said else said["window"]
            lineage[f"{view_name}__{name}"] = [
                dg.TableColumnDep(asset_key=key_of_source[view.source], column_name=c)
                for c in (column, *view.keys.values())
            ]
    label = key_of_source[spec.label.source]
    for name, derived in spec.features.derived.items():
        # An input is another feature, or a column of the label rows.
        parts = [lineage.get(i, [dg.TableColumnDep(asset_key=label, column_name=i)]) for i in derived.inputs]
        lineage[name] = list(dict.fromkeys(dep for part in parts for dep in part))
    return dg.TableColumnLineage(deps_by_column=lineage)


def table(name: str, rows: Sequence[Mapping[str, object]]) -> dict[str, dg.TableMetadataValue]:
    """Metadata of a table, none when it would be empty; of a long one the last rows are kept. Cells become scalars."""
    kept = [dg.TableRecord({k: _cell(v) for k, v in r.items()}) for r in rows[-MAX_TABLE_ROWS:]]
    return {name: dg.MetadataValue.table(kept)} if kept else {}


def _cell(value: object) -> str | int | float | bool:
    if value is None:
        return ""
    return finite(value) if isinstance(value, str | int | float | bool) else str(value)


def partition_plot(title: str, partitions: Sequence[str], series: Mapping[str, Sequence[float]]) -> bytes:
    """PNG with one small panel per series over partitions; at most 30 kB."""
    figure = _figure((8, 1.5 * len(series) + 0.6))
    axes = figure.subplots(len(series), 1, sharex=True, squeeze=False)[:, 0]
    positions = range(len(partitions))
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        axis.fill_between(positions, list(values), step="mid", color="#4f43dd", alpha=0.35, linewidth=0)
        axis.plot(positions, list(values), drawstyle="steps-mid", color="#4f43dd", linewidth=0.8)
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    ticks = sorted({round(i * (len(partitions) - 1) / 5) for i in range(6)}) if partitions else []
    axes[-1].set_xticks(ticks, [partitions[i] for i in ticks])
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return _png(figure)


def plot_metadata(
    store: LocalStore, title: str, partitions: Sequence[str], **series: Sequence[float]
) -> dict[str, Any]:
    """A plot by partition: stored as PNG under its digest, and shown inline when it is small."""
    return _stored_image(
        store, title, partition_plot(title, partitions, {k.replace("_", " "): v for k, v in series.items()})
    )


def curve_metadata(
    store: LocalStore, title: str, positions: Sequence[float], **series: Sequence[float]
) -> dict[str, Any]:
    """Curves over a number, in one panel: stored as PNG under its digest, and shown inline when it is small."""
    return _stored_image(store, title, curve_plot(title, positions, series))


def curve_plot(title: str, positions: Sequence[float], series: Mapping[str, Sequence[float]]) -> bytes:
    """PNG of one panel; points that are no finite number are left out."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure((7, 2.6))
    axis = figure.subplots()
    for (name, values), colour in zip(series.items(), ("#4f43dd", "#d9730d", "#2f9e44", "#868e96"), strict=False):
        kept = [(x, y) for x, y in zip(positions, values, strict=True) if math.isfinite(y)]
        axis.plot([x for x, _ in kept], [y for _, y in kept], marker="o", markersize=3, linewidth=1.2, color=colour)
        if kept:
            axis.annotate(name, kept[-1], xytext=(4, 2), textcoords="offset points", fontsize=8, color=colour)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _one_panel(figure, axis, title)


def interval_metadata(store: LocalStore, title: str, rows: Sequence[tuple[str, float, float, float]]) -> dict[str, Any]:
    """Values with their intervals, one line each: stored as PNG under its digest, and shown inline when it is small."""
    return _stored_image(store, title, interval_plot(title, rows)) if rows else {}


def interval_plot(title: str, rows: Sequence[tuple[str, float, float, float]]) -> bytes:
    """PNG of (name, value, lower, upper), the first row on top."""
    figure = _figure((7, 0.32 * len(rows) + 0.9))
    axis = figure.subplots()
    for place, (_, value, lower, upper) in enumerate(reversed(rows)):
        axis.plot([lower, upper], [place, place], color="#4f43dd", linewidth=1.4)
        axis.plot([value], [place], marker="o", markersize=4, color="#4f43dd")
        axis.annotate(
            f"{value:.3f}", (value, place), xytext=(0, 4), textcoords="offset points", fontsize=7, ha="center"
        )
    axis.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)], fontsize=8)
    axis.set_ylim(-0.6, len(rows) - 0.3)
    axis.spines["left"].set_visible(False)
    return _one_panel(figure, axis, title)


def reliability_plot(title: str, predicted: Sequence[float], observed: Sequence[float]) -> bytes:
    """PNG of the share of positives over the mean score of bins, beside the diagonal of a calibrated model."""
    figure = _figure((3.6, 3.4))
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="#868e96", linewidth=0.8, linestyle="--")
    axis.plot(list(predicted), list(observed), marker="o", markersize=4, linewidth=1.2, color="#4f43dd")
    axis.set_xlabel("mean score", fontsize=8)
    axis.set_ylabel("share of positives", fontsize=8)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    return _one_panel(figure, axis, title)


def _figure(size: tuple[float, float]) -> Figure:
    """An empty figure of so many inches, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=72)
    FigureCanvasAgg(figure)
    return figure


def _one_panel(figure: Figure, axis: Axes, title: str) -> bytes:
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=9, loc="left")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    figure.tight_layout()
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def stored_plot(store: LocalStore, image: bytes) -> dg.PathMetadataValue:
    """Where a plot lies, stored as PNG under its digest."""
    return dg.MetadataValue.path(store.read_path(store.put_bytes(image, "image/png").digest))


def _stored_image(store: LocalStore, title: str, image: bytes) -> dict[str, Any]:
    blob = store.put_bytes(image, "image/png")
    found: dict[str, Any] = {"plot_digest": blob.digest}
    if len(image) <= MAX_INLINE_IMAGE_BYTES:
        encoded = base64.b64encode(image).decode()
        found["plot"] = dg.MetadataValue.md(f"![{title}](data:image/png;base64,{encoded})")
    return found
