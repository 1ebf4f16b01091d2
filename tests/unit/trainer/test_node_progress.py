"""Silence: which is a hang, which is allowed, and what a hung rank leaves behind. Ranks are toy workers."""

import os
import signal
from pathlib import Path
from typing import Any

from support.toy_attempts import (
    marked,
    node_end,
    node_process,
    of_kind,
    rank_pid,
    run_node,
    stepped,
    toy_attempt,
    toy_spec,
    written,
)

from trainer.spec import ExitCode

LONG = {"steps": 100_000}
# Above the time that a rank takes to begin on a busy machine.
FLOOR_S = 2.0


def prepared(
    tmp_path: Path, toy: dict[str, Any], hang_floor_s: float, ranks: int = 2, hang_factor: float = 3.0
) -> Path:
    spec = toy_spec(ranks=ranks, hang_floor_s=hang_floor_s, hang_factor=hang_factor)
    return written(toy_attempt(tmp_path, toy, ranks=ranks), spec)


def test_a_hung_rank_is_named_with_its_stacks(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG | {"ranks": {"1": {"at": 3, "do": "hang"}}}, FLOOR_S)
    assert run_node(path)[0] == ExitCode.HUNG
    end = node_end(path)
    assert end["cause_rank"] == 1
    assert end["cause"].startswith("rank 1 made no progress for ")
    told = {data["rank"]: data["path"] for data in of_kind(path, "stacks")}
    assert told[1] == "attempts/1/node-0/rank-1.stacks.txt"
    assert "misbehave" in (path.parents[2] / told[1]).read_text()
    assert marked(path) == []


def test_a_stopped_rank_is_continued_for_its_stacks_and_named_though_its_peers_wait_too(tmp_path: Path) -> None:
    # Long steps: all ranks beat within the same moment, and only being stopped tells the culprit from who waits for it.
    path = prepared(tmp_path, LONG | {"group": True, "step_s": 0.2}, FLOOR_S, ranks=3)
    with node_process(path) as node:
        stepped(path, 3)
        os.kill(rank_pid(path, 2), signal.SIGSTOP)
        assert node.wait() == ExitCode.HUNG
    end = node_end(path)
    assert (end["cause_rank"], end["consequence"]) == (2, False)
    assert end["cause"].endswith("(it was stopped)")
    assert {data["rank"] for data in of_kind(path, "stacks")} == {0, 1, 2}


def test_a_rank_that_never_begins_is_hung_after_the_floor(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"0": {"do": "never_begin"}}}, FLOOR_S, ranks=1)
    assert run_node(path)[0] == ExitCode.HUNG
    assert of_kind(path, "stacks") == []


def test_a_phase_may_be_silent_for_as_long_as_it_said(tmp_path: Path) -> None:
    toy = {"steps": 3, "ranks": {"1": {"at": 2, "do": "slow", "seconds": 2.5}}}
    path = prepared(tmp_path, toy, FLOOR_S)
    assert run_node(path)[0] == ExitCode.DONE


def test_where_steps_are_slow_silence_may_be_long(tmp_path: Path) -> None:
    toy = {"steps": 4, "step_s": 0.5, "ranks": {"0": {"at": 4, "do": "quiet", "seconds": 2.0}}}
    path = prepared(tmp_path, toy, FLOOR_S, ranks=1, hang_factor=8.0)
    assert run_node(path)[0] == ExitCode.DONE


def test_where_steps_are_fast_the_floor_decides(tmp_path: Path) -> None:
    toy = {"steps": 100_000, "ranks": {"0": {"at": 5, "do": "quiet", "seconds": 60.0}}}
    path = prepared(tmp_path, toy, FLOOR_S, ranks=1, hang_factor=8.0)
    assert run_node(path)[0] == ExitCode.HUNG
