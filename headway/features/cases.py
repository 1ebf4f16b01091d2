"""Runs machine-readable point-in-time cases on the kernel: a file of rows, labels and expected answers.

A file is {"kind": "latest" or "window", "cases": [{"name", "contract", "rows", "labels", "expected"}, ...]}. Times are
integer microseconds UTC, values one float or null. Source rules are not applied: rows count as admitted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError
from headway.features.kernel import (
    AGGREGATES,
    NULL_KEY,
    UNKNOWN_KEY,
    AmbiguousTie,
    KernelInputError,
    Observations,
    Reason,
    Rows,
    latest,
    window,
)

Case = dict[str, Any]
Tagged = tuple[Any, ...]
RELATIVE = 1e-9


class CaseFileError(HeadwayError):
    """The file is no case file: what is wrong and where."""


def run_cases(path: Path) -> list[dict[str, Any]]:
    """Run every case of a file. Each answer is {"name", "passed", "results"}, results in the form of "expected".

    A case that the kernel refuses has not passed; its answer has "error" with the reason and no results.

    Raises:
        CaseFileError: not JSON, an unknown kind, a missing or wrongly typed field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number, parse_float=finite)
    except (OSError, ValueError) as error:
        raise CaseFileError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CaseFileError(f"{path}: holds a {type(document).__name__}, needed is an object with kind and cases")
    where = str(path)
    kind = field(document, "kind", where, str)
    if kind not in RUNNERS:
        raise CaseFileError(f"{path}: unknown kind {kind!r}", f"use {' or '.join(RUNNERS)}")
    cases = field(document, "cases", where, list)
    return [run_case(RUNNERS[kind], case, f"{path}: case {i}") for i, case in enumerate(cases)]


def run_case(runner: Callable[[Case, str], list[Case]], case: Case, where: str) -> dict[str, Any]:
    """Run one case and compare."""
    if not isinstance(case, dict):
        raise CaseFileError(f"{where}: holds a {type(case).__name__}, needed is an object")
    name = field(case, "name", where, str)
    where = f"{where} ({name})"
    expected = field(case, "expected", where, list)
    try:
        results = runner(case, where)
    except (AmbiguousTie, KernelInputError) as error:
        return {"name": name, "passed": False, "results": [], "error": str(error)}
    passed = len(results) == len(expected) and all(map(agrees, expected, results))
    return {"name": name, "passed": passed, "results": results}


def run_latest(case: Case, where: str) -> list[Case]:
    """Answers of a latest case: value, event_time, reason."""
    contract = field(case, "contract", where, dict)
    rows, observations, groups = encoded(case, where)
    value, null = measured(case, where)
    chosen = latest(
        rows,
        observations,
        groups=groups,
        boundary=choice(contract, "boundary", where, ("lt", "le")),
        lookback=optional_integer(contract, "lookback", where),
        null_policy=choice(contract, "null_policy", where, ("row_wins", "last_known"), "row_wins"),
        null=null,
        tie_break_row_id="row_id" in names(contract, "tie_break", where),
    )
    return [
        {
            "value": float(value[chosen.row[i]]) if chosen.row[i] >= 0 else None,
            "event_time": int(chosen.event_time[i]) if chosen.has_event_time[i] else None,
            "reason": Reason(int(chosen.reason[i])).name.lower(),
        }
        for i in range(len(observations))
    ]


def run_window(case: Case, where: str) -> list[Case]:
    """Answers of a window case: all aggregates by name, reason."""
    contract = field(case, "contract", where, dict)
    rows, observations, groups = encoded(case, where)
    value, null = measured(case, where)
    (cells,) = window(
        rows,
        observations,
        value,
        null,
        groups=groups,
        boundary=choice(contract, "boundary", where, ("lt", "le")),
        durations=[field(contract, "window", where, int)],
        aggregates=AGGREGATES,
    )
    return [
        {
            "values": {name: aggregate(name, cells.values[name][i], cells.null[name][i]) for name in AGGREGATES},
            "reason": Reason(int(cells.reason[i])).name.lower(),
        }
        for i in range(len(observations))
    ]


RUNNERS: dict[str, Callable[[Case, str], list[Case]]] = {"latest": run_latest, "window": run_window}


def aggregate(name: str, value: np.float64, null: np.bool_) -> float | int | None:
    """One aggregate as the file writes it: counts are integers."""
    if null:
        return None
    return int(value) if name in ("count", "count_value", "distinct") else float(value)


def encoded(case: Case, where: str) -> tuple[Rows, Observations, int]:
    """Rows and labels of a case as kernel columns. Keys and row ids may mix text and integers; types never meet."""
    rows = field(case, "rows", where, list)
    labels = field(case, "labels", where, list)
    at_row = [f"{where}, row {i}" for i in range(len(rows))]
    at_label = [f"{where}, label {i}" for i in range(len(labels))]
    keys = [tagged(present(r, "key", w), w) for r, w in zip(rows, at_row, strict=True)]
    wanted = [tagged(present(r, "key", w), w) for r, w in zip(labels, at_label, strict=True)]
    code = {key: i for i, key in enumerate(sorted({k for k in keys if k is not None}))}
    row_id = None
    if any("row_id" in r for r in rows):
        ids = [tagged(present(r, "row_id", w), w) for r, w in zip(rows, at_row, strict=True)]
        for identity, w in zip(ids, at_row, strict=True):
            if identity is None:
                raise CaseFileError(f"{w}: row_id is null")
        rank = {identity: i for i, identity in enumerate(sorted({i for i in ids if i is not None}))}
        row_id = integers([rank[i] for i in ids if i is not None])
    times = [optional_integer(r, "t", w, required=True) for r, w in zip(labels, at_label, strict=True)]
    return (
        Rows(
            key=integers([NULL_KEY if k is None else code[k] for k in keys]),
            event_time=integers([field(r, "event_time", w, int) for r, w in zip(rows, at_row, strict=True)]),
            available_time=integers([field(r, "available_time", w, int) for r, w in zip(rows, at_row, strict=True)]),
            sequence=integers([optional_integer(r, "sequence", w) or 0 for r, w in zip(rows, at_row, strict=True)]),
            deleted=np.array([flag(r, "deleted", w) for r, w in zip(rows, at_row, strict=True)], np.bool_),
            row_id=row_id,
        ),
        Observations(
            key=integers([NULL_KEY if k is None else code.get(k, UNKNOWN_KEY) for k in wanted]),
            time=integers([0 if t is None else t for t in times]),
            valid=np.array([t is not None for t in times], np.bool_),
        ),
        len(code),
    )


def measured(case: Case, where: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Values of a case's rows, and which are null."""
    values: list[float | None] = []
    for i, row in enumerate(case["rows"]):
        value = present(row, "value", f"{where}, row {i}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CaseFileError(f"{where}, row {i}: value is {value!r}, needed is a number or null")
        try:
            values.append(None if value is None else float(value))
        except OverflowError as error:
            raise CaseFileError(f"{where}, row {i}: value does not fit float64: {error}") from error
    return (
        np.array([0.0 if v is None else v for v in values], np.float64),
        np.array([v is None for v in values], np.bool_),
    )


def tagged(key: object, where: str) -> Tagged | None:
    """A key or row id that only equals its own type, and sorts; None for null. A list is a composite key."""
    if key is None:
        return None
    if isinstance(key, bool):
        return (0, key)
    if isinstance(key, int):
        return (1, key)
    if isinstance(key, str):
        return (2, key)
    if isinstance(key, list):
        parts = [tagged(part, where) for part in key]
        return None if None in parts else (3, *parts)
    raise CaseFileError(f"{where}: {key!r} is a {type(key).__name__}", "keys and row ids are text, integers or null")


def agrees(expected: object, result: object) -> bool:
    """Equal, floats to 1e-9 relative; a field that is not expected is not compared."""
    if isinstance(expected, dict):
        return isinstance(result, dict) and all(k in result and agrees(v, result[k]) for k, v in expected.items())
    if isinstance(expected, bool) or expected is None or result is None or isinstance(expected, str):
        return expected == result
    if isinstance(expected, int | float) and isinstance(result, int | float):
        return math.isclose(expected, result, rel_tol=RELATIVE, abs_tol=0.0)
    return False


def integers(numbers: list[int]) -> NDArray[np.int64]:
    """An int64 column."""
    try:
        return np.array(numbers, np.int64)
    except OverflowError as error:
        raise CaseFileError(f"a time or sequence does not fit int64: {error}") from error


def no_number(text: str) -> float:
    """Refuse the constants that Python's reader takes and JSON does not have."""
    raise ValueError(f"{text} is no number in JSON; a missing value is null")


def finite(text: str) -> float:
    """A number with a fraction or exponent, which must fit float64."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} does not fit float64")
    return number


def names(record: Case, name: str, where: str) -> list[str]:
    """A list of texts, empty when absent."""
    listed = field(record, name, where, list) if name in record else []
    if not all(isinstance(item, str) for item in listed):
        raise CaseFileError(f"{where}: field {name!r} is {listed!r}, needed is a list of names")
    return listed


def present(record: object, name: str, where: str) -> Any:  # noqa: ANN401 - a value straight out of JSON
    """A field of any type that must be there."""
    if not isinstance(record, dict):
        raise CaseFileError(f"{where}: holds a {type(record).__name__}, needed is an object")
    if name not in record:
        raise CaseFileError(f"{where}: field {name!r} is missing")
    return record[name]


def field(record: object, name: str, where: str, kind: type) -> Any:  # noqa: ANN401 - a value straight out of JSON
    """A field of one type that must be there."""
    value = present(record, name, where)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CaseFileError(f"{where}: field {name!r} is {value!r}, needed is {kind.__name__}")
    return value


def optional_integer(record: object, name: str, where: str, *, required: bool = False) -> int | None:
    """An integer field that may be null, and absent unless required."""
    if not required and isinstance(record, dict) and name not in record:
        return None
    return None if present(record, name, where) is None else field(record, name, where, int)


def flag(record: object, name: str, where: str) -> bool:
    """A bool field, False when absent."""
    return isinstance(record, dict) and name in record and field(record, name, where, bool)


def choice(record: Case, name: str, where: str, allowed: tuple[str, ...], otherwise: str | None = None) -> Any:  # noqa: ANN401 - one of `allowed`
    """A field that takes one of a few words."""
    value = record.get(name, otherwise) if otherwise is not None else present(record, name, where)
    if value not in allowed:
        raise CaseFileError(f"{where}: field {name!r} is {value!r}", f"use {' or '.join(allowed)}")
    return value
