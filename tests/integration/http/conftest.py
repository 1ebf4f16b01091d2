"""A small pipeline with a promoted version, whose world stands within its calendar."""

import shutil
from pathlib import Path

import pytest
from support.serving_bench import DAYS, write_serving_bench
from support.serving_model import serve
from support.workbench import Workbench

from headway.replay.moments import moment_of
from headway.world import move_clock

WORLD = "2026-03-05T12:00Z"


@pytest.fixture(scope="package")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Nothing of it may be changed; `home_of` makes a copy."""
    bench = write_serving_bench(tmp_path_factory.mktemp("promoted"))
    bench.ingest("data", "register", "labels")
    assert serve(bench, DAYS[:1]).stable == 1
    move_clock(bench.home / "clock.json", moment_of(WORLD))
    return bench


@pytest.fixture
def bench(promoted: Workbench, tmp_path: Path) -> Workbench:
    """A copy of the bench of one's own."""
    shutil.copytree(promoted.folder.parent, tmp_path / "bench")
    return Workbench(tmp_path / "bench" / promoted.folder.name, tmp_path / "bench" / promoted.home.name)
