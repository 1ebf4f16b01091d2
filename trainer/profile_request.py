"""What asks for a trace of chosen steps, see `trainer.profiling`. Standard library only: the platform writes it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.blobs import canonical_json

PROFILE_FILE = "profile.json"
MOST_STEPS = 200
_TEXT = re.compile(r"(?:steps=)?([1-9][0-9]{0,8}):([1-9][0-9]{0,8})")


class ProfileRefused(ValueError):
    """A request for a trace that means nothing; the message says what it may be."""


@dataclass(frozen=True)
class Wanted:
    """Steps to trace, from `first` to `last`, both taken, counted from 1."""

    first: int
    last: int

    def to_json(self) -> bytes:
        """What `profile.json` holds."""
        return canonical_json({"steps": [self.first, self.last]})


def parse_profile(text: str) -> Wanted:
    """The steps that `steps=10:15` (or `10:15`) asks for.

    Raises:
        ProfileRefused: it is no such text, ends before it begins, or asks for more than `MOST_STEPS`.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ProfileRefused(f"{text!r:.80} is no range of steps from 1; write steps=10:15")
    return _checked(int(found[1]), int(found[2]), text)


def read_profile(run_dir: Path) -> Wanted | None:
    """What the file in the run's directory asks for; None when there is none.

    Raises:
        ProfileRefused: it is no such request.
    """
    try:
        raw: Any = json.loads((run_dir / PROFILE_FILE).read_bytes())
        first, last = raw["steps"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileRefused(f"{PROFILE_FILE} is no request for a trace: {error}") from error
    if type(first) is not int or type(last) is not int:
        raise ProfileRefused(f"{PROFILE_FILE}: {first!r:.40} and {last!r:.40} are no steps")
    return _checked(first, last, f"{first}:{last}")


def _checked(first: int, last: int, text: str) -> Wanted:
    if not 1 <= first <= last:
        raise ProfileRefused(f"{text!r:.80}: steps are counted from 1, and the last is not before the first")
    if last - first >= MOST_STEPS:
        raise ProfileRefused(
            f"{text!r:.80} are {last - first + 1} steps; a trace of more than {MOST_STEPS} opens nowhere"
        )
    return Wanted(first, last)
