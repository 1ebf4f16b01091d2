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


def online_key(pipeline: str) -> dg.AssetKey:
    """Key of a pipeline's online feature store."""
    return dg.AssetKey([pipeline, "online_features"])


def predictions_key(pipeline: str) -> dg.AssetKey:
    """Key of the answers of a pipeline's endpoint, by week."""
    return dg.AssetKey([pipeline, "predictions"])


def labels_key(pipeline: str) -> dg.AssetKey:
    """Key of what became known about the answers, by week in which they were asked."""
    return dg.AssetKey([pipeline, "labels"])


def quality_key(pipeline: str) -> dg.AssetKey:
    """Key of the weekly quality reports."""
    return dg.AssetKey([pipeline, "quality_report"])


def drift_key(pipeline: str) -> dg.AssetKey:
    """Key of the weekly drift reports."""
    return dg.AssetKey([pipeline, "drift_report"])
