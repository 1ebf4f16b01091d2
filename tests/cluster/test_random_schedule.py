"""Everything is killed at random while one run is under way, and all is well in the end.

Each seed takes 200 steps. The launcher, the reconciler and the op are processes of their own that a step starts, kills
or stops; ranks die, pods are deleted, the API server goes away or answers errors, the database is locked or stopped.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster_bench import ClusterBench, make_bench, make_namespace
from support.cluster_child import Child, start
from support.cluster_sound import assert_sound, steps_of
from support.host_processes import host_pids
from support.postgres import Postgres
from support.training_bench import AS_OF, build_shop

from headway.errors import HeadwayError
from headway.loading import load_pipeline
from headway.training.plan import plan_run
from headway.training.submit import submit
from tests.cluster.cluster_env import Cluster, wait_until
from tests.cluster.conftest import cleaned

STEPS = 200
RELEASED_AT = 150
ROLES = ("ask", "follow", "reconcile")
# Kills and faults are rarer than looking on, or nothing would ever come about.
WEIGHTS = {
    "look_on": 40,
    "start": 25,
    "kill": 8,
    "freeze": 3,
    "thaw": 8,
    "rank": 4,
    "pod": 1,
    "api_error": 5,
    "api_away": 2,
    "api_back": 8,
    "database": 3,
}
ERRORS = [
    {"method": "POST", "path": "/apis/batch/.*", "do": "after_error", "status": 500},
    {"method": "POST", "path": "/apis/batch/.*", "do": "after_drop"},
    {"method": "POST", "path": "/apis/batch/.*", "do": "drop"},
    {"method": "POST", "path": "/api/v1/.*services", "do": "after_error", "status": 409},
    {"method": "PATCH", "path": "/apis/batch/.*", "do": "error", "status": 500, "times": 2},
    {"method": "DELETE", "path": ".*", "do": "after_error", "status": 500},
    {"method": "WATCH", "path": ".*", "do": "close_watch"},
    {"method": "WATCH", "path": ".*", "do": "gone", "times": 2},
    {"method": "GET", "path": ".*", "do": "error", "status": 503, "times": 2},
    {"method": "GET", "path": ".*", "do": "slow", "seconds": 0.3, "times": 5},
]


class Schedule:
    """One seed's walk."""

    roles = ROLES
    steps = STEPS
    pause_s = 0.12

    def __init__(self, bench: ClusterBench, seed: int, server: Postgres | None = None) -> None:
        self.bench = bench
        self.seed = seed
        self.server = server
        self.random = random.Random(seed)
        self.children: dict[str, Child] = {}
        self.frozen: set[str] = set()
        self.asking = {"max_attempts": 1000, "orders": {"hold": True}}
        self.run_id = self.asked()
        self.told: list[str] = []

    def asked(self) -> str:
        """Ask for the run; its id."""
        return self.bench.ask(self.seed, **self.asking)

    def walk(self) -> None:
        """Take every step, then let everything work again."""
        try:
            for number in range(self.steps):
                if number == RELEASED_AT:
                    self.bench.order(self.run_id, steps=20)
                what = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
                self.told.append(what)
                getattr(self, what)()
        finally:
            self.all_work_again()

    def all_work_again(self) -> None:
        """No fault is left, and no process of ours."""
        assert self.bench.cluster.faults is not None
        self.bench.cluster.faults.clear()
        for role in list(self.children):
            self.end(role)

    def look_on(self) -> None:
        """Give the others time."""
        time.sleep(self.random.uniform(0.01, self.pause_s))

    def start(self) -> None:
        """Start a process that is not there, or has ended."""
        role = self.random.choice(self.roles)
        if role in self.children and self.children[role].alive():
            return
        arguments = (self.seed, self.asking) if role == "ask" else (self.run_id,) if role == "follow" else ()
        self.children[role] = start(role, self.bench, *arguments)

    def kill(self) -> None:
        """Kill one of our processes where it stands."""
        if self.children:
            self.end(self.random.choice(sorted(self.children)))

    def end(self, role: str) -> None:
        """SIGKILL, and wait for it to be buried."""
        self.frozen.discard(role)
        self.children.pop(role).kill()

    def freeze(self) -> None:
        """Stop a process of ours: it will go on later with what it knew then."""
        if self.children:
            role = self.random.choice(sorted(self.children))
            self.children[role].stop(self.bench)
            self.frozen.add(role)

    def thaw(self) -> None:
        """Let what was stopped go on."""
        for role in self.frozen:
            self.children[role].signal(signal.SIGCONT)
        self.frozen.clear()

    def rank(self) -> None:
        """Have a rank of the newest attempt die at its next step, or kill the process that keeps it."""
        folder = self.bench.run_dir(self.run_id) / "attempts"
        newest = max((int(path.name) for path in folder.glob("*")), default=1)
        node = self.random.choice((0, 1))
        if self.random.random() < 0.5:
            ranks = {str(node): {"attempts": [newest], "do": "kill"}}
            self.bench.order(self.run_id, hold=len(self.told) < RELEASED_AT, steps=20, ranks=ranks)
            return
        for pid in host_pids(self.bench.attempt_file(self.run_id, newest), node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pod(self) -> None:
        """Delete a pod, as somebody with kubectl does."""
        with self.reachable():
            if pods := self.bench.things("pods"):
                name = self.random.choice(sorted(pod["metadata"]["name"] for pod in pods))
                self.bench.cluster.admin.delete(self.bench.path("pods", name))

    def api_error(self) -> None:
        """Let the next requests of some kind fail, or seem to."""
        self.fault(http=self.random.sample(ERRORS, 2))

    def api_away(self) -> None:
        """The API server does not answer."""
        self.fault(api="away")

    def api_back(self) -> None:
        """It answers again."""
        self.fault()

    def fault(self, **faults: Any) -> None:  # noqa: ANN401
        """Make faults, in place of those before."""
        assert self.bench.cluster.faults is not None
        self.bench.cluster.faults.set(**faults)
        self.away = faults.get("api") == "away"

    away = False

    def reachable(self) -> Any:  # noqa: ANN401
        """A block that does nothing while the API server is away or answers errors."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        if self.away:
            self.fault()
        return suppress(ApiException, HTTPError)

    def database(self) -> None:
        """Nobody can write for a moment."""
        seconds = self.random.uniform(0.1, 0.5)
        if self.server is not None:
            stop_database(self.server, seconds)
        else:
            with sqlite3.connect(self.bench.home / "catalog.db", timeout=30, isolation_level=None) as connection:
                connection.execute("BEGIN IMMEDIATE")
                time.sleep(seconds)
                connection.execute("ROLLBACK")
            connection.close()


def stop_database(server: Postgres, seconds: float) -> None:
    """SIGSTOP the server and every process of it, then let them go on."""
    with psycopg.connect(host=str(server.socket), user="postgres", dbname="postgres", autocommit=True) as admin:
        rows = admin.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
    pids = [server.process.pid, *(pid for (pid,) in rows)]
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class TorchSchedule(Schedule):
    """A short walk while torch trains: `bench` is the home of a pipeline that is planned as a person plans it."""

    roles = ("follow", "reconcile")
    steps = 40
    pause_s = 0.6

    def __init__(self, bench: ClusterBench, seed: int, folder: Path) -> None:
        self.folder = folder
        super().__init__(bench, seed)

    def asked(self) -> str:
        with self.bench.services() as services:
            plan = plan_run(services, load_pipeline(self.folder), AS_OF)
            submission = submit(services, self.bench.shared, plan, asker="person")
            return submission.run.run_id

    def rank(self) -> None:
        newest = max(int(path.name) for path in (self.bench.run_dir(self.run_id) / "attempts").glob("*"))
        for pid in host_pids(self.bench.attempt_file(self.run_id, newest), self.random.choice((0, 1))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shop(cluster: Cluster) -> Iterator[tuple[ClusterBench, Path]]:
    """A pipeline with its snapshots on the volume that pods see, and the folder that declares it."""
    if cluster.faults is None:
        pytest.skip("needs HEADWAY_TEST_FAULTS, a file through which faults are made")
    root = cluster.store / f"s{secrets.token_hex(4)}"
    built = build_shop(root)
    bench = make_namespace(cluster, built.home)
    bench.changes.update(cpu="500m", memory="4Gi", shared_memory="256Mi", grace_s=30)
    yield bench, built.folder
    cleaned(bench)
    shutil.rmtree(root)


def test_one_short_seed_with_torch(shop: tuple[ClusterBench, Path]) -> None:
    """Two nodes train by gloo over their pods' network while the reconciler, the op and once a node are killed."""
    bench, folder = shop
    schedule = TorchSchedule(bench, 6, folder)
    schedule.walk()
    run = bench.finished(schedule.run_id)
    assert run.status == "succeeded", (schedule.told, [(a.state, a.reason) for a in run.attempts])
    assert run.result is not None
    assert "network" in run.result.artifacts
    assert_sound(bench, every_step=False)


@pytest.fixture
def scheduled(request: pytest.FixtureRequest, cluster: Cluster, migrated_sqlite: Path) -> Iterator[ClusterBench]:
    """A bench whose catalog is on the database that the parameter names."""
    if cluster.faults is None:
        pytest.skip("needs HEADWAY_TEST_FAULTS, a file through which faults are made")
    database: Path | str = migrated_sqlite
    server: Postgres | None = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    if server is not None:
        database = server.fresh_database(request.getfixturevalue("migrated_postgres"))
    bench = make_bench(cluster, database)
    yield bench
    cleaned(bench)
    if server is not None:
        server.drop_database(bench.database_url)


@pytest.mark.parametrize(
    ("scheduled", "seed"),
    [("sqlite", 1), ("sqlite", 2), ("sqlite", 3), ("postgresql", 4), ("postgresql", 5)],
    indirect=["scheduled"],
)
def test_whatever_is_killed_there_is_one_result_and_nothing_is_left(
    request: pytest.FixtureRequest, scheduled: ClusterBench, seed: int
) -> None:
    server = request.getfixturevalue("postgres") if scheduled.database_url else None
    schedule = Schedule(scheduled, seed, server)
    schedule.walk()
    scheduled.order(schedule.run_id, steps=20)

    def ended() -> bool:
        with suppress(HeadwayError):
            scheduled.reconcile(schedule.run_id)
        return scheduled.run(schedule.run_id).status != "open"

    wait_until(ended, "the end")
    run = scheduled.run(schedule.run_id)
    assert run.status == "succeeded", (schedule.told, [(a.state, a.reason) for a in run.attempts])
    assert [a.state for a in run.attempts].count("succeeded") == 1
    recorded = scheduled.recorded(schedule.run_id)
    assert len([event for event in recorded if event.kind == "artifact"]) >= 1
    last = steps_of(recorded, run.last.attempt)
    assert not last or last[-1] >= 20
    assert_sound(scheduled)
