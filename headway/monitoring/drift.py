"""The judgement of one window against a frozen reference: incident, too few rows, none, season or drift.

Order matters. What broke is a data incident and nothing else. Then each feature needs an effect (PSI above its level
and above the critical value for these numbers of rows, or a distance above its own, both times the calibrated
threshold) and significance: blocks of rows (entities) are dealt anew between reference sample and window, and the
share of deals with an effect as large is the p-value. Benjamini and Hochberg's rule bounds false discoveries over all
features. Features without an effect count as p = 1, so the rule stays valid and nothing is dealt for them; the fewer
features have one, the more often they are dealt, so that a single one among hundreds can be found.

Segments come after the whole, over features x segments by the same rule. They say where; they raise no alarm alone,
because no threshold is calibrated for them.

What remains is drift, unless a second reference explains it: no feature moved further than it does between the
reference's own windows in time; or the reference's rows of the same weekdays and hours, or one slice of the reference
in time order, looks like the window in every feature that did. That is `season`.

Pure, numpy only, and deterministic: deals are seeded by the rows' counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from headway.declaration import DriftSpec
from headway.errors import HeadwayError
from headway.monitoring.effects import (
    Counts,
    Effects,
    Layout,
    block_counts,
    effects,
    layout_of,
    slice_counts,
    slice_starts,
)
from headway.monitoring.incidents import Incident, contract_incidents, value_incidents
from headway.monitoring.reference import SCORE, Bins, Column, Floats, Ints, Reference, Window, as_kind

FEW_PRESENT = 10
TOP_SEGMENTS = 10
_DEALS_AT_ONCE = 250
_MOST_DEALS = 50_000
_HOUR_US = 3_600_000_000
_WEEK_HOURS = 168
_SLICES_PER_SPAN = 16
_SLICE_ROWS = 100
# 1970-01-01 00:00 was a Thursday; weeks start on Monday.
_THURSDAY_HOURS = 72


class PolicyRefused(HeadwayError):
    """A drift policy whose numbers make no sense."""


@dataclass(frozen=True)
class DriftPolicy:
    """When a window counts as moved. `days` is its length, for saying how often chance alone raises an alarm.

    The other fields are those of the declaration's `monitoring.drift`.
    """

    minimum: int = 500
    psi: float = 0.1
    distance: float = 0.1
    false_discovery: float = 0.05
    permutations: int = 400
    weeks: int = 3
    of: int = 4
    days: float = 7.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            whole = item.name in ("minimum", "permutations", "weeks", "of")
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
                needed = "a whole number above 0" if whole else "a number above 0"
                raise PolicyRefused(f"policy {item.name}: is {value!r}, needed is {needed}")
        if self.false_discovery >= 0.5:
            raise PolicyRefused(f"policy false_discovery: is {self.false_discovery}, needed is less than 0.5")
        if self.weeks > self.of:
            raise PolicyRefused(f"policy weeks: {self.weeks} of {self.of} weeks cannot be")

    @classmethod
    def from_spec(cls, spec: DriftSpec) -> DriftPolicy:
        """The policy of a declaration."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(cls) if f.name != "days"})


@dataclass(frozen=True)
class FeatureVerdict:
    """What was found of one feature, over all rows (`segment` "") or in one segment ("column=value").

    `effect` is the larger of `psi` and `distance` in multiples of their declared levels (of the critical PSI where that
    is larger). `direction` is up or down where a number's distribution moved mostly one way. `p` and `q` (the smallest
    false-discovery rate at which it counts) are None where nothing was dealt. `verdict` is none, drift, season,
    data_incident, too_few or not_possible; `reason` says why in a word or two.
    """

    name: str
    segment: str
    effect: float | None
    psi: float | None
    distance: float | None
    p: float | None
    q: float | None
    n: int
    reason: str
    verdict: str
    direction: str = "other"


@dataclass(frozen=True)
class Season:
    """How a window that differs from the whole reference compares with the same time of it."""

    compared_with: str
    effects: Mapping[str, float]


@dataclass(frozen=True)
class WindowVerdict:
    """The judgement of a window: `none`, `drift`, `data_incident`, `season` or `too_few`.

    `threshold` is the calibrated multiple above which effects count (1.0 uncalibrated), `level` the strongest effect
    as a multiple of that, None where none was measured. By chance alone, one window in `false_alarm_per_days` days
    raises an alarm; None where nothing was calibrated.
    """

    verdict: str
    features: tuple[FeatureVerdict, ...]
    incidents: tuple[Incident, ...]
    false_alarm_per_days: float | None
    rows: int
    threshold: float = 1.0
    level: float | None = None
    season: Season | None = None
    reason: str = ""

    def moved(self, segment: str = "") -> tuple[str, ...]:
        """Names of the features that drifted, over all rows or in a segment."""
        return tuple(f.name for f in self.features if f.segment == segment and f.verdict == "drift")


def judge_window(
    reference: Reference, current: Window, policy: DriftPolicy, before: Window | None = None
) -> WindowVerdict:
    """Judge a window; the reference's bins are not changed by it.

    Args:
        reference: of the model version that answered the window's rows.
        current: its rows.
        policy: levels.
        before: the last window before it without an incident, for changes of units that a season hides.
    """
    columns = _kept(reference, current)
    codes = {n: reference.bins[n].codes(c) for n, c in columns.items()}
    found = contract_incidents(reference, current)
    if current.rows:
        found = _causes([*found, *value_incidents(reference, columns, codes, current, before)])
    broken = {i.feature for i in found}
    listed = {n: _without_test(reference.bins[n], columns.get(n), n in broken, policy) for n in reference.bins}
    tested = [n for n, verdict in listed.items() if verdict is None]
    threshold, days = _calibrated(reference, current.rows, policy)
    judged: dict[str, FeatureVerdict] = {}
    if current.rows >= policy.minimum and tested:
        judged = _judge(reference, current, columns, tested, policy, threshold, "")
    season = None
    # A score follows its inputs, and what it was counted on is too short to know its seasons: it never decides alone.
    moved = [n for n, v in judged.items() if v.verdict == "drift" and n != SCORE]
    if moved and not found:
        beyond = beyond_seasons(reference, current, [judged[n] for n in moved])
        season = explained_by_season(reference, current, columns, beyond, policy, threshold)
        explained = [n for n in judged if season is not None or beyond.get(n, 1.0) < 1]
        judged |= {n: _seasonal(judged[n]) for n in explained}
        moved = [n for n in moved if n not in explained]
    verdicts = [v for n in reference.bins if (v := listed[n] or judged.get(n)) is not None]
    if not judged:
        verdicts += [_too_few(n, len(columns[n])) for n in tested]
    if judged and not found and season is None:
        verdicts += _segments(reference, current, columns, tested, policy)
    level = max((v.effect for v in judged.values() if v.effect is not None), default=None)
    verdict, reason = _overall(found, current.rows, policy, moved, season, judged)
    return WindowVerdict(
        verdict,
        tuple(verdicts),
        tuple(found),
        days,
        current.rows,
        threshold,
        None if level is None else level / threshold,
        season,
        reason,
    )


def _overall(
    incidents: Sequence[Incident],
    rows: int,
    policy: DriftPolicy,
    moved: Sequence[str],
    season: Season | None,
    judged: Mapping[str, FeatureVerdict],
) -> tuple[str, str]:
    if incidents:
        return "data_incident", "; ".join(f"{i.kind} {i.feature}".strip() for i in incidents[:5])
    if rows < policy.minimum:
        return "too_few", f"{rows} rows, needed are {policy.minimum}"
    if not judged:
        return "none", "no feature can drift"
    if season is not None:
        return "season", f"like {season.compared_with}"
    return ("drift", f"moved: {', '.join(moved)}") if moved else ("none", "")


def _causes(incidents: Sequence[Incident]) -> list[Incident]:
    """Without what follows from another one: values in other units have fractions because of the units."""
    changed = {i.feature for i in incidents if i.kind == "unit_change"}
    return [i for i in incidents if not (i.kind == "contract" and i.feature in changed)]


def _kept(reference: Reference, current: Window) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name, bins in reference.bins.items():
        column = current.columns.get(name)
        kept = None if column is None else as_kind(column, bins)
        if kept is not None:
            found[name] = kept
    return found


def _without_test(bins: Bins, column: Column | None, broken: bool, policy: DriftPolicy) -> FeatureVerdict | None:
    """A verdict that needs no test, None for a feature to be tested."""
    rows = 0 if column is None else len(column)
    present = 0 if column is None else int((~column.missing).sum())
    if bins.name == SCORE and column is None:
        return _plain(SCORE, rows, "too_few", "no scores")
    if 0 < present < FEW_PRESENT and policy.minimum > FEW_PRESENT and column is not None:
        return _plain(bins.name, rows, "too_few", "too_few")
    if broken:
        return _plain(bins.name, rows, "data_incident", "all_null" if rows and not present else "incident")
    assert column is not None
    if bins.constant:
        return _plain(bins.name, rows, "not_possible", "constant")
    return _too_few(bins.name, rows) if rows < policy.minimum else None


def _plain(name: str, rows: int, verdict: str, reason: str) -> FeatureVerdict:
    return FeatureVerdict(name, "", None, None, None, None, None, rows, reason, verdict)


def _too_few(name: str, rows: int) -> FeatureVerdict:
    return _plain(name, rows, "too_few", "too_few")


def _seasonal(verdict: FeatureVerdict) -> FeatureVerdict:
    if verdict.verdict != "drift":
        return verdict
    return replace(verdict, verdict="season", reason="season")


def _calibrated(reference: Reference, rows: int, policy: DriftPolicy) -> tuple[float, float | None]:
    calibration = reference.calibration
    if calibration is None:
        return 1.0, None
    size = calibration.size_for(rows)
    # Where windows in time are known, an alarm has to pass their levels as well.
    rate = calibration.season_rate if calibration.windows else calibration.rates[size]
    return calibration.thresholds[size], policy.days / rate


def _judge(
    reference: Reference,
    current: Window,
    columns: Mapping[str, Column],
    names: Sequence[str],
    policy: DriftPolicy,
    threshold: float,
    segment: str,
) -> dict[str, FeatureVerdict]:
    """Effects of features, then p-values of those that have one, then the rule over all of them."""
    bins = [reference.bins[n] for n in names]
    layout = layout_of(bins)
    counts = block_counts(layout, bins, columns, current.blocks)
    measured = effects(layout, layout.reference, counts.sum(axis=0), policy.psi, policy.distance)
    strong = [i for i in range(len(names)) if measured.effect[i] >= threshold]
    p = _p_values(reference, counts, layout, names, strong, policy, len(names))
    return _ruled(names, segment, measured, p, counts.sum(axis=0), layout, threshold, policy)


def _ruled(
    names: Sequence[str],
    segment: str,
    measured: Effects,
    p: Mapping[int, float],
    counts: Counts,
    layout: Layout,
    threshold: float,
    policy: DriftPolicy,
) -> dict[str, FeatureVerdict]:
    rows = np.add.reduceat(counts, layout.starts)
    q = adjusted(np.array([p.get(i, 1.0) for i in range(len(names))]))
    found: dict[str, FeatureVerdict] = {}
    for i, name in enumerate(names):
        effect = float(measured.effect[i])
        if effect < threshold:
            verdict, reason = "none", "small_effect"
        elif q[i] > policy.false_discovery:
            verdict, reason = "none", "not_significant"
        else:
            verdict, reason = "drift", "effect_and_significance"
        found[name] = FeatureVerdict(
            name,
            segment,
            effect,
            float(measured.psi[i]),
            float(measured.distance[i]),
            p.get(i),
            float(q[i]) if i in p else None,
            int(rows[i]),
            reason,
            verdict,
            measured.direction(i),
        )
    return found


def adjusted(p: Floats) -> Floats:
    """Benjamini and Hochberg's q-values (1995): the smallest false-discovery rate at which each p-value counts."""
    if not len(p):
        return p
    order = np.argsort(p, kind="stable")
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    found = np.empty_like(p)
    found[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return found


def _p_values(
    reference: Reference,
    current: Counts,
    layout: Layout,
    names: Sequence[str],
    strong: Sequence[int],
    policy: DriftPolicy,
    hypotheses: int,
) -> dict[int, float]:
    """p-values of the features with an effect, by dealing blocks; the score, without sampled rows, by its spread."""
    found: dict[int, float] = {}
    dealt = [i for i in strong if names[i] in reference.sample.columns]
    for i in strong:
        if i not in dealt:
            found[i] = _spread_p(layout, i, current)
    if dealt:
        places = layout.select(dealt)
        bins = [reference.bins[names[i]] for i in dealt]
        small = layout_of(bins)
        sample = block_counts(small, bins, reference.sample.columns, reference.sample.blocks)
        # Enough deals that the smallest possible p-value passes the rule when only these features have one.
        needed = int(np.ceil(4 * hypotheses / (policy.false_discovery * len(dealt))))
        deals = min(max(policy.permutations, needed), _MOST_DEALS)
        single = reference.sample.entity is None
        dealt_p = _dealt_p(small, sample, current[:, places], policy, deals, single)
        found |= dict(zip(dealt, dealt_p, strict=True))
    return found


def _dealt_p(
    layout: Layout, sample: Counts, current: Counts, policy: DriftPolicy, deals: int, single: bool
) -> list[float]:
    """The share of deals of all blocks with an effect at least as large, counting the one that was observed.

    Where every row is a block of its own, a deal's counts are drawn from the multivariate hypergeometric distribution,
    which is what dealing rows amounts to.
    """
    total, mine = sample.sum(axis=0, dtype=np.float64), current.sum(axis=0, dtype=np.float64)
    observed = effects(layout, total, mine, policy.psi, policy.distance).effect
    pooled = total + mine
    rng = np.random.default_rng([deals, int(pooled.sum()), int(mine @ np.arange(1, len(mine) + 1))])
    at_least = np.zeros(len(observed))
    blocks = None if single else np.concatenate([sample, current]).astype(np.float32)
    for first in range(0, deals, _DEALS_AT_ONCE):
        some = min(_DEALS_AT_ONCE, deals - first)
        if blocks is None:
            drawn = _dealt_rows(layout, pooled, mine, some, rng)
        else:
            drawn = _dealt_blocks(len(blocks), len(current), some, rng) @ blocks
        seen = effects(layout, pooled - drawn, drawn, policy.psi, policy.distance).effect
        at_least += (seen >= observed * (1 - 1e-9)).sum(axis=0)
    return [float(p) for p in (at_least + 1) / (deals + 1)]


def _dealt_blocks(blocks: int, chosen: int, deals: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Which blocks each deal gives to the window: 0 or 1 [deals, blocks]."""
    keys = rng.random((deals, blocks), dtype=np.float32)
    kth = np.partition(keys, chosen - 1, axis=1)[:, chosen - 1 : chosen]
    return (keys <= kth).astype(np.float32)


def _dealt_rows(
    layout: Layout, pooled: Floats, mine: Floats, deals: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    parts: list[NDArray[np.int64]] = []
    for start, size in zip(layout.starts, layout.sizes, strict=True):
        colours = pooled[start : start + size].astype(np.int64)
        rows = int(mine[start : start + size].sum())
        parts.append(rng.multivariate_hypergeometric(colours, rows, size=deals, method="marginals"))
    return np.concatenate(parts, axis=1).astype(np.float64)


def _spread_p(layout: Layout, feature: int, current: Counts) -> float:
    """The p-value of a feature that the sample does not hold: chi-squared, with the window's rows counted as fewer.

    Rao and Scott's first-order correction (1981): the mean design effect of the bins' shares, from the spread between
    blocks, says how many independent rows the window's rows are worth.
    """
    from scipy.special import chdtrc

    start, size = layout.starts[feature], layout.sizes[feature]
    mine = current[:, start : start + size].astype(np.float64)
    known = layout.reference[start : start + size]
    per_block = mine.sum(axis=1)
    rows = per_block.sum()
    share = mine.sum(axis=0) / rows
    residual = mine - per_block[:, None] * share
    used = share > 0
    variance = (residual[:, used] ** 2).sum(axis=0)
    design = max(1.0, float((variance / np.maximum(rows * share[used] * (1 - share[used]), 1e-9)).mean()))
    n = known.sum()
    p, q = (known + 0.5) / (n + 0.5 * size), (mine.sum(axis=0) + 0.5) / (rows + 0.5 * size)
    # Pearson's measure and not the PSI: the few blocks that the rows are worth leave bins empty, where a logarithm is
    # far from chi-squared.
    moved = float(((q - p) ** 2 / p).sum())
    return float(chdtrc(max(int(size) - 1, 1), moved / (1 / n + design / rows)))


def _segments(
    reference: Reference, current: Window, columns: Mapping[str, Column], names: Sequence[str], policy: DriftPolicy
) -> list[FeatureVerdict]:
    """The same features in each segment with enough rows on both sides, under one rule for all of them."""
    found: list[FeatureVerdict] = []
    whole = {n: c for n, c in columns.items() if len(c) == current.rows}
    names = [n for n in names if n in whole and n in reference.sample.columns]
    if not names:
        return []
    inside = list(_segment_rows(reference.sample, current, policy.minimum))
    for label, known, rows in inside:
        part = Reference(
            {n: _counted(reference.bins[n], reference.sample.columns[n].take(known)) for n in names},
            reference.sample.take(known),
        )
        window = current.take(rows)
        found += _judge(part, window, {n: c.take(rows) for n, c in whole.items()}, names, policy, 1.0, label).values()
    q = adjusted(np.array([1.0 if v.p is None else v.p for v in found]))
    return [_ruled_again(v, float(q[i]), policy) for i, v in enumerate(found)]


def _ruled_again(verdict: FeatureVerdict, q: float, policy: DriftPolicy) -> FeatureVerdict:
    if verdict.p is None:
        return verdict
    if q <= policy.false_discovery:
        return replace(verdict, q=q, verdict="drift", reason="effect_and_significance")
    return replace(verdict, q=q, verdict="none", reason="not_significant")


def _segment_rows(
    sample: Window, current: Window, minimum: int
) -> list[tuple[str, NDArray[np.intp], NDArray[np.intp]]]:
    """Rows of each segment in the sample and in the window: per column the largest ones by traffic."""
    found: list[tuple[str, NDArray[np.intp], NDArray[np.intp]]] = []
    for column, values in current.segments.items():
        if column not in sample.segments:
            continue
        texts, counts = np.unique(values.astype(np.str_), return_counts=True)
        for at in np.argsort(-counts, kind="stable")[:TOP_SEGMENTS]:
            rows = np.flatnonzero(values == texts[at])
            known = np.flatnonzero(sample.segments[column] == texts[at])
            if len(rows) >= minimum and len(known) >= minimum:
                found.append((f"{column}={texts[at]}", known, rows))
    return found


def _counted(bins: Bins, column: Column) -> Bins:
    """The same bins with the counts of some of the sample's rows."""
    return replace(bins, counts=np.bincount(bins.codes(column), minlength=bins.size).astype(np.float64))


def beyond_seasons(reference: Reference, current: Window, verdicts: Sequence[FeatureVerdict]) -> dict[str, float]:
    """Each feature's measures as a multiple of what the reference's own windows in time stay below.

    Infinite where that is unknown.
    """
    seasons = {} if reference.calibration is None or current.times is None else reference.calibration.seasons
    found = dict.fromkeys((v.name for v in verdicts), float("inf"))
    for verdict in verdicts:
        if verdict.name in seasons and verdict.psi is not None and verdict.distance is not None:
            psi, distance = seasons[verdict.name]
            found[verdict.name] = max(verdict.psi / psi, verdict.distance / distance if verdict.distance else 0.0)
    return found


def explained_by_season(
    reference: Reference,
    current: Window,
    columns: Mapping[str, Column],
    beyond: Mapping[str, float],
    policy: DriftPolicy,
    threshold: float,
) -> Season | None:
    """The second reference that explains every feature that moved, None when there is none.

    First the levels that the reference's own windows in time stay below (`beyond_seasons`). For what passes them, the
    whole reference with its rows weighted to the window's weekdays and hours, then slices of the reference, as long as
    the window, in steps of a sixteenth of that.
    """
    sample = reference.sample
    moved = [name for name, multiple in beyond.items() if multiple >= 1]
    if not moved:
        return Season("the reference's own windows in time", dict(beyond))
    if current.times is None or sample.times is None or not len(sample.times):
        return None
    bins = [reference.bins[n] for n in moved]
    layout = layout_of(bins)
    mine = block_counts(layout, bins, columns, current.blocks).sum(axis=0, dtype=np.float64)
    codes = [b.codes(sample.columns[b.name]) for b in bins]
    weights = _same_hours(sample.times, current.times)
    if weights is not None:
        counts = np.concatenate(
            [np.bincount(c, weights, b.size).astype(np.float64) for c, b in zip(codes, bins, strict=True)]
        )
        effect = effects(layout, counts, mine, policy.psi, policy.distance).effect
        if (effect < threshold).all():
            return Season("the reference's rows of the same weekdays and hours", dict(zip(moved, effect, strict=True)))
    return _like_a_slice(sample.times, current.times, layout, codes, mine, moved, policy, threshold)


def _same_hours(known: Ints, mine: Ints) -> Floats | None:
    """Weights that give the reference's rows the window's mix of weekday hours; None where it lacks some of them."""
    cells = [((times // _HOUR_US) + _THURSDAY_HOURS) % _WEEK_HOURS for times in (known, mine)]
    have, want = (np.bincount(c, minlength=_WEEK_HOURS).astype(np.float64) for c in cells)
    if want[have == 0].sum() > 0.05 * want.sum():
        return None
    share = np.divide(want, have, out=np.zeros(_WEEK_HOURS), where=have > 0)
    weights = share[cells[0]]
    # Scaled to the number of rows that the weights are worth (Kish), so that the critical PSI is not too small.
    return weights * weights.sum() / (weights**2).sum() if weights.any() else None


def _like_a_slice(
    known: Ints,
    mine: Ints,
    layout: Layout,
    codes: Sequence[NDArray[np.intp]],
    counts: Floats,
    moved: Sequence[str],
    policy: DriftPolicy,
    threshold: float,
) -> Season | None:
    from headway.datasets.zones import iso

    span = int(mine.max() - mine.min()) + 1
    if int(known.max()) - int(known.min()) < 2 * span:
        return None
    starts = slice_starts(known, span, _SLICES_PER_SPAN)
    parts, rows = slice_counts(layout, codes, known, starts, span)
    effect = effects(layout, parts, counts, policy.psi, policy.distance).effect
    enough = rows >= _SLICE_ROWS
    worst = np.where(enough, effect.max(axis=1), np.inf)
    best = int(np.argmin(worst))
    if not worst[best] < threshold:
        return None
    until = iso(int(starts[best]) + span)
    return Season(
        f"the reference from {iso(int(starts[best]))} to {until}",
        {n: float(e) for n, e in zip(moved, effect[best], strict=True)},
    )
