"""Signed statements: in-toto Statement v1 in a DSSE envelope, signed with Ed25519.

Sources: the DSSE protocol (secure-systems-lab/dsse, protocol.md: pre-authentication encoding PAE) and in-toto's
Statement v1 (in-toto/attestation, spec/v1/statement.md). The signature covers the type and the very bytes of the
payload: what is read of it before it has verified, such as the time that it claims, is believed only afterwards. An
envelope here carries exactly one signature, and a statement exactly one subject: the manifest of a model.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from headway.artifacts.digests import Json, canonical_json, digest_bytes
from headway.errors import HeadwayError
from headway.registry.keys import PublicKey, Role, SigningKey, Trust
from headway.registry.strict_json import JsonRefused, parse_json

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
ENVELOPE_MEDIA_TYPE = "application/vnd.dsse.envelope.v1+json"


class SignatureRefused(HeadwayError):
    """An envelope that proves nothing here; `code` says why.

    Codes of the envelope: `too_large`, `not_json`, `duplicate_key`, `malformed_envelope`, `wrong_payload_type`,
    `unknown_key`, `wrong_role`, `key_not_yet_valid`, `key_expired`, `key_revoked`, `bad_signature`,
    `malformed_statement`, `wrong_predicate`, `wrong_subject`. Codes of what it says: `registry/statements.py`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"signed statement refused ({code}): {message}", "have it signed again by the role's own key")
        self.code = code


@dataclass(frozen=True)
class Statement:
    """What a verified envelope says: `predicate` about the artifact whose manifest is `subject`."""

    subject: str
    predicate_type: str
    predicate: Mapping[str, Json]
    digest: str
    key_id: str


@dataclass(frozen=True)
class Envelope:
    """A signed statement as stored: its bytes, and the digest of the statement inside."""

    data: bytes
    statement_digest: str
    key_id: str


def statement(name: str, subject: str, predicate_type: str, predicate: Mapping[str, Json]) -> dict[str, Json]:
    """Return an in-toto Statement v1 about the artifact `name` whose manifest digest is `subject`."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": subject.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: the bytes that are signed."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(document: Json, key: SigningKey) -> Envelope:
    """Return the envelope of a statement. The same statement and key give the same bytes."""
    payload = canonical_json(document)
    signature = key.sign(pae(PAYLOAD_TYPE, payload))
    envelope: dict[str, Json] = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode("ascii"),
        "signatures": [{"keyid": key.public.key_id, "sig": base64.b64encode(signature).decode("ascii")}],
    }
    return Envelope(canonical_json(envelope), digest_bytes(payload), key.public.key_id)


def verify(envelope: bytes, trust: Trust, role: Role, at: int, *, predicate_type: str, subject: str) -> Statement:
    """Return the statement of an envelope whose signature verifies with a key that held `role` at `at`.

    Args:
        envelope: the stored bytes.
        trust: the public keys that count.
        role: the role whose word this has to be.
        at: when it was signed or recorded, microseconds UTC.
        predicate_type: the only kind of statement that is accepted.
        subject: the only manifest digest that it may speak of.

    Raises:
        SignatureRefused: with the reason code.
    """
    payload, key_id, signature = _open(envelope)
    key = trust.keys.get(key_id)
    if key is None:
        raise SignatureRefused("unknown_key", f"no trusted key has the id {key_id!r:.80}")
    refusal = key.refusal(role, at)
    if refusal is not None:
        raise SignatureRefused(*refusal)
    _check_signature(key, signature, payload)
    found = _statement(payload, key_id)
    if found.predicate_type != predicate_type:
        raise SignatureRefused("wrong_predicate", f"it is {found.predicate_type!r:.120}, expected {predicate_type!r}")
    if found.subject != subject:
        raise SignatureRefused("wrong_subject", f"it speaks of {found.subject}, expected {subject}")
    return found


def payload_of(envelope: bytes) -> Mapping[str, Json]:
    """Return the payload of an envelope *before* its signature is checked: a claim, to be believed after `verify`.

    Raises:
        SignatureRefused: it is no envelope, or the payload is no object.
    """
    document = _parse(_open(envelope)[0])
    if not isinstance(document, Mapping):
        raise SignatureRefused("malformed_statement", "it is no object")
    return document


def _open(envelope: bytes) -> tuple[bytes, str, bytes]:
    document = _fields(_parse(envelope), {"payloadType", "payload", "signatures"}, "envelope")
    if document["payloadType"] != PAYLOAD_TYPE:
        raise SignatureRefused("wrong_payload_type", f"{document['payloadType']!r:.120}, expected {PAYLOAD_TYPE!r}")
    signatures = document["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise SignatureRefused("malformed_envelope", "expected exactly one signature")
    signature = _fields(signatures[0], {"keyid", "sig"}, "signature")
    key_id = signature["keyid"]
    if not isinstance(key_id, str):
        raise SignatureRefused("malformed_envelope", f"keyid {key_id!r:.80} is no text")
    return _decoded(document["payload"], "payload"), key_id, _decoded(signature["sig"], "sig")


def _check_signature(key: PublicKey, signature: bytes, payload: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, pae(PAYLOAD_TYPE, payload))
    except InvalidSignature:
        raise SignatureRefused("bad_signature", f"it does not verify with key {key.key_id}") from None


def _statement(payload: bytes, key_id: str) -> Statement:
    document = _parse(payload)
    names = {"_type", "subject", "predicateType", "predicate"}
    if not isinstance(document, Mapping) or set(document) != names or document["_type"] != STATEMENT_TYPE:
        raise SignatureRefused("malformed_statement", "it is no in-toto Statement v1")
    predicate, kind = document["predicate"], document["predicateType"]
    if not isinstance(predicate, Mapping) or not isinstance(kind, str):
        raise SignatureRefused("malformed_statement", "predicate must be an object and predicateType a text")
    return Statement(_subject(document["subject"]), kind, predicate, digest_bytes(payload), key_id)


def _subject(subjects: Json) -> str:
    if isinstance(subjects, list) and len(subjects) == 1 and isinstance(subjects[0], Mapping):
        digests = subjects[0].get("digest")
        if isinstance(digests, Mapping) and set(digests) == {"sha256"} and isinstance(digests["sha256"], str):
            return f"sha256:{digests['sha256']}"
    raise SignatureRefused("malformed_statement", "expected exactly one subject with exactly one sha256 digest")


def _parse(data: bytes) -> Json:
    try:
        return parse_json(data)
    except JsonRefused as error:
        raise SignatureRefused(error.code, str(error)) from error


def _fields(value: Json, names: set[str], what: str) -> Mapping[str, Json]:
    if not isinstance(value, Mapping) or set(value) != names:
        raise SignatureRefused("malformed_envelope", f"{what} must have the fields {sorted(names)} and no others")
    return value


def _decoded(text: Json, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        data = None
    # One spelling only: padding bits that decoders ignore would give one envelope many digests.
    if data is None or base64.b64encode(data).decode("ascii") != text:
        raise SignatureRefused("malformed_envelope", f"{what} is no base64")
    return data
