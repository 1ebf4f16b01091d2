"""Quality suites: Great Expectations' own file form, read strictly before anything runs.

A rule that is misspelt, or that asks for something else than its author thinks, must not be found out at run time and
never by a green check. So every rule is compared here with `expectations.json`, the rules that may be used with their
parameters, without importing Great Expectations. Rules that need a database, or that test text a column's declared type
already decides, are left out of that table.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from headway.datasets.schema import stored_columns
from headway.declaration import SourceSpec
from headway.errors import HeadwayError
from headway.loading import Pipeline
from trainer.blobs import digest_bytes

Severity = Literal["critical", "warning", "info"]
Kind = Literal["row", "rows_together", "table"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
_RULES_FILE = Path(__file__).with_name("expectations.json")


@dataclass(frozen=True, slots=True)
class SuiteProblem:
    """One fault of a suite file; `rule` counts from 1, 0 is the file itself."""

    file: str
    rule: int
    field: str
    message: str

    def __str__(self) -> str:
        place = f", rule {self.rule}" if self.rule else ""
        return f"{self.file}{place}, {self.field}: {self.message}"


class SuiteRefused(HeadwayError):
    """A suite file that may not be used; `problems` lists every fault."""

    def __init__(self, problems: Sequence[SuiteProblem]) -> None:
        super().__init__("\n".join(map(str, problems)), "mend the suite file")
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Rule:
    """One expectation. `number` counts from 1; `kind` says whether its verdict on a row needs other rows."""

    number: int
    type: str
    kwargs: Mapping[str, Any]
    severity: Severity
    kind: Kind

    def columns(self) -> tuple[str, ...]:
        """The columns whose missing values make the rule pass over a row."""
        named = [self.kwargs[k] for k in ("column", "column_A", "column_B") if k in self.kwargs]
        return tuple(named or self.kwargs.get("column_list", ()))

    def ignore_row_if(self) -> str | None:
        """When a rule over several columns passes over a row: as declared, or Great Expectations' default."""
        parameter = known_rules()[self.type]["parameters"].get("ignore_row_if")
        return None if parameter is None else str(self.kwargs.get("ignore_row_if", parameter["default"]))


@dataclass(frozen=True, slots=True)
class Suite:
    """A checked suite; `digest` is that of the file's bytes."""

    name: str
    file: str
    digest: str
    rules: tuple[Rule, ...]


@dataclass(slots=True)
class _Checker:
    file: str
    columns: Mapping[str, str]
    problems: list[SuiteProblem] = field(default_factory=list[SuiteProblem])

    def add(self, rule: int, where: str, message: str) -> None:
        self.problems.append(SuiteProblem(self.file, rule, where, message))


@lru_cache(maxsize=1)
def known_rules() -> Mapping[str, Any]:
    """The rules that may be used: type -> kind and parameters."""
    return cast("Mapping[str, Any]", json.loads(_RULES_FILE.read_text(encoding="utf-8")))


def check_suites(pipeline: Pipeline) -> None:
    """Check the suites of all sources of a pipeline.

    Raises:
        SuiteRefused: lists every fault of every suite.
    """
    problems: list[SuiteProblem] = []
    for name in pipeline.spec.sources:
        try:
            load_suite(pipeline, name)
        except SuiteRefused as error:
            problems += error.problems
    if problems:
        raise SuiteRefused(problems)


def load_suite(pipeline: Pipeline, source: str) -> Suite:
    """The checked suite of a source.

    Raises:
        SuiteRefused: the file is missing, malformed, empty, or a rule in it may not be used.
    """
    spec = pipeline.spec.sources[source]
    path = pipeline.folder / spec.quality.suite
    checker = _Checker(path.name, _columns(spec))
    try:
        data = path.read_bytes()
        raw: object = json.loads(data)
    except (OSError, ValueError) as error:
        raise SuiteRefused([SuiteProblem(path.name, 0, "file", f"cannot be read: {error}")]) from error
    name, listed = _document(raw, checker)
    rules = [rule for i, item in enumerate(listed, 1) if (rule := _rule(item, i, checker)) is not None]
    if checker.problems:
        raise SuiteRefused(checker.problems)
    return Suite(name, path.name, digest_bytes(data), tuple(rules))


def _columns(spec: SourceSpec) -> Mapping[str, str]:
    return stored_columns(spec)


def _document(raw: object, checker: _Checker) -> tuple[str, list[object]]:
    if not isinstance(raw, dict) or set(raw) - {"name", "expectations", "meta", "notes"}:
        checker.add(0, "file", 'must be an object {"name": ..., "expectations": [...]}')
        return "", []
    name, listed = raw.get("name"), raw.get("expectations")
    if not isinstance(name, str) or not name:
        checker.add(0, "name", "must be a text")
    if not isinstance(listed, list) or not listed:
        checker.add(0, "expectations", "must list at least one rule; a suite without rules proves nothing")
        return "", []
    return str(name), listed


def _rule(raw: object, number: int, checker: _Checker) -> Rule | None:
    if not isinstance(raw, dict):
        checker.add(number, "rule", "must be an object with type, kwargs and severity")
        return None
    for unknown in sorted(set(raw) - {"type", "kwargs", "severity", "description", "meta", "notes"}):
        checker.add(number, unknown, "is not a field of a rule; allowed are type, kwargs, severity, description, meta")
    kind, kwargs, severity = raw.get("type"), raw.get("kwargs", {}), raw.get("severity", "critical")
    if not isinstance(kind, str) or kind not in known_rules():
        checker.add(number, "type", f"there is no rule {kind!r}{_close(str(kind), known_rules())}")
        return None
    if severity not in SEVERITIES:
        checker.add(number, "severity", f"{severity!r} is not one of {list(SEVERITIES)}")
    if not isinstance(kwargs, dict):
        checker.add(number, "kwargs", "must be an object")
        return None
    _check_parameters(kind, kwargs, number, checker)
    return Rule(number, kind, kwargs, severity, known_rules()[kind]["kind"])


def _check_parameters(kind: str, kwargs: Mapping[str, object], number: int, checker: _Checker) -> None:
    allowed: Mapping[str, Any] = known_rules()[kind]["parameters"]
    for name, value in kwargs.items():
        if name not in allowed:
            checker.add(number, f"kwargs.{name}", f"{kind} has no such parameter{_close(name, allowed)}")
        else:
            problem = _value_problem(value, allowed[name]["form"], checker.columns)
            if problem:
                checker.add(number, f"kwargs.{name}", problem)
    for name in (n for n, p in allowed.items() if p["required"] and n not in kwargs):
        checker.add(number, f"kwargs.{name}", f"{kind} needs it")
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if "min_value" in allowed and low is None and high is None:
        checker.add(number, "kwargs.min_value", f"{kind} needs min_value or max_value")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        checker.add(number, "kwargs.min_value", f"{low} is greater than max_value {high}: nothing could pass")


def _value_problem(value: object, form: object, columns: Mapping[str, str]) -> str | None:
    if isinstance(form, list):
        return None if value in form else f"{value!r} is not one of {form}"
    if form == "column":
        return _column_problem(value, columns)
    if form in ("columns", "names"):
        if not isinstance(value, list) or not value:
            return f"{value!r} is no list of column names"
        return next((p for item in value if (p := _column_problem(item, columns))), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    wanted = {
        "share": ("a number from 0 to 1", is_number and 0 <= cast(float, value) <= 1),
        "number": ("a number", is_number or value is None),
        "flag": ("true or false", isinstance(value, bool)),
        "list": ("a list of at least one value", isinstance(value, list) and bool(value)),
        "text": ("a text", isinstance(value, str) and bool(value)),
    }[str(form)]
    return None if wanted[1] else f"{value!r} is not {wanted[0]}"


def _column_problem(value: object, columns: Mapping[str, str]) -> str | None:
    if not isinstance(value, str):
        return f"{value!r} is not the name of one column (a text)"
    if value not in columns:
        return f"there is no column {value!r}{_close(value, columns)}"
    return None


def _close(text: str, names: Mapping[str, object]) -> str:
    found = difflib.get_close_matches(text, list(names), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else f"; allowed are {sorted(names)}" if len(names) <= 40 else ""
