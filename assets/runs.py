"""What a step knows about its own run: which partitions it was asked for, and how it reports on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg


def asked_partitions(context: dg.AssetExecutionContext) -> list[str] | None:
    """Partitions of this step; None for an asset without partitions."""
    return list(context.partition_keys) if context.assets_def.partitions_def is not None else None


def is_range(partitions: Sequence[str] | None) -> bool:
    """Whether the step covers more than one partition."""
    return partitions is not None and len(partitions) > 1


def is_worth_a_line(done: int, total: int) -> bool:
    """Whether progress goes to the event log: about twenty lines per step, since each line is a row of the database."""
    return done == total or done % max(1, total // 20) == 0


def report_partitions(
    context: dg.AssetExecutionContext, key: dg.AssetKey, facts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Attach per-partition metadata; the step itself is one materialization per partition of its range."""
    for partition, metadata in facts.items():
        context.add_asset_metadata(metadata, asset_key=key, partition_key=partition or None)
