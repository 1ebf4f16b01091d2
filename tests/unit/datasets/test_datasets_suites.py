"""Suites: our table of rules against the installed Great Expectations, and one run against many."""

import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import great_expectations.expectations.core as core
import numpy as np
import pyarrow as pa
import pytest
from great_expectations.expectations.expectation import Expectation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.pipelines import not_null, source, suite, write_pipeline, write_suite

from headway.datasets.quality import evaluate
from headway.datasets.schema import arrow_schema
from headway.datasets.suites import SuiteRefused, check_suites, known_rules, load_suite
from headway.loading import Pipeline, load_pipeline

NOT_OURS = {
    "id",
    "meta",
    "notes",
    "result_format",
    "description",
    "catch_exceptions",
    "rendered_content",
    "severity",
    "batch_id",
    "windows",
    "row_condition",
    "condition_parser",
    "library_metadata",
}
# Great Expectations calls these optional and then fails at run time without them.
NEEDED_ANYWAY = {
    ("expect_column_values_to_match_regex", "regex"),
    ("expect_table_columns_to_match_set", "column_set"),
}


def theirs() -> dict[str, dict[str, tuple[bool, object]]]:
    found: dict[str, dict[str, tuple[bool, object]]] = {}
    for kind in vars(core).values():
        if inspect.isclass(kind) and issubclass(kind, Expectation):
            declared: Any = kind.__fields__
            fields = {n: (bool(f.required), f.default) for n, f in declared.items() if n not in NOT_OURS}
            found[kind.expectation_type] = fields
    return found


def test_our_rules_are_those_of_the_installed_version() -> None:
    installed = theirs()
    for name, rule in known_rules().items():
        assert set(rule["parameters"]) == set(installed[name]), name
        for parameter, ours in rule["parameters"].items():
            required, default = installed[name][parameter]
            assert ours["required"] == (required or (name, parameter) in NEEDED_ANYWAY), (name, parameter)
            if "default" in ours:
                assert ours["default"] == default


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    columns = {"id": "string", "n": "int64", "m": "int64"}
    return load_pipeline(write_pipeline(tmp_path / "p", source(columns, row_id=["id"])))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"type": "expect_column_values_to_be_between", "kwargs": {"column": "n"}}, "needs min_value or max_value"),
        (
            {"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "min_value": 3, "max_value": 2}},
            "nothing could pass",
        ),
        ({"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "n", "value_set": []}}, "at least one"),
        ({"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "n"}}, "needs it"),
        (
            {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n", "mostly": 90}},
            "90 is not a number from 0 to 1",
        ),
        ({"type": "expect_compound_columns_to_be_unique", "kwargs": {"column_list": "n"}}, "no list"),
        ({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"}, "severity": "fatal"}, "severity"),
        ({"type": "expect_column_values_to_not_be_null", "kwarg": {"column": "n"}}, "kwarg: is not a field"),
        ({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n", "row_condition": "n>1"}}, "no such"),
        ("expect_column_values_to_not_be_null", "must be an object"),
    ],
)
def test_faulty_rules_are_named(pipeline: Pipeline, rule: object, told: str) -> None:
    write_suite(pipeline.folder, {"name": "x", "expectations": [not_null("id"), rule]})
    with pytest.raises(SuiteRefused, match=r"readings\.suite\.json, rule 2") as caught:
        check_suites(pipeline)
    assert told in str(caught.value)


def test_all_faults_of_all_suites_are_told_at_once(pipeline: Pipeline) -> None:
    write_suite(pipeline.folder, suite(not_null("x"), not_null("y")))
    (pipeline.folder / "labels.suite.json").write_text("{")
    with pytest.raises(SuiteRefused) as caught:
        check_suites(pipeline)
    assert [(p.file, p.rule) for p in caught.value.problems] == [
        ("readings.suite.json", 1),
        ("readings.suite.json", 2),
        ("labels.suite.json", 0),
    ]


def test_checking_suites_does_not_import_great_expectations() -> None:
    code = (
        "import sys; from headway.loading import load_pipeline; from headway.datasets.suites import check_suites;"
        "check_suites(load_pipeline('flight_delay'));"
        "print([m in sys.modules for m in ('great_expectations', 'pandas')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[False, False]"


ROOT = Path(__file__).resolve().parents[3]

RULES = suite(
    not_null("n"),
    {"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "max_value": 2, "mostly": 0.5}},
    {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "n"}},
    {"type": "expect_compound_columns_to_be_unique", "kwargs": {"column_list": ["n", "m"]}},
    {
        "type": "expect_column_pair_values_a_to_be_greater_than_b",
        "kwargs": {"column_A": "n", "column_B": "m", "ignore_row_if": "either_value_is_missing"},
    },
    {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 2}},
    {"type": "expect_column_mean_to_be_between", "kwargs": {"column": "n", "max_value": 2}},
)
CELLS = st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(0, 3))


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_partition_is_judged_the_same_alone_and_among_others(
    pipeline: Pipeline, parts: list[list[tuple[int | None, int | None]]]
) -> None:
    write_suite(pipeline.folder, RULES)
    checked = load_suite(pipeline, "readings")
    schema = arrow_schema(pipeline.spec.sources["readings"])
    rows = [{"id": "x", "n": n, "m": m} for part in parts for n, m in part]
    table = pa.Table.from_pylist(rows, schema=schema)
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    slices = list(pairwise(ends))
    among = evaluate(checked, table, slices)
    for piece, verdict in zip(slices, among, strict=True):
        (alone,) = evaluate(checked, table, [piece])
        assert alone.results == verdict.results
        assert {k: v.tolist() for k, v in alone.failing.items()} == {k: v.tolist() for k, v in verdict.failing.items()}


def test_rows_that_fail_are_the_rows_that_break_the_rule(pipeline: Pipeline) -> None:
    write_suite(pipeline.folder, RULES)
    table = pa.Table.from_pylist(
        [{"id": "a", "n": 1, "m": 0}, {"id": "b", "n": 9, "m": 9}, {"id": "c", "n": None, "m": 1}],
        schema=arrow_schema(pipeline.spec.sources["readings"]),
    )
    (found,) = evaluate(load_suite(pipeline, "readings"), table, [(0, 3)])
    assert {k: v.tolist() for k, v in sorted(found.failing.items())} == {1: [2], 2: [1], 3: [], 4: [], 5: [1]}
    assert [(r.number, r.passed, r.looked_at, r.passed_over) for r in found.results] == [
        (1, False, 3, 0),
        (2, True, 2, 1),
        (3, True, 2, 1),
        (4, True, 3, 0),
        (5, False, 2, 1),
        (6, True, None, None),
        (7, False, None, None),
    ]
    assert (found.declared, found.evaluated) == (7, 7)
