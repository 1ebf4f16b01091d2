"""The local store: atomic, verified on read, closed to paths and symbolic links, clean after a crash."""

import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.artifacts.errors import BlobCorrupt, BlobMissing, SourceRefused, StoreTampered
from headway.artifacts.store import LocalStore
from trainer.blobs import InvalidDigest, digest_bytes

DATA = b"forty-two rows"
DIGEST = digest_bytes(DATA)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def _file(store: LocalStore, digest: str = DIGEST) -> Path:
    return store.root / "sha256" / digest[7:9] / digest[9:]


def _damage(file: Path, data: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(data)


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=5_000))
def test_what_was_put_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = LocalStore(tmp_path_factory.getbasetemp() / "shared store")
    blob = store.put_bytes(data)
    assert (blob.digest, blob.size) == (digest_bytes(data), len(data))
    assert store.get_bytes(blob.digest) == data
    assert store.stat(blob.digest) == blob


def test_a_file_of_several_pieces_is_stored_whole(store: LocalStore, tmp_path: Path) -> None:
    data = os.urandom(3 << 20) + b"rest"
    (tmp_path / "big").write_bytes(data)
    blob = store.put_file(tmp_path / "big", "application/vnd.apache.parquet")
    assert (blob.digest, blob.media_type) == (digest_bytes(data), "application/vnd.apache.parquet")
    with store.open(blob.digest) as source:
        assert source.read() == data
    path = store.read_path(blob.digest)
    assert path.read_bytes() == data
    assert path.is_relative_to(store.root)
    assert path.stat().st_mode & 0o222 == 0


def test_the_same_bytes_are_stored_once(store: LocalStore) -> None:
    first = store.put_bytes(DATA)
    inode = _file(store).stat().st_ino
    assert store.put_bytes(DATA) == first
    assert _file(store).stat().st_ino == inode
    assert [blob.digest for blob in store.list()] == [DIGEST]
    assert list((store.root / "tmp").iterdir()) == []


def test_listing_is_in_order_of_digest(store: LocalStore) -> None:
    digests = sorted(store.put_bytes(bytes([n])).digest for n in range(20))
    assert [blob.digest for blob in store.list()] == digests


def test_erasing_twice_is_no_error(store: LocalStore) -> None:
    store.put_bytes(DATA)
    assert [store.erase(DIGEST), store.erase(DIGEST)] == [True, False]
    assert store.stat(DIGEST) is None
    with pytest.raises(BlobMissing, match=DIGEST):
        store.get_bytes(DIGEST)


def _reads(store: LocalStore) -> list[Callable[[], object]]:
    def opened() -> bytes:
        with store.open(DIGEST) as source:
            return source.read()

    return [lambda: store.get_bytes(DIGEST), lambda: store.read_path(DIGEST), opened, lambda: store.put_bytes(DATA)]


@pytest.mark.parametrize("bit", [0, 7, 8 * len(DATA) - 1])
def test_a_flipped_bit_is_an_error_that_names_the_digest(store: LocalStore, bit: int) -> None:
    store.put_bytes(DATA)
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << (bit % 8)
    _damage(_file(store), bytes(damaged))
    for read in _reads(store):
        with pytest.raises(BlobCorrupt, match=DIGEST):
            read()


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"x"])
def test_a_blob_cut_or_lengthened_is_an_error(store: LocalStore, data: bytes) -> None:
    store.put_bytes(DATA)
    _damage(_file(store), data)
    for read in _reads(store):
        with pytest.raises(BlobCorrupt, match=DIGEST):
            read()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "sha256:../../" + "a" * 58, "sha256:" + "A" * 64, "", DIGEST + "/.."]
)
def test_only_a_digest_names_a_blob(store: LocalStore, name: str) -> None:
    for use in (store.get_bytes, store.read_path, store.stat, store.erase):
        with pytest.raises(InvalidDigest):
            use(name)
    with pytest.raises(InvalidDigest), store.open(name):
        pass


def test_a_symbolic_link_in_place_of_a_blob_is_refused(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(DATA)
    _file(store).parent.mkdir()
    _file(store).symlink_to(outside)
    for read in _reads(store):
        with pytest.raises(StoreTampered):
            read()
    with pytest.raises(StoreTampered):
        list(store.list())
    assert store.erase(DIGEST)
    assert outside.read_bytes() == DATA


@pytest.mark.parametrize("place", ["sha256", f"sha256/{DIGEST[7:9]}", "tmp"])
def test_a_symbolic_link_in_place_of_a_folder_is_refused(store: LocalStore, tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target = store.root / place
    if target.exists():
        target.rmdir()
    target.symlink_to(outside)
    with pytest.raises(StoreTampered, match="symbolic link"):
        store.put_bytes(DATA)
    assert list(outside.iterdir()) == []


def test_a_device_or_folder_in_place_of_a_blob_does_not_block(store: LocalStore) -> None:
    _file(store).parent.mkdir()
    os.mkfifo(_file(store))
    with pytest.raises(StoreTampered):
        store.get_bytes(DIGEST)
    _file(store).unlink()
    _file(store).mkdir()
    with pytest.raises(StoreTampered):
        store.get_bytes(DIGEST)


def test_only_regular_files_are_taken(store: LocalStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SourceRefused, match=source.name):
            store.put_file(source)


def test_a_root_reached_through_a_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = LocalStore(tmp_path / "link")
    store.put_bytes(DATA)
    assert store.root == tmp_path / "real"
    assert LocalStore(tmp_path / "real").get_bytes(DIGEST) == DATA


def _put_and_die(root: Path, point: str) -> None:
    def probe(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalStore(root, probe).put_bytes(DATA)


@pytest.mark.parametrize(("point", "there"), [("written", False), ("flushed", False), ("linked", True)])
def test_a_killed_writer_leaves_no_torn_blob_and_no_file_after_the_next_start(
    tmp_path: Path, point: str, there: bool
) -> None:
    child = multiprocessing.get_context("forkserver").Process(target=_put_and_die, args=(tmp_path, point))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    store = LocalStore(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (store.stat(DIGEST) is not None) == there
    assert store.get_bytes(store.put_bytes(DATA).digest) == DATA


def test_a_living_writer_is_not_swept(store: LocalStore) -> None:
    held, go = threading.Event(), threading.Event()

    def probe(reached: str) -> None:
        if reached == "flushed":
            held.set()
            assert go.wait(60)

    writer = threading.Thread(target=lambda: LocalStore(store.root, probe).put_bytes(DATA))
    writer.start()
    assert held.wait(60)
    [temporary] = (store.root / "tmp").iterdir()
    # Even when it looks old and its pid means nothing here (a writer in another container): its lock tells.
    foreign = temporary.rename(temporary.with_name("4194999-" + "0" * 16))
    os.utime(foreign, (1, 1))
    assert LocalStore(store.root).sweep_temporary() == ()
    foreign.rename(temporary)
    go.set()
    writer.join(60)
    assert store.get_bytes(DIGEST) == DATA


def test_sweeping_keeps_what_is_younger_than_asked(store: LocalStore) -> None:
    left = store.root / "tmp" / "4194999-left"
    left.write_bytes(b"half")
    assert store.sweep_temporary(older_than=3_600) == ()
    os.utime(left, (time.time() - 7_200, time.time() - 7_200))
    assert store.sweep_temporary(older_than=3_600) == ("4194999-left",)
    assert not left.exists()


def test_a_lock_held_by_another_process_alone_protects(store: LocalStore) -> None:
    left = store.root / "tmp" / "4194999-locked"
    left.write_bytes(b"half")
    with left.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert store.sweep_temporary() == ()
    assert store.sweep_temporary() == ("4194999-locked",)


def test_threads_may_put_the_same_bytes_at_once(store: LocalStore) -> None:
    data = os.urandom(1 << 20)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(store.put_bytes(data).digest)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [digest_bytes(data)] * 8
    assert len(list(store.list())) == 1
