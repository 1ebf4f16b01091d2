"""Tests that share something expensive run in one worker, one after the other."""

import subprocess
import sys
from pathlib import Path

_GROUPED = """
import pytest

pytestmark = pytest.mark.xdist_group("shared")

@pytest.mark.parametrize("number", range(6))
def test_one_of_a_group(number, worker_id):
    with open("workers", "a") as file:
        print(worker_id, file=file)
"""


def test_a_group_stays_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_grouped.py").write_text(_GROUPED)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "test_grouped.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    workers = (tmp_path / "workers").read_text().split()
    assert (len(workers), len(set(workers))) == (6, 1)
