"""A code location that holds the training stages of the pipeline at SHOP_ROOT, with the reconciling sensor.

With SHOP_TOY set, runs planned here execute toy ranks from that code tree.
"""

import os
from pathlib import Path

import dagster as dg

import headway.training.plan
from assets.automation import reconcile_training
from assets.model_version import build_model_version
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.wiring import resources_for

if os.environ.get("SHOP_TOY"):
    headway.training.plan.CODE_ROOT = Path(os.environ["SHOP_TOY"])

_PIPELINE = load_pipeline(Path(os.environ["SHOP_ROOT"]) / "shop")

defs = dg.Definitions(
    assets=[build_training_run(_PIPELINE), build_model_version(_PIPELINE)],
    sensors=[reconcile_training],
    resources=resources_for(),
)
