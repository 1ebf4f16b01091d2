"""Closes weeks and follows the retraining decision in Dagster, for a replay whose clock runs ahead of any daemon's."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg

from assets.demo_model import model_job
from assets.keys import drift_key, labels_key, predictions_key, quality_key
from assets.retraining import DagsterRuns, run_request
from headway.loading import Pipeline
from headway.monitoring.retrain import Ask, tick
from headway.monitoring.windows import WEEK_US, week_bounds, week_key
from headway.registry.keys import KeyRing
from headway.services import Services
from headway.words import counted

WEEK_JOB = "close_weeks"
# Opening, launching, following and promoting take a tick each; more would be a loop.
_MOST_TICKS = 8

# Dagster tells every step of every week on the console otherwise; the page has them all the same.
_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}

Tell = Callable[[str], None]


class WeekNotClosed(RuntimeError):
    """The Dagster run that closes a week failed."""


class Loop:
    """One pipeline's loop in a Dagster instance: closes weeks, takes the sensor's decision and follows it."""

    def __init__(
        self,
        services: Services,
        keyring: KeyRing,
        pipeline: Pipeline,
        instance: dg.DagsterInstance,
        tell: Tell,
        *,
        retrains: bool = True,
    ) -> None:
        self._services = services
        self._keyring = keyring
        self._pipeline = pipeline
        self._instance = instance
        self._tell = tell
        self._retrains = retrains
        self._weeks = week_job(pipeline.name)
        self._models: dg.JobDefinition | None = None

    def close_week(self, week: str) -> None:
        """Materialize the week that has ended, and the one before, whose labels have come in; then decide.

        Raises:
            WeekNotClosed: Dagster could not.
        """
        before = week_key(week_bounds(week)[0] - WEEK_US)
        for key in (before, week):
            if key in self._known_weeks():
                self._materialize(key)
        self._tell(f"week {week} is closed")
        self._decide()

    def _known_weeks(self) -> set[str]:
        definition = self._weeks.partitions_def
        assert definition is not None
        return set(definition.get_partition_keys())

    def _materialize(self, week: str) -> None:
        result = self._weeks.execute_in_process(
            run_config=_QUIET, instance=self._instance, partition_key=week, raise_on_error=False
        )
        if not result.success:
            raise WeekNotClosed(f"the Dagster run {result.run_id} of week {week} failed; see it in the UI")

    def _decide(self) -> None:
        for _ in range(_MOST_TICKS):
            done = tick(self._services, self._keyring, DagsterRuns(self._instance), self._pipeline)
            for act in done.acts:
                self._tell(f"retrain: {act}")
            if done.ask is None:
                return
            if not self._retrains:
                self._tell(f"retrain: not started ({done.ask.as_of}), as asked")
                return
            self._train(done.ask)

    def _train(self, ask: Ask) -> None:
        request = run_request(ask)
        self._tell(f"training as of {ask.as_of}, for request {ask.request_id}")
        self.train(ask.as_of, dict(request.tags))

    def train(self, as_of: str, tags: dict[str, str] | None = None) -> bool:
        """Train and judge one `as_of`; return whether Dagster's run succeeded (a refusal by a gate fails it)."""
        if self._models is None:
            self._models = model_job(self._pipeline.name)
        result = self._models.execute_in_process(
            run_config=_QUIET,
            instance=self._instance,
            partition_key=as_of,
            tags=tags or {},
            raise_on_error=False,
        )
        return result.success


def week_job(pipeline: str) -> dg.JobDefinition:
    """Predictions, labels, quality and drift of a week as one job of the code location."""
    from assets.definitions import defs

    stages = (predictions_key, labels_key, quality_key, drift_key)
    selection = dg.AssetSelection.assets(*(key(pipeline) for key in stages))
    job = dg.define_asset_job(WEEK_JOB, selection=selection)
    return dg.Definitions.merge(defs(), dg.Definitions(jobs=[job])).resolve_job_def(WEEK_JOB)


def feed_line(requests: int, labels: int, moment: str) -> str:
    """One line of progress."""
    return f"[{moment[:16]}] {counted(requests, 'request')}, {counted(labels, 'label')}"
