"""kill -9 and SIGSTOP of each part of a two-node attempt: who is named, and that nothing is left. Ranks are toys."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from support.toy_attempts import (
    LONG,
    RUN_ID,
    attempt_file_of,
    end_all,
    ended,
    grandchild_pid,
    is_gone,
    marked,
    node_end,
    node_pid,
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
from headway.training.process_table import boot_id, read_process
from headway.training.supervisor import monotonic_us
from trainer.events import HeartbeatFile
from trainer.spec import AttemptSpec, RunSpec

GROUP = LONG | {"group": True}
# In a session of its own: only who looks for descendants finds it.
WITH_GRANDCHILDREN = GROUP | {"ranks": {str(rank): {"at": 1, "do": "grandchild"} for rank in range(2)}}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    """A launcher of an empty home; whatever it started is gone afterwards."""
    yield LocalLauncher(tmp_path, tmp_path / "store", tmp_path)
    end_all(tmp_path)


def begun(launcher: LocalLauncher, attempt: AttemptSpec, spec: RunSpec) -> Path:
    """Submit, and wait for steps on both nodes."""
    launcher.submit(attempt, spec)
    path = attempt_file_of(attempt)
    rank_pid(path, 1, 1)
    stepped(path, 3)
    return path


def test_a_killed_supervisor_leaves_no_node_no_rank_and_no_grandchild(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, WITH_GRANDCHILDREN, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    theirs = [grandchild_pid(path, node) for node in range(2)]
    os.kill(supervisor_pid(attempt), signal.SIGKILL)
    wait_all_gone(path)
    assert all(is_gone(pid) for pid in theirs)
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.code, seen.cause, seen.supervisor_alive) == ("ended", None, "supervisor lost", False)
    assert seen.worker_seconds > 0
    assert seen.ended_at is not None
    # It was started once; that its supervisor was lost does not start it a second time.
    launcher.submit(attempt, toy_spec(2))
    assert launcher.observe(RUN_ID, 1) == seen
    assert marked(path) == []


def test_a_killed_supervisor_takes_a_stopped_node_with_it(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, WITH_GRANDCHILDREN, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    os.kill(node_pid(attempt, 1), signal.SIGSTOP)
    os.kill(supervisor_pid(attempt), signal.SIGKILL)
    wait_all_gone(path)


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_node_is_named_and_takes_the_attempt_with_it(
    tmp_path: Path, launcher: LocalLauncher, node: int
) -> None:
    attempt = toy_attempt(tmp_path, WITH_GRANDCHILDREN, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    orphan = grandchild_pid(path, node)
    os.kill(node_pid(attempt, node), signal.SIGKILL)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (77, f"node {node} killed by SIGKILL")
    assert seen.exit_codes[node] == -9
    assert is_gone(orphan)
    assert marked(path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_though_its_peer_ends_too(tmp_path: Path, launcher: LocalLauncher, rank: int) -> None:
    attempt = toy_attempt(tmp_path, GROUP, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    os.kill(rank_pid(path, rank, rank), signal.SIGKILL)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (77, f"node {rank}: rank {rank} killed by SIGKILL")
    assert marked(path) == []


def test_user_code_that_fails_on_one_node_ends_both(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, GROUP | {"ranks": {"1": {"at": 5, "do": "exit", "code": 65}}}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (65, "node 1: rank 1 exited with 65: ToyError: told to exit with 65")
    assert of_kind(attempt_file_of(attempt), "error", 1)[0]["message"] == "told to exit with 65"


def test_a_stopped_rank_is_the_hung_one_not_the_peer_that_waits_for_it(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, GROUP, nodes=2)
    path = begun(launcher, attempt, toy_spec(2, hang_floor_s=2.0))
    os.kill(rank_pid(path, 1, 1), signal.SIGSTOP)
    seen = ended(launcher, attempt)
    assert seen.code == 76
    assert seen.cause.startswith("node 1: rank 1 made no progress for ")
    assert seen.cause.endswith("(it was stopped)")
    assert of_kind(path, "stacks", 1)[0]["rank"] == 1
    assert marked(path) == []


def test_a_stopped_node_is_noticed_and_ended(tmp_path: Path, launcher: LocalLauncher) -> None:
    # Its rank goes on for a while; only the node's own silence tells.
    attempt = toy_attempt(tmp_path, WITH_GRANDCHILDREN, nodes=2)
    path = begun(launcher, attempt, toy_spec(2, hang_floor_s=2.0))
    os.kill(node_pid(attempt, 1), signal.SIGSTOP)
    seen = ended(launcher, attempt)
    assert seen.code == 76
    assert seen.cause.startswith("node 1 did not answer for ")
    assert seen.cause.endswith("(it was stopped)")
    assert marked(path) == []


def test_a_machine_that_stood_still_blames_nobody(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 60, "step_s": 0.02, "group": True}, nodes=2)
    path = begun(launcher, attempt, toy_spec(2, hang_floor_s=2.0))
    everything = [supervisor_pid(attempt), *(node_pid(attempt, node) for node in range(2))]
    everything += [rank_pid(path, rank, rank) for rank in range(2)]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    # Who watches wakes up first, and finds the others silent.
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)
    assert ended(launcher, attempt).code == 0
    assert len(of_kind(path, "step")) == 60


def test_a_stopped_supervisor_is_seen_and_the_attempt_can_be_killed(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, GROUP, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    assert not launcher.observe(RUN_ID, 1).supervisor_stuck
    os.kill(supervisor_pid(attempt), signal.SIGSTOP)
    # The kernel stops a process some moment after the signal was sent.
    wait_until(lambda: launcher.observe(RUN_ID, 1).supervisor_stuck or None, "the supervisor to be seen standing still")
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.supervisor_alive) == ("running", True)
    launcher.kill(RUN_ID, 1)
    assert marked(path) == []


@pytest.fixture
def pretended(tmp_path: Path) -> Iterator[HeartbeatFile]:
    """The heartbeat, 31 s old, of a process that stands in for a supervisor."""
    path = written(toy_attempt(tmp_path, LONG), toy_spec())
    with subprocess.Popen(["sleep", "600"]) as other:
        process = read_process(other.pid)
        assert process is not None
        keeper = {"pid": process.pid, "started": process.started, "boot_id": boot_id()}
        (path.parent / "supervisor.json").write_text(json.dumps(keeper))
        ages = chain([31_000_000], repeat(0))
        heart = HeartbeatFile(path.parent / "supervisor.heartbeat", lambda: monotonic_us() - next(ages))
        heart.beat()
        yield heart
        other.kill()


@pytest.mark.usefixtures("pretended")
def test_a_supervisor_that_lives_and_does_not_beat_is_stuck(launcher: LocalLauncher) -> None:
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.supervisor_alive, seen.supervisor_stuck) == ("starting", True, True)


def test_a_supervisor_that_beats_again_after_a_pause_is_not_stuck(
    launcher: LocalLauncher, pretended: HeartbeatFile
) -> None:
    # As after a machine stood still: who looks wakes up before who beats.
    late = threading.Timer(0.5, pretended.beat)
    late.start()
    assert launcher.observe(RUN_ID, 1).supervisor_stuck is False
    late.join()
    assert launcher.observe(RUN_ID, 1).supervisor_stuck is False


def test_a_75_that_no_node_was_asked_for_is_the_users_code(tmp_path: Path, launcher: LocalLauncher) -> None:
    toy = {"steps": 5, "ranks": {"1": {"at": 1, "do": "exit", "code": 75}}}
    attempt = toy_attempt(tmp_path, toy, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (65, "node 1: rank 1 exited with 75 unasked: ToyError: told to exit with 75")
    assert seen.exit_codes == (0, 75)


def test_a_75_unasked_is_named_before_the_peer_that_it_cost(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, GROUP | {"ranks": {"1": {"at": 3, "do": "exit", "code": 75}}}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (65, "node 1: rank 1 exited with 75 unasked: ToyError: told to exit with 75")


def test_a_stop_that_one_node_was_asked_for_is_a_stop_of_all(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, GROUP, nodes=2)
    path = begun(launcher, attempt, toy_spec(2))
    os.kill(node_pid(attempt, 1), signal.SIGTERM)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.exit_codes, seen.cancelled) == (75, (75, 75), False)
    assert [node_end(path, node)["unasked"] for node in range(2)] == [True, False]


def test_the_consequence_on_one_node_waits_for_the_cause_on_the_other(tmp_path: Path, launcher: LocalLauncher) -> None:
    ranks = {"0": {"at": 20, "do": "exit", "code": 65}, "1": {"at": 1, "do": "exit", "code": 77}}
    attempt = toy_attempt(tmp_path, LONG | {"ranks": ranks}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (65, "node 0: rank 0 exited with 65: ToyError: told to exit with 65")


def test_a_rank_that_does_not_heed_a_cancel_is_ended_after_the_grace(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG | {"ranks": {"1": {"at": 1, "do": "deaf"}}}, nodes=2)
    path = begun(launcher, attempt, toy_spec(2, grace_s=0.5))
    launcher.cancel(RUN_ID, 1, "now")
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cancelled, seen.cause) == (77, True, "node 1: rank 1 did not stop within 0.5 s")
    assert marked(path) == []


@pytest.mark.parametrize("moment_s", [0.0, 0.03, 0.1, 0.2])
def test_a_supervisor_killed_at_any_moment_leaves_nothing(
    tmp_path: Path, launcher: LocalLauncher, moment_s: float
) -> None:
    attempt = toy_attempt(tmp_path, WITH_GRANDCHILDREN, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    time.sleep(moment_s)
    os.kill(supervisor_pid(attempt), signal.SIGKILL)
    wait_all_gone(attempt_file_of(attempt))
    assert launcher.observe(RUN_ID, 1).cause == "supervisor lost"


@pytest.mark.parametrize("moment_s", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("how", ["cancel", "machine"])
def test_a_stop_at_any_moment_is_no_failure(tmp_path: Path, launcher: LocalLauncher, moment_s: float, how: str) -> None:
    attempt = toy_attempt(tmp_path, LONG, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    time.sleep(moment_s)
    if how == "cancel":
        launcher.cancel(RUN_ID, 1, "now")
    else:
        os.kill(supervisor_pid(attempt), signal.SIGTERM)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cancelled) == (75, how == "cancel"), seen.cause
    assert marked(attempt_file_of(attempt)) == []
