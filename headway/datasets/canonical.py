"""Canonical rows: declared columns and types, with an identity, without what privacy forbids, in a fixed order."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.schema import arrow_schema
from headway.datasets.text import ARROW_TYPES
from headway.declaration import SourceSpec
from headway.errors import HeadwayError

REJECT_COLUMN = "_reject"
"""A transform may add this text column: a reason code here rejects the row, null keeps it."""


class TransformFault(HeadwayError):
    """A pipeline's transform did not give the rows and columns that its source declares."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why one canonical row cannot be kept."""

    position: int
    column: str
    code: str
    value: str = ""
    detail: str = ""


def conform(table: pa.Table, spec: SourceSpec, source: str, rows: int | None = None) -> pa.Table:
    """The table with exactly the declared columns and types, and the reject column when there is one.

    Raises:
        TransformFault: a column is missing, not declared or of another type, or rows were added or lost.
    """
    remedy = "mend the transform, or declare what it gives"
    if rows is not None and table.num_rows != rows:
        raise TransformFault(f"{source}: the transform gave {table.num_rows} rows for {rows}", remedy)
    wanted = {name: ARROW_TYPES[column.type] for name, column in sorted(spec.columns.items())}
    absent = sorted(set(wanted) - set(table.column_names))
    extra = sorted(set(table.column_names) - set(wanted) - {REJECT_COLUMN})
    if absent or extra:
        raise TransformFault(f"{source}: canonical columns missing {absent}, not declared {extra}", remedy)
    columns: dict[str, pa.ChunkedArray] = {}
    for name, kind in wanted.items():
        try:
            columns[name] = table.column(name).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            found = table.column(name).type
            cause = error if may_be_shown(name, spec) else None
            raise TransformFault(f"{source}: column {name!r} is {found}, declared is {kind}", remedy) from cause
    if REJECT_COLUMN in table.column_names:
        columns[REJECT_COLUMN] = table.column(REJECT_COLUMN)
    return pa.table(columns)


def row_faults(table: pa.Table, spec: SourceSpec) -> list[RowFault]:
    """Rows that the transform rejects, with a null identity, sequence or required value, or with a key not in NFC."""
    faults: list[RowFault] = []
    if REJECT_COLUMN in table.column_names:
        codes = table.column(REJECT_COLUMN).to_pylist()
        faults += [RowFault(i, REJECT_COLUMN, code) for i, code in enumerate(codes) if code is not None]
    rejected = {fault.position for fault in faults}
    needed = {*spec.row_id, *(n for n, column in spec.columns.items() if column.required)}
    needed |= set() if spec.partition is None else {spec.partition.column}
    needed |= set() if spec.sequence is None else {spec.sequence}
    for name in table.column_names:
        if name in needed:
            code = _null_code(name, spec)
            faults += [RowFault(i, name, code) for i in _positions(table.column(name).is_null()) if i not in rejected]
    for name in dict.fromkeys((*spec.row_id, *spec.keys)):
        if spec.columns[name].type == "string":
            faults += _not_composed(table.column(name), name)
    return faults


def may_be_shown(column: str, spec: SourceSpec) -> bool:
    """Whether a person may see values of a column (canonical, raw or the reject column).

    A transform may read a personal column from a raw column of any other name, so of such a source only the canonical
    columns that are not personal are shown.
    """
    if not spec.privacy.personal:
        return True
    return column in spec.columns and column not in spec.privacy.personal


def treat_personal(table: pa.Table, spec: SourceSpec, scope: str) -> pa.Table:
    """The stored columns: personal ones dropped, or replaced by a digest bound to `scope` and the column's name.

    The digest hides a value from readers and keeps equal values equal. It carries no secret: somebody who can list all
    possible values (telephone numbers) can find out which one it was, so `drop` is the right treatment for those.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for field in arrow_schema(spec):
        column = table.column(field.name)
        if spec.privacy.personal.get(field.name) == "hash":
            column = _hashed(column, f"{scope}/{field.name}")
        columns[field.name] = column
    return pa.table(columns, schema=arrow_schema(spec))


def canonical_order(table: pa.Table, spec: SourceSpec, digests: Sequence[bytes]) -> NDArray[np.int64]:
    """Row positions in the stored order: by row identity, event time, availability, sequence, then row digest."""
    clocks = [c for c in (spec.event_time, spec.available_time, spec.sequence) if isinstance(c, str)]
    names = [n for n in dict.fromkeys((*spec.row_id, *clocks)) if n in table.column_names]
    keyed = table.select(names).append_column("_digest", pa.array(digests, type=pa.binary(32)).cast(pa.binary()))
    order = pc.sort_indices(keyed, sort_keys=[(n, "ascending") for n in (*names, "_digest")])
    return order.to_numpy().astype(np.int64)


def _null_code(name: str, spec: SourceSpec) -> str:
    if name in spec.row_id:
        return "null_row_identity"
    return "null_sequence" if name == spec.sequence else "null_in_required_column"


def _positions(mask: pa.ChunkedArray) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask.to_numpy())]


def _not_composed(column: pa.ChunkedArray, name: str) -> list[RowFault]:
    if pc.all(pc.fill_null(pc.string_is_ascii(column), True)).as_py() is not False:
        return []
    return [
        RowFault(i, name, "key_not_nfc", text, "the same text exists in another Unicode spelling")
        for i, text in enumerate(column.to_pylist())
        if text is not None and not unicodedata.is_normalized("NFC", text)
    ]


def _hashed(column: pa.ChunkedArray, scope: str) -> pa.ChunkedArray:
    texts = column.unique().to_pylist()
    digests = [None if t is None else hashlib.sha256(f"{scope}\0{t}".encode()).hexdigest() for t in texts]
    return pa.chunked_array(
        [pa.array(digests, pa.string()).take(pc.index_in(column, pa.array(texts, pa.string())).combine_chunks())]
    )
