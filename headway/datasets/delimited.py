"""Delimited text to columns of text, strictly: nothing is repaired, shifted, renamed or guessed.

A file without quotes is cut by Arrow's reader. Any other file, and any that Arrow refuses, is read by Python's `csv` in
strict mode, which decides what is wrong and where. Both give the same columns.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv

from headway.datasets.refusal import DeliveryRefused
from headway.declaration import CsvFormat

# Arrow's reader makes a row of missing cells out of an empty line.
_EMPTY_LINE = re.compile(rb"\n\r?\n|\r\r|\A\r?\n")
_FIELD_LIMIT = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TextTable:
    """A file's cells as text (no nulls), the header after its declared blank rule, and notes about that rule."""

    names: tuple[str, ...]
    columns: tuple[pa.StringArray, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Number of data rows."""
        return len(self.columns[0])


def read_delimited(data: bytes, file: str, form: CsvFormat) -> TextTable:
    """The text cells of a delimited file.

    Raises:
        DeliveryRefused: bytes outside the encoding, no header, a header that breaks a declared rule, a row with another
            number of cells, an unfinished quote.
    """
    text = _decode(data, file, form)
    header = _header(text, file, form)
    names, notes = _apply_header_rules(header, file, form)
    if not text:
        raise DeliveryRefused(file, "the file is empty, not even a header", "deliver the header row also without data")
    columns = _fast_columns(text, len(header), form) if form.quote not in text else None
    if columns is None:
        columns = _strict_columns(text, len(header), file, form)
    return TextTable(names, columns, notes)


def _decode(data: bytes, file: str, form: CsvFormat) -> str:
    try:
        text = data.decode(form.encoding)
    except UnicodeDecodeError as error:
        raise DeliveryRefused(
            file, f"byte {error.start} is not {form.encoding}", "declare the encoding the file is written in"
        ) from error
    if text.startswith("\ufeff"):
        raise DeliveryRefused(file, "starts with a byte order mark", "declare encoding utf-8-sig")
    if "\0" in text:
        raise DeliveryRefused(file, f"holds a NUL character at {text.index(chr(0))}", "deliver a text file")
    return text


def _header(text: str, file: str, form: CsvFormat) -> list[str]:
    reader = _reader(text, form)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DeliveryRefused(file, f"the header cannot be read: {error}", "mend the header") from error
    if not header:
        raise DeliveryRefused(file, "there is no header row", "deliver the header row also without data")
    return header


def _apply_header_rules(header: Sequence[str], file: str, form: CsvFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    blank = [name for name in header if name != name.strip()]
    if blank and form.header_blanks == "refuse":
        raise DeliveryRefused(
            file,
            f"the column name {blank[0]!r} has blanks around it",
            "declare header_blanks: strip or keep, or mend the header",
        )
    names = tuple(name.strip() for name in header) if form.header_blanks == "strip" else tuple(header)
    _refuse_equal(names, file, "is written {n} times, as columns {places}", "column names must differ; mend the header")
    if "" in names:
        raise DeliveryRefused(file, f"column {names.index('') + 1} has no name", "name it in the header")
    if form.case_only_difference == "refuse":
        _refuse_equal(
            tuple(n.casefold() for n in names),
            file,
            "differs from another by case only, columns {places}",
            "declare case_only_difference: distinct to read them as two columns",
            shown=names,
        )
    notes = tuple(f"blanks around {name!r} {_blank_rule(form)}" for name in blank)
    return names, notes


def _blank_rule(form: CsvFormat) -> str:
    return "removed" if form.header_blanks == "strip" else "kept"


def _refuse_equal(
    names: Sequence[str], file: str, problem: str, remedy: str, shown: Sequence[str] | None = None
) -> None:
    for name in names:
        places = [i for i, other in enumerate(names) if other == name]
        if len(places) > 1:
            text = problem.format(n=len(places), places=" and ".join(str(p + 1) for p in places))
            written = " / ".join(dict.fromkeys((shown or names)[p] for p in places))
            raise DeliveryRefused(file, f"the column name {written!r} {text}", remedy)


def _fast_columns(text: str, width: int, form: CsvFormat) -> tuple[pa.StringArray, ...] | None:
    """Columns by Arrow's reader, or None when it refuses the file and the strict reader has to say why."""
    names = [str(i) for i in range(width)]
    body = text.rstrip("\r\n").encode()
    if width == 1 or _EMPTY_LINE.search(body) or (not body.isascii() and form.delimiter > "\x7f"):
        return None
    try:
        table = pyarrow.csv.read_csv(
            pa.py_buffer(body),
            read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=1, block_size=16 << 20),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=form.delimiter, quote_char=False, ignore_empty_lines=False
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), null_values=[], strings_can_be_null=False
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    return tuple(_one_array(column) for column in table.columns)


def _strict_columns(text: str, width: int, file: str, form: CsvFormat) -> tuple[pa.StringArray, ...]:
    reader = _reader(text, form)
    next(reader)
    rows: list[list[str]] = []
    blank_at: int | None = None
    try:
        for cells in reader:
            if not cells:
                blank_at = len(rows) + 1 if blank_at is None else blank_at
                continue
            if blank_at is not None:
                raise DeliveryRefused(file, "is an empty line", "remove it", row=blank_at)
            if len(cells) != width:
                raise _wrong_width(len(cells), width, file, len(rows) + 1, text)
            rows.append(cells)
    except csv.Error as error:
        raise _not_readable(error, file, len(rows) + 1) from error
    columns = zip(*rows, strict=True) if rows else ((),) * width
    return tuple(pa.array(column, type=pa.string()) for column in columns)


def _wrong_width(found: int, width: int, file: str, row: int, text: str) -> DeliveryRefused:
    cut = row and not text.endswith(("\n", "\r")) and found < width
    hint = "; if it is the last row, the file may be truncated" if cut else ""
    return DeliveryRefused(
        file, f"has {found} cells, the header has {width}{hint}", "deliver the file again, whole", row=row
    )


def _not_readable(error: csv.Error, file: str, row: int) -> DeliveryRefused:
    if "unexpected end of data" in str(error):
        return DeliveryRefused(
            file, "ends inside a quoted text: the file is truncated", "deliver the file again, whole", row=row
        )
    return DeliveryRefused(
        file, f"cannot be read: {error}", "mend the quoting, or declare the quote character", row=row
    )


def _reader(text: str, form: CsvFormat) -> Iterator[list[str]]:
    csv.field_size_limit(_FIELD_LIMIT)
    return csv.reader(
        io.StringIO(text, newline=""), delimiter=form.delimiter, quotechar=form.quote, doublequote=True, strict=True
    )


def _one_array(column: pa.ChunkedArray) -> pa.StringArray:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.StringArray) else pa.concat_arrays(column.chunks)
