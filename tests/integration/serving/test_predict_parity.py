"""What a prediction is computed from equals what the snapshot of the same rows holds, to the last bit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from support.serving_bench import (
    DAYS,
    asked_columns,
    bits,
    opened,
    pipeline_of,
    requests_for,
    write_flights_slice,
)
from support.serving_model import Served

from headway.serving.features import compute_features

REASONS = {"hit", "none_visible", "expired", "deleted", "null_value", "empty", "null_key"}


def test_every_row_of_a_period_equals_its_snapshot_whatever_the_order(served: Served) -> None:
    bench, stored = served.bench, served.stored
    pipeline = pipeline_of(bench)
    requests = requests_for(pipeline, stored)
    mixed = np.random.default_rng(1).permutation(stored.num_rows)
    with opened(bench) as services:
        computed = compute_features(services, pipeline, requests.take(pa.array(mixed)))
    values = computed.values.take(pa.array(np.argsort(mixed)))
    assert values.schema.equals(stored.schema, check_metadata=True)
    columns = asked_columns(pipeline, stored)
    assert {*pipeline.spec.feature_names(), "newest__incomplete", "k", "size", "t"} <= set(columns)
    assert bits(values.select(columns)) == bits(stored.select(columns))
    reasons = {c for c in columns if c.endswith("__reason")}
    assert {word for c in reasons for word in stored.column(c).to_pylist()} == REASONS
    assert [g.partition for g in computed.groups] == list(DAYS)
    assert values.column("target").null_count == len(values)


def test_a_row_does_not_depend_on_the_others_in_its_file(served: Served) -> None:
    pipeline = pipeline_of(served.bench)
    requests = requests_for(pipeline, served.stored)
    rng = np.random.default_rng(4)
    # A custom function is told the first observation of what is computed together, and may use it.
    columns = [c for c in asked_columns(pipeline, served.stored) if not c.startswith("known_before")]
    with opened(served.bench) as services:
        for size in (1, 1, 2, 7, 30):
            some = pa.array(rng.choice(served.stored.num_rows, size, replace=False))
            computed = compute_features(services, pipeline, requests.take(some))
            assert bits(computed.values.select(columns)) == bits(served.stored.take(some).select(columns))


def test_every_row_of_held_out_flights_equals_its_snapshot(tmp_path: Path) -> None:
    days = ("2013-06-01", "2013-06-02", "2013-06-03")
    bench = write_flights_slice(tmp_path, days, flights_per_day=150)
    bench.ingest("airports", "airlines", "planes", "weather", "flights")
    stored = bench.table(days[-1])
    pipeline = pipeline_of(bench)
    with opened(bench) as services:
        computed = compute_features(services, pipeline, requests_for(pipeline, stored))
    columns = asked_columns(pipeline, stored)
    assert set(stored.column_names) - set(columns) == {"flight_id", "late", "arrived_at", "distance"}
    assert bits(computed.values.select(columns)) == bits(stored.select(columns))
    words = {word for c in columns if c.endswith("__reason") for word in stored.column(c).to_pylist()}
    assert words == REASONS - {"deleted", "null_key"}, "nothing is retracted, and who has flown has a tail number"
