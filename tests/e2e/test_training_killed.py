"""Training and judgement on PostgreSQL, killed with -9 at twenty random moments: as if nothing had happened.

The victims are the Dagster process, the supervisor, a rank and the database. Ranks are real (torch, gloo), on a small
pipeline.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.postgres import running_postgres
from support.training_bench import AS_OF, TrainingBench, build_shop, end_everything

from headway.catalog.budgets import period_of
from headway.catalog.invariants import check

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
WAIT_S = 240
VICTIMS = ("dagster", "supervisor", "rank", "database")


def _long(attributes: dict[str, Any]) -> None:
    """Enough epochs to be killed in, and as many attempts as kills."""
    attributes["training"] |= {"epochs": 150, "max_attempts": 50, "checkpoint_every": 100}
    attributes["training"]["early_stopping"] = {"last": "7d", "patience": 150}
    attributes["training"]["budget"] = {"per_run": "10m", "per_month": "1000h"}


def _start(root: Path, bench: TrainingBench, log: Path) -> "subprocess.Popen[bytes]":
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("HEADWAY_", "DAGSTER_"))}
    own = {**bench.environment, "DAGSTER_HOME": str(root / "dagster"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "support.training_child", str(root), AS_OF, "judge"],
            cwd=ROOT,
            env={**inherited, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _backends(postmaster: int) -> Iterator[int]:
    """Processes that serve the catalog's clients; the server does not survive the death of its recovery process."""
    for pid in _children(postmaster):
        try:
            if b"postgres: headway" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid
        except (FileNotFoundError, ProcessLookupError):
            continue


def _children(parent: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                yield int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _processes(bench: TrainingBench, word: str) -> list[int]:
    """Living processes of attempts whose command line holds a word."""
    found: list[int] = []
    for _, _, pid in bench.launcher().strays():
        try:
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _kill(pids: list[int], moments: random.Random) -> bool:
    try:
        os.kill(moments.choice(pids), 9)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(1800)
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    log = tmp_path / "children.log"
    (tmp_path / "dagster").mkdir()
    with running_postgres() as server:
        bench = build_shop(tmp_path, server.fresh_database(), _long)
        try:
            hits = _kill_while_it_runs(tmp_path, bench, server.process.pid, moments, log)
            _finish(tmp_path, bench, log, seed)
            _assert_nothing_happened(bench, f"seed {seed}, hits {hits}")
        finally:
            end_everything(bench)


def _kill_while_it_runs(
    root: Path, bench: TrainingBench, postmaster: int, moments: random.Random, log: Path
) -> dict[str, int]:
    hits: dict[str, int] = dict.fromkeys(VICTIMS, 0)
    child = _start(root, bench, log)
    while sum(hits.values()) < KILLS:
        time.sleep(moments.uniform(0.5, 8.0))
        if child.poll() is not None:
            child = _start(root, bench, log)
            continue
        living = {
            "dagster": [child.pid],
            "supervisor": _processes(bench, "headway.training.supervisor"),
            "rank": _processes(bench, "trainer.worker"),
            # A backend that dies by SIGKILL makes the server drop every connection and recover from its log.
            "database": list(_backends(postmaster)),
        }
        victim = moments.choice([name for name in VICTIMS if living[name]])
        hits[victim] += _kill(living[victim], moments)
    child.kill()
    child.wait()
    return hits


def _finish(root: Path, bench: TrainingBench, log: Path, seed: int) -> None:
    """Run it again, as a person would, until nothing is left to do."""
    for _ in range(3):
        child = _start(root, bench, log)
        if child.wait(WAIT_S) == 0:
            return
    raise AssertionError(f"seed {seed}: {log.read_text()[-4000:]}")


def _assert_nothing_happened(bench: TrainingBench, told: str) -> None:
    with bench.services() as services:
        catalog, principal = services.catalog, services.principal
        (run,) = catalog.runs(principal)
        assert run.status == "succeeded", told
        assert [a.state for a in run.attempts].count("succeeded") == 1, told
        (version,) = catalog.model_versions(principal)
        assert version.run_id == run.run_id, told
        entries = catalog.budget_entries(principal, "shop", period_of(run.created_at))
        counted = {(e.owner_id, e.kind) for e in entries}
        assert len(counted) == len(entries) == 3 * len(run.attempts), told
        assert [f for f in check(catalog, principal, services.store) if not f.ok] == [], told
    assert bench.launcher().strays() == [], told
    assert bench.json("reconcile")["actions"] == [], told
