"""The local content-addressed store.

Layout under the root: `sha256/<first two hex digits>/<other 62>` for blobs, `tmp/<pid>-<random>` for files that are
being written. A blob appears under its name by one `link`, after its bytes were flushed, so a reader never sees half
of one. Every path is walked from a descriptor of the root without following symbolic links.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headway.artifacts.errors import BlobCorrupt, BlobMissing, SourceRefused, StoreTampered
from trainer.blobs import InvalidDigest, check_digest

_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOBS = "sha256"
_TEMPORARY = "tmp"
_CREATION_SECONDS = 60.0


@dataclass(frozen=True)
class Blob:
    """A stored run of bytes: its digest, its size in bytes and what the bytes are."""

    digest: str
    size: int
    media_type: str = "application/octet-stream"


class LocalStore:
    """Blobs in a folder of this machine. Safe for several processes and threads; holds no open descriptor.

    Opening it makes the folders and removes what dead writers left. `probe` is called with the name of each point at
    which a crash matters (`written`, `flushed`, `linked`); tests kill the process there.
    """

    def __init__(self, root: Path | str, probe: Callable[[str], None] | None = None) -> None:
        base = Path(root)
        base.mkdir(parents=True, exist_ok=True)
        self.root = base.resolve()
        self._probe = probe or _no_probe
        with self._root() as top:
            for name in (_BLOBS, _TEMPORARY):
                _make_directory(name, top)
        self.sweep_temporary()

    def put_bytes(self, data: bytes, media_type: str = "application/octet-stream") -> Blob:
        """Store `data` and return its blob once it is durable. Storing the same bytes again changes nothing.

        Raises:
            BlobCorrupt: other bytes already lie under this digest.
        """
        return self._put(iter((data,)), media_type)

    def put_file(self, path: Path, media_type: str = "application/octet-stream") -> Blob:
        """Store a copy of the bytes of the local file `path`, in pieces of 1 MiB; as `put_bytes`.

        Raises:
            SourceRefused: `path` is no regular file.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceRefused(str(path))
        with os.fdopen(descriptor, "rb") as source:
            return self._put(iter(lambda: source.read(_CHUNK), b""), media_type)

    def get_bytes(self, digest: str) -> bytes:
        """Return the verified bytes of `digest`.

        Raises:
            InvalidDigest: `digest` is no digest.
            BlobMissing: there is no such blob.
            BlobCorrupt: the bytes do not have this digest.
        """
        with self._open(digest) as source:
            data = source.read()
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != digest:
            raise BlobCorrupt(digest, found)
        return data

    @contextmanager
    def open(self, digest: str) -> Iterator[BinaryIO]:
        """Give a file object at the start of the blob, after all of its bytes were verified. Raises as `get_bytes`.

        The verified file stays the one that is read even when its name is taken away meanwhile.
        """
        with self._open(digest) as source:
            _verify(source, digest)
            source.seek(0)
            yield source

    def read_path(self, digest: str) -> Path:
        """Return the path of the blob under the root, for libraries that want a path, after verifying its bytes.

        The file is read-only and must stay so. Whoever opens the path trusts that nobody changed the folder since;
        use `open` where that matters. Raises as `get_bytes`.
        """
        with self._open(digest) as source:
            _verify(source, digest)
        return self.root / _BLOBS / digest[7:9] / digest[9:]

    def stat(self, digest: str) -> Blob | None:
        """Return the blob by its name and size, bytes unread, or None when there is none.

        Raises:
            InvalidDigest: `digest` is no digest.
        """
        try:
            with self._open(digest) as source:
                return Blob(digest, os.fstat(source.fileno()).st_size)
        except BlobMissing:
            return None

    def list(self) -> Iterator[Blob]:
        """Yield every blob by name and size, in order of digest, bytes unread.

        Raises:
            StoreTampered: something that the store does not make lies among the blobs.
        """
        with self._root() as top, _enter(_BLOBS, top) as blobs:
            for prefix in _names(blobs):
                with _enter(prefix, blobs) as shard:
                    for rest in _names(shard):
                        yield _listed(prefix, rest, shard)

    def erase(self, digest: str) -> bool:
        """Remove the blob durably; return False when it was already gone (which is no error).

        Raises:
            InvalidDigest: `digest` is no digest.
        """
        check_digest(digest)
        try:
            with self._shard(digest) as shard:
                os.unlink(digest[9:], dir_fd=shard)
                os.fsync(shard)
        except FileNotFoundError:
            return False
        return True

    def sweep_temporary(self, older_than: float = 0.0) -> tuple[str, ...]:
        """Remove what writers left that no longer live; return the removed names.

        Args:
            older_than: keep files whose last change is less than this many seconds ago.
        """
        removed: list[str] = []
        with self._root() as top, _enter(_TEMPORARY, top) as folder:
            for name in _names(folder):
                if _abandoned(name, folder, older_than):
                    _unlink_if_there(name, folder)
                    removed.append(name)
        return tuple(removed)

    def _put(self, chunks: Iterator[bytes], media_type: str) -> Blob:
        with self._root() as top, _enter(_TEMPORARY, top) as folder:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            descriptor = os.open(name, _CREATE, 0o444, dir_fd=folder)
            try:
                # The lock tells sweepers in another process namespace, who cannot see our pid, that we live.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                digest, size = self._write(descriptor, chunks)
                self._publish(digest, name, folder, top)
            finally:
                os.close(descriptor)
                _unlink_if_there(name, folder)
        return Blob(digest, size, media_type)

    def _write(self, descriptor: int, chunks: Iterator[bytes]) -> tuple[str, int]:
        hasher, size = hashlib.sha256(), 0
        for chunk in chunks:
            hasher.update(chunk)
            size += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        self._probe("written")
        os.fsync(descriptor)
        self._probe("flushed")
        return f"sha256:{hasher.hexdigest()}", size

    def _publish(self, digest: str, temporary: str, folder: int, top: int) -> None:
        with _enter(_BLOBS, top) as blobs:
            _make_directory(digest[7:9], blobs)
            with _enter(digest[7:9], blobs) as shard:
                try:
                    os.link(temporary, digest[9:], src_dir_fd=folder, dst_dir_fd=shard, follow_symlinks=False)
                    self._probe("linked")
                except FileExistsError:
                    # Answering "stored" promises that the bytes can be read back.
                    with self._open(digest) as source:
                        _verify(source, digest)
                os.fsync(shard)

    @contextmanager
    def _root(self) -> Iterator[int]:
        descriptor = os.open(self.root, _DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _shard(self, digest: str) -> Iterator[int]:
        with self._root() as top, _enter(_BLOBS, top) as blobs, _enter(digest[7:9], blobs) as shard:
            yield shard

    @contextmanager
    def _open(self, digest: str) -> Iterator[BinaryIO]:
        check_digest(digest)
        try:
            with self._shard(digest) as shard:
                descriptor = os.open(digest[9:], _READ, dir_fd=shard)
        except FileNotFoundError:
            raise BlobMissing(digest) from None
        except OSError as error:
            raise StoreTampered(digest, f"not a plain file ({error.strerror})") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreTampered(digest, "not a plain file")
        with os.fdopen(descriptor, "rb") as source:
            yield source


def _no_probe(point: str) -> None:
    del point


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def _enter(name: str, parent: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    except NotADirectoryError as error:
        raise StoreTampered(name, "a symbolic link or a file where a folder belongs") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make_directory(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return
    os.fsync(parent)


def _unlink_if_there(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _verify(source: BinaryIO, digest: str) -> None:
    hasher = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        hasher.update(chunk)
    found = f"sha256:{hasher.hexdigest()}"
    if found != digest:
        raise BlobCorrupt(digest, found)


def _listed(prefix: str, rest: str, shard: int) -> Blob:
    place = f"{_BLOBS}/{prefix}/{rest}"
    try:
        digest = check_digest(f"sha256:{prefix}{rest}")
    except InvalidDigest as error:
        raise StoreTampered(place, "not named by a digest") from error
    facts = os.stat(rest, dir_fd=shard, follow_symlinks=False)
    if len(prefix) != 2 or not stat.S_ISREG(facts.st_mode):
        raise StoreTampered(place, "not a plain file")
    return Blob(digest, facts.st_size)


def _abandoned(name: str, folder: int, older_than: float) -> bool:
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        age = time.time() - facts.st_mtime
        # A writer holds its lock but for the instant after creation; later, a living pid is another process's.
        if age < older_than or (age < _CREATION_SECONDS and _lives(name.partition("-")[0])):
            return False
        return not stat.S_ISREG(facts.st_mode) or _unlocked(name, folder)
    except FileNotFoundError:
        return False


def _lives(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _unlocked(name: str, folder: int) -> bool:
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
