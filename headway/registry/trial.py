"""Tries a stored artifact: copied out with every digest checked, then loaded in a process of the trainer."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.artifacts.store import LocalStore
from headway.registry.gates import ArtifactCheck

_ROOT = Path(__file__).resolve().parents[2]
_LONGEST_TRIAL_S = 600


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


def run_trainer_check(folder: Path) -> ArtifactCheck:
    """Load and try an artifact in a process of the trainer. What could not be tried is None, with the reason."""
    arguments = [sys.executable, "-m", "trainer.check", "--artifact", str(folder)]
    try:
        done = subprocess.run(
            arguments, cwd=_ROOT, capture_output=True, text=True, timeout=_LONGEST_TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ArtifactCheck(None, None, (f"trainer.check gave no answer within {_LONGEST_TRIAL_S} s",))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return ArtifactCheck(None, None, (f"trainer.check ended with {done.returncode}: {last[:300]}",))
    return read_artifact_check(done.stdout)


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
