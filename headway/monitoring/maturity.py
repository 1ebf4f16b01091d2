"""When labels come, and when enough of them are there to speak of quality.

The delay of a label is the time from the asking of the prediction to the label's arrival. Predictions without a label
yet are right-censored: they have waited so long and no longer is known. Kaplan and Meier's estimator (1958) takes both
into account, so that a young week does not make delays look short.

A cohort is mature when it holds the declared share of the labels expected of it. Expected is what the answers of the
weeks before led to: their estimated share of labels that come within the declared time, because some outcomes never
come (a cancelled flight has no delay). Without such a history every answer is expected to get its label. A cohort that
is not mature has no quality number at all: early labels are not a fair sample of late ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.reference import Floats, Ints

HISTORY_WEEKS = 8
HISTORY_ANSWERS = 200
State: TypeAlias = Literal["mature", "immature"]


@dataclass(frozen=True)
class DelayCurve:
    """Share of answers whose label has come by a delay: steps at `delays` (microseconds) up to `shares`."""

    delays: Ints
    shares: Floats

    def by(self, delay: int) -> float:
        """The share that has come by a delay."""
        place = int(np.searchsorted(self.delays, delay, side="right"))
        return float(self.shares[place - 1]) if place else 0.0

    def quantile(self, share: float) -> int | None:
        """The delay by which this share of all answers has its label; None when it is never reached."""
        place = int(np.searchsorted(self.shares, share - 1e-12, side="left"))
        return int(self.delays[place]) if place < len(self.shares) else None


@dataclass(frozen=True)
class Answered:
    """Answers and what came back; arrays are [n]. `received_at` counts where `labelled`; times in microseconds UTC."""

    asked_at: Ints
    labelled: NDArray[np.bool_]
    received_at: Ints

    def __len__(self) -> int:
        return len(self.asked_at)

    def take(self, rows: NDArray[np.bool_]) -> Answered:
        """Some of them."""
        return Answered(self.asked_at[rows], self.labelled[rows], self.received_at[rows])


@dataclass(frozen=True)
class Cohort:
    """How complete the labels of some answers are. `share` is labelled / expected, at most 1; None without answers."""

    answers: int
    labelled: int
    expected: float
    share: float | None
    state: State
    reason: str


def kaplan_meier(delays: Ints, came: NDArray[np.bool_]) -> DelayCurve:
    """The share of labels that have come by each delay, from some that came and some that are still awaited.

    Args:
        delays: until the label came, or how long it has been awaited so far.
        came: whether it came.
    """
    if (delays < 0).any():
        raise ValueError(f"a delay of {int(delays.min())} microseconds is before its prediction")
    times, back = np.unique(delays, return_inverse=True)
    events = np.bincount(back, came, len(times)).astype(np.float64)
    leaving = np.bincount(back, minlength=len(times)).astype(np.float64)
    waiting = leaving[::-1].cumsum()[::-1]
    survival = np.cumprod(1 - events / waiting)
    kept = events > 0
    return DelayCurve(times[kept], np.asarray(1 - survival[kept], np.float64))


def delay_curve(answered: Answered, now: int) -> DelayCurve:
    """The delays of labels as known at `now`; a label that came before its prediction was asked has no delay."""
    came = answered.labelled & (answered.received_at <= now)
    delays = np.where(came, answered.received_at, now) - answered.asked_at
    return kaplan_meier(np.maximum(delays, 0), came)


def expected_share(history: Answered, now: int, expected_within: int) -> float:
    """The share of answers that get a label in time, from earlier ones; 1 while too few of them are due.

    Args:
        history: answers before the cohort.
        now: world time.
        expected_within: declared time by which a label is due, microseconds.
    """
    due = history.asked_at + expected_within <= now
    if int(due.sum()) < HISTORY_ANSWERS:
        return 1.0
    share = delay_curve(history, now).by(expected_within)
    return share if share > 0 else 1.0


def cohort_of(answered: Answered, now: int, share: float, wanted: float) -> Cohort:
    """Whether a cohort may be judged.

    Args:
        answered: the answers.
        now: world time; labels that came later do not count.
        share: share of answers of which a label is expected.
        wanted: declared share of expected labels that makes it mature.
    """
    answers = len(answered)
    labelled = int((answered.labelled & (answered.received_at <= now)).sum())
    expected = answers * share
    if not answers:
        return Cohort(0, 0, 0.0, None, "immature", "no_answers")
    found = min(labelled / expected, 1.0)
    if not labelled:
        return Cohort(answers, 0, expected, found, "immature", "no_labels")
    if found < wanted:
        return Cohort(answers, labelled, expected, found, "immature", "labels_missing")
    return Cohort(answers, labelled, expected, found, "mature", "")


def completeness_by_age(answered: Answered, now: int, ages: Mapping[str, int]) -> dict[str, float | None]:
    """Share of answers with a label within each age, among those that are at least so old; None without such."""
    found: dict[str, float | None] = {}
    for name, age in ages.items():
        old = answered.asked_at + age <= now
        came = answered.labelled & (answered.received_at - answered.asked_at <= age)
        found[name] = float(came[old].mean()) if old.any() else None
    return found
