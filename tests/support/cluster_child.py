"""Processes that work on a cluster bench, for tests that kill or stop them at any moment.

`python -m support.cluster_child` has imported everything and forks a child for each line that it reads, so that a child
costs milliseconds; it answers with the child's pid.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from support.cluster_bench import ClusterBench, commit_run

from headway.errors import HeadwayError
from headway.training.follow import Follower, follow
from headway.training.process_table import read_process
from headway.training.reconcile import Reconciler
from tests.cluster.cluster_env import ROOT, Admin, Cluster, wait_until

# What the platform imports when it is first used.
_LAZY = ("headway.catalog.catalog", "headway.catalog.migrate", "headway.artifacts.store", "psycopg", "alembic")
_LAZY += ("headway.training.kubernetes.launcher", "kubernetes.client", "kubernetes.config")


def place_of(bench: ClusterBench) -> dict[str, Any]:
    """What another process needs to work on the same bench."""
    return {
        "kubeconfig": str(bench.kubeconfig or bench.cluster.kubeconfig),
        "image": bench.cluster.image,
        "store": str(bench.cluster.store),
        "home": str(bench.home),
        "namespace": bench.namespace,
        "database_url": bench.database_url,
        "changes": bench.changes,
    }


@dataclass(frozen=True)
class Child:
    """A process that was started with a role."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it still runs, or is stopped."""
        process = read_process(self.pid)
        return process is not None and process.started == self.started and process.state not in "ZX"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.alive():
            os.kill(self.pid, number)

    def stop(self, bench: ClusterBench) -> None:
        """SIGSTOP it, at a moment when it does not hold the catalog: SQLite would let nobody else write."""
        wait_until(lambda: self._stopped(bench), "a moment without a transaction")

    def _stopped(self, bench: ClusterBench) -> bool:
        self.signal(signal.SIGSTOP)
        wait_until(lambda: (found := read_process(self.pid)) is None or found.state in "TZX", "the stop")
        if bench.database_url or not self.alive():
            return True
        with closing(sqlite3.connect(bench.home / "catalog.db", timeout=0.2, isolation_level=None)) as catalog:
            try:
                catalog.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                self.signal(signal.SIGCONT)
                return False
        return True

    def join(self, limit_s: float = 120.0) -> bool:
        """Wait for its end; whether it came in time."""
        deadline = time.monotonic() + limit_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.alive()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is buried."""
        self.signal(signal.SIGKILL)
        self.join()


def start(role: str, bench: ClusterBench, *arguments: Any) -> Child:  # noqa: ANN401
    """Start a process with a role: `ask`, `follow` or `reconcile`."""
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(json.dumps([role, place_of(bench), arguments]) + "\n")
    forks.stdin.flush()
    pid = int(forks.stdout.readline())
    process = read_process(pid)
    return Child(pid, process.started if process else 0)


@cache
def _forks() -> subprocess.Popen[str]:
    """The process that forks children; it ends when this one does."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "support.cluster_child"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def serve() -> None:
    """Fork a child for each line of stdin."""
    for name in _LAZY:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, place, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1):
                os.dup2(null, fd)
            main(role, place, arguments)
            os._exit(0)
        print(pid, flush=True)


def main(role: str, place: dict[str, Any], arguments: list[Any]) -> None:
    """Do what the role says, again and again; what is not there now may be there later."""
    kubeconfig = Path(place["kubeconfig"])
    cluster = Cluster(kubeconfig, place["image"], Path(place["store"]), None, Admin(kubeconfig))
    bench = ClusterBench(
        cluster, Path(place["home"]), place["namespace"], place["database_url"], changes=place["changes"]
    )
    while True:
        try:
            _work(role, bench, *arguments)
        except HeadwayError as error:
            sys.stderr.write(f"{role}: {error}\n")
        else:
            if role != "reconcile":
                return
        time.sleep(0.1)


def _work(role: str, bench: ClusterBench, *arguments: Any) -> None:  # noqa: ANN401
    launcher = bench.shared
    with bench.services() as services:
        match role:
            case "ask":
                seed, more = arguments
                run_id = commit_run(services, bench.home, seed, **more)
                Reconciler(services, launcher).run(run_id)
            case "follow":
                follow(services, launcher, arguments[0], Follower(lambda _: None, lambda _: None))
            case "reconcile":
                Reconciler(services, launcher).all()
            case _:
                raise ValueError(role)


if __name__ == "__main__":
    serve()
