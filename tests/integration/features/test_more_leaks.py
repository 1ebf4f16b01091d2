"""Ways around the proof that were tried: each is refused when declared, or named by the proof."""

from pathlib import Path
from typing import Any

import pytest
from support.workbench import Workbench, table_source, write_workbench

DAY = "2026-03-02"

CODE = '''
import pyarrow as pa
import pyarrow.compute as pc

_SEEN = {}


def remembering(labels, rows):
    """Remembers the newest value of every key at module level, so that a second call knows more than it gets."""
    for key, value in zip(rows.column("k").to_pylist(), rows.column("value").to_pylist()):
        _SEEN[key] = max(value, _SEEN.get(key, value))
    return pa.array([_SEEN.get(k) for k in labels.column("k").to_pylist()], pa.float64())


def counts_labels(labels, rows):
    """How many label rows the key has on this day: the future, although the source has no time."""
    keys = labels.column("k").to_pylist()
    return pa.array([float(keys.count(k)) for k in keys], pa.float64())


def sum_by_key(row):
    """A sum over the label rows of a key."""
    keys, sizes = row.column("k").to_pylist(), row.column("size").to_pylist()
    return pa.array([float(sum(s for k2, s in zip(keys, sizes) if k2 == k)) for k in keys], pa.float64())


def raises(labels, rows):
    raise KeyError("secret-value-19")


def gives_nan(row):
    return pa.array([float("nan")] * row.num_rows, pa.float64())
'''


def _bench(root: Path, **more: Any) -> Workbench:  # noqa: ANN401
    columns = {"k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
    rows = [f"{'ab'[h % 2]},{DAY}T{h:02d}:10:00Z,{DAY}T{h:02d}:20:00Z,{h}" for h in range(24)]
    # Keys alternate, so that every second label row is of the same key.
    labels = [f"l{h:02d},{DAY}T{h:02d}:00:00Z,{'ab'[h % 2]},{h},1" for h in range(24)]
    base: dict[str, Any] = {
        "sources": {"data": table_source(columns, ["k", "at"], ["k"])},
        "views": {
            "v": {"source": "data", "keys": {"k": "k"}, "boundary": "lt", "features": {"x": {"latest": "value"}}}
        },
        "files": {
            "data.csv": "k,at,known,value\n" + "\n".join(rows) + "\n",
            "labels.csv": "label_id,t,k,size,target\n" + "\n".join(labels) + "\n",
        },
        "label_columns": {"k": "string", "size": "int64"},
        "label": {"carry": ["k", "size"]},
        "partition": {"start": DAY, "end": "2026-03-03"},
        "code": CODE,
    }
    return write_workbench(root, **{**base, **more})


def _outcome(bench: Workbench) -> dict[str, Any]:
    bench.ingest("data", "labels")
    return bench.outcome(DAY)


def _custom(function: str, source: str = "data") -> dict[str, Any]:
    return {"custom": {function: {"function": f"features.{function}", "source": source}}}


def _derived(function: str) -> dict[str, Any]:
    return {"derived": {function: {"function": f"features.{function}", "inputs": ["k", "size"]}}}


def test_a_function_that_remembers_is_named(tmp_path: Path) -> None:
    outcome = _outcome(_bench(tmp_path, features=_custom("remembering")))
    assert outcome["status"] == "refused"
    assert "remembering (hidden_rows_deleted" in outcome["reason"]


def test_a_function_of_a_static_table_may_not_look_at_other_label_rows(tmp_path: Path) -> None:
    always = {"static_from": "2020-01-01T00:00:00Z", "reason": "a table of the test"}
    source = table_source({"k": "string", "value": "float64"}, ["k"], ["k"], event_time=always, available_time=always)
    bench = _bench(tmp_path, features=_custom("counts_labels"), sources={"data": source})
    (bench.folder / "data.csv").write_text("k,value\na,1\nb,2\n")
    outcome = _outcome(bench)
    assert outcome["status"] == "refused"
    assert "counts_labels (hidden_rows_deleted" in outcome["reason"]
    assert "v__x" not in outcome["reason"]


def test_a_derived_sum_over_label_rows_is_named_although_halves_hold_whole_groups(tmp_path: Path) -> None:
    outcome = _outcome(_bench(tmp_path, features=_derived("sum_by_key")))
    assert outcome["status"] == "refused"
    assert "sum_by_key (other_label_rows" in outcome["reason"]


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (_custom("raises"), "feature 'raises' (features.raises) raised KeyError"),
        (_derived("gives_nan"), "feature 'gives_nan' (features.gives_nan) returned NaN"),
    ],
)
def test_a_function_that_fails_is_named_without_its_values(tmp_path: Path, features: dict[str, Any], said: str) -> None:
    outcome = _outcome(_bench(tmp_path, features=features))
    assert outcome["status"] == "failed"
    assert said in outcome["reason"]
    assert "secret-value-19" not in outcome["reason"]


def _checked(bench: Workbench) -> str:
    result = bench.run("check", str(bench.folder))
    assert result.exit_code == 1, result.output
    return result.output


def test_a_column_known_later_is_no_feature_of_the_row(tmp_path: Path) -> None:
    columns = {
        "k": "string",
        "at": "timestamp",
        "known": "timestamp",
        "value": "float64",
        "result_at": "timestamp",
        "result": {"type": "float64", "known_at": "result_at"},
    }
    view = {"source": "data", "keys": {"k": "k"}, "boundary": "lt", "features": {"r": {"latest": "result"}}}
    bench = _bench(tmp_path, sources={"data": table_source(columns, ["k", "at"], ["k"])}, views={"v": view})
    said = _checked(bench)
    assert "data.result is known at 'result_at'" in said
    assert "could look ahead" in said


def test_the_target_is_no_feature_before_it_is_known(tmp_path: Path) -> None:
    view = {
        "source": "labels",
        "keys": {"label_id": "label_id"},
        "boundary": "le",
        "lookback": "1d",
        "features": {"y": {"latest": "target"}},
    }
    bench = _bench(
        tmp_path,
        views={"own": view},
        label_columns={"k": "string", "size": "int64", "later": "timestamp"},
        label={"carry": ["k"], "known_at": "later"},
    )
    assert "labels.target is known at 'later'" in _checked(bench)


@pytest.mark.parametrize("how", ["carried", "as a key"])
def test_a_label_column_known_later_is_no_input(tmp_path: Path, how: str) -> None:
    columns = {"k": {"type": "string", "known_at": "later"}, "size": "int64", "later": "timestamp"}
    label = {"carry": ["k", "size"] if how == "carried" else ["size"]}
    said = _checked(_bench(tmp_path, label_columns=columns, label=label))
    assert "column 'k' is read as an input, and is known at 'later', not at the observation" in said


def test_a_delay_that_would_wrap_is_refused(tmp_path: Path) -> None:
    columns = {"k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
    delay = {"delay": "106751990d", "reason": "far too long"}
    source = table_source(columns, ["k", "at"], ["k"], available_time=delay)
    assert "is longer than 3650000d" in _checked(_bench(tmp_path, sources={"data": source}))


def test_a_custom_feature_of_a_partitioned_source_says_how_far_it_looks_back(tmp_path: Path) -> None:
    bench = _bench(tmp_path, features=_custom("counts_labels", source="labels"))
    assert "features.custom.counts_labels: the partitioned source 'labels' needs a lookback" in _checked(bench)


def test_corrected_and_retracted_label_rows_count_once(tmp_path: Path) -> None:
    rows = [
        f"l1,{DAY}T01:00:00Z,a,1,0,0,false",
        f"l1,{DAY}T01:00:00Z,a,1,1,1,false",
        f"l2,{DAY}T02:00:00Z,b,1,1,0,false",
        f"l2,{DAY}T02:00:00Z,b,1,1,1,true",
        f"l3,{DAY}T03:00:00Z,a,1,1,0,false",
    ]
    bench = _bench(
        tmp_path,
        label_columns={"k": "string", "size": "int64", "n": "int64", "gone": "bool"},
        label_source={"sequence": "n", "deleted": "gone"},
    )
    (bench.folder / "labels.csv").write_text("label_id,t,k,size,target,n,gone\n" + "\n".join(rows) + "\n")
    outcome = _outcome(bench)
    assert outcome["excluded"] == {"superseded": 2, "deleted": 1}
    assert [(r["label_id"], r["target"]) for r in bench.values(DAY)] == [("l1", 1), ("l3", 1)]


def test_a_target_without_a_time_or_known_too_early_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        f"l1,{DAY}T01:00:00Z,a,1,1,{DAY}T05:00:00Z",
        f"l2,{DAY}T02:00:00Z,b,1,1,",
        f"l3,{DAY}T03:00:00Z,a,1,1,2026-02-01T00:00:00Z",
    ]
    bench = _bench(
        tmp_path,
        label_columns={"k": "string", "size": "int64", "later": "timestamp"},
        label={"carry": ["k", "size"], "known_at": "later"},
    )
    (bench.folder / "labels.csv").write_text("label_id,t,k,size,target,later\n" + "\n".join(rows) + "\n")
    outcome = _outcome(bench)
    assert outcome["excluded"] == {"target_without_known_time": 1, "known_before_observation": 1}
    assert outcome["rows"] == 1
