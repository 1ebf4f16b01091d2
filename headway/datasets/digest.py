r"""What names a dataset version: a digest over its rows and schema, whatever file they came in.

Row encoding, version 1. Columns in the order of their names (code points); each cell is one byte and a payload:

* null: `00` and as many zero bytes as the type's payload has;
* otherwise `01`, then int64, timestamp (microseconds UTC) and date (days since 1970-01-01): 8 bytes, big-endian two's
  complement; bool: 8 bytes, 0 or 1; float64: IEEE 754 big-endian, with -0.0 written as 0.0 and every NaN as
  7ff8000000000000; string: the 32 bytes of the sha256 of its UTF-8 text.

A row's digest is the sha256 of its cells. The content digest is the sha256 of: `headway.rows/1\n`, the schema hash, a
line end, the number of rows as 8 bytes big-endian, and all row digests in ascending order. Sorting makes it independent
of row order; equal rows stay in the list, so duplicates count.
"""

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.schema import schema_hash
from headway.declaration import SourceSpec

ROWS_FORMAT = b"headway.rows/1\n"
_CHUNK = 65_536
_NAN = 0x7FF8000000000000


def content_digest(table: pa.Table, spec: SourceSpec) -> str:
    """The content digest of canonical rows (columns and types of `arrow_schema(spec)`)."""
    return digest_of_rows(row_digests(table), schema_hash(spec))


def digest_of_rows(digests: list[bytes], schema: str) -> str:
    """The content digest of rows given by their digests, in any order."""
    whole = hashlib.sha256(ROWS_FORMAT)
    whole.update(schema.encode() + b"\n" + len(digests).to_bytes(8, "big"))
    whole.update(b"".join(sorted(digests)))
    return f"sha256:{whole.hexdigest()}"


def row_digests(table: pa.Table) -> list[bytes]:
    """The 32-byte digest of each row, in the table's order."""
    found: list[bytes] = []
    names = sorted(table.column_names)
    for start in range(0, table.num_rows, _CHUNK):
        part = table.slice(start, _CHUNK)
        encoded = np.concatenate([_cells(part.column(name)) for name in names], axis=1)
        width = encoded.shape[1]
        data = encoded.tobytes()
        found += [hashlib.sha256(data[i * width : (i + 1) * width]).digest() for i in range(len(encoded))]
    return found


def _cells(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Presence byte and payload of each cell, uint8 of shape (rows, 1 + payload)."""
    valid = column.is_valid().to_numpy().astype(np.bool_)
    payload = _text_payload(column) if _is_text(column.type) else _number_payload(column)
    cells = np.empty((len(valid), 1 + payload.shape[1]), dtype=np.uint8)
    cells[:, 0] = valid
    cells[:, 1:] = np.where(valid[:, None], payload, 0)
    return cells


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)


def _text_payload(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    encoded = (column if pa.types.is_dictionary(column.type) else column.dictionary_encode()).unify_dictionaries()
    if encoded.num_chunks == 0:
        return np.zeros((0, 32), dtype=np.uint8)
    texts = encoded.chunk(0).dictionary.to_pylist()
    table = np.zeros((len(texts) + 1, 32), dtype=np.uint8)
    for index, text in enumerate(texts):
        if text is not None:
            table[index] = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype=np.uint8)
    codes = np.concatenate([chunk.indices.fill_null(len(texts)).to_numpy() for chunk in encoded.chunks])
    return table[codes]


def _number_payload(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    kind = column.type
    if pa.types.is_floating(kind):
        floats = pc.fill_null(column, 0.0).to_numpy().astype(np.float64)
        bits = (floats + 0.0).view(np.uint64).copy()  # adding 0.0 turns -0.0 into 0.0
        bits[np.isnan(floats)] = _NAN
        words = bits.astype(">u8")
    else:
        whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
        words = pc.fill_null(whole.cast(pa.int64()), 0).to_numpy().astype(">i8")
    return words.view(np.uint8).reshape(-1, 8)
