"""What the keys of a home have signed, and so what a revoked one takes with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import HeadwayError
from headway.registry.dossier import promotion_event
from headway.registry.keys import PublicKey, Trust
from headway.services import Services

_DIGITS = 8


class UnclearKey(HeadwayError):
    """A text that names no key, or more than one."""


@dataclass(frozen=True)
class KeyUse:
    """Statements by one key: how many, about which versions, and which endpoints serve by its word.

    `versions` and `endpoints` are names such as `flight_delay@3`; an endpoint counts when the promotion of its stable
    version is by this key.
    """

    statements: int
    versions: tuple[str, ...]
    endpoints: tuple[str, ...]


NO_USE = KeyUse(0, (), ())


def key_uses(services: Services) -> Mapping[str, KeyUse]:
    """Return what each key signed by the catalog's attestations, by key id."""
    catalog, principal = services.catalog, services.principal
    statements: dict[str, str] = {}
    versions: dict[str, list[str]] = {}
    for version in catalog.model_versions(principal):
        for attestation in catalog.attestations(principal, version.manifest_digest):
            statements[attestation.statement_digest] = attestation.key_id
            versions.setdefault(attestation.key_id, []).append(f"{version.model_id}@{version.version}")
    endpoints: dict[str, list[str]] = {}
    for endpoint in catalog.endpoints(principal):
        stable = endpoint.stable
        event = None if stable is None else promotion_event(services, endpoint.endpoint_id, stable, endpoint.epoch)
        if event is not None and event.evidence is not None:
            key_id = statements.get(event.evidence.promotion_statement, "")
            endpoints.setdefault(key_id, []).append(endpoint.endpoint_id)
    return {
        key_id: KeyUse(len(names), tuple(dict.fromkeys(names)), tuple(endpoints.get(key_id, ())))
        for key_id, names in versions.items()
    }


def find_key(trust: Trust, reference: str) -> PublicKey:
    """Return the key that an id, or its first eight or more digits, names.

    Raises:
        UnclearKey: it names none, or several.
    """
    digits = reference.removeprefix("sha256:")
    found = [k for i, k in trust.keys.items() if len(digits) >= _DIGITS and i.startswith(f"sha256:{digits}")]
    if len(found) != 1:
        what = f"names {len(found)} keys" if found else "names no key of this home"
        raise UnclearKey(f"{reference!r:.80} {what}", f"give an id of `headway keys list`, at least {_DIGITS} digits")
    return found[0]
