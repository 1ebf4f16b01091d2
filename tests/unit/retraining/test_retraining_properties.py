"""Random years of weekly evidence: how often a pipeline retrains is bounded, whatever the weeks say."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.retrain_cases import ALARM, DAY, NOW, facts

from headway.declaration import RetrainingSpec
from headway.monitoring.retraining import (
    AsOf,
    Champion,
    Decision,
    Gain,
    Incident,
    Money,
    Moved,
    OpenRequest,
    PastRequest,
    decide,
)

COOLDOWN, RESERVE, MONTH = 14, 600, 1800
POLICY = RetrainingSpec(minimum_labels=1000, cooldown=f"{COOLDOWN}d", max_failures=3)
AS_OFS = tuple(AsOf(f"2024-{m:02d}-01", NOW + (30 * m - 60) * DAY, trained=False) for m in range(1, 13))
WEEK = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["raised", "raised", "building", "clear"]),
        "moved": st.sampled_from(["a", "b", "c"]),
        "strength": st.sampled_from([1.0, 2.0, 5.0]),
        "incident": st.booleans() | st.just(False),
        "labels": st.sampled_from([0, 999, 1000, 5000]),
        "gain": st.sampled_from([0.0, 0.01]),
        "ending": st.sampled_from(["promoted", "kept_old", "failed"]),
        "lasts": st.integers(0, 2),
        "approves": st.booleans(),
    }
)


@dataclass
class World:
    """One pipeline over time: what a driver does with the decisions, and nothing else."""

    version: int = 1
    as_of: str = "2024-01-01"
    open: OpenRequest | None = None
    began: int = 0
    made: dict[str, int] = field(default_factory=dict[str, int])
    past: list[PastRequest] = field(default_factory=list[PastRequest])
    trained: set[str] = field(default_factory=set[str])
    asked: list[int] = field(default_factory=list[int])
    launched: list[int] = field(default_factory=list[int])
    failures: int = 0

    def available(self, now: int) -> int:
        """What the month's budget still holds: each request of the month holds or has used what it reserved."""
        month = now // (30 * DAY)
        return MONTH - RESERVE * sum(1 for at in self.made.values() if at // (30 * DAY) == month)

    def decide(self, now: int, week: dict[str, Any]) -> Decision:
        """The decision on this week's facts."""
        alarm = replace(
            ALARM,
            model_version=self.version,
            state=week["state"],
            moved=(Moved(week["moved"]),),
            strength=week["strength"],
            evidence=(f"report-{now}",),
            until=now - DAY,
        )
        return decide(
            facts(
                now=now,
                policy=POLICY,
                champion=Champion(self.version, self.as_of),
                alarms=(alarm,),
                incident=Incident("w", "r", "nulls") if week["incident"] else None,
                labels=week["labels"],
                gain=Gain(week["gain"], "realised"),
                money=Money("b", "p", MONTH, self.available(now)),
                open=self.open,
                past=tuple(self.past),
                as_ofs=tuple(replace(a, trained=a.key in self.trained) for a in AS_OFS),
            )
        )

    def act(self, now: int, week: dict[str, Any], decision: Decision) -> None:
        """What the driver does."""
        match decision.action:
            case "request" | "ask_human":
                assert self.open is None
                self.asked.append(now)
                name = f"request-{len(self.asked)}"
                self.made[name] = now
                self.open = OpenRequest(
                    name,
                    decision.state,
                    self.version,
                    decision.fingerprint,
                    decision.cause_digest,
                    decision.as_of,
                    decision.due_at,
                )
            case "start":
                assert self.open is not None
                self.open = replace(self.open, state="ready", as_of=decision.as_of, due_at=decision.due_at)
            case "launch":
                assert self.open is not None
                self.open, self.began = replace(self.open, state="running"), now
                self.launched.append(now)
            case "follow" if now - self.began >= week["lasts"] * 7 * DAY:
                self._end(week["ending"])
            case "expire":
                self._close("expired")
            case "wait" if decision.reason == "waiting_for_approval":
                assert self.open is not None
                state = "ready" if self.open.as_of else "waiting_for_evaluation_window"
                self.open = replace(self.open, state=state) if week["approves"] else self._close("rejected")
            case _:
                pass

    def _end(self, ending: str) -> None:
        assert self.open is not None
        assert self.open.as_of is not None
        if ending != "failed":
            self.trained.add(self.open.as_of)
        if ending == "promoted":
            self.version, self.as_of = self.version + 1, self.open.as_of
        self.failures = 0 if ending == "promoted" else self.failures + 1
        self._close(ending)

    def _close(self, state: Any) -> None:  # noqa: ANN401
        assert self.open is not None
        request, self.open = self.open, None
        at = max(self.made[request.request_id], request.due_at or 0)
        self.past.append(
            PastRequest(request.request_id, request.cause_digest, request.fingerprint, state, at),
        )


@settings(max_examples=150, deadline=None)
@given(st.lists(WEEK, min_size=10, max_size=50))
def test_retraining_is_bounded_whatever_the_weeks_say(weeks: list[dict[str, Any]]) -> None:
    world = World()
    for number, week in enumerate(weeks):
        now = NOW + number * 7 * DAY
        for _ in range(3):
            decision = world.decide(now, week)
            if week["incident"]:
                assert decision.action not in ("request", "ask_human", "launch", "start")
            if decision.action == "request":
                assert world.failures < POLICY.max_failures
                assert week["labels"] >= POLICY.minimum_labels
            world.act(now, week, decision)
            assert world.available(now) >= 0
    gaps = [later - earlier for earlier, later in zip(world.asked, world.asked[1:], strict=False)]
    assert all(gap >= COOLDOWN * DAY for gap in gaps)
    assert len(world.launched) <= len(world.asked)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["up", "down"])), min_size=30, max_size=30))
@settings(max_examples=50, deadline=None)
def test_t4_thirty_days_of_oscillation_stay_within_the_cooldown(days: list[tuple[str, Any]]) -> None:
    world = World()
    week = {"state": "raised", "incident": False, "labels": 5000, "gain": 0.05, "lasts": 0, "approves": True}
    for day, (name, direction) in enumerate(days):
        now = NOW + day * DAY
        shown = {**week, "moved": f"{name} {direction}", "strength": 3.0, "ending": "promoted"}
        for _ in range(3):
            world.act(now, shown, world.decide(now, shown))
    assert 1 <= len(world.launched) <= 1 + 30 // COOLDOWN
