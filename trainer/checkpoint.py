"""Checkpoints that are whole or absent, on any disk and whoever is killed.

Protocol of a save: every rank writes its files into `step-N.<attempt>.partial/` and syncs them and the folder; the
ranks meet through the store; rank 0 checks that the attempt may still publish, writes `manifest.json` last (sizes and
digests of all files, facts), renames the folder to `step-N`, syncs the parent, points `best.json`; then checkpoints
that are not to be kept go; the event follows. A disk that is full fails the save on all ranks alike: what was written
of it is removed, and the older checkpoints stay.

All of that happens in a thread beside the training, one save at a time; the thread first copies the state into memory
that is kept for it, and `settle` waits for that copy: before the next update, which changes what is copied. The ranks
never meet through the training's process group, where the thread's calls and the training's would mix. What became of
a save is taken up by `finish`, on all ranks at the same step.

A load takes the newest folder whose manifest verifies, and says which were passed over. A rank reads from it only the
parts that it holds itself (`trainer.pieces`). No file is pickled: tensors are safetensors, the rest is JSON.
"""

import errno
import json
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from safetensors import SafetensorError
from torch import Tensor

from trainer.blobs import (
    BlobError,
    Json,
    Manifest,
    ManifestEntry,
    canonical_json,
    digest_bytes,
    digest_file,
    parse_manifest,
    sync_folder,
)
from trainer.image import Image
from trainer.pieces import StoredTensors, whole_weights
from trainer.process_group import Group, PeerLost
from trainer.spec import RunSpec, layout_text
from trainer.tree import Tree, decode_tree, encode_tree

Kind = Literal["last", "best"]

MANIFEST = "manifest.json"
BEST = "best.json"
_GONE = ".gone.partial"

_HOUR_US = 3_600_000_000
_POLL_S = 0.05
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
    step: int = 0
    kind: Kind = "last"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay beside the best: the `last` newest, and the first of every `every_hours` hours (0: none).

    The hours are counted from 1970, so that attempts agree about them.
    """

    last: int = 1
    every_hours: float = 0.0

    def kept(self, saved_at: Mapping[int, int | None]) -> set[int]:
        """The steps that stay, of those with their times in microseconds UTC; None for one that has no time."""
        newest = set(sorted(saved_at, reverse=True)[: self.last])
        firsts: dict[int, int] = {}
        if self.every_hours:
            for step in sorted(saved_at):
                at = saved_at[step]
                if at is not None:
                    firsts.setdefault(int(at // (self.every_hours * _HOUR_US)), step)
        return newest | set(firsts.values())


@dataclass
class Stall:
    """How long saves have held the training up so far.

    `seconds` is the time in `begin`, `settle` and `finish`; `saves` were begun, and `waits` times the training waited
    for a save to end before it could begin another, or before it stopped.
    """

    seconds: float = 0.0
    saves: int = 0
    waits: int = 0


class _Flight:
    """A save under way: `copy`, then `write`, in a thread of its own."""

    def __init__(self, step: int, kind: Kind, copy: Callable[[], None], write: Callable[[], dict[str, Any]]) -> None:
        self.step = step
        self.kind: Kind = kind
        self.copied = threading.Event()
        self.ended = threading.Event()
        self.told = False
        self.answer: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._copy, self._write = copy, write
        # A daemon: a rank that has lost its peers leaves without waiting for what cannot be published any more.
        threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._copy()
            self.copied.set()
            self.answer = self._write()
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self.error = error
        finally:
            self.copied.set()
            self.ended.set()


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
    world_size, saved_at). `retention` says which checkpoints stay. `clock` gives seconds since 1970.

    `stall` says how long saves have held the training up; `checkpoint` events tell it of rank 0, all saves so far.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        group: Group,
        sink: Sink,
        facts: Mapping[str, Json],
        retention: Retention | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self._attempt = attempt
        self._fence = Fence(run_dir, attempt)
        self._group = group
        self._sink = sink
        self._facts = facts
        self._retention = retention or Retention()
        self._clock = clock
        self._image = Image()
        self._flight: _Flight | None = None
        self.stall = Stall()

    def newest(self) -> list[Tree] | None:
        """The parts, in rank order, of the newest checkpoint that verifies; None when there is none.

        All ranks get the same one; they verify its files together, a share each. Tensors are read when they are needed.
        Rank 0 first removes what earlier attempts left unfinished; an `error` event says of each folder that was passed
        over, why.

        Raises:
            StaleAttempt: this attempt has nothing to go on with.
            CheckpointBroken: it changed since rank 0 read its manifest.
        """
        found = cast("dict[str, Any]", self._group.agree("checkpoint/newest", None, lambda _: self._candidates()))
        if "stale" in found:
            raise StaleAttempt(found["stale"])
        for step in found["steps"]:
            broken = cast("list[str]", self._group.agree(f"checkpoint/newest/{step}", self._check(step), _reasons))
            if not broken:
                folder = self.folder / _name(step)
                manifest = read_manifest(folder)
                return [read_part(folder, manifest, r) for r in range(cast("int", manifest.facts["world_size"]))]
            if self._group.rank == 0:
                for reason in broken:
                    self._tell_passed_over("CheckpointBroken", reason)
        return None

    def begin(
        self,
        step: int,
        part: Tree,
        kind: Kind,
        best: Best | None,
        facts: Mapping[str, Json] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Begin to save this rank's `part` of the state after `step` steps; all ranks call it, then `settle`.

        `best` is the best step so far, this one included; `facts` go into the manifest. Ranks meet within `deadline_s`.
        The save before it has been finished.

        Raises:
            UnknownType: `part` holds what no checkpoint can.
        """
        assert self._flight is None, "one save at a time: finish the one before"
        since = time.monotonic()
        self.stall.saves += 1
        name = f"checkpoint/{self.stall.saves}"
        document, tensors = encode_tree(part, copied=False)
        self._image.prepare(tensors)
        steady = _steady(tensors)
        # Buffers change in forward passes already.
        self._image.copy(tensors, [place for place in tensors if place not in steady])
        partial = self.folder / f"{_name(step)}.{self._attempt}.partial"
        judge = self._judge(partial, step, kind, best, facts or {})

        def write() -> dict[str, Any]:
            mine = self._write_part(partial, canonical_json(document))
            return cast("dict[str, Any]", self._group.agree(name, mine, judge, deadline_s=deadline_s))

        self._flight = _Flight(step, kind, lambda: self._image.copy(tensors, steady), write)
        self.stall.seconds += time.monotonic() - since

    def settle(self) -> None:
        """Wait until the state is copied, so that it may change; tell of a save that has ended."""
        flight = self._flight
        if flight is None:
            return
        since = time.monotonic()
        flight.copied.wait()
        self.stall.seconds += time.monotonic() - since
        if flight.ended.is_set():
            self._tell(flight)

    def finish(self, *, deadline_s: float | None = None) -> Saved | None:
        """Wait for the save under way; what became of it, the same on all ranks, or None when there is none.

        Raises:
            StaleAttempt: a newer attempt exists, or this one has ended.
            StorageFailed: a rank could not write for another reason than a full disk.
            PeerLost: a rank did not arrive in time, or this one was not ready within `deadline_s`.
        """
        flight = self._flight
        if flight is None:
            return None
        if not flight.ended.is_set():
            self.stall.waits += 1
            self._wait(flight, deadline_s)
        self._flight = None
        if flight.error is not None:
            raise flight.error
        if "stale" in flight.answer:
            raise StaleAttempt(flight.answer["stale"])
        if "failed" in flight.answer:
            raise StorageFailed(flight.answer["failed"])
        if "full" in flight.answer:
            return Saved("disk full", flight.answer["full"], flight.step, flight.kind)
        if "cancelled" in flight.answer:
            return Saved("cancelled", "", flight.step, flight.kind)
        self._tell(flight)
        if "unpruned" in flight.answer:
            raise StorageFailed(flight.answer["unpruned"])
        return Saved("published", "", flight.step, flight.kind)

    def save(
        self,
        step: int,
        part: Tree,
        kind: Kind,
        best: Best | None,
        facts: Mapping[str, Json] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Saved:
        """`begin` and `finish` at once: the state is on the disk, or it is known why not, when this returns.

        Raises:
            StaleAttempt: see `finish`.
            StorageFailed: see `finish`.
            PeerLost: see `finish`.
        """
        self.begin(step, part, kind, best, facts, deadline_s=deadline_s)
        saved = self.finish()
        assert saved is not None
        return saved

    def parts(self, step: int) -> list[Tree]:
        """What each rank saved at `step`, verified, in rank order; tensors are read when they are needed.

        Raises:
            CheckpointBroken: the checkpoint is absent or is not what its manifest says.
        """
        return open_parts(self.folder / _name(step))

    def weights(self, step: int) -> dict[str, Tensor]:
        """The model's tensors by name at `step`, verified, whole: for a model that fits one rank.

        Raises:
            CheckpointBroken: the checkpoint is absent or is not what its manifest says.
        """
        return whole_weights([part["engine"] for part in self.parts(step)])

    def check_fence(self) -> None:
        """Refuse to go on when this attempt may not publish.

        Raises:
            StaleAttempt: says why.
        """
        reason = self._fence.stale()
        if reason is not None:
            raise StaleAttempt(reason)

    def _candidates(self) -> Json:
        reason = self._fence.stale()
        if reason is not None:
            return {"stale": reason}
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in sorted(self.folder.glob("*.partial")):
            if not leftover.name.endswith(_GONE):
                self._tell_passed_over("CheckpointTorn", f"{leftover.name} was never finished; it is removed")
            shutil.rmtree(leftover)
        return {"steps": sorted(complete_steps(self.folder), reverse=True)}

    def _tell_passed_over(self, kind: str, reason: str) -> None:
        self._sink.emit("error", {"rank": 0, "kind": kind, "message": reason, "stack": ""})

    def _check(self, step: int) -> Json:
        """Verify this rank's share of a checkpoint's files: the manifest's digest, or why it is of no use."""
        try:
            manifest = self._verify_share(step)
            best = cast("int | None", manifest.facts["best_step"])
            if best not in (None, step):
                # What is exported in the end; without it this checkpoint cannot be gone on from.
                self._verify_share(best)
        except CheckpointBroken as error:
            return {"broken": str(error)}
        return {"manifest": manifest.digest}

    def _verify_share(self, step: int) -> Manifest:
        folder = self.folder / _name(step)
        manifest = read_manifest(folder)
        for entry in manifest.entries[self._group.rank :: self._group.world_size]:
            _verify_entry(folder, entry)
            self._sink.beat()
        return manifest

    def _wait(self, flight: _Flight, deadline_s: float | None) -> None:
        since = time.monotonic()
        while not flight.ended.wait(_POLL_S):
            if deadline_s is not None and time.monotonic() - since > deadline_s:
                raise PeerLost(f"the save of step {flight.step} did not end within {deadline_s} s")
        self.stall.seconds += time.monotonic() - since
        self._sink.beat()

    def _tell(self, flight: _Flight) -> None:
        if self._group.rank != 0 or flight.told or "manifest" not in flight.answer:
            return
        flight.told = True
        path = str((self.folder / _name(flight.step)).relative_to(self._run_dir))
        told = {"step": flight.step, "kind": flight.kind, "manifest": flight.answer["manifest"], "path": path}
        stalled = {"bytes": flight.answer["bytes"], "stall_s": self.stall.seconds, "waits": self.stall.waits}
        self._sink.emit("checkpoint", told | stalled)

    def _write_part(self, partial: Path, document: bytes) -> Json:
        """Write and sync this rank's two files; their manifest entries, or why they are not there."""
        rank = self._group.rank
        files = {f"rank-{rank}.safetensors": self._image.data, f"rank-{rank}.json": document}
        try:
            partial.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                write_synced(partial / name, data)
            sync_folder(partial)
        except OSError as error:
            return _failure(error, rank)
        return {"entries": [[name, len(data), digest_bytes(data)] for name, data in files.items()]}

    def _judge(
        self, partial: Path, step: int, kind: Kind, best: Best | None, facts: Mapping[str, Json]
    ) -> Callable[[list[Json]], Json]:
        def judge(parts: list[Json]) -> Json:
            # An answer in any case: the other ranks are waiting for it.
            try:
                answer = self._publish(partial, step, kind, best, facts, cast("list[dict[str, Any]]", parts))
            except OSError as error:
                answer = _failure(error, 0)
            except CheckpointBroken as error:
                answer = {"failed": str(error)}
            if "manifest" not in answer:
                shutil.rmtree(partial, ignore_errors=True)
                return answer
            try:
                self._prune({step} | ({best.step} if best else set()))
            except OSError as error:
                answer = {**answer, "unpruned": f"an older checkpoint could not be removed: {error}"}
            return answer

        return judge

    def _publish(
        self,
        partial: Path,
        step: int,
        kind: Kind,
        best: Best | None,
        facts: Mapping[str, Json],
        parts: list[dict[str, Any]],
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
                **facts,
                "kind": "checkpoint",
                "step": step,
                "saved_as": kind,
                "best_step": best.step if best else None,
                "world_size": self._group.world_size,
                "saved_at": int(self._clock() * 1e6),
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
        return {"manifest": manifest.digest, "bytes": sum(entry.size for entry in entries)}

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
        there = complete_steps(self.folder)
        kept = keep | self._retention.kept({step: self._saved_at(step) for step in there})
        for step in sorted({*there} - kept):
            self._remove(self.folder / _name(step))

    def _saved_at(self, step: int) -> int | None:
        try:
            return cast("int | None", read_manifest(self.folder / _name(step)).facts.get("saved_at"))
        except CheckpointBroken:
            # Counts as one without a time: nothing is known of it.
            return None

    def _remove(self, folder: Path) -> None:
        # Renamed first: a folder that is half gone must not look like a checkpoint.
        doomed = folder.with_name(f"{folder.name}{_GONE}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def checkpoint_facts(spec: RunSpec) -> dict[str, Json]:
    """How the state of a run of `spec` was computed: what a manifest says beside the step."""
    names = ("torch", "safetensors", "numpy", *(("deepspeed",) if spec.layout.engine == "deepspeed" else ()))
    return {
        "engine": spec.layout.engine,
        "layout": layout_text(spec.layout),
        "precision": spec.precision,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


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
    """Check every file of the checkpoint against its manifest; none is held in memory.

    Raises:
        CheckpointBroken: names the first file that is absent or of another content.
    """
    for entry in manifest.entries:
        _verify_entry(folder, entry)


def read_part(folder: Path, manifest: Manifest, rank: int) -> Tree:
    """Return what rank `rank` saved in the checkpoint in `folder`; its files have been verified.

    Tensors are `trainer.pieces.Stored`: nothing of them is read yet.

    Raises:
        CheckpointBroken: the document is absent or of another content than the manifest says, or a file is unreadable.
    """
    entry = manifest.entry(f"rank-{rank}.json")
    _verify_entry(folder, entry)
    try:
        tensors = StoredTensors(folder / manifest.entry(f"rank-{rank}.safetensors").name)
        return decode_tree(json.loads((folder / entry.name).read_bytes()), tensors)
    except (OSError, SafetensorError, BlobError, KeyError) as error:
        raise CheckpointBroken(f"{folder.name}: what rank {rank} saved cannot be read: {error}") from error


def open_parts(folder: Path) -> list[Tree]:
    """What each rank saved in the checkpoint in `folder`, verified, in rank order; see `read_part`.

    Raises:
        CheckpointBroken: it is absent or is not what its manifest says.
    """
    manifest = read_manifest(folder)
    verify(folder, manifest)
    return [read_part(folder, manifest, r) for r in range(cast("int", manifest.facts["world_size"]))]


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path` and to the disk beneath."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _verify_entry(folder: Path, entry: ManifestEntry) -> None:
    path = folder / entry.name
    try:
        same = path.stat().st_size == entry.size and digest_file(path) == entry.sha256
    except OSError as error:
        raise CheckpointBroken(f"{folder.name}/{entry.name}: {error}") from error
    if not same:
        raise CheckpointBroken(f"{folder.name}/{entry.name}: its bytes are not those of the manifest")


def _steady(tensors: Mapping[str, Tensor]) -> set[str]:
    """Places of the tensors that only an update changes: what AdamW works on, and its moments."""
    learned = {place.rpartition("/")[0] for place in tensors if place.endswith("/exp_avg")}
    return {place for place in tensors if place.rpartition("/")[0] in learned}


def _reasons(checks: list[Json]) -> Json:
    """Why a checkpoint is of no use, from what the ranks found: nothing when it is whole."""
    found = cast("Sequence[Mapping[str, str]]", checks)
    reasons = sorted({check["broken"] for check in found if "broken" in check})
    manifests = {check["manifest"] for check in found if "manifest" in check}
    return reasons or ([f"ranks read different manifests: {sorted(manifests)}"] if len(manifests) > 1 else [])


def _failure(error: OSError, rank: int) -> dict[str, Json]:
    if error.errno in _FULL:
        return {"full": f"disk full: rank {rank} could not write its part ({error})"}
    return {"failed": f"rank {rank} could not write its part: {error}"}


def _name(step: int) -> str:
    return f"step-{step:08d}"
