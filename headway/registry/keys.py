"""Role keys: who may sign what, and when.

A role has Ed25519 keys (RFC 8032), one current at a time. Private keys lie in the ring's folder (0700) in files of
mode 0600; `public.json` beside them lists every key that ever was, with its window of validity: that document alone is
what verifies. Rotation makes a new key and ends the old one's window, so signatures keep their validity for their
time; a revoked key verifies nothing any more, whenever it signed, because its holder can date a statement back.
"""

import base64
import binascii
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from headway.artifacts.digests import Json, canonical_json, digest_bytes
from headway.catalog.clock import Clock, system_clock
from headway.datasets.zones import DAY_US
from headway.errors import HeadwayError
from headway.files import replace_file
from headway.registry.strict_json import JsonRefused, parse_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Role: TypeAlias = Literal["trainer", "gate", "promoter"]

KEYS_FORMAT = "headway.keys/1"
ROLES: tuple[Role, ...] = get_args(Role)
VALIDITY_US = 365 * DAY_US


class KeyUnusable(HeadwayError):
    """A private key that is not there, that others may read, or that is not the key it is named after."""


class KeysRefused(HeadwayError):
    """A document of public keys that cannot be read; the message names what is wrong with which key."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"public keys: {message}", "take the document `keys/public.json` of the signing home unchanged"
        )


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies: `raw` is the 32-byte Ed25519 key, times are microseconds UTC, `not_after` is exclusive."""

    role: Role
    raw: bytes = field(repr=False)
    not_before: int
    not_after: int
    revoked_at: int | None = None

    @property
    def key_id(self) -> str:
        """The digest of the raw public key."""
        return digest_bytes(self.raw)

    def refusal(self, role: Role, at: int) -> tuple[str, str] | None:
        """Why the key cannot answer for `role` at `at`, as reason code and sentence; None when it can."""
        if self.role != role:
            return "wrong_role", f"key {self.key_id} signs as {self.role}, and {role} is asked for"
        if self.revoked_at is not None:
            return "key_revoked", f"key {self.key_id} was revoked"
        if at < self.not_before:
            return "key_not_yet_valid", f"key {self.key_id} is valid from {self.not_before}, the statement is of {at}"
        if at >= self.not_after:
            return "key_expired", f"key {self.key_id} was valid until {self.not_after}, the statement is of {at}"
        return None

    def document(self) -> dict[str, Json]:
        """The key as JSON."""
        return {
            "key_id": self.key_id,
            "role": self.role,
            "public": base64.b64encode(self.raw).decode("ascii"),
            "not_before": self.not_before,
            "not_after": self.not_after,
            "revoked_at": self.revoked_at,
        }


@dataclass(frozen=True)
class Trust:
    """The public keys that a reader accepts, by key id."""

    keys: Mapping[str, PublicKey]

    def document(self) -> dict[str, Json]:
        """The keys as the document that `trust` reads."""
        return {"format": KEYS_FORMAT, "keys": [key.document() for key in self.keys.values()]}


@dataclass(frozen=True)
class SigningKey:
    """A private key and what it stands for."""

    public: PublicKey
    private: "Ed25519PrivateKey" = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `message`."""
        return self.private.sign(message)


def trust(document: Json) -> Trust:
    """Return the keys of a document of public keys.

    Raises:
        KeysRefused: another format or other fields, a key id that is not its key's digest, or one key twice.
    """
    if not isinstance(document, Mapping) or set(document) != {"format", "keys"}:
        raise KeysRefused("expected an object with `format` and `keys`")
    if document["format"] != KEYS_FORMAT:
        raise KeysRefused(f"format {document['format']!r:.60}, this code reads {KEYS_FORMAT!r}")
    entries = document["keys"]
    if not isinstance(entries, list):
        raise KeysRefused("`keys` is no list")
    keys: dict[str, PublicKey] = {}
    for entry in entries:
        key = _public_key(entry)
        if key.key_id in keys:
            raise KeysRefused(f"key {key.key_id} stands twice")
        keys[key.key_id] = key
    return Trust(keys)


def read_trust(path: Path) -> Trust:
    """Return the keys of a file such as `keys/public.json`.

    Raises:
        KeysRefused: the file is not there or is no such document.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KeysRefused(f"{path} cannot be read ({error.strerror})") from error
    try:
        return trust(parse_json(data))
    except JsonRefused as error:
        raise KeysRefused(f"{path}: {error}") from error


class KeyRing:
    """The keys of one home. Safe when several processes start at once: all get one key per role.

    Args:
        folder: where the keys lie, `HEADWAY_HOME/keys`.
        clock: answers microseconds UTC.
    """

    def __init__(self, folder: Path, clock: Clock = system_clock) -> None:
        self.folder = folder
        self.clock = clock

    @property
    def public_path(self) -> Path:
        """The file of public keys."""
        return self.folder / "public.json"

    def private_key(self, role: Role) -> SigningKey:
        """Return the current key of `role`; made on first use, and when the last one's window has ended.

        Raises:
            KeyUnusable: its file is missing, may be read by others, or holds another key.
        """
        with self._locked():
            now = self.clock()
            current = _current(self.trust(), role, now)
            return self._make(role, now) if current is None else self._load(current)

    def rotate(self, role: Role) -> SigningKey:
        """Make a new key of `role` and end the window of those before; what they signed until now stays valid."""
        with self._locked():
            now = self.clock()
            ended = {
                i: replace(k, not_after=min(k.not_after, max(now, k.not_before))) if k.role == role else k
                for i, k in self.trust().keys.items()
            }
            self._write_public(Trust(ended))
            return self._make(role, now)

    def revoke(self, key_id: str) -> None:
        """Take every signature of a key back. Revoked already: nothing changes.

        Raises:
            KeyUnusable: the ring has no such key.
        """
        with self._locked():
            keys = dict(self.trust().keys)
            if key_id not in keys:
                raise KeyUnusable(f"no key {key_id!r:.80} in {self.folder}", f"{self.public_path} lists the keys")
            if keys[key_id].revoked_at is None:
                keys[key_id] = replace(keys[key_id], revoked_at=self.clock())
                self._write_public(Trust(keys))

    def trust(self) -> Trust:
        """Return the public keys; none when nothing was ever signed here."""
        return read_trust(self.public_path) if self.public_path.exists() else Trust({})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(self.folder, 0o700)
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make(self, role: Role, now: int) -> SigningKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        private = Ed25519PrivateKey.generate()
        public = PublicKey(role, private.public_key().public_bytes_raw(), now, now + VALIDITY_US)
        # The private half first: a public key without it would stop every later start.
        replace_file(self._file(public), private.private_bytes_raw(), 0o600)
        self._write_public(Trust({**self.trust().keys, public.key_id: public}))
        return SigningKey(public, private)

    def _load(self, public: PublicKey) -> SigningKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = self._file(public)
        remedy = f"put the file back, or rotate the {public.role} key"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise KeyUnusable(f"private key {path} cannot be read ({error.strerror})", remedy) from error
        with os.fdopen(descriptor, "rb") as source:
            _require_private(path, 0o600)
            raw = source.read()
        if len(raw) != 32:
            raise KeyUnusable(f"private key {path} has {len(raw)} bytes, an Ed25519 key has 32", remedy)
        private = Ed25519PrivateKey.from_private_bytes(raw)
        if private.public_key().public_bytes_raw() != public.raw:
            raise KeyUnusable(f"private key {path} is not the key that it is named after", remedy)
        return SigningKey(public, private)

    def _file(self, public: PublicKey) -> Path:
        return self.folder / f"{public.role}-{public.key_id.removeprefix('sha256:')}.key"

    def _write_public(self, keys: Trust) -> None:
        replace_file(self.public_path, canonical_json(keys.document()), 0o644)


def _current(keys: Trust, role: Role, now: int) -> PublicKey | None:
    usable = [key for key in keys.keys.values() if key.refusal(role, now) is None]
    return max(usable, key=lambda key: (key.not_before, key.key_id), default=None)


def _public_key(entry: Json) -> PublicKey:
    names = {"key_id", "role", "public", "not_before", "not_after", "revoked_at"}
    if not isinstance(entry, Mapping) or set(entry) != names:
        raise KeysRefused(f"entry {entry!r:.120} must have the fields {sorted(names)}")
    role = entry["role"]
    if role not in ROLES:
        raise KeysRefused(f"role {role!r:.40}, roles are {list(ROLES)}")
    begin, end = _time(entry, "not_before"), _time(entry, "not_after")
    revoked_at = None if entry["revoked_at"] is None else _time(entry, "revoked_at")
    key = PublicKey(cast("Role", role), _raw(entry["public"]), begin, end, revoked_at)
    if key.key_id != entry["key_id"]:
        raise KeysRefused(f"key id {entry['key_id']!r:.80} is not the digest of its key, which is {key.key_id}")
    return key


def _time(entry: Mapping[str, Json], name: str) -> int:
    found = entry[name]
    if isinstance(found, bool) or not isinstance(found, int):
        raise KeysRefused(f"key {entry['key_id']!r:.80}: {name} is {found!r:.40}, not whole microseconds UTC")
    return found


def _raw(text: Json) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError) as error:
        raise KeysRefused(f"public key {text!r:.80} is no base64") from error
    if len(raw) != 32:
        raise KeysRefused(f"public key {text!r:.80} has {len(raw)} bytes, an Ed25519 key has 32")
    return raw


def _require_private(path: Path, mode: int) -> None:
    found = stat.S_IMODE(path.stat().st_mode)
    if found & 0o077:
        raise KeyUnusable(f"{path} has mode {found:04o} and may be used by others", f"chmod {mode:o} {path}")
