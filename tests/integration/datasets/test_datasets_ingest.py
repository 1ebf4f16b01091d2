"""Ingestion through the command: what a person sees, and what the catalog and the store keep."""

import json
import logging
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pipelines import DatasetBench, not_null, source, suite, write_suite

from headway.catalog import Principal, open_catalog
from headway.catalog.invariants import check
from headway.datasets.reading import read_delivery
from headway.datasets.refusal import DeliveryRefused
from headway.datasets.rows import NotReleased, load_rows
from headway.errors import HeadwayError
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.services import open_services

DELAY = {"delay": "1h", "reason": "a test"}
BETWEEN = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "v", "min_value": 0, "max_value": 100}}
CANARY = "canary-7d2f41"


@pytest.fixture
def bench(tmp_path: Path) -> DatasetBench:
    return DatasetBench(tmp_path / "readings_of_a_day")


def daily(
    budget: float = 0.0,
    columns: dict[str, Any] | None = None,
    partition: dict[str, Any] | None = None,
    event_time: str = "ts",
    available_time: object = DELAY,
    privacy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Daily readings with an event time, and a budget for rows kept back."""
    return source(
        {"id": "string", "ts": "timestamp", "v": "float64", **(columns or {})},
        row_id=["id"],
        partition={"column": "ts", "start": "2024-01-01", "end": "2024-01-11", **(partition or {})},
        quality={"suite": "readings.suite.json", "max_quarantined_share": budget},
        event_time=event_time,
        available_time=available_time,
        privacy=privacy or {},
    )


def ten_days(bad_day: int = 0) -> str:
    """Two readings a day for ten days; on a bad day one of them is out of range."""
    lines = ["id,ts,v"]
    for day in range(1, 11):
        value = 999 if day == bad_day else 10
        lines += [f"a{day},2024-01-{day:02d}T06:00Z,{value}", f"b{day},2024-01-{day:02d}T18:00Z,20"]
    return "\n".join(lines) + "\n"


RULES_OF_ID = suite(not_null("id"))
RULES = suite(not_null("id"), BETWEEN)


def by_day(outcomes: list[dict[str, Any]]) -> dict[str, str]:
    return {o["partition"]: o["standing"] for o in outcomes}


def test_a_bad_day_does_not_stop_its_neighbours(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(bad_day=4), rules=RULES)
    result = bench.run("ingest")
    assert result.exit_code == 1
    states = by_day(bench.ingest())
    assert states.pop("2024-01-04") == "quarantined"
    assert set(states.values()) == {"released"}
    assert len(states) == 9
    assert "rule 2 expect_column_values_to_be_between 1" in bench.show("2024-01-04")["reason"]


def test_one_range_run_and_ten_single_runs_agree(bench: DatasetBench, tmp_path: Path) -> None:
    bench.write(daily(), ten_days(bad_day=4), rules=RULES)
    bench.run("ingest")
    single = DatasetBench(tmp_path / "other" / bench.folder.name)
    single.write(daily(), ten_days(bad_day=4), rules=RULES)
    for day in reversed(range(1, 11)):
        single.run("ingest", "--partition", f"2024-01-{day:02d}")

    def state(of: DatasetBench) -> list[tuple[str, ...]]:
        return [(v["partition"], v["status"], v["reason"], v["content_digest"]) for v in of.versions()]

    assert state(bench) == state(single)
    for day in (3, 4):
        key = f"2024-01-{day:02d}"
        assert bench.show(key)["report"] == single.show(key)["report"]


def test_a_second_run_writes_nothing(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(), rules=RULES)
    bench.run("ingest")
    before = sorted(p for p in (bench.home / "store").rglob("*") if p.is_file())
    outcomes = bench.ingest()
    assert {o["status"] for o in outcomes} == {"up_to_date"}
    assert sorted(p for p in (bench.home / "store").rglob("*") if p.is_file()) == before
    assert {v["version"] for v in bench.versions()} == set(range(1, 11))


def test_other_row_order_is_the_same_version(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(), rules=RULES)
    bench.run("ingest")
    header, *rows = ten_days().splitlines()
    bench.write(daily(), "\n".join([header, *reversed(rows)]), rules=RULES)
    assert {o["status"] for o in bench.ingest()} == {"up_to_date"}


def test_a_correction_makes_a_version_of_one_day(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(), rules=RULES)
    bench.run("ingest")
    bench.write(daily(), ten_days().replace("a5,2024-01-05T06:00Z,10", "a5,2024-01-05T06:00Z,11"), rules=RULES)
    changed = {o["partition"]: o["version"] for o in bench.ingest() if o["status"] != "up_to_date"}
    assert changed == {"2024-01-05": 11}


def test_a_changed_suite_validates_again_and_rewrites_nothing(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(bad_day=4), rules=RULES)
    bench.run("ingest")
    versions = {v["partition"]: (v["version"], v["content_digest"]) for v in bench.versions()}
    wider = {**BETWEEN, "kwargs": {"column": "v", "min_value": 0, "max_value": 1000}}
    write_suite(bench.folder, suite(not_null("id"), wider))
    assert set(by_day(bench.ingest()).values()) == {"released"}
    assert {v["partition"]: (v["version"], v["content_digest"]) for v in bench.versions()} == versions
    narrow = {**BETWEEN, "kwargs": {"column": "v", "min_value": 0, "max_value": 100}}
    write_suite(bench.folder, suite(not_null("id"), narrow, not_null("ts")))
    states = by_day(bench.ingest())
    assert states.pop("2024-01-04") == "retired"
    assert set(states.values()) == {"released"}
    assert by_day(bench.ingest())["2024-01-04"] == "retired"
    write_suite(bench.folder, suite(not_null("id"), wider))
    assert set(by_day(bench.ingest()).values()) == {"released"}, "the slip in the suite is mended"


def test_rows_within_the_budget_are_kept_back_and_the_rest_released(bench: DatasetBench) -> None:
    bench.write(daily(budget=0.5), ten_days(bad_day=4), rules=RULES)
    assert set(by_day(bench.ingest()).values()) == {"released"}
    shown = bench.show("2024-01-04")
    assert [(r["id"], r["_reason"]) for r in shown["kept_back"]] == [
        ("a4", "rule 2 expect_column_values_to_be_between")
    ]
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        version = services.catalog.current(services.principal, "readings_of_a_day/readings", "2024-01-04")
        assert version is not None
        assert load_rows(services, version).column("id").to_pylist() == ["b4"]
        assert version.rows == 2


def test_a_quarantined_version_is_refused_by_name(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(bad_day=4), rules=RULES)
    bench.run("ingest")
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        version = services.catalog.current(services.principal, "readings_of_a_day/readings", "2024-01-04")
        assert version is not None
        with pytest.raises(NotReleased, match="readings_of_a_day/readings 2024-01-04 is quarantined"):
            load_rows(services, version)


def test_the_catalog_and_the_store_agree_afterwards(bench: DatasetBench) -> None:
    bench.write(daily(budget=0.5), ten_days(bad_day=4), rules=RULES)
    bench.run("ingest")
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        findings = check(services.catalog, services.principal, services.store)
        assert [f for f in findings if not f.ok] == []


def test_the_text_of_an_ingest_says_drift_and_the_hint_about_empty_days_once(bench: DatasetBench) -> None:
    bench.write(daily(), "id,ts,v,more\na,2024-01-01T06:00Z,1,x\nb,2024-01-02T06:00Z,1,x\n", rules=RULES)
    whole = bench.run("ingest").output
    assert "2 released" in whole
    assert "8 failed" in whole
    assert whole.count("drift: data.csv: 'more' in the file, not declared: left out") == 1
    assert whole.count("hint: ") == 1
    assert "--partition" in whole
    assert "`expected_empty`" in whole
    bench.write(daily(), "id,ts,v,more\na,2024-01-01T07:00Z,1,x\n", rules=RULES)
    few = bench.run("ingest", "--partition", "2024-01-01", "--partition", "2024-01-02").output
    assert "hint: " not in few
    assert "drift: " in few


def test_an_expected_empty_partition_is_released_and_an_unexpected_one_fails(bench: DatasetBench) -> None:
    without = "\n".join(line for line in ten_days().splitlines() if "-05T" not in line and "-06T" not in line)
    bench.write(daily(partition={"expected_empty": ["2024-01-05"]}), without, rules=RULES)
    outcomes = {o["partition"]: o for o in bench.ingest_declared()}
    assert (outcomes["2024-01-05"]["standing"], outcomes["2024-01-05"]["reason"]) == ("released", "no_data_published")
    assert outcomes["2024-01-06"]["standing"] == "failed"
    assert "2024-01-06: the delivery has no rows" in outcomes["2024-01-06"]["reason"]
    assert outcomes["2024-01-07"]["standing"] == "released"


@pytest.mark.parametrize("data", ["", "\n", "id,ts,v\n"])
def test_empty_input(bench: DatasetBench, data: str) -> None:
    bench.write(source({"id": "string", "v": "float64"}, row_id=["id"]), data)
    result = bench.run("ingest", str(bench.folder / "data.csv"))
    assert result.exit_code != 0
    assert "empty" in result.output or "header" in result.output or "no rows" in result.output
    assert bench.versions() == []


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("id,ts\na,2024-01-01T00:00Z\n", "column 'v': is declared and missing"),
        ("id,ts,w\na,2024-01-01T00:00Z,1\n", "column 'v': is declared and missing"),
        ("id,ts,v\na,2024-01-01T00:00Z,one\n", "row 1, column 'v': 'one'"),
    ],
)
def test_missing_renamed_and_wrongly_typed_columns_are_refused(bench: DatasetBench, data: str, told: str) -> None:
    bench.write(daily(), data, rules=RULES)
    assert told in bench.refusal()
    assert bench.versions() == []


@pytest.mark.parametrize("rules", [{"name": "x", "expectations": []}, {"name": "x"}])
def test_a_suite_without_rules_proves_nothing(bench: DatasetBench, rules: dict[str, Any]) -> None:
    bench.write(daily(), ten_days(), rules=RULES)
    write_suite(bench.folder, rules)
    assert "at least one rule" in bench.refusal()
    assert bench.versions() == []


def test_a_failing_rule_about_the_table_quarantines_whatever_the_budget(bench: DatasetBench) -> None:
    count = {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 3}}
    bench.write(daily(budget=1.0), ten_days(), rules=suite(count))
    outcomes = bench.ingest()
    assert {o["standing"] for o in outcomes} == {"quarantined"}
    assert outcomes[0]["reason"] == "rule 1 expect_table_row_count_to_be_between: observed 2"


def test_a_warning_is_reported_and_does_not_quarantine(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(bad_day=4), rules=suite(not_null("id"), {**BETWEEN, "severity": "warning"}))
    outcome = next(o for o in bench.ingest() if o["partition"] == "2024-01-04")
    assert (outcome["standing"], outcome["rows_quarantined"]) == ("released", 0)
    assert [(r["passed"], r["failing"]) for r in outcome["expectations"]] == [(True, 0), (False, 1)]


TWO_CLOCKS = {"columns": {"known": "timestamp"}, "available_time": "known"}


@pytest.mark.parametrize(
    ("rows", "declared", "reason", "kept_back"),
    [
        (["a,2024-01-01T06:00Z,1", "a,2024-01-01T06:00Z,2", "b,2024-01-01T07:00Z,3"], {}, "ambiguous_duplicate", "aa"),
        (
            ["a,2024-01-01T06:00Z,1,2024-01-01T05:00Z", "b,2024-01-01T06:00Z,1,2024-01-01T06:00Z"],
            TWO_CLOCKS,
            "event_after_availability",
            "a",
        ),
        (
            ["a,2024-01-01T06:00Z,1,2024-01-01T06:00Z", "b,2024-01-01T06:00Z,1,2024-01-01T09:00Z"],
            {
                "columns": {"done": "timestamp"},
                "event_time": "done",
                "available_time": "done",
                "partition": {"before": "1h", "after": "2h"},
            },
            "outside_reach",
            "b",
        ),
    ],
)
def test_rows_that_cannot_be_true_are_kept_back(
    bench: DatasetBench, rows: list[str], declared: dict[str, Any], reason: str, kept_back: str
) -> None:
    header = "id,ts,v" + "".join(f",{name}" for name in declared.get("columns", {}))
    bench.write(daily(budget=0.9, **declared), "\n".join([header, *rows]), rules=suite(not_null("id")))
    (outcome,) = bench.ingest()
    assert outcome["standing"] == "released"
    found = [(r["id"], r["_reason"]) for r in bench.show("2024-01-01")["kept_back"]]
    assert found == [(letter, reason) for letter in kept_back]


def test_exact_duplicates_are_counted_and_harmless(bench: DatasetBench) -> None:
    row = "a,2024-01-01T06:00Z,1"
    bench.write(daily(), f"id,ts,v\n{row}\n{row}\n", rules=RULES)
    (outcome,) = bench.ingest()
    assert (outcome["standing"], outcome["rows"], outcome["exact_duplicates"]) == ("released", 2, 1)


def test_future_and_unfinished_partitions_are_refused(bench: DatasetBench) -> None:
    bench.write(daily(partition={"end": None}), ten_days(), rules=RULES)
    result = bench.run("ingest", "--partition", "2127-04-08")
    assert result.exit_code == 2
    assert "it closes at 2127-04-09T00:00:00Z" in result.stderr
    result = bench.run("ingest", "--partition", "2023-04-08")
    assert "outside the calendar" in result.stderr


def test_rows_outside_the_calendar_are_not_lost_silently(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days() + "z,2025-01-01T00:00Z,1\n", rules=RULES)
    assert "1 of 21 rows belong to no partition" in bench.refusal()
    assert bench.versions() == []


def test_personal_columns_are_treated_before_anything_is_stored(bench: DatasetBench) -> None:
    declared = daily(
        columns={"name": "string", "phone": "string"},
        privacy={"disposition": "restricted", "personal": {"name": "hash", "phone": "drop"}},
    )
    data = f"id,ts,v,name,phone\na,2024-01-01T06:00Z,1,{CANARY},{CANARY}\nb,2024-01-01T07:00Z,1,{CANARY},x\n"
    bench.write(declared, data, rules=RULES)
    assert bench.ingest()[0]["standing"] == "released"
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        version = services.catalog.current(services.principal, "readings_of_a_day/readings", "2024-01-01")
        assert version is not None
        table = load_rows(services, version)
    assert "phone" not in table.column_names
    first, second = table.column("name").to_pylist()
    assert first == second
    assert len(first) == 64
    assert list_files_with(bench.home, CANARY) == []


@pytest.mark.parametrize("transformed", [False, True])
def test_personal_values_of_rejected_rows_are_shown_to_nobody(bench: DatasetBench, transformed: bool) -> None:
    spelt_twice = f"{CANARY}e\u0301"
    personal = {"name": {"type": "string"}, "born": {"type": "timestamp", "zone": "America/New_York"}}
    declared = daily(
        budget=0.9,
        columns=personal,
        privacy={"personal": {"name": "hash", "born": "drop"}},
    ) | {"keys": ["name"]}
    header = "id,ts,v,name,born"
    code = None
    if transformed:
        header = "id,ts,v,who,birth"
        names = {"who": "name", "birth": "born"}
        raw = {"id": {"type": "string"}, "ts": {"type": "timestamp"}, "v": {"type": "float64"}}
        raw |= {told: personal[name] for told, name in names.items()}
        declared |= {"raw": raw, "transform": "sources.named"}
        code = (
            f"def named(table, lookups):\n    return table.rename_columns({dict(id='id', ts='ts', v='v', **names)})\n"
        )
    data = (
        f"{header}\na,2024-01-01T06:00Z,1,{spelt_twice},2024-01-01 01:00\n"
        "b,2024-01-01T06:00Z,1,x,2024-03-10 02:30\nc,2024-01-01T06:00Z,1,y,2024-11-03 01:30\n"
        "d,2024-01-01T06:00Z,1,z,2024-01-01 01:00\n"
    )
    bench.write(declared, data, rules=RULES, code=code)
    file = str(bench.folder / "data.csv")
    answers = [bench.run("canonical", file), bench.run("canonical", file, "--json"), bench.run("ingest", file)]
    for answer in answers:
        assert "key_not_nfc" in answer.output
        assert "nonexistent_local_time" in answer.output
        assert "ambiguous_local_time" in answer.output
        assert "withheld: personal" in answer.output
        assert not any(shown in answer.output for shown in (CANARY, "2024-03-10", "2024-11-03"))
    assert list_files_with(bench.home, CANARY) == []
    (bench.folder / "data.csv").write_text(f"{header}\na,2024-01-01T06:00Z,1,x,{CANARY}\n")
    refused = bench.refusal()
    assert "withheld: personal" in refused
    assert CANARY not in refused


@pytest.mark.parametrize("code", [None, "def as_it_is(table, lookups):\n    return table\n"])
def test_personal_values_are_not_in_the_trace_of_a_refusal(bench: DatasetBench, code: str | None) -> None:
    secret = 2**63 + 4711
    columns = {"id": "string", "born": "int64"}
    declared = source(columns, row_id=["id"], files=["data.parquet"], privacy={"personal": {"born": "drop"}})
    declared["format"] = {"type": "parquet"}
    born = pa.array([secret], pa.uint64())
    if code is not None:
        born = pa.array([str(secret)])
        declared["raw"] = {"id": {"type": "string"}, "born": {"type": "string"}}
        declared["transform"] = "sources.as_it_is"
    bench.write(declared, rules=RULES_OF_ID, code=code)
    pq.write_table(pa.table({"id": ["a"], "born": born}), bench.folder / "data.parquet")
    with pytest.raises(HeadwayError) as caught:
        read_delivery(load_pipeline(bench.folder), "readings")
    assert "column 'born'" in str(caught.value)
    assert str(secret) not in "".join(traceback.format_exception(caught.value))


def test_a_null_sequence_rejects_its_row_within_the_budget(bench: DatasetBench) -> None:
    declared = daily(columns={"seq": "int64"}, budget=0.5) | {"sequence": "seq"}
    bench.write(declared, "id,ts,v,seq\na,2024-01-01T06:00Z,1,1\nb,2024-01-01T06:00Z,1,\n", rules=RULES)
    (outcome,) = bench.ingest()
    assert (outcome["standing"], outcome["rows"], outcome["rows_rejected"]) == ("released", 1, 1)
    assert [(r["row"], r["column"], r["code"]) for r in outcome["rejected"]] == [(2, "seq", "null_sequence")]


def list_files_with(folder: Path, text: str) -> list[str]:
    """Files that hold a text, also inside Parquet pages."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if data[:4] == b"PAR1":
            data += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
        if text.encode() in data:
            found.append(str(path.relative_to(folder)))
    return found


def test_sample_values_never_reach_catalog_metadata_or_logs(
    bench: DatasetBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Failing, rejected, duplicate and drifting values: they lie in the stored rows and nowhere else."""
    caplog.set_level(logging.DEBUG)
    rules = suite(
        not_null("id"),
        {"type": "expect_column_values_to_match_regex", "kwargs": {"column": "note", "regex": "^ok$"}},
        {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "note", "value_set": ["ok"]}},
        {
            "type": "expect_column_distinct_values_to_be_in_set",
            "kwargs": {"column": "note", "value_set": ["ok"]},
            "severity": "warning",
        },
    )
    declared = daily(budget=0.9, columns={"note": "string", "at": {"type": "timestamp", "zone": "America/New_York"}})
    data = (
        f"id,ts,v,note,at,{'extra'}\n"
        f"a,2024-01-01T06:00Z,1,{CANARY},2024-01-01 01:00,{CANARY}\n"
        f"b,2024-01-01T07:00Z,1,ok,2024-01-01 01:00,x\n"
        f"b,2024-01-01T07:00Z,1,{CANARY}2,2024-01-01 01:00,x\n"
        f"c,2024-01-01T08:00Z,1,{CANARY}3,2024-03-10 02:30,x\n"
    )
    bench.write(declared, data, rules=rules)
    (outcome,) = bench.ingest()
    assert (outcome["rows_quarantined"], outcome["rows_rejected"]) == (3, 1)
    version = bench.show("2024-01-01")
    stored = version["metadata"]
    assert CANARY not in json.dumps([version["report"], version["reason"], stored])
    assert CANARY not in caplog.text
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        current = services.catalog.current(services.principal, "readings_of_a_day/readings", "2024-01-01")
        assert current is not None
        rows_blob = next(b.digest for b in current.blobs if b.media_type == "application/vnd.apache.parquet")
    assert list_files_with(bench.home, "2024-03-10 02:30") == []
    holders = list_files_with(bench.home, CANARY)
    assert holders == [f"store/sha256/{rows_blob[7:9]}/{rows_blob[9:]}"]


def test_a_refusal_has_a_text_without_values(bench: DatasetBench) -> None:
    bench.write(daily(), f"id,ts,v\na,2024-01-01T06:00Z,{CANARY}\n", rules=RULES)
    with pytest.raises(DeliveryRefused) as caught:
        read_delivery(load_pipeline(bench.folder), "readings")
    assert CANARY in str(caught.value)
    assert CANARY not in caught.value.redacted()
    assert "row 1, column 'v'" in caught.value.redacted()


def test_another_tenant_sees_nothing(bench: DatasetBench) -> None:
    bench.write(daily(), ten_days(), rules=RULES)
    bench.run("ingest")
    catalog = open_catalog(f"sqlite:///{bench.home / 'catalog.db'}")
    other = Principal(tenant="other", actor="somebody")
    catalog.ensure_tenant(other)
    assert catalog.versions(other, "readings_of_a_day/readings") == []
    catalog.close()
