"""Asks a run for a trace of some of its steps; see `trainer.profiling`. No part of the run's identity."""

from __future__ import annotations

from pathlib import Path

from headway.errors import HeadwayError
from headway.training.run_files import publish
from trainer.profile_request import PROFILE_FILE, ProfileRefused, Wanted, parse_profile


class TraceRefused(HeadwayError):
    """Text that asks for no steps, or a run that takes none any more."""


def wanted_steps(text: str) -> Wanted | None:
    """The steps that `steps=10:15` asks for; None for no text.

    Raises:
        TraceRefused: it is other text.
    """
    if not text.strip():
        return None
    try:
        return parse_profile(text)
    except ProfileRefused as error:
        raise TraceRefused(str(error), "write for instance steps=10:15, counted from 1 over the whole run") from error


def ask_for_trace(run_dir: Path, wanted: Wanted) -> None:
    """Leave the request in the run's directory, where its rank 0 looks every few seconds; a newer one wins."""
    run_dir.mkdir(parents=True, exist_ok=True)
    publish(run_dir / PROFILE_FILE, {"steps": [wanted.first, wanted.last]})
