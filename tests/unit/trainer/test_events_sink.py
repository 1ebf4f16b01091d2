"""A rank's end of the channel, with a node at the other end and without one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.blobs import NotCanonical
from trainer.events import EventSink, HeartbeatFile, node_folder, read_events, read_heartbeat


def environment(tmp_path: Path, rank: int, fd: int | None) -> dict[str, str]:
    given = {"TRAINER_ATTEMPT": str(tmp_path / "attempt.json"), "RANK": str(rank), "NODE_RANK": "1"}
    return given if fd is None else given | {"TRAINER_EVENT_FD": str(fd)}


def test_events_reach_the_node_one_a_line_and_are_checked_before(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    sink = EventSink.from_environment(environment(tmp_path, 0, theirs))
    sink.emit("step", {"step": 1, "text": "two\nlines"})
    with pytest.raises(NotCanonical):
        sink.emit("step", {"loss": float("inf")})
    sink.emit("phase", {"name": "save", "may_take_s": 5.0})
    sink.close()
    with os.fdopen(ours, "rb") as pipe:
        kinds = [json.loads(line)["kind"] for line in pipe]
    assert kinds == ["step", "phase"]


def test_a_phase_of_another_rank_changes_its_heartbeat_alone(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    sink = EventSink.from_environment(environment(tmp_path, 3, theirs))
    sink.emit("phase", {"name": "save", "may_take_s": 5.0})
    sink.close()
    with os.fdopen(ours, "rb") as pipe:
        assert pipe.read() == b""
    beat = read_heartbeat(tmp_path / "node-1" / "rank-3.heartbeat")
    assert beat is not None
    assert beat.may_take_s == 5.0


def test_a_heartbeat_counts_progress_and_forgets_the_allowance(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.heartbeat"
    assert read_heartbeat(path) is None
    heart = HeartbeatFile(path)
    assert read_heartbeat(path) is None
    heart.allow(7.5)
    heart.beat()
    first = read_heartbeat(path)
    heart.allow(None)
    second = read_heartbeat(path)
    assert first is not None
    assert second is not None
    assert (first.count, first.may_take_s, second.count, second.may_take_s) == (2, 7.5, 3, None)
    assert second.at >= first.at > 1_600_000_000_000_000
    heart.close()


def test_under_torchrun_rank_0_writes_the_stream_and_others_only_beat(tmp_path: Path) -> None:
    torchrun = {"TRAINER_ATTEMPT": str(tmp_path / "attempt.json"), "GROUP_RANK": "0"}
    sink = EventSink.from_environment(torchrun | {"RANK": "0"})
    sink.emit("step", {"step": 1})
    sink.close()
    other = EventSink.from_environment(torchrun | {"RANK": "1"})
    other.emit("step", {"step": 1})
    other.close()
    folder = node_folder(tmp_path / "attempt.json", 0)
    assert [event.data for event in read_events(folder / "events.jsonl")] == [{"step": 1}]
    assert read_heartbeat(folder / "rank-1.heartbeat") is not None


BLOCKED = """
import sys, threading
from pathlib import Path
from trainer.events import EventSink
sink = EventSink(2, Path(sys.argv[1]), None)
def waits_for_nothing():
    print("ready", flush=True)
    threading.Event().wait()
waits_for_nothing()
"""


def test_sigusr2_writes_the_stacks_and_ends_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 60
        while "waits_for_nothing" not in (tmp_path / "rank-2.stacks.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
        process.kill()


LEAVING = """
import os, signal, sys
from pathlib import Path
from trainer.events import EventSink
signal.signal(signal.SIGTERM, lambda *_: None)
class AsksLate:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
late = AsksLate()
sink = EventSink(0, Path(sys.argv[1]), None)
sys.exit(75)
"""


def test_a_rank_that_is_leaving_keeps_its_code_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", LEAVING, str(tmp_path)], check=False).returncode == 75
