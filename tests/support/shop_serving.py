"""Dagster's webserver and daemon over a code location of the tests, for one bench."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from support.training_bench import TrainingBench

from headway.home import load_settings, write_dagster_instance

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240


@contextmanager
def serving_shop(
    root: Path, bench: TrainingBench, toy: Path | None, module: str = "support.shop_location"
) -> Iterator[str]:
    """The address of the page over the code location `module`; both processes end with the block."""
    workspace = root / "workspace.yaml"
    location = {"python_module": {"module_name": module, "location_name": "shop"}}
    workspace.write_text(yaml.safe_dump({"load_from": [location]}))
    dagster_home = write_dagster_instance(load_settings(bench.environment))
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    environ = {
        **inherited,
        **bench.environment,
        "DAGSTER_HOME": str(dagster_home),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "SHOP_ROOT": str(root),
        "SHOP_TOY": "" if toy is None else str(toy),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    programs = Path(sys.executable).parent
    with (root / "dagster.log").open("wb") as log:

        def start(command: list[str]) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)

        web = [str(programs / "dagster-webserver"), "-h", "127.0.0.1", "-p", str(port), "-w", str(workspace)]
        daemon = [str(programs / "dagster-daemon"), "run", "-w", str(workspace)]
        processes = [start(web)]
        try:
            _wait(url, processes[0], root / "dagster.log")
            processes.append(start(daemon))
            yield url
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(WAIT_S)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/server_info", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.3)
    raise AssertionError(f"no page within {WAIT_S} s: {log.read_text()}")
