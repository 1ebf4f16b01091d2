"""Data incidents: what broke on the way to the model, told apart before anybody speaks of drift.

Kinds, in the order of the checks:

* `schema`: an input is absent, or its values are of another kind (text for a number; nothing is turned into another
  kind). `contract`: numbers with a fraction where whole ones are agreed; 3.0 is whole, and one 3.5 is one too many.
* `null_rate`: all missing; or a share of missing values that left what the reference and its own weeks show, in either
  direction.
* `unit_change`: the quantiles of the window are those of the reference times a common factor of units (x1000, x0.001,
  minutes and seconds, miles and kilometres, ...) or an affine change (Fahrenheit and Celsius, Kelvin), and do not fit
  unchanged. Undoing the change must bring the line of 19 quantiles back to within a third of a standard deviation and
  to a seventh of the way for factors from 24 on (a fourth from 100 on), and to within sampling noise for small ones,
  which drift could mimic.
  Rows far outside the reference's range that a large factor brings back into it are an incident as well when they are
  1 % or more. A season can hide a change of scale, since a mild week in Celsius is no stranger to a reference than a
  hard frost in Fahrenheit: affine changes of temperatures are looked for against the last sound window before this one
  as well.
* `new_value`: another number where training held one only. `new_category`: categories that training did not hold,
  beyond what its own rare ones let expect (Good-Turing: the share of values seen once estimates the chance that the
  next row's value is new).
* `stale_watermark`, `skipped_source`: most rows rested on a view that was behind, or a source of which partitions were
  left out. `pipeline_version`: rows of another feature set version than the reference's.

Checks run over the whole window and, where times are known, over each of its days: one bad day is an incident of the
week, and one only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.reference import SCORE, Bins, Column, Floats, Reference, Window, as_kind
from headway.monitoring.windows import DAY_US, WEEK_US, day_of

KINDS = (
    "schema",
    "contract",
    "null_rate",
    "unit_change",
    "new_value",
    "new_category",
    "stale_watermark",
    "skipped_source",
    "pipeline_version",
)
SLICE_ROWS = 50
STALE_SHARE = 0.5
SKIPPED_SHARE = 0.2
NULL_CHANGE = 0.2
NULL_CHANGE_DAY = 0.5
NULL_FROM_NONE = 0.05
NULL_FROM_NONE_DAY = 0.3
NEW_SHARE = 0.05
NEW_SHARE_DAY = 0.2
OUTSIDE_SHARE = 0.01

_QUANTILES = np.arange(1, 20) / 20
_LARGE = (24.0, 60.0, 100.0, 1_000.0, 1_440.0, 3_600.0, 10_000.0, 86_400.0, 1e6, 1e9)
_SMALL = (
    *(1.609344, 0.3048, 2.54, 0.45359237, 28.349523, 3.6, 1.852, 1.150779, 33.8639, 3.785412),
    *(7.0, 10.0, 12.0),
)
_AFFINE = {
    "Celsius to Fahrenheit": (1.8, 32.0),
    "Fahrenheit to Celsius": (1 / 1.8, -32 / 1.8),
    "Celsius to Kelvin": (1.0, 273.15),
    "Kelvin to Celsius": (1.0, -273.15),
    "Fahrenheit to Kelvin": (1 / 1.8, 273.15 - 32 / 1.8),
    "Kelvin to Fahrenheit": (1.8, 32 - 273.15 * 1.8),
}
# More distance than this, in standard deviations, is needed before a change of units is looked for.
_LEAST_MOVE = 0.5
_LARGE_FIT = 0.35
_HUGE = 100.0
_HUGE_GAIN = 1 / 4
_LARGE_GAIN = 1 / 7
_SMALL_GAIN = 0.15
_SAME_FACTOR = 0.04
_LARGE_RATIO = 1.5
# How far sampled quantiles differ, in standard deviations of the feature for one row on both sides.
_NOISE = 2.0
# A share has to leave what so many standard errors of it allow.
_ERRORS = 4.0
# Against the window before: the least move, and how much of it may be left when the change is undone, in its standard
# deviations. Weather moves by one or two from week to week.
_JUMP = 2.0
_JUMP_GAIN = 0.35
_JUMP_FIT = 2.0
_MANY_ZEROS = 0.2


@dataclass(frozen=True)
class Incident:
    """What broke, of which feature (a view or source for freshness), in words; `days` names them where not all."""

    kind: str
    feature: str
    detail: str
    days: tuple[str, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One incident over consecutive windows: a feature missing for a day is one incident, not 24 hourly ones."""

    kind: str
    feature: str
    first: str
    last: str
    windows: int
    detail: str


def contract_incidents(reference: Reference, window: Window) -> list[Incident]:
    """Incidents that need no statistics: absent inputs, other kinds, broken contracts, freshness, versions."""
    found: list[Incident] = []
    for name, bins in reference.bins.items():
        column = window.columns.get(name)
        if column is None:
            if name != SCORE:
                found.append(Incident("schema", name, "is absent"))
            continue
        kept = as_kind(column, bins)
        if kept is None:
            found.append(Incident("schema", name, f"is {column.kind}, the reference {bins.type}"))
        elif bins.type == "int64" and column.values.dtype == np.float64:
            present = column.values[~column.missing]
            broken = int((present != np.floor(present)).sum())
            if broken:
                found.append(Incident("contract", name, f"{broken} of {len(present)} values are no whole numbers"))
    found += [
        Incident("stale_watermark", view, f"behind its source in {share:.0%} of a day's rows")
        for view, share in window.stale.items()
        if share >= STALE_SHARE
    ]
    found += [
        Incident("skipped_source", source, f"partitions left out in {share:.0%} of a day's rows")
        for source, share in window.skipped.items()
        if share >= SKIPPED_SHARE
    ]
    versions = (reference.feature_set_version, window.feature_set_version)
    if None not in versions and versions[0] != versions[1]:
        found.append(Incident("pipeline_version", "", f"feature set version {versions[1]}, trained on {versions[0]}"))
    return found


def value_incidents(
    reference: Reference,
    columns: Mapping[str, Column],
    codes: Mapping[str, NDArray[np.intp]],
    window: Window,
    before: Window | None = None,
) -> list[Incident]:
    """Incidents in the values: missing shares, units, new categories.

    Args:
        reference: bins and sample.
        columns: the window's columns that are of the reference's kind.
        codes: the bin of each of their values.
        window: for the times of its rows.
        before: the last sound window before it, of features on a scale with a zero of its own (temperatures); None
            without one.
    """
    found: list[Incident] = []
    days = list(_days(window))
    earlier = {} if before is None else before.columns
    for name, column in columns.items():
        checks = _Checks(reference, reference.bins[name])
        whole = list(checks.run(column, codes[name], day=False))
        if name in earlier and reference.bins[name].type == "float64":
            whole += _jumped(name, earlier[name], column, [incident.kind for incident in whole])
        found += whole
        seen = {incident.kind for incident in whole}
        by_kind: dict[str, list[tuple[str, Incident]]] = {}
        if len(column) == window.rows:
            for day, rows in days:
                for incident in checks.run(column.take(rows), codes[name][rows], day=True):
                    by_kind.setdefault(incident.kind, []).append((day, incident))
        found += [
            replace(of_day[0][1], days=tuple(day for day, _ in of_day))
            for kind, of_day in by_kind.items()
            if kind not in seen
        ]
    return found


def _jumped(name: str, before: Column, now: Column, kinds: Sequence[str]) -> Iterator[Incident]:
    """An affine change of units since the window before."""
    if "unit_change" in kinds or before.values.dtype.kind != "f" or now.values.dtype.kind != "f":
        return
    known, present = before.values[~before.missing], now.values[~now.missing]
    if min(len(known), len(present)) < SLICE_ROWS:
        return
    line, current = np.quantile(known, _QUANTILES), np.quantile(present, _QUANTILES)
    spread = float(line[-1] - line[0]) / 3.29
    if spread <= 0:
        return
    move = float(np.abs(current - line).mean()) / spread
    left = {
        words: float(np.abs((current - shift) / factor - line).mean()) / spread
        for words, (factor, shift) in _AFFINE.items()
    }
    best = min(left, key=lambda words: left[words])
    if move >= _JUMP and left[best] <= min(_JUMP_FIT, _JUMP_GAIN * move):
        yield Incident("unit_change", name, f"quantiles are those of the window before, changed from {best}")


def episodes(windows: Sequence[tuple[str, Sequence[Incident]]]) -> list[Episode]:
    """Fold the incidents of windows in their order: the same kind of the same feature, without a pause, is one."""
    done: list[Episode] = []
    running: dict[tuple[str, str], Episode] = {}
    for key, incidents in windows:
        now: dict[tuple[str, str], Episode] = {}
        for incident in incidents:
            place = (incident.kind, incident.feature)
            before = now.get(place) or running.get(place)
            if before is None:
                now[place] = Episode(incident.kind, incident.feature, key, key, 1, incident.detail)
            elif before.last != key:
                now[place] = replace(before, last=key, windows=before.windows + 1)
        done += [episode for place, episode in running.items() if place not in now]
        running = now
    return sorted([*done, *running.values()], key=lambda e: (e.first, e.kind, e.feature))


class _Checks:
    """The checks of one feature's values."""

    def __init__(self, reference: Reference, bins: Bins) -> None:
        self._bins = bins
        self._sample = reference.sample.columns.get(bins.name)
        self._times = reference.sample.times
        total = max(bins.counts.sum(), 1.0)
        self._missing = float(bins.counts[-1] / total)
        self._shares = bins.counts / total
        self._weeks: list[Floats] | None = None

    def run(self, column: Column, codes: NDArray[np.intp], *, day: bool) -> Iterator[Incident]:
        """Incidents in some rows of the column; days are judged by larger changes than the whole."""
        rows = len(column)
        if rows < SLICE_ROWS:
            return
        counts = np.bincount(codes, minlength=self._bins.size)
        missing = float(counts[-1] / rows)
        if self._left_nulls(missing, rows, day):
            shown = "all missing" if missing == 1 else f"{missing:.1%} missing"
            yield Incident("null_rate", self._bins.name, f"{shown}, in the reference {self._missing:.1%}")
        if self._bins.numeric and self._bins.low == self._bins.high:
            other = float((column.values[~column.missing] != self._bins.low).sum() / rows)
            if other >= (NEW_SHARE_DAY if day else NEW_SHARE):
                detail = f"{other:.1%} of the rows are not {self._bins.low:g}, the only value of the reference"
                yield Incident("new_value", self._bins.name, detail)
        elif not self._bins.numeric:
            new, expected = float(counts[self._bins.other] / rows), self._expected_new()
            least = max(NEW_SHARE_DAY if day else NEW_SHARE, _ERRORS * _error(expected, rows))
            if new - expected >= least:
                detail = f"{new:.1%} of the rows hold categories that training did not"
                yield Incident("new_category", self._bins.name, detail + self._named(column, codes))
        elif self._may_have_moved(column, counts / rows):
            change = self._unit_change(column.values[~column.missing], day)
            if change:
                yield Incident("unit_change", self._bins.name, change)

    def _left_nulls(self, share: float, rows: int, day: bool) -> bool:
        change = abs(share - self._missing)
        if change <= _ERRORS * _error(self._missing, rows):
            return False
        if share == 1.0 and self._missing < 0.95:
            return True
        if change < (NULL_CHANGE_DAY if day else NULL_CHANGE):
            least = NULL_FROM_NONE_DAY if day else NULL_FROM_NONE
            from_none = self._missing < 0.01 and share - self._missing >= least
            to_none = self._missing >= 2 * least and share < 0.01 and not day
            if not (from_none or to_none):
                return False
        low, high = self._missing_range(DAY_US if day else WEEK_US)
        return not low <= share <= high

    def _missing_range(self, span: int) -> tuple[float, float]:
        """Shares of missing values that slices of the reference itself show, with a margin."""
        if self._sample is None or self._times is None or not len(self._times):
            return self._missing, self._missing
        slices = np.unique(self._times // span, return_inverse=True)[1]
        rows = np.bincount(slices)
        shares = np.bincount(slices, self._sample.missing)[rows >= SLICE_ROWS] / rows[rows >= SLICE_ROWS]
        if not len(shares):
            return self._missing, self._missing
        return float(shares.min()) - 0.05, float(shares.max()) + 0.05

    def _expected_new(self) -> float:
        """The share of new categories that is no news: that of training rows themselves, and of names seen once."""
        known = float(self._shares[self._bins.other])
        if self._sample is None or not len(self._sample):
            return known
        counts = np.unique(self._sample.values[~self._sample.missing].astype(np.str_), return_counts=True)[1]
        return known + 3 * float((counts == 1).sum()) / len(self._sample)

    def _named(self, column: Column, codes: NDArray[np.intp]) -> str:
        names, counts = np.unique(column.values[codes == self._bins.other].astype(np.str_), return_counts=True)
        top = [repr(str(names[i])[:40]) for i in np.argsort(-counts, kind="stable")[:3]]
        return f": {', '.join(top)}"

    def _may_have_moved(self, column: Column, shares: Floats) -> bool:
        """Cheap: half of the mass in other bins, or values far outside the sample's range."""
        if self._sample is None or self._bins.scale <= 0:
            return False
        return float(np.abs(shares - self._shares).sum()) / 2 >= 0.2 or self._outside(column.values).mean() > (
            OUTSIDE_SHARE
        )

    def _outside(self, values: Floats) -> NDArray[np.bool_]:
        span = self._bins.high - self._bins.low
        with np.errstate(invalid="ignore"):
            return (values > self._bins.high + span) | (values < self._bins.low - span)

    def _unit_change(self, present: Floats, day: bool) -> str:
        if len(present) < SLICE_ROWS or self._bins.type == "bool":
            return ""
        assert self._sample is not None
        known = self._sample.values[~self._sample.missing]
        zeros = (known == 0).mean() >= _MANY_ZEROS
        if zeros:
            # Zero is zero in any unit; among many of them the quantiles would say nothing.
            known, present = known[known != 0], present[present != 0]
        if min(len(known), len(present)) < SLICE_ROWS:
            return ""
        reference, current = np.quantile(known, _QUANTILES), np.quantile(present, _QUANTILES)
        scale = float(reference[-1] - reference[0]) / 3.29
        if scale <= 0:
            return ""
        move = float(np.abs(current - reference).mean()) / scale
        if move >= _LEAST_MOVE:
            noise = 0.02 + _NOISE * float(np.sqrt(1 / len(present) + 1 / len(known)))
            free = float(current @ reference / (reference @ reference))
            one_sided = reference[0] > 0 or reference[-1] < 0
            found: list[tuple[float, str]] = []
            for change in _changes(day or zeros):
                fit = float(np.abs((current - change.shift) / change.factor - reference).mean()) / scale
                limit = min(_LARGE_FIT, change.gain * move) if change.large else min(noise, change.gain * move)
                if fit <= limit and _possible(change, free, one_sided=one_sided):
                    found.append((fit, change.words))
            if found:
                return f"quantiles are the reference's {min(found)[1]}"
            if words := self._like_a_week(current):
                return words
        return self._partial_change(present, reference, scale)

    def _like_a_week(self, current: Floats) -> str:
        """A large factor times one of the reference's own weeks: seasons move the whole, and units a season's week."""
        found: list[tuple[float, str]] = []
        for line in self._week_lines():
            spread = float(line[-1] - line[0]) / 3.29
            if spread <= 0:
                continue
            free = float(current @ line / (line @ line))
            for change in _changes(only_large=True):
                fit = float(np.abs(current / change.factor - line).mean()) / spread
                if fit <= _LARGE_FIT and _possible(change, free, one_sided=True):
                    found.append((fit, change.words))
        return f"quantiles are those of a week of the reference {min(found)[1]}" if found else ""

    def _week_lines(self) -> list[Floats]:
        """Quantiles of the feature in each of the reference's own weeks, without many zeros as above."""
        if self._sample is None or self._times is None:
            return []
        if self._weeks is None:
            known, week = self._sample.values[~self._sample.missing], self._times[~self._sample.missing] // WEEK_US
            if (known == 0).mean() >= _MANY_ZEROS:
                known, week = known[known != 0], week[known != 0]
            parts = [known[week == w] for w in np.unique(week)]
            self._weeks = [np.quantile(part, _QUANTILES) for part in parts if len(part) >= SLICE_ROWS]
        return self._weeks

    def _partial_change(self, present: Floats, reference: Floats, scale: float) -> str:
        """Some rows in other units: far outside the range, and back at home when a large factor is undone."""
        outside = present[self._outside(present)]
        if len(outside) < max(5, OUTSIDE_SHARE * len(present)):
            return ""
        for factor in _LARGE:
            back = outside / factor
            inside = (back >= self._bins.low) & (back <= self._bins.high)
            fit = float(np.abs(np.quantile(back, _QUANTILES) - reference).mean()) / scale
            if inside.mean() >= 0.9 and fit <= _LARGE_FIT:
                return f"{len(outside) / len(present):.1%} of the values are the reference's times {factor:g}"
        return ""


def _error(share: float, rows: int) -> float:
    """The standard error of a share among so many rows, as if one more row had it."""
    kept = min(max(share, 1 / (rows + 1)), rows / (rows + 1))
    return float(np.sqrt(kept * (1 - kept) / rows))


@dataclass(frozen=True)
class _Change:
    """A change of units: value * factor + shift. `gain`: the part of the move that may be left when it is undone."""

    words: str
    factor: float
    shift: float
    large: bool
    gain: float


def _possible(change: _Change, free: float, *, one_sided: bool) -> bool:
    """Whether the factor that fits best, `free`, is near the change's own.

    Around zero a small factor is a wider or narrower spread, and some factor is always near.
    """
    if change.shift != 0:
        return True
    if change.large:
        return 1 / _LARGE_RATIO <= free / change.factor <= _LARGE_RATIO
    return one_sided and abs(free / change.factor - 1) <= _SAME_FACTOR


def _changes(only_large: bool) -> Iterator[_Change]:
    for factor in _LARGE:
        gain = _HUGE_GAIN if factor >= _HUGE else _LARGE_GAIN
        yield _Change(f"times {factor:g}", factor, 0.0, True, gain)
        yield _Change(f"divided by {factor:g}", 1 / factor, 0.0, True, gain)
    if only_large:
        # One day's weather or traffic fits some small factor too often by chance.
        return
    for factor in _SMALL:
        yield _Change(f"times {factor:g}", factor, 0.0, False, _SMALL_GAIN)
        yield _Change(f"divided by {factor:g}", 1 / factor, 0.0, False, _SMALL_GAIN)
    for words, (factor, shift) in _AFFINE.items():
        yield _Change(f"changed from {words}", factor, shift, False, _SMALL_GAIN)


def _days(window: Window) -> Iterator[tuple[str, NDArray[np.intp]]]:
    if window.times is None or not len(window.times):
        return
    days = window.times // DAY_US
    for day in np.unique(days):
        rows = np.flatnonzero(days == day)
        if SLICE_ROWS <= len(rows) < window.rows:
            yield day_of(int(day) * DAY_US), rows
