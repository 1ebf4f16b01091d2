"""One bench whose version has answered, shared by all tests that leave it as it is."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.serving_model import Served, make_served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The bench; a test that alters something takes a copy (`Served.copied`)."""
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture
def scored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed by the trainer's code in this process: the start of a process is no part of the test."""

    def score(module: str, arguments: Sequence[str], code_root: Path, deadline_s: float) -> str:
        from trainer.score import score_file

        assert (module, arguments[::2]) == ("trainer.score", ["--artifact", "--input", "--output"])
        artifact, given, said = (Path(path) for path in arguments[1::2])
        score_file(artifact, given, said)
        return ""

    monkeypatch.setattr("headway.serving.scoring.run_trainer", score)
