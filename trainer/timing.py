"""Where the time of a step goes, on each rank: parts that add up to the step's wall time, and who waits for whom.

A `StepClock` stands in exactly one part at any moment; entering a part leaves the one before until it ends, so an inner
part is never counted twice and whatever nobody claims is `other`. `communication` is exposed communication: time in
which the training's thread stands still until a collective has ended, be the network slow or another rank late. What
runs beside the computation is not in it.

torch tells nobody about such waits. Those that Python makes all pass through `Work.wait` and, for DTensor, through
`wait_tensor`: `timed_waits` puts the clock around both for as long as the training runs. DDP waits inside autograd's
engine, after the last gradient; `mark_end_of_backward` marks that moment by a callback which the engine runs before
DDP's own.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal[
    "data", "forward", "backward", "optimizer", "communication", "checkpoint", "validation", "profile", "other"
]
"""What a moment of a training is counted as; `profile` is what writing a trace costs."""

PARTS: tuple[Part, ...] = get_args(Part)

_NS = 1e-9


@dataclass(frozen=True)
class Split:
    """The parts of `steps` steps, in nanoseconds; their sum is the wall time from the first to the end of the last."""

    steps: int
    ns: Mapping[Part, int]

    @property
    def wall_s(self) -> float:
        """Seconds of all steps together."""
        return sum(self.ns.values()) * _NS

    @property
    def busy_s(self) -> float:
        """Seconds in which this rank did not wait for others: the rank with most of them holds the others up."""
        return (sum(self.ns.values()) - self.ns.get("communication", 0)) * _NS

    def per_step(self) -> dict[str, float]:
        """Mean seconds per step by part, in the order of `PARTS`, those without any left out."""
        return {part: self.ns[part] * _NS / max(self.steps, 1) for part in PARTS if self.ns.get(part)}


class StepClock:
    """Splits the time of one thread, the one that makes it, into parts.

    Args:
        now: Nanoseconds from any origin; never goes back.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._spent: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self._part: Part = "other"
        self._since = now()
        self._steps = 0

    def enter(self, part: Part) -> Part:
        """Count time as `part` from now on; returns what it was counted as until now."""
        now, before = self._now(), self._part
        self._spent[before] += now - self._since
        self._since, self._part = now, part
        return before

    def part(self, part: Part) -> _Within:
        """Count the time inside of the `with` block as `part`, and as before after it."""
        return _Within(self, part)

    def step_done(self) -> None:
        """Say that one more step has ended."""
        self._steps += 1

    def take(self) -> Split:
        """What has passed since the last `take`, or since the clock was made; a new count begins."""
        self.enter(self._part)
        split = Split(self._steps, self._spent)
        self._spent, self._steps = dict.fromkeys(PARTS, 0), 0
        return split

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is the one that is measured."""
        return threading.get_ident() == self._thread


class _Within:
    """See `StepClock.part`; a class, because a generator costs thrice as much."""

    __slots__ = ("_before", "_clock", "_part")

    def __init__(self, clock: StepClock, part: Part) -> None:
        self._clock = clock
        self._part: Part = part
        self._before: Part = part

    def __enter__(self) -> None:
        self._before = self._clock.enter(self._part)

    def __exit__(self, *_: object) -> None:
        self._clock.enter(self._before)


@contextmanager
def timed_waits(clock: StepClock) -> Iterator[None]:
    """Count as `communication` what the clock's thread waits for collectives, while the block runs."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed import Work

    wait: Any = Work.wait
    wait_tensor: Any = functional.wait_tensor

    def timed(original: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's own signatures
        def waiting(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            if not clock.is_of_this_thread:
                return original(*args, **kwargs)
            with clock.part("communication"):
                return original(*args, **kwargs)

        return waiting

    Work.wait = timed(wait)
    functional.wait_tensor = timed(wait_tensor)
    try:
        yield
    finally:
        Work.wait = wait
        functional.wait_tensor = wait_tensor


def mark_end_of_backward(clock: StepClock, loss: Tensor) -> None:
    """Count as `communication` what the backward pass of `loss` does once the last gradient is there.

    To be called before each backward pass, whose part is to be entered around it: that ends this one too.
    """
    import torch

    def all_gradients_are_there() -> None:
        clock.enter("communication")

    def queue(_: Tensor) -> None:
        # Callbacks run in the order in which they were queued; DDP's is queued with the last gradient.
        torch.autograd.Variable._execution_engine.queue_callback(all_gradients_are_there)

    loss.register_hook(queue)


def peak_memory() -> int:
    """The most memory in bytes that this process has held resident (`ru_maxrss`, which Linux gives in kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
