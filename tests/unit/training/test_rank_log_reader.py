"""Reading a rank's output while its node writes and rotates it: nothing is lost, doubled, cut in a character."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer.rank_log
from headway.training.rank_logs import RankLogReader
from trainer.rank_log import RankLog

LIMIT = 64


class Printer:
    """The node's end: what a rank prints goes through the real `RankLog`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stdout-rank-0.log"
        reading, self.writing = os.pipe()
        self.log = RankLog(self.path, reading)

    def write(self, data: bytes) -> None:
        os.write(self.writing, data)
        self.log.relay()


@contextmanager
def printer(folder: Path) -> Iterator[Printer]:
    made = Printer(folder)
    try:
        yield made
    finally:
        os.close(made.writing)
        os.close(made.log.channel)


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.rank_log, "LIMIT", LIMIT)
        yield


def without_marks(text: str) -> str:
    """Leave out the line with which the node says that the first file is full."""
    lines = text.split("\n--- ")
    return lines[0] + "".join(line.split(" ---\n", 1)[1] for line in lines[1:])


@settings(deadline=None, max_examples=30)
@given(pieces=st.lists(st.tuples(st.text("aé€😀\n", min_size=1, max_size=20), st.integers(1, 7)), max_size=30))
def test_a_reader_that_keeps_up_misses_and_doubles_nothing(pieces: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder, printer(Path(folder)) as rank:
        reader = RankLogReader(rank.path)
        seen = reader.read()
        for text, size in pieces:
            data = text.encode()
            for start in range(0, len(data), size):
                rank.write(data[start : start + size])
                seen += reader.read()
        seen += reader.finish()
    data = "".join(text for text, _ in pieces).encode()
    # The node's own line, between the first file and the rest, may stand within a character.
    assert without_marks(seen) == "".join(d.decode(errors="backslashreplace") for d in (data[:LIMIT], data[LIMIT:]))


def test_a_reader_that_comes_late_gets_the_beginning_and_the_newest(tmp_path: Path) -> None:
    with printer(tmp_path) as rank:
        lines = [f"line {number:04d}\n" for number in range(100)]
        for line in lines:
            rank.write(line.encode())
        seen = RankLogReader(rank.path).finish()
    assert seen.startswith("".join(lines[:6]))
    assert seen.endswith("".join(lines[-4:]))
    assert "the rest is left out" in seen
    kept = without_marks(seen)
    assert len(kept) == 2 * LIMIT + (tmp_path / "stdout-rank-0.log.2").stat().st_size


def test_a_reader_that_was_away_for_two_rotations_says_so(tmp_path: Path) -> None:
    with printer(tmp_path) as rank:
        reader = RankLogReader(rank.path)
        rank.write(b"x" * (LIMIT + 10))
        reader.read()
        rank.write(b"y" * (3 * LIMIT))
        late = reader.finish()
    assert "rotated away before it was read" in late
    assert late.startswith("y" * (LIMIT - 10))


def test_a_rotation_between_two_reads_costs_nothing(tmp_path: Path) -> None:
    with printer(tmp_path) as rank:
        reader = RankLogReader(rank.path)
        rank.write(b"x" * (LIMIT + 10))
        first = reader.read()
        rank.write(b"y" * (LIMIT + 10))
        assert reader.finish() == "y" * (LIMIT + 10)
    assert without_marks(first) == "x" * (LIMIT + 10)


def test_what_is_no_text_is_shown_as_escapes(tmp_path: Path) -> None:
    with printer(tmp_path) as rank:
        rank.write(b"\xff\xe2\x82")
        reader = RankLogReader(rank.path)
        assert reader.read() == "\\xff"
        assert reader.finish() == "\\xe2\\x82"


def test_there_is_nothing_before_the_rank_begins(tmp_path: Path) -> None:
    reader = RankLogReader(tmp_path / "stdout-rank-0.log")
    assert reader.read() == ""
    with printer(tmp_path) as rank:
        rank.write(b"hello\n")
        assert reader.read() == "hello\n"
    assert reader.finish() == ""
