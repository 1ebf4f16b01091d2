"""Words that several messages share."""

from collections.abc import Sequence


def counted(number: int, what: str) -> str:
    """A number with its noun: `1 key`, `2 keys`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def no_single(what: str, found: Sequence[str], reference: str) -> str:
    """Say that not exactly one id begins with what a person typed."""
    whose = f"the ids of {len(found)} {what}s begin" if found else f"no {what}'s id begins"
    return f"{whose} with {reference!r}"
