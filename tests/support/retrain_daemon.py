"""Dagster's daemon over the code location `support.retrain_location`, for one bench."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import yaml
from support.training_bench import TrainingBench

from headway.home import load_settings, write_dagster_instance

ROOT = Path(__file__).resolve().parents[2]
_END_S = 120


@contextmanager
def running_daemon(root: Path, bench: TrainingBench, code_root: Path) -> Iterator[dg.DagsterInstance]:
    """The daemon's Dagster instance; the daemon ends with the block."""
    workspace = root / "workspace.yaml"
    location = {"python_module": {"module_name": "support.retrain_location", "location_name": "shop"}}
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
        "SHOP_TOY": str(code_root),
    }
    command = [str(Path(sys.executable).parent / "dagster-daemon"), "run", "-w", str(workspace)]
    with (
        (root / "dagster.log").open("wb") as log,
        dg.DagsterInstance.from_config(str(dagster_home)) as instance,
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT) as daemon,
    ):
        try:
            yield instance
        finally:
            daemon.terminate()
            daemon.wait(_END_S)
