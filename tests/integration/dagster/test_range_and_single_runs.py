"""Ten days with day four bad: one range run and ten single runs end in the same catalog state."""

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml
from support.dagster_runs import catalog_state, events_text, run
from support.workbench import Workbench, write_workbench

DAYS = [f"2026-03-{day:02d}" for day in range(2, 12)]
BAD = DAYS[3]
CANARY = "canary-7f3a"
KEY = dg.AssetKey(["pipeline", "dataset_version", "labels"])
SNAPSHOT = dg.AssetKey(["pipeline", "feature_snapshot"])


def _bench(root: Path) -> Workbench:
    rows = [
        f"{d}-{i},{d}T{6 * i + 1:02d}:00:00Z,p{i % 2},{CANARY if d == BAD and i > 1 else 'fine'},{i}"
        for d in DAYS
        for i in range(4)
    ]
    view = {
        "source": "labels",
        "keys": {"person": "person"},
        "boundary": "lt",
        "features": {"sum": {"window": "target", "aggregate": "sum", "duration": "2d"}},
    }
    bench = write_workbench(
        root,
        sources={},
        views={"own": view},
        files={"labels.csv": "label_id,t,person,note,target\n" + "\n".join(rows) + "\n"},
        label_columns={"person": "string", "note": "string"},
        partition={"start": DAYS[0], "end": "2026-03-12"},
        label_keys=["label_id", "person"],
        label_quality={"max_quarantined_share": 0.1, "max_quarantined_partitions": 0.2},
    )
    rules = json.loads((bench.folder / "labels.suite.json").read_text())
    rules["expectations"].append(
        {
            "type": "expect_column_values_to_be_in_set",
            "kwargs": {"column": "note", "value_set": ["fine"]},
            "severity": "critical",
        }
    )
    (bench.folder / "labels.suite.json").write_text(json.dumps(rules))
    return bench


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as found:
        yield found


def test_one_range_run_and_ten_single_runs_agree(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    together, apart = _bench(tmp_path / "range"), _bench(tmp_path / "single")
    assert run(together, instance, DAYS).success, "a quarantined partition within the declared share stops nobody"
    results = {day: run(apart, instance, [day]).success for day in DAYS}
    assert [day for day, success in results.items() if not success] == [BAD], "alone, the bad day fails its check"
    state = catalog_state(together)
    assert state == catalog_state(apart)
    assert state[f"labels {BAD}"][0] == "quarantined"
    assert state[f"snapshot {BAD}"][:3] == ("refused", "input quarantined", (f"labels {BAD}",))
    published = [d for d in DAYS if state[f"snapshot {d}"][0] == "published"]
    assert published == [d for d in DAYS if d != BAD]


def test_a_range_run_shows_every_partition_and_one_check(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = _bench(tmp_path / "range")
    done = run(bench, instance, DAYS)
    for key in (KEY, SNAPSHOT):
        assert instance.get_materialized_partitions(key) == set(DAYS)
        records = instance.fetch_materializations(key, limit=50).records
        status = {r.partition_key: r.asset_materialization.metadata["status"].value for r in records}  # pyright: ignore[reportOptionalMemberAccess]
        assert status[BAD] == {KEY: "quarantined", SNAPSHOT: "refused"}[key]
        assert status[DAYS[0]] == {KEY: "released", SNAPSHOT: "published"}[key]
    entries = instance.all_logs(done.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    checks = [entry.asset_check_evaluation for entry in entries]
    quality = [c for c in checks if c is not None and c.check_name == "quality"]
    assert len(quality) == 1, "one check result for the whole range"
    table = quality[0].metadata["table_by_partition"].value
    assert [r.data["partition"] for r in table.records] == DAYS  # pyright: ignore
    assert "data:image/png;base64" in str(quality[0].metadata["plot"].value)


def test_no_value_of_the_data_reaches_dagster(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = _bench(tmp_path / "range")
    run(bench, instance, DAYS)
    run(bench, instance, [BAD])
    assert CANARY in (bench.folder / "labels.csv").read_text()
    stored = events_text(tmp_path / "dagster")
    assert "quarantined" in stored, "the search looks at what was stored"
    assert CANARY not in stored


@pytest.mark.parametrize("fault", ["transform", "delivery"])
def test_no_value_of_a_refused_delivery_reaches_dagster(
    tmp_path: Path, instance: dg.DagsterInstance, fault: str
) -> None:
    bench = _bench(tmp_path / "range")
    if fault == "transform":
        declared = yaml.safe_load((bench.folder / "defs.yaml").read_text())
        labels = declared["attributes"]["sources"]["labels"]
        labels |= {"raw": dict(labels["columns"]), "transform": "sources.fails"}
        (bench.folder / "defs.yaml").write_text(yaml.safe_dump(declared))
        (bench.folder / "sources.py").write_text(f"def fails(raw, lookups):\n    raise ValueError('{CANARY}')\n")
    else:
        file = bench.folder / "labels.csv"
        file.write_text(file.read_text() + f"x,2026-03-02T01:00:00Z,p0,fine,{CANARY}\n")
    result = run(bench, instance, DAYS)
    assert not result.success
    stored = events_text(tmp_path / "dagster")
    assert {"transform": "raised ValueError", "delivery": "The value is withheld here"}[fault] in stored
    assert CANARY not in stored.replace(str(bench.folder), "")


def test_a_repaired_day_is_published_and_its_neighbours_follow(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = _bench(tmp_path / "range")
    run(bench, instance, DAYS)
    before = catalog_state(bench)
    file = bench.folder / "labels.csv"
    file.write_text(file.read_text().replace(CANARY, "fine"))
    assert run(bench, instance, DAYS).success
    after = catalog_state(bench)
    assert after[f"snapshot {BAD}"][0] == "published"
    changed = [d for d in DAYS if before[f"snapshot {d}"] != after[f"snapshot {d}"]]
    assert changed == DAYS[3:6], "the day itself, and those whose two-day window reaches back to it"


def test_snapshots_in_any_order_have_equal_digests(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    forward, backward = _bench(tmp_path / "forward"), _bench(tmp_path / "backward")
    run(forward, instance, DAYS)
    run(backward, instance, DAYS, selection=["pipeline/dataset_version/labels"])
    for day in reversed(DAYS):
        run(backward, instance, [day], selection=["pipeline/feature_snapshot"])
    assert catalog_state(forward) == catalog_state(backward)


def test_a_second_run_changes_nothing(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = _bench(tmp_path / "range")
    run(bench, instance, DAYS)
    before = catalog_state(bench)
    size = sum(1 for p in (bench.home / "store").rglob("*") if p.is_file())
    assert run(bench, instance, DAYS).success
    assert catalog_state(bench) == before
    assert sum(1 for p in (bench.home / "store").rglob("*") if p.is_file()) <= size + 4, "plots of checks at most"


def test_a_refused_snapshot_alone_fails_by_name(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = _bench(tmp_path / "range")
    run(bench, instance, DAYS)
    result = run(bench, instance, [BAD], selection=["pipeline/feature_snapshot"])
    assert not result.success
    failure = next(e for e in result.all_events if e.is_step_failure)
    assert f"labels {BAD}" in str(failure.step_failure_data.user_failure_data.description)  # pyright: ignore
