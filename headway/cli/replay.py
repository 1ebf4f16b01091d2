"""`headway runs replay`: compute a run again and say how far that comes to the same."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from headway.home import Settings


@click.command("replay")
@click.argument("run_id", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing of the progress.")
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Compute below this folder.")
@click.pass_context
def command(ctx: click.Context, run_id: str, as_json: bool, scratch: Path | None) -> None:
    """Compute a run again, from its pinned data, code, environment and seed, and compare.

    The first line says what came of it: bit_exact, within_tolerance(eps), diverged(step, tensor), or
    environment_mismatch(what), which is told before anything is computed. Nothing is published.

    Exit status: 0 when the run came to what it claims, 1 when it did not, 2 when it could not be compared.
    """
    from headway.cli.runs import find_run
    from headway.services import open_services
    from headway.training.claims import LEVELS
    from headway.training.launchers import launcher_for
    from headway.training.replay import replay

    settings: Settings = ctx.obj

    def tell(line: str) -> None:
        if not as_json:
            click.echo(line, err=True)

    with open_services(settings) as services, tempfile.TemporaryDirectory(prefix="replay-", dir=scratch) as folder:
        run = find_run(services, run_id)
        answer = replay(services, launcher_for(settings), run, Path(folder), tell)
    if as_json:
        document = asdict(answer) | {"run_id": run.run_id, "answer": answer.in_words(), "as_claimed": answer.as_claimed}
        click.echo(json.dumps(document | {"eps": answer.eps if answer.eps < float("inf") else None}))
    else:
        click.echo(answer.in_words())
        click.echo(f"claimed: {answer.claimed}: {LEVELS[answer.claimed]}")
        click.echo(f"compared: {answer.steps} moments, {answer.tensors} tensors")
    if answer.verdict == "environment_mismatch":
        ctx.exit(2)
    ctx.exit(0 if answer.as_claimed else 1)
