"""One bench whose version is promoted and whose online store is filled; a test that alters it takes a copy."""

from pathlib import Path

import pyarrow as pa
import pytest
from support.live_bench import copied, make_live_bench, rows_to_ask
from support.workbench import Workbench


@pytest.fixture(scope="session")
def live_bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The bench that others are copied from."""
    return make_live_bench(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="session")
def rows(live_bench: Workbench) -> pa.Table:
    """Requests for every label row of the bench."""
    return rows_to_ask(live_bench)


@pytest.fixture
def bench(live_bench: Workbench, tmp_path: Path) -> Workbench:
    """A bench of the test's own."""
    return copied(live_bench, tmp_path / "bench")
