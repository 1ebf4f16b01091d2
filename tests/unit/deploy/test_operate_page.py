"""docs/operate.md names commands, codes, settings and values that exist."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.charts import CHART

from headway.cli.main import main
from headway.home import load_settings
from headway.training import reasons

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operate.md"
TEXT = PAGE.read_text(encoding="utf-8")
# Seconds go by between two looks, and nobody has to do anything.
PASSING = {"starting", "stopping", "node_lost"}


def commands() -> list[list[str]]:
    written = re.findall(r"(?:^|`|\(`)(?:hw|headway) ([a-z][^`\n#)]*)", TEXT, re.MULTILINE)
    return [line.split() for line in written]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_on_the_page_exists(words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main)
    left = list(words)
    while isinstance(command, click.Group):
        assert left, f"{words} names a group only"
        child = command.get_command(context, left.pop(0))
        assert child is not None, words
        command = child
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in left if word.startswith("-")} <= known, words


def test_the_page_has_commands_to_check() -> None:
    assert len(commands()) > 20


def test_every_way_to_wait_and_every_code_on_the_page_is_one_of_the_launchers() -> None:
    waits = set(re.findall(r"^\| waits: `([a-z_]+)`", TEXT, re.MULTILINE))
    assert waits == set(reasons.WAITING) - PASSING
    rows = re.findall(r"^\| ended: ([^|]+)\|", TEXT, re.MULTILINE)
    ends = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert ends <= set(reasons.ENDED)
    # What is left out needs nothing, or is what a person did, or is told as something that a pod waits for.
    left_out = {"done", "cancelled", "preempted", "lost", "deadline", "refused_spec", "artifact_invalid"}
    assert set(reasons.ENDED) - ends == left_out | {"image_pull", "config_error"}


def test_settings_on_the_page_are_known() -> None:
    known = {entry.variable for entry in load_settings({}).effective}
    assert set(re.findall(r"HEADWAY_[A-Z_]+[A-Z]", TEXT)) <= known


def test_values_on_the_page_are_values_of_the_chart() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    roots = "|".join(values)
    found = set(re.findall(rf"(?:`|\s)((?:{roots})(?:\.[a-zA-Z]+)+)", TEXT))
    assert len(found) > 15
    for path in found:
        at: Any = values
        for name in path.split("."):
            assert name in at, path
            at = at[name]
