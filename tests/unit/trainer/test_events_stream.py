"""A node's stream: nothing acknowledged is lost, nothing is doubled, wherever the writer dies."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import events as module
from trainer.blobs import Json, NotCanonical
from trainer.events import Event, EventWriter, StreamBroken, StreamBusy, last_event, read_events

DATA: st.SearchStrategy[dict[str, Json]] = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.text(max_size=20),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=3,
)


def said(events: list[Event]) -> list[tuple[str, dict[str, Json]]]:
    return [(event.kind, dict(event.data)) for event in events]


@settings(max_examples=60, deadline=None)
@given(
    written=st.lists(st.tuples(st.sampled_from(["step", "node_end"]), DATA), min_size=1, max_size=6),
    more=st.lists(st.tuples(st.just("step"), DATA), max_size=3),
    torn_share=st.floats(0, 1, exclude_max=True),
)
def test_a_writer_that_died_within_a_line_is_continued_after_the_last_whole_one(
    written: list[tuple[str, dict[str, Json]]], more: list[tuple[str, dict[str, Json]]], torn_share: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        writer = EventWriter(path, 3)
        for kind, data in written:
            writer.emit(kind, data)
        writer.close()
        whole = path.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        # The last line was being written when the writer died; whatever came before it had been acknowledged.
        path.write_bytes(whole[: len(whole) - len(last) + int(len(last) * torn_share)])
        assert said(read_events(path)) == written[:-1]
        again = EventWriter(path, 3)
        for kind, data in more:
            again.emit(kind, data)
        again.close()
        assert said(read_events(path)) == written[:-1] + more
        assert [event.seq for event in read_events(path)] == list(range(1, len(written) + len(more)))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 12), limits=st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_readers_that_keep_the_last_seq_see_each_event_once(count: int, limits: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        writer = EventWriter(path, 0)
        seen: list[Event] = []
        for number in range(count):
            writer.emit("step", {"step": number})
            seen += read_events(path, after=seen[-1].seq if seen else 0, limit=limits[number % len(limits)])
        while fresh := read_events(path, after=seen[-1].seq if seen else 0, limit=limits[0]):
            seen += fresh
        assert [event.data["step"] for event in seen] == list(range(count))
        writer.close()


WRITER = """
import sys
from pathlib import Path
from trainer.events import EventWriter
writer = EventWriter(Path(sys.argv[1]), 0)
number = int(sys.argv[2])
while True:
    writer.emit("checkpoint" if number % 7 == 0 else "step", {"number": number, "text": "x" * (number % 50)})
    number += 1
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_loses_and_doubles_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    begun = 0
    for lines in (1, 40, 7, 120):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(begun)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(lines):
                writer.stdout.readline()
            writer.kill()
            acknowledged = begun + lines + sum(1 for line in writer.stdout if line.endswith(b"\n"))
        assert writer.returncode == -signal.SIGKILL
        numbers = [event.data["number"] for event in read_events(path, limit=10**6)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= acknowledged
        begun = len(numbers)


def test_a_crash_between_write_and_sync_leaves_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, 0)

    def broken_sync(_: int) -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken_sync)
        with pytest.raises(OSError, match="does not answer"):
            writer.emit("node_end", {"code": 0})
    # A reader may have stored it, so it stays, and its seq is not given to another event.
    assert writer.emit("step", {}) == 2
    assert [event.kind for event in read_events(path)] == ["node_end", "step"]


def test_what_must_survive_the_machine_is_synced_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", 0)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    writer.emit("step", {})
    assert synced == []
    for kind in ("node_end", "checkpoint", "artifact", "error"):
        writer.emit(kind, {})
        assert synced.pop() == (tmp_path / "events.jsonl").stat().st_size


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_in_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, 0)
    writer.emit("step", {"step": 1})
    real, calls = os.pwrite, [0]

    def full(fd: int, data: bytes, offset: int) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return real(fd, data[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            writer.emit("step", {"step": 2})
    assert path.read_bytes().endswith(b"\n")
    writer.emit("step", {"step": 3})
    assert [event.data["step"] for event in read_events(path)] == [1, 3]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"at":1,"data":{},"kind":"a","node":0,"seq":2}\n', "carries seq 2"),
        (b'{"at":1,"data":{},"kind":"a","node":0,"seq":1}\n{"at":1,"data":{},"kind":"a","node":0,"seq":1}\n', "seq 1"),
        (b"\0\0\0\0\n", "no event"),
        (b"[]\n", "no event"),
        (b'{"seq":1}\n', "no event"),
    ],
    ids=["starts late", "doubled", "zeros", "list", "fields missing"],
)
def test_a_broken_stream_is_refused_by_reader_and_writer(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(StreamBroken, match=complaint):
        read_events(path)
    with pytest.raises(StreamBroken, match=complaint):
        EventWriter(path, 0)
    assert path.read_bytes() == content


def test_a_stream_of_another_node_is_not_continued(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", 0)
    writer.emit("step", {})
    writer.close()
    with pytest.raises(StreamBroken, match="of node 0, not 1"):
        EventWriter(tmp_path / "events.jsonl", 1)


def test_a_stream_has_one_writer(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", 0)
    with pytest.raises(StreamBusy):
        EventWriter(tmp_path / "events.jsonl", 0)
    writer.close()
    EventWriter(tmp_path / "events.jsonl", 0).close()


def test_a_stream_that_shrank_is_noticed_by_who_had_read_further(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    with pytest.raises(StreamBroken, match="is gone"):
        read_events(path, after=1)
    writer = EventWriter(path, 0)
    writer.emit("step", {})
    assert read_events(path, after=1) == []
    with pytest.raises(StreamBroken, match="holds 1 events; 2 were read"):
        read_events(path, after=2)


def test_an_event_that_json_cannot_say_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", 0)
    with pytest.raises(NotCanonical):
        writer.emit("step", {"loss": float("nan")})
    assert writer.emit("step", {"loss": None}) == 1


def test_the_last_event_is_found_behind_long_and_torn_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    assert last_event(path) is None
    writer = EventWriter(path, 0)
    assert last_event(path) is None
    monkeypatch.setattr(module, "_TAIL", 200)
    writer.emit("error", {"stack": "x" * 1000})
    writer.emit("node_end", {"code": 65})
    with path.open("ab") as torn:
        torn.write(b'{"at":')
    last = last_event(path)
    assert last is not None
    assert (last.seq, last.kind, last.data) == (2, "node_end", {"code": 65})
