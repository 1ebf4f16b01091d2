"""Each wrong launcher is noticed by a test of the contract suite, named here; the real one passes the same test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster_bench import ClusterBench, make_bench

from headway.training.kubernetes.launcher import KubernetesLauncher
from headway.training.launch import LaunchFailed
from tests.cluster import test_contract_life as life
from tests.cluster.cluster_env import Cluster
from tests.cluster.conftest import cleaned
from tests.cluster.mutants import launchers

DidNotRaise = pytest.fail.Exception
CASES: list[tuple[type[KubernetesLauncher], Callable[[ClusterBench], None], type[BaseException]]] = [
    (launchers.AdoptsAnyUid, life.test_a_job_of_ours_with_another_uid_is_not_adopted, DidNotRaise),
    (launchers.TerminalByOnePod, life.test_one_pod_that_is_done_ends_nothing, AssertionError),
    (launchers.FencesNothing, life.test_an_older_attempt_is_refused_and_its_late_writes_too, DidNotRaise),
    (launchers.SetsTtl, life.test_an_ended_job_is_kept_until_its_end_is_recorded, AssertionError),
    (launchers.LeavesTheService, life.test_cancelling_saves_and_takes_job_service_and_pods_away, AssertionError),
    (launchers.ConflictIsError, life.test_a_submit_that_stopped_half_way_goes_on, LaunchFailed),
]


@pytest.mark.parametrize(("mutant", "killer", "how"), CASES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_wrong_launcher_is_noticed(
    cluster: Cluster,
    migrated_sqlite: Path,
    mutant: type[KubernetesLauncher],
    killer: Callable[[ClusterBench], None],
    how: type[BaseException],
) -> None:
    bench = make_bench(cluster, migrated_sqlite, kind=mutant)
    try:
        with pytest.raises(how):
            killer(bench)
    finally:
        cleaned(bench)
