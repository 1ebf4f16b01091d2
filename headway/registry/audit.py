"""Looks back at promotions, rollbacks and verdicts: was each signed, for its place, by a key that still counts?

The catalog checks the structure of a move (invariant I4); signatures are checked here, with public keys.
"""

from collections.abc import Iterable, Mapping

from headway.artifacts.errors import StoreError
from headway.catalog.errors import UnknownModel
from headway.catalog.registry_facts import Attestation, EndpointEvent, ModelVersion
from headway.registry.dossier import Finding, newest_results
from headway.registry.dsse import SignatureRefused
from headway.registry.keys import Trust
from headway.registry.statements import (
    GATE_VERDICT,
    ROLLBACK,
    Signed,
    find_rollback,
    open_promotion,
    open_statement,
)
from headway.services import Services


def audit_moves(services: Services, trust: Trust) -> list[Finding]:
    """Return one finding per move of every endpoint, in order; `problem` is "" where all its signatures verify.

    A key that was revoked since answers for nothing: what it promoted or returned to is a problem, most of all while it
    serves. A signed verdict without a recorded result is a problem of its version.
    """
    found: list[Finding] = []
    for endpoint in services.catalog.endpoints(services.principal):
        for event in services.catalog.endpoint_events(services.principal, endpoint.endpoint_id):
            look, how = (check_promotion, "") if event.operation == "promote" else (check_rollback, " (rollback)")
            problems = [f"{f.subject}: {f.problem}" for f in look(services, trust, event) if f.problem]
            name = f"{endpoint.endpoint_id} epoch {event.epoch}: {endpoint.model_id}@{event.row.stable}{how}"
            found.append(Finding(name, "; ".join(problems)))
    for version in services.catalog.model_versions(services.principal):
        for attestation in unrecorded_verdicts(services, version):
            name = f"{version.model_id}@{version.version}: gate statement {attestation.statement_digest}"
            found.append(Finding(name, "its result is not recorded; judge the version again, which records it"))
    return found


def unrecorded_verdicts(services: Services, version: ModelVersion) -> list[Attestation]:
    """Return the attested gate statements of a version that no gate result names, in the order of attestation."""
    catalog, principal = services.catalog, services.principal
    results = catalog.gate_results(principal, version.model_id, version.version)
    known = {result.statement_digest for result in results}
    return [
        attestation
        for attestation in catalog.attestations(principal, version.manifest_digest)
        if attestation.predicate_type == GATE_VERDICT and attestation.statement_digest not in known
    ]


def check_promotion(services: Services, trust: Trust, event: EndpointEvent) -> list[Finding]:
    """Return one finding for the statement of a promotion, and one for each gate statement that it rests on."""
    if event.evidence is None or event.row.stable is None:
        return [Finding("promotion", "it names no evidence")]
    try:
        version = services.catalog.model_version(services.principal, event.row.model_id, event.row.stable)
    except UnknownModel as error:
        return [Finding("promotion", error.message)]
    envelopes, lost = _envelopes(services, version)
    signed, gates = envelopes.get(event.evidence.promotion_statement), event.evidence.statements
    return [
        *lost,
        Finding("promotion", _promotion(signed, trust, version, event, gates)),
        *(Finding(f"gate {g}", _gate(envelopes.get(s), trust, version, g, "pass")) for g, s in gates.items()),
    ]


def check_rollback(services: Services, trust: Trust, event: EndpointEvent) -> list[Finding]:
    """Return one finding for the statement of a rollback; the promotion that it returned to is a move of its own."""
    if event.row.stable is None:
        return [Finding("rollback", "it returned to no version")]
    try:
        version = services.catalog.model_version(services.principal, event.row.model_id, event.row.stable)
    except UnknownModel as error:
        return [Finding("rollback", error.message)]
    envelopes, lost = _envelopes(services, version, ROLLBACK)
    return [*lost, Finding("rollback", _rollback(envelopes.values(), trust, version, event))]


def check_verdicts(services: Services, trust: Trust, version: ModelVersion) -> list[Finding]:
    """Return one finding per gate that judged a version: whether its newest recorded verdict is a signed one."""
    envelopes, lost = _envelopes(services, version)
    results = newest_results(services, version).values()
    gates = ((r, _gate(envelopes.get(r.statement_digest), trust, version, r.gate, r.verdict)) for r in results)
    return [*lost, *(Finding(f"gate {result.gate}", problem) for result, problem in gates)]


def _promotion(
    signed: Signed | None, trust: Trust, version: ModelVersion, event: EndpointEvent, gates: Mapping[str, str]
) -> str:
    if signed is None:
        return "it is unsigned"
    try:
        open_promotion(signed, trust, version.manifest_digest, event.endpoint_id, event.epoch, gates)
    except SignatureRefused as error:
        return error.message
    return ""


def _rollback(signed: Iterable[Signed], trust: Trust, version: ModelVersion, event: EndpointEvent) -> str:
    try:
        find_rollback(signed, trust, version.manifest_digest, event.endpoint_id, event.epoch, version.version)
    except SignatureRefused as error:
        return error.message
    return ""


def _gate(signed: Signed | None, trust: Trust, version: ModelVersion, gate: str, verdict: str) -> str:
    if signed is None:
        return "its verdict is unsigned"
    try:
        found = open_statement(signed, trust, "gate", GATE_VERDICT, version.manifest_digest)
    except SignatureRefused as error:
        return error.message
    wanted = {"gate": gate, "verdict": verdict, "model": version.model_id, "version": version.version}
    said = {name: found.predicate.get(name) for name in wanted}
    return "" if said == wanted else f"its statement says {said}"


def _envelopes(
    services: Services, version: ModelVersion, kind: str | None = None
) -> tuple[Mapping[str, Signed], list[Finding]]:
    """The readable envelopes about a version (of one kind) by statement digest, and findings of what is lost."""
    found: dict[str, Signed] = {}
    lost: list[Finding] = []
    for attestation in services.catalog.attestations(services.principal, version.manifest_digest):
        if kind not in (None, attestation.predicate_type):
            continue
        try:
            data = services.store.get_bytes(attestation.envelope_digest)
        except StoreError as error:
            lost.append(Finding(f"statement {attestation.statement_digest}", str(error)))
            continue
        found[attestation.statement_digest] = Signed(data, attestation.created_at)
    return found, lost
