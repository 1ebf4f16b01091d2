"""A trainable pipeline with its snapshots, built once per worker and copied per test."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.training_bench import TrainingBench, build_shop, copy_bench, end_everything, use_toy_ranks


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> TrainingBench:
    """The pipeline `shop` with every month's snapshot; read-only."""
    return build_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def bench(shop: TrainingBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingBench]:
    """A copy of the pipeline whose ranks are toys; nothing it started outlives the test."""
    use_toy_ranks(monkeypatch, tmp_path)
    copied = copy_bench(shop, tmp_path)
    yield copied
    end_everything(copied)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance of the test."""
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral
