"""Killed, stopped, out of disk and out of time anywhere: five short seeds through one Dagster instance."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from chaos.processes import of_home
from chaos.run import run_seed
from chaos.schedule import FAULTS, SUITS, schedule
from chaos.verdict import problems
from chaos.workload import Workload
from chaos.world import chaos_world, until
from hypothesis import given
from hypothesis import strategies as st
from support.postgres import Postgres

SEEDS = (1, 2, 3, 4, 5)
STEPS = 4
pytestmark = pytest.mark.xdist_group("chaos")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Workload]:
    """One start of everything for all seeds; when it is closed, nothing of it is left."""
    root = tmp_path_factory.mktemp("chaos")
    with chaos_world(root, postgres) as world:
        yield Workload(world)
    until(lambda: not of_home(root / "home"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_doubled_or_left_over(workload: Workload, seed: int) -> None:
    hits = run_seed(workload, seed, STEPS, print)
    # A run may have ended between being seen and being hit; a schedule that mostly misses tests nothing.
    assert sum(hits.values()) >= STEPS // 2, hits


def test_the_short_seeds_meet_every_fault() -> None:
    dealt = Counter((s.fault.victim, s.fault.how) for seed in SEEDS for s in schedule(seed, STEPS))
    assert set(dealt) == set(FAULTS)


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_schedule_is_a_function_of_its_seed(seed: int, steps: int) -> None:
    dealt = schedule(seed, steps)
    assert dealt == schedule(seed, steps)
    assert [s.number for s in dealt] == list(range(1, steps + 1))
    assert all(s.operation in SUITS[s.fault.victim] for s in dealt)
    if steps > 5:
        assert dealt != schedule(seed + 1, steps)


def test_the_verdict_names_what_is_lost(workload: Workload) -> None:
    """Acknowledged and not there: an answer, a training, a promotion."""
    lost = replace(
        workload, answers=[*workload.answers, "never-given"], trained={999_999}, stable=2, epoch=workload.epoch + 1
    )
    told = "\n".join(problems(lost))
    assert "acknowledged answer never-given is not in the log" in told
    assert "training 999999: 0 runs" in told
    assert f"acknowledged was 2 at epoch {lost.epoch}" in told
