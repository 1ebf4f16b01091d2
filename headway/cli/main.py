"""The `headway` command group: finds subcommands, and turns refusals into one line and an exit code.

Exit codes: 0 done, 1 the command found something wrong with what it looked at, 2 refused or used wrongly.
"""

import importlib
import sys

import click

from headway.errors import HeadwayError
from headway.home import load_settings

# name -> (module that holds `command`, line for `headway --help`). The line stands here as well, because the help of
# the group would otherwise import every subcommand with all that it needs.
COMMANDS = {
    "check": ("headway.cli.check", "Check a pipeline's declaration."),
    "dagster": ("headway.cli.dagster_sync", "Compare what Dagster shows with the catalog, and mend it."),
    "datasets": ("headway.cli.datasets", "Look at sources, canonical rows and dataset versions."),
    "demo": ("headway.cli.demo", "Play recorded data through the real system, on a clock that it moves."),
    "doctor": ("headway.cli.doctor", "Look whether this installation can work, and say what mends it."),
    "drift": ("headway.cli.drift", "Judge declared samples for drift, and look at drift reports."),
    "explain": ("headway.cli.explain", "Walk from a prediction back to the raw rows that made it."),
    "features": ("headway.cli.features", "Run feature cases and leakage proofs."),
    "fsck": ("headway.cli.fsck", "Check the catalog's invariants, and the store against the catalog."),
    "keys": ("headway.cli.keys", "List, rotate and revoke the role keys."),
    "kube": ("headway.cli.kube", "Render what a run would be on Kubernetes."),
    "labels": ("headway.cli.labels", "Add outcomes and corrections, and look at them."),
    "models": ("headway.cli.models", "Look at model versions, their gates and signatures."),
    "predict": ("headway.cli.predict", "Answer a file of requests with the promoted model."),
    "promote": ("headway.cli.promote", "Let a model version serve, on signed evidence."),
    "reconcile": ("headway.cli.reconcile", "Bring training rows and processes together."),
    "retrain": ("headway.cli.retrain", "Look at retraining requests and decisions, approve or reject them."),
    "rollback": ("headway.cli.rollback", "Swap an endpoint's stable and previous version."),
    "runs": ("headway.cli.runs", "Look at training runs, follow and cancel them."),
    "serve": ("headway.cli.serve", "Answer requests over HTTP with the promoted models until Ctrl-C."),
    "snapshots": ("headway.cli.snapshots", "Look at feature snapshots and verify them."),
    "status": ("headway.cli.status", "Show the state of every pipeline, and the settings in force."),
    "train": ("headway.cli.train", "Check a run's layout, and compare layouts with one process."),
    "ui": ("headway.cli.ui", "Serve Dagster's UI and run its daemon until Ctrl-C."),
}


class Refusal(click.ClickException):
    """A `HeadwayError` on its way to the terminal."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        """Print the one line to standard error."""
        click.echo(f"error: {self.format_message()}", file=sys.stderr)


class LazyGroup(click.Group):
    """A group that imports the module of a subcommand when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported, or None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; a `HeadwayError` ends it with one line, or with its stack trace when debugging.

        Raises:
            Refusal: the subcommand raised a `HeadwayError`.
        """
        try:
            return super().invoke(ctx)
        except HeadwayError as error:
            if ctx.params["debug"]:
                raise
            raise Refusal(str(error)) from error


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headway")
@click.option("--debug", is_flag=True, help="Show the stack trace of a refusal [HEADWAY_DEBUG].")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Headway: from raw rows to monitored predictions as one lineage graph."""
    settings = load_settings()
    ctx.params["debug"] = debug or settings.debug
    ctx.obj = settings


if __name__ == "__main__":
    main()
