"""The loop bench with a version that holds a real reference, and answers whose details can be read back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from support.catalog_facts import digest
from support.loop_bench import ENDPOINT, TRAINING, set_world, write_loop_bench
from support.serving_bench import DAYS, amend, opened, pipeline_of
from support.serving_model import CATEGORICAL, NUMERIC, judge, keys_of, register, snapshot_of
from support.workbench import Workbench

from headway.catalog.monitoring_facts import LabelFacts
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts
from headway.features.reading import read_values
from headway.registry.promote import promote
from headway.serving.detail import put_detail, verified_inputs
from headway.serving.features import compute_features
from trainer.blobs import Json, canonical_json
from trainer.encoders import CategoricalInput, InputEncoding, NumericInput
from trainer.reference import feature_histograms, reference_document

HOUR = 3_600_000_000
NOW = "2026-05-01T00:00:00Z"


@dataclass(frozen=True)
class Asked:
    """Requests of one computed batch: where their detail is, by row."""

    detail: str
    blobs: tuple[Any, ...]
    keys: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.keys)


def make_monitored(root: Path) -> Workbench:
    """The bench, ingested, with version 1 promoted, whose reference is counted on the snapshots of its days."""
    bench = write_loop_bench(root)
    # The bench has five keys: as entities they would be five observations, which show nothing.
    drift = {**TRAINING["monitoring"]["drift"], "entity": []}
    amend(bench, monitoring={**TRAINING["monitoring"], "drift": drift})
    set_world(bench, NOW)
    bench.ingest("data", "register")
    bench.ingest("labels", partitions=DAYS)
    promote_version(bench)
    return bench


def promote_version(bench: Workbench, seed: int = 0, *, with_reference: bool = True) -> int:
    """Register, judge and promote one more version; its number."""
    snapshots = [snapshot_of(bench, day) for day in DAYS]
    with opened(bench) as services:
        values = pa.concat_tables([read_values(services, s) for s in snapshots]).unify_dictionaries()
        reference = canonical_json(_reference(values)) if with_reference else b"{}"
        version = register(services, pipeline_of(bench), snapshots, seed, reference)
        judge(bench, services, version)
        promote(services, keys_of(bench), ENDPOINT, version.model_id, version.version)
        return version.version


def compute(bench: Workbench, sizes: NDArray[np.int64], seed: int = 0) -> Asked:
    """Compute the features of requests with these sizes and store their details; keys and times are drawn."""
    rng = np.random.default_rng(seed)
    pipeline = pipeline_of(bench)
    # As the bench draws the keys of its label rows.
    keys: list[str | None] = [str(k) or None for k in rng.choice(["a", "b", "c", "d", "nobody", ""], len(sizes))]
    start = 1_772_496_000_000_000
    starts = start + rng.integers(HOUR, 71 * HOUR, len(sizes))
    requests = pa.table(
        {
            "k": pa.array(keys, pa.string()),
            "size": pa.array(sizes, pa.int64()),
            "note": pa.nulls(len(sizes), pa.string()),
            "starts": pa.array(starts).cast(pa.timestamp("us", tz="UTC")),
            "number": pa.array(sizes, pa.int64()),
        }
    )
    with opened(bench) as services:
        computed = compute_features(services, pipeline, requests)
        outputs: list[Json] = [{"probability": 0.5, "degraded": []}] * len(sizes)
        detail, blobs = put_detail(
            services, computed, verified_inputs(services, computed), {"pipeline": ENDPOINT}, outputs
        )
    return Asked(detail, blobs, tuple(keys))


def answer(
    bench: Workbench,
    asked: Asked,
    week_start: int,
    scores: NDArray[np.float64],
    *,
    version: int = 1,
    name: str = "p",
    rows: Sequence[int] | None = None,
    degraded: Sequence[str] = (),
) -> list[str]:
    """Record answers to rows of a batch, spread over a week; their prediction ids."""
    rows = range(len(asked)) if rows is None else rows
    records = [
        PredictionFacts(
            prediction_id=f"{name}-{week_start}-{row:05d}",
            feature_as_of=None,
            feature_status="fresh",
            feature_row_digest=digest("row", str(row)),
            request_digest=digest("request", str(row)),
            output={"probability": float(scores[row]), "degraded": list(degraded)},
            arm="stable",
            status="ok",
            latency_us=10,
            detail_digest=asked.detail,
            row=row,
            asked_at=week_start + (row * 7 * 24 * HOUR) // len(asked),
            score=float(scores[row]),
            segments={"k": asked.keys[row]},
        )
        for row in rows
    ]
    with opened(bench) as services:
        # Every version is promoted once, in its order: its number is the endpoint's epoch.
        batch = PredictionBatch(ENDPOINT, version, version, tuple(records), asked.blobs)
        services.catalog.record_predictions(services.principal, None, batch)
    return [r.prediction_id for r in records]


def label(bench: Workbench, outcomes: Sequence[tuple[str, int, int]]) -> None:
    """Add labels: (prediction id, value, when it came)."""
    facts = tuple(
        LabelFacts(
            label_id=digest("label", prediction_id),
            endpoint_id=ENDPOINT,
            prediction_id=prediction_id,
            caller_id=None,
            event_key=None,
            value=value,
            source="auto",
            observed_at=came,
            received_at=came,
            actor="tests",
            reason=None,
        )
        for prediction_id, value, came in outcomes
    )
    with opened(bench) as services:
        found = services.catalog.add_labels(services.principal, None, facts)
    assert {f.status for f in found} == {"accepted"}


def _reference(values: pa.Table) -> dict[str, Json]:
    inputs = InputEncoding(
        tuple(CategoricalInput(n, "string", v) for n, v in CATEGORICAL.items()),
        tuple(NumericInput(n, t, 0.0, 1.0, missing=True) for n, t in NUMERIC.items()),
    )
    scores = np.random.default_rng(0).uniform(0.2, 0.8, values.num_rows)
    return reference_document(feature_histograms(values, inputs), values.num_rows, scores, "valid")
