"""The world's clock: when requests are asked, labels come and weeks end.

It is the machine's clock unless the home holds `clock.json`, which a replay of recorded data writes and moves. The
catalog's own times (commits, audit, leases, validity of keys) never follow it.
"""

import json
import os
from datetime import datetime
from pathlib import Path

from headway.catalog.clock import Clock, system_clock, utc_text
from headway.errors import HeadwayError

FORMAT = "headway.clock/1"
SETTLED_US = 1_000_000


class ClockUnusable(HeadwayError):
    """The file that holds the world's clock is not as Headway writes it."""


class ClockMovesBack(HeadwayError):
    """A replay's clock moves forward only: what was answered and decided at a time cannot be unsaid."""


def world_clock(file: Path) -> Clock:
    """A clock that looks at `file` at every call, and answers the machine's time while there is none.

    The file is replaced as a whole when the clock moves, so it is read again only when it is another one. One that was
    written a moment ago is always read: times of files are coarse, and a file's number is used again.

    Raises, when called:
        ClockUnusable: the file has another form.
    """
    read: tuple[tuple[int, ...], int | None] = ((), None)

    def now() -> int:
        nonlocal read
        try:
            found = file.stat()
        except OSError:
            held = replayed_time(file)
            return system_clock() if held is None else held
        mark = (found.st_ino, found.st_mtime_ns, found.st_size, found.st_dev)
        if read[0] != mark:
            settled = system_clock() - found.st_mtime_ns // 1_000 > SETTLED_US
            read = (mark if settled else (), replayed_time(file))
        return system_clock() if read[1] is None else read[1]

    return now


def replayed_time(file: Path) -> int | None:
    """The time that a replay's clock holds (microseconds UTC), None without a replay. Raises `ClockUnusable`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        # A home that is no folder holds no clock; whoever opens it says so.
        return None
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(document["format"])
        moment = datetime.fromisoformat(document["now"])
        if moment.tzinfo is None:
            raise ValueError(document["now"])
    except (ValueError, KeyError, TypeError) as error:
        raise ClockUnusable(
            f"{file} holds no clock: {error!r:.200}", "remove it to go by the machine's clock, or replay again"
        ) from error
    return round(moment.timestamp() * 1_000_000)


def clock_in_force(file: Path) -> str:
    """What the world's time is and by which clock, for people. Raises `ClockUnusable`."""
    held = replayed_time(file)
    if held is None:
        return f"it is {utc_text(system_clock())} by the machine's clock"
    return f"it is {utc_text(held)} by a replay's clock ({file})"


def move_clock(file: Path, to: int) -> None:
    """Set the replay's clock to a time (microseconds UTC), in one step.

    Raises:
        ClockMovesBack: it stands later already.
        ClockUnusable: the file has another form.
    """
    held = replayed_time(file)
    if held is not None and to < held:
        raise ClockMovesBack(
            f"the clock stands at {utc_text(held)}, and {utc_text(to)} is before that",
            f"go on from there, or start a replay in another home (HEADWAY_HOME); {file} is the clock",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.new")
    unfinished.write_text(json.dumps({"format": FORMAT, "now": utc_text(to)}) + "\n", encoding="utf-8")
    unfinished.replace(file)
