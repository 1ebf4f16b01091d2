"""`headway fsck`: does the truth hold together?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from headway.home import Settings
from headway.services import Services, open_services

if TYPE_CHECKING:
    from headway.catalog.invariants import Finding
    from headway.registry.keys import KeyRing


@click.command("fsck")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check the catalog's invariants by name, the store against the catalog's rows, and the signatures of moves.

    Exits 1 when an invariant does not hold.
    """
    from headway.catalog.invariants import check
    from headway.registry.keys import KeyRing

    settings: Settings = ctx.obj
    with open_services(settings) as services:
        findings = check(services.catalog, services.principal, services.store)
        findings.append(_signed_moves(services, KeyRing(settings.keys_folder)))
    if as_json:
        rows = [{"invariant": f.invariant, "name": f.name, "ok": f.ok, "detail": f.detail} for f in findings]
        click.echo(json.dumps({"findings": rows}, indent=2))
    else:
        for finding in findings:
            click.echo(
                f"{'ok    ' if finding.ok else 'BROKEN'}  {finding.invariant:<4}  {finding.name}  {finding.detail}"
            )
    broken = sum(not finding.ok for finding in findings)
    if not as_json:
        click.echo(f"{len(findings)} invariants checked in {settings.home}, {broken} broken")
    ctx.exit(1 if broken else 0)


def _signed_moves(services: Services, keyring: KeyRing) -> Finding:
    from headway.catalog.invariants import Finding, finding
    from headway.registry.audit import audit_moves
    from headway.registry.keys import KeysRefused

    invariant, name = "I4", "promotions and rollbacks are signed"
    try:
        trust = keyring.trust()
    except KeysRefused as error:
        return Finding(invariant, name, False, error.message)
    moves = audit_moves(services, trust)
    broken = [f"{f.subject}: {f.problem}" for f in moves if f.problem]
    said = f"each of {len(moves)} verifies for its endpoint and epoch, and so do the gate statements below it"
    return finding(invariant, name, broken, said if moves else "nothing was ever promoted")
