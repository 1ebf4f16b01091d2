"""`headway rollback`: return an endpoint to the version before."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from headway.home import Settings


@click.command("rollback")
@click.argument("endpoint_id", metavar="ENDPOINT")
@click.option("--reason", default="asked for on the command line", show_default=True, help="Kept with the move.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(settings: Settings, endpoint_id: str, reason: str, as_json: bool) -> None:
    """Swap an endpoint's stable and previous versions. The same rollback again, right after, changes nothing.

    The promoter signs it, as a promotion. Refused while the previous version's files, or the signature of its own
    promotion, do not verify.
    """
    from headway.registry.keys import KeyRing
    from headway.registry.promote import rollback
    from headway.services import open_services

    with open_services(settings) as services:
        endpoint = rollback(services, KeyRing(settings.keys_folder), endpoint_id, reason)
    if as_json:
        click.echo(json.dumps(asdict(endpoint), indent=2))
        return
    click.echo(
        f"{endpoint.endpoint_id} serves {endpoint.model_id}@{endpoint.stable} again (epoch {endpoint.epoch}; "
        f"before: {endpoint.model_id}@{endpoint.previous})"
    )
