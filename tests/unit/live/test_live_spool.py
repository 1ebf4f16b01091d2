"""The inference log: whole records come back, torn ends do not hide them, limits hold, one writer at a time."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.serving.live import spool as module
from headway.serving.live.spool import (
    SEAL_REQUEST,
    ServerRunning,
    Spool,
    SpoolFull,
    SpoolLimits,
    dropped_count,
    scan_segment,
    segment_file,
    segments,
    server_running,
)

MUCH = 1 << 30


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool")
    yield opened
    opened.close()


def _records(folder: Path) -> list[bytes]:
    return [r for n in segments(folder) for r in scan_segment(segment_file(folder, n), 0, sealed=True).records]


def test_records_come_back_in_order_over_segments(spool: Spool) -> None:
    wanted = [str(i).encode() for i in range(30)]
    for start in range(0, 30, 10):
        spool.append(wanted[start : start + 10], MUCH)
        spool.seal()
    assert _records(spool.folder) == wanted
    assert len(segments(spool.folder)) == 3
    assert spool.status().records == 30


@settings(deadline=None, max_examples=60)
@given(data=st.data(), records=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6))
def test_a_cut_anywhere_loses_only_what_was_not_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, records: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    spool = Spool(folder)
    spool.append(records, MUCH)
    spool.close()
    (name,) = segments(folder)
    path = segment_file(folder, name)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    ends = [sum(8 + len(r) for r in records[: i + 1]) for i in range(len(records))]
    kept = sum(end <= cut for end in ends)
    on_edge = cut == (ends[kept - 1] if kept else 0)
    growing, ended = scan_segment(path, 0, sealed=False), scan_segment(path, 0, sealed=True)
    assert list(growing.records) == list(ended.records) == records[:kept]
    assert (growing.torn, growing.end) == (0, ends[kept - 1] if kept else 0)
    assert (ended.torn, ended.end) == (0 if on_edge else 1, cut)


def test_a_record_with_a_wrong_check_sum_is_counted_and_the_next_one_read(spool: Spool) -> None:
    spool.append([b"first", b"second", b"third"], MUCH)
    spool.seal()
    path = segment_file(spool.folder, segments(spool.folder)[0])
    data = bytearray(path.read_bytes())
    data[8 + 5 + 8] ^= 1
    path.write_bytes(bytes(data))
    scan = scan_segment(path, 0, sealed=True)
    assert (scan.records, scan.torn, scan.end) == ((b"first", b"third"), 1, len(data))


def test_a_torn_end_is_counted_by_the_next_server_which_writes_elsewhere(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    first.append([b"whole"], MUCH)
    first.close()
    (name,) = segments(tmp_path)
    with segment_file(tmp_path, name).open("ab") as file:
        file.write(b"\x05\x00\x00\x00half")
    second = Spool(tmp_path)
    second.append([b"next"], MUCH)
    assert (second.status().torn, second.status().records) == (1, 2)
    second.close()
    assert _records(tmp_path) == [b"whole", b"next"]


def test_names_ascend_after_a_restart_with_a_clock_that_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        monkeypatch.setattr(module.time, "time_ns", lambda number=number: (9 - 3 * number) * 1_000_000_000)
        spool = Spool(tmp_path)
        for _ in range(2):
            spool.append([str(number).encode()], MUCH)
            spool.seal()
        spool.close()
    assert _records(tmp_path) == [b"0", b"0", b"1", b"1", b"2", b"2"]


def test_a_full_log_takes_nothing_of_a_group_and_takes_again_after_shipping(spool: Spool) -> None:
    spool.append([b"x" * 100], 300)
    spool.seal()
    with pytest.raises(SpoolFull) as caught:
        spool.append([b"y" * 100, b"z" * 100], 300)
    assert caught.value.why == "full"
    assert _records(spool.folder) == [b"x" * 100]
    segment_file(spool.folder, segments(spool.folder)[0]).unlink()
    spool.append([b"y" * 100, b"z" * 100], 300)
    assert _records(spool.folder) == [b"y" * 100, b"z" * 100]


@pytest.mark.parametrize("refused", [(), ("ftruncate",), ("ftruncate", "fdatasync")])
def test_a_disk_that_fills_in_the_middle_of_a_record_hides_no_other(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    def broken(*_: int) -> None:
        raise OSError(5, "Input/output error")

    spool.append([b"before"], MUCH)
    real = os.write
    kept = {name: getattr(os, name) for name in refused}

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 10:
            return real(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    for name in refused:
        monkeypatch.setattr(module.os, name, broken)
    with pytest.raises(SpoolFull, match="No space left"):
        spool.append([b"too much"], MUCH)
    monkeypatch.setattr(module.os, "write", real)
    for name in refused:
        monkeypatch.setattr(module.os, name, kept[name])
    spool.append([b"after"], MUCH)
    assert _records(spool.folder) == [b"before", b"after"]


def test_the_count_of_dropped_answers_survives_a_kill(tmp_path: Path) -> None:
    def drop() -> None:
        spool = Spool(tmp_path)
        spool.drop(3)
        spool.drop(4)
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=drop)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert dropped_count(tmp_path) == 7
    again = Spool(tmp_path)
    assert again.status().dropped == 7
    again.close()


def test_a_second_server_of_the_same_name_is_refused(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAKEOVER_SECONDS", 0.0)
    assert server_running(spool.folder)
    with pytest.raises(ServerRunning, match="--name"):
        Spool(spool.folder)
    spool.close()
    assert not server_running(spool.folder)


@pytest.mark.parametrize("how", ["size", "age", "asked"])
def test_a_segment_ends_by_size_by_age_and_when_asked(tmp_path: Path, how: str) -> None:
    limits = {
        "size": SpoolLimits(segment_bytes=1, group_seconds=0.01),
        "age": SpoolLimits(segment_seconds=0.0, group_seconds=0.01),
        "asked": SpoolLimits(group_seconds=0.01),
    }[how]
    spool = Spool(tmp_path, limits)
    spool.append([b"one"], MUCH)
    if how == "asked":
        (tmp_path / SEAL_REQUEST).touch()
        spool.append([b"more"], MUCH)
    last = time.monotonic() + 30
    while spool._file is not None:
        assert time.monotonic() < last
        time.sleep(0.01)
    spool.append([b"two"], MUCH)
    spool.close()
    assert len(segments(tmp_path)) == 2
    assert not (tmp_path / SEAL_REQUEST).exists()


def test_a_slow_disk_holds_up_no_append(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, let_go = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        stuck.set()
        assert let_go.wait(60)

    monkeypatch.setattr(module.os, "fdatasync", slow)
    spool.append([b"one"], MUCH)
    assert stuck.wait(60)
    spool.append([b"two"], MUCH)
    assert _records(spool.folder) == [b"one", b"two"]
    let_go.set()
