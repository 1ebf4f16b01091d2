"""Persistence and hysteresis: one moved week is no drift of the world, and one calm week does not end it.

An alarm is raised when k of the last n judged weeks have drift. Raised, it is cleared only when fewer than k of them
are above 70 % of the raise level, so that a value that trembles around the level does not ring the bell every week.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headway.monitoring.drift import DriftPolicy, WindowVerdict

CLEAR_AT = 0.7
State: TypeAlias = Literal["raised", "clear", "building"]


@dataclass(frozen=True)
class WeekSummary:
    """What persistence looks at: a week's verdict and its strongest effect as a multiple of the raise level.

    `level` 1.0 is the level at which an effect counts; it is None where nothing could be measured.
    """

    verdict: str
    level: float | None


@dataclass(frozen=True)
class Persistence:
    """`raised`: drift persists. `building`: some weeks have drift, not enough. `weeks`: those that count, ascending."""

    state: State
    weeks: tuple[str, ...]


def summary(verdict: WindowVerdict) -> WeekSummary:
    """The part of a verdict that persistence needs."""
    return WeekSummary(verdict.verdict, verdict.level)


def persistent(verdicts: Mapping[str, WeekSummary], policy: DriftPolicy) -> Persistence:
    """Whether drift persists at the newest of the weeks.

    Weeks without a judgement (`too_few`, `data_incident`) count neither for nor against it. All weeks must be of one
    model version: another version has another reference, and starts anew.

    Args:
        verdicts: by week key; order does not matter.
        policy: `weeks` of the last `of` judged ones.
    """
    judged = [week for week in sorted(verdicts) if verdicts[week].verdict in ("none", "drift", "season")]
    raised = False
    counting: Sequence[str] = ()
    for place in range(len(judged)):
        window = judged[max(0, place + 1 - policy.of) : place + 1]
        counting = [week for week in window if _counts(verdicts[week], raised)]
        raised = len(counting) >= policy.weeks
    if raised:
        return Persistence("raised", tuple(counting))
    return Persistence("building" if counting else "clear", tuple(counting))


def _counts(week: WeekSummary, raised: bool) -> bool:
    if week.verdict == "drift":
        return True
    return raised and week.verdict == "none" and week.level is not None and week.level >= CLEAR_AT
