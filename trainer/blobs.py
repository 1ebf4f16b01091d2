"""Digests, canonical JSON and manifests: how bytes are named. Standard library only.

A digest is written `sha256:<64 lower-case hex digits>`. A manifest lists named blobs and a few small facts; the digest
of its canonical JSON is the identity of the whole set, and the thing that gets signed.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

MAX_NAME_BYTES = 512
MANIFEST_FORMAT = "headway.manifest/1"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,62}/[a-zA-Z0-9][a-zA-Z0-9.+_-]{0,62}")
_CHUNK = 1 << 20


class BlobError(ValueError):
    """Base of what this module refuses."""


class InvalidDigest(BlobError):
    """A text that is not `sha256:` and 64 lower-case hex digits."""


class NotCanonical(BlobError):
    """A value that has no canonical JSON form: NaN, infinity, a key that is no text, a lone surrogate, another type."""


class MissingCode(BlobError):
    """A part of a code tree that is not there, or a link where code belongs."""


class InvalidManifest(BlobError):
    """A manifest that must not be used; the message names the entry. Raised before anything is opened."""


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_file(path: Path) -> str:
    """Return the digest of the bytes of the file at `path`, read in pieces of 1 MiB."""
    hasher = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            hasher.update(chunk)
    return f"sha256:{hasher.hexdigest()}"


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in `folder` survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_digest(value: str) -> str:
    """Return `value` when it is a digest.

    Raises:
        InvalidDigest: it is anything else (a path, another algorithm, upper case, blanks).
    """
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise InvalidDigest(f"{value!r:.120} is no digest: expected 'sha256:' and 64 lower-case hex digits")
    return value


def canonical_json(value: Json) -> bytes:
    """Return the one UTF-8 encoding of `value`: keys sorted by code point, no blanks, no NaN, tuples as arrays.

    Raises:
        NotCanonical: some part of `value` has no such encoding; the message gives its place.
    """
    _check_json(value, "$")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=dict)
    return text.encode("utf-8")


def digest_json(value: Json) -> str:
    """Return the digest of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def code_tree_digest(root: Path, parts: Sequence[str]) -> str:
    """Return the digest of the files below `parts` of `root`: their paths relative to `root` and their bytes.

    Args:
        root: Folder of the tree.
        parts: Files or folders below it. Hidden names and `__pycache__` are left out, since they change nothing.

    Raises:
        MissingCode: a part is absent, or there is a symbolic link, whose target no digest of the tree would cover.
    """
    files: dict[str, str] = {}
    for part in parts:
        start = root / part
        if not start.exists():
            raise MissingCode(f"{part!r} is not in {root}")
        for path in [start, *sorted(start.rglob("*"))]:
            inside = path.relative_to(root)
            if any(name.startswith(".") or name == "__pycache__" for name in inside.parts):
                continue
            if path.is_symlink():
                raise MissingCode(f"{inside.as_posix()!r} in {root} is a symbolic link; put the file itself there")
            if path.is_file():
                files[inside.as_posix()] = digest_file(path)
    return digest_json(files)


def _check_json(value: object, place: str) -> None:
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise NotCanonical(f"{place}: {value!r} has no JSON form")
    elif isinstance(value, str):
        _check_text(value, place)
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise NotCanonical(f"{place}: key {key!r} is {type(key).__name__}, only text is allowed")
            _check_text(key, place)
            _check_json(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("Sequence[object]", value)):
            _check_json(item, f"{place}[{index}]")
    else:
        raise NotCanonical(f"{place}: a {type(value).__name__} has no JSON form")


def _check_text(value: str, place: str) -> None:
    # A lone surrogate cannot be encoded, so two systems would disagree about its digest.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise NotCanonical(f"{place}: {value!r:.120} holds a lone surrogate") from None


@dataclass(frozen=True)
class ManifestEntry:
    """One named blob: `name` inside the set, `size` in bytes, `sha256` its digest, `media_type` what the bytes are."""

    name: str
    size: int
    sha256: str
    media_type: str = "application/octet-stream"


@dataclass(frozen=True)
class Manifest:
    """A set of named blobs with small facts about it. Entries are kept sorted by name.

    Raises:
        InvalidManifest: a name that leaves the set, a name twice, names that differ only in case, a bad digest or size.
    """

    entries: tuple[ManifestEntry, ...]
    facts: Mapping[str, Json] = field(default_factory=dict[str, "Json"])

    def __post_init__(self) -> None:
        _check_entries(self.entries)
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=lambda entry: entry.name)))

    def canonical(self) -> bytes:
        """Return the canonical JSON of the manifest: the bytes that are stored and signed."""
        return canonical_json(
            {
                "format": MANIFEST_FORMAT,
                "facts": self.facts,
                "entries": [
                    {"name": e.name, "size": e.size, "sha256": e.sha256, "media_type": e.media_type}
                    for e in self.entries
                ],
            }
        )

    @property
    def digest(self) -> str:
        """The identity of the set: the digest of `canonical()`."""
        return digest_bytes(self.canonical())

    def entry(self, name: str) -> ManifestEntry:
        """Return the entry called `name`.

        Raises:
            InvalidManifest: there is none.
        """
        for candidate in self.entries:
            if candidate.name == name:
                return candidate
        raise InvalidManifest(f"no entry {name!r:.120}; there are {[e.name for e in self.entries][:20]}")


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest whose canonical bytes are `data`.

    Raises:
        InvalidManifest: not JSON, other fields than ours, an entry that is refused, or bytes that are not canonical
            (the same content in another spelling would have another digest).
    """
    try:
        raw: object = json.loads(data)
    except ValueError as error:
        raise InvalidManifest(f"not JSON: {error}") from error
    document = _fields(raw, {"format", "facts", "entries"}, "manifest")
    if document["format"] != MANIFEST_FORMAT:
        raise InvalidManifest(f"format {document['format']!r:.60}, this code reads {MANIFEST_FORMAT!r}")
    entries, facts = document["entries"], document["facts"]
    if not isinstance(entries, list) or not isinstance(facts, dict):
        raise InvalidManifest("entries must be a list and facts an object")
    manifest = Manifest(
        entries=tuple(_parse_entry(item) for item in cast("list[object]", entries)),
        facts=cast("dict[str, Json]", facts),
    )
    if manifest.canonical() != data:
        raise InvalidManifest("the bytes are not the canonical form of their own content")
    return manifest


def _parse_entry(raw: object) -> ManifestEntry:
    item = _fields(raw, {"name", "size", "sha256", "media_type"}, "entry")
    name, size, sha256, media_type = item["name"], item["size"], item["sha256"], item["media_type"]
    if not isinstance(name, str) or not isinstance(sha256, str) or not isinstance(media_type, str):
        raise InvalidManifest(f"entry {name!r:.120}: name, sha256 and media_type must be text")
    if not isinstance(size, int) or isinstance(size, bool):
        raise InvalidManifest(f"entry {name!r:.120}: size {size!r:.40} is no whole number")
    return ManifestEntry(name=name, size=size, sha256=sha256, media_type=media_type)


def _fields(raw: object, names: set[str], what: str) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise InvalidManifest(f"{what} {raw!r:.80} is no object")
    document = cast("dict[str, object]", raw)
    if set(document) != names:
        raise InvalidManifest(f"{what} has fields {sorted(document)!r:.200}, expected {sorted(names)}")
    return document


def _check_entries(entries: Iterable[ManifestEntry]) -> None:
    folded: dict[str, str] = {}
    for entry in entries:
        _check_name(entry.name)
        # A case-folding or Unicode-normalising file system would write both names to one file.
        fold = unicodedata.normalize("NFC", entry.name).casefold()
        if fold in folded:
            raise InvalidManifest(f"entries {folded[fold]!r} and {entry.name!r} are one name on some file systems")
        folded[fold] = entry.name
        if not _DIGEST.fullmatch(entry.sha256):
            raise InvalidManifest(f"entry {entry.name!r}: {entry.sha256!r:.120} is no digest")
        if entry.size < 0:
            raise InvalidManifest(f"entry {entry.name!r}: size {entry.size} is negative")
        if not _MEDIA_TYPE.fullmatch(entry.media_type):
            raise InvalidManifest(f"entry {entry.name!r}: {entry.media_type!r:.120} is no media type")


def _check_name(name: str) -> None:
    if not name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise InvalidManifest(f"entry {name!r:.80}: a name has 1 to {MAX_NAME_BYTES} bytes")
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in name):
        raise InvalidManifest(f"entry {name!r:.120}: control, format and surrogate characters are refused")
    if "\\" in name or ":" in name:
        raise InvalidManifest(f"entry {name!r:.120}: backslash and colon are refused")
    for part in name.split("/"):
        if part in ("", ".", "..") or part != part.strip() or part.endswith("."):
            raise InvalidManifest(f"entry {name!r:.120}: part {part!r} would leave or blur the set")
