"""Gates: pure judgements of an evaluation and of facts about an artifact. None of them passes without evidence.

A verdict is `pass`, `fail` or `undecided`; only `pass` ever promotes. `undecided` means that nothing was measured: no
row, no mature label, one class, a reference without a value. What the champion has and the candidate lacks is not
"unchanged": it fails, by name.
"""

from collections.abc import Callable, Mapping

from headway.artifacts.digests import Json
from headway.registry.contract import compatibility
from headway.registry.evaluation import CANDIDATE, CHAMPION, HISTORICAL_RATE, Evaluation, Segment
from headway.registry.metrics import Interval
from headway.registry.policy import Gate, Policy, SegmentRule
from headway.registry.text_evaluation import TextEvaluation
from headway.registry.text_gates import over_champion, over_gzip
from headway.registry.verdicts import ArtifactCheck, Checks, GateVerdict, Verdict, listed, lost_metrics

# With fewer days there is no spread between days to speak of: one day alone would have an interval of width 0.
MINIMUM_DAYS = 5


def evaluate_gates(
    policy: Policy, kind: str, evaluation: Evaluation | TextEvaluation, checks: Checks
) -> list[GateVerdict]:
    """Return the verdict of every gate that the policy asks of a version of this kind, in the policy's order."""
    return [_verdict(gate, policy, evaluation, checks) for gate in policy.applicable(kind)]


def _verdict(gate: Gate, policy: Policy, evaluation: Evaluation | TextEvaluation, checks: Checks) -> GateVerdict:
    if gate.name in _OF_ANY:
        return _OF_ANY[gate.name](gate, checks)
    if gate.name in _OF_ROWS and isinstance(evaluation, Evaluation):
        return _OF_ROWS[gate.name](gate, policy, evaluation, checks)
    if gate.name in _OF_TEXT and isinstance(evaluation, TextEvaluation):
        return _OF_TEXT[gate.name](gate, evaluation, checks)
    judged = "rows" if isinstance(evaluation, Evaluation) else "text"
    return GateVerdict(gate.name, "undecided", f"no evidence: it judges no evaluation of {judged}", {})


def _over_historical_rate(gate: Gate, policy: Policy, evaluation: Evaluation, checks: Checks) -> GateVerdict:
    return _over(gate, evaluation, HISTORICAL_RATE, "the historical rate")


def _over_logistic(gate: Gate, policy: Policy, evaluation: Evaluation, checks: Checks) -> GateVerdict:
    return _over(gate, evaluation, "logistic", "logistic regression")


def _over_champion(gate: Gate, policy: Policy, evaluation: Evaluation, checks: Checks) -> GateVerdict:
    if checks.champion is None:
        return _over(gate, evaluation, HISTORICAL_RATE, "the historical rate, for want of a champion")
    lost = lost_metrics(evaluation.metrics, checks.champion_report)
    if lost:
        reason = f"the champion {checks.champion} has {listed(lost)}, and the candidate lacks it"
        return GateVerdict(gate.name, "fail", reason, {"lost_metrics": lost})
    return _over(gate, evaluation, CHAMPION, f"the champion {checks.champion}")


def _over(gate: Gate, evaluation: Evaluation, reference: str, name: str) -> GateVerdict:
    metrics: dict[str, Json] = {**_basis(evaluation), "reference": reference, "margin": gate.margin}
    missing = _no_evidence(evaluation, reference, name)
    if missing is not None:
        return GateVerdict(gate.name, *missing, metrics)
    mine, other = _auc(evaluation, CANDIDATE), _auc(evaluation, reference)
    gain = evaluation.gains[reference]
    if gain is None or gain.lower is None:
        return GateVerdict(
            gate.name, "undecided", "no evidence: the AUC is undefined in too many of the resamples", metrics
        )
    metrics |= {"auc": mine, "reference_auc": other, "gain": gain.value, "lower": gain.lower, "upper": gain.upper}
    verdict: Verdict = "pass" if gain.lower > gate.margin else "fail"
    upper = "?" if gain.upper is None else f"{gain.upper:+.4f}"
    reason = (
        f"AUC {mine:.4f} against {other:.4f} of {name}: gain {gain.value:+.4f}, {evaluation.confidence:.0%} interval "
        f"[{gain.lower:+.4f}, {upper}]; its lower end must exceed {gate.margin:+.4f}"
    )
    return GateVerdict(gate.name, verdict, reason, metrics)


def _no_evidence(evaluation: Evaluation, reference: str, name: str) -> tuple[Verdict, str] | None:
    if evaluation.rows == 0:
        return "undecided", "no evidence: the evaluation has 0 rows"
    if evaluation.mature == 0:
        return "undecided", f"no evidence: of {evaluation.rows} rows none has a mature label"
    if evaluation.positives in (0, evaluation.mature):
        only = int(evaluation.positives > 0)
        return "undecided", f"no evidence: all {evaluation.mature} mature labels are {only}, AUC is undefined"
    if evaluation.days < MINIMUM_DAYS:
        return "undecided", f"no evidence: {evaluation.days} days, an interval by day needs {MINIMUM_DAYS}"
    if _auc(evaluation, reference) is None:
        bad = evaluation.not_finite.get(reference)
        why = "it was not scored" if bad is None else f"{bad} of its scores are no number"
        return "undecided", f"no evidence: {name} has no AUC ({why})"
    if _auc(evaluation, CANDIDATE) is None:
        bad = evaluation.not_finite.get(CANDIDATE, 0)
        return "fail", f"the candidate has no AUC ({bad} of its scores are no number), and {name} has one"
    return None


def _auc(evaluation: Evaluation, model: str) -> float | None:
    found = evaluation.metrics.get(model, {}).get("auc")
    return None if found is None else found.value


def _basis(evaluation: Evaluation) -> dict[str, Json]:
    return {
        "rows": evaluation.rows,
        "mature": evaluation.mature,
        "days": evaluation.days,
        "resamples": evaluation.resamples,
        "confidence": evaluation.confidence,
    }


def _segments(gate: Gate, policy: Policy, evaluation: Evaluation, checks: Checks) -> GateVerdict:
    reference = HISTORICAL_RATE if checks.champion is None else CHAMPION
    name = "the historical rate, for want of a champion" if checks.champion is None else f"champion {checks.champion}"
    lost = _lost_columns(policy, evaluation, checks.champion_report)
    if lost:
        reason = f"segments by {listed(lost)} are declared or were judged for the champion, and are not evaluated"
        return GateVerdict(gate.name, "fail", reason, {"lost_segments": lost})
    looked = [
        _judge_segment(rule, value, segment, reference)
        for rule in policy.segments
        for value, segment in evaluation.segments[rule.column].items()
    ]
    looked += _emptied(policy, evaluation, checks.champion_report)
    by_verdict = {v: [s for s, verdict in looked if verdict == v] for v in ("pass", "fail", "undecided", "unknown")}
    metrics: dict[str, Json] = {
        "reference": reference,
        "judged": len(by_verdict["pass"]) + len(by_verdict["fail"]),
        "worse": by_verdict["fail"],
        "unknown": by_verdict["unknown"],
        "no_evidence": by_verdict["undecided"],
    }
    unknown = by_verdict["unknown"]
    aside = f"; unknown for want of rows: {listed(unknown)}" if unknown else ""
    if by_verdict["fail"]:
        reason = f"worse than {name} by more than the allowance: {listed(by_verdict['fail'])}{aside}"
        return GateVerdict(gate.name, "fail", reason, metrics)
    if by_verdict["undecided"] or not by_verdict["pass"]:
        nothing = listed(by_verdict["undecided"]) or f"no segment has its minimum of rows{aside}"
        return GateVerdict(gate.name, "undecided", f"no evidence: {nothing}", metrics)
    reason = f"{len(by_verdict['pass'])} segments are within their allowance against {name}{aside}"
    return GateVerdict(gate.name, "pass", reason, metrics)


def _judge_segment(rule: SegmentRule, value: str, segment: Segment, reference: str) -> tuple[str, str]:
    """What to call the segment, and its verdict."""
    name = f"{rule.column}={value}"
    if segment.rows < rule.minimum:
        return f"{name} ({segment.rows} rows of {rule.minimum})", "unknown"
    if segment.positives in (0, segment.rows) or segment.days < MINIMUM_DAYS:
        return f"{name} ({segment.positives} of {segment.rows} rows positive, {segment.days} days)", "undecided"
    if segment.auc.get(reference) is None:
        return f"{name} (no AUC of {reference})", "undecided"
    if segment.auc.get(CANDIDATE) is None:
        return f"{name} (the candidate has no AUC there)", "fail"
    gain: Interval | None = segment.gains.get(reference)
    if gain is None or gain.lower is None:
        return f"{name} (AUC undefined in too many resamples)", "undecided"
    label = f"{name} ({gain.value:+.4f}, lower end {gain.lower:+.4f}, allowance {rule.allowance:.4f})"
    return label, "pass" if gain.lower >= -rule.allowance else "fail"


def _lost_columns(policy: Policy, evaluation: Evaluation, report: Mapping[str, Json] | None) -> list[str]:
    wanted = [rule.column for rule in policy.segments]
    before = None if report is None else report.get("segments")
    wanted += list(before) if isinstance(before, Mapping) else []
    return [column for column in dict.fromkeys(wanted) if column not in evaluation.segments]


def _emptied(policy: Policy, evaluation: Evaluation, report: Mapping[str, Json] | None) -> list[tuple[str, str]]:
    """Segments that the champion was judged on and that have no row now."""
    before = None if report is None else report.get("segments")
    found: list[tuple[str, str]] = []
    for rule in policy.segments:
        values = before.get(rule.column) if isinstance(before, Mapping) else None
        for value, segment in values.items() if isinstance(values, Mapping) else ():
            rows = segment.get("rows") if isinstance(segment, Mapping) else None
            if isinstance(rows, int) and rows >= rule.minimum and value not in evaluation.segments[rule.column]:
                found.append((f"{rule.column}={value} (0 rows, the champion was judged on {rows})", "undecided"))
    return found


def _finite_outputs(gate: Gate, checks: Checks) -> GateVerdict:
    good = "outputs are finite on missing and out-of-range inputs"
    return _artifact(gate, checks.artifact, checks.artifact.finite_outputs, good)


def _weights_only(gate: Gate, checks: Checks) -> GateVerdict:
    return _artifact(gate, checks.artifact, checks.artifact.weights_only, "weights load from safetensors alone")


def _artifact(gate: Gate, check: ArtifactCheck, found: bool | None, good: str) -> GateVerdict:
    metrics: dict[str, Json] = {"problems": list(check.problems)}
    said = listed(list(check.problems)) or "no problem was named"
    if found is None:
        return GateVerdict(gate.name, "undecided", f"no evidence: the artifact was not tried ({said})", metrics)
    return GateVerdict(gate.name, "pass" if found else "fail", good if found else said, metrics)


def _contract(gate: Gate, checks: Checks) -> GateVerdict:
    found = compatibility(checks.stable_contract, checks.contract)
    metrics: dict[str, Json] = {"verdict": found.verdict, "problems": list(found.problems)}
    if found.verdict != "compatible":
        return GateVerdict(gate.name, "fail", f"{found.verdict}: {listed(list(found.problems))}", metrics)
    against = "there is no stable version" if checks.champion is None else f"compatible with {checks.champion}"
    return GateVerdict(gate.name, "pass", f"the contract is present; {against}", metrics)


def _leakage_proof(gate: Gate, checks: Checks) -> GateVerdict:
    metrics: dict[str, Json] = {"snapshots": len(checks.proofs)}
    if not checks.proofs:
        return GateVerdict(gate.name, "undecided", "no evidence: no snapshot is named", metrics)
    bad = [f"{proof.snapshot_id}: {proof.problem}" for proof in checks.proofs if proof.problem]
    if bad:
        return GateVerdict(gate.name, "fail", listed(bad), metrics | {"unproved": len(bad)})
    return GateVerdict(gate.name, "pass", f"the proofs of {len(checks.proofs)} snapshots verify and passed", metrics)


_OF_ROWS: Mapping[str, Callable[[Gate, Policy, Evaluation, Checks], GateVerdict]] = {
    "auc_over_historical_rate": _over_historical_rate,
    "auc_over_logistic": _over_logistic,
    "auc_over_champion": _over_champion,
    "segments": _segments,
}
_OF_TEXT: Mapping[str, Callable[[Gate, TextEvaluation, Checks], GateVerdict]] = {
    "bits_per_byte_over_gzip": over_gzip,
    "bits_per_byte_over_champion": over_champion,
}
_OF_ANY: Mapping[str, Callable[[Gate, Checks], GateVerdict]] = {
    "finite_outputs": _finite_outputs,
    "contract": _contract,
    "leakage_proof": _leakage_proof,
    "weights_only": _weights_only,
}
