"""`headway keys`: list, rotate and revoke the keys that sign provenance, verdicts and promotions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from headway.home import Settings
from headway.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.registry.key_use import KeyUse
    from headway.registry.keys import PublicKey

# The roles of `headway.registry.keys`, which the command line does not import for its help alone.
_ROLES = ("trainer", "gate", "promoter")


@click.group("keys")
def command() -> None:
    """List, rotate and revoke the role keys."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def list_(settings: Settings, as_json: bool) -> None:
    """List the public keys: role, state, window of validity, and what each has signed."""
    from headway.registry.key_use import NO_USE, key_uses
    from headway.registry.keys import KeyRing
    from headway.services import open_services

    ring = KeyRing(settings.keys_folder)
    keys = sorted(ring.trust().keys.values(), key=lambda key: (_ROLES.index(key.role), key.not_before))
    with open_services(settings) as services:
        uses = key_uses(services)
    rows = [_row(key, uses.get(key.key_id, NO_USE), ring.clock()) for key in keys]
    if as_json:
        click.echo(json.dumps({"keys": rows}, indent=2))
        return
    for row in rows:
        window = f"{row['not_before'][:10]} to {row['not_after'][:10]}"
        serves = f"; endpoints {', '.join(row['endpoints'])}" if row["endpoints"] else ""
        click.echo(f"{row['role']:<8}  {row['key_id']}  {row['state']:<8}  {window}")
        click.echo(f"          {counted(row['statements'], 'statement')}{serves}")
    click.echo(counted(len(rows), "key") if rows else "no keys: one is made when something is signed")


@command.command("rotate")
@click.argument("role", type=click.Choice(_ROLES))
@click.pass_obj
def rotate(settings: Settings, role: Any) -> None:  # noqa: ANN401
    """Make a new key for ROLE. What the old one signed until now stays valid; it signs nothing more."""
    from headway.registry.keys import KeyRing

    made = KeyRing(settings.keys_folder).rotate(role)
    click.echo(f"{role} signs with {made.public.key_id} from now on; earlier signatures stay valid")


@command.command("revoke")
@click.argument("reference", metavar="KEY_ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(settings: Settings, reference: str, yes: bool) -> None:
    """Take back every signature of a key, whenever it was made. This cannot be undone.

    KEY_ID is the id that `headway keys list` shows, or its first eight or more digits. Endpoints that serve by the
    key's word stop answering until their version is promoted anew; versions that it judged are to be judged again.
    """
    from headway.registry.key_use import NO_USE, find_key, key_uses
    from headway.registry.keys import KeyRing
    from headway.services import open_services

    ring = KeyRing(settings.keys_folder)
    key = find_key(ring.trust(), reference)
    if key.revoked_at is not None:
        click.echo(f"{key.role} key {key.key_id} is revoked already")
        return
    with open_services(settings) as services:
        lines = list(_affected(key, key_uses(services).get(key.key_id, NO_USE)))
    click.echo("\n".join(lines))
    if not yes:
        click.confirm("Revoke it?", abort=True)
    ring.revoke(key.key_id)
    click.echo(f"revoked; the next {key.role} signature is by a new key")


def _affected(key: PublicKey, use: KeyUse) -> Iterator[str]:
    yield f"{key.role} key {key.key_id} signed {counted(use.statements, 'statement')}"
    if use.versions:
        yield f"  about {', '.join(use.versions)}"
    for endpoint in use.endpoints:
        yield f"  endpoint {endpoint} stops answering until its version is promoted anew (headway promote)"
    if use.versions and key.role != "promoter":
        yield "  until they are judged again (materialize model_version) these versions are not promoted"


def _row(key: PublicKey, use: KeyUse, now: int) -> dict[str, Any]:
    from headway.datasets.zones import iso

    refused = key.refusal(key.role, now)
    return {
        "role": key.role,
        "key_id": key.key_id,
        "state": "valid" if refused is None else refused[0].removeprefix("key_"),
        "not_before": iso(key.not_before),
        "not_after": iso(key.not_after),
        "revoked_at": None if key.revoked_at is None else iso(key.revoked_at),
        "statements": use.statements,
        "versions": list(use.versions),
        "endpoints": list(use.endpoints),
    }
