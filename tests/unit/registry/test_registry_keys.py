"""Role keys: made once, kept private, valid for their window, taken back for good."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.registry_cases import START, Ring

from headway.registry.keys import VALIDITY_US, KeysRefused, KeyUnusable, PublicKey, SigningKey, trust

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "home" / "keys")


def test_a_key_is_made_on_first_use_for_its_owner_alone(ring: Ring) -> None:
    key = ring.keys.private_key("gate")
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    files = list(ring.folder.glob("*.key"))
    assert [stat.S_IMODE(f.stat().st_mode) for f in files] == [0o600]
    assert ring.keys.private_key("gate").public == key.public
    assert ring.keys.private_key("trainer").public.key_id != key.public.key_id
    assert key.public.key_id == f"sha256:{__import__('hashlib').sha256(key.public.raw).hexdigest()}"


def test_the_private_half_is_nowhere_but_in_its_file(ring: Ring) -> None:
    key = ring.keys.private_key("gate")
    secret = key.private.private_bytes_raw()
    assert secret not in ring.keys.public_path.read_bytes()
    assert secret.hex() not in repr(key)
    assert [f for f in ring.folder.iterdir() if secret in f.read_bytes()] == list(ring.folder.glob("*.key"))


def test_a_loose_umask_changes_nothing(ring: Ring) -> None:
    before = os.umask(0)
    try:
        ring.keys.private_key("gate")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(f.stat().st_mode) for f in ring.folder.glob("*.key")} == {0o600}
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700


def test_processes_that_start_at_once_get_one_key(ring: Ring) -> None:
    # Making a key takes long here, so that whoever does not wait for the others makes one too.
    code = (
        "import sys, time; from pathlib import Path; from headway.registry.keys import KeyRing\n"
        "from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey as Private\n"
        "make = Private.generate\n"
        "Private.generate = lambda: (time.sleep(0.5), make())[1]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(KeyRing(Path(sys.argv[1])).private_key('promoter').public.key_id)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(ring.folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(found) == 1
    assert len(list(ring.folder.glob("*.key"))) == 1


def test_what_a_killed_process_left_half_written_is_written_again(ring: Ring) -> None:
    ring.keys.private_key("gate")
    for name in ("public.json.new", *(f"{f.name}.new" for f in ring.folder.glob("*.key"))):
        (ring.folder / name).write_bytes(b"half")
    assert ring.keys.rotate("gate").public.key_id in ring.keys.trust().keys


@pytest.mark.parametrize("what", ["key", "folder"])
def test_a_key_that_others_may_read_is_not_used(ring: Ring, what: str) -> None:
    ring.keys.private_key("gate")
    path = ring.folder if what == "folder" else next(ring.folder.glob("*.key"))
    path.chmod(0o750 if what == "folder" else 0o640)
    with pytest.raises(KeyUnusable, match="chmod"):
        ring.keys.private_key("gate")


def test_a_missing_a_swapped_and_a_linked_private_key_are_refused(ring: Ring) -> None:
    ring.keys.private_key("trainer")
    ring.keys.private_key("gate")
    (gate,), (trainer,) = ring.folder.glob("gate-*.key"), ring.folder.glob("trainer-*.key")
    kept = gate.read_bytes()
    gate.write_bytes(trainer.read_bytes())
    with pytest.raises(KeyUnusable, match="not the key"):
        ring.keys.private_key("gate")
    gate.write_bytes(kept[:31])
    with pytest.raises(KeyUnusable, match="31 bytes"):
        ring.keys.private_key("gate")
    gate.unlink()
    with pytest.raises(KeyUnusable, match="cannot be read"):
        ring.keys.private_key("gate")
    gate.symlink_to(trainer)
    with pytest.raises(KeyUnusable, match="cannot be read"):
        ring.keys.private_key("gate")


def test_rotation_ends_the_old_window_and_starts_a_new_key(ring: Ring) -> None:
    old = ring.keys.private_key("gate").public
    ring.clock.now += 1_000
    new = ring.keys.rotate("gate").public
    assert ring.keys.private_key("gate").public == new
    known = ring.keys.trust().keys[old.key_id]
    assert known.refusal("gate", START + 999) is None
    assert (known.refusal("gate", START + 1_000) or ("",))[0] == "key_expired"
    assert (new.refusal("gate", START + 999) or ("",))[0] == "key_not_yet_valid"


def test_a_key_whose_window_has_ended_is_followed_by_another(ring: Ring) -> None:
    old = ring.keys.private_key("gate").public
    ring.clock.now = START + VALIDITY_US - 1
    assert ring.keys.private_key("gate").public == old
    ring.clock.now += 1
    assert ring.keys.private_key("gate").public.key_id != old.key_id


def test_a_revoked_key_answers_for_no_time_at_all(ring: Ring) -> None:
    old = ring.keys.private_key("gate").public
    ring.clock.now += 10
    ring.keys.revoke(old.key_id)
    known = ring.keys.trust().keys[old.key_id]
    assert (known.refusal("gate", START) or ("",))[0] == "key_revoked"
    at = known.revoked_at
    ring.clock.now += 10
    ring.keys.revoke(old.key_id)
    assert ring.keys.trust().keys[old.key_id].revoked_at == at
    assert ring.keys.private_key("gate").public.key_id != old.key_id
    with pytest.raises(KeyUnusable, match="no key"):
        ring.keys.revoke("sha256:" + "0" * 64)


def test_signatures_are_ed25519_of_rfc_8032() -> None:
    # RFC 8032, section 7.1, test 2.
    private = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    raw = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    assert private.public_key().public_bytes_raw() == raw
    assert SigningKey(PublicKey("gate", raw, 0, 1), private).sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_the_public_document_reads_back(ring: Ring) -> None:
    for role in ("trainer", "gate", "promoter"):
        ring.keys.private_key(role)
    ring.keys.rotate("gate")
    read = ring.keys.trust()
    assert trust(read.document()) == read
    assert sorted(key.role for key in read.keys.values()) == ["gate", "gate", "promoter", "trainer"]


def _damage(entry: dict[str, Any], document: dict[str, Any], how: str) -> None:
    changes: dict[str, Any] = {
        "role": {"role": "admin"},
        "extra": {"more": 1},
        "id": {"key_id": "sha256:" + "0" * 64},
        "short": {"public": "AAAA"},
        "base64": {"public": "*" * 44},
        "time": {"not_after": 1.5},
        "flag": {"not_before": True},
        "revoked": {"revoked_at": "now"},
    }
    if how == "format":
        document["format"] = "other"
    elif how == "twice":
        document["keys"].append(dict(entry))
    elif how == "list":
        document["keys"] = {}
    else:
        entry.update(changes[how])


@pytest.mark.parametrize(
    "how", ["format", "twice", "list", "role", "extra", "id", "short", "base64", "time", "flag", "revoked"]
)
def test_another_document_of_keys_is_refused(ring: Ring, how: str) -> None:
    ring.keys.private_key("gate")
    document = json.loads(ring.keys.public_path.read_text())
    _damage(document["keys"][0], document, how)
    with pytest.raises(KeysRefused):
        trust(document)


def test_a_key_that_stands_twice_in_the_text_is_refused(ring: Ring) -> None:
    ring.keys.private_key("gate")
    text = ring.keys.public_path.read_text().replace('"revoked_at":null', '"revoked_at":null,"revoked_at":null')
    ring.keys.public_path.write_text(text)
    with pytest.raises(KeysRefused, match="stands twice"):
        ring.keys.trust()
