"""`headway train ledger`: which samples each step of a run learned from, whatever ended its attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.catalog.run_facts import TrainingRun
    from headway.services import Services
    from trainer.blobs import Json

_KINDS = ("position", "step", "epoch", "checkpoint", "metrics")
_PAGE = 1_000


class NoStepsYet(HeadwayError):
    """A run that has taken no step."""


@click.command("ledger")
@click.argument("run_id", metavar="RUN")
@click.option("--step", "steps", metavar="A:B", default="", help="Only steps A to B, both included, from 1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--digest", is_flag=True, help="Print one digest over all samples by step instead.")
@click.pass_context
def command(ctx: click.Context, run_id: str, steps: str, as_json: bool, digest: bool) -> None:
    """Say which samples each step of RUN learned from, and on which rank.

    Rows are named by their identity, tokens by shard and offset. It follows from the run's spec and from where its
    attempts began; what an attempt took and lost with its end is not listed. The digest does not change with restarts
    or with the number of ranks. Exits 2 when a step was not taken.
    """
    from headway.cli.runs import find_run
    from headway.services import open_services

    settings: Settings = ctx.obj
    with open_services(settings) as services:
        run = find_run(services, run_id)
        asked: dict[str, Json] = {
            "spec": json.loads(services.store.get_bytes(run.facts.spec_digest)),
            "store_root": str(settings.store_root),
            "events": _events(services, run),
        }
    if not asked["events"]:
        raise NoStepsYet(f"run {run.run_id} has taken no step", "look at `headway runs show`")
    flags = {"--json": as_json, "--digest": digest}
    ctx.exit(_print_ledger(asked, ["--step", steps, *(flag for flag, given in flags.items() if given)]))


def _events(services: Services, run: TrainingRun) -> list[Json]:
    found: list[Json] = []
    after = 0
    while page := services.catalog.run_events(services.principal, run.run_id, after=after, limit=_PAGE, kinds=_KINDS):
        found += [
            {"attempt": e.attempt, "kind": e.kind, "data": {n: e.data[n] for n in _NEEDED if n in e.data}} for e in page
        ]
        after = page[-1].seq
    return found


_NEEDED = ("step", "steps", "data_ranks")


def _print_ledger(asked: dict[str, Json], arguments: list[str]) -> int:
    """The status of the trainer's ledger, which reads the rows and prints; its refusals pass through too."""
    from headway.processes import die_with_parent
    from headway.training.identity import CODE_ROOT
    from headway.training.trainer_process import trainer_environment

    us = os.getpid()
    done = subprocess.run(
        [sys.executable, "-m", "trainer.ledger", *arguments],
        input=json.dumps(asked),
        text=True,
        cwd=CODE_ROOT,
        env=trainer_environment() | {"PYTHONPATH": str(CODE_ROOT)},
        preexec_fn=lambda: die_with_parent(us),
        check=False,
    )
    return done.returncode
