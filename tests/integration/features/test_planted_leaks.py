"""Leaks planted on purpose: each is refused by name, on the way that every snapshot takes.

Without the proof the leaky snapshots would be published, and these tests would fail.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.workbench import Workbench, table_source, write_workbench

from headway.features.clocks import Clock
from headway.features.plan import Cells, CompiledView, FeaturePlan, SourceRows, compile_plan
from headway.features.snapshot import SnapshotBuilder, SnapshotOutcome
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.services import open_services

DAY = datetime(2026, 3, 2, tzinfo=UTC)

CODE = '''
import pyarrow as pa
import pyarrow.compute as pc


def next_value(labels, rows):
    """The aircraft's next delay: a join on the tail number that forgets to look at time."""
    newest = rows.sort_by([("at", "descending")])
    found = dict(zip(reversed(newest.column("tail").to_pylist()), reversed(newest.column("delay").to_pylist())))
    return pa.array([found.get(tail) for tail in labels.column("tail").to_pylist()], pa.float64())


def encoded_carrier(labels, rows):
    """Mean delay of the carrier over all rows: a target encoding that saw the future."""
    means = rows.group_by("carrier").aggregate([("delay", "mean")])
    found = dict(zip(means.column("carrier").to_pylist(), means.column("delay_mean").to_pylist()))
    return pa.array([found.get(c) for c in labels.column("carrier").to_pylist()], pa.float64())


def rank_among_labels(row):
    """A position among the other label rows: not a property of the row."""
    return pc.cast(pc.rank(row.column("distance")), pa.int64())
'''


def _stamp(minutes: int) -> str:
    return (DAY + timedelta(minutes=minutes)).isoformat()


def _bench(root: Path, custom: str | None = None, derived: str | None = None) -> Workbench:
    flights = [
        f"f{i},{'ABC'[i % 3]},{'xy'[i % 2]},{_stamp(30 * i)},{_stamp(30 * i + 90)},{(7 * i) % 50}" for i in range(48)
    ]
    labels = [f"l{i},{_stamp(60 * i)},{'ABC'[i % 3]},{'xy'[i % 2]},{100 + 13 * i % 7},1" for i in range(24)]
    columns = {"id": "string", "tail": "string", "carrier": "string", "at": "timestamp", "known": "timestamp"}
    features = {
        "custom": {custom: {"function": f"features.{custom}", "source": "data"}} if custom else {},
        "derived": {derived: {"function": f"features.{derived}", "inputs": ["distance"], "type": "int64"}}
        if derived
        else {},
    }
    return write_workbench(
        root,
        sources={"data": table_source({**columns, "delay": "float64"}, ["id"], ["tail", "carrier"])},
        views={
            "newest": {
                "source": "data",
                "keys": {"carrier": "carrier"},
                "boundary": "lt",
                "lookback": "1d",
                "features": {"delay": {"latest": "delay"}},
            },
            "window": {
                "source": "data",
                "keys": {"tail": "tail"},
                "boundary": "lt",
                "features": {"mean": {"window": "delay", "aggregate": "mean", "duration": "3h"}},
            },
        },
        files={
            "data.csv": "id,tail,carrier,at,known,delay\n" + "\n".join(flights) + "\n",
            "labels.csv": "label_id,t,tail,carrier,distance,target\n" + "\n".join(labels) + "\n",
        },
        label_columns={"tail": "string", "carrier": "string", "distance": "int64"},
        label={"carry": ["tail", "carrier", "distance"]},
        partition={"start": "2026-03-02", "end": "2026-03-03"},
        features=features,
        code=CODE,
    )


Plant = Callable[[FeaturePlan], FeaturePlan]


def _build(bench: Workbench, plant: Plant | None = None) -> SnapshotOutcome:
    bench.ingest("data", "labels")
    pipeline = load_pipeline(bench.folder)
    plan = compile_plan(pipeline)
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        return SnapshotBuilder(services, pipeline, plant(plan) if plant else plan).build("2026-03-02")


def _change(plan: FeaturePlan, view: str, change: Callable[[CompiledView], CompiledView]) -> FeaturePlan:
    return replace(plan, views={**plan.views, view: change(plan.views[view])})


@dataclass(frozen=True)
class LateEdge(CompiledView):
    """A window whose upper edge is one microsecond too late, so that an event at the observation is in it."""

    def answer(self, labels: pa.Table, rows: SourceRows) -> dict[str, Cells]:
        moments = labels.column("t")
        late = pc.add(moments, pa.scalar(timedelta(microseconds=1)))  # pyright: ignore[reportAttributeAccessIssue]
        return super().answer(labels.set_column(labels.column_names.index("t"), "t", late), rows)


def available_when_it_happened(plan: FeaturePlan) -> FeaturePlan:
    return _change(plan, "newest", lambda v: replace(v, clock=Clock("at", "at")))


def inclusive_boundary(plan: FeaturePlan) -> FeaturePlan:
    return _change(plan, "newest", lambda v: replace(v, spec=v.spec.model_copy(update={"boundary": "le"})))


def late_window_edge(plan: FeaturePlan) -> FeaturePlan:
    return _change(plan, "window", lambda v: LateEdge(v.name, v.spec, v.source, v.clock, v.observation_time))


def test_the_honest_plan_is_proved_and_published(tmp_path: Path) -> None:
    outcome = _build(_bench(tmp_path))
    assert outcome.status == "published", outcome.reason
    proof = next(c for c in outcome.checks if c.name == "leakage_proof")
    assert proof.detail["labels"] == 24
    assert proof.detail["cells_adversarial"] == 24 * 2 * 2, "every label row, every feature, deleted and poisoned"


@pytest.mark.parametrize(
    ("plant", "feature"),
    [
        (available_when_it_happened, "newest__delay"),
        (inclusive_boundary, "newest__delay"),
        (late_window_edge, "window__mean"),
    ],
)
def test_a_leaky_plan_is_refused_by_the_name_of_its_feature(tmp_path: Path, plant: Plant, feature: str) -> None:
    outcome = _build(_bench(tmp_path), plant)
    assert outcome.status == "refused"
    assert "leakage proof failed" in outcome.reason
    assert f"{feature} (hidden_rows_deleted" in outcome.reason
    assert f"{feature} (hidden_rows_poisoned" in outcome.reason
    other = {"newest__delay": "window__mean", "window__mean": "newest__delay"}[feature]
    assert other not in outcome.reason


@pytest.mark.parametrize("function", ["next_value", "encoded_carrier"])
def test_a_leaky_function_is_refused_by_name(tmp_path: Path, function: str) -> None:
    bench = _bench(tmp_path, custom=function)
    bench.ingest("data", "labels")
    outcome = bench.outcome("2026-03-02")
    assert outcome["status"] == "refused"
    assert f"{function} (hidden_rows_deleted" in outcome["reason"]
    shown = bench.run("snapshots", "list", "--pipeline", str(bench.folder))
    assert "refused" in shown.output
    assert function in shown.output


def test_a_derived_feature_that_looks_across_rows_is_refused(tmp_path: Path) -> None:
    bench = _bench(tmp_path, derived="rank_among_labels")
    bench.ingest("data", "labels")
    outcome = bench.outcome("2026-03-02")
    assert outcome["status"] == "refused"
    assert "rank_among_labels (other_label_rows" in outcome["reason"]


@pytest.mark.parametrize("plant", [available_when_it_happened, inclusive_boundary, late_window_edge])
def test_the_planted_leaks_are_real(tmp_path: Path, plant: Plant) -> None:
    bench = _bench(tmp_path)
    bench.ingest("data", "labels")
    pipeline = load_pipeline(bench.folder)
    plan = compile_plan(pipeline)
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        honest, leaky = (SnapshotBuilder(services, pipeline, p) for p in (plan, plant(plan)))
        assert honest.computed("2026-03-02").digest != leaky.computed("2026-03-02").digest


def test_verify_recomputes_and_finds_a_changed_value(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    bench.ingest("data", "labels")
    snapshot = bench.outcome("2026-03-02")["snapshot_id"]
    good = bench.run("snapshots", "verify", snapshot, "--pipeline", str(bench.folder))
    assert good.exit_code == 0, good.output
    assert "verified" in good.output
    proved = bench.run("features", "prove", "--pipeline", str(bench.folder))
    assert proved.exit_code == 0, proved.output
    assert "nothing leaked" in proved.output
    code = bench.folder / "defs.yaml"
    code.write_text(code.read_text().replace("duration: 3h", "duration: 4h"))
    other = bench.run("snapshots", "verify", snapshot, "--pipeline", str(bench.folder))
    assert other.exit_code == 2
    assert "has feature contract" in other.output
