"""`headway features cases`: runs machine-readable cases on the feature kernel."""

import json
from pathlib import Path

import click


@click.command("cases")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with every result.")
@click.pass_context
def command(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Run every case in FILE on the kernel and compare with what the file expects.

    Exits 1 when a case fails.
    """
    from headway.features.cases import run_cases

    cases = run_cases(file)
    failed = [case["name"] for case in cases if not case["passed"]]
    if as_json:
        click.echo(json.dumps({"cases": cases}, indent=2))
    else:
        for name in failed:
            click.echo(f"FAILED  {name}")
        click.echo(f"{len(cases)} cases run, {len(failed)} failed")
    ctx.exit(1 if failed else 0)
