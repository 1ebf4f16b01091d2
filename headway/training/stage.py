"""The code that a run executes, kept in the store: edits never reach a run, and an old model finds its own code.

A stored code tree holds `trainer/` and the pipeline's folder as `pipelines/<name>/`, wherever that folder stands.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.artifacts.manifest import Manifest, manifest_entry, put_manifest, read_manifest
from headway.artifacts.store import Blob, LocalStore
from headway.errors import HeadwayError
from trainer.blobs import code_tree_digest, digest_json


class StagedCodeDiffers(HeadwayError):
    """A copy of the code is not the code that the run's identity names."""


@dataclass(frozen=True)
class StoredCode:
    """A code tree in the store: `digest` over paths and bytes, the manifest of its files, and all blobs."""

    digest: str
    manifest_digest: str
    blobs: tuple[Blob, ...]


def store_code(store: LocalStore, root: Path, folder: Path, pipeline: str) -> StoredCode:
    """Store `trainer/` below `root` and the pipeline's folder; storing the same tree again changes nothing."""
    files = {name: store.put_file(path, "text/plain") for name, path in _files(root, folder, pipeline)}
    digest = digest_json({name: blob.digest for name, blob in files.items()})
    manifest = Manifest(tuple(manifest_entry(name, blob) for name, blob in files.items()), {"code_digest": digest})
    stored = put_manifest(store, manifest)
    return StoredCode(digest, stored.digest, (*dict.fromkeys(files.values()), stored))


def stage_code(store: LocalStore, manifest_digest: str, target: Path) -> Path:
    """Put a stored code tree at `target` unless it is there, whole or not at all; return `target`.

    Raises:
        BlobMissing, BlobCorrupt: the store does not hold the tree.
        StagedCodeDiffers: what stands at `target` is another tree.
    """
    manifest = read_manifest(store, manifest_digest)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".code-", dir=target.parent) as scratch:
            fresh = Path(scratch) / "code"
            for entry in manifest.entries:
                file = fresh / entry.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(store.get_bytes(entry.sha256))
            try:
                fresh.rename(target)
            except OSError:
                # Another process staged the same code meanwhile; what it put there is checked below.
                if not target.exists():
                    raise
    parts = sorted(
        {"/".join(e.name.split("/")[: 2 if e.name.startswith("pipelines/") else 1]) for e in manifest.entries}
    )
    found = code_tree_digest(target, parts)
    if found != manifest.facts["code_digest"]:
        raise StagedCodeDiffers(
            f"the code at {target} has digest {found}, the run was planned with {manifest.facts['code_digest']}",
            "it was edited there: remove that folder and ask again",
        )
    return target


def _files(root: Path, folder: Path, pipeline: str) -> Iterator[tuple[str, Path]]:
    """Names in the tree and where their bytes are; hidden files and caches are left out."""
    for start, prefix in ((root / "trainer", "trainer"), (folder, f"pipelines/{pipeline}")):
        for path in sorted(start.rglob("*")):
            inside = path.relative_to(start)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            if path.is_file() and not hidden:
                yield f"{prefix}/{inside.as_posix()}", path
