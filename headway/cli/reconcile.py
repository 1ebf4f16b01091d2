"""`headway reconcile`: rows and processes brought together, once or again and again."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.training.launch import Launcher
    from headway.training.reconcile import Action


@click.command("reconcile")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option(
    "--watch",
    type=click.FloatRange(1.0),
    metavar="SECONDS",
    help="Go on until SIGTERM, with so many seconds between two looks: what a cluster's reconciler runs.",
)
@click.option(
    "--alive",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --watch: a file that is touched after each look, for a liveness probe to see how old it is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (one per look with --watch).")
@click.pass_obj
def command(settings: Settings, dry_run: bool, watch: float | None, alive: Path | None, as_json: bool) -> None:
    """Bring training attempts and what runs of them together: start, adopt, finish, restart, end strays.

    Safe at any time and from several places at once; Dagster's daemon does the same every half minute. Exits 1 when
    something could not be brought together.
    """
    if watch is not None:
        _watch(settings, watch, dry_run, as_json, alive)
        return
    if alive is not None:
        raise click.UsageError("--alive is for --watch: one look needs no probe")
    with _launcher(settings) as launcher:
        actions = _once(settings, launcher, dry_run)
    _print(actions, dry_run, as_json)
    if not (actions or as_json):
        click.echo("rows and processes agree")
    if any(action.kind in ("error", "unavailable") for action in actions):
        raise SystemExit(1)


def _watch(settings: Settings, every_s: float, dry_run: bool, as_json: bool, alive: Path | None) -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    # One launcher for all looks: between them it follows what pods print, and how they end.
    with _launcher(settings) as launcher:
        while not ended.is_set():
            try:
                _print(_once(settings, launcher, dry_run), dry_run, as_json)
            except HeadwayError as error:
                # The database or the home is away: the next look finds out whether it is back.
                click.echo(str(error), err=True)
            if alive is not None:
                alive.touch()
            ended.wait(every_s)


@contextmanager
def _launcher(settings: Settings) -> Iterator[Launcher]:
    from headway.training.launchers import launcher_for

    launcher = launcher_for(settings)
    try:
        yield launcher
    finally:
        launcher.close()


def _once(settings: Settings, launcher: Launcher, dry_run: bool) -> list[Action]:
    from headway.services import open_services
    from headway.training.reconcile import Reconciler

    with open_services(settings) as services:
        return Reconciler(services, launcher, dry_run=dry_run).all()


def _print(actions: list[Action], dry_run: bool, as_json: bool) -> None:
    if as_json:
        rows = [{"run_id": a.run_id, "attempt": a.attempt, "kind": a.kind, "detail": a.detail} for a in actions]
        click.echo(json.dumps({"dry_run": dry_run, "actions": rows}, indent=2))
        return
    for action in actions:
        click.echo(f"{action.run_id} attempt {action.attempt}  {action.kind:<8}  {action.detail}")
    if actions:
        click.echo(f"{len(actions)} {'to do' if dry_run else 'done'}")
