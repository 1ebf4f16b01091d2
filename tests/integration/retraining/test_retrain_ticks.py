"""Ticks on a real catalog with planted reports: what opens a request, what moves it, and what it costs.

The scheduler is a double that has the runs which the test gives it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.retrain_bench import (
    MONTH_S,
    NEXT_AS_OF,
    RESERVE_S,
    WEEKS,
    declare,
    instant,
    pipeline_of,
    plant_drift,
    plant_incident,
    plant_quality,
    set_world,
    told,
)
from support.retrain_ticks import Listed, tick_at_once
from support.training_bench import TrainingBench

from headway.monitoring.retrain import SchedulerRun, Tick, budget_of, tick
from headway.registry.keys import KeyRing

CLOSES = instant("2026-05-03T00:00:00+00:00")
NEXT_CLOSES = instant("2026-06-03T00:00:00+00:00")


def look(bench: TrainingBench, scheduler: Listed | None = None) -> Tick:
    with bench.services() as services:
        return tick(services, KeyRing(bench.home / "keys"), scheduler or Listed(), pipeline_of(bench))


def plant(bench: TrainingBench, **changed: Any) -> None:  # noqa: ANN401
    with bench.services() as services:
        plant_drift(services, **changed)


def budget(bench: TrainingBench, period: str = "2026-05") -> tuple[int, int]:
    """Reserved and committed."""
    with bench.services() as services:
        state = services.catalog.budget(services.principal, budget_of("shop"), period)
        return (0, 0) if state is None else (state.reserved, state.committed)


def sound(bench: TrainingBench) -> None:
    """Every invariant holds but the two that miss the bytes of the written version and of its statements."""
    findings = json.loads(bench.run("fsck", "--json").stdout)["findings"]
    assert {f["name"] for f in findings if not f["ok"]} == {"stored bytes", "promotions and rollbacks are signed"}


def test_drift_opens_one_request_and_asks_under_one_key(bench: TrainingBench) -> None:
    assert look(bench).decision.reason == "no_alarm"
    plant(bench)
    first = look(bench)
    assert first.ask is not None
    assert first.ask.as_of == NEXT_AS_OF
    assert first.ask == look(bench).ask, "until the run is seen it is asked for again, under the same key"
    (request,) = told(bench)
    assert (request["state"], request["as_of"], request["cause"]) == ("ready", NEXT_AS_OF, "drift")
    assert budget(bench) == (RESERVE_S, 0)
    seen = look(bench, Listed(SchedulerRun("dagster-1", "open")))
    assert seen.ask is None
    assert told(bench)[0]["state"] == "running"
    shown = bench.json("retrain", "show", request["request_id"][:8])
    assert shown["cause_digest"] == first.ask.run_key
    assert [e["week"] for e in shown["evidence"]] == list(WEEKS)
    assert [m["state"] for m in shown["moves"]] == ["ready", "running"]
    sound(bench)


def test_an_incident_and_a_week_alone_train_nothing(bench: TrainingBench) -> None:
    plant(bench, weeks=WEEKS[:1])
    assert look(bench).decision.reason == "not_persistent"
    with bench.services() as services:
        plant_incident(services, WEEKS[1])
    assert look(bench).decision.reason == "data_incident"
    assert told(bench) == []
    decisions = bench.json("retrain", "list")["decisions"]
    assert [d["reason"].partition(":")[0] for d in decisions] == ["data_incident", "not_persistent"]
    assert look(bench).ask is None
    assert len(bench.json("retrain", "list")["decisions"]) == 2, "the same decision again is no new row"


def test_an_incident_holds_what_was_asked_for(bench: TrainingBench) -> None:
    plant(bench)
    assert look(bench).ask is not None
    with bench.services() as services:
        plant_incident(services, "2026-05-11")
    held = look(bench)
    assert (held.ask, held.decision.reason) == (None, "data_incident")


def test_no_as_of_waits_for_its_date(bench: TrainingBench) -> None:
    set_world_back(bench, "2026-05-02T12:00:00+00:00")
    plant(bench, weeks=("2026-04-13", "2026-04-20"))
    waiting = look(bench)
    assert (waiting.ask, waiting.decision.reason) == (None, "waiting_for_evaluation_window")
    (request,) = told(bench)
    assert request["state"] == "waiting_for_evaluation_window"
    assert instant(request["due_at"]) == CLOSES
    set_world(bench, "2026-05-02T23:59:59+00:00")
    assert look(bench).ask is None
    set_world(bench, "2026-05-03T00:00:00+00:00")
    asked = look(bench).ask
    assert asked is not None
    assert asked.as_of == NEXT_AS_OF
    assert told(bench)[0]["state"] == "ready"


def test_own_promotion_raises_nothing(bench: TrainingBench) -> None:
    """The evidence is of version 7, which does not serve: reports of the old reference say nothing of the new one."""
    plant(bench, version=7)
    assert look(bench).decision.reason == "reference_switched"
    with bench.services() as services:
        for week in WEEKS:
            plant_quality(services, week, auc=0.66)
    assert look(bench).decision.reason == "reference_switched"
    assert told(bench) == []


def test_a_person_approves_or_rejects(bench: TrainingBench) -> None:
    declared(bench, approval="person")
    plant(bench)
    assert look(bench).decision.reason == "waiting_for_approval"
    request_id = told(bench)[0]["request_id"]
    assert look(bench).ask is None
    approved = bench.run("retrain", "approve", request_id[:6], "--reason", "the season starts")
    assert approved.exit_code == 0, approved.output
    asked = look(bench).ask
    assert asked is not None
    assert bench.run("retrain", "approve", request_id, "--reason", "twice").exit_code == 2
    rejected = bench.run("retrain", "reject", request_id, "--reason", "not now")
    assert rejected.exit_code == 0, rejected.output
    assert budget(bench) == (0, 0)
    assert look(bench).decision.reason == "already_decided"
    moves = bench.json("retrain", "show", request_id)["moves"]
    assert [m["state"] for m in moves] == ["waiting_for_approval", "waiting_for_evaluation_window", "ready", "rejected"]
    sound(bench)


@pytest.mark.parametrize("limit", [0, RESERVE_S - 1])
def test_no_money_no_request(bench: TrainingBench, limit: int) -> None:
    plant(bench)
    with bench.services() as services:
        used = MONTH_S - limit
        catalog, principal = services.catalog, services.principal
        catalog.set_budget(principal, None, budget_of("shop"), "2026-05", "worker_seconds", MONTH_S)
        other = request_of_another_pipeline(services, used)
    assert look(bench).decision.reason == "budget"
    assert [r["request_id"] for r in told(bench)] == [other]


def test_lost_and_bad_runs_are_asked_for_again_and_end(bench: TrainingBench) -> None:
    plant(bench)
    asked = look(bench).ask
    assert asked is not None
    runs = Listed(SchedulerRun("d1", "open"))
    look(bench, runs)
    lost = look(bench, Listed()).ask
    assert lost is not None
    assert lost.run_key == f"{asked.run_key}/2", "the request had a run that Dagster does not know any more"
    runs.known = [SchedulerRun("d1", "failed")]
    again = look(bench, runs).ask
    assert again is not None
    assert again.run_key == f"{asked.run_key}/2"
    runs.known += [SchedulerRun("d2", "failed"), SchedulerRun("d3", "failed")]
    assert look(bench, runs).ask is None
    (request,) = told(bench)
    assert request["state"] == "failed"
    assert budget(bench) == (0, 0)
    plant(bench, weeks=("2026-05-11",))
    set_world(bench, "2026-06-07T00:00:00+00:00")
    assert look(bench, runs).decision.reason == "cooldown"
    assert bench.json("retrain", "why", "-p", str(bench.folder))["decision"] == "nothing"
    sound(bench)


def test_a_cancelled_run_needs_a_person(bench: TrainingBench) -> None:
    plant(bench)
    look(bench)
    runs = Listed(SchedulerRun("d1", "open"))
    look(bench, runs)
    runs.known = [SchedulerRun("d1", "cancelled")]
    look(bench, runs)
    (request,) = told(bench)
    assert request["state"] == "needs_human"
    assert look(bench, runs).decision.reason == "needs_human"
    assert bench.run("retrain", "approve", request["request_id"], "--reason", "go on").exit_code == 0
    again = look(bench, runs).ask
    assert again is not None
    assert again.run_key.endswith("/2")
    runs.known.append(SchedulerRun("d2", "open"))
    look(bench, runs)
    assert told(bench)[0]["state"] == "running"


def test_why_changes_nothing(bench: TrainingBench) -> None:
    plant(bench)
    before = rows(bench)
    document = bench.json("retrain", "why", "-p", str(bench.folder))
    assert document["decision"] == "request"
    assert all(rule["passed"] for rule in document["rules"])
    assert rows(bench) == before
    look(bench)
    assert bench.json("retrain", "why", "-p", str(bench.folder))["decision"] == "launch"


def test_t7_a_hundred_ticks_and_some_killed_make_one_request(bench: TrainingBench, tmp_path: Path) -> None:
    keys = tick_at_once(bench, tmp_path / "asked.jsonl", 14, lambda: plant(bench), dagster=False)
    last = look(bench)
    assert last.ask is not None
    assert len(keys) >= 84
    assert set(keys) - {None} == {last.ask.run_key}
    assert len(told(bench)) == 1
    assert budget(bench) == (RESERVE_S, 0)
    sound(bench)


def set_world_back(bench: TrainingBench, text: str) -> None:
    """Another world time than the bench's: its clock moves forward only, so it starts anew."""
    bench.settings.clock_file.unlink()
    set_world(bench, text)


def declared(bench: TrainingBench, **retraining: Any) -> None:  # noqa: ANN401
    file = bench.folder / "defs.yaml"
    document = yaml.safe_load(file.read_text())
    declare(document["attributes"])
    document["attributes"]["monitoring"]["retraining"] |= retraining
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def request_of_another_pipeline(services: Any, cost: int) -> str:  # noqa: ANN401
    """A request that holds what the month has, as a rival would."""
    from support.retrain_cases import FINGERPRINT

    from headway.catalog.monitoring_facts import RetrainFacts
    from trainer.blobs import digest_json

    facts = RetrainFacts(
        pipeline="rival",
        endpoint_id="shop",
        model_version=1,
        fingerprint=FINGERPRINT,
        cause_digest=digest_json("rival"),
        cause="person",
        evidence=(),
        reason="holds the month's money",
        expected_gain=None,
        cost_seconds=cost,
        budget_id=budget_of("shop"),
        period="2026-05",
        as_of=None,
        due_at=None,
        state="waiting_for_approval",
        made_at=services.world(),
    )
    return services.catalog.open_retrain_request(services.principal, None, facts).request_id


def rows(bench: TrainingBench) -> tuple[int, int]:
    """Audit rows and blobs: whatever a command does leaves one."""
    with bench.services() as services:
        catalog, principal = services.catalog, services.principal
        return len(catalog.audit_rows(principal, limit=10_000)), len(catalog.blobs(principal))
