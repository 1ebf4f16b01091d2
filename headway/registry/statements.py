"""The statements that the registry signs and reads: provenance, gate verdicts, promotions, rollbacks.

Each carries `signed_at`, microseconds UTC. Codes with which a statement that verifies is refused for what it says:
`no_time`, `from_the_future`, `wrong_version`, `wrong_gate`, `wrong_policy`, `wrong_contract`, `wrong_endpoint`,
`wrong_epoch`, `wrong_evidence`; `unsigned` where there is no statement at all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.artifacts.digests import Json
from headway.artifacts.store import Blob
from headway.catalog.registry_facts import Attestation, AttestationFacts
from headway.registry.dsse import (
    ENVELOPE_MEDIA_TYPE,
    Envelope,
    SignatureRefused,
    Statement,
    payload_of,
    sign,
    statement,
    verify,
)
from headway.registry.keys import KeyRing, Role, Trust
from headway.services import Services

GATE_VERDICT = "urn:headway:gate-verdict:1"
PROMOTION = "urn:headway:promotion:1"
ROLLBACK = "urn:headway:rollback:1"
PROVENANCE = "https://slsa.dev/provenance/v1"
CLOCK_SKEW_US = 60_000_000


@dataclass(frozen=True)
class Signed:
    """An envelope, and when the catalog recorded it; None away from the catalog."""

    envelope: bytes
    recorded_at: int | None = None


@dataclass(frozen=True)
class Judged:
    """What a gate statement has to speak of."""

    model_id: str
    version: int
    kind: str
    manifest_digest: str
    contract_hash: str
    policy_version: int
    policy_digest: str


def sign_now(
    keyring: KeyRing, role: Role, name: str, subject: str, kind: str, predicate: Mapping[str, Json]
) -> Envelope:
    """Return a statement about the artifact `name`, signed by the role's current key and dated now."""
    # The key first: one that is made on this occasion is not valid for any earlier time.
    key = keyring.private_key(role)
    return sign(statement(name, subject, kind, {**predicate, "signed_at": keyring.clock()}), key)


def record(
    services: Services, envelope: Envelope, subject: str, kind: str, role: Role, blobs: tuple[Blob, ...] = ()
) -> Attestation:
    """Store an envelope with what it rests on, and enter its statement in the catalog. A repeat changes nothing."""
    stored = services.store.put_bytes(envelope.data, ENVELOPE_MEDIA_TYPE)
    facts = AttestationFacts(
        statement_digest=envelope.statement_digest,
        subject_digest=subject,
        predicate_type=kind,
        key_id=envelope.key_id,
        role=role,
        envelope_digest=stored.digest,
        blobs=(stored, *blobs),
    )
    return services.catalog.add_attestation(services.principal, None, facts)


def open_statement(signed: Signed, trust: Trust, role: Role, kind: str, subject: str) -> Statement:
    """Return the statement of a signed envelope; its key held `role` when it signed and when it was recorded.

    Raises:
        SignatureRefused: with the reason code.
    """
    # The time is read before the signature is checked, and believed only once the signature covers it.
    claimed = _claimed_time(signed.envelope)
    found = verify(signed.envelope, trust, role, claimed, predicate_type=kind, subject=subject)
    if signed.recorded_at is not None:
        verify(signed.envelope, trust, role, signed.recorded_at, predicate_type=kind, subject=subject)
        if claimed > signed.recorded_at + CLOCK_SKEW_US:
            raise SignatureRefused(
                "from_the_future", f"it was recorded at {signed.recorded_at} and says that it was signed at {claimed}"
            )
    return found


def open_gate(signed: Signed, trust: Trust, gate: str, judged: Judged) -> Statement:
    """Return the statement of gate `gate` about a version, whatever its verdict.

    Raises:
        SignatureRefused: with the reason code; a statement about another version, gate, contract or policy too.
    """
    found = open_statement(signed, trust, "gate", GATE_VERDICT, judged.manifest_digest)
    expected: tuple[tuple[str, str, Json], ...] = (
        ("wrong_version", "model", judged.model_id),
        ("wrong_version", "version", judged.version),
        ("wrong_version", "kind", judged.kind),
        ("wrong_gate", "gate", gate),
        ("wrong_contract", "contract_hash", judged.contract_hash),
        ("wrong_policy", "policy_version", judged.policy_version),
        ("wrong_policy", "policy_digest", judged.policy_digest),
    )
    _require(found, expected)
    return found


def open_provenance(signed: Signed, trust: Trust, manifest_digest: str) -> Statement:
    """Return the trainer's statement of where the artifact comes from. Raises as `open_statement`."""
    return open_statement(signed, trust, "trainer", PROVENANCE, manifest_digest)


def open_promotion(
    signed: Signed, trust: Trust, manifest_digest: str, endpoint_id: str, epoch: int, gates: Mapping[str, str]
) -> Statement:
    """Return the promoter's statement that the artifact became stable on this endpoint at this epoch.

    Raises:
        SignatureRefused: also when it was made for another endpoint, epoch or set of gate statements.
    """
    found = open_statement(signed, trust, "promoter", PROMOTION, manifest_digest)
    expected: tuple[tuple[str, str, Json], ...] = (
        ("wrong_endpoint", "endpoint", endpoint_id),
        ("wrong_epoch", "epoch", epoch),
        ("wrong_evidence", "gates", dict(gates)),
    )
    _require(found, expected)
    return found


def open_rollback(
    signed: Signed, trust: Trust, manifest_digest: str, endpoint_id: str, epoch: int, version: int
) -> Statement:
    """Return the promoter's statement that the endpoint returned to this version at this epoch.

    Raises:
        SignatureRefused: also when it was made for another endpoint, epoch or version.
    """
    found = open_statement(signed, trust, "promoter", ROLLBACK, manifest_digest)
    expected: tuple[tuple[str, str, Json], ...] = (
        ("wrong_endpoint", "endpoint", endpoint_id),
        ("wrong_epoch", "epoch", epoch),
        ("wrong_version", "to", version),
    )
    _require(found, expected)
    return found


def find_rollback(
    signed: Iterable[Signed], trust: Trust, manifest_digest: str, endpoint_id: str, epoch: int, version: int
) -> Signed:
    """Return the one of a version's signed rollbacks that is about this endpoint and epoch.

    There may be others: of earlier epochs, and one that was signed and then overtaken by another move.

    Raises:
        SignatureRefused: none verifies; `unsigned` when there is none at all, else the reason of the last one.
    """
    refused = SignatureRefused("unsigned", "there is none")
    for candidate in signed:
        try:
            open_rollback(candidate, trust, manifest_digest, endpoint_id, epoch, version)
        except SignatureRefused as error:
            refused = error
        else:
            return candidate
    raise refused


def signed_at(found: Statement) -> int:
    """When the statement says that it was signed, microseconds UTC."""
    moment = found.predicate.get("signed_at")
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise SignatureRefused("no_time", "it does not say when it was signed")
    return moment


def _require(found: Statement, expected: tuple[tuple[str, str, Json], ...]) -> None:
    for code, field, value in expected:
        said = found.predicate.get(field)
        if said != value or isinstance(said, bool) != isinstance(value, bool):
            raise SignatureRefused(code, f"its {field} is {said!r:.200}, expected {value!r:.200}")


def _claimed_time(envelope: bytes) -> int:
    predicate = payload_of(envelope).get("predicate")
    moment = predicate.get("signed_at") if isinstance(predicate, Mapping) else None
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise SignatureRefused("no_time", "it does not say when it was signed")
    return moment
