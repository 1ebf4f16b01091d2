"""A code location with the training stages of the pipeline at SHOP_ROOT and the retraining sensor, ticking often."""

import os
from pathlib import Path

import dagster as dg

import headway.training.plan
from assets.automation import reconcile_training
from assets.model_version import build_model_version
from assets.retraining import build_retrain_on_drift
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.wiring import resources_for

headway.training.plan.CODE_ROOT = Path(os.environ["SHOP_TOY"])

_ROOT = Path(os.environ["SHOP_ROOT"])
_PIPELINE = load_pipeline(_ROOT / "shop")

defs = dg.Definitions(
    assets=[build_training_run(_PIPELINE), build_model_version(_PIPELINE)],
    sensors=[reconcile_training, build_retrain_on_drift(_ROOT, interval_s=4)],
    resources=resources_for(),
)
