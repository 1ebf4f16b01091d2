"""Two commands at once on runs and endpoints, the first held before its commit: the second waits, then sees it all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.catalog_facts import ALICE, Ticker
from support.catalog_race import race
from support.registry_facts import (
    BUDGET,
    ENDPOINT,
    MODEL,
    MONTH,
    POLICY,
    UNIT,
    ask,
    end,
    pass_all,
    prepare_inputs,
    registered,
    run_facts,
    statement,
    version_facts,
)

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    BudgetExhausted,
    EndpointMoved,
    PromotionRefused,
    StaleAttempt,
    VersionRefused,
)
from headway.catalog.invariants import check
from headway.catalog.registry_facts import Endpoint, GateResultFacts, ModelVersion, PromotionEvidence
from headway.catalog.run_facts import Submission, TrainingRun


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def catalog(catalog_url: str, tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(catalog_url, Ticker())
    yield opened
    findings = check(opened, ALICE, LocalStore(tmp_path / "store"))
    opened.close()
    assert [finding for finding in findings if not finding.ok and finding.name != "stored bytes"] == []


@pytest.fixture
def snapshot_id(catalog: Catalog) -> str:
    return prepare_inputs(catalog)


def _promote(catalog: Catalog, version: ModelVersion, evidence: PromotionEvidence, epoch: int | None) -> Endpoint:
    return catalog.promote_immediate(
        ALICE, None, ENDPOINT, MODEL, version.version, expected_epoch=epoch, evidence=evidence
    )


@pytest.mark.parametrize("point", ["claimed", "before_commit"])
@pytest.mark.parametrize("key", ["same", None])
def test_two_clicks_at_once_are_one_attempt(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, point: str, key: str | None
) -> None:
    facts = run_facts(snapshot_id)
    one, two = race(catalog_url, workers, point, lambda c: ask(c, facts, key=key), lambda c: ask(c, facts, key=key))
    first, second = one.result(), two.result()
    assert isinstance(first, Submission)
    assert isinstance(second, Submission)
    assert (first.decision, second.decision) == ("started", "started" if key else "adopted")
    assert first.attempt == second.attempt
    assert len(catalog.run(ALICE, first.run.run_id).attempts) == 1


def test_two_runs_at_once_cannot_overdraw_a_budget(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 150)
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: ask(c, run_facts(snapshot_id, seed=1, budget_id=BUDGET)),
        lambda c: ask(c, run_facts(snapshot_id, seed=2, budget_id=BUDGET)),
    )
    assert one.exception() is None
    assert isinstance(two.exception(), BudgetExhausted)
    assert len(catalog.runs(ALICE)) == 1


@pytest.mark.parametrize("order", ["finish first", "submit first"])
def test_an_ask_and_an_end_at_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    facts = run_facts(snapshot_id)
    attempt = ask(catalog, facts).attempt
    assert attempt is not None
    finish = lambda c: end(c, attempt)  # noqa: E731
    submit = lambda c: ask(c, facts, asker="machine")  # noqa: E731
    first, second = (finish, submit) if order == "finish first" else (submit, finish)
    one, two = race(catalog_url, workers, "effect", first, second)
    answer = (two if order == "finish first" else one).result()
    assert isinstance(answer, Submission)
    assert answer.decision == ("up_to_date" if order == "finish first" else "adopted")
    assert [a.state for a in catalog.run(ALICE, attempt.run_id).attempts] == ["succeeded"]


@pytest.mark.parametrize("order", ["finish first", "cancel first"])
def test_a_cancel_and_a_bad_end_at_once_leave_the_run_cancelled(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    attempt = ask(catalog, run_facts(snapshot_id)).attempt
    assert attempt is not None
    finish = lambda c: end(c, attempt, "failed", code=77)  # noqa: E731
    cancel = lambda c: c.request_cancel(ALICE, None, attempt.run_id, "enough")  # noqa: E731
    first, second = (finish, cancel) if order == "finish first" else (cancel, finish)
    one, two = race(catalog_url, workers, "effect", first, second)
    assert [one.exception(), two.exception()] == [None, None]
    assert isinstance(two.result(), TrainingRun)
    assert catalog.run(ALICE, attempt.run_id).status == "cancelled"


def test_two_ends_at_once_are_one_end(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 150)
    attempt = ask(catalog, run_facts(snapshot_id, budget_id=BUDGET)).attempt
    assert attempt is not None
    one, two = race(catalog_url, workers, "effect", lambda c: end(c, attempt), lambda c: end(c, attempt, "lost"))
    assert one.exception() is None
    assert isinstance(two.exception(), StaleAttempt)
    assert len(catalog.budget_entries(ALICE, BUDGET, MONTH)) == 3


def test_two_readers_of_one_stream_store_each_event_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    attempt = ask(catalog, run_facts(snapshot_id)).attempt
    assert attempt is not None
    events = [{"kind": "step", "data": {"step": n}, "at": n} for n in range(1, 4)]
    # The run is held by a command on it while the first reader comes.
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: c.mark_running(ALICE, None, attempt.run_id, 1, attempt.token),
        lambda c: [c.append_events(ALICE, attempt.run_id, 1, 0, 1, events[:n]) for n in (2, 1, 3)],
    )
    assert [one.exception(), two.exception()] == [None, None]
    futures = [workers.submit(catalog.append_events, ALICE, attempt.run_id, 1, 0, 1, events) for _ in range(4)]
    assert {future.result() for future in futures} == {4}
    assert [e.node_seq for e in catalog.run_events(ALICE, attempt.run_id, kinds=["step"])] == [1, 2, 3]


@pytest.mark.parametrize("epoch", [1, None])
def test_two_promotions_at_once_move_the_endpoint_one_after_the_other(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, epoch: int | None
) -> None:
    zero, first, second = (registered(catalog, snapshot_id, seed) for seed in (7, 8, 9))
    _promote(catalog, zero, pass_all(catalog, zero), None)
    evidences = [pass_all(catalog, version) for version in (first, second)]
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: _promote(c, first, evidences[0], epoch),
        lambda c: _promote(c, second, evidences[1], epoch),
    )
    moved = one.result()
    assert isinstance(moved, Endpoint)
    assert (moved.epoch, moved.stable, moved.previous) == (2, 2, 1)
    if epoch is None:
        assert isinstance(two.result(), Endpoint)
        found = catalog.endpoint(ALICE, ENDPOINT)
        assert found is not None
        assert (found.epoch, found.stable, found.previous) == (3, 3, 2)
    else:
        assert isinstance(two.exception(), EndpointMoved)
        assert catalog.endpoint(ALICE, ENDPOINT) == moved


def test_the_first_promotions_of_an_endpoint_at_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    version = registered(catalog, snapshot_id)
    evidence = pass_all(catalog, version)
    send = lambda c: _promote(c, version, evidence, 0)  # noqa: E731
    one, two = race(catalog_url, workers, "before_commit", send, send)
    assert one.result() == two.result() == catalog.endpoint(ALICE, ENDPOINT)
    assert len(catalog.endpoint_events(ALICE, ENDPOINT)) == 1


@pytest.mark.parametrize("order", ["promote first", "rollback first"])
def test_a_promotion_and_a_rollback_at_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    versions = [registered(catalog, snapshot_id, seed) for seed in (7, 8, 9)]
    for version in versions[:2]:
        _promote(catalog, version, pass_all(catalog, version), None)
    evidence = pass_all(catalog, versions[2])
    promote = lambda c: _promote(c, versions[2], evidence, None)  # noqa: E731
    back = lambda c: c.rollback(ALICE, None, ENDPOINT, reason="slow", expected_epoch=2)  # noqa: E731
    first, second = (promote, back) if order == "promote first" else (back, promote)
    one, two = race(catalog_url, workers, "effect", first, second)
    assert one.exception() is None
    found = catalog.endpoint(ALICE, ENDPOINT)
    assert found is not None
    if order == "promote first":
        # The rollback was meant for what it saw: it must not undo a promotion that came between.
        assert isinstance(two.exception(), EndpointMoved)
        assert (found.epoch, found.stable, found.previous) == (3, 3, 2)
    else:
        assert two.exception() is None
        assert (found.epoch, found.stable, found.previous) == (4, 3, 1)


@pytest.mark.parametrize("order", ["promote first", "judge first"])
def test_a_promotion_and_a_new_failing_result_at_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    version = registered(catalog, snapshot_id)
    evidence = pass_all(catalog, version)
    promote = lambda c: _promote(c, version, evidence, None)  # noqa: E731
    # Attested before, so that only the result itself races.
    catalog.add_attestation(ALICE, None, statement(version.manifest_digest, ("contract", "fail")))
    fail = lambda c: _fail(c, version)  # noqa: E731
    first, second = (promote, fail) if order == "promote first" else (fail, promote)
    one, two = race(catalog_url, workers, "effect", first, second)
    assert one.exception() is None
    if order == "promote first":
        assert two.exception() is None
    else:
        refusal = two.exception()
        assert isinstance(refusal, PromotionRefused)
        assert set(refusal.reasons) == {"contract"}
        assert catalog.endpoint(ALICE, ENDPOINT) is None


def _fail(catalog: Catalog, version: ModelVersion) -> None:
    subject = version.manifest_digest
    said = statement(subject, ("contract", "fail")).statement_digest
    facts = GateResultFacts(MODEL, version.version, "contract", "fail", "it is a fail", {}, 1, said, subject)
    catalog.record_gate_result(ALICE, None, facts)


def test_a_promotion_waits_for_a_new_policy_and_is_refused(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    version = registered(catalog, snapshot_id)
    evidence = pass_all(catalog, version)
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: c.set_gate_policy(ALICE, None, MODEL, POLICY | {"note": "stricter"}),
        lambda c: _promote(c, version, evidence, None),
    )
    assert one.exception() is None
    assert isinstance(two.exception(), PromotionRefused)


@pytest.mark.parametrize("order", ["promote first", "retire first"])
def test_a_promotion_and_a_retirement_at_once(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor, order: str
) -> None:
    version = registered(catalog, snapshot_id)
    evidence = pass_all(catalog, version)
    promote = lambda c: _promote(c, version, evidence, None)  # noqa: E731
    retire = lambda c: c.retire_model_version(ALICE, None, MODEL, 1, "bad")  # noqa: E731
    first, second = (promote, retire) if order == "promote first" else (retire, promote)
    one, two = race(catalog_url, workers, "effect", first, second)
    assert one.exception() is None
    assert isinstance(two.exception(), VersionRefused if order == "promote first" else PromotionRefused)


def test_two_registrations_at_once_get_one_version_or_two_numbers(
    catalog: Catalog, snapshot_id: str, catalog_url: str, workers: ThreadPoolExecutor
) -> None:
    run = catalog.run(ALICE, registered(catalog, snapshot_id).run_id)
    other = run_facts(snapshot_id, seed=8)
    attempt = ask(catalog, other).attempt
    assert attempt is not None
    facts = version_facts(end(catalog, attempt))
    send = lambda c: c.register_model_version(ALICE, None, facts)  # noqa: E731
    one, two = race(catalog_url, workers, "effect", send, send)
    assert one.result() == two.result()
    third = version_facts(run, "logistic")
    one, two = race(
        catalog_url,
        workers,
        "effect",
        lambda c: c.register_model_version(ALICE, None, third),
        lambda c: c.register_model_version(ALICE, None, version_facts(catalog.run(ALICE, facts.run_id), "logistic")),
    )
    assert [one.exception(), two.exception()] == [None, None]
    assert [v.version for v in catalog.model_versions(ALICE, MODEL)] == [1, 2, 3, 4]
