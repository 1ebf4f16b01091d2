"""Moves an endpoint to a version, on evidence only, and back."""

from dataclasses import dataclass

from headway.artifacts.digests import Json
from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.catalog.registry_facts import Endpoint, EndpointEvent, ModelVersion, PromotionEvidence
from headway.errors import HeadwayError
from headway.registry.dossier import promotion_event, stored_files
from headway.registry.dsse import SignatureRefused
from headway.registry.evidence import collect_evidence
from headway.registry.keys import KeyRing, Trust
from headway.registry.statements import PROMOTION, ROLLBACK, Signed, find_rollback, open_promotion, record, sign_now
from headway.services import Services


class NotPromoted(HeadwayError):
    """What an endpoint serves was not put there by a promotion whose statement verifies."""


class RollbackRefused(HeadwayError):
    """The version before is not whole any more, so nothing can return to it."""


def promote(services: Services, keyring: KeyRing, endpoint_id: str, model_id: str, version: int) -> Endpoint:
    """Make a version the endpoint's stable one, at once; stable already, by a promotion that verifies: nothing changes.

    Stable already by a promotion that does not verify any more (its key was revoked): it is promoted
    anew, at the next epoch and on present evidence; the previous version stays the previous one.

    The promoter's statement names endpoint, epoch and gate statements, so it promotes here, once, and nowhere else.

    Raises:
        EvidenceMissing: a gate has no passing, fresh, verifying statement, or the artifact differs from its manifest.
        PromotionRefused: the policy does not allow a rollout at once, or what the catalog holds differs by now.
        EndpointMoved: another move came in between.
        StoreError: the store lacks a statement.
    """
    catalog, principal = services.catalog, services.principal
    candidate = catalog.model_version(principal, model_id, version)
    endpoint = catalog.endpoint(principal, endpoint_id)
    if endpoint is not None and endpoint.model_id == model_id and endpoint.stable == version:
        try:
            verify_served(services, keyring.trust(), endpoint)
        except NotPromoted:
            pass  # The reason does not matter: a new promotion takes this one's place, or is refused by name.
        else:
            return endpoint
    stable = stable_version(services, endpoint_id)
    evidence = collect_evidence(services, keyring.trust(), candidate, keyring.clock(), stable)
    epoch = 0 if endpoint is None else endpoint.epoch
    envelope = sign_now(
        keyring,
        "promoter",
        f"{model_id}@{version}",
        candidate.manifest_digest,
        PROMOTION,
        {
            "endpoint": endpoint_id,
            "epoch": epoch + 1,
            "model": model_id,
            "version": version,
            "gates": dict(evidence.statements),
            "policy_version": evidence.policy_version,
            "policy_digest": evidence.policy_digest,
        },
    )
    record(services, envelope, candidate.manifest_digest, PROMOTION, "promoter")
    return catalog.promote_immediate(
        principal,
        None,
        endpoint_id,
        model_id,
        version,
        expected_epoch=epoch,
        evidence=PromotionEvidence(
            evidence.policy_version, evidence.statements, envelope.statement_digest, evidence.verified_at
        ),
    )


def rollback(
    services: Services, keyring: KeyRing, endpoint_id: str, reason: str, expected_epoch: int | None = None
) -> Endpoint:
    """Swap the endpoint's stable and previous versions. The same rollback right after itself changes nothing.

    The promoter signs it for this endpoint and epoch, so that a server follows it without the catalog's word alone.

    Args:
        services: the catalog and store.
        keyring: signs; the promotion of the previous version must verify with its public keys.
        endpoint_id: the endpoint.
        reason: kept with the move.
        expected_epoch: the endpoint's epoch; None: the present one.

    Raises:
        UnknownEndpoint: there is no such endpoint.
        NothingToRollBack: there is no previous version; nothing changes.
        RollbackRefused: its files or its own promotion do not verify; nothing changes.
        KeyUnusable: the promoter's key cannot be used; nothing changes.
        EndpointMoved: the endpoint is not at `expected_epoch` any more.
    """
    catalog, principal = services.catalog, services.principal
    endpoint = catalog.endpoint(principal, endpoint_id)
    events = catalog.endpoint_events(principal, endpoint_id)
    if endpoint is not None and _repeats(events[-1], endpoint, reason, expected_epoch):
        return endpoint
    if endpoint is not None and endpoint.previous is not None and expected_epoch in (None, endpoint.epoch):
        version = _require_whole(services, keyring.trust(), endpoint, endpoint.previous)
        expected_epoch = endpoint.epoch
        _sign_rollback(services, keyring, endpoint, version, reason)
    return catalog.rollback(principal, None, endpoint_id, expected_epoch=expected_epoch, reason=reason)


def _sign_rollback(
    services: Services, keyring: KeyRing, endpoint: Endpoint, version: ModelVersion, reason: str
) -> None:
    predicate: dict[str, Json] = {
        "endpoint": endpoint.endpoint_id,
        "epoch": endpoint.epoch + 1,
        "model": endpoint.model_id,
        "from": endpoint.stable,
        "to": version.version,
        "reason": reason,
    }
    name = f"{version.model_id}@{version.version}"
    envelope = sign_now(keyring, "promoter", name, version.manifest_digest, ROLLBACK, predicate)
    record(services, envelope, version.manifest_digest, ROLLBACK, "promoter")


def _repeats(last: EndpointEvent, endpoint: Endpoint, reason: str, expected_epoch: int | None) -> bool:
    same = (last.epoch, last.operation, last.reason) == (endpoint.epoch, "rollback", reason)
    return same and expected_epoch in (None, last.epoch - 1)


def _require_whole(services: Services, trust: Trust, endpoint: Endpoint, number: int) -> ModelVersion:
    version = services.catalog.model_version(services.principal, endpoint.model_id, number)
    try:
        _verify_promotion(services, trust, endpoint, version)
        manifest = read_manifest(services.store, version.manifest_digest)
        problems = [f"{f.subject}: {f.problem}" for f in stored_files(services.store, manifest) if f.problem]
    except NotPromoted as error:
        problems = [error.message]
    except (StoreError, InvalidManifest) as error:
        problems = [str(error)]
    if problems:
        name = f"{version.model_id}@{number}"
        raise RollbackRefused(
            f"endpoint {endpoint.endpoint_id!r} cannot return to {name} ({'; '.join(problems)}); "
            f"{version.model_id}@{endpoint.stable} stays",
            f"restore its files from a copy, or promote a version: headway promote {name} -e {endpoint.endpoint_id}",
        )
    return version


def stable_version(services: Services, endpoint_id: str) -> ModelVersion | None:
    """Return the version that an endpoint serves; None when there is no endpoint or it serves none."""
    endpoint = services.catalog.endpoint(services.principal, endpoint_id)
    if endpoint is None or endpoint.stable is None:
        return None
    return services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)


@dataclass(frozen=True)
class ServedProof:
    """Why an endpoint serves what it serves: the version's promotion there, and the rollback that returned to it.

    `rollback` is None when the promotion itself is the endpoint's last move. The statements are verified.
    """

    promotion: EndpointEvent
    promoted: Signed
    rollback: EndpointEvent | None
    rolled_back: Signed | None


def verify_served(services: Services, trust: Trust, endpoint: Endpoint) -> EndpointEvent:
    """Return the promotion by which an endpoint's stable version came there, after verifying `prove_served`."""
    return prove_served(services, trust, endpoint).promotion


def prove_served(services: Services, trust: Trust, endpoint: Endpoint) -> ServedProof:
    """Return the verified statements by which an endpoint serves its stable version at its epoch.

    The version's promotion to this endpoint must verify; where the endpoint's last move was a rollback to it, so must
    the statement of that rollback.

    Args:
        services: the catalog and store that hold the statements.
        trust: the public keys that count.
        endpoint: the endpoint as it was read; what happened to it since does not matter.

    Raises:
        NotPromoted: no such promotion or rollback, or its statement does not verify for this endpoint and epoch.
        StoreError: an envelope is not in the store.
    """
    if endpoint.stable is None:
        raise NotPromoted(f"endpoint {endpoint.endpoint_id!r} serves no version", "promote a version")
    served = services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)
    promotion, promoted = _verify_promotion(services, trust, endpoint, served)
    if promotion.epoch == endpoint.epoch:
        return ServedProof(promotion, promoted, None, None)
    events = services.catalog.endpoint_events(services.principal, endpoint.endpoint_id)
    event = next((e for e in events if e.epoch == endpoint.epoch), None)
    if event is None or event.operation != "rollback":
        raise NotPromoted(f"endpoint {endpoint.endpoint_id!r} has no move at epoch {endpoint.epoch}", "read it again")
    return ServedProof(promotion, promoted, event, _verify_rollback(services, trust, event, served))


def _verify_rollback(services: Services, trust: Trust, event: EndpointEvent, version: ModelVersion) -> Signed:
    name, served = event.endpoint_id, f"{version.model_id}@{version.version}"
    # Attested before the move that it is about, so the move's time is no earlier.
    signed = (
        Signed(services.store.get_bytes(a.envelope_digest), a.created_at)
        for a in services.catalog.attestations(services.principal, version.manifest_digest)
        if a.predicate_type == ROLLBACK
    )
    try:
        return find_rollback(signed, trust, version.manifest_digest, name, event.epoch, version.version)
    except SignatureRefused as error:
        raise NotPromoted(
            f"endpoint {name!r} returned to {served} at epoch {event.epoch}, and {error.message}",
            f"promote it anew: headway promote {served} --endpoint {name}",
        ) from error


def _verify_promotion(
    services: Services, trust: Trust, endpoint: Endpoint, version: ModelVersion
) -> tuple[EndpointEvent, Signed]:
    """The last promotion of a version to an endpoint, up to the endpoint's epoch, with its verified statement."""
    name, served = endpoint.endpoint_id, f"{version.model_id}@{version.version}"
    remedy = f"promote it anew: headway promote {served} --endpoint {name}"
    event = promotion_event(services, name, version.version, endpoint.epoch)
    if event is None or event.evidence is None:
        raise NotPromoted(f"{served} was never promoted to endpoint {name!r}", remedy)
    listed = services.catalog.attestations(services.principal, version.manifest_digest)
    envelopes = {a.statement_digest: a for a in listed}
    found = envelopes.get(event.evidence.promotion_statement)
    if found is None:
        raise NotPromoted(f"the promotion of {served} to {name!r} is unsigned", remedy)
    signed = Signed(services.store.get_bytes(found.envelope_digest), event.at)
    try:
        open_promotion(signed, trust, version.manifest_digest, name, event.epoch, event.evidence.statements)
    except SignatureRefused as error:
        raise NotPromoted(f"endpoint {name!r}: {error.message}", remedy) from error
    return event, signed
