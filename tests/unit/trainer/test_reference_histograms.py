"""Reference histograms: bins from training rows, open ends, and every row counted once."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.encoders import fit_inputs
from trainer.reference import BINS, categorical_histogram, feature_histograms, numeric_histogram, reference_document


def test_distinct_numbers_fill_twenty_equal_bins() -> None:
    histogram = numeric_histogram(np.arange(1000.0))
    assert histogram["counts"] == [50] * 20
    assert histogram["edges"] == [float(50 * i) for i in range(1, 20)]
    assert histogram["missing"] == 0


def test_a_number_that_most_rows_share_takes_one_bin() -> None:
    values = np.array([0.0] * 90 + list(range(1, 11)))
    histogram = numeric_histogram(values)
    assert histogram["edges"] == [1.0, 6.0]
    assert histogram["counts"] == [90, 5, 5]


def test_missing_numbers_are_counted_apart() -> None:
    histogram = numeric_histogram(np.array([1.0, np.nan, 2.0, np.nan]))
    assert histogram["missing"] == 2
    assert histogram["counts"] == [1, 1]


def test_no_numbers_at_all_is_one_empty_bin() -> None:
    assert numeric_histogram(np.array([np.nan]))["counts"] == [0]
    assert numeric_histogram(np.array([7.0, 7.0]))["counts"] == [2]


def test_categories_are_counted_by_name_the_rest_as_other() -> None:
    values = pa.chunked_array([["b", "a", None], ["b", "z"]])
    assert categorical_histogram(values, ("a", "b", "c")) == {
        "kind": "categorical",
        "values": ["a", "b", "c"],
        "counts": [1, 2, 0],
        "other": 1,
        "missing": 1,
    }


@given(st.lists(st.one_of(st.just(float("nan")), st.integers(-3, 3).map(float), st.floats(-1e18, 1e18)), max_size=80))
@settings(max_examples=80, deadline=None)
def test_every_number_is_in_one_bin_and_bins_are_few_and_in_order(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float64)
    histogram = numeric_histogram(values)
    edges, counts = np.array(histogram["edges"]), np.array(histogram["counts"])
    assert counts.sum() + histogram["missing"] == len(values)
    assert len(counts) == len(edges) + 1 <= BINS
    assert (np.diff(edges) > 0).all()
    # With open ends: what lies below the first edge is in the first bin, what lies at or above the last in the last.
    present = values[~np.isnan(values)]
    for index, low in enumerate([-np.inf, *edges]):
        high = [*edges, np.inf][index]
        assert counts[index] == ((present >= low) & (present < high)).sum()


def test_the_document_names_every_input_and_the_score() -> None:
    table = pa.table({"c": ["a", "b"], "x": [1.0, None]})
    features = feature_histograms(table, fit_inputs(table, ["c"], ["x"]))
    document = reference_document(features, 2, np.array([0.1, 0.9, 0.5]), "valid")
    assert document["n"] == 2
    assert set(features) == {"c", "x"}
    score = document["score"]
    assert isinstance(score, dict)
    assert (score["n"], score["rows"], score["counts"]) == (3, "valid", [1, 1, 1])
