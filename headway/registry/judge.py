"""Runs the gates of a version and signs what they say.

The order is: copy the artifact out of the store with every digest checked, try it in a process of the trainer, measure
the evaluation, judge, and then, gate by gate, sign, store and record. Judging again on the same facts finds the signed
verdicts that are there, as long as they are young enough to count.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from headway.artifacts.digests import Json, canonical_json
from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.artifacts.store import Blob
from headway.catalog.registry_facts import GatePolicy, GateResult, GateResultFacts, ModelVersion
from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.registry.audit import unrecorded_verdicts
from headway.registry.dossier import newest_results
from headway.registry.dsse import SignatureRefused
from headway.registry.evaluation import SCORES_FILE, Evaluation, ScoredRows, measure, read_scores
from headway.registry.gates import evaluate_gates
from headway.registry.keys import KeyRing
from headway.registry.policy import Policy, parse_policy, policy_document
from headway.registry.promote import stable_version
from headway.registry.statements import (
    GATE_VERDICT,
    Judged,
    Signed,
    open_gate,
    open_statement,
    record,
    sign_now,
    signed_at,
)
from headway.registry.text_evaluation import ScoredDocuments, TextEvaluation, measure_documents, read_documents
from headway.registry.trial import try_stored
from headway.registry.verdicts import ArtifactCheck, Checks, GateVerdict, ProofCheck, Verdict
from headway.services import Services

_PARQUET = "application/vnd.apache.parquet"
_REASON = 2_000


class JudgeRefused(HeadwayError):
    """A version that cannot be judged as asked."""


@dataclass(frozen=True)
class Judgement:
    """What the gates said of a version: recorded results in the policy's order, and the evaluation behind them.

    `report_digest` names the evaluation as JSON in the store; `looks` counts the distinct evaluations of its months.
    """

    results: tuple[GateResult, ...]
    evaluation: Evaluation | TextEvaluation
    policy: GatePolicy
    report_digest: str
    looks: int

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return all(result.verdict == "pass" for result in self.results)


@dataclass(frozen=True)
class _Case:
    """One version under judgement: whatever its gate statements have in common."""

    version: ModelVersion
    policy: GatePolicy
    champion: str | None
    data: Mapping[str, Json]
    blobs: tuple[Blob, ...]

    @property
    def judged(self) -> Judged:
        facts = self.version.facts
        return Judged(
            facts.model_id,
            self.version.version,
            facts.kind,
            facts.manifest_digest,
            facts.contract_hash,
            self.policy.version,
            self.policy.digest,
        )


def set_policy(services: Services, spec: PipelineSpec, model_id: str) -> GatePolicy:
    """Put the declared conditions in force for a model; the same conditions again change nothing.

    Raises:
        JudgeRefused: the pipeline declares no promotion.
        PolicyInvalid: the declaration makes no whole policy.
    """
    if spec.promotion is None or spec.evaluation is None:
        raise JudgeRefused(f"pipeline {spec.name!r} declares no promotion", "declare `evaluation` and `promotion`")
    document = policy_document(spec.promotion, spec.evaluation)
    parse_policy(document)
    return services.catalog.set_gate_policy(services.principal, None, model_id, document)


def champion_of(services: Services, version: ModelVersion, endpoint_id: str | None = None) -> ModelVersion | None:
    """Return the version to beat: the stable one of the endpoint (default: the model's own), if it is another one."""
    stable = stable_version(services, endpoint_id or version.model_id)
    if stable is None or stable.model_id != version.model_id or stable.version == version.version:
        return None
    return stable


def judge_version(
    services: Services,
    keyring: KeyRing,
    spec: PipelineSpec,
    version: ModelVersion,
    folder: Path,
    *,
    snapshots: Sequence[str],
    champion: ModelVersion | None,
    try_artifact: Callable[[Path], ArtifactCheck],
    endpoint_id: str | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Judgement:
    """Run every gate that applies to a version, sign each verdict with the gate key, and record it.

    Args:
        services: catalog and store.
        keyring: holds the gate key.
        spec: the pipeline's declaration; its conditions are put in force first.
        version: the registered version.
        folder: what `trainer.evaluate`, or `trainer.lm_evaluate` of text, wrote about it.
        snapshots: ids of the snapshots that it was evaluated on; those that it was trained on are known.
        champion: the version whose scores stand in the evaluation as `champion` (see `champion_of`), None for none.
        try_artifact: loads and tries the artifact in a folder, such as by `python -m trainer.check`.
        endpoint_id: the endpoint whose stable version is the champion; default: the model's own.
        left_out: partitions of the evaluated month that were refused and are not in it, with the reason.

    Raises:
        JudgeRefused: the champion is another one by now, or the evaluation holds other champions' scores.
        EvaluationRefused: the table of scores is not whole.
    """
    policy = set_policy(services, spec, version.model_id)
    parsed = parse_policy(policy.policy)
    _require_champion(services, version, champion, endpoint_id)
    scored = read_scores(folder, spec) if spec.text is None else read_documents(folder)
    if ("champion" in scored.scores) != (champion is not None):
        raise JudgeRefused(
            f"the evaluation of {_name(version)} {'has' if champion is None else 'lacks'} scores of a champion",
            "evaluate the version again against the endpoint's stable version",
        )
    evaluation = _measure(scored, parsed)
    checks = Checks(
        contract=version.contract,
        artifact=try_stored(services.store, version.manifest_digest, try_artifact),
        proofs=check_proofs(services, version, snapshots),
        stable_contract=None if champion is None else champion.contract,
        champion=None if champion is None else _name(champion),
        champion_report=None if champion is None else evaluation_report(services, champion),
    )
    report = services.store.put_bytes(canonical_json(evaluation.to_json()), "application/json")
    scores = services.store.put_file(folder / SCORES_FILE, _PARQUET)
    _record_left_over(services, keyring, version)
    looks = count_looks(services, version, scored.digest)
    data: dict[str, Json] = {
        "scores_digest": scored.digest,
        "report_digest": report.digest,
        "snapshots": sorted(snapshots),
        "left_out": named_left_out(left_out or {}),
        "looks": looks,
    }
    case = _Case(version, policy, checks.champion, data, (report, scores))
    verdicts = evaluate_gates(parsed, version.kind, evaluation, checks)
    newest = newest_results(services, version)
    results = tuple(_settle(services, keyring, case, parsed, v, newest.get(v.gate)) for v in verdicts)
    return Judgement(results, evaluation, policy, report.digest, looks)


def _measure(scored: ScoredRows | ScoredDocuments, policy: Policy) -> Evaluation | TextEvaluation:
    return measure(scored, policy) if isinstance(scored, ScoredRows) else measure_documents(scored, policy)


def named_left_out(left_out: Mapping[str, str]) -> list[Json]:
    """Left-out partitions as each verdict names them, in order: whoever weighs a verdict sees what it did not see."""
    return [{"partition": partition, "reason": left_out[partition]} for partition in sorted(left_out)]


def check_proofs(services: Services, version: ModelVersion, snapshots: Sequence[str]) -> tuple[ProofCheck, ...]:
    """Check the leakage proof of every snapshot that the version was trained or evaluated on.

    The stored proof must have the digest that the catalog recorded, be the one in the snapshot's manifest, say that it
    passed, and hold no finding.
    """
    run = services.catalog.run(services.principal, version.run_id)
    return tuple(_proof(services, s) for s in dict.fromkeys([*run.facts.inputs, *snapshots]))


def evaluation_report(services: Services, version: ModelVersion) -> Mapping[str, Json] | None:
    """Return the evaluation by which a version was last judged, as JSON; None when it never was."""
    results = sorted(newest_results(services, version).values(), key=lambda result: result.at)
    digests = [d for r in results if isinstance(d := r.metrics.get("report_digest"), str)]
    if not digests:
        return None
    return cast("Mapping[str, Json]", json.loads(services.store.get_bytes(digests[-1])))


def count_looks(services: Services, version: ModelVersion, scores_digest: str) -> int:
    """Return how many distinct evaluations the months after this `as_of` were used for in the pipeline, this included.

    Every look at test months wears them out: the count stands in each verdict, for people to weigh.
    """
    seen = {scores_digest}
    for other in services.catalog.model_versions(services.principal):
        if (other.facts.pipeline, other.facts.as_of) == (version.facts.pipeline, version.facts.as_of):
            results = services.catalog.gate_results(services.principal, other.model_id, other.version)
            seen |= {str(r.metrics["scores_digest"]) for r in results if "scores_digest" in r.metrics}
    return len(seen)


def _require_champion(
    services: Services, version: ModelVersion, champion: ModelVersion | None, endpoint_id: str | None
) -> None:
    now = champion_of(services, version, endpoint_id)
    if (None if now is None else now.version) != (None if champion is None else champion.version):
        names = ["no version" if v is None else _name(v) for v in (champion, now)]
        raise JudgeRefused(
            f"{_name(version)} was evaluated against {names[0]}, and {names[1]} is stable now",
            "evaluate it again against the stable version",
        )


def _record_left_over(services: Services, keyring: KeyRing, version: ModelVersion) -> None:
    """Record the results of verdicts that were signed before a judgement was cut off; newer ones follow them."""
    for attestation in unrecorded_verdicts(services, version):
        signed = Signed(services.store.get_bytes(attestation.envelope_digest), attestation.created_at)
        try:
            said = open_statement(signed, keyring.trust(), "gate", GATE_VERDICT, version.manifest_digest).predicate
        except SignatureRefused:
            continue  # It proves nothing, and `headway fsck` names it.
        if (said.get("model"), said.get("version")) == (version.model_id, version.version):
            services.catalog.record_gate_result(
                services.principal,
                None,
                GateResultFacts(
                    model_id=version.model_id,
                    version=version.version,
                    gate=str(said["gate"]),
                    verdict=cast("Verdict", said["verdict"]),
                    reason=str(said["reason"]),
                    metrics=cast("Mapping[str, Json]", said["metrics"]),
                    policy_version=cast("int", said["policy_version"]),
                    statement_digest=attestation.statement_digest,
                    artifact_digest=version.manifest_digest,
                ),
            )


def _settle(
    services: Services, keyring: KeyRing, case: _Case, policy: Policy, verdict: GateVerdict, known: GateResult | None
) -> GateResult:
    """The recorded result of a verdict: the one that says the same and still counts, else a new one, signed."""
    metrics: dict[str, Json] = {**verdict.metrics, **case.data}
    reason = verdict.reason[:_REASON]
    says_so = known is not None and (known.verdict, known.reason, known.metrics) == (verdict.verdict, reason, metrics)
    if known is not None and says_so and _counts(services, keyring, case, policy, known):
        return known
    facts = case.version.facts
    predicate: dict[str, Json] = {
        "gate": verdict.gate,
        "verdict": verdict.verdict,
        "reason": reason,
        "model": facts.model_id,
        "version": case.version.version,
        "kind": facts.kind,
        "contract_hash": facts.contract_hash,
        "policy_version": case.policy.version,
        "policy_digest": case.policy.digest,
        "champion": case.champion,
        "metrics": metrics,
        "run_id": facts.run_id,
    }
    envelope = sign_now(keyring, "gate", _name(case.version), facts.manifest_digest, GATE_VERDICT, predicate)
    record(services, envelope, facts.manifest_digest, GATE_VERDICT, "gate", case.blobs)
    return services.catalog.record_gate_result(
        services.principal,
        None,
        GateResultFacts(
            model_id=facts.model_id,
            version=case.version.version,
            gate=verdict.gate,
            verdict=verdict.verdict,
            reason=reason,
            metrics=metrics,
            policy_version=case.policy.version,
            statement_digest=envelope.statement_digest,
            artifact_digest=facts.manifest_digest,
        ),
    )


def _counts(services: Services, keyring: KeyRing, case: _Case, policy: Policy, known: GateResult) -> bool:
    """Whether a recorded statement verifies, speaks of this champion, and has half of its life before it."""
    listed = services.catalog.attestations(services.principal, case.version.manifest_digest)
    envelopes = {a.statement_digest: a.envelope_digest for a in listed}
    try:
        signed = Signed(services.store.get_bytes(envelopes[known.statement_digest]), known.at)
        found = open_gate(signed, keyring.trust(), known.gate, case.judged)
    except (KeyError, StoreError, SignatureRefused):
        return False
    young = keyring.clock() - signed_at(found) <= policy.evidence_max_age // 2
    return young and found.predicate.get("champion") == case.champion


def _proof(services: Services, snapshot_id: str) -> ProofCheck:
    snapshot = services.catalog.snapshot(services.principal, snapshot_id)
    recorded = snapshot.facts.proof_digest
    try:
        listed = read_manifest(services.store, snapshot.manifest_digest).entry("proof.json").sha256
        report: object = json.loads(services.store.get_bytes(recorded))
    except (StoreError, InvalidManifest, ValueError) as error:
        return ProofCheck(snapshot_id, recorded, f"its proof cannot be read: {error}")
    if listed != recorded:
        return ProofCheck(snapshot_id, recorded, f"its manifest holds proof {listed}, the catalog recorded {recorded}")
    passed = cast("dict[str, object]", report) if isinstance(report, dict) else {}
    if passed.get("passed") is not True or passed.get("findings") != []:
        return ProofCheck(snapshot_id, recorded, "its proof did not pass")
    return ProofCheck(snapshot_id, recorded)


def _name(version: ModelVersion) -> str:
    return f"{version.model_id}@{version.version}"
