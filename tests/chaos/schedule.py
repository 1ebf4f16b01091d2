"""What is done and what is broken: a pure function of a seed and a number of steps."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["materialize", "backfill", "train", "promote", "predict", "label"]
Victim: TypeAlias = Literal["webserver", "daemon", "worker", "supervisor", "rank", "server", "postgres"]
How: TypeAlias = Literal["kill", "stop", "disk_full", "clock_jump"]

# What runs anyway when a victim is there to be hit.
SUITS: Mapping[Victim, tuple[Operation, ...]] = {
    "webserver": ("materialize", "backfill"),
    "daemon": ("backfill", "materialize"),
    "worker": ("materialize", "train"),
    "supervisor": ("train",),
    "rank": ("train",),
    "server": ("predict", "label"),
    "postgres": ("promote", "label", "train"),
}
# The last two: the server's log on a full disk, and the world's clock that its requests go by.
FAULTS: tuple[tuple[Victim, How], ...] = (
    ("webserver", "kill"),
    ("rank", "stop"),
    ("server", "kill"),
    ("worker", "stop"),
    ("postgres", "kill"),
    ("daemon", "stop"),
    ("supervisor", "kill"),
    ("server", "stop"),
    ("worker", "kill"),
    ("webserver", "stop"),
    ("rank", "kill"),
    ("postgres", "stop"),
    ("daemon", "kill"),
    ("supervisor", "stop"),
    ("server", "disk_full"),
    ("server", "clock_jump"),
)


@dataclass(frozen=True)
class Fault:
    """One blow: whom, how, how long after the victim was seen, and how long it lasts (seconds)."""

    victim: Victim
    how: How
    after_s: float
    lasts_s: float


@dataclass(frozen=True)
class Step:
    """One command and the blow that meets it. `number` makes what the command asks for differ from step to step."""

    number: int
    operation: Operation
    fault: Fault

    def line(self) -> str:
        """The step in one line."""
        fault = self.fault
        return (
            f"{self.number:3d} {self.operation:<11} {fault.how} {fault.victim} "
            f"{fault.after_s:.2f} s after it was seen, for {fault.lasts_s:.1f} s"
        )


def schedule(seed: int, steps: int) -> list[Step]:
    """The steps of a seed.

    Faults are dealt from one deck, where a seed goes on where the seed before it ended: neighbouring seeds meet every
    fault between them, however few steps each has. Order, command and moments are drawn.
    """
    moments = random.Random(f"headway chaos {seed}")
    dealt = [FAULTS[(seed * steps + place) % len(FAULTS)] for place in range(steps)]
    moments.shuffle(dealt)
    return list(_steps(dealt, moments))


def _steps(dealt: list[tuple[Victim, How]], moments: random.Random) -> Iterator[Step]:
    for number, (victim, how) in enumerate(dealt, start=1):
        after = round(moments.uniform(0.0, 1.5), 2)
        lasts = round(moments.uniform(0.5, 4.0), 1)
        yield Step(number, moments.choice(SUITS[victim]), Fault(victim, how, after, lasts))
