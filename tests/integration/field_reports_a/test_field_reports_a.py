"""What people ran into with files, times and quality rules, tried as a person would: declaration, file, command."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pipelines import DatasetBench, not_null, source, suite

DELAY = {"delay": "1h", "reason": "a test"}


@pytest.fixture
def bench(tmp_path: Path) -> DatasetBench:
    return DatasetBench(tmp_path / "trial")


def timed(**more: object) -> dict[str, Any]:
    """A source of keyed readings with a zone or not."""
    column = {"type": "timestamp", **more}
    return source({"id": "string", "ts": column}, row_id=["id"], event_time="ts", available_time=DELAY)


def rules(column: str = "id") -> dict[str, Any]:
    return suite(not_null(column))


def test_field_A01_two_offsets_in_one_column(bench: DatasetBench) -> None:
    columns = {"meter": "string", "ts": "timestamp", "kwh": "float64"}
    bench.write(
        source(columns, row_id=["meter", "ts"], keys=["meter"], event_time="ts", available_time=DELAY),
        "meter,ts,kwh\nm1,2026-04-05T01:30:00+11:00,1\nm1,2026-04-05T02:30:00+11:00,2\n"
        "m1,2026-04-05T02:30:00+10:00,3\nm1,2026-04-05T03:30:00+10:00,4\n",
    )
    rows = bench.canonical()["rows"]
    hours = ["14:30", "15:30", "16:30", "17:30"]
    assert [(r["ts"], r["kwh"]) for r in rows] == [(f"2026-04-04T{h}:00Z", i) for i, h in enumerate(hours, 1)]
    (outcome,) = bench.ingest()
    assert (outcome["standing"], outcome["rows"], outcome["rows_quarantined"]) == ("released", 4, 0)


@pytest.mark.parametrize(
    ("zone", "data", "instants"),
    [
        ("America/Chicago", "id,ts\na,2015-11-01 01:00:03\n", ["2015-11-01T06:00:03Z", "2015-11-01T07:00:03Z"]),
        (
            "America/New_York",
            "id,ts\na,2016-11-06 01:19:54\nb,2016-11-06 01:34:52\nc,2016-11-06 01:28:25\n",
            ["2016-11-06T05:28:25Z", "2016-11-06T06:28:25Z"],
        ),
    ],
)
def test_field_A03_repeated_hour_is_ambiguous(bench: DatasetBench, zone: str, data: str, instants: list[str]) -> None:
    bench.write(timed(zone=zone), data)
    result = bench.run("ingest", str(bench.folder / "data.csv"))
    assert result.exit_code == 1
    assert "quarantined" in result.stdout
    assert "ambiguous_local_time" in result.stdout
    assert all(instant in result.stdout for instant in instants)
    assert bench.canonical()["rows"] == []


@pytest.mark.parametrize(("budget", "standing"), [(0.0, "quarantined"), (0.5, "released")])
def test_field_A05_spring_gap_rejects_one_row(bench: DatasetBench, budget: float, standing: str) -> None:
    declared = timed(zone="America/Denver") | {
        "quality": {"suite": "readings.suite.json", "max_quarantined_share": budget},
        "partition": {"column": "ts", "start": "2023-03-01"},
    }
    bench.write(declared, "id,ts\na,2023-03-12 01:45\nb,2023-03-12 02:00\nc,2023-03-12 03:00\n")
    seen = bench.canonical()
    assert [(r["id"], r["ts"]) for r in seen["rows"]] == [("a", "2023-03-12T08:45:00Z"), ("c", "2023-03-12T09:00:00Z")]
    (lost,) = seen["rejected"]
    assert (lost["file"], lost["row"], lost["column"], lost["code"], lost["value"]) == (
        "data.csv",
        2,
        "ts",
        "nonexistent_local_time",
        "2023-03-12 02:00",
    )
    (outcome,) = bench.ingest()
    assert (outcome["partition"], outcome["standing"], outcome["rows_rejected"]) == ("2023-03-12", standing, 1)


@pytest.mark.parametrize("partitioned", [False, True])
def test_field_A07_hour_24_with_minutes(bench: DatasetBench, partitioned: bool) -> None:
    declared = timed(zone="UTC")
    if partitioned:
        declared["partition"] = {"column": "ts", "start": "2015-11-01"}
    bench.write(declared, "id,ts\nu1,2015-11-14 24:08:33\nu2,2015-11-14 24:00:01\nu3,2015-11-14 24:00:00\n")
    seen = bench.canonical()
    assert [r["ts"] for r in seen["rows"]] == ["2015-11-15T00:00:00Z"]
    assert [(r["row"], r["code"], r["value"]) for r in seen["rejected"]] == [
        (1, "hour_24", "2015-11-14 24:08:33"),
        (2, "hour_24", "2015-11-14 24:00:01"),
    ]
    result = bench.run("ingest", str(bench.folder / "data.csv"))
    assert result.exit_code == (2 if partitioned else 1)
    assert "hour_24" in result.output


def test_field_A09_number_formats_per_column(bench: DatasetBench) -> None:
    data = "land;cases;diff;rate\nA;2.155;+546;19,47\nB;318;+7;8,9\n"
    plain = {"land": "string", "cases": "int64", "diff": "int64", "rate": "float64"}
    form = {"type": "csv", "delimiter": ";"}
    bench.write(source(plain, row_id=["land"], format=form), data)
    message = bench.refusal()
    assert "'2.155'" in message
    assert "row 1, column 'cases'" in message
    assert "a whole number" in message

    declared = {
        "land": "string",
        "cases": {"type": "int64", "thousands": "."},
        "diff": {"type": "int64", "plus_sign": True},
        "rate": {"type": "float64", "decimal": ","},
    }
    bench.write(source(declared, row_id=["land"], format=form), data)
    rows = bench.canonical()["rows"]
    assert [(r["cases"], r["diff"], r["rate"]) for r in rows] == [(2155, 546, 19.47), (318, 7, 8.9)]


def test_field_A11_equal_names_are_refused_with_both_positions(bench: DatasetBench) -> None:
    bench.write(source({"id": "string", "name": "string"}, row_id=["id"]), "id,id,name\n1,2,x\n")
    assert "'id' is written 2 times, as columns 1 and 2" in bench.refusal()
    columns = {"a": "string", "a.1": "int64"}
    bench.write(source(columns, row_id=["a"]), "a,a.1,a\n1,2,3\n")
    assert "columns 1 and 3" in bench.refusal()
    bench.write(source(columns, row_id=["a"]), "a,a.1\n1,2\n")
    assert bench.canonical()["rows"] == [{"a": "1", "a.1": 2}]


def test_field_A11_blanks_in_names_follow_the_declared_rule(bench: DatasetBench) -> None:
    data = "c1, c2, c3, c4\n1,2,3,4\n"
    stripped = {"c1": "string", "c2": "int64", "c3": "int64", "c4": "int64"}
    bench.write(source(stripped, row_id=["c1"]), data)
    assert "has blanks around it" in bench.refusal()
    bench.write(source(stripped, row_id=["c1"], format={"type": "csv", "header_blanks": "strip"}), data)
    seen = bench.canonical()
    assert seen["rows"] == [{"c1": "1", "c2": 2, "c3": 3, "c4": 4}]
    assert "blanks around ' c2' removed" in [d["what"] for d in seen["drift"]]
    kept = {"c1": "string", " c2": "int64", " c3": "int64", " c4": "int64"}
    bench.write(source(kept, row_id=["c1"], format={"type": "csv", "header_blanks": "keep"}), data)
    assert bench.canonical()["rows"] == [{"c1": "1", " c2": 2, " c3": 3, " c4": 4}]
    bench.write(
        source(stripped, row_id=["c1"], format={"type": "csv", "header_blanks": "strip"}), "c1, c2, c2, c4\n1,2,3,4\n"
    )
    assert "'c2' is written 2 times, as columns 2 and 3" in bench.refusal()


def test_field_A11_names_that_differ_by_case(bench: DatasetBench) -> None:
    columns = {"Temp": "string", "temp": "int64"}
    bench.write(source(columns, row_id=["Temp"]), "Temp,temp\n1,2\n")
    assert "by case only" in bench.refusal()
    bench.write(
        source(columns, row_id=["Temp"], format={"type": "csv", "case_only_difference": "distinct"}), "Temp,temp\n1,2\n"
    )
    assert bench.canonical()["rows"] == [{"Temp": "1", "temp": 2}]


def test_field_A13_codes_stay_text_in_every_partition(bench: DatasetBench) -> None:
    columns = {"zip": "string", "ts": "timestamp"}
    bench.write(
        source(
            columns,
            row_id=["zip", "ts"],
            keys=["zip"],
            event_time="ts",
            available_time=DELAY,
            partition={"column": "ts", "start": "2024-01-01"},
        ),
        "zip,ts\n01730,2024-01-01T10:00Z\n10115,2024-01-01T11:00Z\n01730-2603,2024-01-02T10:00Z\n01730,2024-01-02T11:00Z\n"
        "007,2024-01-02T12:00Z\n7,2024-01-02T13:00Z\n",
        rules=rules("zip"),
    )
    assert sorted({r["zip"] for r in bench.canonical()["rows"]}) == ["007", "01730", "01730-2603", "10115", "7"]
    assert [o["standing"] for o in bench.ingest()] == ["released", "released"]
    first, second = bench.show("2024-01-01"), bench.show("2024-01-02")
    assert first["schema_hash"] == second["schema_hash"]

    bench.write(source({"zip": "int64"}, row_id=["zip"]), "zip\n01730\n", rules=rules("zip"))
    assert "declare the column string" in bench.refusal()


FAR = [
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(9999, 12, 31, 2, tzinfo=UTC),
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2021, 6, 9, 3, 2, 37, tzinfo=UTC),
]


def parquet_source(bench: DatasetBench, table: pa.Table, partition: dict[str, str] | None = None) -> None:
    bench.folder.mkdir(parents=True, exist_ok=True)
    declared = source(
        {"id": "string", "valid_to": {"type": "timestamp", "zone": "UTC"}},
        row_id=["id"],
        event_time="valid_to",
        available_time=DELAY,
        format={"type": "parquet"},
        files=["far.parquet"],
        partition=partition,
    )
    bench.write(declared)
    pq.write_table(table, bench.folder / "far.parquet")


def far_table(kind: pa.DataType, times: list[datetime] = FAR) -> pa.Table:
    values = pa.array(times, type=pa.timestamp("us", tz="UTC")).cast(kind)
    return pa.table({"id": [str(i) for i in range(len(times))], "valid_to": values})


@pytest.mark.parametrize("form", ["us", "12 bytes", "ns"])
def test_field_A15_open_dates_are_exact(bench: DatasetBench, form: str) -> None:
    times = FAR[-1:] if form == "ns" else FAR
    kind = pa.timestamp("ns" if form == "ns" else "us", tz="UTC")
    parquet_source(bench, far_table(kind, times))
    if form == "12 bytes":
        pq.write_table(far_table(kind), bench.folder / "far.parquet", use_deprecated_int96_timestamps=True)
    rows = bench.canonical("far.parquet")["rows"]
    assert [r["valid_to"] for r in rows] == [t.isoformat().replace("+00:00", "Z") for t in times]
    (outcome,) = bench.ingest("far.parquet")
    assert outcome["standing"] == "released"
    if form != "ns":
        assert outcome["event_times"] == ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"]


def test_field_A15_no_calendar_over_eight_thousand_years(bench: DatasetBench) -> None:
    parquet_source(
        bench,
        far_table(pa.timestamp("us", tz="UTC")),
        partition={"column": "valid_to", "start": "0001-01-01"},
    )
    outcomes = {o["partition"]: o for o in bench.ingest("far.parquet")}
    assert sorted(outcomes) == ["0001-01-01", "2021-06-09", "9999-12-31"]
    assert outcomes["2021-06-09"]["standing"] == "released"
    assert outcomes["9999-12-31"]["standing"] == "failed"
    parquet_source(
        bench,
        far_table(pa.timestamp("us", tz="UTC")),
        partition={"column": "valid_to", "start": "0001-01-01", "end": "9999-12-31"},
    )
    assert (
        "more than 20000"
        in bench.headway("datasets", "ingest", "--pipeline", str(bench.folder), "--source", "readings").stderr
    )


def test_field_A17_two_digit_years_need_a_century(bench: DatasetBench) -> None:
    data = "id,d\na,12-01-06\nb,12-05-06\nc,20-12-06\nd,29-12-06\ne,01-01-69\nf,01-01-68\n"
    column = {"type": "date", "date_format": "%d-%m-%y"}
    bench.write(source({"id": "string", "d": column}, row_id=["id"]), data)
    message = bench.refusal()
    assert "defs.yaml" in message
    assert "two-digit years" in message
    bench.write(source({"id": "string", "d": {**column, "century_start": 1969}}, row_id=["id"]), data)
    assert [r["d"] for r in bench.canonical()["rows"]] == [
        "2006-01-12",
        "2006-05-12",
        "2006-12-20",
        "2006-12-29",
        "1969-01-01",
        "2068-01-01",
    ]
    bench.write(source({"id": "string", "d": {**column, "date_format": "DD-MM-YY"}}, row_id=["id"]), data)
    assert "strptime directives" in bench.refusal()


def test_field_A19_compound_key_with_a_null_part(bench: DatasetBench) -> None:
    columns = {"n": "string", "a": "int64", "b": "int64", "c": "int64"}
    data = "n,a,b,c\nx,1,,2\ny,1,,2\nz,1,1,1\n"
    unique = {"type": "expect_compound_columns_to_be_unique", "kwargs": {"column_list": ["a", "b", "c"]}}
    bench.write(source(columns, row_id=["n"]), data, rules=suite(unique))
    (outcome,) = bench.ingest()
    assert outcome["standing"] == "quarantined"
    assert outcome["rows_quarantined"] == 2
    assert sorted(r["n"] for r in bench.show()["kept_back"]) == ["x", "y"]

    unique["kwargs"]["ignore_row_if"] = "any_value_is_missing"
    bench.write(source(columns, row_id=["n"]), data, rules=suite(unique))
    (outcome,) = bench.ingest()
    (rule,) = outcome["expectations"]
    assert (rule["looked_at"], rule["passed_over"]) == (1, 2)

    bench.write(source(columns, row_id=["a", "b", "c"]), data, rules=suite(unique))
    (outcome,) = bench.ingest()
    assert outcome["standing"] == "quarantined"
    assert [(r["row"], r["column"], r["code"]) for r in outcome["rejected"]] == [
        (1, "b", "null_row_identity"),
        (2, "b", "null_row_identity"),
    ]


@pytest.mark.parametrize(
    ("rule", "field", "hint"),
    [
        ({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": ["a"]}}, "kwargs.column", "['a']"),
        ({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "amuont"}}, "kwargs.column", "'amount'"),
        ({"type": "expect_column_values_to_not_be_nul", "kwargs": {"column": "amount"}}, "type", "not_be_null'"),
        (
            {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "amount", "mostyl": 0.9}},
            "kwargs.mostyl",
            "'mostly'",
        ),
    ],
)
def test_field_A21_wrong_suites_are_refused_at_load(
    bench: DatasetBench, rule: dict[str, Any], field: str, hint: str
) -> None:
    bench.write(
        source({"id": "string", "amount": "int64"}, row_id=["id"]),
        "id,amount\na,1\nb,1\n",
        rules=suite(not_null("id"), rule),
    )
    message = bench.refusal()
    assert f"readings.suite.json, rule 2, {field}:" in message
    assert hint in message
    assert bench.versions() == []


def write_folder(bench: DatasetBench, order: list[str], x_of_third: list[int | None]) -> None:
    bench.write(
        source(
            {"x": {"type": "int64", "required": True}, "g": "float64"},
            row_id=["x"],
            format={"type": "parquet"},
            files=["parts/*.parquet"],
        ),
        rules=rules("x"),
    )
    folder = bench.folder / "parts"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    required = pa.field("x", pa.int32(), nullable=False)
    tables = [
        pa.table({"x": pa.array([1, 2], pa.int32())}, schema=pa.schema([required])),
        pa.table(
            {"x": pa.array([3], pa.int32()), "g": pa.array([0.5])},
            schema=pa.schema([required, pa.field("g", pa.float64())]),
        ),
        pa.table({"x": pa.array(x_of_third, pa.int32()), "g": pa.nulls(len(x_of_third))}),
    ]
    for name, table in zip(order, tables, strict=True):
        pq.write_table(table, folder / f"{name}.parquet")


def test_field_A23_a_folder_of_files_with_different_schemas(bench: DatasetBench) -> None:
    write_folder(bench, ["1", "2", "3"], [4, 5])
    forward = bench.digest("parts")
    seen = bench.canonical("parts")
    assert [(r["x"], r["g"]) for r in seen["rows"]] == [(1, None), (2, None), (3, 0.5), (4, None), (5, None)]
    assert [(d["file"], d["column"]) for d in seen["drift"]] == [("1.parquet", "g")]
    write_folder(bench, ["3", "2", "1"], [4, 5])
    assert bench.digest("parts") == forward

    write_folder(bench, ["1", "2", "3"], [4, None])
    (outcome,) = bench.ingest("parts")
    assert outcome["standing"] == "quarantined"
    assert (outcome["rejected"][0]["file"], outcome["rejected"][0]["column"]) == ("3.parquet", "x")


def test_field_A23_an_undeclared_column_is_reported(bench: DatasetBench) -> None:
    bench.write(source({"id": "string"}, row_id=["id"]), "id,extra\na,1\n")
    assert [(d["file"], d["column"]) for d in bench.canonical()["drift"]] == [("data.csv", "extra")]
    (outcome,) = bench.ingest()
    assert outcome["drift"] == ["data.csv: 'extra' in the file, not declared: left out"]
    bench.write(
        source({"id": "string"}, row_id=["id"], format={"type": "csv", "extra_columns": "refuse"}), "id,extra\na,1\n"
    )
    assert "column 'extra'" in bench.refusal()


def test_field_A25_line_breaks_inside_quotes(bench: DatasetBench) -> None:
    declared = source({"name": "string", "notes": "string"}, row_id=["name"])
    whole = b'name,notes\r\na,"l1\nl2"\r\nb,"x"'
    bench.write(declared, whole, rules=rules("name"))
    assert bench.canonical()["rows"] == [{"name": "a", "notes": "l1\nl2"}, {"name": "b", "notes": "x"}]
    for cut in (whole[:-1], whole[:-2], whole[:-4]):
        bench.write(declared, cut, rules=rules("name"))
        message = bench.refusal()
        assert "row 2" in message
        assert "truncated" in message
    assert bench.versions() == []


def test_field_A27_codes_after_a_spreadsheet(bench: DatasetBench) -> None:
    quality = {"suite": "readings.suite.json", "max_identity_loss": 0.5}
    declared = source({"code": "string"}, row_id=["code"], quality=quality)
    bench.write(declared, "code\n219E01\n219E02\n1914310000010100016\n", rules=rules("code"))
    assert [r["code"] for r in bench.canonical()["rows"]] == ["1914310000010100016", "219E01", "219E02"]
    assert bench.ingest()[0]["standing"] == "released"
    bench.write(declared, "code\n2.19E+03\n2.19E+04\n1.91431E+18\n", rules=rules("code"))
    (outcome,) = bench.ingest()
    assert outcome["standing"] == "quarantined"
    assert "identity_loss: 100.0%" in outcome["reason"]
    assert bench.show()["status"] == "quarantined"


MIXED = (
    "id,ts\na,2022-10-30 02:00\nb,2022-10-30T02:00:00+02:00\nc,2022-10-30T02:00:00Z\n"
    "d,2022-10-30 02:00 CET\ne,1667095200\n"
)


def test_field_A29_mixed_time_forms_are_refused_with_counts(bench: DatasetBench) -> None:
    bench.write(timed(), MIXED)
    message = bench.refusal()
    for counted in (
        "1 bare number",
        "2 date and time with offset",
        "1 date and time without offset",
        "1 time with a zone abbreviation",
    ):
        assert counted in message
    bench.write(timed(zone="Europe/Brussels"), MIXED)
    assert "'2022-10-30 02:00 CET' is a time with a zone abbreviation" in bench.refusal()
    bench.write(timed(zone="Asia/Tokyo"), "\n".join(MIXED.split("\n")[:4]) + "\n")
    assert [r["ts"] for r in bench.canonical()["rows"]] == [
        "2022-10-29T17:00:00Z",
        "2022-10-30T00:00:00Z",
        "2022-10-30T02:00:00Z",
    ]
    bench.write(timed(zone="Asia/Tokyo"), "id,ts\ne,1667095200\n")
    assert "bare number" in bench.refusal()
