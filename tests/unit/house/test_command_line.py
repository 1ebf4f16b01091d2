"""The `headway` command: help everywhere, one line for a refusal, exit codes, and nothing heavy for the help."""

import json
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headway.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]


def invoke(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as a person does, with only these settings."""
    return subprocess.run(
        [sys.executable, "-m", "headway.cli.main", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def walk(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            found += walk(child, (*path, name))
    return found


def test_every_command_has_help_with_a_sentence() -> None:
    paths = walk(main)
    assert {path[0] for path in paths if path} == set(COMMANDS)
    for path in paths:
        result = CliRunner().invoke(main, [*path, "--help"])
        assert result.exit_code == 0, f"{path}: {result.output}"
        # Usage line, empty line, then what the command does.
        assert result.output.splitlines()[2].strip(), f"{path} does not say what it does"


def test_help_imports_no_subcommand_and_nothing_heavy() -> None:
    code = (
        "import sys, click.testing, headway.cli.main as m\n"
        "assert click.testing.CliRunner().invoke(m.main, ['--help']).exit_code == 0\n"
        "print(' '.join(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"sqlalchemy", "pandas", "pyarrow", "numpy", "numba", "pydantic", "dagster", "headway.cli.fsck"}
    assert heavy.isdisjoint(loaded.split())


def test_a_refusal_is_one_line_and_exit_2() -> None:
    done = invoke("status", HEADWAY_UI_PORT="many")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: HEADWAY_UI_PORT is 'many'; a port is a whole number from 0 (any free one) to 65535\n"
    )


@pytest.mark.parametrize(("arguments", "environ"), [(["--debug"], {}), ([], {"HEADWAY_DEBUG": "1"})])
def test_debug_shows_the_stack_of_a_refusal(tmp_path: Path, arguments: list[str], environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        quiet = invoke("ui", "--port", port, HEADWAY_HOME=str(tmp_path))
        loud = invoke(*arguments, "ui", "--port", port, HEADWAY_HOME=str(tmp_path), **environ)
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert "PortTaken" in loud.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    done = invoke("statsu")
    assert done.returncode == 2
    assert "No such command 'statsu'" in done.stderr


def test_status_shows_values_and_origins_and_warns_about_the_unknown(tmp_path: Path) -> None:
    done = invoke("status", "--json", HEADWAY_HOME=str(tmp_path), HEADWAY_DEBUG="0", HEADWAY_TENAT="x")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    rows = {row["variable"]: (row["value"], row["origin"]) for row in report["settings"]}
    assert rows["HEADWAY_HOME"] == (str(tmp_path), "environment")
    assert rows["HEADWAY_DEBUG"] == ("false", "environment")
    assert rows["HEADWAY_UI_PORT"] == ("3000", "default")
    assert report["unknown"] == ["HEADWAY_TENAT"]
    assert "did you mean HEADWAY_TENANT?" in done.stderr


def test_fsck_of_a_fresh_home_finds_everything_in_order(tmp_path: Path) -> None:
    done = invoke("fsck", "--json", HEADWAY_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert findings
    assert all(finding["ok"] for finding in findings)


def test_fsck_exits_1_and_names_what_is_broken(tmp_path: Path) -> None:
    assert invoke("fsck", HEADWAY_HOME=str(tmp_path)).returncode == 0
    drop_a_trigger(tmp_path / "catalog.db")
    done = invoke("fsck", HEADWAY_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "BROKEN  I8" in done.stdout


def drop_a_trigger(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        (name,) = connection.execute("select name from sqlite_master where type = 'trigger' order by name").fetchone()
        connection.execute(f'drop trigger "{name}"')
    connection.close()


@pytest.mark.parametrize("name", ["point_in_time.json", "windows.json"])
def test_feature_cases_pass_and_print_every_result(name: str) -> None:
    done = invoke("features", "cases", f"tests/cases/{name}", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = json.loads((ROOT / "tests" / "cases" / name).read_text())["cases"]
    report = json.loads(done.stdout)["cases"]
    assert [case["name"] for case in report] == [case["name"] for case in expected]
    assert all(set(case) == {"name", "passed", "results"} and case["passed"] for case in report)


def test_a_case_that_fails_is_named_and_exits_1(tmp_path: Path) -> None:
    cases = json.loads((ROOT / "tests" / "cases" / "point_in_time.json").read_text())
    cases["cases"][0]["expected"][0]["value"] += 1.0
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(cases))
    done = invoke("features", "cases", str(wrong))
    assert done.returncode == 1
    assert f"FAILED  {cases['cases'][0]['name']}" in done.stdout
    assert f"{len(cases['cases'])} cases run, 1 failed" in done.stdout


def test_a_missing_cases_file_is_a_usage_error() -> None:
    done = invoke("features", "cases", "no-such-file.json")
    assert done.returncode == 2
    assert "no-such-file.json" in done.stderr
