"""What Dagster's daemon does by itself, and why each part is declared running.

Whatever is here asks; the catalog decides. A second ask for what is there already is answered "up to date".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import dagster as dg

from assets.keys import dataset_key
from headway.loading import Pipeline
from resources.platform import Platform

NIGHT = "0 3 * * *"
NIGHT_REACH_DAYS = 7
"""How far back the nightly schedule looks, in days of the world's time. More than that is a backfill, which a person
starts: a new home must not find itself reading years in its first night."""

# Dagster gives a tick 60 s; what was begun may take as long again.
_TICK_S = 20.0
_DAY_US = 86_400_000_000


@dg.sensor(
    name="reconcile_training",
    description="Brings training attempts and their processes together: adopts, finishes, restarts, ends strays. "
    "Runs unasked, because a training whose node died at night is worth nothing until somebody looks.",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def reconcile_training(context: dg.SensorEvaluationContext, platform: Platform) -> dg.SkipReason:
    """Reconcile once; what was done stands in the tick's log. It asks for no Dagster run."""
    from headway.training.reconcile import Reconciler

    try:
        actions = Reconciler(platform.services(), platform.launcher()).all(within_s=_TICK_S)
    finally:
        platform.close()
    if not actions:
        context.log.info("rows and processes agree")
    for action in actions:
        tell = context.log.warning if action.kind == "error" else context.log.info
        tell(f"{action.run_id} attempt {action.attempt}: {action.kind}: {action.detail}")
    return dg.SkipReason(f"{len(actions)} acts" if actions else "rows and processes agree")


def build_follow_updates(interval_s: int = 30) -> dg.AutomationConditionSensorDefinition:
    """The sensor that evaluates every asset's automation condition; Dagster's own one would be stopped."""
    return dg.AutomationConditionSensorDefinition(
        name="follow_updates",
        target=dg.AssetSelection.all(),
        description="Rebuilds what lies below an update: snapshots once their sources' blocking checks pass, the "
        "online store, the reports of a week. Runs unasked, so that a repaired day mends everything that used it; "
        "trainings have no condition: retrain_on_drift decides on them.",
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )


def build_nightly(pipeline: Pipeline, cron: str = NIGHT) -> dg.ScheduleDefinition | None:
    """The schedule that asks for each source's partitions that have closed and have no version; None without any.

    A partition is due when its time and the declared `after` have passed in the world's time: rows that may still come
    would be missed before. One that is quarantined has a version, and waits for a person.
    """
    spec = pipeline.spec
    cut = [source for source, declared in spec.sources.items() if declared.partition is not None]
    if not cut:
        return None

    @dg.schedule(
        name=f"{spec.name}_nightly",
        cron_schedule=cron,
        target=dg.AssetSelection.assets(*(dataset_key(spec.name, source) for source in cut)),
        description=f"Asks at night for the partitions of {', '.join(cut)} that closed in the last {NIGHT_REACH_DAYS} "
        "days and have no version yet. Runs unasked: what it finds is small and nobody has to wait for it; older gaps "
        "are a backfill, which a person starts.",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        execution_timezone="UTC",
    )
    def nightly(context: dg.ScheduleEvaluationContext, platform: Platform) -> list[dg.RunRequest] | dg.SkipReason:
        try:
            due = due_partitions(platform, pipeline, cut)
        finally:
            platform.close()
        asked_at = (context.scheduled_execution_time or datetime.now(UTC)).isoformat()
        requests = [
            dg.RunRequest(
                # With the night in it: what failed in one night is asked for again in the next.
                run_key=f"{spec.name}/{source} {partition} {asked_at}",
                asset_selection=[dataset_key(spec.name, source)],
                partition_key=partition,
            )
            for source, partitions in due.items()
            for partition in partitions
        ]
        if requests:
            return requests
        reason = f"every partition that closed within {NIGHT_REACH_DAYS} days has a version"
        # The page shows a skip reason only under the pointer; a line of the tick's log can be read and copied.
        context.log.info(reason)
        return dg.SkipReason(reason)

    return nightly


def due_partitions(platform: Platform, pipeline: Pipeline, sources: list[str]) -> Mapping[str, list[str]]:
    """Partitions by source that closed within the reach and have no version in the catalog."""
    from headway.datasets.partitions import PartitionScheme
    from headway.features.reach import bounds

    services = platform.services()
    now = services.world()
    due: dict[str, list[str]] = {}
    for source in sources:
        declared = pipeline.spec.sources[source]
        assert declared.partition is not None
        scheme = PartitionScheme.from_spec(declared.partition)
        after = bounds(declared)[1]
        recent = scheme.keys_between(now - after - NIGHT_REACH_DAYS * _DAY_US, now - after)
        closed = [key for key in recent if scheme.window(key)[1] + after <= now]
        known = services.catalog.current_many(services.principal, f"{pipeline.name}/{source}", closed)
        due[source] = [key for key in closed if key not in known]
    return due
