"""The inference log on local disk: every answer is appended before it is given, and waits here to be shipped.

A server has one folder and is its only writer (flock). The log is a row of segments, `<start>-<number>.log`, whose
names ascend; only the last one grows. A frame is four bytes of length and four of CRC-32 (little endian), then the
record's bytes. What a killed writer left unfinished at a segment's end is no record: nobody was answered for it.

An append is in the operating system's hands when it returns, which a killed process does not undo; a group of appends
is made durable against a lost machine every `group_records` or `group_seconds`, whichever comes first.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headway.errors import HeadwayError
from headway.serving.live.types import SpoolStatus

HEADER = struct.Struct("<II")
MAX_RECORD = 16 * 1024 * 1024
_COUNTER = struct.Struct("<Q")
_SUFFIX = ".log"
_TAKEOVER_SECONDS = 3.0
_IDLE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class ServerRunning(HeadwayError):
    """Another server of the same name holds the folder."""


class SpoolFull(HeadwayError):
    """The log takes no more; `why` is `full` (its own limit) or `disk` (the system's words)."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the inference log takes no record: {why}", "ship it, or free disk space")
        self.why = why


@dataclass(frozen=True)
class SpoolLimits:
    """How the log is cut and made durable: bytes and seconds of a segment, records and seconds of a group."""

    segment_bytes: int = 8 * 1024 * 1024
    segment_seconds: float = 60.0
    group_records: int = 64
    group_seconds: float = 0.05


@dataclass(frozen=True)
class Scan:
    """Whole records of a segment from an offset on: their bytes, where the last ends, and how many were not whole.

    `torn` counts frames whose check sum is wrong, and one for an unfinished end.
    """

    records: tuple[bytes, ...]
    end: int
    torn: int


class Spool:
    """The log of one server; its methods may be called from several threads.

    Args:
        folder: the server's spool folder; made with mode 0700.
        limits: how it is cut.

    Raises:
        ServerRunning: another process holds the folder.
        OSError: it cannot be made or written.
    """

    def __init__(self, folder: Path, limits: SpoolLimits = SpoolLimits()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._limits = limits
        self._lock = threading.Lock()
        self._held = _hold(folder)
        self._dropped = _Counter(folder / "dropped")
        self._torn = 0
        # What was found is counted once; what ships it removes the files.
        self._sealed: dict[str, tuple[int, int]] = {}
        for name in segments(folder):
            scan = scan_segment(folder / f"{name}{_SUFFIX}", 0, sealed=True)
            self._torn += scan.torn
            self._sealed[name] = (len(scan.records), (folder / f"{name}{_SUFFIX}").stat().st_size)
        self._number = 0
        self._file: int | None = None
        self._name = ""
        self._records = self._bytes = self._unsynced = 0
        self._opened_at = 0.0
        self._dirty, self._group, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._closing = False
        self._syncing = threading.Thread(target=self._sync_groups, name="headway-spool", daemon=True)
        self._syncing.start()

    def append(self, records: Sequence[bytes], limit: int) -> None:
        """Append records, all or none.

        Raises:
            SpoolFull: the log would exceed `limit` bytes, or the disk takes no more; nothing was appended.
        """
        data = b"".join(HEADER.pack(len(r), zlib.crc32(r)) + r for r in records)
        with self._lock:
            if self._total() + len(data) > limit:
                self._forget_shipped()
                if self._total() + len(data) > limit:
                    raise SpoolFull("full")
            try:
                self._write(data)
            except OSError as error:
                raise SpoolFull(f"disk ({error.strerror})") from error
            self._records += len(records)
            self._unsynced += len(records)
            self._dirty.set()
            if self._unsynced >= self._limits.group_records:
                self._group.set()

    def drop(self, count: int) -> None:
        """Count records that were answered and could not be kept; the count survives the process."""
        with self._lock:
            self._dropped.add(count)

    def seal(self) -> None:
        """End the present segment, if it holds anything; the next append begins another."""
        with self._lock:
            self._seal()

    def status(self) -> SpoolStatus:
        """Figures of this moment. Shipped segments count until their files are seen to be gone."""
        with self._lock:
            self._forget_shipped()
            records = self._records + sum(n for n, _ in self._sealed.values())
            count = len(self._sealed) + (self._file is not None)
            return SpoolStatus(records, self._total(), 0, self._dropped.value, self._torn, count)

    def close(self) -> None:
        """Make everything durable and let go of the folder; safe to repeat."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._seal()
        for event in (self._dirty, self._group, self._stopping):
            event.set()
        self._syncing.join()
        self._dropped.close()
        os.close(self._held)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None
        end = self._bytes
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:] if written else data)
        except OSError:
            self._cut_back(end)
            raise
        self._bytes = end + len(data)

    def _cut_back(self, end: int) -> None:
        """Half a frame would hide every record after it; where it cannot be cut off, the segment ends with it."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, end)
        except OSError:
            logger.exception("half a record stays at the end of %s", self._name)
            # A disk that does not cut may not flush either, and nothing may be written behind half a record.
            self._end()

    def _open(self) -> None:
        last = max(self._sealed, default="")
        name = ""
        # After a clock that went back, names must ascend all the same.
        while name <= last:
            self._number += 1
            name = f"{max(time.time_ns() // 1_000_000, _start_of(last)):013d}-{self._number:06d}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.folder / f"{name}{_SUFFIX}", flags, 0o600)
        self._name, self._opened_at = name, time.monotonic()
        self._records = self._bytes = 0

    def _seal(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)
            self._end()

    def _end(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._sealed[self._name] = (self._records, self._bytes)
        self._file = None
        self._records = self._bytes = self._unsynced = 0
        self._dirty.clear()

    def _total(self) -> int:
        return self._bytes + sum(size for _, size in self._sealed.values())

    def _forget_shipped(self) -> None:
        self._sealed = {n: c for n, c in self._sealed.items() if (self.folder / f"{n}{_SUFFIX}").exists()}

    def _sync_groups(self) -> None:
        while not self._closing:
            # Idle, it looks now and then whether the segment is old, or asked for.
            if self._dirty.wait(_IDLE_SECONDS):
                self._group.wait(self._limits.group_seconds)
            self._group.clear()
            try:
                self._sync()
            except OSError:
                logger.exception("the inference log could not be made durable; it is tried again")
                self._stopping.wait(_IDLE_SECONDS)

    def _sync(self) -> None:
        with self._lock:
            if self._file is None:
                return
            age = time.monotonic() - self._opened_at
            if self._bytes >= self._limits.segment_bytes or age >= self._limits.segment_seconds or self._asked():
                self._seal()
                return
            if not self._unsynced:
                return
            written = os.dup(self._file)
            self._unsynced = 0
            self._dirty.clear()
        # Outside the lock: a slow disk holds up no answer.
        try:
            os.fdatasync(written)
        except OSError:
            with self._lock:
                self._unsynced += 1
                self._dirty.set()
            raise
        finally:
            os.close(written)

    def _asked(self) -> bool:
        asked = self.folder / SEAL_REQUEST
        found = asked.exists()
        asked.unlink(missing_ok=True)
        return found


SEAL_REQUEST = "seal"
"""A file of this name asks a running server to end its present segment."""


def segments(folder: Path) -> list[str]:
    """Names of a spool's segments in the order of their writing."""
    return sorted(p.name.removesuffix(_SUFFIX) for p in folder.glob(f"*{_SUFFIX}"))


def segment_file(folder: Path, name: str) -> Path:
    """The file of a segment."""
    return folder / f"{name}{_SUFFIX}"


def server_running(folder: Path) -> bool:
    """Whether a server holds the spool, so that its last segment may still grow."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def dropped_count(folder: Path) -> int:
    """Answers that were given and not kept, since the folder was made."""
    try:
        data = (folder / "dropped").read_bytes()
    except FileNotFoundError:
        return 0
    return _COUNTER.unpack(data[: _COUNTER.size])[0] if len(data) >= _COUNTER.size else 0


def scan_segment(path: Path, offset: int, *, sealed: bool, most: int | None = None) -> Scan:
    """Whole records of a segment after `offset`.

    Args:
        path: the segment's file.
        offset: where a frame begins.
        sealed: nobody writes to it any more, so an unfinished end is torn; otherwise it is not there yet.
        most: end after so many records; None: read all.
    """
    records: list[bytes] = []
    torn, position = 0, offset
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        for length, check, data in _frames(file, size - offset):
            position += HEADER.size + length
            if zlib.crc32(data) == check:
                records.append(data)
            else:
                torn += 1
            if len(records) == most:
                return Scan(tuple(records), position, torn)
    if sealed and position < size:
        return Scan(tuple(records), size, torn + 1)
    return Scan(tuple(records), position, torn)


def _frames(file: BinaryIO, left: int) -> Iterator[tuple[int, int, bytes]]:
    while left >= HEADER.size:
        length, check = HEADER.unpack(file.read(HEADER.size))
        left -= HEADER.size
        if not 0 < length <= min(left, MAX_RECORD):
            return
        yield length, check, file.read(length)
        left -= length


def _start_of(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0


def _hold(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + _TAKEOVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Who ships looks for a moment whether a server runs, and a server that was just ended lets go soon.
            if time.monotonic() > until:
                os.close(descriptor)
                raise ServerRunning(
                    f"another server holds {folder}", "stop it, or give this one another name with --name"
                ) from None
            time.sleep(0.02)
        else:
            return descriptor


class _Counter:
    """A number in a mapped file: it takes no more disk space when it grows, and a killed process does not lose it."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size < _COUNTER.size:
                os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)

    @property
    def value(self) -> int:
        return _COUNTER.unpack_from(self._map)[0]

    def add(self, count: int) -> None:
        _COUNTER.pack_into(self._map, 0, self.value + count)

    def close(self) -> None:
        self._map.flush()
        self._map.close()
