"""The frozen reference of a model version: bins that never move, and training rows to compare a window with.

Bins come from the artifact's `reference.json` and belong to the model version for as long as it lives; a window is
counted into them and never changes them. Missing is a bin. A category that training did not hold falls in "other";
known ones below half a percent share one bin, so that a hundred rare names are not a hundred chances to differ.

Beside the bins stands a sample of the training rows with their entities and times. Whole blocks are drawn, an entity's
rows of one week, by the hash of their identity: rows of one entity move together, and thinning a block would hide that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError
from headway.monitoring.windows import WEEK_US

Kind: TypeAlias = Literal["int64", "float64", "bool", "string", "null", "mixed"]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

BINS = 20
SAMPLE_ROWS = 20_000
RARE_SHARE = 0.005
REFERENCE_FORMAT = "headway.reference/1"
SCORE = "(score)"


class ReferenceUnusable(HeadwayError):
    """A model version's reference that is not as training writes it: nothing can be compared with it."""


@dataclass(frozen=True)
class Column:
    """Values of one column and what kind they are. Numbers are float64 with NaN for missing, all else object, None."""

    kind: Kind
    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        """Which values are missing: null, and for numbers NaN and the infinities, as the model's encoder has it."""
        if self.values.dtype == np.float64:
            return ~np.isfinite(self.values)
        return np.array([v is None for v in self.values], dtype=np.bool_)

    def take(self, rows: NDArray[Any]) -> Column:
        """Some of the rows."""
        return Column(self.kind, self.values[rows])


@dataclass(frozen=True)
class Window:
    """Rows to judge, or the reference's sample. `entity` are block labels, `times` microseconds UTC; None: unknown.

    A column may be shorter than the window (a value that a few rows have only). `segments` holds texts per row.
    `stale` is by view the share of rows whose source was behind, `skipped` by source that of rows for which partitions
    were left out, both of the worst day where times are known.
    """

    columns: Mapping[str, Column]
    entity: NDArray[Any] | None = None
    times: Ints | None = None
    segments: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    stale: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, float] = field(default_factory=dict)
    feature_set_version: int | None = None

    @cached_property
    def rows(self) -> int:
        """Rows of the longest column."""
        return max((len(c) for c in self.columns.values()), default=0)

    def take(self, rows: NDArray[Any]) -> Window:
        """Some of the rows; columns that are shorter than the window stay whole."""
        return Window(
            {n: c.take(rows) if len(c) == self.rows else c for n, c in self.columns.items()},
            None if self.entity is None else self.entity[rows],
            None if self.times is None else self.times[rows],
            {n: v[rows] for n, v in self.segments.items()},
            self.stale,
            self.skipped,
            self.feature_set_version,
        )

    @cached_property
    def blocks(self) -> Ints:
        """The block of each row, 0, 1, ...: entity and week, the entity alone without times, the row itself without."""
        if self.entity is None:
            return np.arange(self.rows, dtype=np.int64)
        names = np.unique(self.entity, return_inverse=True)[1].astype(np.int64)
        if self.times is None:
            return names
        week = self.times // WEEK_US
        return np.unique(names * (int(week.max() - week.min()) + 1) + week - week.min(), return_inverse=True)[1].astype(
            np.int64
        )


@dataclass(frozen=True)
class Bins:
    """Frozen bins of one input and how many training rows fell in each; the last one is "missing".

    Numeric: `edges` with open ends, a value on an edge belongs above. Categorical: `values` in their bins, then one bin
    for all rare known ones (if there are such), then "other". `middles` are the mean training value per numeric bin and
    `scale` the training rows' standard deviation, both zero where unknown; `low` and `high` bound the sample's values.
    """

    name: str
    type: Kind
    numeric: bool
    edges: Floats
    cells: Mapping[str, int]
    counts: Floats
    middles: Floats
    scale: float
    low: float
    high: float

    @property
    def size(self) -> int:
        """Number of bins."""
        return len(self.counts)

    @property
    def other(self) -> int:
        """The bin of categories that training did not hold."""
        return self.size - 2

    @property
    def rows(self) -> int:
        """Training rows."""
        return int(self.counts.sum())

    @property
    def constant(self) -> bool:
        """Whether training rows held one value only: such a feature cannot drift gradually, it can only break."""
        return int((self.counts > 0).sum()) <= 1 and (not self.numeric or self.low == self.high)

    def codes(self, column: Column) -> NDArray[np.intp]:
        """The bin of each value."""
        if not self.numeric:
            missing = self.size - 1
            return np.array(
                [missing if v is None else self.cells.get(v, self.other) for v in column.values.tolist()], np.intp
            )
        found = np.searchsorted(self.edges, column.values, side="right").astype(np.intp)
        found[column.missing] = self.size - 1
        return found


@dataclass(frozen=True)
class Calibration:
    """Thresholds from A/A pairs: by rows of the window, the multiple of the declared levels at which an effect counts.

    `rates` is the achieved share of pairs in which any feature passes the threshold: what chance alone raises.
    `seasons` holds by feature the PSI and the distance that the reference's own windows in time stay below, `windows`
    how many of these there were (0: times unknown, or too short) and `season_rate` the share of them that does pass.
    """

    thresholds: Mapping[int, float]
    rates: Mapping[int, float]
    pairs: int
    seed: int
    seasons: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    windows: int = 0
    season_rate: float = 0.0

    def size_for(self, rows: int) -> int:
        """The calibrated size that a window of these rows is judged by: the largest not above it."""
        return max((size for size in self.thresholds if size <= rows), default=min(self.thresholds))


@dataclass(frozen=True)
class Reference:
    """What a window is judged against. `digest` names the stored sample; `sample` lacks the score."""

    bins: Mapping[str, Bins]
    sample: Window
    calibration: Calibration | None = None
    feature_set_version: int | None = None
    digest: str = ""


def column_of(values: Sequence[object], where: str = "") -> Column:
    """A column out of JSON or Python values: null is missing, and no value is turned into another kind.

    Whole and other numbers together are float64; anything else together is "mixed".
    """
    kinds = {_kind(v) for v in values if v is not None}
    if not kinds:
        return Column("null", np.full(len(values), np.nan))
    if kinds <= {"int64", "float64"}:
        kind: Kind = "int64" if kinds == {"int64"} else "float64"
        return Column(kind, np.array([np.nan if v is None else _number(v, where) for v in values], np.float64))
    kind = cast("Kind", kinds.pop()) if len(kinds) == 1 else "mixed"
    return Column(kind, _objects([None if v is None else _text(v) for v in values]))


def numeric_column(values: Floats, kind: Kind = "float64") -> Column:
    """A column of numbers; NaN is missing."""
    return Column(kind, np.asarray(values, np.float64))


def text_column(values: Sequence[str | None]) -> Column:
    """A column of texts; None is missing."""
    return Column("string", _objects(values))


def as_kind(column: Column, bins: Bins) -> Column | None:
    """The column as its bins take it, or None when it is of another kind: values are never turned into another.

    Whole numbers in a float column are the same kind, and so is a column without any value.
    """
    if column.kind == "null":
        return Column(bins.type, np.full(len(column), np.nan) if bins.numeric else _objects([None] * len(column)))
    numbers = ("int64", "float64")
    if not (column.kind == bins.type or (column.kind in numbers and bins.type in numbers)):
        return None
    if bins.numeric and column.values.dtype != np.float64:
        as_numbers = {None: np.nan, "true": 1.0, "false": 0.0}
        return Column(column.kind, np.array([as_numbers[v] for v in column.values], np.float64))
    if not bins.numeric and column.values.dtype == np.float64:
        return Column(column.kind, _objects([None if math.isnan(v) else f"{v:.15g}" for v in column.values]))
    return column


def frozen_bins(name: str, document: Mapping[str, Any], kind: Kind, sample: Column | None) -> Bins:
    """Bins out of a histogram of `reference.json`.

    Args:
        name: the input.
        document: as `trainer.reference` writes it.
        kind: the contract's type of the input.
        sample: its values in the sample, for means per bin and the deviation; None leaves both to the edges.

    Raises:
        ReferenceUnusable: it has another form.
    """
    try:
        counts = np.array(document["counts"], np.float64)
        missing = float(document["missing"])
        if document["kind"] == "categorical":
            return _categorical(name, kind, document["values"], counts, float(document["other"]), missing)
        edges = np.array(document["edges"], np.float64)
        if len(counts) != len(edges) + 1 or (np.diff(edges) <= 0).any() or (counts < 0).any():
            raise ValueError(f"{len(edges)} edges and {len(counts)} counts")
    except (KeyError, TypeError, ValueError) as error:
        raise ReferenceUnusable(
            f"the reference of {name!r} cannot be read: {error!r:.200}", "train the version again"
        ) from error
    values = np.empty(0) if sample is None else sample.values[~sample.missing]
    counts = np.append(counts, missing)
    return _numeric(name, kind, edges, counts, values)


def bins_of(name: str, column: Column) -> Bins:
    """Bins of reference values themselves, by the rules that training follows: 20 quantile bins, or by category."""
    missing = float(column.missing.sum())
    if column.values.dtype != np.float64:
        texts, counts = np.unique(column.values[~column.missing].astype(np.str_), return_counts=True)
        return _categorical(name, column.kind, [str(t) for t in texts], counts.astype(np.float64), 0.0, missing)
    present = column.values[~column.missing]
    edges: Floats = np.empty(0)
    if len(present):
        cuts = np.quantile(present, np.arange(1, BINS) / BINS, method="higher")
        edges = np.unique(cuts[cuts > present.min()])
    counts = np.bincount(np.searchsorted(edges, present, side="right"), minlength=len(edges) + 1)
    kind: Kind = "float64" if column.kind == "null" else column.kind
    return _numeric(name, kind, edges, np.append(counts, missing).astype(np.float64), present)


def reference_of(sample: Window) -> Reference:
    """A reference made of rows that are all there, for declared cases and tests."""
    return Reference({n: bins_of(n, c) for n, c in sample.columns.items()}, sample)


def sampled_blocks(identities: Sequence[str], limit: int = SAMPLE_ROWS) -> NDArray[np.bool_]:
    """Which rows a sample of at most `limit` rows keeps: whole blocks, in the order of their identity's hash.

    Args:
        identities: the block of each row as text (the row's own identity where rows stand alone).
        limit: rows.
    """
    unique, back, counts = np.unique(np.asarray(identities, np.str_), return_inverse=True, return_counts=True)
    ranks = np.array([int.from_bytes(hashlib.sha256(str(u).encode()).digest()[:8], "big") for u in unique], np.uint64)
    order = np.argsort(ranks, kind="stable")
    kept = np.zeros(len(unique), np.bool_)
    kept[order[np.cumsum(counts[order]) <= limit]] = True
    return kept[back]


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    if isinstance(value, float):
        return "float64"
    return "string" if isinstance(value, str) else "mixed"


def _number(value: object, where: str) -> float:
    try:
        return float(cast("int | float", value))
    except OverflowError as error:
        raise ReferenceUnusable(f"{where}: {value!r:.40} does not fit float64") from error


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _numeric(name: str, kind: Kind, edges: Floats, counts: Floats, present: Floats) -> Bins:
    if not len(edges) and len(present) and present.min() < present.max():
        # One value in 95 % of the rows and more leaves a single quantile bin: the sample tells it from all others.
        edges = np.array([present[present > present.min()].min()])
        share = float((present >= edges[0]).mean())
        counts = np.array([counts[0] * (1 - share), counts[0] * share, counts[-1]])
    places = np.searchsorted(edges, present, side="right")
    sums = np.bincount(places, present, minlength=len(edges) + 1)
    held = np.bincount(places, minlength=len(edges) + 1)
    # A bin without a sampled row is represented by its edge.
    stand_in = np.append(edges, edges[-1:]) if len(edges) else np.zeros(1)
    middles = np.where(held > 0, sums / np.maximum(held, 1), stand_in)
    deviation = float(present.std()) if len(present) else _deviation(middles, counts[:-1])
    low, high = (float(present.min()), float(present.max())) if len(present) else (math.nan, math.nan)
    return Bins(name, kind, True, edges, {}, counts, middles, deviation, low, high)


def _deviation(middles: Floats, counts: Floats) -> float:
    """The standard deviation of counts at their bins' middles."""
    if not counts.any():
        return 0.0
    mean = float(np.average(middles, weights=counts))
    return float(np.sqrt(np.average((middles - mean) ** 2, weights=counts)))


def _categorical(name: str, kind: Kind, values: Sequence[str], counts: Floats, other: float, missing: float) -> Bins:
    total = counts.sum() + other + missing
    rare = counts < RARE_SHARE * max(total, 1.0)
    if rare.sum() < 2:
        rare = np.zeros(len(counts), np.bool_)
    kept = [v for v, r in zip(values, rare, strict=True) if not r]
    cells = {v: i for i, v in enumerate(kept)}
    cells |= {v: len(kept) for v, r in zip(values, rare, strict=True) if r}
    pooled = [counts[rare].sum()] if rare.any() else []
    found = np.array([*counts[~rare], *pooled, other, missing], np.float64)
    return Bins(name, kind, False, np.empty(0), cells, found, np.empty(0), 0.0, math.nan, math.nan)
