"""Weeks of answers of the pipeline `shop`, resampled from rows of its snapshots, and the reports computed from them.

Requests about the rows of January and February are computed once, as batch does; a week's answers are draws of them
with replacement. So a week without a shift is one more sample of what the versions were trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from support.catalog_facts import digest
from support.retrain_bench import pipeline_of
from support.serving_bench import requests_for
from support.training_bench import TrainingBench

from headway.artifacts.store import Blob
from headway.catalog.monitoring_facts import LabelFacts, Report
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts
from headway.features.reading import read_values
from headway.monitoring.reports import BuiltReport, build_drift_report, build_quality_report, publish_report
from headway.monitoring.windows import WEEK_US, week_bounds
from headway.services import Services
from headway.serving.detail import put_detail, verified_inputs
from headway.serving.features import compute_features
from trainer.blobs import Json

ENDPOINT = "shop"
REFERENCE_MONTHS = ("2026-01-01", "2026-02-01")
# The weights that `retrain_rank` writes: a bias, and one more for each later shop.
BIAS = -1.0
SHOPS = ("s0", "s1", "s2", "s3")
IN_OTHER_UNITS = "by_person__mean_9d"
WEEK_ROWS = 150
_MINUTE = 60_000_000


@dataclass(frozen=True)
class AskedRows:
    """Rows that were asked about and their stored detail: the shop, the outcome and the model's score of each."""

    detail: str
    blobs: tuple[Blob, ...]
    shops: Sequence[str]
    outcomes: Sequence[int]
    scores: Sequence[float]

    def resampled(self, seed: int) -> NDArray[np.intp]:
        """Positions of a week's rows, drawn with replacement: nothing has moved."""
        return self._drawn(seed, 1.0)

    def shifted(self, seed: int) -> NDArray[np.intp]:
        """The same from a world in which the last shop is asked about far more often."""
        return self._drawn(seed, 20.0)

    def _drawn(self, seed: int, weight: float) -> NDArray[np.intp]:
        wanted = np.array([weight if shop == SHOPS[-1] else 1.0 for shop in self.shops])
        return np.random.default_rng(seed).choice(len(self.shops), WEEK_ROWS, p=wanted / wanted.sum())


def ask_reference(services: Services, bench: TrainingBench, factor: float = 1.0) -> AskedRows:
    """Ask about every row of the reference months; one feature comes times `factor`, as after a change of its unit."""
    pipeline = pipeline_of(bench)
    states = services.catalog.current_snapshots(services.principal, pipeline.name, REFERENCE_MONTHS)
    snapshots = [state.snapshot for state in states.values()]
    values = pa.concat_tables([read_values(services, s) for s in snapshots if s is not None]).unify_dictionaries()
    computed = compute_features(services, pipeline, requests_for(pipeline, values))
    place = computed.values.column_names.index(IN_OTHER_UNITS)
    changed = pa.array(computed.values.column(IN_OTHER_UNITS).to_numpy() * factor, from_pandas=True)
    computed = replace(computed, values=computed.values.set_column(place, IN_OTHER_UNITS, changed))
    shops = values.column("shop").to_pylist()
    logits = BIAS + np.array([SHOPS.index(shop) for shop in shops], np.float64)
    scores = (1 / (1 + np.exp(-logits))).tolist()
    outputs: list[Json] = [{"probability": score, "degraded": []} for score in scores]
    detail, blobs = put_detail(
        services, computed, verified_inputs(services, computed), {"pipeline": pipeline.name}, outputs
    )
    return AskedRows(detail, blobs, shops, values.column("bought").to_pylist(), scores)


def answer_week(services: Services, asked: AskedRows, week: str, rows: NDArray[np.intp], *, version: int = 1) -> None:
    """Record a version's answers to rows, spread over a week, and ten minutes after each what became of it."""
    start, drawn = week_bounds(week)[0], rows.tolist()
    moments = [start + (place * WEEK_US) // len(drawn) for place in range(len(drawn))]
    names = [f"{week}-{version}-{place:04d}" for place in range(len(drawn))]
    answers = tuple(
        PredictionFacts(
            prediction_id=name,
            feature_as_of=None,
            feature_status="fresh",
            feature_row_digest=digest("row", str(row)),
            request_digest=digest("request", str(row)),
            output={"probability": asked.scores[row], "degraded": []},
            arm="stable",
            status="ok",
            latency_us=10,
            detail_digest=asked.detail,
            row=row,
            asked_at=moment,
            score=asked.scores[row],
            segments={"shop": asked.shops[row]},
        )
        for name, moment, row in zip(names, moments, drawn, strict=True)
    )
    # Every version is promoted once, in its order: its number is the endpoint's epoch.
    batch = PredictionBatch(ENDPOINT, version, version, answers, asked.blobs)
    services.catalog.record_predictions(services.principal, None, batch)
    labels = tuple(
        LabelFacts(
            label_id=digest("label", name),
            endpoint_id=ENDPOINT,
            prediction_id=name,
            caller_id=None,
            event_key=None,
            value=asked.outcomes[row],
            source="auto",
            observed_at=moment + 10 * _MINUTE,
            received_at=moment + 10 * _MINUTE,
            actor="tests",
            reason=None,
        )
        for name, moment, row in zip(names, moments, drawn, strict=True)
    )
    assert {f.status for f in services.catalog.add_labels(services.principal, None, labels)} == {"accepted"}


def build_week(services: Services, bench: TrainingBench, week: str, version: int = 1) -> tuple[BuiltReport, ...]:
    """The drift and the quality of a week, computed at its end; nothing is published."""
    pipeline, end = pipeline_of(bench), week_bounds(week)[1]
    return (
        build_drift_report(services, pipeline, ENDPOINT, week, end, version),
        build_quality_report(services, pipeline, ENDPOINT, week, end, version),
    )


def report_week(services: Services, bench: TrainingBench, week: str, version: int = 1) -> tuple[Report, ...]:
    """Compute and publish the drift and the quality of a week."""
    return tuple(publish_report(services, built) for built in build_week(services, bench, week, version))
