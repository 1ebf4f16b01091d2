"""Gates: each passes only on what it measured, and says why it does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.registry_cases import ROW_GATES, checks, contract, evaluation, policy_json, scored, verdicts

from headway.registry.gates import MINIMUM_DAYS
from headway.registry.metrics import Interval
from headway.registry.policy import PolicyInvalid, parse_policy
from headway.registry.verdicts import ArtifactCheck, ProofCheck


def test_a_good_version_passes_every_gate() -> None:
    found = verdicts()
    assert tuple(found) == ROW_GATES
    assert {v.verdict for v in found.values()} == {"pass"}
    gain = found["auc_over_historical_rate"].metrics
    assert gain["lower"] > gain["margin"] == 0.0  # type: ignore[operator]
    assert gain["auc"] - gain["reference_auc"] == pytest.approx(gain["gain"])  # type: ignore[operator]


def test_without_a_champion_the_historical_rate_stands_in_and_the_reason_says_so() -> None:
    found = verdicts()["auc_over_champion"]
    assert found.metrics["reference"] == "historical_rate"
    assert "for want of a champion" in found.reason
    with_one = verdicts(scored(skill={"champion": 1.0}), checks(champion="delay@3", stable_contract=contract()))
    assert with_one["auc_over_champion"].metrics["reference"] == "champion"
    assert "delay@3" in with_one["auc_over_champion"].reason


def test_the_lower_end_decides_not_the_value() -> None:
    rows = scored(skill={"logistic": 2.95}, seed=4)
    found = verdicts(rows)["auc_over_logistic"]
    assert float(str(found.metrics["gain"])) > 0 > float(str(found.metrics["lower"]))
    assert found.verdict == "fail"


def test_a_margin_is_exceeded_not_reached() -> None:
    rows = scored()
    rows = replace(rows, scores={**rows.scores, "logistic": rows.scores["candidate"]})
    assert verdicts(rows)["auc_over_logistic"].verdict == "fail"
    gates = [{"gate": "auc_over_logistic", "margin": -0.0001, "unless": ""}]
    assert verdicts(rows, gates=gates)["auc_over_logistic"].verdict == "pass"


def test_a_gate_does_not_apply_to_the_kind_that_it_excludes() -> None:
    gates = [
        {"gate": "auc_over_logistic", "margin": 0.0, "unless": "logistic"},
        {"gate": "weights_only", "margin": 0.0, "unless": ""},
    ]
    assert list(verdicts(kind="logistic", gates=gates)) == ["weights_only"]
    assert list(verdicts(kind="network", gates=gates)) == ["auc_over_logistic", "weights_only"]


def test_too_few_days_have_no_interval() -> None:
    found = verdicts(scored(days=MINIMUM_DAYS - 1))
    assert found["auc_over_historical_rate"].verdict == "undecided"
    assert f"{MINIMUM_DAYS - 1} days" in found["auc_over_historical_rate"].reason
    assert verdicts(scored(days=MINIMUM_DAYS))["auc_over_historical_rate"].verdict == "pass"


def test_a_segment_that_lost_more_than_its_allowance_fails_by_name() -> None:
    rows = scored(rows=1_200, skill={"champion": 2.0})
    hit = np.asarray(rows.segments["carrier"] == "UA")
    worse = np.where(hit, rows.scores["historical_rate"], rows.scores["candidate"])
    rows = replace(rows, scores={**rows.scores, "candidate": worse})
    found = verdicts(rows, checks(champion="delay@1", stable_contract=contract()))["segments"]
    assert found.verdict == "fail"
    assert "carrier=UA" in found.reason
    assert "carrier=AA" not in found.reason
    # The whole may still look better while one segment is not.
    assert len(found.metrics["worse"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("lower", "verdict"), [(-0.02, "pass"), (-0.0201, "fail")])
def test_the_lower_end_of_a_segment_meets_its_allowance(lower: float, verdict: str) -> None:
    measured = evaluation()
    gain = Interval(0.0, lower, 0.05)
    known = measured.segments["carrier"]
    segments = {v: replace(s, gains={**s.gains, "historical_rate": gain}) for v, s in known.items()}
    found = verdicts(replace(measured, segments={"carrier": segments}))["segments"]
    assert found.verdict == verdict


def test_a_small_segment_is_unknown_and_listed() -> None:
    rows = scored(rows=300, carriers=("AA", "AA", "AA", "AA", "AA", "HA"))
    assert verdicts(rows)["segments"].verdict == "pass"
    found = verdicts(rows, segments={"carrier": {"minimum": 51, "allowance": 0.02}})["segments"]
    assert found.verdict == "pass"
    assert "carrier=HA (50 rows of 51)" in found.reason
    nothing = verdicts(rows, segments={"carrier": {"minimum": 251, "allowance": 0.02}})["segments"]
    assert nothing.verdict == "undecided"


@pytest.mark.parametrize(
    ("check", "weights", "outputs"),
    [
        (ArtifactCheck(True, True), "pass", "pass"),
        (ArtifactCheck(True, False, ("row 3 scores nan",)), "pass", "fail"),
        (ArtifactCheck(False, False, ("weights.safetensors: other bytes",)), "fail", "fail"),
        (ArtifactCheck(None, None, ("no answer within 600 s",)), "undecided", "undecided"),
    ],
)
def test_what_loading_found_decides_two_gates(check: ArtifactCheck, weights: str, outputs: str) -> None:
    found = verdicts(given=checks(artifact=check))
    assert (found["weights_only"].verdict, found["finite_outputs"].verdict) == (weights, outputs)
    if check.problems:
        assert check.problems[0] in found["finite_outputs"].reason


def test_a_missing_or_breaking_contract_fails() -> None:
    assert verdicts(given=checks(contract=None))["contract"].verdict == "fail"
    narrower = contract({"name": "carrier", "type": "string", "required": True})
    given = checks(contract=narrower, stable_contract=contract(), champion="delay@1")
    found = verdicts(scored(skill={"champion": 1.0}), given)["contract"]
    assert found.verdict == "fail"
    assert "'x' was accepted" in found.reason


def test_one_snapshot_without_a_proof_fails_by_name() -> None:
    good, bad = ProofCheck("sha256:good", "d"), ProofCheck("sha256:bad", "d", "its proof did not pass")
    found = verdicts(given=checks(proofs=(good, bad)))["leakage_proof"]
    assert found.verdict == "fail"
    assert "sha256:bad: its proof did not pass" in found.reason
    assert "sha256:good" not in found.reason
    assert verdicts(given=checks(proofs=()))["leakage_proof"].verdict == "undecided"


def test_a_reason_stays_one_line_of_the_catalog_whatever_it_lists() -> None:
    many = tuple(ProofCheck(f"sha256:{i:064}", "d", "x" * 500) for i in range(400))
    found = verdicts(given=checks(proofs=many))["leakage_proof"]
    assert len(found.reason) < 2_000
    assert "and 394 more" in found.reason


def test_the_evaluation_as_json_holds_every_number_of_the_card() -> None:
    document = evaluation().to_json()
    metrics: Any = document["metrics"]
    assert set(metrics) == {"candidate", "historical_rate", "logistic", "gradient_boosting"}
    assert set(metrics["candidate"]) == {"auc", "log_loss", "calibration_error"}
    assert set(metrics["candidate"]["auc"]) == {"value", "lower", "upper"}
    segments: Any = document["segments"]
    assert set(segments["carrier"]) == {"AA", "UA"}
    assert (document["rows"], document["mature"], document["days"]) == (600, 600, 20)


@pytest.mark.parametrize(
    "gap",
    [
        {"rows": 0},
        {"mature": 0},
        {"positives": 0},
        {"positives": 600},
        {"days": 0},
        {"metrics": {}},
        {"gains": dict.fromkeys(("historical_rate", "logistic", "gradient_boosting"))},
    ],
)
def test_no_gap_in_what_was_measured_lets_a_comparison_pass(gap: dict[str, Any]) -> None:
    found = verdicts(replace(evaluation(), **gap))
    for gate in ("auc_over_historical_rate", "auc_over_logistic", "auc_over_champion"):
        assert found[gate].verdict == "undecided"
        assert found[gate].reason.startswith("no evidence")


_BAD: list[tuple[dict[str, Any], str]] = [
    ({"format": "headway.policy/2"}, "format"),
    ({"gates": []}, "gates"),
    ({"gates": [{"gate": "latency", "margin": 0.0, "unless": ""}]}, "gates.gate"),
    ({"gates": [{"gate": "segments", "unless": ""}]}, "gates"),
    ({"gates": [{"gate": "segments", "margin": None, "unless": ""}]}, "gates.segments.margin"),
    ({"gates": [{"gate": "segments", "margin": True, "unless": ""}]}, "gates.segments.margin"),
    ({"gates": [{"gate": "segments", "margin": float("nan"), "unless": ""}]}, "gates.segments.margin"),
    ({"segments": {"carrier": {"minimum": 50}}}, "segments.carrier"),
    ({"segments": {"carrier": {"minimum": 0, "allowance": 0.0}}}, "segments.carrier.minimum"),
    ({"segments": {"carrier": {"minimum": 50, "allowance": -0.1}}}, "segments.carrier.allowance"),
    ({"historical_rate": []}, "historical_rate"),
    ({"historical_rate": "carrier"}, "historical_rate"),
    ({"historical_rate": [7]}, "historical_rate"),
    ({"historical_rate": [{"column": "carrier"}]}, "historical_rate"),
    ({"historical_rate": [{"column": "minute", "width": 0}]}, "historical_rate"),
    ({"confidence": 1.0}, "confidence"),
    ({"resamples": 0}, "resamples"),
    ({"allow_immediate": 1}, "allow_immediate"),
    ({"evidence_max_age": "soon"}, "evidence_max_age"),
    ({"more": 1}, "document"),
]


@pytest.mark.parametrize(("change", "field"), _BAD)
def test_a_policy_that_leaves_something_open_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(PolicyInvalid, match=field.replace(".", r"\.")):
        parse_policy(policy_json() | change)
