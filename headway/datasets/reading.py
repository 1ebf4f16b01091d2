"""From delivered files to canonical rows, by declaration alone.

Order of work: bytes, cells, declared forms (a misfit refuses the delivery), values (what names no instant, or is null
where it must not be, rejects its row), the pipeline's own transform, identity, privacy, canonical order.
"""

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets import files as delivered
from headway.datasets.canonical import (
    RowFault,
    TransformFault,
    canonical_order,
    conform,
    may_be_shown,
    row_faults,
    treat_personal,
)
from headway.datasets.delimited import read_delimited
from headway.datasets.digest import row_digests
from headway.datasets.parquet import parse_typed, read_parquet
from headway.datasets.refusal import WITHHELD, DeliveryRefused, RejectedRow
from headway.datasets.text import CellFault, CellForm, Parsed, parse_text
from headway.declaration import CsvFormat, SourceSpec
from headway.declaration_text import InterpreterFiles, TextFiles
from headway.errors import HeadwayError
from headway.loading import Pipeline


class UnknownSource(HeadwayError):
    """A source that the pipeline does not declare."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference between a file and its declaration that does not refuse the delivery."""

    file: str
    column: str
    what: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a source, read once.

    `table` has the canonical columns (`schema.arrow_schema`) in canonical order; `origin_file` (index into `files`) and
    `origin_row` (from 1, header not counted) say where each row came from, `digests` are its row digests. `rows_read`
    counts the rows of the files. `rejected` holds values (none of personal columns): it is for people and never stored.
    """

    pipeline: Pipeline
    source: str
    table: pa.Table
    origin_file: NDArray[np.int32]
    origin_row: NDArray[np.int64]
    digests: list[bytes]
    files: tuple[str, ...]
    rows_read: int
    rejected: tuple[RejectedRow, ...]
    drift: tuple[Drift, ...]
    source_digest: str

    @property
    def spec(self) -> SourceSpec:
        """The source's declaration."""
        return self.pipeline.spec.sources[self.source]


@dataclass(slots=True)
class _Raw:
    """Typed columns of all files under each other, before the transform."""

    table: pa.Table
    file: NDArray[np.int32]
    row: NDArray[np.int64]
    rejected: list[RejectedRow] = field(default_factory=list[RejectedRow])
    drift: list[Drift] = field(default_factory=list[Drift])


def source_spec(pipeline: Pipeline, source: str) -> SourceSpec:
    """The declaration of one source.

    Raises:
        UnknownSource: the pipeline has no such source.
    """
    if source not in pipeline.spec.sources:
        raise UnknownSource(
            f"pipeline {pipeline.name!r} has no source {source!r}", f"it declares {sorted(pipeline.spec.sources)}"
        )
    return pipeline.spec.sources[source]


def delivery_files(pipeline: Pipeline, source: str, files: Sequence[Path] | None = None) -> list[delivered.RawFile]:
    """The bytes of a delivery: the declared files, or those that a person names.

    Raises:
        SourceMissing: a file is not there.
    """
    spec = source_spec(pipeline, source)
    if files is not None:
        given = delivered.read(delivered.expand(files))
        return [replace(f, named=True) for f in given] if isinstance(spec.format, TextFiles) else given
    paths = delivered.locate(spec.files, pipeline.folder)
    if isinstance(spec.format, TextFiles):
        within_library = isinstance(spec.files, InterpreterFiles)
        return delivered.read_below(paths, delivered.library_root() if within_library else pipeline.folder)
    return delivered.read(paths)


def read_delivery(
    pipeline: Pipeline,
    source: str,
    files: Sequence[Path] | None = None,
    lookups: Mapping[str, pa.Table] | None = None,
    *,
    raw: Sequence[delivered.RawFile] | None = None,
) -> Delivery:
    """Read a source's declared files, or the given ones, into canonical rows.

    `lookups` are the rows of the sources that the transform reads; by default they are read from their declared files.
    `raw` passes bytes that were read already.

    Raises:
        DeliveryRefused: the delivery does not have the declared form. Nothing was stored.
        SourceMissing: a file is not there.
        TransformFault: the pipeline's transform broke its contract.
    """
    spec = source_spec(pipeline, source)
    bodies = list(raw) if raw is not None else delivery_files(pipeline, source, files)
    names = tuple(body.name for body in bodies)
    parsed = _without_rejected(_parse(bodies, spec), names)
    canonical = replace(parsed, table=_transform(pipeline, spec, source, parsed.table, lookups))
    kept = _reject_faulty(canonical, spec, names)
    table = treat_personal(kept.table, spec, f"{pipeline.name}/{source}")
    digests = row_digests(table)
    order = canonical_order(table, spec, digests)
    return Delivery(
        pipeline=pipeline,
        source=source,
        table=table.take(pa.array(order)).combine_chunks(),
        origin_file=kept.file[order],
        origin_row=kept.row[order],
        digests=[digests[i] for i in order],
        files=names,
        rows_read=len(parsed.row) + len({(r.file, r.row) for r in parsed.rejected}),
        rejected=tuple(kept.rejected),
        drift=tuple(kept.drift),
        source_digest=delivered.delivery_digest(bodies),
    )


def _parse(bodies: Sequence[delivered.RawFile], spec: SourceSpec) -> _Raw:
    tables: list[pa.Table] = []
    missing: dict[str, list[str]] = defaultdict(list)
    rejected: list[RejectedRow] = []
    drift: list[Drift] = []
    for body in bodies:
        cells = _cells(body, spec, drift)
        _check_columns(body.name, list(cells), spec, drift)
        tables.append(_typed(body.name, cells, spec, missing, rejected))
    for column, names in missing.items():
        if len(names) == len(bodies):
            raise _absent(names[0], column, spec, drift)
        drift += [Drift(name, column, "declared, absent in this file: read as null") for name in names]
    counts = [t.num_rows for t in tables]
    file = np.repeat(np.arange(len(tables), dtype=np.int32), counts)
    row = np.concatenate([np.arange(1, n + 1, dtype=np.int64) for n in counts]) if counts else np.zeros(0, np.int64)
    return _Raw(pa.concat_tables(tables), file, row, rejected, drift)


def _cells(body: delivered.RawFile, spec: SourceSpec, drift: list[Drift]) -> dict[str, pa.ChunkedArray | pa.Array]:
    if isinstance(spec.format, TextFiles):
        return _text_row(body)
    content = body.content()
    if isinstance(spec.format, CsvFormat):
        text = read_delimited(content, body.name, spec.format)
        drift += [Drift(body.name, "", note) for note in text.notes]
        return dict(zip(text.names, text.columns, strict=True))
    table = read_parquet(content, body.name)
    return dict(zip(table.column_names, table.columns, strict=True))


def _text_row(body: delivered.RawFile) -> dict[str, pa.ChunkedArray | pa.Array]:
    """A whole file as one row; its content is null when it is not UTF-8."""
    try:
        content = body.data.decode("utf-8")
    except UnicodeDecodeError:
        content = None
    row: dict[str, tuple[object, pa.DataType]] = {
        "path": (body.name, pa.string()),
        "content": (content, pa.string()),
        "sha256": (hashlib.sha256(body.data).hexdigest(), pa.string()),
        "bytes": (len(body.data), pa.int64()),
    }
    return {name: pa.chunked_array([pa.array([value], kind)]) for name, (value, kind) in row.items()}


def _check_columns(file: str, found: Sequence[str], spec: SourceSpec, drift: list[Drift]) -> None:
    extra = [name for name in found if name not in spec.file_columns()]
    if extra and spec.format.extra_columns == "refuse":
        raise DeliveryRefused(file, "is not declared", "declare the column, or remove it", column=extra[0])
    drift += [Drift(file, name, "in the file, not declared: left out") for name in extra]


def _absent(file: str, column: str, spec: SourceSpec, drift: Sequence[Drift]) -> DeliveryRefused:
    extra = [d.column for d in drift if d.file == file and d.what.startswith("in the file")]
    close = difflib.get_close_matches(column, extra, n=1, cutoff=0.5)
    hint = f"was it renamed to {close[0]!r}?" if close else f"undeclared columns of the file: {extra}"
    return DeliveryRefused(
        file, "is declared and missing in the file", hint, column=column, limit=spec.file_columns()[column].type
    )


def _typed(
    file: str,
    cells: Mapping[str, pa.ChunkedArray | pa.Array],
    spec: SourceSpec,
    missing: dict[str, list[str]],
    rejected: list[RejectedRow],
) -> pa.Table:
    rows = len(next(iter(cells.values()))) if cells else 0
    columns: dict[str, pa.Array] = {}
    faults: list[tuple[str, CellFault]] = []
    for name, column in spec.file_columns().items():
        form = CellForm.of(name, column, spec.format, is_key=name in (*spec.row_id, *spec.keys))
        try:
            parsed = _column(file, cells.get(name), form, rows, missing)
        except DeliveryRefused as refused:
            if may_be_shown(name, spec):
                raise
            # Arrow's own error behind the refusal names the value as well.
            raise refused.withheld() from None
        columns[name] = parsed.values
        faults += [(name, fault) for fault in (*parsed.faults, *_null_faults(parsed, form))]
    table = pa.table(columns)
    places = _partition_times(table, spec, faults)
    rejected += [_rejected(file, f.position + 1, name, f, places.get(f.position), spec) for name, f in faults]
    return table


def _rejected(
    file: str, row: int, column: str, fault: CellFault | RowFault, time: int | None, spec: SourceSpec
) -> RejectedRow:
    if (fault.value or fault.detail) and not may_be_shown(column, spec):
        return RejectedRow(file, row, column, fault.code, WITHHELD, "", time)
    return RejectedRow(file, row, column, fault.code, fault.value, fault.detail, time)


def _partition_times(table: pa.Table, spec: SourceSpec, faults: Sequence[tuple[str, CellFault]]) -> dict[int, int]:
    """Where faulty rows lie in partition time, as far as that is known; approximate for a doubtful local time."""
    if spec.partition is None or spec.partition.column not in table.column_names or not faults:
        return {}
    column = table.column(spec.partition.column)
    if not pa.types.is_timestamp(column.type):
        return {}
    known = {f.position: column[f.position].cast(pa.int64()).as_py() for _, f in faults}
    known |= {f.position: f.time for name, f in faults if name == spec.partition.column}
    return {position: time for position, time in known.items() if time is not None}


def _column(
    file: str,
    cells: pa.ChunkedArray | pa.Array | None,
    form: CellForm,
    rows: int,
    missing: dict[str, list[str]],
) -> Parsed:
    if cells is None:
        if form.required:
            raise DeliveryRefused(
                file, "is required and missing in the file", "deliver it", column=form.name, limit=form.type
            )
        missing[form.name].append(file)
        return parse_text(pa.nulls(rows, pa.string()), form, file)
    if isinstance(cells, pa.ChunkedArray):
        return parse_typed(cells, form, file)
    return parse_text(cast(pa.StringArray, cells), form, file)


def _null_faults(parsed: Parsed, form: CellForm) -> list[CellFault]:
    if not form.required or parsed.values.null_count == 0:
        return []
    known = {fault.position for fault in parsed.faults}
    nulls = np.flatnonzero(parsed.values.is_null().to_numpy(zero_copy_only=False))
    return [CellFault(int(i), "null_in_required_column", "", "") for i in nulls if int(i) not in known]


def _without_rejected(raw: _Raw, names: Sequence[str]) -> _Raw:
    if not raw.rejected:
        return raw
    gone = {(r.file, r.row) for r in raw.rejected}
    keep = np.array([(names[f], int(r)) not in gone for f, r in zip(raw.file, raw.row, strict=True)], dtype=np.bool_)
    return replace(raw, table=raw.table.filter(pa.array(keep)), file=raw.file[keep], row=raw.row[keep])


def _transform(
    pipeline: Pipeline, spec: SourceSpec, source: str, raw: pa.Table, lookups: Mapping[str, pa.Table] | None
) -> pa.Table:
    if spec.transform is None:
        return conform(raw, spec, source)
    tables = dict(lookups) if lookups is not None else {n: read_delivery(pipeline, n).table for n in spec.lookups}
    transform = pipeline.function(spec.transform)
    try:
        made = transform(raw, {name: tables[name] for name in spec.lookups})
    except HeadwayError:
        raise
    except Exception as error:
        # Its message may hold values of the data; --debug shows it to a person.
        raise TransformFault(
            f"{source}: the transform {spec.transform} raised {type(error).__name__}",
            "run `headway --debug datasets canonical` on the file to see where",
        ) from error
    return conform(made, spec, source, rows=raw.num_rows)


def _reject_faulty(raw: _Raw, spec: SourceSpec, names: Sequence[str]) -> _Raw:
    faults = row_faults(raw.table, spec)
    if not faults:
        return raw
    times = raw.table.column(spec.partition.column).cast(pa.int64()).to_pylist() if spec.partition else None
    rejected = [
        _rejected(
            names[int(raw.file[f.position])],
            int(raw.row[f.position]),
            f.column,
            f,
            None if times is None else times[f.position],
            spec,
        )
        for f in faults
    ]
    return _without_rejected(replace(raw, rejected=[*raw.rejected, *rejected]), names)
