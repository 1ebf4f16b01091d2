"""Frozen reference histograms: what the inputs and the scores looked like at training.

Drift is measured against them for as long as the model version lives, so their bins never follow current data. Numbers
are cut at quantiles of the training rows, with open ends; a value on an edge belongs to the bin above it. Fewer than
`BINS` bins come out where many rows share a value. Categories are counted by name, with those that training did not
hold under "other". Inputs are counted on training rows, scores on validation rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.blobs import Json
from trainer.encoders import InputEncoding, category_values, numeric_values

BINS = 20
REFERENCE_FORMAT = "headway.reference/1"


def feature_histograms(table: pa.Table, inputs: InputEncoding) -> dict[str, Json]:
    """One histogram per input column, over the rows of `table`."""
    numeric = {item.name: numeric_histogram(numeric_values(table, item.name)) for item in inputs.numeric}
    categorical = {
        item.name: categorical_histogram(category_values(table, item.name), item.values) for item in inputs.categorical
    }
    return {**categorical, **numeric}


def numeric_histogram(values: NDArray[np.float64]) -> dict[str, Json]:
    """Counts between quantile edges: `counts[0]` below the first edge, `counts[-1]` from the last one on."""
    present = values[~np.isnan(values)]
    edges: NDArray[np.float64] = np.empty(0)
    if len(present):
        # Edges are values that occur, so that no rounding decides which side a repeated value falls on. The smallest
        # one would leave an empty first bin.
        cuts = np.quantile(present, np.arange(1, BINS) / BINS, method="higher")
        edges = np.unique(cuts[cuts > present.min()])
    counts = np.bincount(np.searchsorted(edges, present, side="right"), minlength=len(edges) + 1)
    return {
        "kind": "numeric",
        "edges": [float(e) for e in edges],
        "counts": [int(c) for c in counts],
        "missing": int(len(values) - len(present)),
    }


def categorical_histogram(values: pa.ChunkedArray, known: tuple[str, ...]) -> dict[str, Json]:
    """Counts of the `known` categories, of all others, and of missing ones."""
    counted = {item["values"]: item["counts"] for item in values.value_counts().to_pylist()}
    missing = int(counted.pop(None, 0))
    counts = [int(counted.get(value, 0)) for value in known]
    return {
        "kind": "categorical",
        "values": list(known),
        "counts": counts,
        "other": int(sum(counted.values())) - sum(counts),
        "missing": missing,
    }


def reference_document(
    features: Mapping[str, Json], rows: int, scores: NDArray[np.float64], score_rows: str
) -> dict[str, Json]:
    """The document of an artifact: feature histograms over `rows` training rows, and the histogram of `scores`.

    Args:
        features: What `feature_histograms` gave.
        rows: Training rows.
        scores: Probabilities.
        score_rows: Which rows were scored: "valid", or "train" where there were no validation rows.
    """
    return {
        "format": REFERENCE_FORMAT,
        "n": rows,
        "features": features,
        "score": {**numeric_histogram(scores), "n": len(scores), "rows": score_rows},
    }
