"""What a server answers for a held-out month is what batch scores for its snapshots, to the last bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from support.live_bench import make_live_bench
from support.month_bench import ask_all, make_month, score_snapshots
from support.serving_bench import DAYS, pipeline_of, requests_for
from support.workbench import Workbench

# Every one that a row with an observation time can meet.
REASONS = {"hit", "none_visible", "expired", "deleted", "null_value", "empty", "null_key"}
# In the data of June nothing is retracted, and whoever has flown has a tail number.
NOT_IN_JUNE = {"deleted", "null_key"}
ROWS_OF_JUNE = 27_075


def test_every_flight_of_a_held_out_month_scores_online_as_in_batch(tmp_path: Path) -> None:
    bench, stored = make_month(tmp_path)
    assert stored.num_rows == ROWS_OF_JUNE
    assert scored_alike(bench, stored, _sizes(1_500)) == REASONS - NOT_IN_JUNE


def test_the_reasons_that_no_flight_meets_score_online_as_in_batch(tmp_path: Path) -> None:
    bench = make_live_bench(tmp_path)
    stored = pa.concat_tables([bench.table(day) for day in DAYS]).unify_dictionaries()
    assert scored_alike(bench, stored, _sizes(9)) == REASONS


def scored_alike(bench: Workbench, stored: pa.Table, sizes: Iterator[int]) -> set[str]:
    """Compare both ways row by row, asked in a mixed order; returns the reasons that both gave alike."""
    batch = score_snapshots(bench, stored)
    assert len(np.unique(batch)) > 0.5 * len(batch), "scores that hardly differ could not show rows that changed places"
    mixed = np.random.default_rng(6).permutation(stored.num_rows)
    requests = requests_for(pipeline_of(bench), stored).take(pa.array(mixed))
    online, logged = ask_all(bench, requests, sizes)
    differing = np.flatnonzero(online.view(np.int64) != batch[mixed].view(np.int64))
    assert not len(differing), (
        f"{len(differing)} of {len(batch)} scores, the first of snapshot row {mixed[differing[0]]}"
    )
    reasons = [c for c in stored.column_names if c.endswith("__reason")]
    by_row = stored.take(pa.array(mixed))
    for name in reasons:
        assert logged.column(name).to_pylist() == by_row.column(name).to_pylist(), name
    return {word for name in reasons for word in logged.column(name).unique().to_pylist()}


def _sizes(most: int) -> Iterator[int]:
    """Rows of one request after another, from one to many."""
    rng = np.random.default_rng(7)
    while True:
        yield int(rng.integers(1, most + 1))
