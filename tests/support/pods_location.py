"""A code location with the dataset stages of the pipeline at PODS_PIPELINE, executed as the profile in force says."""

import os
import time
from pathlib import Path

import dagster as dg

from assets.dataset_version import build_dataset_version
from assets.executor import executor_for
from headway.home import load_settings
from headway.loading import load_pipeline
from resources.wiring import resources_for

_PIPELINE = load_pipeline(Path(os.environ["PODS_PIPELINE"]))
_DATASETS = [build_dataset_version(_PIPELINE, source) for source in _PIPELINE.spec.sources]


@dg.asset
def patience() -> None:
    """A step that does not end by itself."""
    time.sleep(3600)


defs = dg.Definitions(
    assets=[*_DATASETS, patience],
    jobs=[
        dg.define_asset_job("data", selection=dg.AssetSelection.assets(*_DATASETS)),
        dg.define_asset_job("waits", selection=dg.AssetSelection.assets(patience)),
    ],
    resources=resources_for(),
    executor=executor_for(load_settings()),
)
