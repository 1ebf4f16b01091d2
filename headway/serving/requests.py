"""Reads prediction requests: only what a caller knows at the observation, checked row by row before anything happens.

The same rules hold for JSON and Parquet: fields are matched by name, their order does not matter, a missing optional
field is null, and everything that the declaration does not list is refused by name. Rows are counted from 1.
"""

from __future__ import annotations

import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from headway.datasets.arrow import compute as pc
from headway.datasets.partitions import PartitionScheme
from headway.datasets.text import ARROW_TYPES
from headway.datasets.zones import instant, iso
from headway.declaration import ColumnType, PipelineSpec, RequestColumn, ServingSpec, duration_us
from headway.errors import HeadwayError

MAX_BYTES = 64 * 1024 * 1024
MAX_ROWS = 100_000
MAX_UNPACKED = 512 * 1024 * 1024
MAX_TEXT = 1_000

_LISTED = 10
_EXAMPLES: dict[str, Any] = {"string": "A", "int64": 1, "float64": 0.5, "bool": True, "date": "2013-01-31"}
_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_INT64 = 2**63
_EXACT = 2**53


@dataclass(frozen=True)
class RequestProblem:
    """One fault: the row (from 1; 0 means the whole file), the field, what is wrong with it and what to do."""

    row: int
    field: str
    message: str
    remedy: str

    def __str__(self) -> str:
        place = ", ".join(p for p in (f"row {self.row}" if self.row else "", self.field) if p)
        return f"{place}: {self.message}" if place else self.message


class RequestsRefused(HeadwayError):
    """Requests that are not as declared; `problems` names row, field, value and remedy of every fault."""

    def __init__(self, file: str, problems: Sequence[RequestProblem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{p}; {p.remedy}" for p in self.problems[:_LISTED]]
        left = len(self.problems) - _LISTED
        more = [f"and {left} more"] if left > 0 else []
        block = "\n  ".join([f"{file}: {len(self.problems)} faults", *lines, *more])
        super().__init__(f"{file}: {lines[0]}" if len(lines) == 1 else block)


class NotServed(HeadwayError):
    """The pipeline declares no `serving`, so it cannot be asked."""


def read_requests(path: Path, spec: PipelineSpec) -> pa.Table:
    """The requests of a `.json` (a list of objects, or {"requests": [...]}) or `.parquet` file, in their order.

    Returns:
        One column per declared request field, in declared order; timestamps are microseconds UTC.

    Raises:
        NotServed: the pipeline declares no `serving`.
        RequestsRefused: the file or a row is not as declared. Every row is looked at first.
    """
    serving = serving_of(spec)
    readers = {".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        _refuse(path, f"a file ending in {path.suffix!r} is no request file", "give a .json or a .parquet file")
    return readers[path.suffix](path, _bytes(path), spec, serving)


def serving_of(spec: PipelineSpec) -> ServingSpec:
    """The declared request. Raises `NotServed` without one."""
    if spec.text is not None:
        raise NotServed(
            f"pipeline {spec.name!r} learns from text: its models answer no requests",
            "`headway models show` shows what a version is worth, and its asset what it writes",
        )
    if spec.serving is None:
        raise NotServed(f"pipeline {spec.name!r} declares no `serving`", "declare what a request holds, in defs.yaml")
    return spec.serving


def is_asked_at(spec: PipelineSpec, now: int) -> bool:
    """Whether the pipeline's calendar, which has an end where data is recorded, holds a time of the world."""
    declared = spec.sources[spec.label.source].partition
    return declared is None or bool(PartitionScheme.from_spec(declared).keys_between(now, now))


def example_request(spec: PipelineSpec, now: int) -> dict[str, Any]:
    """A request, as JSON values, that is well-formed and asked for at a time of the world; its values are made up."""
    serving = serving_of(spec)
    asked = iso(now - now % 60_000_000 + duration_us(serving.before))
    return {n: asked if f.type == "timestamp" else _EXAMPLES[f.type] for n, f in serving.request.items()}


def example_rows(spec: PipelineSpec, now: int) -> pa.Table:
    """`example_request` as `read_requests` gives it."""
    example, fields = example_request(spec, now), serving_of(spec).request
    return pa.table({n: pa.array([parse_value(f.type, example[n])], ARROW_TYPES[f.type]) for n, f in fields.items()})


class ValueRefused(HeadwayError):
    """A value that is not of its declared type: what is wrong with it, and what to do."""


def parse_value(kind: ColumnType, value: object) -> Any:  # noqa: ANN401
    """A JSON value of a declared type as Arrow takes it: times as microseconds UTC, dates as `date`.

    Nothing is converted between kinds. Raises `ValueRefused`.
    """
    try:
        return _PARSERS[kind](value)
    except _Wrong as wrong:
        raise ValueRefused(*wrong.args) from wrong


def is_personal(spec: PipelineSpec, field: RequestColumn) -> bool:
    """Whether a request field fills a column whose values must not be shown or stored as they are."""
    return field.column in spec.sources[spec.label.source].privacy.personal


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        _refuse(path, "there is no such file", "give the path of a .json or .parquet file")
    size = path.stat().st_size
    if size > MAX_BYTES:
        _refuse(path, f"the file has {size:,} bytes, the limit is {MAX_BYTES:,}", "split it")
    return path.read_bytes()


def _refuse(path: Path, message: str, remedy: str, cause: Exception | None = None) -> NoReturn:
    raise RequestsRefused(path.name, [RequestProblem(0, "", message, remedy)]) from cause


@dataclass(frozen=True)
class _Members:
    """A JSON object as it was written: duplicate names are still there."""

    pairs: list[tuple[str, Any]]


def _read_json(path: Path, data: bytes, spec: PipelineSpec, serving: ServingSpec) -> pa.Table:
    rows = _json_rows(path, data, len(serving.request))
    problems: list[RequestProblem] = []
    columns: dict[str, list[Any]] = {name: [] for name in serving.request}
    for number, row in enumerate(rows, 1):
        members = _members(row, number, problems)
        if members is None:
            continue
        for name in members:
            if name not in serving.request:
                problems.append(_unknown(spec, name, number))
        for name, field in serving.request.items():
            columns[name].append(_checked(spec, name, field, members, number, problems))
    if problems:
        raise RequestsRefused(path.name, problems)
    return pa.table({n: pa.array(columns[n], ARROW_TYPES[f.type]) for n, f in serving.request.items()})


def _json_rows(path: Path, data: bytes, fields: int) -> list[Any]:
    # Counted before parsing: each container and each value of the document costs memory many times its text.
    if data.count(b"{") + data.count(b"[") > 2 * MAX_ROWS or data.count(b",") > MAX_ROWS * (2 * fields + 1):
        _refuse(path, f"the document holds more than {MAX_ROWS:,} rows can hold", "split it")
    try:
        document: Any = json.loads(data.decode("utf-8"), object_pairs_hook=_Members, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        _refuse(path, f"not UTF-8 at byte {error.start}", "write the file in UTF-8", error)
    except RecursionError as error:
        _refuse(path, "nested far deeper than a list of flat rows", "write each row as one flat object", error)
    except ValueError as error:
        _refuse(path, f"not JSON: {error}"[:200], "mend the file; where there is no value write null", error)
    if isinstance(document, _Members):
        names = [name for name, _ in document.pairs]
        if names != ["requests"]:
            _refuse(path, f"the document has members {names!r:.120}", 'write a list of rows, or {"requests": [...]}')
        document = document.pairs[0][1]
    if not isinstance(document, list):
        _refuse(path, f"the document is {_kind(document)}, no list of rows", 'write [{...}], or {"requests": [{...}]}')
    _count(path, len(document))
    return document


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _count(path: Path, rows: int) -> None:
    if not rows:
        _refuse(path, "the file holds no requests", "give at least one row")
    if rows > MAX_ROWS:
        _refuse(path, f"the file holds {rows:,} requests, the limit is {MAX_ROWS:,}", "split it")


def _members(row: object, number: int, problems: list[RequestProblem]) -> dict[str, Any] | None:
    if not isinstance(row, _Members):
        remedy = "name every value: {field: value, ...}; inputs are never matched by position"
        problems.append(RequestProblem(number, "", f"{_kind(row)} where an object belongs", remedy))
        return None
    found: dict[str, Any] = {}
    for name, value in row.pairs:
        if name in found:
            problems.append(RequestProblem(number, repr(name)[:80], "the field stands twice", "give it once"))
        found[name] = value
    return found


def _unknown(spec: PipelineSpec, name: str, number: int) -> RequestProblem:
    serving = serving_of(spec)
    shown = repr(name)[:80]
    if _is_feature(spec, name):
        return RequestProblem(number, shown, "is a feature, and Headway computes features itself", "leave it out")
    return RequestProblem(
        number, shown, "is no field of a request", f"leave it out; the fields are {', '.join(serving.request)}"
    )


def _is_feature(spec: PipelineSpec, name: str) -> bool:
    """A feature, or one of the columns that a snapshot keeps beside it."""
    return name in spec.feature_names() or (name.partition("__")[0] in spec.features.views and "__" in name)


def _checked(
    spec: PipelineSpec,
    name: str,
    field: RequestColumn,
    members: dict[str, Any],
    number: int,
    problems: list[RequestProblem],
) -> Any:  # noqa: ANN401
    """The value as Arrow takes it; None when it is null or refused."""
    value = members.get(name)
    if value is None:
        if field.required:
            what = "null" if name in members else "missing"
            problems.append(RequestProblem(number, name, f"the required field is {what}", f"give a {field.type}"))
        return None
    try:
        return _PARSERS[field.type](value)
    except _Wrong as wrong:
        problems.append(RequestProblem(number, name, f"{_shown(spec, field, value)} {wrong.args[0]}", wrong.args[1]))
        return None


class _Wrong(Exception):
    """What is wrong with a value, and the remedy."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"is {_kind(value)}, needed is text", "put it in quotes if it is text")
    if len(value) > MAX_TEXT:
        raise _Wrong(f"has {len(value):,} characters, the limit is {MAX_TEXT:,}", "shorten it")
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
        raise _Wrong("holds half of a surrogate pair", "write the whole character")
    if not unicodedata.is_normalized("NFC", value):
        raise _Wrong("is not in Unicode normal form C, so it would match no key", "normalise it")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"is {_kind(value)}, needed is a whole number", "write it without quotes, point or exponent")
    if not -_INT64 <= value < _INT64:
        raise _Wrong("does not fit int64", "give a number from -2^63 to 2^63 - 1")
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"is {_kind(value)}, needed is a number", "write it without quotes")
    if isinstance(value, int) and abs(value) > _EXACT:
        raise _Wrong("is a whole number that float64 cannot hold exactly", "give at most 2^53")
    if not math.isfinite(value):
        raise _Wrong("is not finite", "write null where there is no value")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"is {_kind(value)}, needed is true or false", "write true or false without quotes")
    return value


def _day(value: object) -> date:
    if not isinstance(value, str) or _DATE.fullmatch(value) is None:
        raise _Wrong("is no date", "write it as 2013-01-31")
    try:
        return date.fromisoformat(value)
    except ValueError as error:
        raise _Wrong(f"is no date ({error})", "give a day of the calendar") from error


def _moment(value: object) -> int:
    """Microseconds UTC; no zone and more than six decimals are refused, never guessed or cut."""
    if not isinstance(value, str) or _TIMESTAMP.fullmatch(value) is None:
        raise _Wrong(
            "is no ISO 8601 time with a zone",
            "write it as 2013-01-31T05:15:00Z or 2013-01-31T00:15:00-05:00, with at most six decimals",
        )
    try:
        return instant(datetime.fromisoformat(value))
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"is no time ({error})", "give a time of the calendar, years 1 to 9999") from error


_PARSERS: dict[str, Callable[[object], Any]] = {
    "string": _text,
    "int64": _whole,
    "float64": _float,
    "bool": _flag,
    "date": _day,
    "timestamp": _moment,
}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {"int": "a whole number", "float": "a decimal number", "str": "text", "list": "a list", "NoneType": "null"}
    return names.get(type(value).__name__, "an object")


def _read_parquet(path: Path, data: bytes, spec: PipelineSpec, serving: ServingSpec) -> pa.Table:
    table = _parquet_table(path, data, serving)
    problems = [_unknown(spec, name, 0) for name in table.column_names if name not in serving.request]
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    for name, field in serving.request.items():
        if name in table.column_names:
            columns[name] = _converted(spec, name, field, table.column(name), problems)
        else:
            columns[name] = pa.nulls(table.num_rows, ARROW_TYPES[field.type])
            if field.required:
                problems.append(RequestProblem(0, name, "the required column is missing", f"give a {field.type}"))
    if problems:
        raise RequestsRefused(path.name, problems)
    return pa.table(columns)


def _parquet_table(path: Path, data: bytes, serving: ServingSpec) -> pa.Table:
    try:
        reader = pq.ParquetFile(io.BytesIO(data))
        facts, schema = reader.metadata, reader.schema_arrow
    except (pa.ArrowException, OSError) as error:
        _refuse(path, f"not Parquet: {error}"[:200], "write it again", error)
    _count(path, facts.num_rows)
    unpacked = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
    if unpacked > MAX_UNPACKED:
        _refuse(path, f"the file unpacks to {unpacked:,} bytes, the limit is {MAX_UNPACKED:,}", "split it")
    twice = sorted({n for n in schema.names if schema.names.count(n) > 1})
    if twice or len(schema.names) > 10 * len(serving.request) + 100:
        _refuse(path, f"columns {twice} stand twice" if twice else "far too many columns", "give each field once")
    try:
        table = reader.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        _refuse(path, f"the Parquet file cannot be read: {error}"[:200], "write it again", error)
    return table


def _converted(
    spec: PipelineSpec, name: str, field: RequestColumn, column: pa.ChunkedArray, problems: list[RequestProblem]
) -> pa.ChunkedArray | pa.Array:
    """The column in its declared type. Only widths and units of the same kind are converted."""
    wanted, kind = ARROW_TYPES[field.type], column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not _FITS[field.type](kind):
        zone = " without a zone" if pa.types.is_timestamp(kind) and kind.tz is None else ""
        message = f"the column holds {kind}{zone}, needed is {field.type}"
        remedy = "give timestamps with a zone" if field.type == "timestamp" else "write it in that type"
        problems.append(RequestProblem(0, name, message, remedy))
        return pa.nulls(len(column), wanted)
    try:
        plain = column.cast(wanted)
    except pa.ArrowInvalid as error:
        reason = "" if is_personal(spec, field) else f": {error}"[:120]
        remedy = "timestamps hold whole microseconds, whole numbers fit int64"
        problems.append(RequestProblem(0, name, f"a value does not fit {wanted}{reason}", remedy))
        return pa.nulls(len(column), wanted)
    problems += _value_problems(spec, name, field, plain)
    return plain


_FITS: dict[str, Callable[[pa.DataType], bool]] = {
    "string": lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_null(t),
    "int64": lambda t: pa.types.is_integer(t) or pa.types.is_null(t),
    "float64": lambda t: pa.types.is_floating(t) or pa.types.is_null(t),
    "bool": lambda t: pa.types.is_boolean(t) or pa.types.is_null(t),
    "date": lambda t: pa.types.is_date32(t) or pa.types.is_null(t),
    "timestamp": lambda t: (pa.types.is_timestamp(t) and t.tz is not None) or pa.types.is_null(t),
}


def _value_problems(
    spec: PipelineSpec, name: str, field: RequestColumn, column: pa.ChunkedArray
) -> Iterator[RequestProblem]:
    if field.required:
        for number in _rows_where(column.is_null()):
            yield RequestProblem(number, name, "the required field is null", f"give a {field.type}")
    if field.type == "timestamp":
        raw = column.cast(pa.int64())
        outside = pc.or_(pc.less(raw, _FIRST), pc.greater(raw, _LAST))
        for number in _rows_where(pc.fill_null(outside, False)):
            yield RequestProblem(number, name, "lies outside the years 1 to 9999", "give a time of the calendar")
    if field.type in ("string", "float64"):
        yield from _wrong_values(spec, name, field, column)


def _wrong_values(
    spec: PipelineSpec, name: str, field: RequestColumn, column: pa.ChunkedArray
) -> Iterator[RequestProblem]:
    for number, value in enumerate(column.to_pylist(), 1):
        if value is None:
            continue
        try:
            _PARSERS[field.type](value)
        except _Wrong as wrong:
            yield RequestProblem(number, name, f"{_shown(spec, field, value)} {wrong.args[0]}", wrong.args[1])


def _shown(spec: PipelineSpec, field: RequestColumn, value: object) -> str:
    return "a value (withheld: personal)" if is_personal(spec, field) else repr(value)[:80]


_FIRST = instant(datetime.fromisoformat("0001-01-01T00:00:00+00:00"))
_LAST = instant(datetime.fromisoformat("9999-12-31T23:59:59.999999+00:00"))


def _rows_where(mask: pa.ChunkedArray) -> list[int]:
    return [index + 1 for index, flag in enumerate(mask.to_pylist()) if flag]
