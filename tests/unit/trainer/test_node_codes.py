"""What a node says about how its ranks ended. Ranks are toy workers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.toy_attempts import (
    attempt_file_of,
    end_marked,
    events,
    is_gone,
    marked,
    node_end,
    node_process,
    of_kind,
    rank_pid,
    run_node,
    stepped,
    toy_attempt,
    toy_spec,
    wait_all_gone,
    wait_until,
    written,
)

from trainer.rank_log import LIMIT
from trainer.spec import ExitCode

LONG = {"steps": 100_000}


def prepared(tmp_path: Path, toy: dict[str, Any], ranks: int = 2, grace_s: float = 10.0) -> Path:
    return written(toy_attempt(tmp_path, toy, ranks=ranks), toy_spec(ranks=ranks, grace_s=grace_s))


def test_a_run_to_the_end(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"steps": 3})
    assert run_node(path) == (0, "")
    kinds = [event.kind for event in events(path)]
    assert kinds[0] == "node_start"
    assert kinds[-1] == "node_end"
    assert [data["step"] for data in of_kind(path, "step")] == [1, 2, 3]
    assert [data["name"] for data in of_kind(path, "phase")] == ["train", "done"]
    assert events(path)[0].data["ranks"] == [0, 1]
    end = node_end(path)
    assert (end["code"], end["cause"], end["cause_rank"]) == (0, "done", None)
    assert end["worker_seconds"] > 2 * 3 * 0.01


def test_ranks_get_torchruns_environment_and_the_run_s_threads(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"steps": 100_000})
    with node_process(path):
        environment = Path(f"/proc/{rank_pid(path, 1)}/environ").read_bytes().split(b"\0")
        given = dict(item.decode().split("=", 1) for item in environment if b"=" in item)
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TRAINER_ATTEMPT": str(path),
        "HEADWAY_ATTEMPT": f"{json.loads(path.read_text())['run_id']}/1",
        "OMP_NUM_THREADS": "1",
    }
    assert expected.items() <= given.items()
    assert int(given["MASTER_PORT"]) > 0
    assert "TRAINER_STORE_FD" not in given


def test_events_that_a_rank_wrote_before_it_ended_are_all_kept_in_order(tmp_path: Path) -> None:
    toy = {"steps": 1, "ranks": {"0": {"at": 1, "do": "flood", "events": 3000}}}
    path = prepared(tmp_path, toy, ranks=1)
    assert run_node(path)[0] == 0
    assert [data["number"] for data in of_kind(path, "metrics") if "number" in data] == list(range(3000))


@pytest.mark.parametrize(("code", "expected"), [(64, 64), (65, 65), (76, 76), (77, 77), (1, 65), (2, 65), (137, 65)])
def test_a_rank_s_exit_code_becomes_the_node_s(tmp_path: Path, code: int, expected: int) -> None:
    toy = {"steps": 2, "ranks": {"1": {"at": 1, "do": "exit", "code": code}}}
    path = prepared(tmp_path, toy)
    assert run_node(path)[0] == expected
    end = node_end(path)
    assert (end["code"], end["cause_rank"]) == (expected, 1)
    assert end["cause"] == f"rank 1 exited with {code}: ToyError: told to exit with {code}"


@pytest.mark.parametrize("tells", [False, True])
def test_the_error_file_becomes_an_event_unless_the_rank_told_it(tmp_path: Path, tells: bool) -> None:
    path = prepared(tmp_path, {"ranks": {"0": {"at": 1, "do": "exit", "code": 65, "tells": tells}}}, ranks=1)
    run_node(path)
    assert of_kind(path, "error") == [
        {"rank": 0, "kind": "ToyError", "message": "told to exit with 65", "stack": "toy stack"}
    ]


def test_an_uncaught_exception_is_the_users_code_and_its_text_is_in_the_log(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"ranks": {"0": {"at": 1, "do": "raise"}}}, ranks=1)
    assert run_node(path)[0] == ExitCode.USER_CODE
    assert "told to raise" in (path.parent / "node-0" / "stdout-rank-0.log").read_text()


def test_the_first_bad_end_takes_the_other_ranks_with_it_at_once(tmp_path: Path) -> None:
    toy = {"steps": 100_000, "ranks": {"0": {"at": 3, "do": "exit", "code": 65}, "1": {"at": 1, "do": "deaf"}}}
    path = prepared(tmp_path, toy, grace_s=600.0)
    assert run_node(path)[0] == ExitCode.USER_CODE
    assert marked(path) == []


def test_a_killed_rank_is_the_cause_though_its_peer_leaves_first_words(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG | {"group": True}, ranks=3)
    with node_process(path) as node:
        stepped(path)
        os.kill(rank_pid(path, 1), signal.SIGKILL)
        assert node.wait() == ExitCode.LOST_PEER
    assert (node_end(path)["cause"], node_end(path)["cause_rank"]) == ("rank 1 killed by SIGKILL", 1)
    assert node_end(path)["consequence"] is False


def test_a_lost_peer_alone_is_told_as_a_consequence(tmp_path: Path) -> None:
    toy = {"steps": 100_000, "ranks": {"1": {"at": 1, "do": "exit", "code": 77}}}
    path = prepared(tmp_path, toy)
    assert run_node(path)[0] == ExitCode.LOST_PEER
    assert (node_end(path)["cause_rank"], node_end(path)["consequence"]) == (1, True)


def test_a_rank_that_saved_unasked_gives_its_neighbours_the_grace(tmp_path: Path) -> None:
    toy = {"steps": 30, "ranks": {"0": {"at": 1, "do": "checkpoint"}, "1": {"at": 1, "do": "exit", "code": 75}}}
    path = prepared(tmp_path, toy)
    assert run_node(path)[0] == ExitCode.PREEMPTED
    assert node_end(path)["unasked"] is False
    assert len(of_kind(path, "step")) == 30
    assert of_kind(path, "stopping") == [{"reason": "preempt"}]
    assert of_kind(path, "error") == []


def test_a_75_that_nobody_asked_for_and_that_saved_nothing_is_the_users_code(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"steps": 5, "ranks": {"1": {"at": 1, "do": "exit", "code": 75}}})
    assert run_node(path)[0] == ExitCode.USER_CODE
    assert node_end(path)["cause"] == "rank 1 exited with 75 unasked: ToyError: told to exit with 75"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"[1]", "rank 0 exited with 65: unreadable: [1]"),
        (b"{}", "rank 0 exited with 65: unreadable: {}"),
        (b'{"kind":', 'rank 0 exited with 65: unreadable: {"kind":'),
        (b"\xff\n", "rank 0 exited with 65: unreadable: \\xff\\n"),
        (b'{"kind":["a"],"message":"\\ud800\\u0000","stack":null,"code":{}}', "['a']: \\ud800\\x00"),
    ],
    ids=["list", "empty", "torn", "bytes", "types"],
)
def test_an_error_file_that_user_code_spoiled_is_told_and_ends_nothing_else(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    path = prepared(tmp_path, {"ranks": {"0": {"at": 1, "do": "spoil", "hex": content.hex()}}}, ranks=1)
    assert run_node(path) == (ExitCode.USER_CODE, "")
    assert node_end(path)["cause"].endswith(cause)
    assert len(of_kind(path, "error")) == 1


def test_a_cause_is_one_line_of_500_characters_at_most(tmp_path: Path) -> None:
    words = "red \x1b[31m\r\nnext line \0 " + "w" * 1000
    path = prepared(tmp_path, {"ranks": {"0": {"at": 1, "do": "exit", "code": 65, "words": words}}}, ranks=1)
    assert run_node(path)[0] == ExitCode.USER_CODE
    cause = node_end(path)["cause"]
    assert cause.startswith("rank 0 exited with 65: ToyError: red \\x1b[31m\\r\\nnext line \\x00 www")
    assert (len(cause), cause[-1]) == (500, "…")


def test_a_rank_cannot_fill_the_disk_with_what_it_prints(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"steps": 2, "ranks": {"0": {"at": 1, "do": "shout", "mebibytes": 70}}}, ranks=1)
    assert run_node(path) == (ExitCode.DONE, "")
    first, older, newest = (path.parent / "node-0" / f"stdout-rank-0.log{end}" for end in ("", ".1", ".2"))
    assert first.stat().st_size < LIMIT + 1000
    assert older.stat().st_size == LIMIT
    assert newest.stat().st_size <= LIMIT
    assert first.read_bytes()[:1_048_576] == b"x" * 1_048_575 + b"\n"
    assert b"the newest are in stdout-rank-0.log.2" in first.read_bytes()[-200:]
    assert newest.read_bytes().endswith(b"\nthe last words\n")


def test_a_line_that_is_no_event_ends_the_attempt_as_user_code(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG | {"ranks": {"1": {"at": 2, "do": "garbage"}}})
    assert run_node(path)[0] == ExitCode.USER_CODE
    assert "rank 1 wrote b'no event' to its event channel" in node_end(path)["cause"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.write_text("{}"), "run_id: missing"),
        (lambda path: path.unlink(), "FileNotFoundError"),
        (lambda path: (path.parents[2] / "spec.json").write_text('{"pipeline": 1}'), "pipeline: 1 is no str"),
        (lambda path: (path.parents[2] / "spec.json").unlink(), "FileNotFoundError"),
        (lambda path: path.write_text(path.read_text().replace('"attempt":1', '"attempt":2')), "belongs in"),
    ],
    ids=["attempt", "no attempt", "spec", "no spec", "copied"],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(tmp_path: Path, spoil: Any, complaint: str) -> None:  # noqa: ANN401
    path = prepared(tmp_path, LONG)
    spoil(path)
    code, errors = run_node(path)
    assert code == ExitCode.REFUSED_SPEC
    assert complaint in errors
    assert [event.kind for event in events(path)] == ["error", "node_end"]
    assert node_end(path)["code"] == 64
    assert not list((path.parent / "node-0").glob("stdout-*"))


def test_nodes_that_were_told_no_port_refuse_to_guess_one(tmp_path: Path) -> None:
    path = written(toy_attempt(tmp_path, LONG, nodes=2), toy_spec(nodes=2))
    code, errors = run_node(path)
    assert code == ExitCode.REFUSED_SPEC
    assert "master-port" in errors
    assert run_node(path, 2, "--master-port", "1")[0] == ExitCode.REFUSED_SPEC


def test_a_node_of_an_attempt_that_is_over_starts_nothing(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG)
    (path.parent / "final.json").write_text("{}")
    code, errors = run_node(path)
    assert code == ExitCode.LOST_PEER
    assert "has a final.json" in errors
    assert not (path.parent / "node-0").exists()


def test_a_later_attempt_ends_a_running_node_which_writes_no_more(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG)
    with node_process(path) as node:
        stepped(path)
        attempt_file_of(toy_attempt(tmp_path, LONG, attempt=2)).parent.mkdir()
        assert node.wait() == ExitCode.LOST_PEER
        assert node.stderr is not None
        assert "fenced off: attempt 2 exists" in node.stderr.read().decode()
    assert marked(path) == []
    assert events(path)[-1].kind != "node_end"


def test_a_second_node_process_of_one_node_does_not_write_into_its_stream(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG)
    with node_process(path):
        stepped(path)
        code, errors = run_second(path)
        assert code == ExitCode.LOST_PEER
        assert "StreamBusy" in errors
        assert [event.kind for event in events(path)].count("node_start") == 1


def run_second(path: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "trainer.node", "--attempt", str(path), "--node-rank", "0"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stderr.decode()


PARENT = """
import subprocess, sys
process = subprocess.Popen([sys.executable, "-m", "trainer.node", "--attempt", sys.argv[1], "--node-rank", "0"])
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_node_ends_with_its_parent_and_takes_everything_with_it(tmp_path: Path, stopped: bool) -> None:
    path = prepared(tmp_path, LONG | {"ranks": {"1": {"at": 1, "do": "grandchild"}}})
    with subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        node = int(parent.stdout.readline())
        wait_until(lambda: any("grandchild" in data for data in of_kind(path, "metrics")), "a grandchild")
        if stopped:
            os.kill(node, signal.SIGSTOP)
        parent.kill()
    try:
        wait_all_gone(path)
        wait_until(lambda: is_gone(node), "the end of the node")
    finally:
        end_marked(path)
        if not is_gone(node):
            os.kill(node, signal.SIGKILL)
    assert node_end(path)["cause"] == "the process that started the node is gone"


def test_a_killed_node_leaves_no_rank(tmp_path: Path) -> None:
    path = prepared(tmp_path, LONG)
    with node_process(path) as node:
        stepped(path)
        node.kill()
        wait_all_gone(path)


def test_what_a_dead_rank_started_dies_with_the_node(tmp_path: Path) -> None:
    toy = {"steps": 3, "ranks": {"0": {"at": 1, "do": "grandchild"}}}
    path = prepared(tmp_path, toy, ranks=1)
    assert run_node(path)[0] == 0
    assert is_gone(next(data["grandchild"] for data in of_kind(path, "metrics") if "grandchild" in data))


def test_help_says_what_the_options_mean() -> None:
    done = subprocess.run([sys.executable, "-m", "trainer.node", "--help"], capture_output=True, check=True)
    assert b"--master-port" in done.stdout


def test_the_node_imports_no_torch() -> None:
    code = "import sys, trainer.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("code", [0, 65])
def test_a_node_that_has_ended_does_nothing_when_it_is_started_again(tmp_path: Path, code: int) -> None:
    """A cluster may replace the pod of a node that was done (E11)."""
    toy = {"steps": 2} if code == 0 else {"ranks": {"0": {"at": 1, "do": "exit", "code": code}}}
    path = written(toy_attempt(tmp_path, toy), toy_spec())
    assert run_node(path)[0] == code
    stream = (path.parent / "node-0" / "events.jsonl").read_bytes()
    assert run_node(path)[0] == code
    assert (path.parent / "node-0" / "events.jsonl").read_bytes() == stream
