"""`headway ui` serves Dagster on loopback and takes everything that it started with it when it ends."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.serving import ROOT, WAIT_SECONDS, ask, command, environment, living, serving, wait_until_none


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def locations(url: str) -> dict[str, str]:
    """State of each code location."""
    query = "{workspaceOrError{...on Workspace{locationEntries{name locationOrLoadError{__typename}}}}}"
    entries = ask(url, query)["workspaceOrError"]["locationEntries"]
    return {entry["name"]: entry["locationOrLoadError"]["__typename"] for entry in entries}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_location_is_served_and_nothing_outlives_a_stop(home: Path, signum: signal.Signals) -> None:
    with serving(home) as (process, url):
        assert locations(url) == {"headway": "RepositoryLocation"}
        started = living(home)
        assert any("dagster-daemon" in line for line in started.values())
        process.send_signal(signum)
        assert process.wait(WAIT_SECONDS) == 0
        assert living(home) == {}


def test_nothing_outlives_a_kill(home: Path) -> None:
    with serving(home) as (process, _):
        process.kill()
        process.wait(WAIT_SECONDS)
        assert wait_until_none(home) == {}


def test_a_second_one_on_the_same_home_is_refused(home: Path) -> None:
    with serving(home):
        done = subprocess.run(
            command("--port", "0"),
            cwd=ROOT,
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
    assert done.returncode == 2
    assert done.stderr == f"error: another process serves {home}; stop it, or use its page\n"


def test_a_taken_port_is_refused_with_the_way_out(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("--port", str(port)), cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: port {port} on 127.0.0.1 is not free")
    assert "--port 0" in done.stderr
    assert living(home) == {}
