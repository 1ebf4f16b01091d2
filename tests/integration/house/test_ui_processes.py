"""`headway ui` serves Dagster on loopback and takes everything that it started with it when it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 240


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headway.cli.main", "ui", *arguments]


def environment(home: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "DAGSTER_"))}
    return {**inherited, "HEADWAY_HOME": str(home), "PYTHONUNBUFFERED": "1"}


@contextmanager
def serving(home: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    log = home.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command("--port", "0"), cwd=ROOT, env=environment(home), stdout=stream, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield process, wait_for_url(process, log)
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def wait_for_url(process: "subprocess.Popen[str]", log: Path) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("Dagster UI: "):
                return line.split()[2]
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"no page within {WAIT_SECONDS} s:\n{log.read_text()}")


def living(home: Path) -> dict[int, str]:
    """Processes that carry this home in their environment, by id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"HEADWAY_HOME={home}".encode() in environ.split(b"\0") and line:
            found[int(entry.name)] = line.replace(b"\0", b" ").decode()
    return found


def wait_until_none(home: Path) -> dict[int, str]:
    deadline = time.monotonic() + WAIT_SECONDS
    while living(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    return living(home)


def locations(url: str) -> dict[str, str]:
    """State of each code location, asked from the page's own interface."""
    query = "{workspaceOrError{...on Workspace{locationEntries{name locationOrLoadError{__typename}}}}}"
    request = urllib.request.Request(
        f"{url}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        entries = json.load(answer)["data"]["workspaceOrError"]["locationEntries"]
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
