"""`headway train check`: whether a layout can run, and what it asks of each rank, before anything starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.errors import HeadwayError

if TYPE_CHECKING:
    from trainer.blobs import Json
    from trainer.spec import BatchSpec, LayoutSpec, ModelFacts, Precision, SpecRefused


class SpecUnreadable(HeadwayError):
    """A file that cannot be read."""


@dataclass(frozen=True)
class Asked:
    """The part of a run spec or a declaration that decides about its layout."""

    layout: LayoutSpec
    precision: Precision
    clip_norm: float
    batch: BatchSpec
    model: ModelFacts


@click.command("check")
@click.argument("what", metavar="SPEC|PIPELINE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, what: str, as_json: bool) -> None:
    """Say whether the layout of a run can run: world size, rows per rank, memory per rank by kind.

    SPEC is a file that holds a run spec (JSON); PIPELINE is a pipeline's name, its folder or its defs.yaml. Nothing is
    read but that, and nothing starts. Exits 1 when it is refused: with the fields that do not go together, the reason,
    and the nearest layout that would do.
    """
    from trainer.spec import SpecRefused, check_parallel

    try:
        asked = _of_spec(Path(what)) if _is_spec(Path(what)) else _of_pipeline(what)
        check_parallel(asked.layout, asked.precision, asked.clip_norm, asked.batch, asked.model)
    except SpecRefused as error:
        click.echo(json.dumps(refusal(error)) if as_json else f"refused: {error}", err=not as_json)
        ctx.exit(1)
    found = findings(asked)
    click.echo(json.dumps(found) if as_json else in_words(asked, found))


def findings(asked: Asked) -> dict[str, Json]:
    """What a valid layout comes to: `memory` in bytes of one rank by kind, or null with the reason."""
    from headway.training.memory import SizesUnknown, estimate_memory
    from trainer.spec import layout_text

    layout, batch = asked.layout, asked.batch
    memory, unknown = None, ""
    try:
        memory = estimate_memory(asked.model, layout, asked.precision, batch).to_json()
    except SizesUnknown as error:
        unknown = str(error)
    return {
        "ok": True,
        "engine": layout.engine,
        "layout": layout_text(layout),
        "precision": asked.precision,
        "world_size": layout.world_size,
        "nodes": layout.nodes,
        "processes_per_node": layout.processes_per_node,
        "data_ranks": layout.data_ranks,
        "global_batch": batch.global_size,
        "accumulation": batch.accumulation,
        "rows_per_rank": batch.global_size // layout.data_ranks,
        "micro_batch": batch.global_size // (layout.data_ranks * batch.accumulation),
        "memory": memory,
        "memory_unknown": unknown,
    }


def refusal(error: SpecRefused) -> dict[str, Json]:
    """Why a layout cannot run; `nearest` is null for what is wrong by itself."""
    from trainer.spec import LayoutConflict, describe_choice, layout_text

    told: dict[str, Json] = {"ok": False, "field": error.field, "fields": {}, "reason": error.problem, "nearest": None}
    if isinstance(error, LayoutConflict):
        near = error.nearest
        told["fields"] = {
            name: value if isinstance(value, int | float) else str(value) for name, value in error.fields.items()
        }
        told["reason"] = error.reason
        told["nearest"] = {
            "in_words": describe_choice(near, error.nearest_precision),
            "text": layout_text(near),
            "precision": error.nearest_precision,
            **near.to_json(),
        }
    return told


def in_words(asked: Asked, found: dict[str, Json]) -> str:
    """The findings as lines for a terminal."""
    from trainer.spec import describe_choice

    lines = [
        f"ok: {describe_choice(asked.layout, asked.precision)}",
        f"{found['world_size']} ranks: {found['nodes']} nodes x {found['processes_per_node']} processes",
        f"{found['global_batch']} rows per step: {found['data_ranks']} data-parallel ranks x {found['accumulation']} "
        f"micro-batches x {found['micro_batch']} rows",
    ]
    memory = found["memory"]
    if isinstance(memory, dict):
        kinds = ("parameters", "gradients", "optimizer", "activations", "transient", "total")
        lines.append("memory per rank, estimated:")
        lines += [f"  {kind:<12}{_megabytes(memory[kind])}" for kind in kinds]
        host = memory["host"]
        if isinstance(host, list) and host:
            lines.append(f"  in host memory: {', '.join(map(str, host))}")
    else:
        lines.append(f"memory per rank: unknown; {found['memory_unknown']}")
    return "\n".join(lines)


def _megabytes(size: Json) -> str:
    return f"{float(str(size)) / 2**20:12,.2f} MiB"


def _is_spec(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".yaml", ".yml")


def _of_spec(file: Path) -> Asked:
    from trainer.spec import model_facts, parse_run

    try:
        spec = parse_run(file.read_bytes())
    except OSError as error:
        raise SpecUnreadable(f"{file} cannot be read: {error.strerror}", "name a readable file") from error
    return Asked(spec.layout, spec.precision, spec.optimizer.clip_norm, spec.batch, model_facts(spec.model.options))


def _of_pipeline(reference: str) -> Asked:
    from headway.loading import load_pipeline
    from headway.training.plan import declared_batch, declared_layout, declared_optimizer, model_options
    from headway.training.window import declared_training
    from trainer.spec import model_facts

    spec = load_pipeline(reference).spec
    training = declared_training(spec)
    return Asked(
        declared_layout(training),
        training.precision,
        declared_optimizer(training).clip_norm,
        declared_batch(training),
        model_facts(model_options(spec)),
    )
