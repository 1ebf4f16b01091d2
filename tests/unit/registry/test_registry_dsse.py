"""Signed statements: what verifies, and the reason code of everything that does not."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.registry_cases import KIND, START, SUBJECT, Ring

from headway.artifacts.digests import canonical_json, digest_bytes
from headway.registry.dsse import (
    PAYLOAD_TYPE,
    Envelope,
    SignatureRefused,
    Statement,
    pae,
    sign,
    statement,
    verify,
)
from headway.registry.keys import VALIDITY_US, Role, Trust


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    made = Ring(tmp_path_factory.mktemp("keys") / "keys")
    for role in ("trainer", "gate", "promoter"):
        made.keys.private_key(role)
    return made


def _signed(ring: Ring, role: Role = "gate", **predicate: Any) -> Envelope:  # noqa: ANN401
    document = statement("delay@1", SUBJECT, KIND, {"verdict": "pass", **predicate})
    return sign(document, ring.keys.private_key(role))


def _open(data: bytes, keys: Trust, role: Role = "gate", at: int = START, **expected: str) -> Statement:
    wanted = {"predicate_type": KIND, "subject": SUBJECT} | expected
    return verify(data, keys, role, at, **wanted)


def _code(data: bytes, keys: Trust, role: Role = "gate", at: int = START, **expected: str) -> str:
    with pytest.raises(SignatureRefused) as caught:
        _open(data, keys, role, at, **expected)
    return caught.value.code


def test_the_encoding_is_that_of_the_protocol() -> None:
    # The example of DSSE's protocol.md.
    assert (
        pae("http://example.com/HelloWorld", b"hello world")
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    # Lengths count bytes, not characters.
    assert pae("ü", "ü".encode()) == b"DSSEv1 2 \xc3\xbc 2 \xc3\xbc"


def test_a_statement_verifies_and_says_what_was_signed(ring: Ring) -> None:
    envelope = _signed(ring, note="ü")
    found = _open(envelope.data, ring.keys.trust())
    assert found.subject == SUBJECT
    assert found.predicate == {"verdict": "pass", "note": "ü"}
    assert found.digest == envelope.statement_digest
    assert found.key_id == envelope.key_id == ring.keys.private_key("gate").public.key_id
    assert _signed(ring, note="ü") == envelope
    payload = base64.b64decode(json.loads(envelope.data)["payload"])
    assert digest_bytes(payload) == envelope.statement_digest
    assert json.loads(payload)["_type"] == "https://in-toto.io/Statement/v1"


def test_no_bit_of_an_envelope_may_change(ring: Ring) -> None:
    data, keys = _signed(ring).data, ring.keys.trust()
    for place in range(len(data)):
        for bit in (0, 3, 5):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            assert _code(bytes(changed), keys)


@pytest.mark.parametrize(
    ("role", "at", "code"),
    [
        ("promoter", START, "wrong_role"),
        ("trainer", START, "wrong_role"),
        ("gate", START - 1, "key_not_yet_valid"),
        ("gate", START + VALIDITY_US, "key_expired"),
    ],
)
def test_a_key_answers_for_its_role_and_window(ring: Ring, role: Role, at: int, code: str) -> None:
    assert _code(_signed(ring).data, ring.keys.trust(), role, at) == code


def test_an_unknown_and_a_revoked_key_answer_for_nothing(tmp_path: Path) -> None:
    ring, other = Ring(tmp_path / "keys"), Ring(tmp_path / "other")
    envelope = _signed(ring)
    other.keys.private_key("gate")
    assert _code(envelope.data, other.keys.trust()) == "unknown_key"
    ring.keys.revoke(envelope.key_id)
    assert _code(envelope.data, ring.keys.trust()) == "key_revoked"


def test_rotation_leaves_old_statements_valid_for_their_time(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "keys")
    old = _signed(ring)
    ring.clock.now += 5_000
    ring.keys.rotate("gate")
    new = _signed(ring)
    assert _open(old.data, ring.keys.trust(), at=START).digest == old.statement_digest
    assert _code(old.data, ring.keys.trust(), at=START + 5_000) == "key_expired"
    assert _open(new.data, ring.keys.trust(), at=START + 5_000).digest == new.statement_digest


def test_another_subject_or_kind_is_refused(ring: Ring) -> None:
    envelope, keys = _signed(ring), ring.keys.trust()
    assert _code(envelope.data, keys, subject="sha256:" + "ff" * 32) == "wrong_subject"
    assert _code(envelope.data, keys, predicate_type="urn:tests:other:1") == "wrong_predicate"


def _envelope(ring: Ring, change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(_signed(ring).data)
    change(document)
    return canonical_json(document)


_CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "payload type": (lambda d: d.update(payloadType="application/json"), "wrong_payload_type"),
    "no signature": (lambda d: d.update(signatures=[]), "malformed_envelope"),
    "two signatures": (lambda d: d["signatures"].append(d["signatures"][0]), "malformed_envelope"),
    "more fields": (lambda d: d.update(more=1), "malformed_envelope"),
    "no payload": (lambda d: d.pop("payload"), "malformed_envelope"),
    "key id": (lambda d: d["signatures"][0].update(keyid=1), "malformed_envelope"),
    "base64": (lambda d: d.update(payload="@@@@"), "malformed_envelope"),
    "empty signature": (lambda d: d["signatures"][0].update(sig=""), "bad_signature"),
    "other payload": (lambda d: d.update(payload=base64.b64encode(b"{}").decode()), "bad_signature"),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_malformed_envelope_has_its_own_code(ring: Ring, what: str) -> None:
    change, code = _CHANGES[what]
    assert _code(_envelope(ring, lambda d: (change(d), None)[1]), ring.keys.trust()) == code


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "not_json"),
        (b"\xff", "not_json"),
        (b"[]", "malformed_envelope"),
        (b"[" * 100_000, "not_json"),
        (b'{"payloadType": NaN}', "not_json"),
        (b" " * (8 << 20) + b"{}", "too_large"),
    ],
)
def test_what_is_no_envelope_is_refused_without_a_crash(ring: Ring, data: bytes, code: str) -> None:
    assert _code(data, ring.keys.trust()) == code


def test_a_key_that_stands_twice_is_refused_in_envelope_and_statement(ring: Ring) -> None:
    text = _signed(ring).data.decode()
    assert _code(text.replace('{"payload":', '{"payload":"","payload":').encode(), ring.keys.trust()) == "duplicate_key"
    payload = b'{"_type":"https://in-toto.io/Statement/v1","predicate":{"verdict":"fail","verdict":"pass"}}'
    assert _code(_seal(ring, payload), ring.keys.trust()) == "duplicate_key"


def _seal(ring: Ring, payload: bytes) -> bytes:
    """An envelope with a good signature over any payload."""
    key = ring.keys.private_key("gate")
    signature = base64.b64encode(key.sign(pae(PAYLOAD_TYPE, payload))).decode()
    return canonical_json(
        {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [{"keyid": key.public.key_id, "sig": signature}],
        }
    )


def test_one_envelope_has_one_spelling(ring: Ring) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    document = json.loads(_signed(ring).data)
    text = document["signatures"][0]["sig"]
    # 64 bytes leave four bits of the last letter without meaning; decoders read any.
    other = text[:-3] + letters[letters.index(text[-3]) ^ 1] + "=="
    assert base64.b64decode(other) == base64.b64decode(text)
    document["signatures"][0]["sig"] = other
    assert _code(canonical_json(document), ring.keys.trust()) == "malformed_envelope"


_DIGEST = {"sha256": "ab" * 32}


@pytest.mark.parametrize(
    "change",
    [
        {"_type": "https://in-toto.io/Statement/v0.1"},
        {"more": 1},
        {"predicate": []},
        {"predicateType": 1},
        {"subject": []},
        {"subject": [{"name": "a", "digest": _DIGEST}, {"name": "b", "digest": _DIGEST}]},
        {"subject": [{"name": "a", "digest": {"sha1": "ab"}}]},
        {"subject": [{"name": "a", "digest": {**_DIGEST, "sha512": "ab"}}]},
        {"subject": [{"name": "a"}]},
    ],
)
def test_a_well_signed_thing_that_is_no_statement_is_refused(ring: Ring, change: dict[str, Any]) -> None:
    document = statement("delay@1", SUBJECT, KIND, {}) | change
    assert _code(_seal(ring, canonical_json(document)), ring.keys.trust()) == "malformed_statement"
