"""Field reports on evidence, thresholds and signed manifests, each tried as it was reported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.registry_cases import Ring, checks, contract, evaluation, scored, verdicts

from headway.artifacts.digests import canonical_json, digest_bytes
from headway.registry.bundle import verify_bundle
from headway.registry.dsse import sign, statement
from headway.registry.evaluation import ScoredRows
from headway.registry.statements import PROVENANCE

MEASURED = ("auc_over_historical_rate", "auc_over_logistic", "auc_over_champion", "segments")
NONE = np.array([], dtype=np.float64)


def _nothing(rows: int) -> ScoredRows:
    empty = dict.fromkeys(("candidate", "historical_rate", "logistic", "champion"), NONE)
    return (
        scored(
            rows=0,
            **{"labels": NONE, "day": NONE.astype(np.int64), "scores": empty, "digest": "sha256:" + "0" * 64},
        )
        if rows == 0
        else replace(_nothing(0), rows=rows)
    )


def _one_class(label: float) -> ScoredRows:
    rows = scored(skill={"champion": 1.0})
    return replace(rows, labels=np.full(len(rows.labels), label))


def _champion_nan() -> ScoredRows:
    rows = scored(skill={"champion": 1.0})
    return replace(rows, scores={**rows.scores, "champion": np.full(rows.rows, np.nan)})


_WITH_CHAMPION = checks(champion="delay@1", stable_contract=contract())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param(_nothing(0), "0 rows", id="no rows"),
        pytest.param(_nothing(70), "none has a mature label", id="no mature label"),
        pytest.param(_one_class(0.0), "all 600 mature labels are 0", id="only zeros"),
        pytest.param(_one_class(1.0), "all 600 mature labels are 1", id="only ones"),
    ],
)
def test_field_F01_an_evaluation_of_nothing_passes_no_gate(rows: ScoredRows, said: str) -> None:
    found = verdicts(rows, _WITH_CHAMPION)
    for gate in MEASURED[:3]:
        assert found[gate].verdict == "undecided"
        assert found[gate].reason.startswith("no evidence")
        assert said in found[gate].reason
    assert found["segments"].verdict == "undecided"


def test_field_F01_a_champion_without_a_metric_is_no_opponent() -> None:
    found = verdicts(_champion_nan(), _WITH_CHAMPION)
    for gate in ("auc_over_champion", "segments"):
        assert found[gate].verdict == "undecided"
        assert "no evidence" in found[gate].reason
    assert "600 of its scores are no number" in found["auc_over_champion"].reason
    assert found["auc_over_logistic"].verdict == "pass"


def test_field_F01_a_segment_that_has_no_rows_now_is_no_evidence() -> None:
    before = evaluation(scored(carriers=("AA", "UA", "HA"))).to_json()
    now = scored(skill={"champion": 1.0})
    given = replace(_WITH_CHAMPION, champion_report=before)
    found = verdicts(now, given)["segments"]
    assert found.verdict == "undecided"
    assert "carrier=HA (0 rows, the champion was judged on 200)" in found.reason


def test_field_F01_a_segment_too_small_to_judge_the_champion_on_is_not_missed() -> None:
    before = evaluation(scored(rows=147, carriers=("AA", "UA", "HA"))).to_json()
    given = replace(_WITH_CHAMPION, champion_report=before)
    assert verdicts(scored(skill={"champion": 1.0}), given)["segments"].verdict == "pass"


def test_field_F01_a_segment_with_rows_of_one_class_is_no_evidence() -> None:
    rows = scored(skill={"champion": 1.0})
    labels = np.where(rows.segments["carrier"] == "UA", 0.0, rows.labels)
    found = verdicts(replace(rows, labels=labels), _WITH_CHAMPION)["segments"]
    assert found.verdict == "undecided"
    assert "carrier=UA (0 of 300 rows positive" in found.reason


@pytest.mark.parametrize(("gain", "verdict"), [(-0.1, "fail"), (0.0, "fail"), (0.1, "pass")])
def test_field_F03_zero_is_a_threshold(gain: float, verdict: str) -> None:
    measured = evaluation()
    known = measured.gains["logistic"]
    assert known is not None
    same = replace(measured, gains={**measured.gains, "logistic": replace(known, value=gain, lower=gain, upper=gain)})
    gates = [{"gate": "auc_over_logistic", "margin": 0.0, "unless": ""}]
    found = verdicts(same, gates=gates)["auc_over_logistic"]
    assert found.verdict == verdict
    assert found.metrics["margin"] == 0.0


def test_field_F03_an_allowance_of_zero_is_an_allowance() -> None:
    rows = scored(skill={"champion": 3.0})
    rows = replace(rows, scores={**rows.scores, "champion": rows.scores["candidate"]})
    segments = {"carrier": {"minimum": 1, "allowance": 0.0}}
    assert verdicts(rows, _WITH_CHAMPION, segments=segments)["segments"].verdict == "pass"
    better = rows.scores["candidate"] + 0.2 * rows.labels
    rows = replace(rows, scores={**rows.scores, "champion": better})
    assert verdicts(rows, _WITH_CHAMPION, segments=segments)["segments"].verdict == "fail"


def test_field_F03_a_declared_segment_that_is_not_evaluated_fails_by_name() -> None:
    rows = replace(scored(skill={"champion": 1.0}), segments={})
    found = verdicts(rows, _WITH_CHAMPION)["segments"]
    assert found.verdict == "fail"
    assert "carrier" in found.reason
    # Also when the policy dropped it and only the champion was judged on it.
    before = evaluation(scored()).to_json()
    given = replace(_WITH_CHAMPION, champion_report=before)
    assert verdicts(rows, given, segments={})["segments"].verdict == "fail"


def test_field_F03_a_metric_that_only_the_champion_has_fails_by_name() -> None:
    before: Any = evaluation().to_json()
    before["metrics"]["candidate"]["brier"] = {"value": 0.1, "lower": None, "upper": None}
    given = replace(_WITH_CHAMPION, champion_report=before)
    found = verdicts(scored(skill={"champion": 1.0}), given)["auc_over_champion"]
    assert found.verdict == "fail"
    assert "brier" in found.reason


def test_field_F03_a_candidate_without_scores_where_the_champion_has_them_fails() -> None:
    rows = scored(skill={"champion": 1.0})
    scores = np.where(rows.segments["carrier"] == "UA", np.nan, rows.scores["candidate"])
    rows = replace(rows, scores={**rows.scores, "candidate": scores})
    found = verdicts(rows, _WITH_CHAMPION)
    assert found["auc_over_champion"].verdict == "fail"
    assert "300 of its scores" in found["auc_over_champion"].reason
    assert found["segments"].verdict == "fail"
    assert "carrier=UA (the candidate has no AUC there)" in found["segments"].reason


def _entry(name: str, content: bytes = b"x") -> dict[str, Any]:
    return {
        "name": name,
        "size": len(content),
        "sha256": digest_bytes(content),
        "media_type": "application/octet-stream",
    }


_HOSTILE: dict[str, list[dict[str, Any]]] = {
    "../secret.txt": [_entry("../secret.txt")],
    "/etc/hostname": [_entry("/etc/hostname")],
    "a/../../x": [_entry("a/../../x")],
    "a//b": [_entry("a//b")],
    "a": [_entry("A"), _entry("a")],
    "a\\nb": [_entry("a\nb")],
    "twice": [_entry("twice", b"x"), _entry("twice", b"y")],
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_field_F05_a_signed_manifest_with_a_hostile_name_opens_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(tmp_path / "keys")
    entries = sorted(_HOSTILE[name], key=lambda e: e["name"])
    manifest = canonical_json({"format": "headway.manifest/1", "facts": {"kind": "network"}, "entries": entries})
    subject = digest_bytes(manifest)
    claim = statement("delay@1", subject, PROVENANCE, {"signed_at": ring.clock.now})
    folder = tmp_path / "bundle"
    (folder / "statements").mkdir(parents=True)
    (folder / "files").mkdir()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "statements" / "provenance.json").write_bytes(sign(claim, ring.keys.private_key("trainer")).data)
    (tmp_path / "secret.txt").write_bytes(b"x")
    described = {
        "format": "headway.bundle/1",
        "model": "delay",
        "version": 1,
        "kind": "network",
        "manifest_digest": subject,
        "contract": contract(),
        "policy_version": 1,
        "policy": None,
        "gates": [],
        "promotions": [],
    }
    (folder / "bundle.json").write_bytes(canonical_json(described))
    opened: list[str] = []
    monkeypatch.setattr("headway.registry.bundle._hashed", lambda path: opened.append(str(path)))
    _, checked, files = verify_bundle(folder, ring.keys.trust())
    # The signature is good: what is refused is the name.
    assert "provenance" not in {finding.subject for finding in checked.problems}
    refusal = {finding.subject: finding.problem for finding in checked.problems}["manifest"]
    assert name in refusal
    assert (opened, files) == ([], ())
