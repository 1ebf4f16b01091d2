"""Facts of a retraining decision in which every rule says yes, for tests to change one by one."""

from dataclasses import replace
from typing import Any

from headway.declaration import RetrainingSpec
from headway.monitoring.retraining import (
    Alarm,
    AsOf,
    Champion,
    Cost,
    DecisionInput,
    Gain,
    Money,
    Moved,
    OpenRequest,
    PastRequest,
    cause_of,
    fingerprint_of,
)

DAY = 86_400_000_000
NOW = 20_000 * DAY
MOVED = (Moved("temperature", "", "up"), Moved("delay", "origin=EWR", "down"))
EVIDENCE = ("report-1", "report-2")
ALARM = Alarm("drift", 3, "raised", ("w1", "w2"), EVIDENCE, MOVED, 1.5, NOW - 2 * DAY)
FINGERPRINT = fingerprint_of("shop", MOVED)
CAUSE = cause_of(FINGERPRINT, EVIDENCE)
POLICY = RetrainingSpec(minimum_labels=1000, minimum_gain=0.002, cooldown="14d", max_failures=3)
AS_OFS = (
    AsOf("2024-02-01", NOW - 70 * DAY, trained=True),
    AsOf("2024-03-01", NOW - 40 * DAY, trained=False),
    AsOf("2024-04-01", NOW - 10 * DAY, trained=False),
    AsOf("2024-05-01", NOW + 20 * DAY, trained=False),
)


def facts(**changed: Any) -> DecisionInput:  # noqa: ANN401 - any field
    """Facts that lead to a request for 2024-04-01, with what is `changed`."""
    base = DecisionInput(
        pipeline="shop",
        now=NOW,
        policy=POLICY,
        maturity=3 * DAY,
        stale_after=28 * DAY,
        champion=Champion(3, "2024-02-01"),
        alarms=(ALARM,),
        incident=None,
        labels=1000,
        gain=Gain(0.02, "realised"),
        cost=Cost(240.0, "the median of 3 runs", 600),
        money=Money("shop/retraining", "2024-10", 3600, 600),
        open=None,
        past=(),
        as_ofs=AS_OFS,
    )
    return replace(base, **changed)


def opened(state: Any, **changed: Any) -> OpenRequest:  # noqa: ANN401 - any field
    """An open request about the champion of `facts`."""
    base = OpenRequest("a" * 24, state, 3, FINGERPRINT, CAUSE, None, None)
    return replace(base, **changed)


def closed(state: Any, days_ago: float, fingerprint: str = FINGERPRINT, cause: str = "another") -> PastRequest:  # noqa: ANN401
    """A closed request of some days ago."""
    return PastRequest(f"{state}-{days_ago}", cause, fingerprint, state, NOW - int(days_ago * DAY))
