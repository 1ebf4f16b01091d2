"""`headway drift`: runs declared cases, and shows what reports said of an endpoint."""

import json
from pathlib import Path
from typing import Any

import click


@click.group()
def command() -> None:
    """Judge declared windows, and look at the reports of an endpoint."""


@command.command("cases")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with every judgement.")
@click.pass_context
def cases(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Judge every case in FILE and compare with what the file expects.

    Exits 1 when a verdict is another one than expected.
    """
    from headway.monitoring.cases import run_cases

    answers = run_cases(file)
    different = [a for a in answers if a["agree"] is False]
    if as_json:
        click.echo(json.dumps({"cases": answers}, indent=2))
    else:
        for answer in answers:
            click.echo(_line(answer))
        click.echo(f"{len(answers)} cases judged, {len(different)} not as expected")
    ctx.exit(1 if different else 0)


def _line(answer: dict[str, Any]) -> str:
    judged = answer["judgement"]
    mark = {True: "ok", False: "DIFFERS", None: "-"}[answer["agree"]]
    why = f": {judged['reason']}" if judged["reason"] else ""
    wanted = f" (expected {json.dumps(answer['expected'])})" if answer["agree"] is False else ""
    return f"{mark:8}{answer['name']}: {answer['verdict']}{why}{wanted}"
