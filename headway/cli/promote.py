"""`headway promote`: make a version serve, on signed evidence only."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from headway.home import Settings


@click.command("promote")
@click.argument("reference", metavar="MODEL[@VERSION]")
@click.option("--endpoint", "-e", "endpoint_id", help="The endpoint; none: the one named like the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(settings: Settings, reference: str, endpoint_id: str | None, as_json: bool) -> None:
    """Give an endpoint's traffic to a version, at once; the version that served becomes the previous one.

    Without a version: the newest one that every gate passed. Refused unless each gate of the policy has a passing,
    fresh verdict whose signature verifies, and the artifact is what was judged.
    """
    from headway.registry.find import find_version, newest_eligible
    from headway.registry.keys import KeyRing
    from headway.registry.promote import promote
    from headway.services import open_services

    with open_services(settings) as services:
        named = "@" in reference
        version = find_version(services, reference) if named else newest_eligible(services, reference)
        keyring = KeyRing(settings.keys_folder)
        endpoint = promote(services, keyring, endpoint_id or version.model_id, version.model_id, version.version)
    if as_json:
        click.echo(json.dumps(asdict(endpoint), indent=2))
        return
    before = "none" if endpoint.previous is None else f"{endpoint.model_id}@{endpoint.previous}"
    click.echo(
        f"{endpoint.endpoint_id} serves {endpoint.model_id}@{endpoint.stable} (epoch {endpoint.epoch}, "
        f"before: {before})"
    )
