"""`headway runs compare`: in what runs differ, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.home import Settings

if TYPE_CHECKING:
    from headway.training.compare import Comparison, Line

_TITLES = {
    "config": "configuration",
    "data": "data",
    "code": "code",
    "environment": "environment",
    "results": "results",
}
_WIDTH = 26


@click.command("compare")
@click.argument("run_ids", metavar="RUN RUN [RUN]...", nargs=-1, required=True)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the curves of all runs on one plot (PNG)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, curves included.")
@click.pass_obj
def command(settings: Settings, run_ids: tuple[str, ...], plot: Path | None, as_json: bool) -> None:
    """Compare runs: what differs in configuration, data, code and environment; metrics and speeds side by side."""
    from headway.cli.runs import find_run
    from headway.services import open_services
    from headway.training.compare import compare
    from headway.training.curves import curves_plot

    with open_services(settings) as services:
        found = compare(services, [find_run(services, reference) for reference in run_ids])
    if plot is not None:
        names = [f"{run.run_id[:8]} ({run.facts.partition or run.facts.pipeline})" for run in found.runs]
        plot.write_bytes(curves_plot("runs by step", dict(zip(names, found.measured, strict=True))))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    click.echo("\n".join(in_words(found)))
    if plot is not None:
        click.echo(f"curves: {plot}")


def in_words(found: Comparison) -> list[str]:
    """The comparison as lines for a terminal."""
    lines = [_row("run", [run.run_id for run in found.runs])]
    lines.append(_row("", [f"{run.facts.pipeline} {run.facts.partition}".strip() for run in found.runs]))
    for part, title in _TITLES.items():
        shown: Sequence[Line] = getattr(found, part)
        lines += ["", title if shown else f"{title}: the same"]
        lines += [_row(f"  {line.name}", [_cell(value) for value in line.values], line.differs) for line in shown]
    return lines + [f"unknown: {reason}" for reason in found.unknown]


def _row(name: str, cells: Sequence[str], differs: bool = False) -> str:
    mark = "*" if differs else " "
    return f"{name:<34} {mark} " + "  ".join(f"{cell:<{_WIDTH}}" for cell in cells).rstrip()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    text = text.removeprefix("sha256:")
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
