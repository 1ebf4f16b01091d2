"""Training rows from stored snapshots: read, verified, put in order, split and encoded.

A row is learned from when its label was known before the cut (`known_at < cut`); one whose label was not known yet is
left out and counted, never taken for a negative. Rows observed at or after `validation_from` decide when to stop, the
earlier ones train. A training row's label may have become known after `validation_from`: it was known at the cut, and
that is when training happens. Rows stand in the order of their identity, whatever file or order they came in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.blobs import Json, check_digest
from trainer.encoders import InputEncoding, fit_inputs
from trainer.reference import feature_histograms
from trainer.spec import DataFile, DataSpec, RunSpec


class DataRefused(ValueError):
    """Data that cannot be trained on; `place` names the snapshot or the column."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place


@dataclass(frozen=True)
class Split:
    """Encoded rows.

    `numeric` [rows, numeric inputs and missing indicators] is standardised, `categorical` [rows, categorical inputs]
    holds codes, `target` [rows] holds 0 and 1, `row_ids` [rows] the positions among all mature rows by identity.
    """

    numeric: NDArray[np.float32]
    categorical: NDArray[np.int64]
    target: NDArray[np.float32]
    row_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class Dataset:
    """What a run trains on: two splits, the encoding fitted on the first, row counts, and the reference histograms.

    `counts` holds rows read, train, valid, immature, and positives of either split.
    """

    train: Split
    valid: Split
    inputs: InputEncoding
    counts: Mapping[str, int]
    reference: Mapping[str, Json] = field(default_factory=dict[str, "Json"])


@dataclass(frozen=True)
class Rows:
    """Mature rows as tables in the order of their identity, before encoding, with 0/1 targets and row positions."""

    train: pa.Table
    valid: pa.Table
    train_target: NDArray[np.float32]
    valid_target: NDArray[np.float32]
    train_ids: NDArray[np.int64]
    valid_ids: NDArray[np.int64]
    counts: Mapping[str, int]


def load_data(spec: RunSpec, store_root: Path, heartbeat: Callable[[], None]) -> Dataset:
    """Read, split and encode the rows of a run.

    Args:
        spec: The run.
        store_root: Root of the content-addressed store that holds the data files.
        heartbeat: Called after each file and each part of the work.

    Raises:
        DataRefused: a blob is missing or altered, a column is missing, an identity stands twice, a target is neither 0
            nor 1, or no row is left to train on.
        EncodingRefused: an input column cannot be encoded.
    """
    rows = load_rows(spec.rows, store_root, heartbeat)
    return encode_rows(rows, fit_inputs(rows.train, spec.rows.categorical, spec.rows.numeric), heartbeat)


def encode_rows(rows: Rows, inputs: InputEncoding, heartbeat: Callable[[], None]) -> Dataset:
    """Both splits in a given encoding, with the reference histograms of the training rows."""
    heartbeat()
    reference = feature_histograms(rows.train, inputs)
    heartbeat()
    train = Split(*inputs.encode(rows.train), rows.train_target, rows.train_ids)
    heartbeat()
    valid = Split(*inputs.encode(rows.valid), rows.valid_target, rows.valid_ids)
    heartbeat()
    return Dataset(train, valid, inputs, rows.counts, reference)


def load_rows(data: DataSpec, store_root: Path, heartbeat: Callable[[], None], extra: Sequence[str] = ()) -> Rows:
    """The mature rows of all files, split, with input columns and the `extra` ones. Raises as `load_data`."""
    wanted = tuple(dict.fromkeys([*data.categorical, *data.numeric, *extra]))
    beside = [*data.identity, data.target, data.observed_at, data.known_at]
    tables: list[pa.Table] = []
    for file in data.files:
        tables.append(_read_file(file, store_root, tuple(dict.fromkeys([*beside, *wanted]))))
        heartbeat()
    table = _in_order(_joined(tables, data.files), data.identity)
    heartbeat()
    return _split(table, data, wanted)


def blob_path(store_root: Path, digest: str) -> Path:
    """Where the store keeps a blob: `sha256/<first two hex digits>/<the other 62>`.

    Raises:
        InvalidDigest: `digest` is no digest.
    """
    digits = check_digest(digest).removeprefix("sha256:")
    return store_root / "sha256" / digits[:2] / digits[2:]


def mature(table: pa.Table, known_at: str, cut: int) -> NDArray[np.bool_]:
    """Which rows' labels were known before `cut` (int64 microseconds UTC); a null known time is never."""
    times, unknown = _times(table, known_at)
    return ~unknown & (times < cut)


def binary_target(table: pa.Table, name: str) -> NDArray[np.float32]:
    """The target as 0.0 and 1.0.

    Raises:
        DataRefused: it holds a null or anything but 0, 1, false and true.
    """
    column = table.column(name)
    if column.null_count:
        raise DataRefused(f"column {name!r}", f"{column.null_count} rows have a known time and no target")
    if not (pa.types.is_boolean(column.type) or pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataRefused(f"column {name!r}", f"is {column.type}; a target is bool, or a number that is 0 or 1")
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    wrong = values[(values != 0) & (values != 1)]
    if len(wrong):
        raise DataRefused(f"column {name!r}", f"holds {float(wrong[0])!r}; a target is 0 or 1")
    return values.astype(np.float32)


def _read_file(file: DataFile, store_root: Path, columns: Sequence[str]) -> pa.Table:
    place = f"snapshot {file.partition!r}"
    try:
        content = blob_path(store_root, file.sha256).read_bytes()
    except FileNotFoundError:
        raise DataRefused(place, f"{file.sha256} is not in the store {store_root}") from None
    found = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if found != file.sha256:
        raise DataRefused(place, f"the stored bytes of {file.sha256} have the digest {found}")
    with pq.ParquetFile(pa.BufferReader(content)) as source:
        present = set(source.schema_arrow.names)
        missing = [c for c in columns if c not in present]
        if missing:
            raise DataRefused(place, f"has no columns {missing}")
        table = source.read(columns=list(columns), use_threads=False)
    if table.num_rows != file.rows:
        raise DataRefused(place, f"holds {table.num_rows} rows, the run spec says {file.rows}")
    return table


def _joined(tables: Sequence[pa.Table], files: Sequence[DataFile]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError as error:
        partitions = f"{files[0].partition} to {files[-1].partition}"
        raise DataRefused(f"snapshots {partitions}", f"their columns have different types: {error}") from error


def _in_order(table: pa.Table, identity: Sequence[str]) -> pa.Table:
    """The rows sorted by identity, each of which may stand once."""
    plain = table
    for name in identity:
        kind = table.schema.field(name).type
        if pa.types.is_dictionary(kind):
            value_type = cast("pa.DictionaryType[Any, Any, Any]", kind).value_type
            plain = plain.set_column(plain.schema.get_field_index(name), name, plain.column(name).cast(value_type))
    ordered = plain.sort_by([(name, "ascending") for name in identity]).combine_chunks()
    keys = [ordered.column(name) for name in identity]
    if len(ordered) > 1:
        same = np.ones(len(ordered) - 1, dtype=np.bool_)
        for key in keys:
            values = key.to_numpy(zero_copy_only=False)
            same &= values[1:] == values[:-1]
        if same.any():
            at = int(np.argmax(same))
            raise DataRefused("identity", f"{[key[at].as_py() for key in keys]} stands in two rows")
    return ordered


def _split(table: pa.Table, data: DataSpec, wanted: Sequence[str]) -> Rows:
    ready = mature(table, data.known_at, data.cut)
    rows = table.filter(pa.array(ready))
    observed, unobserved = _times(rows, data.observed_at)
    if unobserved.any():
        raise DataRefused(f"column {data.observed_at!r}", f"{int(unobserved.sum())} rows have no observation time")
    late = observed >= data.validation_from
    target = binary_target(rows, data.target)
    counts = {
        "rows": table.num_rows,
        "immature": int((~ready).sum()),
        "train": int((~late).sum()),
        "valid": int(late.sum()),
        "train_positive": int(target[~late].sum()),
        "valid_positive": int(target[late].sum()),
    }
    if not counts["train"]:
        raise DataRefused("data", f"no row to train on: {counts}")
    inputs, position = rows.select(list(wanted)), np.arange(len(rows), dtype=np.int64)
    return Rows(
        train=inputs.filter(pa.array(~late)),
        valid=inputs.filter(pa.array(late)),
        train_target=target[~late],
        valid_target=target[late],
        train_ids=position[~late],
        valid_ids=position[late],
        counts=counts,
    )


def _times(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A timestamp column as int64 microseconds UTC, and where it is null."""
    column = table.column(name)
    if not pa.types.is_timestamp(column.type):
        raise DataRefused(f"column {name!r}", f"is {column.type}, not a timestamp")
    micros = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return cast("Any", micros).fill_null(0).to_numpy(), column.is_null().to_numpy()
