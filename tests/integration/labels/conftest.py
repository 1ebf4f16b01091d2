"""A served and followed pipeline, made once."""

import pytest
from support.loop_bench import make_loop
from support.workbench import Workbench


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The bench as nothing was asked of it yet; tests copy it."""
    return make_loop(tmp_path_factory.mktemp("loop"))
