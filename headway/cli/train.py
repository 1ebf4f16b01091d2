"""`headway train`: whether a layout can run, whether it trains as one process does, and what a run learned from."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from headway.cli.train_check import command as check
from headway.cli.train_ledger import command as ledger
from trainer.spec import STAGES_PER_RANK


@click.group("train")
def command() -> None:
    """Check a run's layout, compare layouts with one process, list what a run learned from."""


command.add_command(check)
command.add_command(ledger)


@command.command("parity")
@click.option("--engine", "-e", required=True, help="ddp, fsdp2 or deepspeed.")
@click.option("--layout", "-l", required=True, help="Degrees, such as dp=2,tp=2; those not named are 1.")
@click.option("--precision", type=click.Choice(("fp32", "bf16", "fp16")), default="fp32", show_default=True)
@click.option(
    "--accumulation",
    type=click.IntRange(1),
    help="Micro-batches per step.  [default: as many as the pipeline has stages]",
)
@click.option(
    "--schedule", type=click.Choice(tuple(STAGES_PER_RANK)), default="1f1b", show_default=True, help="Of a pipeline."
)
@click.option("--offload", type=click.Choice(("optimizer", "parameters")), help="What stays in host memory.")
@click.option("--activation-checkpointing", is_flag=True, help="Compute activations again in the backward pass.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the model.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: every number and every limit.")
@click.pass_context
def parity(
    ctx: click.Context,
    engine: str,
    layout: str,
    precision: str,
    accumulation: int | None,
    schedule: str,
    offload: str | None,
    activation_checkpointing: bool,
    compiled: bool,
    steps: int,
    as_json: bool,
) -> None:
    """Train a small transformer under a layout and in one process, and compare.

    Losses, gradient norms and replicas have to agree, and what each rank holds and sends has to be what the layout
    says. Exits 1 when they do not, 2 when the layout is refused before anything starts. Runs on this machine's CPUs.
    """
    arguments = ["--engine", engine, "--layout", layout, "--precision", precision, "--schedule", schedule]
    arguments += ["--steps", str(steps), "--accumulation", str(accumulation or 0), "--offload", offload or ""]
    flags = {"--activation-checkpointing": activation_checkpointing, "--compile": compiled, "--json": as_json}
    ctx.exit(_run([*arguments, *(flag for flag, given in flags.items() if given)]))


def _run(arguments: list[str]) -> int:
    """The status of the trainer's comparison; what it prints passes through, its refusals too."""
    from headway.processes import die_with_parent
    from headway.training.identity import CODE_ROOT
    from headway.training.trainer_process import trainer_environment

    us = os.getpid()
    done = subprocess.run(
        [sys.executable, "-m", "trainer.parity", *arguments],
        cwd=CODE_ROOT,
        env=trainer_environment() | {"PYTHONPATH": str(CODE_ROOT), "DS_ACCELERATOR": "cpu"},
        preexec_fn=lambda: die_with_parent(us),
        check=False,
    )
    return done.returncode
