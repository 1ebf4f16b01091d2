"""Reads a moment as people type it."""

from datetime import UTC, datetime

from headway.errors import HeadwayError


class MomentRefused(HeadwayError):
    """A text that is no date and no time."""


def moment_of(text: str) -> int:
    """Microseconds UTC of a date (its midnight) or a time; without a zone it is UTC.

    Raises:
        MomentRefused: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise MomentRefused(f"{text!r:.60} is no date", "write 2013-12-16 or 2013-12-16T09:00Z") from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000_000)
