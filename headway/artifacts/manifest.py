"""Manifests in the store: the set is named by the digest of its canonical JSON (`trainer.blobs.Manifest`)."""

from headway.artifacts.digests import InvalidDigest
from headway.artifacts.errors import StoreError
from headway.artifacts.store import Blob, LocalStore
from trainer.blobs import InvalidManifest, Manifest, ManifestEntry, parse_manifest

__all__ = [
    "MANIFEST_MEDIA_TYPE",
    "InvalidManifest",
    "Manifest",
    "ManifestEntry",
    "manifest_entry",
    "parse_manifest",
    "put_manifest",
    "read_manifest",
    "stored_file_problem",
]

MANIFEST_MEDIA_TYPE = "application/vnd.headway.manifest+json"


def manifest_entry(name: str, blob: Blob) -> ManifestEntry:
    """Return the entry that lists `blob` under `name`."""
    return ManifestEntry(name=name, size=blob.size, sha256=blob.digest, media_type=blob.media_type)


def put_manifest(store: LocalStore, manifest: Manifest) -> Blob:
    """Store the canonical bytes of `manifest`; the digest of the returned blob is `manifest.digest`."""
    return store.put_bytes(manifest.canonical(), MANIFEST_MEDIA_TYPE)


def stored_file_problem(store: LocalStore, entry: ManifestEntry) -> str:
    """Read one listed file in the store; return what is wrong with its digest or size, "" when nothing is."""
    try:
        with store.open(entry.sha256) as source:
            found = source.seek(0, 2)
    except (StoreError, InvalidDigest) as error:
        return str(error)
    return "" if found == entry.size else f"it has {found} bytes, the manifest says {entry.size}"


def read_manifest(store: LocalStore, digest: str) -> Manifest:
    """Return the manifest named `digest`.

    Raises:
        BlobMissing, BlobCorrupt: as `LocalStore.get_bytes`.
        InvalidManifest: the bytes are no manifest, or an entry is refused (named in the message).
    """
    return parse_manifest(store.get_bytes(digest))
