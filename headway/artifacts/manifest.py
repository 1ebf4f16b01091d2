"""Manifests in the store: the set is named by the digest of its canonical JSON (`trainer.blobs.Manifest`)."""

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
]

MANIFEST_MEDIA_TYPE = "application/vnd.headway.manifest+json"


def manifest_entry(name: str, blob: Blob) -> ManifestEntry:
    """Return the entry that lists `blob` under `name`."""
    return ManifestEntry(name=name, size=blob.size, sha256=blob.digest, media_type=blob.media_type)


def put_manifest(store: LocalStore, manifest: Manifest) -> Blob:
    """Store the canonical bytes of `manifest`; the digest of the returned blob is `manifest.digest`."""
    return store.put_bytes(manifest.canonical(), MANIFEST_MEDIA_TYPE)


def read_manifest(store: LocalStore, digest: str) -> Manifest:
    """Return the manifest named `digest`.

    Raises:
        BlobMissing, BlobCorrupt: as `LocalStore.get_bytes`.
        InvalidManifest: the bytes are no manifest, or an entry is refused (named in the message).
    """
    return parse_manifest(store.get_bytes(digest))
