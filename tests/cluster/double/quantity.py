"""Kubernetes quantities: `100m`, `2Gi`, `1e3`."""

import re
from decimal import Decimal
from fractions import Fraction

_UNITS = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
_UNITS |= {unit: Fraction(1000 ** (power + 1)) for power, unit in enumerate("kMGTPE")}
_UNITS |= {f"{unit}i": Fraction(1024 ** (power + 1)) for power, unit in enumerate("KMGTPE")}
_FORM = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkKMGTPE]?i?)")


def number(text: str | float) -> Fraction:
    """The value of a quantity, exactly."""
    match = _FORM.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    return Fraction(Decimal(match[1])) * _UNITS[match[2]]


def text(value: Fraction, like: str = "cpu") -> str:
    """A quantity in canonical form; memory in powers of 1024 where they divide it."""
    if value.denominator != 1:
        return f"{int(-(-value * 1000 // 1))}m"
    whole = int(value)
    if like != "cpu":
        for power, unit in reversed(list(enumerate("KMGTPE"))):
            if whole and whole % 1024 ** (power + 1) == 0:
                return f"{whole // 1024 ** (power + 1)}{unit}i"
    return str(whole)
