"""Records of the inference log: rows come back bit for bit with their columns, and other bytes are refused."""

import math
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serving_bench import bits

from headway.serving.live.records import RecordUnreadable, Schemas, decode_record, plain_rows, table_of

INT64 = st.integers(-(2**63), 2**63 - 1)
TIME = pa.timestamp("us", tz="UTC")
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "whole": (pa.int64(), INT64),
    "number": (pa.float64(), st.floats(allow_nan=False)),
    "text": (pa.string(), st.text()),
    "coded": (pa.dictionary(pa.int32(), pa.string()), st.text()),
    "flag": (pa.bool_(), st.booleans()),
    "day": (pa.date32(), st.integers(-700_000, 2_900_000)),
    "moment": (TIME, st.integers(-(10**15), 10**15)),
}


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(0, 5))
def test_rows_come_back_bit_for_bit(data: st.DataObject, rows: int) -> None:
    columns: dict[str, pa.Array] = {}
    for name, (kind, values) in COLUMNS.items():
        given_values = data.draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        plain = {"moment": pa.int64(), "day": pa.int32(), "coded": pa.string()}.get(name, kind)
        columns[name] = pa.array(given_values, plain).cast(kind)
    table = pa.table(columns)
    back = table_of(table.schema, plain_rows(table))
    assert back.schema == table.schema
    assert bits(back) == bits(table)


def test_a_number_that_is_none_keeps_its_bits_on_the_way_through_a_record() -> None:
    from msgspec import msgpack

    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000))[0]
    for value in (odd, math.inf, -math.inf, -0.0, 0.1):
        assert struct.pack("<d", msgpack.decode(msgpack.encode(value))) == struct.pack("<d", value)


def test_columns_are_kept_once_and_read_by_another_process(tmp_path: Path) -> None:
    requests = pa.schema([pa.field("k", pa.string()), pa.field("at", TIME)])
    values = pa.schema([pa.field("x", pa.dictionary(pa.int32(), pa.string()))])
    writer = Schemas(tmp_path)
    name = writer.keep(requests, values)
    assert writer.keep(requests, values) == Schemas(tmp_path).keep(requests, values) == name
    assert writer.keep(values, requests) != name
    assert Schemas(tmp_path).read(name) == (requests, values)
    with pytest.raises(RecordUnreadable, match="restore"):
        Schemas(tmp_path).read("0" * 32)


@pytest.mark.parametrize("data", [b"", b"\x80", b"{}", b"\xc1", b"\x81\xa1a\x01"])
def test_other_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(RecordUnreadable):
        decode_record(data)
