"""Runs and budgets: what a second ask means, fencing, endings, events exactly once, budgets that conserve."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.catalog_facts import ALICE, Ticker, blob, digest
from support.registry_facts import BUDGET, MONTH, UNIT, ask, end, prepare_inputs, result, run_facts, succeed

from headway.catalog import LineageEdge, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    AttemptsSpent,
    BudgetBelowUse,
    BudgetExhausted,
    BudgetMissing,
    EventGap,
    InputNotReleased,
    InvalidFact,
    Nondeterminism,
    RunCancelled,
    RunRefused,
    StaleAttempt,
    UnknownAttempt,
    UnknownRun,
    UnknownSnapshot,
)
from headway.catalog.run_facts import Attempt, BudgetState


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    opened = open_catalog(catalog_url, Ticker())
    opened.ensure_tenant(ALICE)
    yield opened
    opened.close()


@pytest.fixture
def snapshot_id(catalog: Catalog) -> str:
    return prepare_inputs(catalog)


def _start(catalog: Catalog, snapshot_id: str, **changes: object) -> Attempt:
    submission = ask(catalog, run_facts(snapshot_id, **changes))  # pyright: ignore[reportArgumentType]
    assert submission.decision == "started"
    assert submission.attempt is not None
    return submission.attempt


def test_a_run_keeps_every_fact_and_its_lineage(catalog: Catalog, snapshot_id: str) -> None:
    facts = run_facts(snapshot_id, code_dirty=True, note="ü", dagster_run_id="d-1", blobs=(blob("b"), blob("a")))
    started = ask(catalog, facts)
    run = catalog.run(ALICE, started.run.run_id)
    assert run == started.run
    assert run.facts == facts
    assert run.run_id == facts.identity_digest("acme").removeprefix("sha256:")[:24]
    assert (run.status, run.result, run.cancel_requested, run.worker_seconds) == ("open", None, False, 0.0)
    attempt = run.last
    assert (attempt.attempt, attempt.state, attempt.external_name) == (1, "admitted", f"run-{run.run_id}-1")
    assert catalog.open_attempts(ALICE) == [attempt]
    assert LineageEdge(run.node, f"feature_snapshot:{snapshot_id}", "input") in catalog.lineage(
        ALICE, run.node, "upstream"
    )
    owners = {row.blob.digest: row.owners for row in catalog.blobs(ALICE)}
    assert owners[blob("a").digest] == (("training_run", run.node),)


def test_the_identity_covers_what_the_result_depends_on_and_nothing_else(snapshot_id: str) -> None:
    facts = run_facts(snapshot_id)
    for name, value in (
        ("code_dirty", True),
        ("spec_digest", digest("x")),
        ("layout", {"engine": "deepspeed"}),
        ("nodes", 5),
        ("budget_id", "other"),
        ("max_attempts", 9),
        ("note", None),
        ("dagster_run_id", "d"),
        ("blobs", ()),
    ):
        assert replace(facts, **{name: value}).run_id("acme") == facts.run_id("acme"), name
    for name, value in (
        ("pipeline", "other"),
        ("partition", "2013-08-01"),
        ("inputs", (digest("other snapshot"),)),
        ("datasets", ()),
        ("code_digest", digest("x")),
        ("environment_digest", digest("x")),
        ("config_digest", digest("x")),
        ("seed", 8),
        ("repeat", 1),
    ):
        assert replace(facts, **{name: value}).run_id("acme") != facts.run_id("acme"), name
    assert facts.run_id("rival") != facts.run_id("acme")


def test_the_second_ask_adopts_an_open_run_and_finds_a_succeeded_one_up_to_date(
    catalog: Catalog, snapshot_id: str
) -> None:
    facts = run_facts(snapshot_id)
    first = ask(catalog, facts)
    second = ask(catalog, replace(facts, note="another click", dagster_run_id="d-2"))
    third = ask(catalog, facts, asker="machine")
    assert [first.decision, second.decision, third.decision] == ["started", "adopted", "adopted"]
    assert first.attempt == second.attempt == third.attempt
    assert second.run.facts.note == "first try"
    assert first.attempt is not None
    end(catalog, first.attempt)
    done = ask(catalog, facts)
    assert (done.decision, done.attempt, done.run.status) == ("up_to_date", None, "succeeded")
    assert len(catalog.run(ALICE, done.run.run_id).attempts) == 1
    assert ask(catalog, replace(facts, repeat=1)).decision == "started"


def test_infrastructure_failures_are_tried_again_until_the_attempts_are_spent(
    catalog: Catalog, snapshot_id: str
) -> None:
    facts = run_facts(snapshot_id, max_attempts=2)
    attempt = ask(catalog, facts).attempt
    assert attempt is not None
    # Preemptions are free.
    for code in (75, 75, 77):
        end(catalog, attempt, "failed", code=code)
        attempt = catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=5).attempt
        assert attempt is not None
    run = end(catalog, attempt, "lost")
    assert (run.status, [a.token for a in run.attempts]) == ("lost", [1, 2, 3, 4])
    for send in (
        lambda: ask(catalog, facts),
        lambda: ask(catalog, facts, asker="machine"),
        lambda: catalog.restart_run(ALICE, None, run.run_id, reserve_seconds=5),
    ):
        with pytest.raises(AttemptsSpent, match="ended 2 attempts, the limit is 2"):
            send()
    assert ask(catalog, facts, retry=True).decision == "started"


def test_the_reason_of_an_end_decides_whether_it_counts_whatever_the_exit_code(
    catalog: Catalog, snapshot_id: str
) -> None:
    facts = run_facts(snapshot_id, max_attempts=2)
    attempt = ask(catalog, facts).attempt
    assert attempt is not None
    ends = (
        ("lost", None, "node_lost", "free"),
        ("failed", 77, "evicted", "free"),
        ("failed", 0, "out_of_memory", "counted"),
    )
    for state, code, reason_code, retry in ends:
        run = end(catalog, attempt, state, code=code, reason_code=reason_code, retry=retry)
        ended = run.attempts[attempt.attempt - 1]
        assert (ended.reason_code, ended.retry) == (reason_code, retry)
        attempt = catalog.restart_run(ALICE, None, run.run_id, reserve_seconds=5).attempt
        assert attempt is not None
    end(catalog, attempt, "failed", code=75, reason_code="hung", retry="counted")
    with pytest.raises(AttemptsSpent, match="ended 2 attempts"):
        ask(catalog, facts)


def test_an_end_that_would_come_again_is_refused_whatever_the_exit_code(catalog: Catalog, snapshot_id: str) -> None:
    facts = run_facts(snapshot_id)
    attempt = ask(catalog, facts).attempt
    assert attempt is not None
    run = end(
        catalog, attempt, "failed", code=None, reason="asks for 9 GPUs", reason_code="exceeds_quota", retry="never"
    )
    assert run.failed_by_code
    with pytest.raises(RunRefused, match="asks for 9 GPUs"):
        ask(catalog, facts)


@pytest.mark.parametrize(("reason_code", "retry"), [("hung", None), (None, "free"), ("hung", "often")])
def test_a_reason_without_its_consequence_is_refused(
    catalog: Catalog, snapshot_id: str, reason_code: str | None, retry: str | None
) -> None:
    attempt = _start(catalog, snapshot_id)
    with pytest.raises(InvalidFact, match="together with a reason code"):
        end(catalog, attempt, "failed", code=76, reason_code=reason_code, retry=retry)


def test_why_an_attempt_waits_is_kept_until_it_runs(catalog: Catalog, snapshot_id: str) -> None:
    first = _start(catalog, snapshot_id)
    note = lambda words: catalog.note_waiting(ALICE, first.run_id, 1, first.token, "waiting_for_quota", words)  # noqa: E731
    assert note("0 of 2 GPUs are free").waiting == "waiting_for_quota: 0 of 2 GPUs are free"
    for words in ("0 of 2 GPUs are free", "1 of 2 GPUs is free", "0 of 2 GPUs are free"):
        note(words)
    told = [e.data["message"] for e in catalog.run_events(ALICE, first.run_id, kinds=("attempt.waiting",))]
    assert told == ["0 of 2 GPUs are free", "1 of 2 GPUs is free", "0 of 2 GPUs are free"]
    assert catalog.mark_running(ALICE, None, first.run_id, 1, first.token).waiting is None
    with pytest.raises(StaleAttempt):
        catalog.note_waiting(ALICE, first.run_id, 1, first.token + 1, "starting", "late")
    end(catalog, first, "lost")
    with pytest.raises(StaleAttempt):
        note("after its end")


@pytest.mark.parametrize("code", [64, 65])
def test_a_failure_by_code_is_refused_unless_retry_is_asked_for(catalog: Catalog, snapshot_id: str, code: int) -> None:
    facts = run_facts(snapshot_id)
    run = end(catalog, _start(catalog, snapshot_id), "failed", code=code)
    assert (run.status, run.failed_by_code) == ("failed", True)
    for asker in ("person", "machine"):
        with pytest.raises(RunRefused, match=f"ended with {code}"):
            ask(catalog, facts, asker=asker)
    with pytest.raises(RunRefused):
        catalog.restart_run(ALICE, None, run.run_id, reserve_seconds=1)
    again = ask(catalog, facts, retry=True)
    assert (again.decision, again.run.last.attempt) == ("started", 2)


def test_a_cancelled_run_is_started_again_by_a_person_only(catalog: Catalog, snapshot_id: str) -> None:
    facts = run_facts(snapshot_id)
    attempt = _start(catalog, snapshot_id)
    assert catalog.request_cancel(ALICE, None, attempt.run_id, "wrong seed").cancel_requested
    assert end(catalog, attempt, "cancelled").status == "cancelled"
    with pytest.raises(RunCancelled, match="wrong seed"):
        ask(catalog, facts, asker="machine", retry=True)
    with pytest.raises(RunCancelled):
        catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=1)
    again = ask(catalog, facts)
    assert (again.decision, again.run.cancel_requested) == ("started", False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_dies_while_it_is_being_cancelled_stays_cancelled(
    catalog: Catalog, snapshot_id: str, when: str
) -> None:
    attempt = _start(catalog, snapshot_id)
    if when == "before":
        catalog.request_cancel(ALICE, None, attempt.run_id, "enough")
    end(catalog, attempt, "failed", code=77)
    if when == "after":
        catalog.request_cancel(ALICE, None, attempt.run_id, "enough")
    run = catalog.run(ALICE, attempt.run_id)
    assert (run.status, run.last.state, run.cancel_requested) == ("cancelled", "failed", True)
    with pytest.raises(RunCancelled):
        catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=1)


def test_cancelling_what_is_over_changes_nothing(catalog: Catalog, snapshot_id: str) -> None:
    run = succeed(catalog, run_facts(snapshot_id))
    assert catalog.request_cancel(ALICE, None, run.run_id, "late") == run
    with pytest.raises(UnknownRun):
        catalog.request_cancel(ALICE, None, "nothing", "late")


def test_only_pinned_inputs_that_the_catalog_has_are_accepted(catalog: Catalog, snapshot_id: str) -> None:
    with pytest.raises(UnknownSnapshot):
        ask(catalog, run_facts(digest("no snapshot")))
    with pytest.raises(InputNotReleased, match="the run pins"):
        ask(catalog, run_facts(snapshot_id, datasets=(("flights", 1, digest("other content")),)))
    assert catalog.runs(ALICE) == []


def test_a_stale_attempt_changes_nothing(catalog: Catalog, snapshot_id: str) -> None:
    first = _start(catalog, snapshot_id)
    with pytest.raises(StaleAttempt, match="token 9"):
        catalog.mark_running(ALICE, None, first.run_id, 1, 9)
    catalog.mark_running(ALICE, None, first.run_id, 1, first.token)
    lost = end(catalog, first, "lost")
    second = catalog.restart_run(ALICE, None, first.run_id, reserve_seconds=1).attempt
    assert second is not None
    assert second.token > first.token
    for send in (
        lambda: end(catalog, first),
        lambda: end(catalog, first, "lost", worker_seconds=99.0),
        lambda: end(catalog, replace(second, token=first.token)),
        lambda: catalog.mark_running(ALICE, "other key", first.run_id, 1, first.token),
        lambda: catalog.beat(ALICE, first.run_id, 1, first.token, 5),
        lambda: catalog.beat(ALICE, first.run_id, 2, first.token, 5),
        lambda: catalog.record_checkpoint(ALICE, None, first.run_id, 1, first.token, 10, digest("c"), {}),
    ):
        with pytest.raises(StaleAttempt):
            send()
    assert end(catalog, first, "lost") == lost
    run = catalog.run(ALICE, first.run_id)
    assert (run.attempts[0], run.last) == (lost.last, second)
    with pytest.raises(UnknownAttempt):
        catalog.mark_running(ALICE, None, first.run_id, 3, 3)


def test_the_same_end_again_is_answered_again(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id)
    done = end(catalog, attempt, key="one")
    assert end(catalog, attempt, key="one") == done
    assert end(catalog, attempt, key="two") == done
    assert end(catalog, attempt) == done
    assert [e.kind for e in catalog.run_events(ALICE, done.run_id)] == [
        "attempt.created",
        "attempt.running",
        "attempt.finished",
    ]
    with pytest.raises(StaleAttempt, match="it is succeeded"):
        end(catalog, attempt, result=result("another"))


def test_a_success_needs_an_artifact_and_nothing_else_has_one(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id)
    for changes in (
        {"result": None},
        {"result": replace(result(), artifacts={})},
        {"state": "lost", "result": result()},
        {"worker_seconds": float("nan")},
        {"worker_seconds": -1.0},
    ):
        with pytest.raises(InvalidFact):
            end(catalog, attempt, **changes)  # pyright: ignore[reportArgumentType]
    assert catalog.open_attempts(ALICE) == [attempt]


def test_a_beat_moves_forward_only_and_leaves_no_trace(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id)
    before = len(catalog.audit_rows(ALICE))
    for at in (50, 70, 60):
        catalog.beat(ALICE, attempt.run_id, 1, attempt.token, at)
    assert catalog.run(ALICE, attempt.run_id).last.heartbeat_at == 70
    assert len(catalog.audit_rows(ALICE)) == before


def _events(first: int, last: int) -> list[dict[str, object]]:
    return [{"kind": "step", "data": {"step": seq}, "at": 1_000 + seq} for seq in range(first, last + 1)]


def test_events_are_kept_exactly_once_whatever_is_repeated(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id)
    append = lambda node, first, last: catalog.append_events(  # noqa: E731
        ALICE,
        attempt.run_id,
        1,
        node,
        first,
        _events(first, last),  # pyright: ignore[reportArgumentType]
    )
    assert append(0, 1, 3) == 4
    assert append(0, 2, 5) == 6
    assert append(0, 1, 2) == 6
    assert append(0, 6, 5) == 6
    assert append(1, 1, 2) == 3
    with pytest.raises(EventGap, match="event 8 came, 6 is the next"):
        append(0, 8, 9)
    assert [catalog.event_cursor(ALICE, attempt.run_id, 1, node) for node in (0, 1, 2)] == [5, 2, 0]
    events = catalog.run_events(ALICE, attempt.run_id, kinds=["step"])
    assert [(e.node, e.node_seq, e.data["step"]) for e in events] == [
        (0, 1, 1),
        (0, 2, 2),
        (0, 3, 3),
        (0, 4, 4),
        (0, 5, 5),
        (1, 1, 1),
        (1, 2, 2),
    ]
    every = catalog.run_events(ALICE, attempt.run_id)
    assert [e.seq for e in every] == list(range(1, 9))
    assert catalog.run_events(ALICE, attempt.run_id, attempt=1, after=6, limit=1) == every[6:7]
    assert catalog.run_events(ALICE, attempt.run_id, attempt=2) == []


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "step", "at": 1},
        {"kind": "", "data": {}, "at": 1},
        {"kind": "step", "data": {"loss": float("nan")}, "at": 1},
        {"kind": "step", "data": {}, "at": 1, "seq": 9},
    ],
)
def test_a_malformed_event_stores_nothing(catalog: Catalog, snapshot_id: str, event: dict[str, object]) -> None:
    attempt = _start(catalog, snapshot_id)
    with pytest.raises(InvalidFact):
        catalog.append_events(ALICE, attempt.run_id, 1, 0, 1, [*_events(1, 1), event])  # pyright: ignore[reportArgumentType]
    assert catalog.event_cursor(ALICE, attempt.run_id, 1, 0) == 0


def test_a_checkpoint_is_kept_once(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id)
    keep = lambda step, content: catalog.record_checkpoint(  # noqa: E731
        ALICE, None, attempt.run_id, 1, attempt.token, step, digest(content), {"dp": 2}
    )
    first = keep(10, "a")
    assert keep(10, "a") == first
    second = keep(20, "b")
    with pytest.raises(Nondeterminism, match="manifest_digest"):
        keep(10, "b")
    assert catalog.checkpoints(ALICE, attempt.run_id) == [first, second]


def test_lists_of_runs(catalog: Catalog, snapshot_id: str) -> None:
    first = ask(catalog, run_facts(snapshot_id)).run
    second = ask(catalog, run_facts(snapshot_id, seed=8, partition="2013-08-01")).run
    assert catalog.runs(ALICE) == [second, first]
    assert catalog.runs(ALICE, pipeline="flight_delay", partition="2013-07-01") == [first]
    assert catalog.runs(ALICE, pipeline="other") == []
    assert catalog.runs(ALICE, limit=1) == [second]
    assert catalog.run_ids(ALICE, first.run_id[:12]) == [first.run_id]
    assert catalog.run_ids(ALICE, "_") == []
    with pytest.raises(UnknownRun):
        catalog.run(ALICE, "nothing")


def test_a_budget_is_reserved_at_the_start_and_settled_at_every_end(catalog: Catalog, snapshot_id: str) -> None:
    state = lambda: catalog.budget(ALICE, BUDGET, MONTH)  # noqa: E731
    with pytest.raises(BudgetMissing, match=f"no amount for {MONTH}"):
        ask(catalog, run_facts(snapshot_id, budget_id=BUDGET))
    assert catalog.runs(ALICE) == []
    assert state() is None
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 250)
    used = 0
    for seed, ending in enumerate(("succeeded", "failed", "cancelled", "lost")):
        attempt = _start(catalog, snapshot_id, seed=seed, budget_id=BUDGET)
        assert state() == BudgetState(250, 100, used, UNIT)
        end(catalog, attempt, ending)
        end(catalog, attempt, ending, key=f"again-{seed}")
        used += 13
        assert state() == BudgetState(250, 0, used, UNIT)
    entries = catalog.budget_entries(ALICE, BUDGET, MONTH)
    assert [(e.kind, e.amount) for e in entries][:3] == [("reserve", 100), ("commit", 13), ("release", 100)]
    assert len(entries) == 12


def test_a_reservation_that_the_budget_cannot_carry_leaves_nothing(catalog: Catalog, snapshot_id: str) -> None:
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 150)
    attempt = _start(catalog, snapshot_id, budget_id=BUDGET)
    refused = run_facts(snapshot_id, seed=8, budget_id=BUDGET)
    with pytest.raises(BudgetExhausted, match="100 asked, 50 left"):
        ask(catalog, refused)
    assert len(catalog.runs(ALICE)) == 1
    with pytest.raises(BudgetBelowUse, match="99: 100 are reserved"):
        catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 99)
    with pytest.raises(InvalidFact, match="unit"):
        catalog.set_budget(ALICE, None, BUDGET, MONTH, "tokens", 500)
    # What was really used is committed, more than was reserved or not; the next reservation pays for it.
    end(catalog, attempt, "failed", worker_seconds=140.5)
    assert catalog.budget(ALICE, BUDGET, MONTH) == BudgetState(150, 0, 141, UNIT)
    with pytest.raises(BudgetExhausted, match="100 asked, 9 left"):
        catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=100)
    assert catalog.run(ALICE, attempt.run_id).last.attempt == 1
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 241)
    assert catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=100).decision == "started"


def test_the_same_budget_again_is_no_change(catalog: Catalog, tmp_path: Path) -> None:
    del tmp_path
    for amount in (5, 5, 7, 7, 5):
        assert catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, amount).limit == amount
    assert [row.action for row in catalog.audit_rows(ALICE)].count("budget.set") == 3


def test_an_end_and_the_attempt_that_follows_are_one_answer(catalog: Catalog, snapshot_id: str) -> None:
    attempt = _start(catalog, snapshot_id, max_attempts=2)
    ended = {"state": "lost", "reason": "gone", "code": None, "worker_seconds": 1.0, "result": None, "restart": True}
    run = catalog.finish_attempt(ALICE, None, attempt.run_id, 1, attempt.token, **ended)
    assert (run.status, [a.state for a in run.attempts]) == ("open", ["lost", "admitted"])
    again = catalog.finish_attempt(ALICE, None, attempt.run_id, 1, attempt.token, **ended)
    assert len(again.attempts) == 2
    spent = catalog.finish_attempt(ALICE, None, attempt.run_id, 2, run.last.token, **ended)
    assert (spent.status, len(spent.attempts)) == ("lost", 2)
    with pytest.raises(AttemptsSpent):
        catalog.restart_run(ALICE, None, attempt.run_id, reserve_seconds=1)


@pytest.mark.parametrize("stopped", ["code", "cancel"])
def test_no_attempt_follows_where_a_rule_forbids_it(catalog: Catalog, snapshot_id: str, stopped: str) -> None:
    attempt = _start(catalog, snapshot_id)
    if stopped == "cancel":
        catalog.request_cancel(ALICE, None, attempt.run_id, "enough")
    ended = {"state": "failed", "reason": "x", "worker_seconds": 1.0, "result": None, "restart": True}
    code = 65 if stopped == "code" else 77
    run = catalog.finish_attempt(ALICE, None, attempt.run_id, 1, attempt.token, code=code, **ended)
    assert len(run.attempts) == 1
    assert run.status == ("failed" if stopped == "code" else "cancelled")
