"""Checkpoints that are whole or absent, on any disk and whoever is killed.

Protocol of a save: every rank writes its files into `step-N.<attempt>.partial/` and syncs them and the folder; the
ranks meet through the store; rank 0 checks that the attempt may still publish, writes `manifest.json` last (sizes and
digests of all files, facts), renames the folder to `step-N`, syncs the parent, points `best.json`; the event follows;
then older checkpoints go, except the newest and the best. A disk that is full fails the save on all ranks alike: what
was written of it is removed, and the older checkpoints stay.

A load takes the newest folder whose manifest verifies. No file is pickled: tensors are safetensors, the rest is JSON.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import safetensors.torch
from torch import Tensor

from trainer.blobs import (
    BlobError,
    Json,
    Manifest,
    ManifestEntry,
    canonical_json,
    digest_bytes,
    parse_manifest,
    sync_folder,
)
from trainer.pieces import whole_weights
from trainer.process_group import Group
from trainer.tree import Tree, decode_tree, encode_tree

Kind = Literal["last", "best"]

MANIFEST = "manifest.json"
BEST = "best.json"

_FOLDER = re.compile(r"step-(\d{8})")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointError(RuntimeError):
    """Base of what goes wrong with checkpoints."""


class DiskFull(CheckpointError):
    """A checkpoint that training needs could not be written: the disk is full."""


class StorageFailed(CheckpointError):
    """A rank could not write its part for another reason than a full disk."""


class StaleAttempt(CheckpointError):
    """A newer attempt exists or this one has ended: it publishes nothing more."""


class CheckpointBroken(CheckpointError):
    """A checkpoint whose files are not those of its manifest."""


class Sink(Protocol):
    """Where events and heartbeats go; see `trainer.events.EventSink`."""

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        """Send one event."""
        ...

    def beat(self) -> None:
        """Say that there was progress."""
        ...


@dataclass(frozen=True)
class Best:
    """The best step so far and its validation loss; what `best.json` points at."""

    step: int
    valid_loss: float


@dataclass(frozen=True)
class Saved:
    """What became of a save: `published`, `disk full` (removed again) or `cancelled` (nothing published any more)."""

    outcome: Literal["published", "disk full", "cancelled"]
    detail: str = ""


class Fence:
    """Whether attempt `attempt` of the run in `run_dir` may still publish."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._attempts = run_dir / "attempts"
        self._own = self._attempts / str(attempt)
        self._attempt = attempt

    def stale(self) -> str | None:
        """Why this attempt publishes nothing more, None while it may."""
        newer = [int(p.name) for p in self._attempts.glob("*") if p.name.isdigit() and int(p.name) > self._attempt]
        if newer:
            return f"attempt {self._attempt} is stale: attempt {max(newer)} exists"
        if (self._own / "final.json").exists():
            return f"attempt {self._attempt} is stale: it has ended"
        return None

    def cancelled(self) -> bool:
        """Whether somebody asked this attempt to stop for good."""
        return (self._own / "cancel").exists()


class Checkpoints:
    """The checkpoints of one run, as the ranks of one attempt (`group`) see them.

    `facts` are small facts that the manifest of each save carries beside its own (kind, step, saved_as, best_step,
    world_size).
    """

    def __init__(self, run_dir: Path, attempt: int, group: Group, sink: Sink, facts: Mapping[str, Json]) -> None:
        self._run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self._attempt = attempt
        self._fence = Fence(run_dir, attempt)
        self._group = group
        self._sink = sink
        self._facts = facts
        self._saves = 0

    def newest(self) -> list[Tree] | None:
        """The parts, in rank order, of the newest checkpoint that verifies; None when there is none.

        All ranks get the same one. Rank 0 first removes what earlier attempts left unfinished.

        Raises:
            StaleAttempt: this attempt has nothing to go on with.
            CheckpointBroken: it changed since rank 0 verified it.
        """
        found = cast("dict[str, Any]", self._group.agree("checkpoint/newest", None, lambda _: self._find_newest()))
        if "stale" in found:
            raise StaleAttempt(found["stale"])
        if found["step"] is None:
            return None
        folder = self.folder / _name(found["step"])
        manifest = read_manifest(folder)
        if manifest.digest != found["manifest"]:
            raise CheckpointBroken(f"{folder.name} has manifest {manifest.digest}, rank 0 read {found['manifest']}")
        return [read_part(folder, manifest, r) for r in range(cast("int", manifest.facts["world_size"]))]

    def save(self, step: int, part: Tree, kind: Kind, best: Best | None, *, deadline_s: float | None = None) -> Saved:
        """Save this rank's `part` of the state after `step` steps; all ranks call it and get the same answer.

        `best` is the best step so far, this one included. Ranks meet within `deadline_s`.

        Raises:
            StaleAttempt: a newer attempt exists, or this one has ended.
            StorageFailed: a rank could not write for another reason than a full disk.
            PeerLost: a rank did not arrive in time.
        """
        partial = self.folder / f"{_name(step)}.{self._attempt}.partial"
        mine = self._write_part(partial, part)
        self._saves += 1
        judge = self._judge(partial, step, kind, best)
        answer = cast(
            "dict[str, Any]", self._group.agree(f"checkpoint/{self._saves}", mine, judge, deadline_s=deadline_s)
        )
        if "stale" in answer:
            raise StaleAttempt(answer["stale"])
        if "failed" in answer:
            raise StorageFailed(answer["failed"])
        if "full" in answer:
            return Saved("disk full", answer["full"])
        if "cancelled" in answer:
            return Saved("cancelled")
        if self._group.rank == 0:
            path = (self.folder / _name(step)).relative_to(self._run_dir)
            self._sink.emit(
                "checkpoint", {"step": step, "kind": kind, "manifest": answer["manifest"], "path": str(path)}
            )
            try:
                self._prune({step} | ({best.step} if best else set()))
            except OSError as error:
                raise StorageFailed(f"an older checkpoint could not be removed: {error}") from error
        return Saved("published")

    def weights(self, step: int) -> dict[str, Tensor]:
        """The model's tensors by name at `step`, verified.

        Raises:
            CheckpointBroken: the checkpoint is absent or is not what its manifest says.
        """
        folder = self.folder / _name(step)
        manifest = read_manifest(folder)
        parts = [read_part(folder, manifest, r) for r in range(cast("int", manifest.facts["world_size"]))]
        return whole_weights([part["engine"] for part in parts])

    def check_fence(self) -> None:
        """Refuse to go on when this attempt may not publish.

        Raises:
            StaleAttempt: says why.
        """
        reason = self._fence.stale()
        if reason is not None:
            raise StaleAttempt(reason)

    def _find_newest(self) -> Json:
        reason = self._fence.stale()
        if reason is not None:
            return {"stale": reason}
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.partial"):
            shutil.rmtree(leftover)
        for step in sorted(complete_steps(self.folder), reverse=True):
            try:
                manifest = self._verified(step)
                best = cast("int | None", manifest.facts["best_step"])
                if best not in (None, step):
                    # What is exported in the end; without it this checkpoint cannot be gone on from.
                    self._verified(best)
            except CheckpointBroken as error:
                self._sink.emit("error", {"rank": 0, "kind": "CheckpointBroken", "message": str(error), "stack": ""})
                continue
            return {"step": step, "manifest": manifest.digest}
        return {"step": None}

    def _verified(self, step: int) -> Manifest:
        folder = self.folder / _name(step)
        manifest = read_manifest(folder)
        verify(folder, manifest)
        return manifest

    def _write_part(self, partial: Path, part: Tree) -> Json:
        """Write and sync this rank's two files; their manifest entries, or why they are not there."""
        document, tensors = encode_tree(part)
        files = {
            f"rank-{self._group.rank}.safetensors": safetensors.torch.save(tensors),
            f"rank-{self._group.rank}.json": canonical_json(document),
        }
        try:
            partial.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                write_synced(partial / name, data)
                self._sink.beat()
            sync_folder(partial)
        except OSError as error:
            return _failure(error, self._group.rank)
        return {"entries": [[name, len(data), digest_bytes(data)] for name, data in files.items()]}

    def _judge(self, partial: Path, step: int, kind: Kind, best: Best | None) -> Callable[[list[Json]], Json]:
        def judge(parts: list[Json]) -> Json:
            # An answer in any case: the other ranks are waiting for it.
            try:
                answer = self._publish(partial, step, kind, best, cast("list[dict[str, Any]]", parts))
            except OSError as error:
                answer = _failure(error, 0)
            except CheckpointBroken as error:
                answer = {"failed": str(error)}
            if "manifest" not in answer:
                shutil.rmtree(partial, ignore_errors=True)
            return answer

        return judge

    def _publish(
        self, partial: Path, step: int, kind: Kind, best: Best | None, parts: list[dict[str, Any]]
    ) -> dict[str, Json]:
        refused = [p for p in parts if "entries" not in p]
        if refused:
            return next((p for p in refused if "failed" in p), refused[0])
        stale = self._fence.stale()
        if stale is not None:
            return {"stale": stale}
        if self._fence.cancelled():
            return {"cancelled": True}
        entries = tuple(ManifestEntry(*entry) for p in parts for entry in p["entries"])
        manifest = Manifest(
            entries,
            {
                **self._facts,
                "kind": "checkpoint",
                "step": step,
                "saved_as": kind,
                "best_step": best.step if best else None,
                "world_size": self._group.world_size,
            },
        )
        write_synced(partial / MANIFEST, manifest.canonical())
        sync_folder(partial)
        final = self.folder / _name(step)
        if final.exists():
            # Only one that did not verify: a run goes on from the newest good one, and comes by the broken one again.
            self._remove(final)
        partial.rename(final)
        sync_folder(self.folder)
        if best is not None:
            self._point_best(best, manifest if best.step == step else read_manifest(self.folder / _name(best.step)))
        return {"manifest": manifest.digest}

    def _point_best(self, best: Best, manifest: Manifest) -> None:
        pointer = canonical_json({"step": best.step, "manifest": manifest.digest, "valid_loss": best.valid_loss})
        target = self.folder / BEST
        if target.exists() and target.read_bytes() == pointer:
            return
        fresh = self.folder / f"{BEST}.{self._attempt}"
        write_synced(fresh, pointer)
        fresh.replace(target)
        sync_folder(self.folder)

    def _prune(self, keep: set[int]) -> None:
        for step in complete_steps(self.folder):
            if step not in keep:
                self._remove(self.folder / _name(step))

    def _remove(self, folder: Path) -> None:
        # Renamed first: a folder that is half gone must not look like a checkpoint.
        doomed = folder.with_name(f"{folder.name}.gone.partial")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def complete_steps(folder: Path) -> list[int]:
    """The steps that have a published checkpoint in `folder`, unordered; whether it verifies is another question."""
    return [int(m[1]) for p in folder.glob("step-*") if (m := _FOLDER.fullmatch(p.name)) and (p / MANIFEST).is_file()]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointBroken: it is absent or malformed.
    """
    try:
        return parse_manifest((folder / MANIFEST).read_bytes())
    except (OSError, BlobError) as error:
        raise CheckpointBroken(f"{folder.name}/{MANIFEST}: {error}") from error


def verify(folder: Path, manifest: Manifest) -> None:
    """Check every file of the checkpoint against its manifest.

    Raises:
        CheckpointBroken: names the first file that is absent or of another content.
    """
    for entry in manifest.entries:
        _read_verified(folder, entry)


def read_part(folder: Path, manifest: Manifest, rank: int) -> Tree:
    """Return what rank `rank` saved in the checkpoint in `folder`.

    Raises:
        CheckpointBroken: a file is absent or of another content than the manifest says.
    """
    tensors = safetensors.torch.load(_read_verified(folder, manifest.entry(f"rank-{rank}.safetensors")))
    return decode_tree(json.loads(_read_verified(folder, manifest.entry(f"rank-{rank}.json"))), tensors)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to `path` and to the disk beneath."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_verified(folder: Path, entry: ManifestEntry) -> bytes:
    try:
        data = (folder / entry.name).read_bytes()
    except OSError as error:
        raise CheckpointBroken(f"{folder.name}/{entry.name}: {error}") from error
    if len(data) != entry.size or digest_bytes(data) != entry.sha256:
        raise CheckpointBroken(f"{folder.name}/{entry.name}: its bytes are not those of the manifest")
    return data


def _failure(error: OSError, rank: int) -> dict[str, Json]:
    if error.errno in _FULL:
        return {"full": f"disk full: rank {rank} could not write its part ({error})"}
    return {"failed": f"rank {rank} could not write its part: {error}"}


def _name(step: int) -> str:
    return f"step-{step:08d}"
