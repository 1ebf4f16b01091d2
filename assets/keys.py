"""Asset keys of a pipeline's lineage."""

import dagster as dg


def dataset_key(pipeline: str, source: str) -> dg.AssetKey:
    """Key of a source's dataset versions."""
    return dg.AssetKey([pipeline, "dataset_version", source])


def snapshot_key(pipeline: str) -> dg.AssetKey:
    """Key of a pipeline's feature snapshots."""
    return dg.AssetKey([pipeline, "feature_snapshot"])


def training_key(pipeline: str) -> dg.AssetKey:
    """Key of a pipeline's training runs."""
    return dg.AssetKey([pipeline, "training_run"])


def model_version_key(pipeline: str) -> dg.AssetKey:
    """Key of a pipeline's gated model versions."""
    return dg.AssetKey([pipeline, "model_version"])
