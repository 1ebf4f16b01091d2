"""The content digest names rows, not files."""

import hashlib
import io
import math
import random
import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import source

from headway.datasets.digest import content_digest
from headway.datasets.schema import arrow_schema, schema_hash
from headway.declaration import SourceSpec

TYPES = {"id": "string", "n": "int64", "x": "float64", "f": "bool", "d": "date", "t": "timestamp"}
SPEC = SourceSpec.model_validate(source(TYPES, row_id=["id"]))
SCHEMA = arrow_schema(SPEC)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
INSTANTS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
DAYS = st.integers(-719_162, 2_932_896)
ROW = st.tuples(
    *(st.none() | s for s in (TEXT, NUMBERS, st.floats(), st.booleans(), DAYS, INSTANTS)),
)


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = dict(zip(TYPES, zip(*rows, strict=True) if rows else [()] * len(TYPES), strict=True))
    kinds = {"d": pa.int32(), "t": pa.int64()}
    arrays = {}
    for field in SCHEMA:
        raw = pa.array(list(columns[field.name]), type=kinds.get(field.name, field.type), from_pandas=False)
        arrays[field.name] = raw.cast(field.type)
    return pa.table(arrays, schema=SCHEMA)


@settings(deadline=None)
@given(st.lists(ROW, max_size=30), st.randoms())
def test_order_and_chunking_do_not_matter(rows: list[tuple[Any, ...]], rng: random.Random) -> None:
    table = table_of(rows)
    shuffled = list(rows)
    rng.shuffle(shuffled)
    other = table_of(shuffled)
    cut = rng.randint(0, len(rows))
    chunked = pa.concat_tables([other.slice(0, cut), other.slice(cut)])
    assert content_digest(chunked, SPEC) == content_digest(table, SPEC)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(ROW, min_size=1, max_size=30),
    st.sampled_from(["none", "snappy", "zstd", "gzip"]),
    st.integers(1, 10),
    st.booleans(),
)
def test_encoding_does_not_matter(rows: list[tuple[Any, ...]], compression: str, group: int, dictionary: bool) -> None:
    table = table_of(rows)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=compression, row_group_size=group, use_dictionary=dictionary)
    again = pq.ParquetFile(buffer, read_dictionary=["id"] if dictionary else []).read()
    assert content_digest(again, SPEC) == content_digest(table, SPEC)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20), st.data())
def test_any_changed_cell_changes_the_digest(rows: list[tuple[Any, ...]], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(TYPES) - 1))
    changed = list(rows)
    other = data.draw(ROW)[column]
    changed[index] = (*rows[index][:column], other, *rows[index][column + 1 :])
    same = repr(other) == repr(rows[index][column]) or (other == rows[index][column] and other is not None)
    assert (content_digest(table_of(changed), SPEC) == content_digest(table_of(rows), SPEC)) == same


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=10))
def test_duplicates_count(rows: list[tuple[Any, ...]]) -> None:
    found = {content_digest(table_of(rows + [rows[0]] * n), SPEC) for n in range(4)}
    assert len(found) == 4


def test_zero_and_nan_have_one_spelling() -> None:
    def digest(x: float) -> str:
        return content_digest(table_of([("a", 1, x, True, 1, 1)]), SPEC)

    assert digest(-0.0) == digest(0.0)
    assert digest(float("nan")) == digest(-float("nan"))
    assert digest(float("nan")) != digest(0.0)
    assert digest(float("inf")) != digest(-float("inf"))


def test_a_null_is_not_a_value_that_looks_like_it() -> None:
    rows = [(None, 0, 0.0, False, 0, 0), ("", 0, 0.0, False, 0, 0), ("", None, 0.0, False, 0, 0)]
    assert len({content_digest(table_of([row]), SPEC) for row in rows}) == 3


def test_values_do_not_move_between_columns() -> None:
    types = {"id": "string", "a": "string", "b": "string"}
    spec = SourceSpec.model_validate(source(types, row_id=["id"]))

    def digest(a: str, b: str) -> str:
        return content_digest(pa.table({"a": [a], "b": [b], "id": ["x"]}, schema=arrow_schema(spec)), spec)

    assert digest("xy", "z") != digest("x", "yz")


@pytest.mark.parametrize(
    "change",
    [
        {"row_id": ["id", "n"]},
        {"keys": ["n"]},
        {"columns": {**{k: {"type": v} for k, v in TYPES.items()}, "x": {"type": "string"}}},
        {"columns": {**{k: {"type": v} for k, v in TYPES.items()}, "x": {"type": "float64", "required": True}}},
        {"event_time": "t", "available_time": {"delay": "1h", "reason": "a test"}},
    ],
)
def test_the_schema_hash_covers_what_a_reader_relies_on(change: dict[str, Any]) -> None:
    assert schema_hash(SourceSpec.model_validate({**source(TYPES, row_id=["id"]), **change})) != schema_hash(SPEC)


def test_the_schema_hash_ignores_descriptions_and_column_order() -> None:
    told = {k: {"type": v, "description": "for people"} for k, v in reversed(TYPES.items())}
    assert schema_hash(SourceSpec.model_validate({**source(TYPES, row_id=["id"]), "columns": told})) == schema_hash(
        SPEC
    )


def spelled_out(rows: list[tuple[Any, ...]]) -> str:
    """The digest as its documentation says, cell by cell."""
    digests = []
    for row in rows:
        cells = dict(zip(TYPES, row, strict=True))
        digests.append(hashlib.sha256(b"".join(cell(TYPES[name], cells[name]) for name in sorted(TYPES))).digest())
    parts = [b"headway.rows/1\n", schema_hash(SPEC).encode(), b"\n", struct.pack(">q", len(rows)), *sorted(digests)]
    return "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()


def cell(kind: str, value: Any) -> bytes:  # noqa: ANN401
    if value is None:
        return bytes(33 if kind == "string" else 9)
    if kind == "string":
        return b"\1" + hashlib.sha256(value.encode()).digest()
    if kind == "float64":
        return b"\1" + (bytes.fromhex("7ff8000000000000") if math.isnan(value) else struct.pack(">d", value or 0.0))
    return b"\1" + struct.pack(">q", value)


@settings(deadline=None)
@given(st.lists(ROW, max_size=10))
def test_the_digest_is_what_its_documentation_says(rows: list[tuple[Any, ...]]) -> None:
    assert content_digest(table_of(rows), SPEC) == spelled_out(rows)


def test_the_encoding_is_pinned() -> None:
    """A stored digest must mean the same rows in every later version of this code and of pyarrow."""
    rows = [("a", -1, 0.5, True, 15_706, 1_356_998_400_000_000), (None, None, None, None, None, None)]
    assert content_digest(table_of(rows), SPEC) == (
        "sha256:2e3a1d5979e04665bf643107990e2ef8c37ebe685d99abe0dc68afe31ea45ce8"
    )
