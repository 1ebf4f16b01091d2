"""`headway fsck`: does the truth hold together?"""

import json

import click

from headway.home import Settings
from headway.services import open_services


@click.command("fsck")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check the catalog's invariants by name, and the store against the catalog's rows.

    Exits 1 when an invariant does not hold.
    """
    from headway.catalog.invariants import check

    settings: Settings = ctx.obj
    with open_services(settings) as services:
        findings = check(services.catalog, services.principal, services.store)
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
