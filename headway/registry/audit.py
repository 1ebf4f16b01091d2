"""Looks back at every promotion: was each signed for its endpoint and epoch, on verdicts that were signed to pass?

The catalog checks the structure of a promotion (invariant I4); signatures are checked here, with public keys.
"""

from collections.abc import Iterator, Mapping

from headway.artifacts.errors import StoreError
from headway.catalog.registry_facts import EndpointEvent, ModelVersion
from headway.registry.dossier import Finding
from headway.registry.dsse import SignatureRefused
from headway.registry.keys import Trust
from headway.registry.statements import GATE_VERDICT, Signed, open_promotion, open_statement
from headway.services import Services


def audit_promotions(services: Services, trust: Trust) -> list[Finding]:
    """Return one finding per promotion of every endpoint, in order; `problem` is "" where all its signatures verify.

    A key that was revoked since answers for nothing: what it promoted is a problem, most of all while it serves.
    """
    found: list[Finding] = []
    for endpoint in services.catalog.endpoints(services.principal):
        for event in services.catalog.endpoint_events(services.principal, endpoint.endpoint_id):
            if event.operation == "promote":
                problems = list(_problems(services, trust, event))
                name = f"{endpoint.endpoint_id} epoch {event.epoch}: {endpoint.model_id}@{event.row.stable}"
                found.append(Finding(name, "; ".join(problems)))
    return found


def _problems(services: Services, trust: Trust, event: EndpointEvent) -> Iterator[str]:
    if event.evidence is None or event.row.stable is None:
        yield "it names no evidence"
        return
    version = services.catalog.model_version(services.principal, event.row.model_id, event.row.stable)
    envelopes, missing = _envelopes(services, version)
    yield from missing
    signed = envelopes.get(event.evidence.promotion_statement)
    if signed is None:
        yield "the promotion is unsigned"
    else:
        try:
            open_promotion(
                signed, trust, version.manifest_digest, event.endpoint_id, event.epoch, event.evidence.statements
            )
        except SignatureRefused as error:
            yield f"promotion: {error.message}"
    for gate, statement in event.evidence.statements.items():
        problem = _gate(envelopes.get(statement), trust, version, gate)
        if problem:
            yield f"{gate}: {problem}"


def _gate(signed: Signed | None, trust: Trust, version: ModelVersion, gate: str) -> str:
    if signed is None:
        return "its verdict is unsigned"
    try:
        found = open_statement(signed, trust, "gate", GATE_VERDICT, version.manifest_digest)
    except SignatureRefused as error:
        return error.message
    wanted = {"gate": gate, "verdict": "pass", "model": version.model_id, "version": version.version}
    said = {name: found.predicate.get(name) for name in wanted}
    return "" if said == wanted else f"its statement says {said}"


def _envelopes(services: Services, version: ModelVersion) -> tuple[Mapping[str, Signed], list[str]]:
    found: dict[str, Signed] = {}
    missing: list[str] = []
    for attestation in services.catalog.attestations(services.principal, version.manifest_digest):
        try:
            data = services.store.get_bytes(attestation.envelope_digest)
        except StoreError as error:
            missing.append(str(error))
            continue
        found[attestation.statement_digest] = Signed(data, attestation.created_at)
    return found, missing
