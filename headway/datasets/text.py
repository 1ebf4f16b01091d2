"""Declared text forms to values, one whole column at a time.

Text outside the declared form refuses the delivery. Text of the right form that names no instant (a clock time inside
the spring gap, one of the two readings of a repeated hour, hour 24 with minutes, 30 February) rejects its row.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.datasets.refusal import DeliveryRefused
from headway.datasets.zones import (
    AMBIGUOUS,
    END_OF_TIME_US,
    NONEXISTENT,
    OK,
    START_OF_TIME_US,
    instant,
    iso,
    local_to_utc,
    wall,
)
from headway.declaration import ColumnSpec, CsvFormat, ParquetFormat
from headway.declaration_text import TextFiles

TIMESTAMP = pa.timestamp("us", tz="UTC")
ARROW_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
}

_CLOCK = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?"
_NAIVE = re.compile(_CLOCK)
_OFFSET = re.compile(_CLOCK + r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)")
_PARTS = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.]([0-9]+))?)?(Z|[+-][0-9:]+)?"
)
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("date and time without offset", _NAIVE),
    ("date and time with offset", _OFFSET),
    ("time with a zone abbreviation", re.compile(_CLOCK + r" ?[A-Za-z]{2,5}")),
    ("bare number", re.compile(r"[+-]?[0-9]+([.][0-9]+)?")),
    ("date without time", re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")),
)
_DIRECTIVES = {
    "Y": "[0-9]{4}",
    "y": "[0-9]{2}",
    "m": "[0-9]{2}",
    "d": "[0-9]{2}",
    "H": "[0-9]{2}",
    "I": "[0-9]{2}",
    "M": "[0-9]{2}",
    "S": "[0-9]{2}",
    "f": "[0-9]{1,6}",
    "p": "[AaPp][Mm]",
    "j": "[0-9]{3}",
    "b": "[A-Za-z]{3}",
    "B": "[A-Za-z]+",
    "z": "(?:Z|[+-][0-9]{2}:?[0-9]{2})",
    "%": "%",
}


@dataclass(frozen=True, slots=True)
class CellFault:
    """A cell that rejects its row: 0-based position, reason code, what a person needs to know, approximate instant."""

    position: int
    code: str
    value: str
    detail: str = ""
    time: int | None = None


@dataclass(slots=True)
class Parsed:
    """Typed values of a column (null where the text means missing, or where a fault stands) and its faults."""

    values: pa.Array
    faults: list[CellFault] = field(default_factory=list[CellFault])


@dataclass(frozen=True, slots=True)
class CellForm:
    """How the cells of one column are written: the column's own declaration over its file format's."""

    name: str
    type: str
    required: bool
    is_key: bool
    zone: str | None
    date_format: str | None
    century_start: int | None
    decimal: str
    thousands: str | None
    plus_sign: bool
    missing: tuple[str, ...]

    @classmethod
    def of(
        cls, name: str, column: ColumnSpec, form: CsvFormat | ParquetFormat | TextFiles, *, is_key: bool
    ) -> "CellForm":
        """Resolve a column's form."""
        text = form if isinstance(form, CsvFormat) else CsvFormat()
        return cls(
            name=name,
            type=column.type,
            required=column.required,
            is_key=is_key,
            zone=column.zone or form.zone,
            date_format=column.date_format,
            century_start=column.century_start,
            decimal=column.decimal or text.decimal,
            thousands=column.thousands or text.thousands,
            plus_sign=text.plus_sign if column.plus_sign is None else column.plus_sign,
            missing=form.missing if column.missing is None else column.missing,
        )


def parse_text(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    """Typed values of text cells.

    Raises:
        DeliveryRefused: a cell is outside the declared form.
    """
    missing = pc.is_in(cells, value_set=pa.array(form.missing, type=pa.string()))
    present = pc.if_else(missing, pa.scalar(None, pa.string()), cells)
    parse: Callable[[pa.StringArray, CellForm, str], Parsed] = _PARSERS[form.type]
    return parse(present, form, file)


def two_digit_year(text_year: int, century_start: int) -> int:
    """The year in [century_start, century_start + 99] whose last two digits are `text_year` % 100."""
    return century_start + (text_year - century_start) % 100


def _string(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    del form, file
    return Parsed(cells)


def _int64(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    sign = "[+-]?" if form.plus_sign else "-?"
    mark = re.escape(form.thousands) if form.thousands else ""
    grouped = f"|[0-9]{{1,3}}({mark}[0-9]{{3}})+" if mark else ""
    leading = "(0|[1-9][0-9]*)" if form.is_key else "[0-9]+"
    _require(cells, f"^{sign}({leading}{grouped})$", form, file, f"a whole number{_number_words(form)}")
    plain = pc.replace_substring_regex(cells, f"[+{mark}]", "") if mark or form.plus_sign else cells
    try:
        return Parsed(plain.cast(pa.int64()))
    except pa.ArrowInvalid:
        _refuse_first(cells, lambda text: abs(int(re.sub(f"[+{mark}]", "", text))) >= 1 << 63, form, file)
        raise


def _float64(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    sign = "[+-]?" if form.plus_sign else "-?"
    point = re.escape(form.decimal)
    mark = re.escape(form.thousands) if form.thousands else ""
    grouped = f"|[0-9]{{1,3}}({mark}[0-9]{{3}})+({point}[0-9]+)?" if mark else ""
    plain = f"[0-9]+({point}[0-9]*)?|{point}[0-9]+"
    pattern = f"^{sign}(({plain})([eE][+-]?[0-9]+)?{grouped})$"
    _require(cells, pattern, form, file, f"a number{_number_words(form)}")
    text = pc.replace_substring_regex(cells, f"[{mark}]", "") if mark else cells
    text = pc.replace_substring(text, form.decimal, ".") if form.decimal != "." else text
    text = pc.replace_substring_regex(text, r"^\+", "") if form.plus_sign else text
    values = text.cast(pa.float64())
    huge = pc.fill_null(pc.is_inf(values), False)
    if pc.any(huge).as_py():
        row = pc.index(huge, True).as_py()
        raise _mismatch(cells[row].as_py(), row, form, file, "a number within the range of float64")
    return Parsed(values)


def _bool(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    _require(cells, "^(true|false|True|False|TRUE|FALSE)$", form, file, "true or false")
    return Parsed(pc.equal(pc.utf8_lower(cells), "true"))


def _date(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    pattern = form.date_format or "%Y-%m-%d"
    _require(cells, f"^{_regex(pattern)}$", form, file, f"a date written as {pattern}")
    return _by_unique(cells, lambda text: _strptime(text, pattern, form).date(), pa.date32())


def _timestamp(cells: pa.StringArray, form: CellForm, file: str) -> Parsed:
    if form.date_format is not None:
        return _formatted_timestamp(cells, form.date_format, form, file)
    naive = _matches(cells, f"^{_NAIVE.pattern}$")
    offset = _matches(cells, f"^{_OFFSET.pattern}$")
    _require_time_forms(cells, naive, offset, form, file)
    values = np.zeros(len(cells), dtype=np.int64)
    known = np.zeros(len(cells), dtype=np.bool_)
    faults: list[CellFault] = []
    for mask, is_local in ((offset, False), (naive, True)):
        if mask.any():
            where = np.flatnonzero(mask)
            part, ok, bad = _instants(cells.take(pa.array(where)), form, is_local=is_local)
            values[where], known[where] = part, ok
            faults += [CellFault(int(where[f.position]), f.code, f.value, f.detail, f.time) for f in bad]
    return Parsed(pa.array(values, mask=~known).cast(pa.timestamp("us")).cast(TIMESTAMP), faults)


def localize(
    local: NDArray[np.int64], present: NDArray[np.bool_], zone: str, written: Callable[[int], str]
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[CellFault]]:
    """Instants of wall clocks in a zone, where they are certain, and a fault for each that is not."""
    found = local_to_utc(np.where(present, local, 0), zone)
    ok = present & (found.status == OK)
    faults = [
        _clock_fault(int(i), written(int(i)), zone, found.status[i], int(found.utc[i]), int(found.later[i]))
        for i in np.flatnonzero(present & ~ok)
    ]
    return found.utc, ok, faults


def _clock_fault(position: int, text: str, zone: str, status: int, first: int, second: int) -> CellFault:
    if status == NONEXISTENT:
        return CellFault(position, "nonexistent_local_time", text, f"clocks in {zone} skip this time", first)
    if status == AMBIGUOUS:
        detail = f"in {zone} it is {iso(first)} or {iso(second)}"
        return CellFault(position, "ambiguous_local_time", text, detail, first)
    return CellFault(position, "no_such_time", text, "outside the years 1 to 9999 in UTC")


def _instants(
    cells: pa.StringArray, form: CellForm, *, is_local: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[CellFault]]:
    quick = _quick_clocks(cells, pa.timestamp("us") if is_local else TIMESTAMP)
    if quick is not None:
        times, known, faults = quick, np.ones(len(cells), dtype=np.bool_), []
    else:
        parsed = _by_unique(cells, _iso_clock, pa.int64())
        faults = parsed.faults
        known = parsed.values.is_valid().to_numpy(zero_copy_only=False)
        times = parsed.values.fill_null(0).to_numpy()
    if not is_local:
        return times, known, faults
    zone = form.zone or ""
    utc, ok, bad = localize(times, known, zone, lambda i: cells[i].as_py())
    return utc, ok, faults + bad


def _quick_clocks(cells: pa.StringArray, kind: pa.DataType) -> NDArray[np.int64] | None:
    """Times by Arrow's own parser; None when one needs a closer look, as when an offset takes it out of all years."""
    try:
        times: NDArray[np.int64] = cells.cast(kind).cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None
    return times if ((times >= START_OF_TIME_US) & (times < END_OF_TIME_US)).all() else None


def _iso_clock(text: str) -> int:
    """Microseconds of one ISO time: the wall clock when it has no offset, else the instant. Raises `_NoSuchTime`."""
    found = _PARTS.fullmatch(text)
    if found is None:
        raise _NoSuchTime("no_such_time", "not a time")
    year, month, day, hour, minute, second = (int(found[i] or 0) for i in range(1, 7))
    fraction = found[7] or ""
    if fraction[6:].strip("0"):
        raise _NoSuchTime("below_microsecond", "times are kept in microseconds, and this one would be rounded")
    extra = timedelta()
    if hour == 24:
        if minute or second or fraction.strip("0"):
            raise _NoSuchTime("hour_24", "hour 24 is legal only as 24:00:00, the end of the day")
        hour, extra = 0, timedelta(days=1)
    try:
        clock = datetime(year, month, day, hour, minute, second, int(fraction[:6].ljust(6, "0")))  # noqa: DTZ001
        return wall(clock + extra - _offset(found[8]))
    except (ValueError, OverflowError) as error:
        raise _NoSuchTime("no_such_time", str(error)) from error


def _offset(text: str | None) -> timedelta:
    if text is None or text == "Z":
        return timedelta()
    digits = text[1:].replace(":", "").ljust(4, "0")
    hours, minutes = int(digits[:2]), int(digits[2:])
    if hours > 18 or minutes > 59:
        raise ValueError(f"no offset {text}")
    span = timedelta(hours=hours, minutes=minutes)
    return -span if text[0] == "-" else span


def _formatted_timestamp(cells: pa.StringArray, pattern: str, form: CellForm, file: str) -> Parsed:
    _require(cells, f"^{_regex(pattern)}$", form, file, f"a time written as {pattern}")
    if "%z" in pattern:
        return _by_unique(cells, lambda text: instant(_strptime(text, pattern, form)), TIMESTAMP)
    if form.zone is None:
        raise _no_zone(cells, form, file)
    parsed = _by_unique(cells, lambda text: wall(_strptime(text, pattern, form)), pa.int64())
    known = parsed.values.is_valid().to_numpy(zero_copy_only=False)
    local = parsed.values.fill_null(0).to_numpy()
    utc, ok, bad = localize(local, known, form.zone, lambda i: cells[i].as_py())
    return Parsed(pa.array(utc, mask=~ok).cast(pa.timestamp("us")).cast(TIMESTAMP), parsed.faults + bad)


def _strptime(text: str, pattern: str, form: CellForm) -> datetime:
    try:
        found = datetime.strptime(text, pattern)  # noqa: DTZ007 - the zone is declared, not in the text
        if "%y" in pattern and form.century_start is not None:
            found = found.replace(year=two_digit_year(found.year, form.century_start))
    except ValueError as error:
        raise _NoSuchTime("no_such_time", f"no such date in the form {pattern}") from error
    return found


class _NoSuchTime(Exception):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail


def _by_unique(cells: pa.StringArray, parse: Callable[[str], object], kind: pa.DataType) -> Parsed:
    """Apply a parser to each distinct text."""
    encoded = cells.dictionary_encode()
    values: list[object] = []
    bad: dict[int, _NoSuchTime] = {}
    for index, text in enumerate(encoded.dictionary.to_pylist()):
        try:
            values.append(parse(text))
        except _NoSuchTime as error:
            bad[index] = error
            values.append(None)
    dictionary = pa.array(values, type=pa.int64() if kind == TIMESTAMP and values else kind)
    found = (dictionary.cast(pa.timestamp("us")).cast(kind) if kind == TIMESTAMP and values else dictionary).take(
        encoded.indices
    )
    codes = encoded.indices.fill_null(-1).to_numpy()
    faults = [
        CellFault(int(i), bad[int(codes[i])].code, cells[int(i)].as_py(), bad[int(codes[i])].detail)
        for i in np.flatnonzero(np.isin(codes, list(bad)))
    ]
    return Parsed(found, faults)


def _require_time_forms(
    cells: pa.StringArray, naive: NDArray[np.bool_], offset: NDArray[np.bool_], form: CellForm, file: str
) -> None:
    present = cells.is_valid().to_numpy(zero_copy_only=False)
    wrong = present & ~offset if form.zone is None else present & ~offset & ~naive
    if not wrong.any():
        return
    row = int(np.flatnonzero(wrong)[0])
    if form.zone is None and not (present & ~offset & ~naive).any() and not offset.any():
        raise _no_zone(cells, form, file)
    counted = Counter(_form_of(text) for text in cells.to_pylist() if text is not None)
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
    raise _mismatch(
        cells[row].as_py(),
        row,
        form,
        file,
        "an ISO 8601 date and time with offset" + (f", or without one in {form.zone}" if form.zone else ""),
        problem=f"is a {_form_of(cells[row].as_py())}; the column holds {summary}",
        remedy="deliver one declared form; declare `zone` if times without offset are local to one",
    )


def _no_zone(cells: pa.StringArray, form: CellForm, file: str) -> DeliveryRefused:
    row = pc.index(cells.is_valid(), True).as_py()
    return _mismatch(
        cells[row].as_py() if row >= 0 else "",
        max(row, 0),
        form,
        file,
        "a time with offset",
        problem="has no offset and no zone is declared",
        remedy="declare `zone` for the column or the format; it is never assumed to be UTC",
    )


def _form_of(text: str) -> str:
    return next((name for name, pattern in _FORMS if pattern.fullmatch(text)), "text that is no time")


def _regex(pattern: str) -> str:
    return re.sub(r"%(.)|([^%])", lambda m: _DIRECTIVES[m[1]] if m[1] else re.escape(m[2]), pattern)


def _matches(cells: pa.StringArray, pattern: str) -> NDArray[np.bool_]:
    return pc.fill_null(pc.match_substring_regex(cells, pattern), False).to_numpy(zero_copy_only=False)


def _require(cells: pa.StringArray, pattern: str, form: CellForm, file: str, limit: str) -> None:
    fits = pc.fill_null(pc.match_substring_regex(cells, pattern), True)
    if pc.all(fits).as_py() is False:
        row = pc.index(fits, False).as_py()
        text = cells[row].as_py()
        remedy = f"{pc.sum(pc.invert(fits)).as_py()} cells are like this; mend the delivery or declare its format"
        if form.type == "int64" and form.is_key and re.fullmatch("-?0[0-9]+", text):
            remedy = "a key with leading zeros is text: declare the column string"
        raise _mismatch(text, row, form, file, limit, remedy=remedy)


def _refuse_first(cells: pa.StringArray, is_wrong: Callable[[str], bool], form: CellForm, file: str) -> None:
    for row, text in enumerate(cells.to_pylist()):
        if text is not None and is_wrong(text):
            raise _mismatch(text, row, form, file, "a whole number that fits into int64")


def _mismatch(
    value: str,
    row: int,
    form: CellForm,
    file: str,
    limit: str,
    problem: str = "does not have the declared form",
    remedy: str = "mend the delivery or declare its format",
) -> DeliveryRefused:
    return DeliveryRefused(file, problem, remedy, row=row + 1, column=form.name, value=value, limit=limit)


def _number_words(form: CellForm) -> str:
    words: Sequence[str] = (
        f" with decimal mark {form.decimal!r}" if form.type == "float64" else "",
        f" grouped by {form.thousands!r}" if form.thousands else " without grouping",
        ", + allowed" if form.plus_sign else "",
    )
    return "".join(words)


_PARSERS: dict[str, Callable[[pa.StringArray, CellForm, str], Parsed]] = {
    "string": _string,
    "int64": _int64,
    "float64": _float64,
    "bool": _bool,
    "date": _date,
    "timestamp": _timestamp,
}
