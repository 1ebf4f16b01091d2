"""What one rank printed, from the files that its node keeps in the run's directory; the same for every launcher.

A node writes `node-<k>/stdout-rank-<r>.log`; when that is full, `.log.2` takes what follows, and becomes `.log.1` when
it is full itself (`trainer.rank_log`). Where a node ended before it started its ranks there is no such file: what its
container printed (`logs/node-<k>.<pod uid>.log`, see `headway.training.kubernetes.logs`) is shown instead.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headway.errors import HeadwayError
from headway.services import Services
from headway.training.launch import Launcher, LauncherUnavailable
from headway.training.reconcile import Reconciler
from trainer.events import node_folder

if TYPE_CHECKING:
    from headway.catalog.run_facts import Attempt, TrainingRun

_POLL_S = 0.3
_CHUNK = 1 << 16
_OPEN_STATES = ("queued", "admitted", "running")


class NoRankLog(HeadwayError):
    """The run has no such rank or attempt, or that rank printed nothing that was kept."""


class RankLogReader:
    """Reads the files of one rank in order while they grow and are rotated; each `read` goes on where the last ended.

    What rotation took away before it was read is named by a line, not passed over.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the first file, `stdout-rank-<r>.log`; it need not exist yet."""
        self._first = path
        self._older, self._newest = (path.with_name(f"{path.name}.{n}") for n in (1, 2))
        self._file: BinaryIO | None = None
        self._after: BinaryIO | None = None
        # What is cut in the middle of a character waits here for its rest.
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def read(self) -> str:
        """What was added since; "" when nothing was."""
        text = ""
        while True:
            # Looked for first: a file that has a successor grows no more, so its end is then its end.
            following, lost = self._following()
            while self._file is not None and (data := self._file.read(_CHUNK)):
                text += self._decoder.decode(data)
            if following is None:
                return text
            if self._file is not None:
                self._file.close()
            if lost:
                text += self._decoder.decode(b"", final=True)
                text += "\n--- what came next was rotated away before it was read ---\n"
            self._file = following

    def finish(self) -> str:
        """What is left when nothing more will come; the reader is of no use afterwards."""
        text = self.read() + self._decoder.decode(b"", final=True)
        for file in (self._file, self._after):
            if file is not None:
                file.close()
        return text

    def _following(self) -> tuple[BinaryIO | None, bool]:
        """The file to go on with after the present one, and whether something between them is lost."""
        if self._file is None:
            return _opened(self._first), False
        if self._after is not None:
            following, self._after = self._after, None
            return following, False
        if _is(self._file, self._first):
            return self._rotated(), False
        if _is(self._file, self._newest):
            return None, False
        if _is(self._file, self._older):
            return _opened(self._newest), False
        return self._rotated(), True

    def _rotated(self) -> BinaryIO | None:
        """The oldest file after the first; the one after it is opened as well, so that rotation cannot take it away."""
        while True:
            older, newest = _opened(self._older), _opened(self._newest)
            if older is None:
                return newest
            if _is(older, self._older):
                self._after = newest
                return older
            for file in (older, newest):
                if file is not None:
                    file.close()


def follow_rank_log(
    services: Services,
    launcher: Launcher,
    run: TrainingRun,
    rank: int,
    attempt: int | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """What a rank printed, in pieces as they come; undecodable bytes are shown as escapes.

    Args:
        services: catalog and principal.
        launcher: where the attempts run.
        run: the run.
        rank: the rank, from 0 over all nodes.
        attempt: only this attempt; None is the newest, and with `follow` every one that comes after it.
        follow: go on until the attempt (with `attempt` None: the run) ends; the run is looked after meanwhile.

    Raises:
        NoRankLog: there is no such rank or attempt, or nothing of it was kept.
    """
    number = run.last.attempt if attempt is None else attempt
    while True:
        chosen = _attempt(run, number, rank)
        said = False
        for piece in _of_attempt(services, launcher, chosen, rank, follow):
            said = True
            yield piece
        run = services.catalog.run(services.principal, run.run_id)
        goes_on = follow and attempt is None and run.last.attempt > number
        if not said and not goes_on:
            raise NoRankLog(
                f"rank {rank} of attempt {number} of run {run.run_id} left no output",
                "`headway runs show` says why the attempt ended; the output may have been too far for this machine",
            )
        if not goes_on:
            return
        number = run.last.attempt
        yield f"--- attempt {number} ---\n"


def _attempt(run: TrainingRun, number: int, rank: int) -> Attempt:
    for attempt in run.attempts:
        if attempt.attempt == number:
            world = int(str(attempt.layout["nodes"])) * _ranks_per_node(attempt)
            if not 0 <= rank < world:
                raise NoRankLog(f"attempt {number} has no rank {rank}", f"its ranks are 0 to {world - 1}")
            return attempt
    raise NoRankLog(f"run {run.run_id} has no attempt {number}", f"it has {len(run.attempts)}")


def _ranks_per_node(attempt: Attempt) -> int:
    return int(str(attempt.layout["processes_per_node"]))


def _of_attempt(services: Services, launcher: Launcher, attempt: Attempt, rank: int, follow: bool) -> Iterator[str]:
    folder = launcher.run_dir(attempt.run_id) / "attempts" / str(attempt.attempt)
    node = rank // _ranks_per_node(attempt)
    reader = RankLogReader(node_folder(folder / "attempt.json", node) / f"stdout-rank-{rank}.log")
    said = False
    over = False
    while not over:
        # Looked at first: what is read after the end is all there is.
        over = not follow or _has_ended(services, launcher, attempt)
        text = reader.finish() if over else reader.read()
        if text:
            said = True
            yield text
        elif not over:
            time.sleep(_POLL_S)
    if not said:
        yield from _printed_by_node(folder, node)


def _has_ended(services: Services, launcher: Launcher, attempt: Attempt) -> bool:
    try:
        Reconciler(services, launcher).run(attempt.run_id)
    except LauncherUnavailable:
        # The files are on the volume: that the place does not answer keeps nobody from reading them.
        return False
    run = services.catalog.run(services.principal, attempt.run_id)
    return run.attempts[attempt.attempt - 1].state not in _OPEN_STATES


def _printed_by_node(folder: Path, node: int) -> Iterator[str]:
    """What the node's containers printed, oldest first."""
    kept = sorted((folder / "logs").glob(f"node-{node}.*.log"), key=lambda path: path.stat().st_mtime_ns)
    for path in kept:
        if text := path.read_text(encoding="utf-8", errors="backslashreplace"):
            yield text


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _is(file: BinaryIO, path: Path) -> bool:
    """Whether `path` names the open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(file.fileno())
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
