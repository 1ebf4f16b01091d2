"""A language model pipeline that is small enough for a test: some files of the library, a tiny decoder, few steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from assets.component import declared_defs
from assets.keys import model_version_key, training_key
from headway.loading import load_pipeline
from resources.platform import Platform

ROOT = Path(__file__).resolve().parents[2]
NAME = "stdlib_lm"


def write_pipeline(folder: Path, **training: Any) -> Path:  # noqa: ANN401
    """A copy of `stdlib_lm` over few files with a tiny model; `training` changes more of it."""
    target = folder / NAME
    shutil.copytree(ROOT / "pipelines" / NAME, target, ignore=shutil.ignore_patterns("__pycache__"))
    document: dict[str, Any] = yaml.safe_load((target / "defs.yaml").read_text())
    declared = document["attributes"]
    declared["sources"]["modules"]["files"]["limit"] = 60
    declared["text"] |= {
        "tokenizer": {"kind": "bpe", "vocab": 400},
        "split": {"held_out": 0.2, "valid": 0.1, "near_duplicates": 0.8},
        "context": 32,
    }
    declared["training"] |= {
        "options": {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 64},
        "precision": "fp32",
        "batch": 8,
        "steps": 24,
        "judge_every": 8,
        "checkpoint_every": 24,
        "lr": 0.01,
    } | training
    (target / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return target


def materialize(folder: Path, home: Path, instance: dg.DagsterInstance, *stages: dg.AssetKey) -> Any:  # noqa: ANN401
    """Materialize these assets of the pipeline in one run in this process; none: all of them."""
    assets = declared_defs(load_pipeline(folder)).assets
    return dg.materialize(
        list(assets or []),  # pyright: ignore[reportArgumentType] - exactly what Definitions took
        instance=instance,
        selection=dg.AssetSelection.assets(*stages) if stages else None,
        raise_on_error=False,
        resources={"platform": Platform(home=str(home))},
    )


def failures(result: Any) -> list[str]:  # noqa: ANN401
    """Why steps of a run failed, but for blocking checks that did not pass."""
    errors = [e.event_specific_data.error for e in result.all_events if e.event_type_value == "STEP_FAILURE"]
    return [error.to_string() for error in errors if error.cls_name != "DagsterAssetCheckFailedError"]


TRAINED = (training_key(NAME), model_version_key(NAME))
