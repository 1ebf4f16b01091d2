"""What `headway doctor` says about one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it is well, what was found, and what mends it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
