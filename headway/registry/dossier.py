"""All that is to be believed about a version, in one place, and the check that believes none of it.

A dossier comes from the catalog and the store (`collect_dossier`) or from an exported bundle (`registry/bundle.py`).
Checking it takes public keys and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.artifacts.digests import Json, digest_json
from headway.artifacts.manifest import InvalidManifest, Manifest, parse_manifest, stored_file_problem
from headway.artifacts.store import LocalStore
from headway.catalog.registry_facts import EndpointEvent, GatePolicy, GateResult, ModelVersion
from headway.registry.dsse import SignatureRefused, Statement
from headway.registry.keys import Trust
from headway.registry.policy import Policy, PolicyInvalid, parse_policy
from headway.registry.statements import (
    PROVENANCE,
    Judged,
    Signed,
    open_gate,
    open_promotion,
    open_provenance,
)
from headway.services import Services


@dataclass(frozen=True)
class Promoted:
    """The claim that a version became stable on an endpoint at an epoch, on these gate statements."""

    endpoint_id: str
    epoch: int
    gates: Mapping[str, str]
    signed: Signed


@dataclass(frozen=True)
class Dossier:
    """What is claimed about a version. `gates` holds the newest statement of each gate of the policy."""

    model_id: str
    version: int
    kind: str
    manifest_digest: str
    manifest: bytes
    contract: Mapping[str, Json]
    policy_version: int
    policy: Json
    gates: Mapping[str, Signed]
    provenance: Signed | None
    promotions: tuple[Promoted, ...]

    @property
    def judged(self) -> Judged:
        """What each gate statement has to speak of."""
        return Judged(
            self.model_id,
            self.version,
            self.kind,
            self.manifest_digest,
            digest_json(self.contract),
            self.policy_version,
            digest_json(self.policy),
        )


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: `problem` is "" when it holds."""

    subject: str
    problem: str = ""


@dataclass(frozen=True)
class Checked:
    """A dossier's findings, its read policy and manifest, and the gate statements that verify, by gate."""

    findings: tuple[Finding, ...]
    policy: Policy | None
    manifest: Manifest | None
    statements: Mapping[str, Statement]
    unpassed: Mapping[str, str]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What does not hold."""
        return tuple(finding for finding in self.findings if finding.problem)


def collect_dossier(services: Services, version: ModelVersion) -> Dossier:
    """Return what the catalog and the store hold about a version, unchecked.

    Raises:
        StoreError: the manifest or an envelope is not in the store, or not with these bytes.
    """
    catalog, principal, store = services.catalog, services.principal, services.store
    policy = catalog.gate_policy(principal, version.model_id)
    envelopes = {
        a.statement_digest: Signed(store.get_bytes(a.envelope_digest), a.created_at)
        for a in catalog.attestations(principal, version.manifest_digest)
    }
    kinds = {a.statement_digest: a.predicate_type for a in catalog.attestations(principal, version.manifest_digest)}
    provenances = [s for s, kind in kinds.items() if kind == PROVENANCE]
    return Dossier(
        model_id=version.model_id,
        version=version.version,
        kind=version.kind,
        manifest_digest=version.manifest_digest,
        manifest=store.get_bytes(version.manifest_digest),
        contract=version.contract,
        policy_version=0 if policy is None else policy.version,
        policy=None if policy is None else policy.policy,
        gates=_gates(policy, version.kind, newest_results(services, version), envelopes),
        provenance=envelopes[provenances[-1]] if provenances else None,
        promotions=_promotions(services, version, envelopes),
    )


def newest_results(services: Services, version: ModelVersion) -> dict[str, GateResult]:
    """Return the newest result of each gate that ever judged a version."""
    found: dict[str, GateResult] = {}
    for result in services.catalog.gate_results(services.principal, version.model_id, version.version):
        if result.gate not in found or result.attempt > found[result.gate].attempt:
            found[result.gate] = result
    return found


def check_dossier(dossier: Dossier, trust: Trust) -> Checked:
    """Check manifest, policy and every statement of a dossier with public keys alone; files are checked elsewhere."""
    findings: list[Finding] = []
    manifest = _manifest(dossier, findings)
    policy = _policy(dossier, findings)
    statements: dict[str, Statement] = {}
    unpassed: dict[str, str] = {}
    for gate in () if policy is None else policy.applicable(dossier.kind):
        found = _gate(dossier, trust, gate.name, findings)
        if found is not None:
            statements[gate.name] = found
            if found.predicate.get("verdict") != "pass":
                unpassed[gate.name] = f"{found.predicate.get('verdict')}: {found.predicate.get('reason')}"
    _provenance(dossier, trust, findings)
    for promoted in dossier.promotions:
        _promotion(dossier, trust, promoted, findings)
    return Checked(tuple(findings), policy, manifest, statements, unpassed)


def stored_files(store: LocalStore, manifest: Manifest) -> list[Finding]:
    """Read every file of a manifest in the store and compare size and digest."""
    return [Finding(f"file {entry.name}", stored_file_problem(store, entry)) for entry in manifest.entries]


def _gates(
    policy: GatePolicy | None, kind: str, newest: Mapping[str, GateResult], envelopes: Mapping[str, Signed]
) -> dict[str, Signed]:
    found: dict[str, Signed] = {}
    for gate in () if policy is None else policy.gates(kind):
        result = newest.get(gate)
        if result is not None and result.statement_digest in envelopes:
            found[gate] = Signed(envelopes[result.statement_digest].envelope, result.at)
    return found


def _promotions(services: Services, version: ModelVersion, envelopes: Mapping[str, Signed]) -> tuple[Promoted, ...]:
    found: list[Promoted] = []
    for endpoint in services.catalog.endpoints(services.principal):
        if endpoint.model_id == version.model_id and endpoint.stable == version.version:
            event = promotion_event(services, endpoint.endpoint_id, version.version, endpoint.epoch)
            if event is not None and event.evidence is not None:
                signed = envelopes.get(event.evidence.promotion_statement, Signed(b"", event.at))
                found.append(Promoted(endpoint.endpoint_id, event.epoch, event.evidence.statements, signed))
    return tuple(found)


def promotion_event(services: Services, endpoint_id: str, version: int, epoch: int) -> EndpointEvent | None:
    """Return the event by which a version last became stable by promotion, not by rollback, at `epoch` or before."""
    events = services.catalog.endpoint_events(services.principal, endpoint_id)
    promotions = [e for e in events if e.operation == "promote" and e.row.stable == version and e.epoch <= epoch]
    return max(promotions, key=lambda event: event.epoch, default=None)


def _manifest(dossier: Dossier, findings: list[Finding]) -> Manifest | None:
    try:
        manifest = parse_manifest(dossier.manifest)
    except InvalidManifest as error:
        findings.append(Finding("manifest", str(error)))
        return None
    if manifest.digest != dossier.manifest_digest:
        findings.append(Finding("manifest", f"it is {manifest.digest}, expected {dossier.manifest_digest}"))
        return None
    kind = manifest.facts.get("kind")
    findings.append(
        Finding("manifest", "" if kind == dossier.kind else f"it is of kind {kind!r}, not {dossier.kind!r}")
    )
    return manifest


def _policy(dossier: Dossier, findings: list[Finding]) -> Policy | None:
    if dossier.policy is None:
        findings.append(Finding("policy", "no policy is in force, so nothing can be complete"))
        return None
    try:
        return parse_policy(dossier.policy)
    except PolicyInvalid as error:
        findings.append(Finding("policy", str(error)))
        return None


def _gate(dossier: Dossier, trust: Trust, gate: str, findings: list[Finding]) -> Statement | None:
    subject = f"gate {gate}"
    if gate not in dossier.gates:
        findings.append(Finding(subject, "it has no signed verdict"))
        return None
    try:
        found = open_gate(dossier.gates[gate], trust, gate, dossier.judged)
    except SignatureRefused as error:
        findings.append(Finding(subject, error.message))
        return None
    findings.append(Finding(subject))
    return found


def _provenance(dossier: Dossier, trust: Trust, findings: list[Finding]) -> None:
    if dossier.provenance is None:
        findings.append(Finding("provenance", "the trainer signed no statement of where the artifact comes from"))
        return
    try:
        open_provenance(dossier.provenance, trust, dossier.manifest_digest)
    except SignatureRefused as error:
        findings.append(Finding("provenance", error.message))
        return
    findings.append(Finding("provenance"))


def _promotion(dossier: Dossier, trust: Trust, promoted: Promoted, findings: list[Finding]) -> None:
    subject = f"promotion to {promoted.endpoint_id} at epoch {promoted.epoch}"
    try:
        open_promotion(
            promoted.signed, trust, dossier.manifest_digest, promoted.endpoint_id, promoted.epoch, promoted.gates
        )
    except SignatureRefused as error:
        findings.append(Finding(subject, error.message))
        return
    findings.append(Finding(subject))
