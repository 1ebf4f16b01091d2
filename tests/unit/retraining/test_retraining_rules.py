"""The retraining decision rule by rule: in each case one fact differs from those that lead to a request."""

from dataclasses import replace
from typing import Any

import pytest
from support.retrain_cases import ALARM, AS_OFS, CAUSE, DAY, FINGERPRINT, NOW, POLICY, closed, facts, opened

from headway.monitoring.retraining import (
    Alarm,
    Champion,
    Gain,
    Incident,
    Money,
    Moved,
    cause_of,
    decide,
    rules_document,
)

OTHER = replace(ALARM, moved=(Moved("wind", "", "down"),))
INCIDENT = Incident("2024-10-01", "report-9", "null rate of wind")
QUALITY = Alarm("quality", 3, "raised", ("w2",), ("report-7",), (Moved("auc", "", "down"),), 2.5, NOW - DAY)

NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "nothing serves": ({"champion": None}, "nothing_served"),
    "no alarm": ({"alarms": ()}, "no_alarm"),
    "alarm cleared": ({"alarms": (replace(ALARM, state="clear"),)}, "no_alarm"),
    "not persistent": ({"alarms": (replace(ALARM, state="building"),)}, "not_persistent"),
    "season": ({"alarms": (replace(ALARM, state="season"),)}, "season"),
    "incident": ({"incident": INCIDENT}, "data_incident"),
    "incident comes before drift": ({"incident": INCIDENT, "alarms": ()}, "data_incident"),
    "own promotion": ({"champion": Champion(4, "2024-02-01")}, "reference_switched"),
    "old evidence": ({"alarms": (replace(ALARM, until=NOW - 29 * DAY),)}, "stale_evidence"),
    "too few labels": ({"labels": 999}, "too_few_labels"),
    "gain unknown": ({"gain": None}, "gain_unknown"),
    "gain too small": ({"gain": Gain(0.0019, "estimated")}, "gain_too_small"),
    "cooldown": ({"past": (closed("promoted", 13.9),)}, "cooldown"),
    "cooldown at least the maturity": ({"past": (closed("promoted", 20),), "maturity": 21 * DAY}, "cooldown"),
    "cooldown doubled": ({"past": (closed("kept_old", 27.9, "other"),)}, "cooldown"),
    "cooldown doubled twice": ({"past": (closed("kept_old", 55, "x"), closed("failed", 90, "y"))}, "cooldown"),
    "rejection counts for the cooldown": ({"past": (closed("rejected", 13),)}, "cooldown"),
    "threshold doubled": ({"past": (closed("kept_old", 60),)}, "threshold_doubled"),
    "threshold doubled twice": (
        {"past": (closed("kept_old", 160), closed("kept_old", 100)), "alarms": (replace(ALARM, strength=3.9),)},
        "threshold_doubled",
    ),
    "the same cause again": ({"past": (closed("rejected", 60, cause=CAUSE),)}, "already_decided"),
    "budget": ({"money": Money("shop/retraining", "2024-10", 3600, 599)}, "budget"),
    "no budget at all": ({"money": Money("shop/retraining", "2024-10", 0, 0)}, "budget"),
    "no later as_of": ({"as_ofs": AS_OFS[:1]}, "calendar_ended"),
}

REQUEST: dict[str, tuple[dict[str, Any], str, str, str | None, int | None]] = {
    "all say yes": ({}, "drift", "ready", "2024-04-01", NOW - 10 * DAY),
    "a loss of quality": ({"alarms": (QUALITY,)}, "quality", "ready", "2024-04-01", NOW - 10 * DAY),
    "cooldown over": ({"past": (closed("promoted", 14),)}, "drift", "ready", "2024-04-01", NOW - 10 * DAY),
    "a promotion ends every doubling": (
        {"past": (closed("kept_old", 60), closed("promoted", 15, "other"))},
        "drift",
        "ready",
        "2024-04-01",
        NOW - 10 * DAY,
    ),
    "strong enough for the doubled threshold": (
        {"past": (closed("kept_old", 60),), "alarms": (replace(ALARM, strength=2.0),)},
        "drift",
        "ready",
        "2024-04-01",
        NOW - 10 * DAY,
    ),
    "another trouble has its own threshold": (
        {"past": (closed("kept_old", 60),), "alarms": (OTHER,)},
        "drift",
        "ready",
        "2024-04-01",
        NOW - 10 * DAY,
    ),
    "a person approves": (
        {"policy": POLICY.model_copy(update={"approval": "person"})},
        "approval",
        "waiting_for_approval",
        "2024-04-01",
        NOW - 10 * DAY,
    ),
    "no evaluation window is closed": (
        {"as_ofs": (AS_OFS[0], AS_OFS[3])},
        "waiting_for_evaluation_window",
        "waiting_for_evaluation_window",
        None,
        NOW + 20 * DAY,
    ),
    "a window that closes just now": (
        {"as_ofs": (AS_OFS[0], replace(AS_OFS[3], closes_at=NOW))},
        "drift",
        "ready",
        "2024-05-01",
        NOW,
    ),
    "the newest is trained": (
        {"as_ofs": (*AS_OFS[:2], replace(AS_OFS[2], trained=True), AS_OFS[3])},
        "waiting_for_evaluation_window",
        "waiting_for_evaluation_window",
        None,
        NOW + 20 * DAY,
    ),
    "snapshots are missing": (
        {"as_ofs": (AS_OFS[0], replace(AS_OFS[2], missing="3 of 30 have no snapshot"), AS_OFS[3])},
        "snapshots_missing",
        "waiting_for_evaluation_window",
        None,
        NOW - 10 * DAY,
    ),
}


@pytest.mark.parametrize(("changed", "reason"), NOTHING.values(), ids=NOTHING.keys())
def test_one_no_is_enough(changed: dict[str, Any], reason: str) -> None:
    decision = decide(facts(**changed))
    assert (decision.action, decision.reason) == ("nothing", reason)
    assert decision.sentence
    assert reason in {r.code for r in decision.rules if not r.passed}


@pytest.mark.parametrize(("changed", "reason", "state", "as_of", "due_at"), REQUEST.values(), ids=REQUEST.keys())
def test_what_a_request_says(
    changed: dict[str, Any], reason: str, state: str, as_of: str | None, due_at: int | None
) -> None:
    decision = decide(facts(**changed))
    assert (decision.action, decision.reason) == ("request", reason)
    assert (decision.state, decision.as_of, decision.due_at) == (state, as_of, due_at)
    assert "realised" in decision.sentence
    assert "the median of 3 runs" in decision.sentence


def test_a_person_is_asked_after_enough_failures() -> None:
    failed = tuple(closed("failed", 150 + 10 * number, "x") for number in range(3))
    decision = decide(facts(past=failed))
    assert (decision.action, decision.reason, decision.state) == (
        "ask_human",
        "too_many_failures",
        "waiting_for_approval",
    )
    assert decide(facts(past=failed[:2])).action == "request"
    assert decide(facts(past=(*failed, closed("promoted", 100, "y")))).action == "request"


OPEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "follows what runs": ({"open": opened("running", as_of="2024-04-01")}, "follow", "running"),
    "a promotion in between does not stop what runs": (
        {"open": opened("running", as_of="2024-04-01", model_version=2)},
        "follow",
        "running",
    ),
    "waits for a person": ({"open": opened("needs_human")}, "wait", "needs_human"),
    "waits for approval": ({"open": opened("waiting_for_approval")}, "wait", "waiting_for_approval"),
    "launches": ({"open": opened("ready", as_of="2024-04-01")}, "launch", "ready"),
    "starts when the window is closed": ({"open": opened("waiting_for_evaluation_window")}, "start", "as_of"),
    "waits for the window": (
        {"open": opened("waiting_for_evaluation_window"), "as_ofs": AS_OFS[3:]},
        "wait",
        "waiting_for_evaluation_window",
    ),
    "starts nothing during an incident": (
        {"open": opened("waiting_for_evaluation_window"), "incident": INCIDENT},
        "wait",
        "data_incident",
    ),
    "launches nothing during an incident": (
        {"open": opened("ready", as_of="2024-04-01"), "incident": INCIDENT},
        "wait",
        "data_incident",
    ),
    "expires with its champion": (
        {"open": opened("waiting_for_evaluation_window", model_version=2)},
        "expire",
        "champion_changed",
    ),
    "expires with the calendar": (
        {"open": opened("waiting_for_evaluation_window"), "as_ofs": AS_OFS[:1]},
        "expire",
        "calendar_ended",
    ),
    "single flight": ({"open": opened("ready", as_of="2024-04-01"), "alarms": (OTHER,)}, "launch", "ready"),
}


@pytest.mark.parametrize(("changed", "action", "reason"), OPEN.values(), ids=OPEN.keys())
def test_one_request_at_a_time(changed: dict[str, Any], action: str, reason: str) -> None:
    decision = decide(facts(**changed))
    assert (decision.action, decision.reason) == (action, reason)
    if action == "start":
        assert decision.as_of == "2024-04-01"


def test_fingerprint_and_cause() -> None:
    decision = decide(facts())
    assert (decision.fingerprint, decision.cause_digest) == (FINGERPRINT, CAUSE)
    swapped = replace(ALARM, moved=ALARM.moved[::-1], evidence=ALARM.evidence[::-1])
    same = decide(facts(alarms=(swapped,)))
    assert (same.fingerprint, same.cause_digest) == (FINGERPRINT, CAUSE)
    later = decide(facts(alarms=(replace(ALARM, evidence=("report-1", "report-3")),)))
    assert later.fingerprint == FINGERPRINT
    assert later.cause_digest != CAUSE
    assert cause_of("f", ["b", "a", "b"]) == cause_of("f", ["a", "b"]) != cause_of("f", ["a"])
    down = replace(ALARM, moved=(Moved("temperature", "", "down"), ALARM.moved[1]))
    assert decide(facts(alarms=(down,))).fingerprint != FINGERPRINT
    both = decide(facts(alarms=(ALARM, QUALITY)))
    assert (both.cause, both.evidence) == ("quality", ("report-1", "report-2", "report-7"))


def test_every_rule_answers() -> None:
    told = {r["rule"]: r["passed"] for r in rules_document(decide(facts(labels=0, gain=None)))}
    assert [name for name, passed in told.items() if not passed] == ["too_few_labels", "gain_unknown"]
    assert {"data_incident", "no_alarm", "cooldown", "budget"} <= set(told)
