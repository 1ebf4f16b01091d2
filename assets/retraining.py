"""`retrain_on_drift`: the sensor that turns evidence into the next justified training, and says why it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import dagster as dg

from assets.keys import model_version_key, training_key
from headway.errors import HeadwayError
from headway.loading import DEFS_FILE, Pipeline, load_pipeline
from headway.monitoring.retrain import Ask, SchedulerRun, Tick
from resources.platform import Platform

REQUEST_TAG = "headway/retrain_request"
CAUSE_TAG = "headway/cause"
EVIDENCE_TAG = "headway/evidence"
INTERVAL_S = 30
_ENDED: Mapping[dg.DagsterRunStatus, Literal["succeeded", "failed", "cancelled"]] = {
    dg.DagsterRunStatus.SUCCESS: "succeeded",
    dg.DagsterRunStatus.CANCELED: "cancelled",
    dg.DagsterRunStatus.FAILURE: "failed",
}


class DagsterRuns:
    """The Dagster runs of a request, found by its tag."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def runs(self, request_id: str) -> Sequence[SchedulerRun]:
        """The runs of a request, the oldest first."""
        found = self._instance.get_runs(filters=dg.RunsFilter(tags={REQUEST_TAG: request_id}))
        return [SchedulerRun(run.run_id, _ENDED.get(run.status, "open")) for run in found[::-1]]


def retraining_pipelines(root: Path) -> list[Pipeline]:
    """The pipelines below a folder that declare `monitoring.retraining`, by name."""
    found = [load_pipeline(file.parent) for file in sorted(root.glob(f"*/{DEFS_FILE}"))]
    return [p for p in found if p.spec.monitoring is not None and p.spec.monitoring.retraining is not None]


def build_retrain_on_drift(root: Path, interval_s: int = INTERVAL_S) -> dg.SensorDefinition:
    """The sensor of a code location. Its pipelines below `root` are read at each tick, as a run would train them."""

    @dg.sensor(
        name="retrain_on_drift",
        description="Trains again on persistent drift or lost quality, with enough labels, gain, money and time since. "
        "Runs unasked: its limits are declared in monitoring.retraining, and a pipeline without them is left alone.",
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        asset_selection=_stage("training_run") | _stage("model_version"),
    )
    def retrain_on_drift(context: dg.SensorEvaluationContext, platform: Platform) -> dg.SensorResult | dg.SkipReason:
        asks: list[Ask] = []
        lines: list[str] = []
        try:
            for pipeline in retraining_pipelines(root):
                done = _tick(context, platform, pipeline, lines)
                if done is not None and done.ask is not None:
                    asks.append(done.ask)
        finally:
            platform.close()
        said = "; ".join(lines) or "no pipeline declares monitoring.retraining"
        return dg.SensorResult(run_requests=[run_request(a) for a in asks]) if asks else dg.SkipReason(said)

    return retrain_on_drift


def _stage(name: str) -> dg.AssetSelection:
    return dg.AssetSelection.tag("headway/stage", name)


def _tick(context: dg.SensorEvaluationContext, platform: Platform, pipeline: Pipeline, lines: list[str]) -> Tick | None:
    """One pipeline's tick. What one pipeline cannot do is told, and does not keep the next from its turn."""
    from headway.monitoring.retrain import tick

    try:
        done = tick(platform.services(), platform.keyring(), DagsterRuns(context.instance), pipeline)
    except HeadwayError as error:
        context.log.error(f"{pipeline.name}: {error}")
        lines.append(f"{pipeline.name}: {error}")
        return None
    for act in done.acts:
        context.log.info(f"{pipeline.name}: {act}")
        lines.append(f"{pipeline.name}: {act}")
    return done


def run_request(ask: Ask) -> dg.RunRequest:
    """The run that trains and judges one `as_of`, under the cause's digest as run key, with tags that lead back."""
    return dg.RunRequest(
        run_key=ask.run_key,
        partition_key=ask.as_of,
        asset_selection=[training_key(ask.pipeline), model_version_key(ask.pipeline)],
        tags={
            REQUEST_TAG: ask.request_id,
            CAUSE_TAG: ask.cause,
            EVIDENCE_TAG: " ".join(e.removeprefix("sha256:")[:12] for e in ask.evidence),
        },
    )
