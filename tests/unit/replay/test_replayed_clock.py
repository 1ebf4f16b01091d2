"""The world's clock: shown by the commands, moved forward only, and never guessed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headway.cli.main import main

NOON = "2013-12-02T12:00:00+00:00"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def told(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"HEADWAY_HOME": str(home)})


def test_without_a_replay_the_machines_clock_is_in_force(home: Path) -> None:
    assert "by the machine's clock" in told(home, "demo", "clock").output
    assert not (home / "clock.json").exists(), "looking moves nothing"


def test_every_command_that_names_the_clock_names_the_same(home: Path) -> None:
    moved = told(home, "demo", "clock", "--to", "2013-12-02T12:00Z").output.strip()
    assert moved == f"it is {NOON} by a replay's clock ({home / 'clock.json'})"
    assert moved in told(home, "status", "--settings").output
    assert json.loads(told(home, "status", "--settings", "--json").stdout)["clock"] == moved
    findings = json.loads(told(home, "doctor", "--json").stdout)["findings"]
    assert next(f for f in findings if f["name"] == "clock") == {
        "name": "clock",
        "ok": True,
        "detail": moved,
        "remedy": "",
    }


def test_a_replays_clock_never_moves_back(home: Path) -> None:
    told(home, "demo", "clock", "--to", "2013-12-02T12:00Z")
    back = told(home, "demo", "clock", "--to", "2013-12-01")
    assert back.exit_code == 2
    assert "is before that" in back.output
    assert NOON in told(home, "demo", "clock").output


@pytest.mark.parametrize("text", ["", "[]", '{"format": "x"}', '{"format": "headway.clock/1", "now": "2013-12-02"}'])
def test_a_clock_that_cannot_be_read_stops_commands_and_is_found(home: Path, text: str) -> None:
    home.mkdir()
    (home / "clock.json").write_text(text)
    assert told(home, "demo", "clock").exit_code == 2
    sick = told(home, "doctor")
    assert sick.exit_code == 1
    assert any(line.startswith("WRONG   clock") and "holds no clock" in line for line in sick.output.splitlines())


def test_an_online_store_that_cannot_be_used_is_found(home: Path) -> None:
    sick = CliRunner().invoke(main, ["doctor"], env={"HEADWAY_HOME": str(home), "HEADWAY_ONLINE_URL": "mysql://x"})
    assert sick.exit_code == 1
    assert [line[:15] for line in sick.output.splitlines() if line.startswith("WRONG")] == ["WRONG   online "]
