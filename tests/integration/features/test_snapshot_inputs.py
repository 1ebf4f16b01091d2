"""What a snapshot pins: content, and the rows that quality rules kept back."""

import json
from pathlib import Path

from support.workbench import Workbench, table_source, write_workbench

DAY = "2026-03-02"


def _bench(root: Path, quality: dict[str, object] | None = None) -> Workbench:
    columns = {"k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
    source = table_source(columns, ["k", "at"], ["k"])
    source["quality"] = source["quality"] | {"max_quarantined_share": 0.7} | (quality or {})
    return write_workbench(
        root,
        sources={"data": source},
        views={"v": {"source": "data", "keys": {"k": "k"}, "boundary": "lt", "features": {"x": {"latest": "value"}}}},
        files={
            "data.csv": "k,at,known,value\n"
            "a,2026-03-01T00:00:00Z,2026-03-01T00:00:00Z,1\n"
            "a,2026-03-01T01:00:00Z,2026-03-01T01:00:00Z,900\n"
            "a,2026-03-01T02:00:00Z,2026-03-01T02:00:00Z,20\n",
            "labels.csv": f"label_id,t,k,target\nl1,{DAY}T10:00:00Z,a,1\n",
        },
        label_columns={"k": "string"},
        partition={"start": DAY, "end": "2026-03-03"},
    )


def _limit(bench: Workbench, highest: int) -> None:
    rule = {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "value", "min_value": 0, "max_value": highest},
        "severity": "critical",
    }
    (bench.folder / "data.suite.json").write_text(json.dumps({"name": "data", "expectations": [rule]}))


def test_another_suite_that_keeps_back_other_rows_is_another_snapshot(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    _limit(bench, 100)
    bench.ingest("data", "labels")
    first = bench.outcome(DAY)["snapshot_id"]
    assert [r["v__x"] for r in bench.values(DAY)] == [20]
    _limit(bench, 10)
    bench.ingest("data")
    assert [r["v__x"] for r in bench.values(DAY)] == [1], "the last row is in quarantine now"
    assert bench.outcome(DAY)["snapshot_id"] != first
    verified = bench.run("snapshots", "verify", first, "--pipeline", str(bench.folder))
    assert verified.exit_code == 0, "the pinned snapshot is what it was: " + verified.output


def test_another_suite_that_keeps_back_the_same_rows_changes_nothing(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    _limit(bench, 100)
    bench.ingest("data", "labels")
    first = bench.outcome(DAY)["snapshot_id"]
    _limit(bench, 90)
    bench.ingest("data")
    again = bench.outcome(DAY)
    assert (again["status"], again["snapshot_id"]) == ("up_to_date", first)
    assert bench.run("fsck").exit_code == 0


def test_a_missing_input_is_named_with_what_to_do(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    bench.ingest("labels")
    outcome = bench.outcome(DAY)
    assert outcome["status"] == "failed"
    assert "data (whole table)" in outcome["reason"]
