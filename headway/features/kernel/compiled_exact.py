"""Compiled exact sums of float64. Imported on first use only, since it brings numba.

A sum is a fixed-point integer in signed limbs of 30 bits (the idea of Kulisch's long accumulator, cut to the exponents
that the data have). Adding is exact, hence free of order, and only the last step rounds: the same numbers give the
same bits whatever else was loaded. Carries wait in the upper half of each int64, which holds 2**31 additions.
"""

from __future__ import annotations

import math

import numpy as np

from headway.features.kernel.jit import Flags, Floats, Ints, compiled, inner

BITS = 30
MASK = (1 << BITS) - 1
FRACTION = (1 << 52) - 1
GROWTH = 32
SIGNIFICANT = 53


@compiled
def exponent_range(bits: Ints, null: Flags) -> tuple[int, int]:
    """Exponents of the lowest and one above the highest set bit among the values that are not null; (0, 1) if none.

    `bits` are the float64 values seen as int64. A row that is not finite gives (1, -1 - row).
    """
    low = 5000
    high = -5000
    for i in range(bits.shape[0]):
        if null.shape[0] > 0 and null[i]:
            continue
        biased = (bits[i] >> 52) & 0x7FF
        if biased == 0x7FF:
            return 1, -1 - i
        m = bits[i] & FRACTION
        if biased > 0:
            m |= FRACTION + 1
        elif m == 0:
            continue
        e = max(biased, 1) - 1075
        if e + SIGNIFICANT > high:
            high = e + SIGNIFICANT
        if e < low:
            while m & 1 == 0:
                m >>= 1
                e += 1
            low = min(low, e)
    if low > high:
        return 0, 1
    return low, high


@compiled
def limbs_needed(low: int, high: int) -> int:
    """Limbs that hold 2**31 additions of numbers between 2**low and 2**high, with room for the sign."""
    return (high - low + GROWTH) // BITS + 4


@inner
def add(total: Ints, bits: int, low: int) -> None:
    """Add one float64 (as its bits) to the sum whose unit is 2**low."""
    m = bits & FRACTION
    biased = (bits >> 52) & 0x7FF
    if biased > 0:
        m |= FRACTION + 1
    if m == 0:
        return
    e = max(biased, 1) - 1075 - low
    if e < 0:
        m >>= -e
        e = 0
    j = e // BITS
    shift = e - j * BITS
    bottom = (m & MASK) << shift
    top = (m >> BITS) << shift
    if bits < 0:
        total[j] -= bottom & MASK
        total[j + 1] -= (bottom >> BITS) + (top & MASK)
        total[j + 2] -= top >> BITS
    else:
        total[j] += bottom & MASK
        total[j + 1] += (bottom >> BITS) + (top & MASK)
        total[j + 2] += top >> BITS


@inner
def add_square(total: Ints, bits: int, low: int, sign: int) -> None:
    """Add the exact square of one float64, times sign, to the sum whose unit is 2**(2 low)."""
    m = bits & FRACTION
    biased = (bits >> 52) & 0x7FF
    if biased > 0:
        m |= FRACTION + 1
    if m == 0:
        return
    e = max(biased, 1) - 1075 - low
    if e < 0:
        m >>= -e
        e = 0
    j = 2 * e // BITS
    shift = 2 * e - j * BITS
    bottom = m & MASK
    top = m >> BITS
    part = bottom * bottom
    for step in range(4):
        digit = (part & MASK) << shift
        total[j + step] += sign * (digit & MASK)
        total[j + step + 1] += sign * (digit >> BITS)
        part >>= BITS
        if step == 0:
            part += 2 * bottom * top
        elif step == 1:
            part += top * top


@inner
def settle(total: Ints, digits: Ints) -> bool:
    """Write the magnitude of the sum as digits of 30 bits; True when the sum is negative."""
    carry = 0
    n = total.shape[0]
    for i in range(n):
        v = total[i] + carry
        digits[i] = v & MASK
        carry = v >> BITS
    if carry >= 0:
        return False
    carry = 1
    for i in range(n):
        v = (digits[i] ^ MASK) + carry
        digits[i] = v & MASK
        carry = v >> BITS
    return True


@inner
def rounded(digits: Ints) -> tuple[float, int]:
    """The digits as m * 2**e with m an integer of at most 53 bits, rounded half to even; (0.0, 0) for nothing."""
    top = digits.shape[0] - 1
    while top >= 0 and digits[top] == 0:
        top -= 1
    if top < 0:
        return 0.0, 0
    # Three digits hold at least 61 significant bits; the part below is one sticky bit.
    head = digits[top]
    used = 0
    while (head >> used) > 0:
        used += 1
    take = 60 - used
    second = digits[top - 1] if top >= 1 else 0
    third = digits[top - 2] if top >= 2 else 0
    low = (second << BITS) | third
    m = (head << take) | (low >> (60 - take))
    sticky = (low & ((1 << (60 - take)) - 1)) != 0
    for i in range(top - 2):
        if digits[i] != 0:
            sticky = True
            break
    e = top * BITS - take
    extra = 60 - SIGNIFICANT
    rest = m & ((1 << extra) - 1)
    m >>= extra
    half = 1 << (extra - 1)
    if rest > half or (rest == half and (sticky or m & 1 == 1)):
        m += 1
    return float(m), e + extra


@inner
def value_of(total: Ints, low: int, digits: Ints) -> float:
    """The sum as the nearest float64 (ties to even); `digits` is scratch of the same length."""
    negative = settle(total, digits)
    m, e = rounded(digits)
    value = math.ldexp(m, e + low)
    return -value if negative else value


@inner
def deviation(total: Ints, squares: Ints, count: int, low: int, digits: Ints, squared: Ints, spread: Ints) -> float:
    """Sample standard deviation from exact sums: n * sum(x^2) - sum(x)^2 is exact, then three roundings.

    digits and squared are scratch like total and squares; spread is scratch of max(len(squares), 2 len(total)) + 2.
    """
    settle(total, digits)
    settle(squares, squared)
    n = digits.shape[0]
    spread[:] = 0
    carry = 0
    for i in range(squared.shape[0]):
        v = squared[i] * count + carry
        spread[i] = v & MASK
        carry = v >> BITS
    i = squared.shape[0]
    while carry > 0:
        spread[i] = carry & MASK
        carry >>= BITS
        i += 1
    used = n
    while used > 0 and digits[used - 1] == 0:
        used -= 1
    for i in range(used):
        borrow = 0
        for j in range(used):
            v = spread[i + j] - digits[i] * digits[j] - borrow
            spread[i + j] = v & MASK
            borrow = -(v >> BITS)
        j = i + used
        while borrow > 0:
            v = spread[j] - borrow
            spread[j] = v & MASK
            borrow = -(v >> BITS)
            j += 1
    m, e = rounded(spread)
    if m == 0.0:
        return 0.0
    e += 2 * low
    ratio = m / (float(count) * float(count - 1))
    if e & 1:
        ratio *= 2.0
        e -= 1
    return math.ldexp(math.sqrt(ratio), e // 2)
