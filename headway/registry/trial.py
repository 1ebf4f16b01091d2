"""Tries a stored artifact: copied out with every digest checked, then loaded elsewhere; this process knows no torch."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.artifacts.store import LocalStore
from headway.registry.verdicts import ArtifactCheck


def try_stored(store: LocalStore, manifest_digest: str, try_artifact: Callable[[Path], ArtifactCheck]) -> ArtifactCheck:
    """Try a stored artifact from a private copy; one that cannot be copied out whole fails both gates."""
    with tempfile.TemporaryDirectory(prefix="headway-artifact-") as folder:
        try:
            copy_artifact(store, manifest_digest, Path(folder))
        except (StoreError, InvalidManifest) as error:
            return ArtifactCheck(weights_only=False, finite_outputs=False, problems=(str(error),))
        return try_artifact(Path(folder))


def copy_artifact(store: LocalStore, manifest_digest: str, folder: Path) -> None:
    """Write the manifest's files and `manifest.json` below `folder` (0700), each verified and read-only.

    Raises:
        StoreError: a blob is missing or corrupt.
        InvalidManifest: the manifest is refused; nothing is written.
    """
    manifest = read_manifest(store, manifest_digest)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {entry.name: store.get_bytes(entry.sha256) for entry in manifest.entries}
    for name, data in {**files, "manifest.json": manifest.canonical()}.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
        with os.fdopen(descriptor, "wb") as target:
            target.write(data)


def read_artifact_check(text: str) -> ArtifactCheck:
    """Return what `trainer.check` printed; anything but true and false counts as not tried."""
    try:
        found: object = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return ArtifactCheck(None, None, (f"trainer.check printed {text[:120]!r}, which is no answer",))
    answer = cast("dict[str, object]", found)
    problems = answer.get("problems")
    listed = cast("list[object]", problems) if isinstance(problems, list) else []
    weights, outputs = answer.get("weights_only"), answer.get("finite_outputs")
    return ArtifactCheck(
        weights_only=weights if isinstance(weights, bool) else None,
        finite_outputs=outputs if isinstance(outputs, bool) else None,
        problems=tuple(str(problem)[:300] for problem in listed),
    )
