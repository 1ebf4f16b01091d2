"""A private folder with the code of one training run, in which its artifacts are tried and evaluated."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headway.registry.trial import read_artifact_check
from headway.registry.verdicts import ArtifactCheck
from headway.services import Services
from headway.training.stage import stage_code
from headway.training.trainer_process import TrainerFailed, run_trainer
from trainer.spec import RunSpec, parse_run

if TYPE_CHECKING:
    from headway.catalog.run_facts import TrainingRun

DEADLINE_S = 1_800.0


class Workbench:
    """A folder that lives as long as a `with` block."""

    def __init__(self, services: Services, run: TrainingRun) -> None:
        self._services = services
        self._run = run
        self._scratch = tempfile.TemporaryDirectory(prefix="headway-evaluation-")

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *error: object) -> None:
        self._scratch.cleanup()

    @property
    def folder(self) -> Path:
        """The folder."""
        return Path(self._scratch.name)

    @cached_property
    def spec(self) -> RunSpec:
        """The run's spec."""
        return parse_run(self._services.store.get_bytes(self._run.facts.spec_digest))

    def code(self) -> Path:
        """The run's own code tree, put in place when it is first asked for."""
        return stage_code(self._services.store, self.spec.model.code_manifest, self.folder / "code")

    def try_artifact(self, folder: Path) -> ArtifactCheck:
        """Try an artifact with the code of its own run; what could not be tried is None, with the reason."""
        try:
            return read_artifact_check(
                run_trainer("trainer.check", ["--artifact", str(folder)], self.code(), DEADLINE_S)
            )
        except TrainerFailed as error:
            return ArtifactCheck(None, None, (error.message,))
