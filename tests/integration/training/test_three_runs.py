"""D09: attempts on one host keep apart, and what is left of an older attempt cannot join a newer one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.toy_attempts import (
    LONG,
    attempt_file_of,
    end_all,
    ended,
    events,
    is_gone,
    marked,
    node_end,
    node_pid,
    node_process,
    of_kind,
    rank_pid,
    stepped,
    supervisor_pid,
    toy_attempt,
    toy_spec,
    wait_all_gone,
    wait_until,
    written,
)

from headway.training.local import LocalLauncher
from headway.training.process_table import environment_of


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    """A launcher of an empty home; whatever it started is gone afterwards."""
    yield LocalLauncher(tmp_path, tmp_path / "store", tmp_path)
    end_all(tmp_path)


def test_d09_three_two_node_runs_at_once_all_finish_though_the_first_ends_early(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    runs = [
        toy_attempt(tmp_path, {"steps": steps, "group": True}, nodes=2, run_id=f"{number:024x}")
        for number, steps in enumerate((2, 60, 60))
    ]
    for attempt in runs:
        launcher.submit(attempt, toy_spec(2))
    assert [ended(launcher, attempt).code for attempt in runs] == [0, 0, 0]
    assert [len(of_kind(attempt_file_of(attempt), "step")) for attempt in runs] == [2, 60, 60]


def test_d09_a_paused_supervisor_of_an_old_attempt_ends_itself_when_it_goes_on(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    first = toy_attempt(tmp_path, LONG | {"group": True}, nodes=2)
    launcher.submit(first, toy_spec(2))
    path = attempt_file_of(first)
    old = [supervisor_pid(first), node_pid(first, 0), node_pid(first, 1), rank_pid(path, 0, 0), rank_pid(path, 1, 1)]
    stepped(path)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    before = [len(events(path, node)) for node in range(2)]
    second = toy_attempt(tmp_path, {"steps": 20, "group": True}, nodes=2, attempt=2)
    launcher.submit(second, toy_spec(2))
    stepped(attempt_file_of(second))
    for pid in reversed(old):
        os.kill(pid, signal.SIGCONT)
    assert ended(launcher, second).code == 0
    wait_all_gone(path)
    # The old attempt wrote at most what its ranks had already handed over, and no end of its own.
    for node in range(2):
        assert "node_end" not in [event.kind for event in events(path, node)[before[node] :]]
    seen = launcher.observe(first.run_id, 1)
    assert (seen.state, seen.code, seen.cancelled) == ("ended", 77, False)


def test_d09_a_paused_old_node_ends_itself_and_cannot_join_the_new_attempt(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    first = toy_attempt(tmp_path, LONG)
    path = written(first, toy_spec())
    with node_process(path.resolve()) as old:
        rank = rank_pid(path, 0)
        stepped(path)
        old.send_signal(signal.SIGSTOP)
        second = toy_attempt(tmp_path, LONG, attempt=2)
        launcher.submit(second, toy_spec())
        new = attempt_file_of(second)
        stepped(new)
        old.send_signal(signal.SIGCONT)
        assert old.wait() == 77
        wait_until(lambda: is_gone(rank), "the end of the old rank")
        stepped(new, len(of_kind(new, "step")) + 5)
    assert launcher.observe(second.run_id, 2).state == "running"


def test_a_node_of_an_old_attempt_started_late_joins_nobody(tmp_path: Path, launcher: LocalLauncher) -> None:
    first = toy_attempt(tmp_path, {"steps": 1, "group": True}, nodes=2)
    launcher.submit(first, toy_spec(2))
    ended(launcher, first)
    second = toy_attempt(tmp_path, LONG | {"group": True}, nodes=2, attempt=2)
    launcher.submit(second, toy_spec(2))
    new = attempt_file_of(second)
    stepped(new)
    port = environment_of(rank_pid(new, 0))["MASTER_PORT"]
    before = events(attempt_file_of(first), 1)
    with node_process(attempt_file_of(first), 1, "--master-port", port) as late:
        assert late.wait() == 77
    assert events(attempt_file_of(first), 1) == before
    assert node_end(attempt_file_of(first), 1)["code"] == 0
    assert marked(attempt_file_of(first)) == []
    assert launcher.observe(second.run_id, 2).state == "running"
