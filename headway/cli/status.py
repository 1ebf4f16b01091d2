"""`headway status`: the settings in force."""

import json

import click

from headway.home import Settings


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(settings: Settings, as_json: bool) -> None:
    """Show every setting with the value in force and where it comes from; passwords are blanked."""
    if as_json:
        rows = [{"variable": row.variable, "value": row.value, "origin": row.origin} for row in settings.effective]
        click.echo(json.dumps({"settings": rows, "unknown": list(settings.unknown)}, indent=2))
        return
    width = max(len(row.variable) for row in settings.effective)
    for row in settings.effective:
        click.echo(f"{row.variable:<{width}}  {row.origin:<11}  {row.value}")
