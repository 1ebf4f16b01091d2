"""Starts `headway ui` for a home of the test, asks its page, and finds every process that belongs to a home."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 240


def command(*arguments: str) -> list[str]:
    """The command line of `headway ui`."""
    return [sys.executable, "-m", "headway.cli.main", "ui", *arguments]


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without inherited settings, for a home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "DAGSTER_"))}
    return {**inherited, "HEADWAY_HOME": str(home), "PYTHONUNBUFFERED": "1", **(more or {})}


@contextmanager
def serving(home: Path, more: Mapping[str, str] | None = None) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`headway ui` on a free port, and its address; ended with the block."""
    log = home.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command("--port", "0"),
            cwd=ROOT,
            env=environment(home, more),
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process, wait_for_url(process, log)
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def wait_for_url(process: "subprocess.Popen[str]", log: Path) -> str:
    """The address that the page says it has."""
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
    """Processes of a home that are still there after a generous wait."""
    deadline = time.monotonic() + WAIT_SECONDS
    while living(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    return living(home)


def ask(url: str, query: str, **variables: object) -> dict[str, Any]:
    """The answer to a GraphQL query, from the page's own interface."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    assert "errors" not in found, found["errors"]
    return found["data"]
