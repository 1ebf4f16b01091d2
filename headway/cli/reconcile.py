"""`headway reconcile`: rows and processes brought together once."""

from __future__ import annotations

import json

import click

from headway.home import Settings


@click.command("reconcile")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(settings: Settings, dry_run: bool, as_json: bool) -> None:
    """Bring training attempts and their processes together: start, adopt, finish, restart, end strays.

    Safe at any time and from several places at once; Dagster's daemon does the same every half minute. Exits 1 when
    something could not be brought together.
    """
    from headway.services import open_services
    from headway.training.launchers import launcher_for
    from headway.training.reconcile import Reconciler

    with open_services(settings) as services:
        actions = Reconciler(services, launcher_for(settings), dry_run=dry_run).all()
    if as_json:
        rows = [{"run_id": a.run_id, "attempt": a.attempt, "kind": a.kind, "detail": a.detail} for a in actions]
        click.echo(json.dumps({"dry_run": dry_run, "actions": rows}, indent=2))
    else:
        for action in actions:
            click.echo(f"{action.run_id} attempt {action.attempt}  {action.kind:<8}  {action.detail}")
        click.echo(f"{len(actions)} {'to do' if dry_run else 'done'}" if actions else "rows and processes agree")
    if any(action.kind == "error" for action in actions):
        raise SystemExit(1)
