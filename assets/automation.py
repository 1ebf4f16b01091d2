"""What Dagster's daemon does by itself: it keeps training rows and processes together."""

import dagster as dg

from resources.platform import Platform

# Dagster gives a tick 60 s; what was begun may take as long again.
_TICK_S = 20.0


@dg.sensor(
    name="reconcile_training",
    description="Brings training attempts and their processes together: adopts, finishes, restarts, ends strays.",
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
    for action in actions:
        tell = context.log.warning if action.kind == "error" else context.log.info
        tell(f"{action.run_id} attempt {action.attempt}: {action.kind}: {action.detail}")
    return dg.SkipReason(f"{len(actions)} acts" if actions else "rows and processes agree")
