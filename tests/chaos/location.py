"""The code location of a chaos home: days to ingest, and the training stage of the shop with toy ranks."""

import os
from pathlib import Path

import dagster as dg

import headway.training.plan
from assets.automation import reconcile_training
from assets.dataset_version import build_dataset_version
from assets.feature_snapshot import build_feature_snapshot
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.wiring import resources_for

_ROOT = Path(os.environ["CHAOS_ROOT"])
headway.training.plan.CODE_ROOT = _ROOT / "toy-code"
_DAYS = load_pipeline(_ROOT / "days" / "pipeline")

defs = dg.Definitions(
    assets=[
        build_dataset_version(_DAYS, "labels"),
        build_feature_snapshot(_DAYS),
        build_training_run(load_pipeline(_ROOT / "shop")),
    ],
    sensors=[reconcile_training],
    resources=resources_for(),
    # One process per run: a worker that is killed takes its step along, as on a node that dies.
    executor=dg.in_process_executor,
)
