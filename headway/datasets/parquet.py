"""Parquet deliveries to typed columns. Types come from the file and must fit the declaration; nothing wraps around."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.refusal import DeliveryRefused
from headway.datasets.text import ARROW_TYPES, TIMESTAMP, CellFault, CellForm, Parsed, localize
from headway.datasets.zones import END_OF_TIME_US, START_OF_TIME_US

_NS_PER_US = 1_000


def read_parquet(data: bytes, file: str) -> pa.Table:
    """The file's columns with their own types. 12-byte times are read as microseconds, so that far dates stay exact.

    Raises:
        DeliveryRefused: the bytes are no whole Parquet file, or a column name occurs twice.
    """
    try:
        reader = pq.ParquetFile(io.BytesIO(data), coerce_int96_timestamp_unit="us")
        names = reader.schema_arrow.names
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            places = " and ".join(str(i + 1) for i, n in enumerate(names) if n == twice)
            raise DeliveryRefused(
                file, f"the column name {twice!r} is written twice, as columns {places}", "rename one"
            )
        return reader.read()
    except (pa.ArrowInvalid, OSError) as error:
        raise DeliveryRefused(file, "is no whole Parquet file; it may be truncated", "deliver it again") from error


def parse_typed(column: pa.ChunkedArray, form: CellForm, file: str) -> Parsed:
    """Values of a Parquet column in the declared type.

    Raises:
        DeliveryRefused: the column has another type, or a time column has no zone and none is declared.
    """
    values = column.combine_chunks()
    values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return Parsed(pa.nulls(len(values), ARROW_TYPES[form.type]))
    if not _fits(values.type, form.type):
        raise DeliveryRefused(
            file,
            f"has the type {values.type}",
            "deliver the declared type, or declare what is delivered",
            column=form.name,
            limit=form.type,
        )
    if form.type == "timestamp":
        return _timestamp(values, form, file)
    if form.type == "float64":
        return _float64(values)
    if form.type == "string":
        text = values.cast(pa.string())
        missing = pc.is_in(text, value_set=pa.array(form.missing, type=pa.string()))
        return Parsed(pc.if_else(missing, pa.scalar(None, pa.string()), text))
    return _exact_cast(values, form, file)


def _fits(found: pa.DataType, declared: str) -> bool:
    if declared == "string":
        return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
    if declared == "int64":
        return pa.types.is_integer(found)
    if declared == "float64":
        return pa.types.is_floating(found)
    if declared == "bool":
        return pa.types.is_boolean(found)
    return pa.types.is_date(found) if declared == "date" else pa.types.is_timestamp(found)


def _exact_cast(values: pa.Array, form: CellForm, file: str) -> Parsed:
    try:
        return Parsed(values.cast(ARROW_TYPES[form.type]))
    except pa.ArrowInvalid as error:
        raise DeliveryRefused(
            file, "holds a value that does not fit exactly", "declare another type", column=form.name, limit=form.type
        ) from error


def _float64(values: pa.Array) -> Parsed:
    wide = values.cast(pa.float64())
    finite = pc.fill_null(pc.is_finite(wide), True).to_numpy(zero_copy_only=False)
    faults = [
        CellFault(int(i), "not_finite", str(wide[int(i)].as_py()), "missing is null, and infinity is no measurement")
        for i in np.flatnonzero(~finite)
    ]
    return Parsed(wide, faults)


def _timestamp(values: pa.Array, form: CellForm, file: str) -> Parsed:
    kind = values.type
    if kind.tz is None and form.zone is None:
        raise DeliveryRefused(
            file,
            "holds times without a zone and none is declared",
            "declare `zone` for the column or the format; it is never assumed to be UTC",
            column=form.name,
        )
    known = values.is_valid().to_numpy(zero_copy_only=False)
    ticks = values.cast(pa.int64()).fill_null(0).to_numpy()
    times, faults = _microseconds(ticks, kind.unit)
    ok = known.copy()
    ok[[f.position for f in faults]] = False
    if kind.tz is None:
        times, ok, bad = localize(times, ok, form.zone or "", lambda i: str(values[i]))
        faults += bad
    return Parsed(pa.array(times, mask=~ok).cast(pa.timestamp("us")).cast(TIMESTAMP), faults)


def _microseconds(ticks: NDArray[np.int64], unit: str) -> tuple[NDArray[np.int64], list[CellFault]]:
    if unit == "ns":
        times, rest = np.divmod(ticks, _NS_PER_US)
        faults = [
            CellFault(int(i), "below_microsecond", f"{ticks[i]} ns", "times are kept in microseconds")
            for i in np.flatnonzero(rest)
        ]
        return times, faults
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
    wide = (ticks < START_OF_TIME_US // factor) | (ticks >= END_OF_TIME_US // factor)
    faults = [
        CellFault(int(i), "no_such_time", f"{ticks[i]} {unit}", "outside the years 1 to 9999")
        for i in np.flatnonzero(wide)
    ]
    return np.where(wide, 0, ticks) * factor, faults
