"""D07: every signal to a node has a documented meaning, and none leaves an orphan. Ranks are toy workers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.toy_attempts import (
    events,
    marked,
    node_end,
    node_process,
    of_kind,
    rank_pid,
    stepped,
    toy_attempt,
    toy_spec,
    wait_until,
    written,
)

from trainer.spec import ExitCode

LONG = {"steps": 100_000}


def prepared(tmp_path: Path, toy: dict[str, Any], grace_s: float = 30.0) -> Path:
    return written(toy_attempt(tmp_path, LONG | toy, ranks=2), toy_spec(ranks=2, grace_s=grace_s))


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "sigterm"), (signal.SIGUSR1, "preempt"), (signal.SIGINT, "cancel")]
)
def test_d07_a_request_to_stop_lets_every_rank_save(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    path = prepared(tmp_path, {"group": True})
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path)
        node.send_signal(number)
        assert node.wait() == ExitCode.PREEMPTED
    assert of_kind(path, "stopping") == [{"reason": reason}]
    saved = [(data["rank"], data["saved"]) for data in of_kind(path, "metrics") if "saved" in data]
    assert sorted(rank for rank, _ in saved) == [0, 1]
    assert len({step for _, step in saved}) == 1
    assert marked(path) == []


def test_d07_sigint_twice_ends_ranks_that_do_not_listen_at_once(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"0": {"at": 1, "do": "deaf"}, "1": {"at": 1, "do": "deaf"}}}, grace_s=600.0)
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path)
        node.send_signal(signal.SIGINT)
        wait_until(lambda: of_kind(path, "stopping"), "the node to ask its ranks")
        assert node.poll() is None
        node.send_signal(signal.SIGINT)
        assert node.wait() == ExitCode.LOST_PEER
    assert node_end(path)["cause"] == "killed by a second SIGINT"
    assert marked(path) == []


def test_signals_to_a_node_that_is_leaving_change_nothing(tmp_path: Path) -> None:
    path = prepared(tmp_path, {})
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path)
        node.send_signal(signal.SIGTERM)
        wait_until(lambda: events(path)[-1].kind == "node_end", "the node's last words")
        while node.poll() is None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                node.send_signal(number)
        assert node.returncode == ExitCode.PREEMPTED
    assert [event.kind for event in events(path)].count("stopping") == 1


def test_d07_sighup_ends_neither_node_nor_ranks(tmp_path: Path) -> None:
    path = prepared(tmp_path, {})
    with node_process(path) as node:
        rank = rank_pid(path, 0)
        stepped(path)
        node.send_signal(signal.SIGHUP)
        os.kill(rank, signal.SIGHUP)
        stepped(path, len(of_kind(path, "step")) + 5)
        assert node.poll() is None


def test_d07_sigusr2_writes_stacks_and_ends_nothing(tmp_path: Path) -> None:
    path = prepared(tmp_path, {})
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path)
        node.send_signal(signal.SIGUSR2)
        told = wait_until(lambda: {data["rank"]: data["path"] for data in of_kind(path, "stacks")}, "stacks")
        assert set(told) == {0, 1}
        assert "main" in (path.parents[2] / told[0]).read_text()
        stepped(path, len(of_kind(path, "step")) + 5)
        assert node.poll() is None


def test_a_rank_that_has_no_handler_yet_survives_sigusr2(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"1": {"do": "never_begin"}}})
    with node_process(path) as node:
        stepped(path)
        node.send_signal(signal.SIGUSR2)
        wait_until(lambda: of_kind(path, "stacks"), "stacks")
        assert node.poll() is None


def test_a_rank_that_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"1": {"at": 1, "do": "deaf"}}}, grace_s=0.5)
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path, 3)
        node.send_signal(signal.SIGTERM)
        assert node.wait() == ExitCode.LOST_PEER
    assert node_end(path)["cause"] == "rank 1 did not stop within 0.5 s"
    assert marked(path) == []


def test_a_rank_that_had_not_begun_when_it_was_stopped_lost_nothing(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"1": {"do": "never_begin"}}})
    with node_process(path) as node:
        stepped(path)
        node.send_signal(signal.SIGTERM)
        assert node.wait() == ExitCode.PREEMPTED


def test_a_rank_that_had_begun_and_did_not_save_is_no_preemption(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"1": {"at": 1, "do": "unhandled"}}})
    with node_process(path) as node:
        rank_pid(path, 1)
        stepped(path, 3)
        node.send_signal(signal.SIGTERM)
        assert node.wait() == ExitCode.LOST_PEER
    assert node_end(path)["cause"] == "rank 1 ended by SIGTERM without saving"
