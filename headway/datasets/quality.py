"""Runs a suite on partitions with Great Expectations and says which rows fail.

Rules whose verdict on a row needs no other row run once over all partitions at hand; the others once per partition. The
result of a partition does not depend on which others were at hand. Values from the data never enter a result.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.suites import Rule, Severity, Suite

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations import ExpectationSuite
    from great_expectations.core import ExpectationValidationResult as _Answer

_ROWS_AT_ONCE = 250_000
# What these observe is a count or a share, never a value of the data.
_SHOWN = {
    "expect_table_row_count_to_be_between",
    "expect_table_row_count_to_equal",
    "expect_table_column_count_to_be_between",
    "expect_table_column_count_to_equal",
    "expect_column_unique_value_count_to_be_between",
    "expect_column_proportion_of_unique_values_to_be_between",
    "expect_column_proportion_of_non_null_values_to_be_between",
}


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule found on one partition. `looked_at`, `passed_over`, `failing` count rows; None for the table."""

    number: int
    type: str
    columns: tuple[str, ...]
    severity: Severity
    is_about_rows: bool
    evaluated: bool
    passed: bool
    looked_at: int | None
    passed_over: int | None
    failing: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All rules on one partition; `failing` maps a rule's number to positions of rows that fail it, from 0."""

    declared: int
    results: tuple[RuleResult, ...]
    failing: dict[int, NDArray[np.int64]] = field(default_factory=dict[int, "NDArray[np.int64]"])

    @property
    def evaluated(self) -> int:
        """How many rules gave a verdict."""
        return sum(result.evaluated for result in self.results)

    @property
    def failed(self) -> int:
        """How many rules did not pass."""
        return sum(not result.passed for result in self.results)


def evaluate(suite: Suite, table: pa.Table, slices: Sequence[tuple[int, int]]) -> list[Evaluation]:
    """The suite's verdict on each slice [start, stop) of the table's rows."""
    found: list[Evaluation] = []
    batch: list[tuple[int, int]] = []
    for piece in slices:
        if batch and sum(b - a for a, b in batch) + piece[1] - piece[0] > _ROWS_AT_ONCE:
            found += _evaluate_batch(suite, table, batch)
            batch = []
        batch.append(piece)
    return found + (_evaluate_batch(suite, table, batch) if batch else [])


def _evaluate_batch(suite: Suite, table: pa.Table, slices: Sequence[tuple[int, int]]) -> list[Evaluation]:
    parts = [table.slice(a, b - a) for a, b in slices]
    frames = [_frame(part) for part in parts]
    engine = _Engine()
    row_rules = [rule for rule in suite.rules if rule.kind == "row"]
    other_rules = [rule for rule in suite.rules if rule.kind != "row"]
    by_row = _shared_run(engine, suite, row_rules, frames) if row_rules else [{} for _ in parts]
    evaluations: list[Evaluation] = []
    for part, frame, failing in zip(parts, frames, by_row, strict=True):
        answers = engine.run(suite, other_rules, frame) if other_rules else {}
        positions = dict(failing)
        positions |= {r.number: _failing(answers.get(r.number)) for r in other_rules if r.kind == "rows_together"}
        results = tuple(
            _result(rule, part, positions.get(rule.number), answers.get(rule.number)) for rule in suite.rules
        )
        kept = {number: bad for number, bad in positions.items() if bad is not None}
        evaluations.append(Evaluation(len(suite.rules), results, kept))
    return evaluations


def _result(rule: Rule, part: pa.Table, bad: NDArray[np.int64] | None, answer: "_Answer | None") -> RuleResult:
    if rule.kind == "table":
        return _not_evaluated(rule) if answer is None or _raised(answer) else _table_result(rule, answer)
    return _not_evaluated(rule) if bad is None else _row_result(rule, part, bad)


def _shared_run(
    engine: "_Engine", suite: Suite, rules: Sequence[Rule], frames: Sequence["pd.DataFrame"]
) -> list[dict[int, NDArray[np.int64] | None]]:
    """Failing positions per frame and rule from one run over all frames; None where a rule could not be evaluated."""
    import pandas as pd

    whole = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    answers = engine.run(suite, rules, whole)
    bounds = np.cumsum([0, *(len(frame) for frame in frames)])
    shared: list[dict[int, NDArray[np.int64] | None]] = [{} for _ in frames]
    for rule in rules:
        bad = _failing(answers.get(rule.number))
        for i in range(len(frames)):
            if bad is None:
                shared[i][rule.number] = None
                continue
            a, b = np.searchsorted(bad, bounds[i]), np.searchsorted(bad, bounds[i + 1])
            shared[i][rule.number] = bad[a:b] - bounds[i]
    return shared


def _row_result(rule: Rule, part: pa.Table, bad: NDArray[np.int64]) -> RuleResult:
    passed_over = _passed_over(rule, part)
    looked_at = part.num_rows - passed_over
    share = 1.0 if looked_at == 0 else 1 - len(bad) / looked_at
    passed = share >= float(rule.kwargs.get("mostly", 1.0))
    why = "" if passed else f"{len(bad)} of {looked_at} rows"
    return RuleResult(
        rule.number, rule.type, rule.columns(), rule.severity, True, True, passed, looked_at, passed_over, len(bad), why
    )


def _passed_over(rule: Rule, part: pa.Table) -> int:
    """Rows that the rule does not look at because of missing values."""
    if rule.type in ("expect_column_values_to_not_be_null", "expect_column_values_to_be_null"):
        return 0
    missing = np.array([part.column(c).is_null().to_numpy() for c in rule.columns()], dtype=np.bool_)
    condition = rule.ignore_row_if()
    if condition in ("never", "neither"):
        return 0
    if condition in ("all_values_are_missing", "both_values_are_missing"):
        return int(missing.all(axis=0).sum())
    return int(missing.any(axis=0).sum())


def _table_result(rule: Rule, raw: "_Answer") -> RuleResult:
    observed = raw.result.get("observed_value")
    shown = f"observed {observed}" if rule.type in _SHOWN else "the observed value is outside of what is declared"
    return RuleResult(
        rule.number,
        rule.type,
        rule.columns(),
        rule.severity,
        False,
        True,
        bool(raw.success),
        None,
        None,
        None,
        "" if raw.success else shown,
    )


def _not_evaluated(rule: Rule) -> RuleResult:
    return RuleResult(
        rule.number,
        rule.type,
        rule.columns(),
        rule.severity,
        rule.kind != "table",
        False,
        False,
        None,
        None,
        None,
        "the rule could not be evaluated",
    )


def _raised(raw: "_Answer") -> bool:
    info = raw.exception_info or {}
    if info.get("raised_exception"):
        return True
    return any(isinstance(v, dict) and v.get("raised_exception") for v in info.values())


def _failing(raw: "_Answer | None") -> NDArray[np.int64] | None:
    """Positions of failing rows, ascending; None when the rule could not be evaluated."""
    if raw is None or _raised(raw):
        return None
    return np.sort(np.array(raw.result.get("unexpected_index_list") or [], dtype=np.int64))


def _frame(part: pa.Table) -> "pd.DataFrame":
    """A pandas frame with nullable whole numbers and flags, so that a null never turns them into floats."""
    import pandas as pd

    nullable = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    return part.to_pandas(types_mapper=nullable.get)


class _Engine:
    """Great Expectations without files, telemetry and progress bars; imported with the first run only."""

    def __init__(self) -> None:
        import great_expectations as gx

        logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
        self._gx = gx
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False, "metric_calculations": False}  # type: ignore[assignment]
        asset = context.data_sources.add_pandas("memory").add_dataframe_asset("rows")
        self._batches = asset.add_batch_definition_whole_dataframe("all")
        self._suites: dict[tuple[int, ...], ExpectationSuite] = {}

    def run(self, suite: Suite, rules: Sequence[Rule], frame: "pd.DataFrame") -> dict[int, "_Answer"]:
        """The results by rule number. COMPLETE results hold values; they stay in memory."""
        batch = self._batches.get_batch(batch_parameters={"dataframe": frame})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = batch.validate(
                self._suite(suite, rules),
                result_format={"result_format": "COMPLETE", "include_unexpected_rows": False},
            )
        return {_number(result): result for result in report.results}

    def _suite(self, suite: Suite, rules: Sequence[Rule]) -> "ExpectationSuite":
        numbers = tuple(rule.number for rule in rules)
        if numbers not in self._suites:
            listed = [
                {"type": r.type, "kwargs": dict(r.kwargs), "severity": r.severity, "meta": {"rule": r.number}}
                for r in rules
            ]
            self._suites[numbers] = self._gx.ExpectationSuite(name=suite.name, expectations=listed)
        return self._suites[numbers]


def _number(result: "_Answer") -> int:
    """The rule's number, which was sent along: results come in another order than the rules."""
    config = result.expectation_config
    return int(config.meta["rule"]) if config is not None and config.meta is not None else 0
