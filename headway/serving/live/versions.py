"""Versions that are loaded: private copies of what was verified, each with a process that scores."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.artifacts.store import LocalStore
from headway.errors import HeadwayError
from headway.registry.trial import copy_artifact
from headway.serving.live.child import ChildLost, ChildRefused, ScoringChild
from headway.serving.live.inputs import ModelInputs, Row, input_types
from headway.serving.live.pointer import Pointer
from headway.serving.live.types import NotReady
from headway.training.stage import stage_code
from trainer.blobs import BlobError, code_tree_digest

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# A process that is this late after everybody's deadline hangs: nobody waits for it, and everybody behind it does.
LATE_SECONDS = 3.0
_NEUTRAL: dict[str, Any] = {"string": "", "int64": 0, "float64": 0.0, "bool": False}


class LoadFailed(HeadwayError):
    """A version cannot answer: its copy is not what the pointer names, or the model does not score a neutral row."""


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]


class Version:
    """A loaded version. `score` is called by one thread, `revive` by the thread that owns the processes."""

    def __init__(self, pointer: Pointer, folder: Path, child: ScoringChild) -> None:
        self.manifest_digest = pointer.version.manifest_digest
        self.contract = pointer.version.contract
        self.folder = folder
        self._child: ScoringChild | None = child
        self._changed = threading.Condition()
        self._failures = 0
        self._not_before = 0.0
        self._inputs: ModelInputs | None = None

    @property
    def pid(self) -> int | None:
        """The scoring process's id; None while there is none."""
        child = self._child
        return None if child is None else child.pid

    def score(self, schema: pa.Schema, values: Sequence[Row], until: float) -> NDArray[np.float64]:
        """The probability of each row of feature values, float64 of shape (rows,).

        Args:
            schema: the columns of the feature values.
            values: rows of plain values; columns that are no inputs are kept out.
            until: how long anybody waits, `time.monotonic()` seconds: for a process that is being replaced, and, with
                `LATE_SECONDS` more, for its answer.

        Raises:
            ContractNotMet: an input of the contract is not there, of another type, or null where it must not be.
            ChildRefused, WrongRowCount, ChildLost: as `ScoringChild.score`.
            NotReady: no process came in time.
        """
        if self._inputs is None or not (self._inputs.schema is schema or self._inputs.schema.equals(schema)):
            self._inputs = ModelInputs(self.contract, schema)
        inputs = self._inputs.of(values)
        with self._changed:
            while self._child is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise NotReady("model_restarting", 1.0)
                self._changed.wait(left)
            child = self._child
        try:
            scores = child.score(inputs, max(0.0, until - time.monotonic()) + LATE_SECONDS)
        except ChildLost:
            self._lose(child)
            raise
        self._failures = 0
        return scores

    def needs_process(self) -> bool:
        """Whether it has none, and it is time to try again."""
        child = self._child
        if child is not None and not child.alive:
            self._lose(child)
        return self._child is None and time.monotonic() >= self._not_before

    def revive(self, child: ScoringChild) -> None:
        """Take a loaded process."""
        with self._changed:
            self._child = child
            self._changed.notify_all()

    def failed(self) -> None:
        """Count a process that could not be replaced."""
        self._failures += 1
        self._not_before = time.monotonic() + backoff(self._failures)

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _lose(self, child: ScoringChild) -> None:
        with self._changed:
            if self._child is child:
                self._child = None
                self._not_before = time.monotonic() + backoff(self._failures)
                self._failures += 1
        child.close()
        logger.error("scoring process %d of %s is gone", child.pid, self.manifest_digest)


class Loader:
    """Copies and loads versions. All of it happens in one thread, with which its processes die.

    Args:
        store: where artifacts and code trees are.
        folder: where private copies go, one folder per manifest digest (0700).
    """

    def __init__(self, store: LocalStore, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(".new-*"):
            shutil.rmtree(left)
        self._store = store
        self._folder = folder
        self._spare: ScoringChild | None = None

    def keep_spare(self) -> None:
        """See that a process waits warm, so that the next version is loaded without importing torch."""
        if self._spare is not None and not self._spare.alive:
            self._spare.close()
            self._spare = None
        if self._spare is None:
            self._spare = ScoringChild()

    def load(self, pointer: Pointer) -> Version:
        """Copy what a pointer names, load it and score a neutral row.

        A copy that was there is used when it holds what the pointer names, and made anew once when it does not.

        Raises:
            LoadFailed, ChildRefused, ChildLost: it cannot answer.
            StoreError, InvalidManifest, StagedCodeDiffers: it cannot be copied.
            OSError: the disk.
        """
        folder = self._folder / pointer.version.manifest_digest.removeprefix("sha256:")
        if folder.exists():
            try:
                return Version(pointer, folder, self.start(pointer, folder))
            except (LoadFailed, ChildRefused, BlobError) as error:
                logger.warning("the copy %s is made anew: %s", folder, error)
                shutil.rmtree(folder)
        self._copy(pointer, folder)
        return Version(pointer, folder, self.start(pointer, folder))

    def start(self, pointer: Pointer, folder: Path) -> ScoringChild:
        """A process that loaded the copy in `folder` and scored a neutral row. Raises as `load`."""
        found = code_tree_digest(folder / "code", pointer.code.parts)
        if found != pointer.code.digest:
            raise LoadFailed(f"the code at {folder} has digest {found}, expected {pointer.code.digest}", "remove it")
        child, self._spare = self._spare or ScoringChild(), None
        try:
            manifest = child.load(folder / "code", folder / "artifact", input_types(pointer.version.contract))
            if manifest != pointer.version.manifest_digest:
                raise LoadFailed(f"{folder} holds {manifest}, not {pointer.version.manifest_digest}", "remove it")
            score = float(child.score([neutral_row(pointer)])[0])
            if not 0 <= score <= 1:
                raise LoadFailed(f"a neutral row scores {score}, which is no probability", "roll back")
        except BaseException:
            child.close()
            raise
        return child

    def remove_all_but(self, versions: list[Version]) -> None:
        """Remove copies of versions that are not among these."""
        kept = {version.folder for version in versions}
        for folder in self._folder.iterdir():
            if folder not in kept:
                shutil.rmtree(folder)

    def close(self) -> None:
        """End the spare process."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _copy(self, pointer: Pointer, folder: Path) -> None:
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        try:
            copy_artifact(self._store, pointer.version.manifest_digest, scratch / "artifact")
            stage_code(self._store, pointer.code.manifest, scratch / "code")
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch)
            raise


def neutral_row(pointer: Pointer) -> Row:
    """One row of the model's inputs: empty texts, zeros, false. Raises `LoadFailed` for a type that has none."""
    found: list[Any] = []
    for name, kind in input_types(pointer.version.contract).items():
        if kind not in _NEUTRAL:
            raise LoadFailed(f"the model takes {name!r} as {kind}", "train it on other inputs")
        found.append(_NEUTRAL[kind])
    return tuple(found)
