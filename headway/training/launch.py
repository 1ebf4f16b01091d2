"""What every launcher of training attempts offers, and what it says about one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from headway.errors import HeadwayError
from headway.training.attempt import Accelerator
from trainer.events import Event
from trainer.spec import AttemptSpec, RunSpec

State = Literal["absent", "starting", "running", "ended"]

SUPERVISOR_LOST = "supervisor lost"


class LaunchError(HeadwayError):
    """Base of what launchers refuse."""


class LaunchRefused(LaunchError):
    """An attempt that must not be started: it contradicts what stands there, or a later one exists."""


class AttemptRefused(LaunchRefused):
    """An attempt that the place where attempts run will never take as it is: its run ends with it."""


class LaunchFailed(LaunchError):
    """Starting the attempt's processes failed."""


class FactsUnreadable(LaunchError):
    """A file that tells of an attempt is torn, of another shape, or cannot be read."""


class KillFailed(LaunchError):
    """Processes of the attempt are still there after SIGKILL."""


class LauncherUnavailable(LaunchError):
    """The place where attempts run cannot be reached, or answers with a fault of its own: nothing follows from that."""


@dataclass(frozen=True)
class Waiting:
    """Why an attempt that was submitted does not run yet: a code of `reasons.WAITING`, and the place's own words."""

    code: str
    message: str


Stray: TypeAlias = tuple[str, int, int | str]
"""Run, attempt, and something of it that exists: a process's pid, or an object of a cluster in words."""


@dataclass(frozen=True)
class Observation:
    """What was seen of one attempt.

    `absent`: nothing was started (submitting again is right; with `supervisor_alive` it goes on with what is there).
    `ended` without a `code`: who kept watch was lost, and with it how the attempt ended. `code` and `exit_codes` are
    those of `trainer.spec.ExitCode`, a node that was killed has its negative signal, one that never started None.
    `ended_at` is microseconds UTC. `supervisor_stuck`: who keeps watch lives and does nothing (it was stopped, or
    hangs), so that the attempt never ends by itself: kill it.
    `reason_code` of an end is a code of `reasons.ENDED`, "" where the exit code says it all.
    """

    state: State
    code: int | None = None
    cause: str = ""
    exit_codes: tuple[int | None, ...] = ()
    cancelled: bool = False
    worker_seconds: float = 0.0
    ended_at: int | None = None
    supervisor_alive: bool = False
    supervisor_stuck: bool = False
    reason_code: str = ""
    waiting: Waiting | None = None


class Launcher(Protocol):
    """Starts, watches and ends attempts; every method may be called again, by any process, at any time."""

    name: str

    @property
    def accelerator(self) -> Accelerator:
        """What the ranks compute on."""
        ...

    def submit(self, attempt: AttemptSpec, spec: RunSpec) -> None:
        """Start the attempt, unless it was started before.

        Every method may raise `LauncherUnavailable` where attempts run elsewhere.

        Raises:
            LaunchRefused: other content stands under the same name, or a later attempt exists.
            AttemptRefused: the same would be refused again.
            LaunchFailed: the processes could not be started.
        """
        ...

    def observe(self, run_id: str, attempt: int) -> Observation:
        """Say what is known of the attempt now.

        Raises:
            FactsUnreadable: what the attempt left about itself cannot be read.
        """
        ...

    def stream(self, run_id: str, attempt: int, node: int, after: int, limit: int) -> list[Event]:
        """Return up to `limit` events of a node's stream that follow seq `after`.

        Raises:
            StreamBroken: the stream lost events.
        """
        ...

    def cancel(self, run_id: str, attempt: int, reason: str) -> None:
        """Ask the attempt to save and end. Only observing tells when it did."""
        ...

    def kill(self, run_id: str, attempt: int) -> None:
        """End every process of the attempt by SIGKILL, and return when none is left.

        Raises:
            KillFailed: some are still there.
        """
        ...

    def capacity(self) -> int | None:
        """Return how many nodes an attempt can have now, None where only its scheduler knows."""
        ...

    def release(self, run_id: str, attempt: int) -> None:
        """Give back what an attempt still holds whose end is recorded: objects of a cluster that were its evidence."""
        ...

    def strays(self) -> Sequence[Stray]:
        """Return every living process, and every object elsewhere, that belongs to an attempt of this home."""
        ...

    def run_dir(self, run_id: str) -> Path:
        """Return the run's directory."""
        ...

    def artifact_dir(self, run_id: str, attempt: int, name: str) -> Path:
        """Return where the attempt leaves its artifact `name`."""
        ...

    def close(self) -> None:
        """Stop looking; attempts go on."""
        ...
