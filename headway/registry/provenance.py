"""The trainer's word on where an artifact comes from: SLSA provenance v1 (slsa.dev/spec/v1.0/provenance)."""

from headway.artifacts.digests import Json
from headway.artifacts.errors import StoreError
from headway.catalog.clock import utc_text
from headway.catalog.registry_facts import Attestation, ModelVersion
from headway.catalog.run_facts import TrainingRun
from headway.errors import HeadwayError
from headway.registry.dsse import SignatureRefused
from headway.registry.keys import KeyRing
from headway.registry.statements import PROVENANCE, Signed, open_provenance, record, sign_now
from headway.services import Services

BUILD_TYPE = "urn:headway:training-run:1"
BUILDER = "urn:headway:trainer:1"


class OtherRun(HeadwayError):
    """A run that did not make the version."""


def sign_provenance(services: Services, keyring: KeyRing, version: ModelVersion, run: TrainingRun) -> Attestation:
    """Sign with the trainer key what the version was made from (SLSA provenance v1); signed already: return that one.

    Raises:
        OtherRun: the run did not make the version.
    """
    if run.run_id != version.run_id:
        name = f"{version.model_id}@{version.version}"
        raise OtherRun(f"{name} comes from run {version.run_id}, not {run.run_id}", "name its own run")
    for known in services.catalog.attestations(services.principal, version.manifest_digest):
        if known.predicate_type == PROVENANCE and _provenance_holds(services, keyring, known):
            return known
    predicate: dict[str, Json] = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": _parameters(run),
            "resolvedDependencies": _dependencies(run),
        },
        "runDetails": {
            "builder": {"id": BUILDER},
            "metadata": {
                "invocationId": run.run_id,
                "startedOn": utc_text(run.created_at),
                "finishedOn": None if run.last.ended_at is None else utc_text(run.last.ended_at),
            },
        },
    }
    name = f"{version.model_id}@{version.version}"
    envelope = sign_now(keyring, "trainer", name, version.manifest_digest, PROVENANCE, predicate)
    return record(services, envelope, version.manifest_digest, PROVENANCE, "trainer")


def _provenance_holds(services: Services, keyring: KeyRing, known: Attestation) -> bool:
    try:
        signed = Signed(services.store.get_bytes(known.envelope_digest), known.created_at)
        open_provenance(signed, keyring.trust(), known.subject_digest)
    except (StoreError, SignatureRefused):
        return False
    return True


def _parameters(run: TrainingRun) -> dict[str, Json]:
    facts = run.facts
    return {
        "pipeline": facts.pipeline,
        "partition": facts.partition,
        "config_digest": facts.config_digest,
        "spec_digest": facts.spec_digest,
        "seed": facts.seed,
        "repeat": facts.repeat,
        "layout": facts.layout,
        "nodes": facts.nodes,
        "code_dirty": facts.code_dirty,
    }


def _dependencies(run: TrainingRun) -> list[Json]:
    facts = run.facts
    named = [("urn:headway:feature-snapshot", digest) for digest in facts.inputs]
    named += [(f"urn:headway:dataset-version:{name}@{version}", digest) for name, version, digest in facts.datasets]
    named += [("urn:headway:code", facts.code_digest), ("urn:headway:environment", facts.environment_digest)]
    return [{"uri": uri, "digest": {"sha256": digest.removeprefix("sha256:")}} for uri, digest in named]
