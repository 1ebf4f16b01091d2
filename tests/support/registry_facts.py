"""Small, valid facts of runs, model versions and evidence for catalog tests."""

from typing import Any

from support.catalog_facts import ALICE, blob, delivery, digest, evidence, feature_set, snapshot

from headway.artifacts.digests import digest_json
from headway.catalog import Principal
from headway.catalog.catalog import Catalog
from headway.catalog.registry_facts import (
    AttestationFacts,
    GateResultFacts,
    ModelVersion,
    ModelVersionFacts,
    PromotionEvidence,
    Role,
)
from headway.catalog.run_facts import Attempt, RunFacts, RunResult, Submission, TrainingRun

PIPELINE = "flight_delay"
MODEL = "flight_delay"
ENDPOINT = "flight_delay"
BUDGET = "flight_delay"
UNIT = "worker_seconds"
# The month of `Ticker`'s clock.
MONTH = "2013-05"
CONTRACT = {"inputs": [{"name": "carrier", "type": "string"}], "output": {"name": "probability", "type": "float64"}}
POLICY = {
    "gates": [
        {"gate": "auc_over_historical_rate", "margin": 0.02},
        {"gate": "auc_over_logistic", "margin": 0.0, "unless": "logistic"},
        {"gate": "contract"},
    ],
    "allow_immediate": True,
}
GATES = ("auc_over_historical_rate", "auc_over_logistic", "contract")


def prepare_inputs(catalog: Catalog, who: Principal = ALICE) -> str:
    """Make tenant, feature set, a released delivery and its snapshot; return the snapshot's id."""
    catalog.ensure_tenant(who)
    catalog.register_feature_set(who, None, feature_set())
    version = catalog.register_version(who, None, delivery()).version
    catalog.start_validation(who, None, "flights", version, evidence().suite_digest)
    released = catalog.release_version(who, None, "flights", version, evidence())
    return catalog.publish_snapshot(who, None, snapshot((released,))).snapshot_id


def run_facts(snapshot_id: str, seed: int = 7, **changes: Any) -> RunFacts:  # noqa: ANN401
    """A run on one snapshot, without a budget."""
    spec = blob("run spec", seed)
    values: dict[str, Any] = {
        "pipeline": PIPELINE,
        "partition": "2013-07-01",
        "inputs": (snapshot_id,),
        "datasets": (("flights", 1, delivery().content_digest),),
        "code_digest": digest("code tree"),
        "code_dirty": False,
        "environment_digest": digest("environment"),
        "config_digest": digest("config"),
        "spec_digest": spec.digest,
        "seed": seed,
        "repeat": 0,
        "layout": {"engine": "ddp", "nodes": 2, "dp": 2},
        "nodes": 2,
        "budget_id": None,
        "max_attempts": 2,
        "note": "first try",
        "dagster_run_id": None,
        "blobs": (spec,),
    }
    return RunFacts(**values | changes)


def result(name: object = 1) -> RunResult:
    """What a good run leaves: a network and a logistic regression."""
    network, logistic = blob("network manifest", name), blob("logistic manifest", name)
    artifacts = {"network": network.digest, "logistic": logistic.digest}
    return RunResult(artifacts, {"valid_auc": 0.71, "cost": None}, 120, (network, logistic))


def ask(
    catalog: Catalog,
    facts: RunFacts,
    *,
    key: str | None = None,
    who: Principal = ALICE,
    **changes: Any,  # noqa: ANN401
) -> Submission:
    """Ask for a run as a person does, for 100 worker-seconds."""
    values: dict[str, Any] = {"asker": "person", "retry": False, "reserve_seconds": 100, "launcher": "local"}
    return catalog.submit_run(who, key, facts, **values | changes)


def end(
    catalog: Catalog,
    attempt: Attempt,
    state: str = "succeeded",
    *,
    key: str | None = None,
    who: Principal = ALICE,
    **changes: Any,  # noqa: ANN401
) -> TrainingRun:
    """End an attempt: well with a result, or otherwise with the code that belongs to the state."""
    codes = {"succeeded": 0, "failed": 77, "cancelled": 75, "lost": None}
    values: dict[str, Any] = {
        "state": state,
        "reason": f"it {state}",
        "code": codes[state],
        "worker_seconds": 12.5,
        "result": result(attempt.run_id) if state == "succeeded" else None,
    }
    return catalog.finish_attempt(who, key, attempt.run_id, attempt.attempt, attempt.token, **values | changes)


def succeed(catalog: Catalog, facts: RunFacts, who: Principal = ALICE) -> TrainingRun:
    """Run to a good end, unless it came to one before."""
    submission = ask(catalog, facts, who=who)
    return submission.run if submission.attempt is None else end(catalog, submission.attempt, who=who)


def version_facts(run: TrainingRun, kind: str = "network", **changes: Any) -> ModelVersionFacts:  # noqa: ANN401
    """The network or the logistic regression of a succeeded run as a model version."""
    assert run.result is not None
    manifest = run.result.artifacts[kind]
    values: dict[str, Any] = {
        "model_id": MODEL,
        "pipeline": PIPELINE,
        "kind": kind,
        "run_id": run.run_id,
        "manifest_digest": manifest,
        "contract": CONTRACT,
        "contract_hash": digest_json(CONTRACT),
        "feature_set": "delay",
        "feature_set_version": 1,
        "as_of": run.facts.partition,
        "metadata": {"rows": 3},
        "blobs": tuple(item for item in run.result.blobs if item.digest == manifest),
    }
    return ModelVersionFacts(**values | changes)


def statement(subject: str, about: object, role: Role = "gate", **changes: Any) -> AttestationFacts:  # noqa: ANN401
    """A signed statement about a manifest digest."""
    envelope = blob("envelope", subject, about, role)
    values: dict[str, Any] = {
        "statement_digest": digest("statement", subject, about, role),
        "subject_digest": subject,
        "predicate_type": "https://headway/gate/v1",
        "key_id": f"key of {role}",
        "role": role,
        "envelope_digest": envelope.digest,
        "blobs": (envelope,),
    }
    return AttestationFacts(**values | changes)


def judge(
    catalog: Catalog,
    version: ModelVersion,
    gate: str,
    verdict: str = "pass",
    *,
    key: str | None = None,
    who: Principal = ALICE,
    look: object = 1,
    **changes: Any,  # noqa: ANN401
) -> str:
    """Attest and record one gate's result under the policy in force; return the statement's digest."""
    policy = catalog.gate_policy(who, version.model_id)
    assert policy is not None
    subject = version.manifest_digest
    signed = catalog.add_attestation(who, None, statement(subject, (gate, verdict, policy.version, look)))
    values: dict[str, Any] = {
        "model_id": version.model_id,
        "version": version.version,
        "gate": gate,
        "verdict": verdict,
        "reason": f"it is a {verdict}",
        "metrics": {"gain": 0.03},
        "policy_version": policy.version,
        "statement_digest": signed.statement_digest,
        "artifact_digest": subject,
    }
    catalog.record_gate_result(who, key, GateResultFacts(**values | changes))
    return signed.statement_digest


def pass_all(catalog: Catalog, version: ModelVersion, who: Principal = ALICE, look: object = 1) -> PromotionEvidence:
    """Let a version pass every gate that applies, and sign its promotion; return the evidence."""
    policy = catalog.gate_policy(who, version.model_id)
    assert policy is not None
    statements = {gate: judge(catalog, version, gate, who=who, look=look) for gate in policy.gates(version.kind)}
    signed = catalog.add_attestation(who, None, statement(version.manifest_digest, ("promotion", look), "promoter"))
    return PromotionEvidence(policy.version, statements, signed.statement_digest, catalog.clock())


def registered(catalog: Catalog, snapshot_id: str, seed: int = 7, kind: str = "network") -> ModelVersion:
    """A version of a run of its own, with the policy set."""
    version = catalog.register_model_version(
        ALICE, None, version_facts(succeed(catalog, run_facts(snapshot_id, seed)), kind)
    )
    catalog.set_gate_policy(ALICE, None, MODEL, POLICY)
    return version
