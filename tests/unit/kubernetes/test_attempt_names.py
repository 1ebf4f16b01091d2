"""What an attempt's objects are called: legal, the same each time, and different for different attempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy_attempts import toy_attempt, toy_spec

from headway.training.kubernetes.names import Names, attempt_labels, job_name, names_of, selector, short_hash, whose
from headway.training.kubernetes.validate import label_key_problem, label_value_problem, name_problem

TEXT = st.text(min_size=1, max_size=90)
LONG = ["p" * 55, "p" * 60, "p" * 63, "p" * 80, "q" * 70 + "a", "q" * 70 + "b", "zug.münchen", "a.b", "a-b", "a_b"]


def named(tenant: str, run_id: str = "r", attempt: int = 1, pipeline: str = "p", instance: str = "i") -> Names:
    """The names of an attempt."""
    spec = replace(toy_spec(2), pipeline=pipeline)
    described = toy_attempt(Path("/h"), {}, nodes=2, attempt=attempt, run_id=run_id)
    return names_of(instance, tenant, described, spec)


@given(tenant=TEXT, run_id=TEXT, pipeline=TEXT, attempt=st.integers(1, 99_999_999), index=st.integers(0, 9_999))
def test_e07_names_are_legal_whatever_they_are_made_of(
    tenant: str, run_id: str, pipeline: str, attempt: int, index: int
) -> None:
    names = named(tenant, run_id, attempt, pipeline)
    assert name_problem(names.name) == ""
    # A pod's hostname, and its name with the random end that the controller gives it.
    assert name_problem(f"{names.name}-{index}") == ""
    assert len(f"{names.name}-{index}-abcde") <= 63
    for key, value in names.labels.items():
        assert label_key_problem(key) == ""
        assert label_value_problem(value) == ""
    assert all(label_key_problem(key) == "" for key in names.annotations)
    assert names == named(tenant, run_id, attempt, pipeline)


@given(one=st.tuples(TEXT, TEXT, st.integers(1, 99)), two=st.tuples(TEXT, TEXT, st.integers(1, 99)))
def test_e07_different_attempts_have_different_names(one: tuple[str, str, int], two: tuple[str, str, int]) -> None:
    assert (job_name("i", *one) == job_name("i", *two)) == (one == two)


def test_e07_names_that_differ_late_or_by_strange_letters() -> None:
    tenants = {job_name("i", tenant, "r", 1) for tenant in LONG}
    runs = {job_name("i", "t", run_id, 1) for run_id in LONG}
    assert len(tenants) == len(runs) == len(LONG)
    assert job_name("i", "ab", "c", 1) != job_name("i", "a", "bc", 1)
    assert job_name("one", "t", "r", 1) != job_name("two", "t", "r", 1)


@pytest.mark.parametrize("pipeline", LONG)
def test_e07_the_full_names_are_annotations(pipeline: str) -> None:
    annotations = named(pipeline, run_id="run", pipeline=pipeline).annotations
    assert annotations["headway.dev/pipeline"] == annotations["headway.dev/tenant-name"] == pipeline
    assert annotations["headway.dev/run-id"] == "run"
    assert annotations["headway.dev/spec-digest"].startswith("sha256:")


def test_objects_are_found_by_their_labels() -> None:
    names = named("t", "run", 3)
    document = {"metadata": {"labels": dict(names.labels), "annotations": dict(names.annotations)}}
    assert whose(document) == ("run", 3)
    assert whose({"metadata": {"labels": {"headway.dev/attempt": "3"}}}) is None
    assert whose({"metadata": {"labels": {}, "annotations": {"headway.dev/run-id": "run"}}}) is None
    assert attempt_labels("i", "t", "run", 3).items() <= names.labels.items()
    assert selector("i") == f"headway.dev/instance={names.labels['headway.dev/instance']}"
    assert short_hash("a", "b") != short_hash("ab")
    assert names.host(1, "ns") == f"{names.name}-1.{names.name}.ns.svc.cluster.local"
