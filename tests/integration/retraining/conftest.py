"""The shop with a version that serves, built once per worker and copied per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.retrain_bench import write_champion
from support.training_bench import TrainingBench, copy_bench, end_everything


@pytest.fixture(scope="session")
def champion(tmp_path_factory: pytest.TempPathFactory) -> TrainingBench:
    """The shop with a written version; read-only."""
    return write_champion(tmp_path_factory.mktemp("champion"))


@pytest.fixture
def bench(champion: TrainingBench, tmp_path: Path) -> Iterator[TrainingBench]:
    """A copy of it; nothing it started outlives the test."""
    copied = copy_bench(champion, tmp_path)
    yield copied
    end_everything(copied)
