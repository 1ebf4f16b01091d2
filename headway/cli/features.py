"""`headway features`: feature cases and leakage proofs."""

import click

from headway.cli.features_cases import command as cases
from headway.cli.features_prove import command as prove


@click.group("features")
def command() -> None:
    """Run feature cases and leakage proofs."""


command.add_command(cases)
command.add_command(prove)
