"""The gates of language models: bits per byte of held-out documents, against compressors and against the champion.

They follow the rules of `headway.registry.gates`: nothing passes without evidence, and what the champion has and the
candidate lacks fails by name.
"""

from headway.artifacts.digests import Json
from headway.registry.evaluation import CANDIDATE, CHAMPION
from headway.registry.policy import Gate
from headway.registry.text_evaluation import BITS_PER_BYTE, TextEvaluation
from headway.registry.verdicts import Checks, GateVerdict, Verdict, listed, lost_metrics

# With fewer independent documents an interval over them says nothing.
MINIMUM_UNITS = 5
GZIP = "gzip"


def over_gzip(gate: Gate, evaluation: TextEvaluation, checks: Checks) -> GateVerdict:
    """Fewer bits per byte than gzip -9 of each file, at the interval's lower end, and than gzip -9 of all as one."""
    found = _over(gate, evaluation, GZIP, "gzip -9 of each file")
    stream, mine = evaluation.streams.get(GZIP), _bits(evaluation, CANDIDATE)
    if found.verdict == "undecided" or mine is None:
        return found
    if stream is None:
        return GateVerdict(gate.name, "undecided", "no evidence: gzip -9 of all files as one was not measured", {})
    beaten = stream - mine > gate.margin
    verdict: Verdict = "pass" if found.verdict == "pass" and beaten else "fail"
    reason = (
        f"{found.reason}; and {stream:.4f} of gzip -9 of all files as one stream, "
        f"{'beaten' if beaten else 'not beaten'} by more than {gate.margin:.4f}"
    )
    return GateVerdict(gate.name, verdict, reason, {**found.metrics, "stream_bits_per_byte": stream})


def over_champion(gate: Gate, evaluation: TextEvaluation, checks: Checks) -> GateVerdict:
    """Fewer bits per byte than the version that serves now, paired by document; without one, than gzip -9."""
    if checks.champion is None:
        return _over(gate, evaluation, GZIP, "gzip -9 of each file, for want of a champion")
    lost = lost_metrics(evaluation.metrics, checks.champion_report)
    if lost:
        reason = f"the champion {checks.champion} has {listed(lost)}, and the candidate lacks it"
        return GateVerdict(gate.name, "fail", reason, {"lost_metrics": lost})
    return _over(gate, evaluation, CHAMPION, f"the champion {checks.champion}")


def _over(gate: Gate, evaluation: TextEvaluation, reference: str, name: str) -> GateVerdict:
    metrics: dict[str, Json] = {
        "documents": evaluation.documents,
        "units": evaluation.units,
        "bytes": evaluation.size,
        "resamples": evaluation.resamples,
        "confidence": evaluation.confidence,
        "reference": reference,
        "margin": gate.margin,
    }
    missing = _no_evidence(evaluation, reference, name)
    if missing is not None:
        return GateVerdict(gate.name, *missing, metrics)
    mine, other = _bits(evaluation, CANDIDATE), _bits(evaluation, reference)
    gain = evaluation.gains[reference]
    if gain is None or gain.lower is None:
        return GateVerdict(
            gate.name, "undecided", "no evidence: the gain is undefined in too many of the resamples", metrics
        )
    metrics |= {
        "bits_per_byte": mine,
        "reference_bits_per_byte": other,
        "gain": gain.value,
        "lower": gain.lower,
        "upper": gain.upper,
    }
    verdict: Verdict = "pass" if gain.lower > gate.margin else "fail"
    upper = "?" if gain.upper is None else f"{gain.upper:+.4f}"
    reason = (
        f"{mine:.4f} bits per byte against {other:.4f} of {name}: gain {gain.value:+.4f}, {evaluation.confidence:.0%} "
        f"interval [{gain.lower:+.4f}, {upper}]; its lower end must exceed {gate.margin:+.4f}"
    )
    return GateVerdict(gate.name, verdict, reason, metrics)


def _no_evidence(evaluation: TextEvaluation, reference: str, name: str) -> tuple[Verdict, str] | None:
    if evaluation.size == 0:
        return "undecided", f"no evidence: {evaluation.documents} documents of 0 bytes are held out"
    if evaluation.units < MINIMUM_UNITS:
        return "undecided", f"no evidence: {evaluation.units} independent documents, an interval needs {MINIMUM_UNITS}"
    if _bits(evaluation, reference) is None:
        bad = evaluation.not_finite.get(reference)
        why = "it was not measured" if bad is None else f"{bad} of its documents have no number"
        return "undecided", f"no evidence: {name} has no bits per byte ({why})"
    if _bits(evaluation, CANDIDATE) is None:
        bad = evaluation.not_finite.get(CANDIDATE, 0)
        return "fail", f"the candidate has no bits per byte ({bad} documents have no number), and {name} has them"
    return None


def _bits(evaluation: TextEvaluation, coder: str) -> float | None:
    found = evaluation.metrics.get(coder, {}).get(BITS_PER_BYTE)
    return None if found is None else found.value
