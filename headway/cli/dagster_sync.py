"""`headway dagster`: what Dagster shows against what the catalog holds."""

import os
import subprocess
import sys
from pathlib import Path

import click

from headway.home import Settings

ROOT = Path(__file__).resolve().parent.parent.parent


@click.group("dagster")
def command() -> None:
    """Compare what Dagster shows with the catalog, and show it again after Dagster's storage was lost."""


@command.command("sync")
@click.option("--check", is_flag=True, help="Only print the differences; exit 1 when there is one.")
@click.option("--pipeline", "-p", multiple=True, help="Only this pipeline (name or folder); may be given repeatedly.")
@click.pass_obj
def sync(settings: Settings, check: bool, pipeline: tuple[str, ...]) -> None:
    """Report materializations and checks to Dagster from the catalog, which is only read.

    Nothing is reported twice: what Dagster shows already is left. A partition that is green without a row in the
    catalog is named and left as it is, and the exit code is 1. Best run while Dagster's daemon is stopped, since
    automation takes every report for news.
    """
    arguments = (["--check"] if check else []) + [a for name in pipeline for a in ("--pipeline", name)]
    # Reports go through Dagster's own instance, and the command line does not import it.
    done = subprocess.run(
        [sys.executable, "-m", "assets.sync", *arguments],
        cwd=ROOT,
        env={**os.environ, "HEADWAY_HOME": str(settings.home)},
        check=False,
    )
    sys.exit(done.returncode)
