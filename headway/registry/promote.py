"""Moves an endpoint to a version, on evidence only, and back."""

from headway.catalog.registry_facts import Endpoint, EndpointEvent, ModelVersion, PromotionEvidence
from headway.errors import HeadwayError
from headway.registry.dossier import promotion_event
from headway.registry.dsse import SignatureRefused
from headway.registry.evidence import collect_evidence
from headway.registry.keys import KeyRing, Trust
from headway.registry.statements import PROMOTION, Signed, open_promotion, record, sign_now
from headway.services import Services


class NotPromoted(HeadwayError):
    """What an endpoint serves was not put there by a promotion whose statement verifies."""


def promote(services: Services, keyring: KeyRing, endpoint_id: str, model_id: str, version: int) -> Endpoint:
    """Make a version the endpoint's stable one, at once; stable already, by a promotion that verifies: nothing changes.

    The promoter's statement names endpoint, epoch and gate statements, so it promotes here, once, and nowhere else.

    Raises:
        EvidenceMissing: a gate has no passing, fresh, verifying statement, or the artifact differs from its manifest.
        PromotionRefused: the policy does not allow a rollout at once, or what the catalog holds differs by now.
        EndpointMoved: another move came in between.
        NotPromoted: it is stable already, and the promotion that it came by does not verify.
    """
    catalog, principal = services.catalog, services.principal
    candidate = catalog.model_version(principal, model_id, version)
    endpoint = catalog.endpoint(principal, endpoint_id)
    if endpoint is not None and endpoint.model_id == model_id and endpoint.stable == version:
        verify_served(services, keyring.trust(), endpoint)
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


def rollback(services: Services, endpoint_id: str, reason: str, expected_epoch: int | None = None) -> Endpoint:
    """Swap the endpoint's stable and previous versions.

    Raises:
        NothingToRollBack: there is no previous version; nothing changes.
        EndpointMoved: the endpoint is not at `expected_epoch` any more.
    """
    return services.catalog.rollback(
        services.principal, None, endpoint_id, expected_epoch=expected_epoch, reason=reason
    )


def stable_version(services: Services, endpoint_id: str) -> ModelVersion | None:
    """Return the version that an endpoint serves; None when there is no endpoint or it serves none."""
    endpoint = services.catalog.endpoint(services.principal, endpoint_id)
    if endpoint is None or endpoint.stable is None:
        return None
    return services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)


def verify_served(services: Services, trust: Trust, endpoint: Endpoint) -> EndpointEvent:
    """Return the promotion by which an endpoint's stable version came there, after verifying its statement.

    A rollback needs no new statement: it returns to a version that was promoted to this endpoint before.

    Args:
        services: the catalog and store that hold the statement.
        trust: the public keys that count.
        endpoint: the endpoint as it was read; what happened to it since does not matter.

    Raises:
        NotPromoted: no such promotion, or its statement does not verify for this endpoint, epoch and gate set.
        StoreError: the envelope is not in the store.
    """
    name, remedy = endpoint.endpoint_id, "promote another version; after that, this one again"
    if endpoint.stable is None:
        raise NotPromoted(f"endpoint {name!r} serves no version", remedy)
    served = services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)
    event = promotion_event(services, name, served.version, endpoint.epoch)
    if event is None or event.evidence is None:
        raise NotPromoted(f"{served.model_id}@{served.version} was never promoted to endpoint {name!r}", remedy)
    listed = services.catalog.attestations(services.principal, served.manifest_digest)
    envelopes = {a.statement_digest: a for a in listed}
    found = envelopes.get(event.evidence.promotion_statement)
    if found is None:
        raise NotPromoted(f"the promotion of {served.model_id}@{served.version} to {name!r} is unsigned", remedy)
    signed = Signed(services.store.get_bytes(found.envelope_digest), event.at)
    try:
        open_promotion(signed, trust, served.manifest_digest, name, event.epoch, event.evidence.statements)
    except SignatureRefused as error:
        raise NotPromoted(f"endpoint {name!r}: {error.message}", remedy) from error
    return event
