"""The event channel misbehaves: a full disk, lines that come twice or out of order, many readers at once."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cluster_bench import ClusterBench
from support.cluster_sound import assert_events_once, assert_sound

from headway.errors import HeadwayError
from headway.training.reconcile import Reconciler
from tests.cluster.cluster_env import wait_until
from trainer.events import node_folder


def test_a_full_disk_ends_the_attempt_and_the_next_one_does_the_work(bench: ClusterBench) -> None:
    """Node 0's stream lies on a file system of 32 kB: it fails to write, and the gang is replaced."""
    flood = {"at": 5, "attempts": [1], "do": "flood"}
    run_id = bench.ask(orders={"steps": 80, "step_s": 0.01, "every": 20, "ranks": {"0": flood}})
    folder = node_folder(bench.attempt_file(run_id), 0)
    with small_disk(folder):
        bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    run = bench.finished(run_id)
    assert [a.state for a in run.attempts] == ["failed", "succeeded"]
    assert run.attempts[0].counts
    assert_sound(bench)


def test_lines_out_of_order_end_the_attempt(bench: ClusterBench) -> None:
    """Two whole lines have changed places: what follows cannot be trusted, so another attempt does the work."""
    spoil(bench, lambda first, second: (second, first))


def test_a_line_that_comes_twice_ends_the_attempt(bench: ClusterBench) -> None:
    spoil(bench, lambda first, second: (first, first))


def test_many_readers_at_once_record_each_event_once(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"steps": 40, "step_s": 0.01})
    problems: list[str] = []

    def read() -> None:
        with bench.services() as services:
            reconciler = Reconciler(services, bench.launcher())
            while services.catalog.run(services.principal, run_id).status == "open":
                try:
                    reconciler.run(run_id)
                except HeadwayError as error:
                    problems.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    run = bench.run(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 1)
    assert_events_once(bench, run_id)
    assert_sound(bench)


def spoil(bench: ClusterBench, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
    """Change two neighbouring lines of equal length that nobody has read yet, and see the run through all the same."""
    run_id = bench.start(orders={"hold": True, "every": 100_000})
    bench.stepping(run_id, steps=12)
    stream = node_folder(bench.attempt_file(run_id), 0) / "events.jsonl"
    with bench.services() as services:
        read = services.catalog.event_cursor(services.principal, run_id, 1, 0)
    first = wait_until(lambda: neighbours(stream, read), "two lines that nobody has read")
    lines = stream.read_bytes().splitlines(keepends=True)
    changed = b"".join(change(lines[first], lines[first + 1]))
    with stream.open("r+b") as file:
        file.seek(sum(map(len, lines[:first])))
        file.write(changed)
    bench.until(run_id, lambda run: len(run.attempts) > 1, "a second attempt")
    first_end = bench.run(run_id).attempts[0]
    assert first_end.state in ("lost", "failed")
    bench.order(run_id)
    run = bench.finished(run_id)
    assert (run.status, len(run.attempts)) == ("succeeded", 2)
    assert_sound(bench)


def neighbours(stream: Path, read: int) -> int | None:
    """The index of the first of two unread neighbouring lines that are equally long; None while there are none."""
    lines = [line for line in stream.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    for index in range(read + 1, len(lines) - 2):
        if len(lines[index]) == len(lines[index + 1]):
            return index
    return None


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 32 kB at `folder`, which is mounted before the pods start."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k,mode=0777", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
