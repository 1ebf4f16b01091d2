"""What a language model's nats on held-out documents amount to: bits per byte, beside compressors on the same bytes.

Bits per byte of a coder over some documents is the sum of what it needs for each of them, in bits, over the sum of
their original bytes. Intervals come from resampling documents; near duplicates of each other, which are no independent
observations, are drawn together.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.artifacts.digests import Json, digest_file
from headway.registry.evaluation import CANDIDATE, SCORES_FILE, SEED, EvaluationRefused
from headway.registry.metrics import Counts, Floats, Interval, Statistic, day_counts, difference, interval
from headway.registry.policy import Policy

if TYPE_CHECKING:
    import pyarrow as pa

BITS_PER_BYTE = "bits_per_byte"
MEASURED = b"headway.measured"
"""Key of the table's metadata: `streams` (bytes of all documents as one compressed stream) and how it was measured."""

_BITS = "bits_"
_NAMED = ("document", "group", "bytes")


@dataclass(frozen=True)
class ScoredDocuments:
    """The held-out documents, arrays [n] in one order.

    `unit` numbers what is drawn together, `size` counts original bytes, `scores` holds each coder's bits by name,
    `streams` the bytes of all documents as one compressed stream. `measured` is what else is to be known of it.
    """

    digest: str
    unit: NDArray[np.int64]
    size: NDArray[np.int64]
    scores: Mapping[str, Floats]
    streams: Mapping[str, int]
    measured: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True)
class TextEvaluation:
    """The measured evaluation. None stands for what the data do not define.

    `metrics` is coder -> `bits_per_byte` -> interval; `gains` is reference -> paired difference of bits per byte,
    reference - candidate, above 0 where the candidate needs less; `streams` is compressor -> bits per byte of all
    documents as one stream; `not_finite` counts documents without a number, by coder; `measured` is how it was done.
    """

    scores_digest: str
    documents: int
    units: int
    size: int
    resamples: int
    confidence: float
    metrics: Mapping[str, Mapping[str, Interval | None]]
    gains: Mapping[str, Interval | None]
    streams: Mapping[str, float]
    not_finite: Mapping[str, int]
    measured: Mapping[str, Json]

    def to_json(self) -> dict[str, Json]:
        """The evaluation as JSON."""
        return {
            "scores_digest": self.scores_digest,
            "documents": self.documents,
            "bytes": self.size,
            "bootstrap": {
                "blocks": "documents, near duplicates together",
                "units": self.units,
                "resamples": self.resamples,
                "confidence": self.confidence,
                "seed": SEED,
            },
            "metrics": {
                coder: {name: _json(found) for name, found in named.items()} for coder, named in self.metrics.items()
            },
            "gains": {reference: _json(found) for reference, found in self.gains.items()},
            "streams": dict(self.streams),
            "not_finite": dict(self.not_finite),
            "measured": dict(self.measured),
        }


def read_documents(folder: Path) -> ScoredDocuments:
    """Return the documents of an evaluation folder; bits that are null or no number are kept as NaN.

    Raises:
        EvaluationRefused: no such file, a column is missing or stands twice, a size is negative, or the sizes of the
            streams are not there.
    """
    import pyarrow.parquet as pq

    path = folder / SCORES_FILE
    if not path.is_file():
        raise EvaluationRefused(f"{path} is not there")
    table = pq.read_table(path)
    names = table.column_names
    for name in (*_NAMED, f"{_BITS}{CANDIDATE}"):
        if names.count(name) != 1:
            raise EvaluationRefused(f"column {name!r} stands {names.count(name)} times in {SCORES_FILE}, not once")
    documents = table.column("document").to_pylist()
    if len(set(documents)) != len(documents):
        raise EvaluationRefused("a document stands twice")
    size, (streams, measured) = np.asarray(_floats(table, "bytes")), _measured(table)
    if not (size >= 0).all():
        raise EvaluationRefused("a document has no size, or one below 0")
    return ScoredDocuments(
        digest=digest_file(path),
        unit=np.unique(np.asarray(table.column("group").to_pylist(), dtype=np.str_), return_inverse=True)[1],
        size=size.astype(np.int64),
        scores={n.removeprefix(_BITS): _floats(table, n) for n in names if n.startswith(_BITS)},
        streams=streams,
        measured=measured,
    )


def measure_documents(scored: ScoredDocuments, policy: Policy) -> TextEvaluation:
    """Return every coder's bits per byte with its interval, and what the candidate gains over each other one."""
    units = int(scored.unit.max()) + 1 if len(scored.unit) else 0
    counts = day_counts(max(1, units), policy.resamples, SEED)
    made = {name: _bits_per_byte(bits, scored, units) for name, bits in scored.scores.items()}
    mine = made[CANDIDATE]
    whole = float(scored.size.sum())
    return TextEvaluation(
        scores_digest=scored.digest,
        documents=len(scored.size),
        units=units,
        size=int(whole),
        resamples=policy.resamples,
        confidence=policy.confidence,
        metrics={name: {BITS_PER_BYTE: _interval(s, units, counts, policy)} for name, s in made.items()},
        gains={
            name: _interval(None if s is None or mine is None else difference(s, mine), units, counts, policy)
            for name, s in made.items()
            if name != CANDIDATE
        },
        streams={name: 8.0 * size / whole for name, size in scored.streams.items() if whole > 0},
        not_finite={name: int((~np.isfinite(bits)).sum()) for name, bits in scored.scores.items()},
        measured=scored.measured,
    )


def _bits_per_byte(bits: Floats, scored: ScoredDocuments, units: int) -> Statistic | None:
    """Bits per byte as a function of how often each unit is drawn; None when it is undefined."""
    if not np.isfinite(bits).all() or not scored.size.sum():
        return None
    spent = np.bincount(scored.unit, bits, units)
    held = np.bincount(scored.unit, scored.size.astype(np.float64), units)

    def statistic(counts: Counts) -> Floats:
        below = counts @ held
        return np.divide(counts @ spent, below, out=np.full(len(counts), np.nan), where=below > 0)

    return statistic


def _interval(statistic: Statistic | None, units: int, counts: Counts, policy: Policy) -> Interval | None:
    return None if statistic is None else interval(statistic, units, counts, policy.confidence)


def _measured(table: "pa.Table") -> tuple[dict[str, int], dict[str, Json]]:
    written = (table.schema.metadata or {}).get(MEASURED)
    found: Any = None if written is None else json.loads(written)
    streams: Any = found.pop("streams", None) if isinstance(found, dict) else None
    sizes = cast("dict[str, object]", streams) if isinstance(streams, dict) else {"": ""}
    if not all(type(size) is int for size in sizes.values()):
        raise EvaluationRefused(f"{SCORES_FILE} does not say how large the documents are as one stream")
    return cast("dict[str, int]", sizes), cast("dict[str, Json]", found)


def _floats(table: "pa.Table", name: str) -> Floats:
    values: Any = table.column(name).cast("float64").to_numpy()
    return np.asarray(values, dtype=np.float64)


def _json(found: Interval | None) -> Json:
    return None if found is None else {"value": found.value, "lower": found.lower, "upper": found.upper}
