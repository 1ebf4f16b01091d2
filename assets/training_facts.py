"""What `training_run` shows of a run that has ended: curves, ranks, memory, checkpoints, where the time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import table

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.training.measured import Measured
    from trainer.spec import RunSpec

_MOST_RANKS = 64
_DRAWN_RANKS = 256
_MB = 1e6


def measured_metadata(store: LocalStore, spec: RunSpec, found: Measured) -> dict[str, Any]:
    """Metadata of what a run measured of itself; nothing of what it did not tell."""
    return {
        **_curves(store, spec, found),
        **_speed(found),
        "layout": dg.MetadataValue.md(layout_diagram(spec)),
        **table("ranks", [_rank_row(rank) for rank in found.ranks[:_MOST_RANKS]]),
        **_memory(spec, found),
        **table("checkpoints", [_checkpoint_row(saved) for saved in found.checkpoints]),
        **_traces(found),
    }


def layout_diagram(spec: RunSpec) -> str:
    """Markdown: one line per node, its ranks with their places along the degrees above 1."""
    from trainer.spec import describe_choice

    layout = spec.layout
    lines = [f"**{describe_choice(layout, spec.precision)}**", "", "| node | ranks |", "|---|---|"]
    ranks = min(layout.world_size, _DRAWN_RANKS)
    for node in range(-(-ranks // layout.processes_per_node)):
        first = node * layout.processes_per_node
        own = range(first, min(first + layout.processes_per_node, ranks))
        lines.append(f"| {node} | " + " ".join(f"`{rank}: {_place(spec, rank)}`" for rank in own) + " |")
    if ranks < layout.world_size:
        lines += ["", f"and {layout.world_size - ranks} more ranks"]
    return "\n".join(lines)


def _place(spec: RunSpec, rank: int) -> str:
    """Coordinates of a rank, the inner degrees running fastest; see `trainer.mesh`."""
    names = [n for n in ("tp", "sp", "ep", "shard", "dp", "pp") if getattr(spec.layout, n) > 1]
    found: list[str] = []
    for name in names:
        rank, place = divmod(rank, getattr(spec.layout, name))
        found.append(f"{name} {place}")
    return ", ".join(reversed(found)) or "alone"


def _curves(store: LocalStore, spec: RunSpec, found: Measured) -> dict[str, Any]:
    if not found.points:
        return {}
    from headway.training.curves import curves_plot

    blob = store.put_bytes(curves_plot(f"{spec.pipeline} by step", {"run": found}), "image/png")
    return {"curves": dg.MetadataValue.path(store.read_path(blob.digest)), "curves_digest": blob.digest}


def _speed(found: Measured) -> dict[str, Any]:
    points = found.ordered
    split = found.split()
    if not points:
        return {}
    told = {
        f"{points[-1].unit}_per_second": _median([p.rate for p in points]),
        "step_seconds": _median([p.step_s for p in points]),
        "mfu": _median([p.mfu for p in points]),
        "peak_memory_mb": max((float(rank["peak_bytes"]) / _MB for rank in found.ranks), default=math.nan),
        "save_stall_seconds": found.checkpoints[-1].stall_s if found.checkpoints else math.nan,
    }
    whole = sum(split.values())
    rows = [
        {"part": part, "seconds_per_step": round(seconds, 6), "share": f"{seconds / whole:.1%}"}
        for part, seconds in split.items()
    ]
    facts: dict[str, Any] = {name: float(value) for name, value in told.items() if math.isfinite(value)}
    if found.work:
        facts["mfu_peak"] = f"{found.work['peak_flops_per_s'] / 1e9:.1f} GFLOP/s per rank: {found.work['peak']}"
        facts["flops_per_step"] = float(found.work["flops_per_step"])
    return facts | table("step_time", rows)


def _rank_row(rank: Mapping[str, Any]) -> dict[str, object]:
    place: Mapping[str, int] = rank.get("place") or {}
    held = {
        f"{kind}_mb": round(rank[f"{kind}_bytes"] / _MB, 3)
        for kind in ("parameter", "gradient", "optimizer", "peak")
        if f"{kind}_bytes" in rank
    }
    return {
        "rank": rank["rank"],
        "place": ", ".join(f"{name} {at}" for name, at in place.items()) or "alone",
        "blocks": rank.get("layers"),
        "experts": rank.get("experts"),
        **held,
        "busy_s_per_step": round(rank["busy_s"], 6),
        "waiting_s_per_step": round(rank["split"].get("communication", 0.0), 6),
    }


def _memory(spec: RunSpec, found: Measured) -> dict[str, Any]:
    from headway.training.measured import memory_by_kind

    kinds, unknown = memory_by_kind(spec, found.ranks)
    rows = [
        {"kind": row.kind, "estimated_mb": _mb(row.estimated), "measured_mb": _mb(row.measured)}
        for row in kinds
        if row.estimated is not None or row.measured is not None
    ]
    return table("memory", rows) | ({"memory_estimate": unknown} if unknown else {})


def _checkpoint_row(saved: Any) -> dict[str, object]:  # noqa: ANN401 - SavedStep, which is not imported here
    return {
        "attempt": saved.attempt,
        "step": saved.step,
        "kind": saved.kind,
        "mb": _mb(saved.bytes),
        "manifest": saved.manifest,
        "stalled_s_so_far": round(saved.stall_s, 3) if math.isfinite(saved.stall_s) else None,
    }


def _traces(found: Measured) -> dict[str, Any]:
    """Where the newest trace lies in the run's directory."""
    if not found.traces:
        return {}
    return {"trace": f"{found.traces[-1].path} in the run's directory; opens in https://ui.perfetto.dev"}


def _median(values: Sequence[float]) -> float:
    kept = sorted(value for value in values if math.isfinite(value))
    return kept[len(kept) // 2] if kept else math.nan


def _mb(size: int | None) -> float | None:
    return None if size is None else round(size / _MB, 3)
