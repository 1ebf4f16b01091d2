"""Ranks forked from a warmed parent: what they answer, how they fail, and that none is left behind."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.forked import CallFailed, Warm

TESTS = Path(__file__).parents[2]
RUN = "trainer.forked:run_ranks"
WAIT_S = 120.0


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    parent = Warm(["support.forked_cases"], [TESTS])
    yield parent
    parent.close()


def wait_until(done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_ranks_share_a_group_and_answer_in_order(warm: Warm) -> None:
    answers = warm.call(RUN, function="support.forked_cases:add_up", world=3, arguments={"more": 10})
    assert [a["rank"] for a in answers] == [0, 1, 2]
    assert {a["total"] for a in answers} == {33.0}
    assert [a["pgid"] for a in answers] == [a["pid"] for a in answers], "each leads a process group"
    assert all(is_gone(a["pid"]) for a in answers)


def test_autograd_works_in_every_generation(warm: Warm) -> None:
    for _ in range(2):
        assert warm.call(RUN, function="support.forked_cases:learn", world=2, arguments={}) == [6.0, 6.0]


def test_a_rank_that_raises_ends_all_at_once_with_its_traceback(warm: Warm) -> None:
    with pytest.raises(CallFailed, match=r"(?s)RankFailed: rank 1 of 3: .*ValueError: this is rank 1") as caught:
        warm.call(RUN, function="support.forked_cases:fail", world=3, arguments={"rank": 1})
    assert "in fail" in str(caught.value)


def test_a_rank_that_dies_is_the_cause_and_not_who_noticed(warm: Warm) -> None:
    with pytest.raises(CallFailed, match=r"RankFailed: rank 2 of 3 was killed by signal 9"):
        warm.call(RUN, function="support.forked_cases:die", world=3, arguments={"rank": 2})


def test_an_answer_that_is_no_json_is_a_failure_of_its_rank(warm: Warm) -> None:
    with pytest.raises(CallFailed, match=r"(?s)RankFailed: rank \d of 2: .*not JSON serializable"):
        warm.call(RUN, function="support.forked_cases:no_json", world=2, arguments={})


def test_ranks_that_hang_are_named_and_killed(warm: Warm, tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=r"RanksLate: ranks \[0, 1\] of 2 did not answer in time"):
        warm.call(
            RUN, function="support.forked_cases:sleep", world=2, arguments={"pids": str(tmp_path)}, deadline_s=15.0
        )
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(map(is_gone, pids))


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = Warm(["support.forked_cases"], [TESTS])
    caught: list[str] = []

    def call() -> None:
        try:
            parent.call(RUN, function="support.forked_cases:sleep", world=2, arguments={"pids": str(tmp_path)})
        except CallFailed as error:
            caught.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: all((tmp_path / r).exists() and (tmp_path / r).read_text() for r in "01"), "ranks start")
    pids = [int((tmp_path / r).read_text()) for r in "01"]
    above = {int(re.findall(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[0]) for pid in pids}
    assert len(above) == 1
    os.kill(above.pop(), signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)), "the ranks of a killed parent end")
    caller.join(WAIT_S)
    assert caught == ["the warmed parent ended with -9"]
    parent.close()
