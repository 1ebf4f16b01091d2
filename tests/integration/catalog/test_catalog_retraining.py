"""Reports, requests to train again with their budget, and what was decided."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.catalog_facts import ALICE, MALLORY, Ticker, digest
from support.catalog_monitoring import (
    LIMIT,
    NOW,
    PERIOD,
    decision,
    report_facts,
    retrain_facts,
    serve,
)
from support.catalog_race import race
from support.registry_facts import BUDGET, ENDPOINT, PIPELINE, UNIT

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    BudgetExhausted,
    BudgetMissing,
    InvalidFact,
    RetrainMoved,
    RetrainOpen,
    RetrainRefused,
    UnknownEndpoint,
    UnknownReport,
    UnknownRetrainRequest,
    UnknownRun,
)
from headway.catalog.invariants import check
from headway.catalog.monitoring_facts import CLOSED_STATES, FIRST_STATES, RETRAIN_MOVES, Report, RetrainRequest
from headway.catalog.run_facts import BudgetState


@pytest.fixture
def catalog(served_url: str, tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(served_url, Ticker())
    opened.set_budget(ALICE, None, BUDGET, PERIOD, UNIT, LIMIT)
    yield opened
    findings = check(opened, ALICE, LocalStore(tmp_path / "store"))
    opened.close()
    assert [finding for finding in findings if not finding.ok and finding.name != "stored bytes"] == []


@pytest.fixture
def evidence(catalog: Catalog) -> Report:
    return catalog.record_report(ALICE, None, report_facts())


def _move(catalog: Catalog, request: RetrainRequest, state: Any, **changes: Any) -> RetrainRequest:  # noqa: ANN401
    values: dict[str, Any] = {"expected_epoch": request.epoch, "reason": f"now {state}", "key": None} | changes
    return catalog.move_retrain(ALICE, values.pop("key"), request.request_id, state=state, **values)


def test_the_newest_report_of_a_week_is_in_force(catalog: Catalog) -> None:
    first = catalog.record_report(ALICE, None, report_facts())
    assert catalog.record_report(ALICE, "again", report_facts(made_at=NOW + 99)) == first
    second = catalog.record_report(ALICE, None, report_facts(name=2, verdict="none"))
    assert (first.seq, second.seq) == (1, 2)
    assert (first.metrics, first.report_id) == ({"auc": 0.7, "n": 812, "lift": None}, report_facts().report_id)
    earlier = catalog.record_report(ALICE, None, report_facts("2013-08-26"))
    quality = catalog.record_report(ALICE, None, report_facts(kind="quality", model_version=None))
    assert catalog.reports(ALICE, ENDPOINT) == [earlier, second, quality]
    assert catalog.reports(ALICE, ENDPOINT, "drift", 1) == [earlier, second]
    assert catalog.reports(ALICE, ENDPOINT, "quality") == [quality]
    assert catalog.reports(ALICE, ENDPOINT, model_version=2) == []
    assert catalog.report(ALICE, first.report_id) == first
    with pytest.raises(UnknownReport):
        catalog.report(ALICE, digest("x"))
    with pytest.raises(UnknownEndpoint):
        catalog.record_report(ALICE, None, report_facts(endpoint_id="other"))
    wrong: list[dict[str, Any]] = [{"end": NOW}, {"metrics": {"x": float("nan")}}, {"kind": "opinion"}, {"blobs": ()}]
    for changes in wrong:
        with pytest.raises(InvalidFact):
            report_facts(**changes)


def test_a_request_keeps_its_facts_and_reserves_its_cost(catalog: Catalog, evidence: Report) -> None:
    facts = retrain_facts(evidence)
    opened = catalog.open_retrain_request(ALICE, None, facts)
    assert (opened.facts, opened.state, opened.epoch, opened.is_open) == (facts, "ready", 1, True)
    assert opened.request_id == facts.request_id("acme")
    # In the world's month of the request, whatever the month of the machine.
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 300, 0, UNIT)
    assert catalog.retrain_request(ALICE, opened.request_id) == opened
    assert catalog.retrain_requests(ALICE, PIPELINE) == catalog.retrain_requests(ALICE) == [opened]
    assert catalog.retrain_requests(ALICE, "other") == []
    assert [event.request for event in catalog.retrain_events(ALICE, opened.request_id)] == [opened]
    assert [(e.owner_kind, e.amount) for e in catalog.budget_entries(ALICE, BUDGET, PERIOD)] == [
        ("retrain_request", 300)
    ]


def test_one_cause_is_one_request_and_a_pipeline_has_one_open(catalog: Catalog, evidence: Report) -> None:
    opened = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence))
    later = retrain_facts(evidence, made_at=NOW + 1, reason="still there")
    assert catalog.open_retrain_request(ALICE, None, later) == opened
    with pytest.raises(RetrainOpen) as refusal:
        catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, 2))
    assert refusal.value.request_id == opened.request_id
    rejected = _move(catalog, opened, "rejected")
    # The cause is answered, not asked again; another one may be.
    assert catalog.open_retrain_request(ALICE, None, later) == rejected
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 0, 0, UNIT)
    second = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, 2))
    other = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, pipeline="other"))
    assert {found.request_id for found in catalog.retrain_requests(ALICE) if found.is_open} == {
        second.request_id,
        other.request_id,
    }


def test_a_request_beyond_the_budget_or_about_nothing_known_changes_nothing(catalog: Catalog, evidence: Report) -> None:
    facts = retrain_facts(evidence)
    for error, other in (
        (BudgetExhausted, replace(facts, cost_seconds=LIMIT + 1)),
        (BudgetMissing, replace(facts, period="2013-10")),
        (UnknownReport, replace(facts, evidence=(digest("never recorded"),))),
        (UnknownEndpoint, replace(facts, endpoint_id="other")),
    ):
        with pytest.raises(error):
            catalog.open_retrain_request(ALICE, None, other)
    assert catalog.retrain_requests(ALICE) == []
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 0, 0, UNIT)
    for changes in ({"state": "running"}, {"period": "2013-13"}, {"cost_seconds": -1}, {"expected_gain": float("inf")}):
        with pytest.raises(InvalidFact):
            retrain_facts(evidence, **changes)


def test_the_way_of_a_request_to_a_promotion(catalog: Catalog, evidence: Report) -> None:
    waits = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, state="waiting_for_approval"))
    dated = _move(catalog, waits, "waiting_for_evaluation_window", as_of="2013-10-01")
    ready = _move(catalog, dated, "ready")
    running = _move(catalog, ready, "running", dagster_run_id="d-1")
    assert (running.as_of, running.dagster_run_id, running.closed_at) == ("2013-10-01", "d-1", None)
    asks = _move(catalog, running, "needs_human", cost_seconds=40.2)
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 300, 0, UNIT)
    again = _move(catalog, _move(catalog, asks, "ready"), "running")
    [run] = catalog.runs(ALICE)
    done = _move(catalog, again, "promoted", run_id=run.run_id, candidate_version=1, cost_seconds=120.5)
    assert (done.run_id, done.candidate_version, done.cost_seconds, done.is_open) == (run.run_id, 1, 120.5, False)
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 0, 121, UNIT)
    states = [event.request.state for event in catalog.retrain_events(ALICE, done.request_id)]
    assert states == [
        "waiting_for_approval",
        "waiting_for_evaluation_window",
        "ready",
        "running",
        "needs_human",
        "ready",
        "running",
        "promoted",
    ]


def test_every_other_move_is_refused(catalog: Catalog) -> None:
    catalog.set_budget(ALICE, None, BUDGET, PERIOD, UNIT, 100_000)
    paths = _paths()
    assert paths.keys() == RETRAIN_MOVES.keys() | CLOSED_STATES
    for number, (state, path) in enumerate(sorted(paths.items())):
        pipeline = f"pipeline-{number}"
        facts = retrain_facts(None, state=path[0], pipeline=pipeline, as_of="2013-10-01", cause="person")
        request = catalog.open_retrain_request(ALICE, None, facts)
        for following in path[1:]:
            request = _move(catalog, request, following)
        assert request.state == state
        for to in sorted(paths.keys() - RETRAIN_MOVES.get(state, frozenset())):
            with pytest.raises(RetrainRefused, match=to):
                _move(catalog, request, to)
        assert catalog.retrain_request(ALICE, request.request_id) == request


def _paths() -> dict[str, list[Any]]:
    """A way to each state."""
    paths: dict[str, list[Any]] = {state: [state] for state in FIRST_STATES}
    while True:
        found = {
            to: [*path, to] for state, path in paths.items() for to in RETRAIN_MOVES.get(state, ()) if to not in paths
        }
        if not found:
            return paths
        paths |= found


def test_a_move_from_where_the_request_is_not(catalog: Catalog, evidence: Report) -> None:
    opened = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence))
    with pytest.raises(RetrainRefused, match="as_of"):
        _move(catalog, opened, "running")
    with pytest.raises(UnknownRun):
        _move(catalog, opened, "running", as_of="2013-10-01", run_id="nothing")
    with pytest.raises(UnknownRetrainRequest):
        _move(catalog, replace(opened, request_id="nothing"), "running")
    for changes in ({"state": "gone"}, {"cost_seconds": -1.0}, {"cost_seconds": float("nan")}, {"as_of": ""}):
        with pytest.raises(InvalidFact):
            _move(catalog, opened, **{"state": "expired"} | changes)
    running = _move(catalog, opened, "running", as_of="2013-10-01")
    assert _move(catalog, opened, "running", as_of="2013-10-01") == running
    for epoch in (1, 3):
        with pytest.raises(RetrainMoved) as refusal:
            _move(catalog, running, "failed", expected_epoch=epoch)
        assert (refusal.value.expected, refusal.value.found) == (epoch, 2)
    assert catalog.retrain_request(ALICE, opened.request_id) == running


def test_a_cost_beyond_the_reservation_is_told_all_the_same(catalog: Catalog, evidence: Report) -> None:
    opened = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence, as_of="2013-10-01", cost_seconds=LIMIT))
    _move(catalog, _move(catalog, opened, "running"), "kept_old", cost_seconds=LIMIT + 0.5)
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 0, LIMIT + 1, UNIT)


def test_a_hundred_at_once_open_one_request_and_reserve_once(
    catalog: Catalog, served_url: str, evidence: Report
) -> None:
    others = [open_catalog(served_url, Ticker()) for _ in range(4)]
    facts = [retrain_facts(evidence, made_at=NOW + number) for number in range(100)]
    with ThreadPoolExecutor(20) as pool:
        asked = [
            pool.submit(others[number % 4].open_retrain_request, ALICE, None, one) for number, one in enumerate(facts)
        ]
        answers = {future.result().request_id for future in asked}
    for other in others:
        other.close()
    assert len(answers) == len(catalog.retrain_requests(ALICE)) == 1
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 300, 0, UNIT)
    assert Counter(entry.kind for entry in catalog.budget_entries(ALICE, BUDGET, PERIOD)) == {"reserve": 1}


@pytest.mark.parametrize("same_cause", [True, False])
def test_two_requests_of_one_pipeline_at_once(
    catalog: Catalog, served_url: str, evidence: Report, workers: ThreadPoolExecutor, same_cause: bool
) -> None:
    second = retrain_facts(evidence, 1 if same_cause else 2, made_at=NOW + 1)
    one, two = race(
        served_url,
        workers,
        "effect",
        lambda c: c.open_retrain_request(ALICE, None, retrain_facts(evidence)),
        lambda c: c.open_retrain_request(ALICE, None, second),
    )
    assert two.result() == one.result() if same_cause else isinstance(two.exception(), RetrainOpen)
    assert catalog.retrain_requests(ALICE) == [one.result()]
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 300, 0, UNIT)


def test_requests_of_two_pipelines_at_once_cannot_overdraw_the_budget(
    catalog: Catalog, served_url: str, evidence: Report, workers: ThreadPoolExecutor
) -> None:
    one, two = race(
        served_url,
        workers,
        "effect",
        lambda c: c.open_retrain_request(ALICE, None, retrain_facts(evidence, cost_seconds=600)),
        lambda c: c.open_retrain_request(ALICE, None, retrain_facts(evidence, cost_seconds=600, pipeline="other")),
    )
    assert one.exception() is None
    assert isinstance(two.exception(), BudgetExhausted)
    assert len(catalog.retrain_requests(ALICE)) == 1


@pytest.mark.parametrize("second", ["rejected", "open"])
def test_a_close_and_another_command_at_once(
    catalog: Catalog, served_url: str, evidence: Report, workers: ThreadPoolExecutor, second: str
) -> None:
    opened = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence))
    close = lambda c: _move(c, opened, "expired")  # noqa: E731
    follow = {
        "rejected": lambda c: _move(c, opened, "rejected"),
        "open": lambda c: c.open_retrain_request(ALICE, None, retrain_facts(evidence, 2)),
    }
    one, two = race(served_url, workers, "effect", close, follow[second])
    assert one.exception() is None
    if second == "rejected":
        assert isinstance(two.exception(), RetrainMoved)
    else:
        assert two.exception() is None
    held = 0 if second == "rejected" else 300
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, held, 0, UNIT)


def test_a_decision_is_noted_when_it_says_something_new(catalog: Catalog) -> None:
    told = [
        decision(),
        decision(made_at=NOW + 1),
        decision(reason="too few labels"),
        decision("retrain"),
        decision(),
        decision(fingerprint="f2"),
        decision(fingerprint="f2", made_at=NOW + 9),
    ]
    audited = len(catalog.audit_rows(ALICE))
    assert [catalog.note_decision(ALICE, None, facts) for facts in told] == [True, False, True, True, True, True, False]
    # What says nothing new leaves no trace, however often a sensor looks.
    assert len(catalog.audit_rows(ALICE)) == audited + 5
    found = catalog.decisions(ALICE, PIPELINE)
    assert [(one.seq, one.decision, one.reason, one.fingerprint) for one in found] == [
        (5, "wait", "cooldown", "f2"),
        (4, "wait", "cooldown", "f1"),
        (3, "retrain", "cooldown", "f1"),
        (2, "wait", "too few labels", "f1"),
        (1, "wait", "cooldown", "f1"),
    ]
    assert catalog.decisions(ALICE, PIPELINE, limit=1) == found[:1]
    assert catalog.note_decision(ALICE, "mine", decision("other"))
    assert catalog.note_decision(ALICE, "mine", decision("other"))
    assert not catalog.note_decision(ALICE, "mine too", decision("other"))
    assert catalog.note_decision(ALICE, None, decision(pipeline="other"))


def test_reports_requests_and_decisions_of_another_tenant_are_not_seen(catalog: Catalog, evidence: Report) -> None:
    opened = catalog.open_retrain_request(ALICE, None, retrain_facts(evidence))
    catalog.note_decision(ALICE, None, decision())
    serve(catalog, MALLORY)
    assert catalog.reports(MALLORY, ENDPOINT) == []
    assert catalog.retrain_requests(MALLORY) == []
    assert catalog.decisions(MALLORY, PIPELINE) == []
    assert catalog.retrain_events(MALLORY, opened.request_id) == []
    with pytest.raises(UnknownReport):
        catalog.report(MALLORY, evidence.report_id)
    with pytest.raises(UnknownRetrainRequest):
        catalog.move_retrain(MALLORY, None, opened.request_id, expected_epoch=1, state="rejected", reason="mine now")
    catalog.set_budget(MALLORY, None, BUDGET, PERIOD, UNIT, 300)
    with pytest.raises(UnknownReport):
        catalog.open_retrain_request(MALLORY, None, retrain_facts(evidence))
    theirs = catalog.open_retrain_request(MALLORY, None, retrain_facts(None, cause="person"))
    assert theirs.request_id != opened.request_id
    assert catalog.budget(ALICE, BUDGET, PERIOD) == BudgetState(LIMIT, 300, 0, UNIT)
