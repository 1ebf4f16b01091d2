"""What requests may rest on: partitions that do not exist yet, that lack, that are quarantined; personal keys; B09."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.serving_bench import amend, opened, pipeline_of, requests_for
from support.workbench import Workbench, table_source, write_workbench

from headway.features.inputs import InputMissing
from headway.serving.features import ComputedRequests, InputQuarantined, as_kept, compute_features
from headway.serving.requests import RequestsRefused

COLUMNS = {"k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
REQUEST = {"k": {"type": "string", "column": "k"}, "starts": {"type": "timestamp", "required": True}}
MOMENT = pa.timestamp("us", tz="UTC")
DAYS = ("2026-03-01", "2026-03-02", "2026-03-03")


def _bench(root: Path, **more: Any) -> Workbench:  # noqa: ANN401
    """Labels of 2 March over a daily source with one row a day, asked an hour before they start."""
    lines = [f"a,{d}T06:00:00Z,{d}T06:00:00Z,{i}" for i, d in enumerate(DAYS)]
    calendar = {"column": "at", "start": DAYS[0], "end": "2026-03-04", "before": "1s", "after": "1s"}
    bench = write_workbench(
        root,
        sources={"data": table_source(COLUMNS, ["k", "at"], ["k"], partition=calendar)},
        views={
            "v": {
                "source": "data",
                "keys": {"k": "k"},
                "boundary": "lt",
                "lookback": "1d",
                "features": {"value": {"latest": "value"}},
                **more.pop("view", {}),
            }
        },
        files={
            "data.csv": "k,at,known,value\n" + "\n".join(lines) + "\n",
            "labels.csv": "label_id,t,k,target\nl1,2026-03-02T10:00:00Z,a,1\n",
        },
        label_columns={"k": {"type": "string", "known_at": "t"}},
        partition={"start": DAYS[0], "end": "2026-03-04", "expected_empty": [DAYS[0], DAYS[2]]},
        **more,
    )
    amend(bench, serving={"observed": "starts", "before": "1h", "request": REQUEST})
    return bench


def _compute(bench: Workbench, *rows: tuple[str | None, str]) -> ComputedRequests:
    table = pa.table(
        {
            "k": pa.array([k for k, _ in rows], pa.string()),
            "starts": pa.array([s for _, s in rows]).cast(MOMENT),
        }
    )
    with opened(bench) as services:
        return compute_features(services, pipeline_of(bench), table)


def _view(computed: ComputedRequests, view: str = "v") -> list[tuple[str, str]]:
    return [(f.status, f.reason) for f in computed.freshness[view]]


def test_partitions_that_were_not_over_need_not_exist_and_are_named(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    bench.ingest("data", partitions=DAYS[:1])
    early, nobody = "2026-03-02T05:00:00Z", "2026-03-02T05:30:00Z"
    live = _compute(bench, ("a", early), ("nobody", nobody))
    assert live.values.column("v__value").to_pylist() == [0.0, None]
    assert _view(live) == [("stale", "partition_not_read"), ("missing", "none_visible")]
    assert [f.incomplete for f in live.freshness["v"]] == ["partition_not_read"] * 2
    assert live.values.column("v__incomplete").to_pylist() == [True, True]
    (group,) = live.groups
    assert group.inputs.absent == {"data": (DAYS[1],), "labels": (DAYS[1],)}
    bench.ingest("data", partitions=DAYS[1:2])
    later = _compute(bench, ("a", early))
    assert later.values.column("v__value").to_pylist() == [0.0], "what was not known then does not show"
    assert _view(later) == [("fresh", "")]


def test_a_partition_that_was_over_is_required(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    bench.ingest("data", partitions=DAYS[1:2])
    with pytest.raises(InputMissing, match="data 2026-03-01"):
        _compute(bench, ("a", "2026-03-02T11:00:00Z"))


def test_a_source_behind_its_watermark_is_stale(tmp_path: Path) -> None:
    bench = _bench(tmp_path, view={"allowed_lateness": "2h"})
    bench.ingest("data")
    computed = _compute(bench, ("a", "2026-03-03T08:30:00Z"), ("a", "2026-03-03T10:30:00Z"))
    assert computed.values.column("v__value").to_pylist() == [2.0, 2.0]
    assert _view(computed) == [("fresh", ""), ("stale", "watermark_behind")]
    assert [f.age for f in computed.freshness["v"]] == [5_400.0, 12_600.0]


@pytest.mark.parametrize("policy", ["skip", "refuse"])
def test_a_quarantined_partition_is_left_out_or_refused_as_declared(tmp_path: Path, policy: str) -> None:
    bench = _bench(tmp_path, features={"on_quarantined_input": policy})
    rule = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "value", "max_value": 0}}
    suite = {"name": "data", "expectations": [rule | {"severity": "critical"}]}
    (bench.folder / "data.suite.json").write_text(json.dumps(suite))
    bench.run("datasets", "ingest", "--pipeline", str(bench.folder), "--source", "data")
    if policy == "refuse":
        with pytest.raises(InputQuarantined, match="data 2026-03-02"):
            _compute(bench, ("a", "2026-03-02T11:00:00Z"))
        return
    computed = _compute(bench, ("a", "2026-03-02T11:00:00Z"), ("a", "2026-03-01T11:00:00Z"))
    assert computed.values.column("v__value").to_pylist() == [None, 0.0]
    assert _view(computed) == [("missing", "expired"), ("fresh", "")]
    assert computed.values.column("v__incomplete").to_pylist() == [True, False]


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ("2999-01-01T00:00:00Z", "which is still to come"),
        ("2020-01-01T00:00:00Z", "is outside the calendar of labels; it starts at 2026-03-01"),
        ("0001-01-01T00:30:00Z", "is before year 1"),
    ],
)
def test_times_that_cannot_be_asked_are_refused_by_row(tmp_path: Path, starts: str, said: str) -> None:
    bench = _bench(tmp_path)
    with pytest.raises(RequestsRefused) as refused:
        _compute(bench, ("a", "2026-03-02T11:00:00Z"), ("a", starts))
    assert said in str(refused.value)
    assert [(p.row, p.field) for p in refused.value.problems] == [(2, "starts")]


def test_a_personal_key_meets_its_hash_and_is_never_kept(tmp_path: Path) -> None:
    bench = write_workbench(
        tmp_path,
        sources={},
        views={
            "own": {
                "source": "labels",
                "keys": {"k": "k"},
                "boundary": "lt",
                "features": {"n": {"window": "target", "aggregate": "count", "duration": "1d"}},
            }
        },
        files={
            "labels.csv": "label_id,t,k,target\nl1,2026-03-01T10:00:00Z,secret,1\nl2,2026-03-01T12:00:00Z,secret,1\n"
        },
        label_columns={"k": {"type": "string", "known_at": "t"}},
        label_keys=["label_id", "k"],
        label={"carry": ["k"]},
        label_source={"privacy": {"personal": {"k": "hash"}}},
        partition={"start": DAYS[0], "end": "2026-03-02"},
    )
    amend(bench, serving={"observed": "starts", "before": "1h", "request": REQUEST})
    bench.ingest("labels")
    stored = bench.table(DAYS[0])
    computed = _compute(bench, ("secret", "2026-03-01T11:00:00Z"), ("secret", "2026-03-01T13:00:00Z"))
    assert computed.values.column("own__n").to_pylist() == stored.column("own__n").to_pylist() == [0.0, 1.0]
    assert computed.values.column("k").to_pylist() == stored.column("k").to_pylist()
    kept = str(computed.requests.to_pylist()) + str(computed.values.to_pylist())
    assert "secret" not in kept
    spec = pipeline_of(bench).spec
    source = spec.sources["labels"].model_copy(
        update={"privacy": spec.sources["labels"].privacy.model_copy(update={"personal": {"k": "drop"}})}
    )
    dropped = spec.model_copy(update={"sources": {**spec.sources, "labels": source}})
    asked = requests_for(pipeline_of(bench), stored)
    assert as_kept(dropped, asked).column("k").null_count == 2


def test_field_B09_todays_export_never_stands_in_last_years_row(tmp_path: Path) -> None:
    days: Sequence[str] = ("2025-03-02", "2026-02-01")
    export = table_source(
        {"k": "string", "export_date": "timestamp", "ltv": "float64", "nr_orders": "int64"},
        ["k"],
        ["k"],
        event_time="export_date",
        available_time="export_date",
    )
    labels = [f"l{i},{day}T10:00:00Z,{k},1" for i, (day, k) in enumerate((d, k) for d in days for k in ("a", "b"))]
    bench = write_workbench(
        tmp_path,
        sources={"data": export},
        views={
            "customer": {
                "source": "data",
                "keys": {"k": "k"},
                "boundary": "lt",
                "features": {"ltv": {"latest": "ltv"}, "nr_orders": {"latest": "nr_orders"}},
            }
        },
        files={
            "data.csv": "k,export_date,ltv,nr_orders\na,2026-03-01T00:00:00Z,990,7\nb,2026-03-01T00:00:00Z,10,1\n",
            "labels.csv": "label_id,t,k,target\n" + "\n".join(labels) + "\n",
        },
        label_columns={"k": {"type": "string", "known_at": "t"}},
        partition={"start": "2025-03-01", "end": "2026-03-03", "cadence": "daily"},
    )
    amend(bench, serving={"observed": "starts", "before": "1h", "request": REQUEST})
    bench.ingest("data")
    bench.ingest("labels", partitions=days)
    for day in days:
        rows = bench.values(day)
        assert [(r["customer__ltv"], r["customer__ltv__reason"]) for r in rows] == [(None, "none_visible")] * 2
        with opened(bench) as services:
            snapshot = services.catalog.current_snapshots(services.principal, "pipeline", [day])[day].snapshot
            assert snapshot is not None
            assert snapshot.facts.metadata["null_shares"] == {"customer__ltv": 1.0, "customer__nr_orders": 1.0}
    computed = _compute(bench, *[("a", f"{day}T11:00:00Z") for day in days], ("a", "2026-03-02T11:00:00Z"))
    assert computed.values.column("customer__ltv").to_pylist() == [None, None, 990.0]
    assert _view(computed, "customer") == [("missing", "none_visible")] * 2 + [("fresh", "")]
