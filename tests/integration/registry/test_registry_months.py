"""What a model is judged on: every partition of the later month, or the ones that were refused, few and by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.catalog_facts import ALICE
from support.registry_bench import AS_OF, MODEL, Bench, open_bench, spec, write_scores
from support.registry_cases import policy_json, scored

from headway.datasets.arrow import compute as pc
from headway.declaration import PipelineSpec
from headway.registry.candidates import evaluated_month
from headway.registry.card import card, card_lines
from headway.registry.dossier import newest_results
from headway.registry.evaluation import SCORES_FILE, measure, read_scores
from headway.registry.policy import parse_policy
from headway.training.plan import SnapshotsMissing

DAYS = [f"2013-11-{day:02}" for day in range(1, 31)]


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path / "home", migrated_sqlite)
    yield opened
    opened.close()


def _daily(share: float) -> PipelineSpec:
    document: Any = spec().model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["sources"]["flights"]["partition"]["cadence"] = "daily"
    document["training"]["max_missing_share"] = share
    return PipelineSpec.model_validate(document)


def _refuse(bench: Bench, *days: str) -> None:
    for day in days:
        bench.services.catalog.refuse_snapshot(ALICE, None, MODEL, day, "weather is quarantined", ("weather",))


def _publish(bench: Bench, *days: str) -> None:
    for day in days:
        bench.snapshot(day)


def test_refused_days_within_the_allowance_are_left_out_by_name(bench: Bench) -> None:
    _publish(bench, *DAYS[:27])
    _refuse(bench, *DAYS[27:])
    month = evaluated_month(bench.services, _daily(0.1), AS_OF)
    assert [s.partition for s in month.snapshots] == DAYS[:27]
    assert month.left_out == dict.fromkeys(DAYS[27:], "weather is quarantined")


def test_more_refused_days_than_training_may_miss_stop_the_evaluation(bench: Bench) -> None:
    _publish(bench, *DAYS[:26])
    _refuse(bench, *DAYS[26:])
    with pytest.raises(SnapshotsMissing, match="4 of the 30 snapshots of the month after as_of 2013-11-01") as caught:
        evaluated_month(bench.services, _daily(0.1), AS_OF)
    assert "2013-11-27 (weather is quarantined), 2013-11-28" in caught.value.message
    assert "training.max_missing_share" in caught.value.remedy


def test_a_day_that_was_never_built_stops_the_evaluation(bench: Bench) -> None:
    _publish(bench, *DAYS[:28])
    _refuse(bench, DAYS[29])
    with pytest.raises(SnapshotsMissing, match=r"1 of the 30 partitions .* have no snapshot: 2013-11-29"):
        evaluated_month(bench.services, _daily(0.5), AS_OF)


def test_a_month_of_which_nothing_is_left_is_no_evaluation(bench: Bench) -> None:
    _refuse(bench, *DAYS)
    with pytest.raises(SnapshotsMissing, match="30 of the 30 snapshots"):
        evaluated_month(bench.services, _daily(1.0), AS_OF)


def test_every_verdict_and_the_card_name_what_was_left_out(bench: Bench) -> None:
    version = bench.version()
    named = [{"partition": "2013-11-02", "reason": "late"}, {"partition": "2013-11-05", "reason": "blocked"}]
    bench.judge(version, left_out={"2013-11-05": "blocked", "2013-11-02": "late"})
    results = newest_results(bench.services, version)
    assert len(results) == 8
    assert [r.metrics["left_out"] for r in results.values()] == [named] * 8
    assert card(bench.services, version)["left_out"] == named
    assert "  left out   2013-11-05: blocked" in card_lines(bench.services, version)


def test_rows_of_a_daily_label_are_resampled_by_their_own_day(bench: Bench, tmp_path: Path) -> None:
    """Rows that are observed the evening before, as in the first hours of a month, make no day of their own."""
    rows = scored(rows=300, days=30)
    write_scores(tmp_path, rows)
    table = pq.read_table(tmp_path / SCORES_FILE)
    before = pc.subtract(table.column("t"), pa.scalar(3_600_000_000, pa.duration("us")))
    early = pc.if_else(pc.equal(pa.array(np.arange(300) % 60), 0), before, table.column("t"))
    pq.write_table(table.set_column(table.column_names.index("t"), "t", early), tmp_path / SCORES_FILE)
    daily = measure(read_scores(tmp_path, _daily(0.1)), parse_policy(policy_json()))
    assert (daily.days, daily.blocks) == (30, "label partition, daily")
    monthly = measure(read_scores(tmp_path, spec()), parse_policy(policy_json()))
    assert (monthly.days, monthly.blocks) == (31, "observation day in UTC")
    version = bench.version()
    bench.judge(version, folder=tmp_path)
    shown: Any = card(bench.services, version)["evaluation"]
    assert shown["bootstrap"]["blocks"] == "observation day in UTC"
