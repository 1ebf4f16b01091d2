"""The copy of the code that a run executes: taken once, so that edits never reach a run that is under way.

It holds `trainer/` and the pipeline's folder as `pipelines/<name>/`, wherever that folder stands.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from headway.errors import HeadwayError
from trainer.blobs import code_tree_digest


class StagedCodeDiffers(HeadwayError):
    """The run's copy of the code is not the code that its identity names."""


def staged_code_digest(root: Path, folder: Path, pipeline: str) -> str:
    """The digest that a staged copy has: of `trainer/` below `root` and of the pipeline's folder."""
    with tempfile.TemporaryDirectory(prefix="headway-code-") as scratch:
        target = Path(scratch) / "code"
        _copy(root, folder, pipeline, target)
        return _digest(target, pipeline)


def stage_code(root: Path, folder: Path, pipeline: str, target: Path, digest: str) -> None:
    """Put the copy at `target` unless it is there; whole or not at all.

    Raises:
        StagedCodeDiffers: the tree, or a copy that is there, has another digest than `digest`.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".code-", dir=target.parent) as scratch:
            fresh = Path(scratch) / "code"
            _copy(root, folder, pipeline, fresh)
            _require(fresh, pipeline, digest)
            try:
                fresh.rename(target)
            except OSError:
                # Another process staged the same code meanwhile; what it put there is checked below.
                if not target.exists():
                    raise
    _require(target, pipeline, digest)


def _require(target: Path, pipeline: str, digest: str) -> None:
    found = _digest(target, pipeline)
    if found != digest:
        raise StagedCodeDiffers(
            f"the code at {target} has digest {found}, the run was planned with {digest}",
            "it was edited meanwhile: ask for the run again",
        )


def _digest(target: Path, pipeline: str) -> str:
    return code_tree_digest(target, ("trainer", f"pipelines/{pipeline}"))


def _copy(root: Path, folder: Path, pipeline: str, target: Path) -> None:
    clean = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(root / "trainer", target / "trainer", ignore=clean)
    shutil.copytree(folder, target / "pipelines" / pipeline, ignore=clean)
