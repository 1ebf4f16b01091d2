"""The code location: everything declared under `pipelines/`, and the services behind it."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from assets.automation import build_follow_updates, reconcile_training
from assets.executor import executor_for
from assets.retraining import build_retrain_on_drift
from headway.home import load_settings
from resources.wiring import resources_for

ROOT = Path(__file__).resolve().parent.parent


class MisplacedModel(ValueError):
    """A `model.py` where Dagster would import it, and torch with it, into every process."""


@dg.definitions
def defs() -> dg.Definitions:
    """All pipelines with the resources of the profile in force."""
    refuse_misplaced_models(ROOT / "pipelines")
    declared = dg.load_from_defs_folder(path_within_project=ROOT / "assets")
    sensors = [reconcile_training, build_retrain_on_drift(ROOT / "pipelines"), build_follow_updates()]
    executor = executor_for(load_settings())
    platform = dg.Definitions(resources=resources_for(), sensors=sensors, executor=executor)
    return dg.Definitions.merge(declared, platform)


def refuse_misplaced_models(pipelines: Path) -> None:
    """Refuse a `model.py` in a folder without `defs.yaml`, or in `extra/`: Dagster imports every file there.

    Raises `MisplacedModel`.
    """
    for file in pipelines.rglob("model.py"):
        if not (file.parent / "defs.yaml").is_file():
            raise MisplacedModel(
                f"{file.relative_to(pipelines.parent)} would be imported by Dagster, and torch with it: "
                "move it beside a defs.yaml, where it is data until a trainer loads it"
            )
