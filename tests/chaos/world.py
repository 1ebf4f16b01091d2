"""One home with everything running: PostgreSQL below catalog and Dagster, webserver, daemon, server."""

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from chaos.processes import Service, children, kill, of_home
from support.postgres import Postgres
from support.retrain_bench import instant, retraining_code_root
from support.training_bench import TrainingBench, build_shop
from support.workbench import Workbench, write_workbench

import headway.training.plan
from assets.model_version import build_model_version
from assets.training_run import build_training_run
from headway.home import load_settings, write_dagster_instance
from headway.loading import load_pipeline
from headway.world import move_clock
from resources.platform import Platform

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
DAYS = tuple(f"2026-03-{day:02d}" for day in range(2, 8))
AS_OF = "2026-03-01"
NOW = "2026-05-11T06:00:00+00:00"


@dataclass
class World:
    """The home and its services. `url` and `server_url` are where page and server listen, also after a restart."""

    root: Path
    bench: TrainingBench
    postgres: Postgres
    url: str
    server_url: str
    services: dict[str, Service] = field(default_factory=dict[str, Service])

    @property
    def days(self) -> Workbench:
        """The pipeline of days; it shares the home."""
        return Workbench(self.root / "days" / "pipeline", self.bench.home)

    def keep(self) -> None:
        """Start what ended: what a service manager does."""
        for service in self.services.values():
            service.keep()

    def victims(self, name: str) -> list[int]:
        """Processes that a fault of this name would hit now."""
        if name in self.services:
            return [self.services[name].pid]
        if name == "postgres":
            return [p for p in children(self.postgres.process.pid) if b"postgres: headway" in _command_line(p)]
        if name == "worker":
            return self.workers()
        word = {"supervisor": b"headway.training.supervisor", "rank": b"trainer.worker"}[name]
        return [pid for _, _, pid in self.bench.launcher().strays() if word in _command_line(pid)]

    def workers(self) -> list[int]:
        """Processes that execute Dagster runs: children of the servers that hold the code location."""
        found = of_home(self.bench.home)
        code_servers = {pid for pid, line in found.items() if "api grpc" in line}
        return [
            pid
            for server in code_servers
            for pid in children(server)
            if "spawn_main" in found.get(pid, "") and "resource_tracker" not in found[pid]
        ]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def chaos_world(root: Path, postgres: Postgres) -> Iterator[World]:
    """Build the home, start everything once, and end it with the block."""
    catalog, dagster = postgres.fresh_database(), postgres.fresh_database()
    bench = build_shop(root, catalog, _declare)
    _write_days(root / "days")
    days = str(root / "days" / "pipeline")
    _done(bench, "datasets", "ingest", "--pipeline", days, "--source", "labels")
    _done(bench, "snapshots", "build", "--pipeline", days, *(a for d in DAYS for a in ("--partition", d)))
    _two_versions(bench, root)
    move_clock(bench.settings.clock_file, instant(NOW))
    environ = _environment(root, bench, "postgresql+psycopg2://" + dagster.partition("://")[2])
    ports = [_free_port(), _free_port()]
    world = World(root, bench, postgres, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    programs, workspace = Path(sys.executable).parent, root / "workspace.yaml"
    location = {"python_module": {"module_name": "chaos.location", "location_name": "chaos"}}
    workspace.write_text(yaml.safe_dump({"load_from": [location]}))
    commands: dict[str, list[str]] = {
        "webserver": [
            str(programs / "dagster-webserver"),
            "-h",
            "127.0.0.1",
            "-p",
            str(ports[0]),
            "-w",
            str(workspace),
        ],
        "daemon": [str(programs / "dagster-daemon"), "run", "-w", str(workspace)],
        "server": [*_headway("serve"), "--port", str(ports[1]), "-p", str(bench.folder)],
    }
    try:
        for name, command in commands.items():
            world.services[name] = Service(name, command, environ, root / f"{name}.log")
            world.services[name].keep()
            if name == "webserver":
                # On a new database both would create Dagster's tables, and one of them would fail.
                until(lambda: answers(f"{world.url}/server_info"))
        until(lambda: answers(f"{world.server_url}/v2/health/ready"))
        yield world
    finally:
        for service in world.services.values():
            service.end()
        # A code server of Dagster waits for ever for a run whose process was killed, even when its daemon is gone too.
        kill([pid for pid, line in of_home(root / "home").items() if " dagster api grpc " in line])


def _declare(attributes: dict[str, Any]) -> None:
    """As many attempts as it takes, and a budget that never ends a run."""
    attributes["training"] |= {"max_attempts": 50, "budget": {"per_run": "10m", "per_month": "10000h"}}
    attributes["promotion"]["gates"] = [{"gate": "contract"}, {"gate": "weights_only"}]


def _write_days(root: Path) -> None:
    lines = [f"{d}-{i},{d}T{6 * i + 1:02d}:00:00Z,p{i % 2},{i}" for d in DAYS for i in range(4)]
    write_workbench(
        root,
        sources={},
        views={
            "own": {
                "source": "labels",
                "keys": {"person": "person"},
                "boundary": "lt",
                "features": {"sum": {"window": "target", "aggregate": "sum", "duration": "2d"}},
            }
        },
        files={"labels.csv": "label_id,t,person,target\n" + "\n".join(lines) + "\n"},
        label_columns={"person": "string"},
        partition={"start": DAYS[0], "end": "2026-03-08"},
        label_keys=["label_id", "person"],
    )


def _two_versions(bench: TrainingBench, root: Path) -> None:
    """Two judged versions to promote in turn, the first one promoted."""
    pipeline = load_pipeline(bench.folder)
    code_root = retraining_code_root(root)
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(headway.training.plan, "CODE_ROOT", code_root)
        for name, value in bench.environment.items():
            patch.setenv(name, value)
        for seed in (1, 2):
            done = dg.materialize(
                [build_training_run(pipeline), build_model_version(pipeline)],
                instance=instance,
                partition_key=AS_OF,
                resources={"platform": Platform(home=str(bench.home))},
                run_config={
                    "ops": {"shop__training_run": {"config": {"seed": seed}}},
                    "loggers": {"console": {"config": {"log_level": "ERROR"}}},
                },
            )
            assert done.success
    _done(bench, "promote", "shop@1")


def _done(bench: TrainingBench, *arguments: str) -> None:
    result = bench.run(*arguments)
    assert result.exit_code == 0, result.output


def _headway(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headway.cli.main", *arguments]


def _environment(root: Path, bench: TrainingBench, dagster_url: str) -> dict[str, str]:
    own = {**bench.environment, "HEADWAY_DAGSTER_DATABASE_URL": dagster_url}
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    return {
        **inherited,
        **own,
        "DAGSTER_HOME": str(write_dagster_instance(load_settings(own))),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "CHAOS_ROOT": str(root),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether a page is there."""
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:  # noqa: ANN401 - whatever the condition gives
    """The condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(f"it did not come true within {seconds:.0f} s")
