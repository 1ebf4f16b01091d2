"""`assets.component.ModelPipeline`: the Dagster component behind a pipeline's `defs.yaml`."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import dagster as dg

from assets.automation import build_nightly
from assets.dataset_version import build_dataset_version
from assets.drift_report import build_drift_report
from assets.feature_snapshot import build_feature_snapshot
from assets.labels import build_labels
from assets.model_version import build_model_version
from assets.online_features import build_online_features
from assets.predictions import build_predictions
from assets.quality_report import build_quality_report
from assets.token_snapshot import build_token_snapshot
from assets.training_run import build_training_run
from headway.datasets.suites import check_suites
from headway.declaration import PipelineSpec
from headway.loading import Pipeline, from_spec


class PipelineScaffolder(dg.Scaffolder[Any]):
    """Writes a small commented pipeline that loads as it is (`dg scaffold defs assets.component.ModelPipeline x`)."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write `defs.yaml`, a suite and an example file into the target folder."""
        folder = Path(request.target_path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _EXAMPLE.items():
            (folder / name).write_text(dedent(text).lstrip().replace("NAME", folder.name), encoding="utf-8")


@dg.scaffold_with(PipelineScaffolder)
class ModelPipeline(dg.Component):
    """Every stage of one model, from dataset versions to drift reports, from one declaration."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec

    @classmethod
    def get_model_cls(cls) -> type[PipelineSpec]:
        """The schema of `attributes`."""
        return PipelineSpec

    @classmethod
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> Self:  # noqa: ANN401 - Dagster's signature
        """Keep the validated declaration."""
        return cls(attributes)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Ordinary assets of every stage, and whatever the pipeline's `extra/` folder defines."""
        folder = Path(context.path)
        pipeline = from_spec(self.spec, folder)
        check_suites(pipeline)
        declared = declared_defs(pipeline)
        extra = [_extra(context, file) for file in sorted((folder / "extra").glob("*.py")) if file.stem != "__init__"]
        return dg.Definitions.merge(declared, *extra)


def declared_defs(pipeline: Pipeline) -> dg.Definitions:
    """Every declared stage of a pipeline as an ordinary asset, and its nightly schedule."""
    spec = pipeline.spec
    stages = [build_dataset_version(pipeline, source) for source in spec.sources]
    stages.append(build_feature_snapshot(pipeline) if spec.text is None else build_token_snapshot(pipeline))
    if spec.training is not None:
        stages += [build_training_run(pipeline), build_model_version(pipeline)]
    if spec.serving is not None:
        stages.append(build_online_features(pipeline))
    if spec.monitoring is not None:
        stages += [build_predictions(pipeline), build_labels(pipeline)]
        stages += [build_quality_report(pipeline), build_drift_report(pipeline)]
    nightly = build_nightly(pipeline)
    return dg.Definitions(assets=stages, schedules=[] if nightly is None else [nightly])


def _extra(context: dg.ComponentLoadContext, file: Path) -> dg.Definitions:
    return dg.load_definitions_from_module(context.load_defs_relative_python_module(file))


_EXAMPLE = {
    "defs.yaml": """
        # One model pipeline. `headway check NAME` names every fault with file, line and field;
        # `headway check --schema` prints all that may be said here. docs/tutorial.md adds training, gates and serving.
        type: assets.component.ModelPipeline
        attributes:
          name: NAME
          owner: team:you
          sources:
            visits:
              files: {paths: [visits.csv]}        # relative to this folder
              format: {type: csv, missing: [""]}  # delimiter, zone, number format, missing markers: nothing is guessed
              columns:
                visit_id: {type: string, required: true}
                person: {type: string, required: true, known_at: asked_at}  # known when the question is asked
                asked_at: {type: timestamp, required: true}
                bought_at: {type: timestamp}
                amount: {type: float64, unit: EUR}
                bought: {type: bool}
              row_id: [visit_id]                  # names the event
              keys: [person]                      # what it may be looked up by
              event_time: bought_at               # when it happened
              available_time: bought_at           # when we could know: a column, or {delay: 1h, reason: ...}
              # before and after: how far an event may lie from the partition column's time; it decides what is read
              partition: {column: asked_at, start: "2026-01-05", end: "2026-01-07", before: 1h, after: 2d}
              quality: {suite: visits.suite.json, max_quarantined_share: 0.0}
          label:
            source: visits
            observation_time: asked_at
            target: bought
            known_at: bought_at
          features:
            version: 1
            views:
              earlier_purchases:
                source: visits
                keys: {person: person}            # label column: source column
                boundary: lt                      # strictly before the observation
                features:
                  count_1d: {window: amount, aggregate: count, duration: 1d}
                  sum_1d: {window: amount, aggregate: sum, duration: 1d}
        """,
    "visits.suite.json": """
        {"name": "visits", "expectations": [
          {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "visit_id"}, "severity": "critical"},
          {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": 0},
           "severity": "critical"}]}
        """,
    "visits.csv": """
        visit_id,person,asked_at,bought_at,amount,bought
        v1,ann,2026-01-05T09:00:00Z,2026-01-05T09:20:00Z,12.5,true
        v2,bob,2026-01-05T10:00:00Z,2026-01-05T10:05:00Z,3.0,true
        v3,ann,2026-01-06T08:00:00Z,2026-01-06T08:30:00Z,20.0,true
        """,
}
