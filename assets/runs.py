"""What a step knows about its own run: which partitions it was asked for, and how it reports on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

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


# A person who presses a button leaves none of these; whatever asks by itself leaves one.
_MACHINE_TAGS = (
    "dagster/auto_materialize",
    "dagster/backfill",
    "dagster/from_automation_condition",
    "dagster/retry_number",
    "dagster/schedule_name",
    "dagster/sensor_name",
)


def asker(context: dg.AssetExecutionContext) -> Literal["person", "machine"]:
    """Who asks for this step: a person, or a backfill, schedule, sensor, automation or retry."""
    retried = context.op_execution_context.retry_number > 0
    return "machine" if retried or any(tag in context.run.tags for tag in _MACHINE_TAGS) else "person"


def is_being_cancelled(context: dg.AssetExecutionContext) -> bool:
    """Whether somebody asked Dagster to end this run; a signal alone says only that this process must go."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return run is not None and run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


def report_partitions(
    context: dg.AssetExecutionContext, key: dg.AssetKey, facts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Attach per-partition metadata; the step itself is one materialization per partition of its range."""
    for partition, metadata in facts.items():
        context.add_asset_metadata(metadata, asset_key=key, partition_key=partition or None)
