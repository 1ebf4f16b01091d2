"""`headway demo`: plays recorded data through the real system on a clock that it moves."""

import os
import subprocess
import sys
from pathlib import Path

import click

from headway.home import Settings

ROOT = Path(__file__).resolve().parent.parent.parent


@click.group("demo")
def command() -> None:
    """Play recorded data through the real system, on a clock that the replay moves.

    The clock is a file of the home (clock.json). While it is there, servers, labels, weeks and the retraining sensor go
    by it; the catalog's own times never do.
    """


@command.command("feed")
@click.option("--until", required=True, metavar="DATE", help="Where the clock stops, as 2013-12-16 or with a time.")
@click.option("--pipeline", "-p", default="flight_delay", show_default=True, help="Whose events are played.")
@click.option("--per-day", type=click.IntRange(1, 5000), default=120, show_default=True, help="Sampled events a day.")
@click.option("--url", help="A server that runs already; without it one is started for the feed.")
@click.option("--no-retrain", is_flag=True, help="Report and decide, and start no training.")
@click.pass_obj
def feed(settings: Settings, until: str, pipeline: str, per_day: int, url: str | None, no_retrain: bool) -> None:
    """Ask for real events at their time over HTTP, report outcomes when they come, and close every week.

    Goes on from where the clock stands. At a week's end its predictions, labels, quality and drift reports are
    materialized in Dagster, and the retraining sensor's decision is taken and followed.
    """
    arguments = ["--until", until, "--pipeline", pipeline, "--per-day", str(per_day)]
    arguments += ["--url", url] if url else []
    arguments += ["--no-retrain"] if no_retrain else []
    # Dagster executes the weeks, and the command line does not import it.
    done = subprocess.run(
        [sys.executable, "-m", "assets.feed", *arguments], cwd=ROOT, env=_environment(settings), check=False
    )
    sys.exit(done.returncode)


@command.command("clock")
@click.option("--to", metavar="DATE", help="Move it to a date, as 2013-12-16 or with a time; never back.")
@click.pass_obj
def clock(settings: Settings, to: str | None) -> None:
    """Show the world's clock, or move it."""
    from headway.replay.moments import moment_of
    from headway.world import clock_in_force, move_clock

    if to is not None:
        move_clock(settings.clock_file, moment_of(to))
    click.echo(clock_in_force(settings.clock_file))


def _environment(settings: Settings) -> dict[str, str]:
    return {**os.environ, "HEADWAY_HOME": str(settings.home)}
