"""One bench whose version has answered, shared by all tests that leave it as it is."""

import pytest
from support.serving_model import Served, make_served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The bench; a test that alters something takes a copy (`Served.copied`)."""
    return make_served(tmp_path_factory.mktemp("served"))
