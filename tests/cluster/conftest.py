"""Fixtures of the contract suite: one cluster per test worker, one namespace and home per test."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cluster_bench import ClusterBench, make_bench

from tests.cluster.cluster_env import Cluster, Faults, given_cluster, started_double, wait_until

# Read before the tests' own fixture takes every HEADWAY_ variable away.
_GIVEN = {name: value for name, value in os.environ.items() if name.startswith("HEADWAY_TEST_")}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster that the environment names, or else a double of this test worker."""
    # Not below /tmp: pods have a volume of their own there.
    folder = Path(tempfile.mkdtemp(prefix="hwk", dir="/var/tmp"))
    store = Path(_GIVEN.get("HEADWAY_TEST_STORE") or folder / "store")
    store.mkdir(exist_ok=True)
    try:
        with ExitStack() as stack:
            double = {} if "HEADWAY_TEST_KUBECONFIG" in _GIVEN else stack.enter_context(started_double(folder))
            yield given_cluster({**_GIVEN, **double}, store)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def bench(cluster: Cluster, migrated_sqlite: Path) -> Iterator[ClusterBench]:
    """A namespace, a home and a catalog on SQLite."""
    made = make_bench(cluster, migrated_sqlite)
    yield made
    cleaned(made)


@pytest.fixture
def faults(cluster: Cluster) -> Iterator[Faults]:
    """The faults that may be made here; a test that needs them is skipped on a cluster without."""
    if cluster.faults is None:
        pytest.skip("needs HEADWAY_TEST_FAULTS, a file through which faults are made")
    yield cluster.faults
    cluster.faults.clear()


def cleaned(bench: ClusterBench) -> None:
    """End what a test left, with everything working again."""
    if bench.cluster.faults is not None:
        bench.cluster.faults.clear()
    bench.close()
    wait_until(lambda: _removed(bench.home), f"{bench.home} to be written to no more")


def _removed(folder: Path) -> bool:
    """Remove a folder; False when a process of a pod that is being killed wrote into it meanwhile."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
    return not folder.exists()
