"""Bits per byte, its interval over documents, and the gates that go by it: each decides both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.registry_cases import checks, policy_json, scored
from support.text_cases import TEXT_GATES, documents, text_policy, write_documents

from headway.registry.evaluation import SCORES_FILE, EvaluationRefused, measure
from headway.registry.gates import evaluate_gates
from headway.registry.policy import PolicyInvalid, parse_policy
from headway.registry.text_evaluation import ScoredDocuments, TextEvaluation, measure_documents, read_documents
from headway.registry.verdicts import Checks, GateVerdict


def _measure(found: ScoredDocuments, **policy: Any) -> TextEvaluation:  # noqa: ANN401
    return measure_documents(found, parse_policy(text_policy(**policy)))


def _verdicts(
    found: ScoredDocuments | None = None, given: Checks | None = None, *, margin: float = 0.0
) -> dict[str, GateVerdict]:
    policy = parse_policy(text_policy(margin=margin))
    measured = measure_documents(documents() if found is None else found, policy)
    return {v.gate: v for v in evaluate_gates(policy, "network", measured, given or checks())}


def test_bits_per_byte_is_all_bits_over_all_bytes() -> None:
    found = documents(count=3, scores={"candidate": np.array([10.0, 20.0, 60.0]), "gzip": np.array([40.0, 40.0, 40.0])})
    found = replace(found, size=np.array([10, 20, 30]), streams={"gzip": 12})
    measured = _measure(found)
    mine = measured.metrics["candidate"]["bits_per_byte"]
    assert mine is not None
    assert mine.value == pytest.approx(90 / 60)
    gain = measured.gains["gzip"]
    assert gain is not None
    assert gain.value == pytest.approx((120 - 90) / 60)
    assert measured.streams == {"gzip": pytest.approx(8 * 12 / 60)}


def test_the_interval_is_that_of_resampled_documents() -> None:
    found = documents(count=12)
    spread = _measure(found).metrics["candidate"]["bits_per_byte"]
    assert spread is not None
    assert spread.lower is not None
    assert spread.upper is not None
    assert spread.lower < spread.value < spread.upper
    draws = np.random.default_rng(20130101).multinomial(12, np.full(12, 1 / 12), size=200)
    rates = np.sort((draws @ found.scores["candidate"]) / (draws @ found.size))
    assert rates[0] <= spread.lower <= rates[10]
    assert rates[-11] <= spread.upper <= rates[-1]


def test_near_duplicates_are_drawn_together_and_widen_the_interval() -> None:
    alone = documents(count=40)
    twice = replace(alone, unit=np.arange(40, dtype=np.int64) // 8)
    width = [s.upper - s.lower for d in (alone, twice) if (s := _measure(d).metrics["candidate"]["bits_per_byte"])]  # type: ignore[operator]
    assert _measure(twice).units == 5
    assert width[0] != width[1]


def test_a_good_language_model_passes_every_gate() -> None:
    found = _verdicts()
    assert tuple(found) == TEXT_GATES
    assert {v.verdict for v in found.values()} == {"pass"}
    assert "for want of a champion" in found["bits_per_byte_over_champion"].reason


def test_a_model_that_gzip_beats_fails_by_file_and_by_stream() -> None:
    worse = _verdicts(documents(rates={"candidate": 2.4}))["bits_per_byte_over_gzip"]
    assert worse.verdict == "fail"
    assert worse.metrics["gain"] < 0  # type: ignore[operator]
    # Better than gzip of each file, and not than gzip of all as one, which sees across files.
    between = _verdicts(documents(rates={"candidate": 2.12}))["bits_per_byte_over_gzip"]
    assert between.verdict == "fail"
    assert between.metrics["lower"] > 0  # type: ignore[operator]
    assert "not beaten" in between.reason
    assert _verdicts(documents(rates={"candidate": 2.05}))["bits_per_byte_over_gzip"].verdict == "pass"


def test_the_margin_has_to_be_exceeded_at_the_lower_end() -> None:
    gain = _measure(documents()).gains["gzip"]
    assert gain is not None
    assert gain.lower is not None
    assert _verdicts(margin=gain.value)["bits_per_byte_over_gzip"].verdict == "fail"
    assert _verdicts(margin=0.2)["bits_per_byte_over_gzip"].verdict == "pass"


def test_the_champion_is_compared_document_by_document() -> None:
    with_one = checks(champion="stdlib_lm@1")
    better = _verdicts(documents(rates={"champion": 1.9}), with_one)["bits_per_byte_over_champion"]
    assert better.verdict == "pass"
    assert better.metrics["reference"] == "champion"
    worse = _verdicts(documents(rates={"champion": 1.7}), with_one)["bits_per_byte_over_champion"]
    assert worse.verdict == "fail"
    assert _verdicts(documents(), with_one)["bits_per_byte_over_champion"].verdict == "undecided"


def test_what_the_champion_was_judged_by_cannot_be_dropped() -> None:
    report = {"metrics": {"candidate": {"bits_per_byte": {"value": 1.9}, "bits_per_token": {"value": 5.0}}}}
    found = _verdicts(documents(rates={"champion": 1.9}), checks(champion="lm@1", champion_report=report))
    assert found["bits_per_byte_over_champion"].verdict == "fail"
    assert "bits_per_token" in found["bits_per_byte_over_champion"].reason


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (documents(count=4), "undecided", "4 independent documents"),
        (documents(size=np.zeros(30, np.int64)), "undecided", "0 bytes"),
        (documents(rates={"gzip": float("nan")}), "undecided", "30 of its documents have no number"),
        (documents(rates={"candidate": float("inf")}), "fail", "30 documents have no number"),
    ],
)
def test_nothing_passes_without_evidence(found: ScoredDocuments, verdict: str, said: str) -> None:
    for gate in TEXT_GATES[:2]:
        judged = _verdicts(found)[gate]
        assert judged.verdict == verdict
        assert said in judged.reason


def test_a_gate_of_rows_decides_nothing_on_text_and_the_other_way_round() -> None:
    policy = parse_policy(policy_json("auc_over_historical_rate", "bits_per_byte_over_gzip"))
    of_text = evaluate_gates(policy, "network", measure_documents(documents(), policy), checks())
    of_rows = evaluate_gates(policy, "network", measure(scored(), policy), checks())
    assert [v.verdict for v in of_text] == ["undecided", "pass"]
    assert [v.verdict for v in of_rows] == ["pass", "undecided"]


def test_a_policy_of_rows_still_needs_its_historical_rate() -> None:
    assert parse_policy(text_policy()).gates[0].name == "bits_per_byte_over_gzip"
    with pytest.raises(PolicyInvalid, match="historical_rate"):
        parse_policy(text_policy("auc_over_champion"))


def test_what_was_written_is_read_and_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    written = documents(count=6)
    read = read_documents(write_documents(tmp_path, written))
    assert read.streams == written.streams
    np.testing.assert_array_equal(read.size, written.size)
    np.testing.assert_allclose(read.scores["candidate"], written.scores["candidate"])
    table = pq.read_table(tmp_path / SCORES_FILE)
    for damaged, said in (
        (table.drop_columns(["bits_candidate"]), "bits_candidate"),
        (table.replace_schema_metadata(None), "as one stream"),
        (pa.concat_tables([table, table]), "stands twice"),
    ):
        pq.write_table(damaged, tmp_path / SCORES_FILE)
        with pytest.raises(EvaluationRefused, match=said):
            read_documents(tmp_path)
    with pytest.raises(EvaluationRefused, match="not there"):
        read_documents(tmp_path / "nowhere")
