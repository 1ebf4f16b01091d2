"""Reading: the fast and the strict reader agree, declared forms hold, and rows are told from their origin."""

import csv
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import source, write_pipeline

from headway.datasets import delimited
from headway.datasets.canonical import TransformFault
from headway.datasets.delimited import read_delimited
from headway.datasets.files import SourceMissing
from headway.datasets.reading import Delivery, UnknownSource, read_delivery
from headway.datasets.refusal import DeliveryRefused
from headway.datasets.text import CellForm, parse_text
from headway.declaration import ColumnSpec, CsvFormat
from headway.loading import load_pipeline

CELL = st.text(st.characters(exclude_characters='"\r\n,\0\ufeff', exclude_categories=["Cs"]), max_size=5)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(CELL, CELL), max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_the_fast_and_the_strict_reader_agree(rows: list[tuple[str, str]], line_end: str, last_end: bool) -> None:
    text = line_end.join(",".join(r) for r in [("a", "b"), *rows]) + (line_end if last_end else "")
    form = CsvFormat()
    fast = delimited._fast_columns(text, 2, form)
    strict = delimited._strict_columns(text, 2, "f", form)
    if fast is not None:
        assert [c.to_pylist() for c in fast] == [c.to_pylist() for c in strict]
    assert [c.to_pylist() for c in strict] == [[r[i] for r in rows] for i in (0, 1)]


ANY_CELL = st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(ANY_CELL, ANY_CELL), max_size=6), st.sampled_from([";", ",", "\t", "|"]))
def test_quoted_text_survives(rows: list[tuple[str, str]], delimiter: str) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    table = read_delimited(out.getvalue().encode(), "f", CsvFormat(delimiter=delimiter))
    assert [c.to_pylist() for c in table.columns] == [[r[i] for r in rows] for i in (0, 1)]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"a,b\n1,2,3\n", "row 1: has 3 cells, the header has 2"),
        (b"a,b\n1,2\n3\n4,5\n", "row 2: has 1 cells"),
        (b"a,b\n1,2\n\n4,5\n", "row 2: is an empty line"),
        (b'a,b\n1,"2"x\n', "row 1: cannot be read"),
        (b"\xef\xbb\xbfa,b\n1,2\n", "byte order mark"),
        (b"a,b\n1,\xff\n", "is not utf-8"),
        (b"a,\n1,2\n", "column 2 has no name"),
        (b"a,b\n1,\x00\n", "NUL"),
    ],
)
def test_broken_files_are_refused_with_their_place(data: bytes, told: str) -> None:
    with pytest.raises(DeliveryRefused, match=told):
        read_delimited(data, "f.csv", CsvFormat())


def parse(text: str, column: ColumnSpec, form: CsvFormat | None = None) -> object:
    cell_form = CellForm.of("c", column, form or CsvFormat(), is_key=False)
    return parse_text(pa.array([text]), cell_form, "f").values[0].as_py()


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("1.234.567", ColumnSpec(type="int64", thousands="."), 1234567),
        ("1234", ColumnSpec(type="int64", thousands="."), 1234),
        ("-1'000,5", ColumnSpec(type="float64", thousands="'", decimal=","), -1000.5),
        ("1 000", ColumnSpec(type="int64", thousands=" "), 1000),
        ("1e3", ColumnSpec(type="float64"), 1000.0),
        (".5", ColumnSpec(type="float64"), 0.5),
        ("+7", ColumnSpec(type="int64", plus_sign=True), 7),
        ("9223372036854775807", ColumnSpec(type="int64"), 2**63 - 1),
        ("TRUE", ColumnSpec(type="bool"), True),
        ("-", ColumnSpec(type="int64", missing=("-",)), None),
        ("", ColumnSpec(type="string", missing=("-",)), ""),
    ],
)
def test_declared_forms(text: str, column: ColumnSpec, value: object) -> None:
    assert parse(text, column) == value


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("1.23.456", ColumnSpec(type="int64", thousands=".")),
        ("1,5", ColumnSpec(type="float64")),
        ("+7", ColumnSpec(type="int64")),
        ("1e400", ColumnSpec(type="float64")),
        ("nan", ColumnSpec(type="float64")),
        ("NA", ColumnSpec(type="int64")),
        ("9223372036854775808", ColumnSpec(type="int64")),
        ("١٢", ColumnSpec(type="int64")),
        ("yes", ColumnSpec(type="bool")),
        ("1 ", ColumnSpec(type="int64")),
        ("2024-01-01T00:00", ColumnSpec(type="timestamp")),
        ("2024-01-01", ColumnSpec(type="timestamp", zone="UTC")),
        ("01/02/2024", ColumnSpec(type="date")),
    ],
)
def test_text_outside_the_declared_form_is_refused(text: str, column: ColumnSpec) -> None:
    with pytest.raises(DeliveryRefused, match="row 1, column 'c'"):
        parse(text, column)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2024-02-30T00:00Z", "no_such_time"),
        ("2024-01-01T25:00Z", "no_such_time"),
        ("2024-01-01T23:59:60Z", "no_such_time"),
        ("2024-01-01T00:00+99:00", "no_such_time"),
        ("0001-01-01T00:00+14:00", "no_such_time"),
        ("2024-01-01T24:00:00.5Z", "hour_24"),
        ("2024-01-01T00:00:00.1234567Z", "below_microsecond"),
    ],
)
def test_times_that_do_not_exist_reject_their_row(text: str, code: str) -> None:
    form = CellForm.of("c", ColumnSpec(type="timestamp"), CsvFormat(), is_key=False)
    parsed = parse_text(pa.array(["2024-01-01T00:00Z", text]), form, "f")
    assert [(f.position, f.code) for f in parsed.faults] == [(1, code)]
    assert parsed.values.is_valid().to_pylist() == [True, False]


def delivery(folder: Path, declared: dict[str, object], data: str, **more: str) -> Delivery:
    write_pipeline(folder / "p", declared, files={"data.csv": data}, code=more.get("code"))
    return read_delivery(load_pipeline(folder / "p"), "readings")


def test_rows_keep_their_origin(tmp_path: Path) -> None:
    declared = source({"id": "string", "n": {"type": "int64", "required": True}}, row_id=["id"])
    found = delivery(tmp_path, declared, "id,n\nc,1\n,2\nb,\na,4\n")
    assert found.table.column("id").to_pylist() == ["a", "c"]
    assert found.origin_row.tolist() == [4, 1]
    assert sorted((r.row, r.code) for r in found.rejected) == [(2, "null_row_identity"), (3, "null_in_required_column")]
    assert found.rows_read == 4


def test_keys_must_have_one_unicode_spelling(tmp_path: Path) -> None:
    found = delivery(tmp_path, source({"id": "string"}, row_id=["id"]), "id\nZu\u0308rich\nZ\u00fcrich\n")
    assert [(r.row, r.code) for r in found.rejected] == [(1, "key_not_nfc")]


TRANSFORM = "import pyarrow as pa\ndef canonical(raw, lookups):\n    return {}\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raw.slice(1)", "1 rows for 2"),
        ("raw.rename_columns(['id', 'm'])", "missing \\['n'\\], not declared \\['m'\\]"),
        ("raw.set_column(1, 'n', pa.array(['x', 'y']))", "column 'n' is string"),
    ],
)
def test_a_transform_is_held_to_its_declaration(tmp_path: Path, body: str, told: str) -> None:
    columns = {"id": "string", "n": "int64"}
    raw = {name: {"type": kind} for name, kind in columns.items()}
    declared = source(columns, row_id=["id"], raw=raw, transform="sources.canonical")
    with pytest.raises(TransformFault, match=told):
        delivery(tmp_path, declared, "id,n\na,1\nb,2\n", code=TRANSFORM.format(body))


def test_a_transform_may_reject_rows(tmp_path: Path) -> None:
    body = "raw.append_column('_reject', pa.array([None, 'odd_row']))"
    declared = source({"id": "string"}, row_id=["id"], raw={"id": {"type": "string"}}, transform="sources.canonical")
    found = delivery(tmp_path, declared, "id\na\nb\n", code=TRANSFORM.format(body))
    assert found.table.num_rows == 1
    assert [(r.row, r.code) for r in found.rejected] == [(2, "odd_row")]


def parquet(folder: Path, column: dict[str, object], values: pa.Array) -> Delivery:
    declared = source({"id": "string", "v": column}, row_id=["id"], format={"type": "parquet"}, files=["d.parquet"])
    write_pipeline(folder / "p", declared)
    ids = [str(i) for i in range(len(values))]
    pq.write_table(pa.table({"id": ids, "v": values}), folder / "p" / "d.parquet")
    return read_delivery(load_pipeline(folder / "p"), "readings")


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ({"type": "int64"}, pa.array([1.0]), "has the type double"),
        ({"type": "string"}, pa.array([1]), "has the type int64"),
        ({"type": "timestamp"}, pa.array([1], pa.timestamp("us")), "without a zone"),
        ({"type": "int64"}, pa.array([2**63], pa.uint64()), "does not fit exactly"),
    ],
)
def test_parquet_types_must_fit(tmp_path: Path, column: dict[str, object], values: pa.Array, told: str) -> None:
    with pytest.raises(DeliveryRefused, match=told):
        parquet(tmp_path, column, values)


def test_parquet_values_that_cannot_be_kept_reject_their_row(tmp_path: Path) -> None:
    found = parquet(tmp_path, {"type": "float64"}, pa.array([1.0, float("nan"), float("inf"), None]))
    assert [(r.row, r.code) for r in found.rejected] == [(2, "not_finite"), (3, "not_finite")]
    ns = pa.array([1_000, 1_001], pa.timestamp("ns", tz="UTC"))
    found = parquet(tmp_path, {"type": "timestamp"}, ns)
    assert [(r.row, r.code) for r in found.rejected] == [(2, "below_microsecond")]


def test_a_cut_parquet_file_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path, {"type": "int64"}, pa.array([1, 2]))
    file = tmp_path / "p" / "d.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DeliveryRefused, match="truncated"):
        read_delivery(load_pipeline(tmp_path / "p"), "readings")


@pytest.mark.parametrize("files", [["../secret.csv"], ["/etc/passwd"], ["absent.csv"]])
def test_declared_files_stay_in_the_folder(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "secret.csv").write_text("id\na\n")
    write_pipeline(tmp_path / "p", source({"id": "string"}, row_id=["id"], files=files))
    with pytest.raises(SourceMissing):
        read_delivery(load_pipeline(tmp_path / "p"), "readings")


def test_unknown_sources_are_named(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "p", source({"id": "string"}, row_id=["id"]))
    with pytest.raises(UnknownSource, match="'labels', 'readings'"):
        read_delivery(load_pipeline(tmp_path / "p"), "reading")
