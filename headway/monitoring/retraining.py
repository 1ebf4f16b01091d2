"""Decides whether a pipeline is trained again: a pure function from evidence, money and time to one decision.

Every rule is asked, in one order, and answers with a sentence; the first that says no makes the decision. Nothing is
read or written here (see `headway.monitoring.retrain`). Times are int64 microseconds UTC of the world's clock, costs
are worker seconds, gains are in AUC.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headway.catalog.clock import utc_text
from headway.declaration import RetrainingSpec, duration_us
from headway.words import counted
from trainer.blobs import Json, digest_json

Action: TypeAlias = Literal["nothing", "request", "ask_human", "wait", "start", "launch", "follow", "expire"]
FirstState: TypeAlias = Literal["waiting_for_evaluation_window", "waiting_for_approval", "ready"]

# A wait that doubles for ever is a refusal that nobody declared.
_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Moved:
    """What moved: a feature (or `score`, or `auc`), in a segment (empty: everywhere), and which way."""

    name: str
    segment: str = ""
    direction: Literal["up", "down", "other"] = "other"


@dataclass(frozen=True)
class Alarm:
    """What the reports of one version say of drift, or of quality.

    `strength` is the effect of the newest week as a multiple of its threshold. `evidence` names the reports of the
    weeks that count, `until` is the end of the newest of them.
    """

    kind: Literal["drift", "quality"]
    model_version: int
    state: Literal["raised", "building", "season", "clear"]
    weeks: tuple[str, ...]
    evidence: tuple[str, ...]
    moved: tuple[Moved, ...]
    strength: float
    until: int


@dataclass(frozen=True)
class Incident:
    """The newest week's data are broken: that is repaired, not learned."""

    week: str
    report_id: str
    detail: str


@dataclass(frozen=True)
class Gain:
    """AUC that a new model may win back, and whether labels say so or an estimate without labels."""

    auc: float
    basis: Literal["realised", "estimated"]


@dataclass(frozen=True)
class Cost:
    """Worker seconds: what a run is expected to use and from what that is known, and what a request reserves."""

    expected: float
    basis: str
    reserve: int


@dataclass(frozen=True)
class Money:
    """The retraining budget of the month; `available` is what may still be reserved, in worker seconds."""

    budget_id: str
    period: str
    limit: int
    available: int


@dataclass(frozen=True)
class Champion:
    """The version that serves; its training data ended at `as_of`, its own evaluation is of the month after."""

    version: int
    as_of: str


@dataclass(frozen=True)
class AsOf:
    """A declared `as_of`: when its evaluation window is over and its labels are due, and whether it was trained.

    `trained`: a run of the present identity has succeeded. `missing`: partitions without a snapshot, for people.
    """

    key: str
    closes_at: int
    trained: bool
    missing: str = ""


@dataclass(frozen=True)
class OpenRequest:
    """The pipeline's one open request."""

    request_id: str
    state: Literal["waiting_for_evaluation_window", "waiting_for_approval", "ready", "running", "needs_human"]
    model_version: int
    fingerprint: str
    cause_digest: str
    as_of: str | None
    due_at: int | None


@dataclass(frozen=True)
class PastRequest:
    """A closed request and how it ended. `at` is when it was made, or when it could start if that was later."""

    request_id: str
    cause_digest: str
    fingerprint: str
    state: Literal["promoted", "kept_old", "failed", "rejected", "expired"]
    at: int


@dataclass(frozen=True)
class DecisionInput:
    """Everything that the decision rests on.

    `maturity` is the time by which a label is due, `stale_after` the age at which evidence is no evidence any more,
    both in microseconds. `labels` counts mature labels since the champion's data ended. `past` is in any order.
    """

    pipeline: str
    now: int
    policy: RetrainingSpec
    maturity: int
    stale_after: int
    champion: Champion | None
    alarms: tuple[Alarm, ...]
    incident: Incident | None
    labels: int
    gain: Gain | None
    cost: Cost
    money: Money
    open: OpenRequest | None
    past: tuple[PastRequest, ...]
    as_ofs: tuple[AsOf, ...]


@dataclass(frozen=True)
class Rule:
    """One rule's answer: whether it lets a training through, and why."""

    code: str
    passed: bool
    sentence: str


@dataclass(frozen=True)
class Decision:
    """What to do. `reason` is the code of the rule that decided, `rules` are all answers in order.

    `request` and `ask_human` carry what the request says; `start` carries the `as_of` that is free now.
    """

    action: Action
    reason: str
    sentence: str
    rules: tuple[Rule, ...]
    fingerprint: str = ""
    cause_digest: str = ""
    cause: Literal["drift", "quality"] = "drift"
    evidence: tuple[str, ...] = ()
    state: FirstState = "ready"
    as_of: str | None = None
    due_at: int | None = None


@dataclass(frozen=True)
class _Choice:
    as_of: str | None
    due_at: int | None
    code: str
    sentence: str


@dataclass(frozen=True)
class _Cause:
    """The raised alarms of the champion as one cause."""

    kind: Literal["drift", "quality"]
    alarms: tuple[Alarm, ...]
    evidence: tuple[str, ...]
    strength: float
    fingerprint: str
    digest: str
    words: str


def decide(facts: DecisionInput) -> Decision:
    """Decide about one pipeline, once. The same facts give the same decision."""
    return _about_open(facts, facts.open) if facts.open is not None else _about_new(facts)


def fingerprint_of(pipeline: str, moved: Sequence[Moved]) -> str:
    """The digest of what moved and which way: the same trouble again has the same fingerprint."""
    items: list[Json] = [[m.name, m.segment, m.direction] for m in sorted(set(moved), key=_order)]
    return digest_json({"pipeline": pipeline, "moved": items})


def cause_of(fingerprint: str, evidence: Sequence[str]) -> str:
    """The digest of a fingerprint and the reports that show it: the same cause is the same request."""
    return digest_json({"fingerprint": fingerprint, "evidence": sorted(set(evidence))})


def choose_as_of(as_ofs: Sequence[AsOf], champion: Champion, now: int) -> _Choice:
    """The newest `as_of` that can be trained and judged now, else the date at which the next one can.

    Only what lies after the champion's own and after every trained one counts: older data answer no new question.
    """
    floor = max([champion.as_of, *(a.key for a in as_ofs if a.trained)])
    newer = sorted((a for a in as_ofs if a.key > floor), key=lambda a: a.key)
    closed = [a for a in newer if a.closes_at <= now]
    whole = [a for a in closed if not a.missing]
    if whole:
        found = whole[-1]
        return _Choice(found.key, found.closes_at, "as_of", f"as_of {found.key} can be trained and judged")
    if closed:
        first = closed[-1]
        return _Choice(
            None, first.closes_at, "snapshots_missing", f"the months of as_of {first.key} are over, but {first.missing}"
        )
    if newer:
        first = newer[0]
        return _Choice(
            None,
            first.closes_at,
            "waiting_for_evaluation_window",
            f"the evaluation window of as_of {first.key} closes at {utc_text(first.closes_at)}",
        )
    return _Choice(None, None, "calendar_ended", f"the calendar has no as_of after {floor}")


def failures_in_a_row(past: Sequence[PastRequest]) -> int:
    """Requests since the last promotion whose run or candidate failed; what people rejected does not count."""
    return sum(p.state in ("kept_old", "failed") for p in _since_promotion(past))


def _since_promotion(past: Sequence[PastRequest]) -> list[PastRequest]:
    newest_first = sorted(past, key=lambda p: (p.at, p.request_id), reverse=True)
    states = [p.state for p in newest_first]
    return newest_first[: states.index("promoted")] if "promoted" in states else newest_first


def _about_new(facts: DecisionInput) -> Decision:
    champion = facts.champion
    if champion is None:
        rule = Rule("nothing_served", False, "no version serves, so there is nothing to replace: promote one")
        return _no(rule, (rule,), None)
    cause = _cause(facts, champion)
    choice = choose_as_of(facts.as_ofs, champion, facts.now)
    rules = (
        Rule("nothing_served", True, f"version {champion.version} serves, trained on data before {champion.as_of}"),
        _incident_rule(facts),
        _alarm_rule(facts, champion, cause),
        _fresh_rule(facts, cause),
        _labels_rule(facts),
        _gain_rule(facts),
        _threshold_rule(facts, cause),
        _known_rule(facts, cause),
        _cooldown_rule(facts),
        _budget_rule(facts),
        Rule("calendar_ended", choice.code != "calendar_ended", choice.sentence),
    )
    for rule in rules:
        if not rule.passed:
            return _no(rule, rules, cause)
    assert cause is not None
    return _request(facts, cause, choice, rules)


def _no(rule: Rule, rules: tuple[Rule, ...], cause: _Cause | None) -> Decision:
    fingerprint = "" if cause is None else cause.fingerprint
    return Decision("nothing", rule.code, rule.sentence, rules, fingerprint)


def _request(facts: DecisionInput, cause: _Cause, choice: _Choice, rules: tuple[Rule, ...]) -> Decision:
    failures = failures_in_a_row(facts.past)
    person = facts.policy.approval == "person"
    asks = failures >= facts.policy.max_failures
    last = (
        Rule(
            "too_many_failures",
            not asks,
            f"{counted(failures, 'request')} in a row did not lead to a better model; a person is asked after "
            f"{facts.policy.max_failures}",
        ),
        Rule("approval", not person, "a person has to approve" if person else "no approval is declared"),
        Rule(choice.code, choice.as_of is not None, choice.sentence),
    )
    state: FirstState = "ready" if choice.as_of is not None else "waiting_for_evaluation_window"
    if asks or person:
        state = "waiting_for_approval"
    held = next((rule for rule in last if not rule.passed), None)
    gain = facts.gain
    assert gain is not None
    sentence = (
        f"{cause.words}; an expected gain of {gain.auc:.4f} AUC ({gain.basis}) for {facts.cost.expected:.0f} "
        f"worker-seconds ({facts.cost.basis})" + ("" if held is None else f"; {held.sentence}")
    )
    return Decision(
        "ask_human" if asks else "request",
        cause.kind if held is None else held.code,
        sentence,
        (*rules, *last),
        cause.fingerprint,
        cause.digest,
        cause.kind,
        cause.evidence,
        state,
        choice.as_of,
        choice.due_at,
    )


def _about_open(facts: DecisionInput, request: OpenRequest) -> Decision:
    """What becomes of the open request. While there is one, no other is made (single flight)."""
    single = Rule("single_flight", False, f"request {request.request_id} is {request.state}: one at a time")
    if request.state == "running":
        return _held(
            "follow", Rule("running", True, f"request {request.request_id} trains as_of {request.as_of}"), facts
        )
    if request.state == "needs_human":
        return _held("wait", Rule("needs_human", False, f"request {request.request_id} waits for a person"), facts)
    champion = facts.champion
    if champion is None or champion.version != request.model_version:
        now = "nothing" if champion is None else f"version {champion.version}"
        return _held(
            "expire",
            Rule("champion_changed", False, f"the request is about version {request.model_version}, {now} serves"),
            facts,
        )
    incident = _incident_rule(facts)
    if not incident.passed:
        return _held("wait", incident, facts, single)
    if request.state == "waiting_for_approval":
        told = f"request {request.request_id}: headway retrain approve {request.request_id[:8]}"
        return _held("wait", Rule("waiting_for_approval", False, f"a person decides about {told}"), facts, single)
    if request.state == "ready":
        return _held("launch", Rule("ready", True, f"as_of {request.as_of} is to be trained"), facts, single)
    choice = choose_as_of(facts.as_ofs, champion, facts.now)
    if choice.code == "calendar_ended":
        return _held("expire", Rule(choice.code, False, choice.sentence), facts, single)
    found = Rule(choice.code, choice.as_of is not None, choice.sentence)
    action: Action = "wait" if choice.as_of is None else "start"
    return _held(action, found, facts, single, as_of=choice.as_of, due_at=choice.due_at)


def _held(
    action: Action,
    rule: Rule,
    facts: DecisionInput,
    *before: Rule,
    as_of: str | None = None,
    due_at: int | None = None,
) -> Decision:
    request = facts.open
    assert request is not None
    return Decision(
        action,
        rule.code,
        rule.sentence,
        (*before, rule),
        request.fingerprint,
        request.cause_digest,
        as_of=as_of,
        due_at=due_at,
    )


def _cause(facts: DecisionInput, champion: Champion) -> _Cause | None:
    raised = tuple(a for a in facts.alarms if a.state == "raised" and a.model_version == champion.version)
    if not raised:
        return None
    evidence = tuple(sorted({report for alarm in raised for report in alarm.evidence}))
    fingerprint = fingerprint_of(facts.pipeline, [m for alarm in raised for m in alarm.moved])
    kind: Literal["drift", "quality"] = "quality" if any(a.kind == "quality" for a in raised) else "drift"
    words = " and ".join(f"{a.kind} in {counted(len(a.weeks), 'week')} ({_named(a.moved)})" for a in raised)
    return _Cause(
        kind,
        raised,
        evidence,
        max(a.strength for a in raised),
        fingerprint,
        cause_of(fingerprint, evidence),
        words,
    )


def _named(moved: Sequence[Moved]) -> str:
    shown = [f"{m.name}{f' of {m.segment}' if m.segment else ''} {m.direction}" for m in moved[:4]]
    return ", ".join(shown) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")


def _order(moved: Moved) -> tuple[str, str, str]:
    return moved.name, moved.segment, moved.direction


def _incident_rule(facts: DecisionInput) -> Rule:
    found = facts.incident
    if found is None:
        return Rule("data_incident", True, "no data incident in the newest week")
    return Rule("data_incident", False, f"the data of {found.week} are broken ({found.detail}): repair, not training")


def _alarm_rule(facts: DecisionInput, champion: Champion, cause: _Cause | None) -> Rule:
    if cause is not None:
        return Rule("no_alarm", True, cause.words)
    mine = [a for a in facts.alarms if a.model_version == champion.version]
    building = [a for a in mine if a.state == "building"]
    if building:
        weeks = " and ".join(f"{a.kind} in {counted(len(a.weeks), 'week')}" for a in building)
        return Rule("not_persistent", False, f"{weeks}: not in enough weeks yet")
    if any(a.state == "season" for a in mine):
        return Rule("season", False, "what moved is like the same season before, and a season is no drift")
    if any(a.state == "raised" for a in facts.alarms):
        others = sorted({a.model_version for a in facts.alarms if a.state == "raised"})
        return Rule(
            "reference_switched",
            False,
            f"the alarm is of version {', '.join(map(str, others))}; version {champion.version} serves now and is "
            "measured against its own reference",
        )
    return Rule("no_alarm", False, "neither drift nor a loss of quality")


def _fresh_rule(facts: DecisionInput, cause: _Cause | None) -> Rule:
    if cause is None:
        return Rule("stale_evidence", True, "there is no alarm whose age matters")
    until = max(a.until for a in cause.alarms)
    stale = facts.now - until > facts.stale_after
    return Rule("stale_evidence", not stale, f"the newest week of the evidence ended at {utc_text(until)}")


def _labels_rule(facts: DecisionInput) -> Rule:
    wanted = facts.policy.minimum_labels
    said = f"{facts.labels:,} mature labels since the model's data ended, {wanted:,} are asked for"
    return Rule("too_few_labels", facts.labels >= wanted, said)


def _gain_rule(facts: DecisionInput) -> Rule:
    gain, wanted = facts.gain, facts.policy.minimum_gain
    if gain is None:
        return Rule("gain_unknown", False, "neither labels nor an estimate say what a new model would win")
    said = f"the expected gain is {gain.auc:.4f} AUC ({gain.basis}), {wanted:.4f} is asked for"
    return Rule("gain_too_small", gain.auc >= wanted, said)


def _threshold_rule(facts: DecisionInput, cause: _Cause | None) -> Rule:
    if cause is None:
        return Rule("threshold_doubled", True, "there is no alarm whose strength matters")
    before = [p for p in _since_promotion(facts.past) if p.state == "kept_old"]
    failed = min(sum(p.fingerprint == cause.fingerprint for p in before), _MOST_DOUBLINGS)
    said = f"{cause.strength:.2f} times the threshold; {2**failed} times is asked for"
    after = f" after {counted(failed, 'failed candidate')} for the same" if failed else ""
    return Rule("threshold_doubled", failed == 0 or cause.strength >= 2**failed, said + after)


def _known_rule(facts: DecisionInput, cause: _Cause | None) -> Rule:
    known = None if cause is None else next((p for p in facts.past if p.cause_digest == cause.digest), None)
    if known is None:
        return Rule("already_decided", True, "no request has had this cause")
    return Rule("already_decided", False, f"request {known.request_id} had this very cause, and was {known.state}")


def _cooldown_rule(facts: DecisionInput) -> Rule:
    if not facts.past:
        return Rule("cooldown", True, "there was no request before")
    failures = min(failures_in_a_row(facts.past), _MOST_DOUBLINGS)
    wait = max(duration_us(facts.policy.cooldown), facts.maturity) << failures
    over = max(p.at for p in facts.past) + wait
    after = f", doubled by {counted(failures, 'failure')} in a row" if failures else ""
    verb = "was over" if over <= facts.now else "lasts until"
    return Rule("cooldown", over <= facts.now, f"the wait after the last request {verb} {utc_text(over)}{after}")


def _budget_rule(facts: DecisionInput) -> Rule:
    money, wanted = facts.money, facts.cost.reserve
    said = f"{wanted:,} of {money.available:,} worker-seconds left of {money.period}'s {money.limit:,} are needed"
    return Rule("budget", wanted <= money.available, said)


def rules_document(decision: Decision) -> list[Mapping[str, Json]]:
    """The rules as JSON, in order."""
    return [{"rule": r.code, "passed": r.passed, "why": r.sentence} for r in decision.rules]
