"""What is answered online equals what batch computes, to the last bit, at every instant of a moving clock."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.online_bench import DAY, HOUR, online_bench, us
from support.serving_bench import (
    DAYS,
    asked_columns,
    bits,
    pipeline_of,
    requests_for,
    write_flights_slice,
    write_serving_bench,
)
from support.workbench import Workbench

from headway.features.online import OnlineStore
from headway.features.online.answer import OnlineFeatures
from headway.features.online.pins import groups_of, read_pins
from headway.features.snapshot import SnapshotBuilder
from headway.serving.detail import put_detail, read_detail, verified_inputs
from headway.serving.features import ComputedRequests, compute_features, label_inputs, without_outcome

REASONS = {"hit", "none_visible", "expired", "deleted", "null_value", "empty", "null_key"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workbench, pa.Table]:
    """The serving bench with its sources ingested, and its snapshots' values; left as it is."""
    bench = write_serving_bench(tmp_path_factory.mktemp("asked"))
    bench.ingest("data", "register", "labels")
    return bench, pa.concat_tables([bench.table(day) for day in DAYS]).unify_dictionaries()


def test_every_row_of_the_bench_equals_snapshots_and_batch(
    asked: tuple[Workbench, pa.Table], online: OnlineStore
) -> None:
    bench, stored = asked
    pipeline = pipeline_of(bench)
    mixed = pa.array(np.random.default_rng(5).permutation(stored.num_rows))
    requests = requests_for(pipeline, stored).take(mixed)
    with online_bench(bench, online, us("2026-04-01")) as live:
        live.sync(retain=60 * DAY)
        found = live.features().compute(requests, live.now)
        batch = compute_features(live.services, pipeline, requests)
    assert found.values.schema.equals(batch.values.schema, check_metadata=True)
    assert bits(found.values) == bits(batch.values)
    assert found.freshness == batch.freshness
    assert found.requests.equals(batch.requests)
    columns = asked_columns(pipeline, stored)
    assert bits(found.values.select(columns)) == bits(stored.take(mixed).select(columns))
    words = {w for c in columns if c.endswith("__reason") for w in found.values.column(c).to_pylist()}
    assert words == REASONS


def test_a_replay_with_a_moving_clock_answers_as_batch_does_at_each_instant(
    asked: tuple[Workbench, pa.Table], embedded: OnlineStore
) -> None:
    bench, stored = asked
    pipeline = pipeline_of(bench)
    order = np.argsort(stored.column("t").cast(pa.int64()).to_numpy(), kind="stable")[::3]
    requests = requests_for(pipeline, stored)
    columns = [c for c in asked_columns(pipeline, stored) if not c.endswith("__incomplete")]
    columns = [c for c in columns if not c.startswith("known_before")]
    known = _knowledge(bench)
    with online_bench(bench, embedded) as live:
        for row in order.tolist():
            one = requests.slice(row, 1)
            live.at(stored.column("t")[row].cast(pa.int64()).as_py()).sync()
            found = live.features().compute(one, live.now)
            assert bits(found.values.select(columns)) == bits(stored.slice(row, 1).select(columns)), row
            newest = max(at for at, when in known if when <= live.now)
            assert found.state.watermarks["data"] == newest, "never beyond the newest row seen"
            assert found.values.column("newest__incomplete").to_pylist() == [newest < live.now - 20 * HOUR]


def _knowledge(bench: Workbench) -> list[tuple[int, int]]:
    lines = (bench.folder / "data.csv").read_text().splitlines()[1:]
    return [(us(at), us(known)) for _, _, at, known, _, _ in (line.split(",") for line in lines)]


def test_rows_asked_together_or_alone_are_the_same(asked: tuple[Workbench, pa.Table], embedded: OnlineStore) -> None:
    bench, stored = asked
    pipeline = pipeline_of(bench)
    requests = requests_for(pipeline, stored)
    columns = [c for c in asked_columns(pipeline, stored) if not c.startswith("known_before")]
    rng = np.random.default_rng(8)
    with online_bench(bench, embedded, us("2026-04-01")) as live:
        live.sync(retain=60 * DAY)
        features = OnlineFeatures(pipeline, embedded, "default", entities_kept=3)
        assert not features.rows_independent, "a custom feature is told the first observation"
        for size in (1, 1, 5, 17, 1):
            some = pa.array(rng.choice(stored.num_rows, size, replace=False))
            found = features.compute(requests.take(some), live.now)
            assert bits(found.values.select(columns)) == bits(stored.take(some).select(columns))


def test_every_row_of_held_out_flights_equals_its_snapshot_and_batch(tmp_path: Path, embedded: OnlineStore) -> None:
    days = [f"2013-06-{day:02d}" for day in range(1, 9)]
    bench = write_flights_slice(tmp_path, days, flights_per_day=120)
    bench.ingest("airports", "airlines", "planes", "weather", "flights")
    pipeline = pipeline_of(bench)
    stored = pa.concat_tables([bench.table(day) for day in days[3:]]).unify_dictionaries()
    requests = requests_for(pipeline, stored)
    columns = asked_columns(pipeline, stored)
    with online_bench(bench, embedded) as live:
        live.at(us("2013-06-09")).sync(retain=10 * DAY)
        features = live.features()
        assert features.rows_independent
        found = features.compute(requests, live.now)
        batch = compute_features(live.services, pipeline, requests)
        assert found.values.schema.equals(batch.values.schema, check_metadata=True)
        assert bits(found.values) == bits(batch.values)
        assert found.freshness == batch.freshness
        assert bits(found.values.select(columns)) == bits(stored.select(columns))
        parts = [features.compute(requests.slice(i, 1), live.now).values for i in range(0, stored.num_rows, 37)]
        alone = pa.concat_tables(parts).unify_dictionaries()
        assert bits(alone.select(columns)) == bits(stored.take(pa.array(range(0, stored.num_rows, 37))).select(columns))


def test_explaining_later_computes_the_same_from_the_pinned_versions(
    asked: tuple[Workbench, pa.Table], embedded: OnlineStore
) -> None:
    bench, stored = asked
    pipeline = pipeline_of(bench)
    spec = pipeline.spec
    # A row that the batch computation of the whole versions sees otherwise: the store is behind and a source is held.
    moment = us("2026-03-04T18:00:00Z")
    times = stored.column("t").cast(pa.int64()).to_numpy()
    some = np.flatnonzero((times > moment - 6 * HOUR) & (times <= moment))
    requests = requests_for(pipeline, stored).take(pa.array(some))
    with online_bench(bench, embedded, moment - 20 * HOUR) as live:
        live.sync()
        live.at(moment).sync(hold=["data"])
        found = live.features().compute(requests, moment)
        batch = compute_features(live.services, pipeline, requests)
        assert bits(found.values) != bits(batch.values)
        pins = read_pins(live.services, found.state.inputs_digest)
        groups = groups_of(live.services, spec, pins, found.observed, found.requests)
        assert [g.partition for g in groups] == [g.partition for g in batch.groups]
        recorded = ComputedRequests(found.requests, found.values, found.observed, groups, found.freshness)
        digest, _ = put_detail(live.services, recorded, verified_inputs(live.services, recorded), {}, [0] * len(some))
        detail = read_detail(live.services, digest)
        for stored_group, group in zip(detail.groups, groups, strict=True):
            inputs = replace(group.inputs, seen=dict(stored_group.seen))
            labels = without_outcome(spec, label_inputs(spec, requests.take(pa.array(group.rows))))
            again = SnapshotBuilder(live.services, pipeline).compute(labels, inputs)
            assert bits(again.table) == bits(found.values.take(pa.array(group.rows)))
