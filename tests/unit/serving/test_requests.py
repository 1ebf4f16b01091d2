"""Requests are taken exactly as declared, in both forms, or refused by row, field and value."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.declaration import PipelineSpec
from headway.loading import load_pipeline
from headway.serving import requests as module
from headway.serving.requests import NotServed, RequestsRefused, read_requests

GOOD: dict[str, Any] = {
    "carrier": "UA",
    "flight": 1545,
    "origin": "EWR",
    "dest": "IAH",
    "tailnum": "N14228",
    "sched_dep_time": "2013-06-01T05:15:00-04:00",
    "sched_arr_time": "2013-06-01T12:19:00Z",
}
MOMENT = pa.timestamp("us", tz="UTC")


@pytest.fixture(scope="module")
def flights() -> PipelineSpec:
    return load_pipeline("flight_delay").spec


def _table(*rows: dict[str, Any]) -> pa.Table:
    """Parquet rows from JSON ones."""
    table = pa.Table.from_pylist(list(rows))
    for name in ("sched_dep_time", "sched_arr_time"):
        if name in table.column_names:
            moments = pa.array([pa.scalar(r[name]).as_py() for r in rows]).cast(MOMENT)
            table = table.set_column(table.column_names.index(name), name, moments)
    return table


def _json(folder: Path, document: object) -> Path:
    file = folder / "requests.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def _parquet(folder: Path, table: pa.Table) -> Path:
    file = folder / "requests.parquet"
    pq.write_table(table, file)
    return file


def _refusal(file: Path, spec: PipelineSpec) -> str:
    with pytest.raises(RequestsRefused) as refused:
        read_requests(file, spec)
    return str(refused.value)


def test_both_forms_give_the_same_table(tmp_path: Path, flights: PipelineSpec) -> None:
    wrapped = read_requests(_json(tmp_path, {"requests": [GOOD]}), flights)
    listed = read_requests(_json(tmp_path, [GOOD]), flights)
    packed = read_requests(_parquet(tmp_path, _table(GOOD)), flights)
    assert wrapped.equals(listed)
    assert packed.equals(listed)
    assert listed.column_names == list(GOOD)
    assert str(listed.column("sched_dep_time")[0].as_py()) == "2013-06-01 09:15:00+00:00"


def test_field_F07_names_decide_and_never_positions(tmp_path: Path, flights: PipelineSpec) -> None:
    mixed = dict(reversed(GOOD.items()))
    expected = read_requests(_json(tmp_path, [GOOD]), flights)
    assert read_requests(_json(tmp_path, [mixed]), flights).equals(expected)
    assert read_requests(_parquet(tmp_path, _table(mixed)), flights).equals(expected)
    without = {n: v for n, v in GOOD.items() if n != "tailnum"}
    for file in (_json(tmp_path, [without]), _parquet(tmp_path, _table(without))):
        assert read_requests(file, flights).column("tailnum").to_pylist() == [None]
    lacking = {n: v for n, v in GOOD.items() if n != "carrier"}
    assert "carrier: the required field is missing" in _refusal(_json(tmp_path, [GOOD, lacking]), flights)
    assert "carrier: the required column is missing" in _refusal(_parquet(tmp_path, _table(lacking)), flights)
    for file in (_json(tmp_path, [{**GOOD, "extra": 1}]), _parquet(tmp_path, _table({**GOOD, "extra": 1}))):
        assert "'extra': is no field of a request" in _refusal(file, flights)
    text = json.dumps([GOOD]).replace('"carrier": "UA"', '"carrier": "UA", "carrier": "AA"')
    assert "row 1, 'carrier': the field stands twice" in _refusal(_json(tmp_path, text), flights)
    twice = _table(GOOD).append_column("carrier", pa.array(["AA"]))
    assert "stand twice" in _refusal(_parquet(tmp_path, twice), flights)
    unnamed = _refusal(_json(tmp_path, [list(GOOD.values())]), flights)
    assert "row 1: a list where an object belongs" in unnamed
    assert "missing" not in unnamed


@pytest.mark.parametrize(
    "name", ["plane_age", "weather_at_origin__temp", "origin_arrivals__1h__event_time", "plane__incomplete"]
)
def test_features_are_refused_by_name(tmp_path: Path, flights: PipelineSpec, name: str) -> None:
    for file in (_json(tmp_path, [{**GOOD, name: 1.0}]), _parquet(tmp_path, _table({**GOOD, name: 1.0}))):
        told = _refusal(file, flights)
        assert name in told
        assert "Headway computes features itself" in told


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("sched_dep_time", "2013-06-01T05:15:00", "no ISO 8601 time with a zone"),
        ("sched_dep_time", "2013-06-01", "no ISO 8601 time with a zone"),
        ("sched_dep_time", "2013-06-01T05:15:00.1234567Z", "at most six decimals"),
        ("sched_dep_time", "2013-02-30T05:15:00Z", "is no time"),
        ("sched_dep_time", "2013-06-01T05:15:60Z", "is no time"),
        ("sched_dep_time", 1370063700, "no ISO 8601 time with a zone"),
        ("sched_dep_time", None, "the required field is null"),
        ("flight", 1545.0, "a decimal number, needed is a whole number"),
        ("flight", "1545", "text, needed is a whole number"),
        ("flight", True, "a boolean, needed is a whole number"),
        ("flight", 2**63, "does not fit int64"),
        ("carrier", 7, "a whole number, needed is text"),
        ("carrier", {"a": 1}, "an object, needed is text"),
        ("carrier", "U\u0041\u030a", "normal form C"),
        ("carrier", "\ud800", "surrogate"),
        ("tailnum", "N" * 1001, "the limit is 1,000"),
    ],
)
def test_a_wrong_value_is_named_with_row_field_and_remedy(
    tmp_path: Path, flights: PipelineSpec, field: str, value: object, said: str
) -> None:
    told = _refusal(_json(tmp_path, [GOOD, {**GOOD, field: value}]), flights)
    assert f"row 2, {field}:" in told
    assert said in told
    assert ";" in told.partition(said)[2] + ";", "a remedy follows"


def test_all_rows_are_looked_at_before_the_refusal(tmp_path: Path, flights: PipelineSpec) -> None:
    rows = [{**GOOD, "flight": "x"}, GOOD, {**GOOD, "origin": None, "late": 1}]
    with pytest.raises(RequestsRefused) as refused:
        read_requests(_json(tmp_path, rows), flights)
    assert [(p.row, p.field) for p in refused.value.problems] == [(1, "flight"), (3, "'late'"), (3, "origin")]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1.0]), "flight: the column holds double, needed is int64"),
        (pa.array([2**63], pa.uint64()), "flight: a value does not fit int64"),
    ],
)
def test_parquet_types_are_not_guessed(tmp_path: Path, flights: PipelineSpec, column: pa.Array, said: str) -> None:
    table = _table(GOOD)
    assert said in _refusal(_parquet(tmp_path, table.set_column(1, "flight", column)), flights)


def test_parquet_times_need_a_zone_and_whole_microseconds(tmp_path: Path, flights: PipelineSpec) -> None:
    table = _table(GOOD)
    at = table.column_names.index("sched_dep_time")
    naive = table.column(at).cast(pa.timestamp("us"))
    assert "without a zone" in _refusal(_parquet(tmp_path, table.set_column(at, "sched_dep_time", naive)), flights)
    fine = pa.array([1_370_063_700_000_000_001], pa.timestamp("ns", tz="UTC"))
    assert "does not fit" in _refusal(_parquet(tmp_path, table.set_column(at, "sched_dep_time", fine)), flights)
    hour = pa.array([1_370_063_700], pa.timestamp("s", tz="America/New_York"))
    taken = read_requests(_parquet(tmp_path, table.set_column(at, "sched_dep_time", hour)), flights)
    assert taken.column("sched_dep_time").cast(pa.int64()).to_pylist() == [1_370_063_700_000_000]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no requests"),
        ('{"requests": []}', "holds no requests"),
        ('{"requests": [{}], "more": 1}', "members ['requests', 'more']"),
        ("7", "no list of rows"),
        ('[{"flight": NaN}]', "NaN is no JSON number"),
        ('[{"flight": 1e999}]', "a decimal number, needed is a whole number"),
        ("[" * 100_000 + "]" * 100_000, "nested far deeper"),
        ("[" + "[]," * 250_000 + "[]]", "more than 100,000 rows can hold"),
        ("[{}," + "0," * 4_000_000 + "0]", "more than 100,000 rows can hold"),
        ('[{"flight": ' + "9" * 5_000 + "}]", "not JSON"),
        ('[{"flight": 1', "not JSON"),
    ],
)
def test_a_document_that_is_no_list_of_flat_rows_is_refused(
    tmp_path: Path, flights: PipelineSpec, text: str, said: str
) -> None:
    assert said in _refusal(_json(tmp_path, text), flights)


def test_files_are_limited_before_they_are_parsed(
    tmp_path: Path, flights: PipelineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = _parquet(tmp_path, _table(*[GOOD] * 3).set_column(0, "carrier", pa.array(["x" * 100_000] * 3)))
    monkeypatch.setattr(module, "MAX_UNPACKED", 1_000)
    assert "unpacks to" in _refusal(bomb, flights)
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    assert "3 requests, the limit is 2" in _refusal(bomb, flights)
    assert "3 requests, the limit is 2" in _refusal(_json(tmp_path, [GOOD] * 3), flights)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    assert "the limit is 10" in _refusal(bomb, flights)


def test_other_files_are_refused(tmp_path: Path, flights: PipelineSpec) -> None:
    (tmp_path / "a.csv").write_text("carrier\nUA\n")
    (tmp_path / "b.parquet").write_text("no parquet")
    (tmp_path / "c.json").write_bytes(json.dumps([GOOD]).encode("utf-16"))
    assert ".csv" in _refusal(tmp_path / "a.csv", flights)
    assert "not Parquet" in _refusal(tmp_path / "b.parquet", flights)
    assert "not UTF-8" in _refusal(tmp_path / "c.json", flights)
    assert "no such file" in _refusal(tmp_path / "none.json", flights)
    assert "no such file" in _refusal(tmp_path / "folder.json", flights)


def test_a_pipeline_without_serving_cannot_be_asked(tmp_path: Path, flights: PipelineSpec) -> None:
    with pytest.raises(NotServed):
        read_requests(_json(tmp_path, [GOOD]), flights.model_copy(update={"serving": None}))


def test_a_personal_value_is_withheld_from_refusals(tmp_path: Path, flights: PipelineSpec) -> None:
    source = flights.sources["flights"]
    private = source.privacy.model_copy(update={"personal": {"tailnum": "hash"}})
    sources = {**flights.sources, "flights": source.model_copy(update={"privacy": private})}
    spec = flights.model_copy(update={"sources": sources})
    secret = "N-SECRET" + "x" * 1_000
    for file in (
        _json(tmp_path, [{**GOOD, "tailnum": secret}]),
        _parquet(tmp_path, _table({**GOOD, "tailnum": secret})),
    ):
        told = _refusal(file, spec)
        assert "withheld" in told
        assert "SECRET" not in told


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([]) | st.just({})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(st.sampled_from([*GOOD, "month", "x", ""]), _VALUES))
def test_any_row_is_taken_whole_or_refused(tmp_path: Path, flights: PipelineSpec, row: dict[str, Any]) -> None:
    file = _json(tmp_path, [{**GOOD, **row}])
    try:
        table = read_requests(file, flights)
    except RequestsRefused:
        return
    assert table.num_rows == 1
    for name, value in row.items():
        if not name.startswith("sched"):
            assert table.column(name)[0].as_py() == value
