"""A code location with every stage of the pipeline at SHOP_ROOT, and the sensors of the real one, ticking often.

Runs planned here execute toy ranks from the code tree SHOP_TOY.
"""

import os
from pathlib import Path

import dagster as dg

import headway.training.plan
from assets.automation import build_follow_updates, build_nightly, reconcile_training
from assets.component import declared_defs
from assets.retraining import build_retrain_on_drift
from headway.loading import load_pipeline
from resources.wiring import resources_for

headway.training.plan.CODE_ROOT = Path(os.environ["SHOP_TOY"])

_ROOT = Path(os.environ["SHOP_ROOT"])
_PIPELINE = load_pipeline(_ROOT / "shop")
_EVERY_MINUTE = build_nightly(_PIPELINE, cron="* * * * *")
assert _EVERY_MINUTE is not None

defs = dg.Definitions.merge(
    dg.Definitions(assets=declared_defs(_PIPELINE).assets),
    dg.Definitions(
        sensors=[reconcile_training, build_retrain_on_drift(_ROOT, interval_s=30), build_follow_updates(interval_s=10)],
        schedules=[_EVERY_MINUTE],
        resources=resources_for(),
    ),
)
"""The nightly schedule, with a night every minute."""
