"""The local launcher: attempts from submission to their end, as any process sees them. Ranks are toy workers."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.toy_attempts import (
    LONG,
    PATIENCE_S,
    RUN_ID,
    attempt_file_of,
    end_all,
    ended,
    marked,
    node_pid,
    of_kind,
    rank_pid,
    stepped,
    supervisor_pid,
    toy_attempt,
    toy_spec,
    wait_until,
    written,
)

from headway.training.launch import FactsUnreadable, LaunchFailed, LaunchRefused
from headway.training.local import LocalLauncher
from headway.training.process_table import environment_of, read_process
from trainer.blobs import canonical_json
from trainer.events import EventWriter, StreamBroken, node_folder
from trainer.spec import AttemptSpec


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    """A launcher of an empty home; whatever it started is gone afterwards."""
    yield LocalLauncher(tmp_path, tmp_path / "store", tmp_path)
    end_all(tmp_path)


def test_an_attempt_runs_to_its_end(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 5, "group": True}, nodes=2)
    assert launcher.observe(RUN_ID, 1).state == "absent"
    launcher.submit(attempt, toy_spec(2))
    assert launcher.observe(RUN_ID, 1).state in ("starting", "running", "ended")
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause, seen.exit_codes, seen.cancelled) == (0, "done", (0, 0), False)
    assert seen.worker_seconds > 2 * 5 * 0.01
    assert seen.ended_at is not None
    assert [event.kind for event in launcher.stream(RUN_ID, 1, 1, 0, 100)][-1] == "node_end"
    assert marked(attempt_file_of(attempt)) == []
    assert launcher.artifact_dir(RUN_ID, 1, "network") == launcher.run_dir(RUN_ID) / "attempts/1/artifact/network"


def test_a_second_submission_finds_the_first(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    keeper = supervisor_pid(attempt)
    stepped(attempt_file_of(attempt))
    launcher.submit(attempt, toy_spec(2))
    again = LocalLauncher(tmp_path, tmp_path / "store", tmp_path)
    assert again.observe(RUN_ID, 1).state == "running"
    again.submit(attempt, toy_spec(2))
    assert supervisor_pid(attempt) == keeper
    assert [event.kind for event in again.stream(RUN_ID, 1, 0, 0, 1000)].count("node_start") == 1


def test_an_attempt_that_has_ended_is_not_started_again(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 1})
    launcher.submit(attempt, toy_spec())
    first = ended(launcher, attempt)
    launcher.submit(attempt, toy_spec())
    assert ended(launcher, attempt) == first


SUBMITTER = """
import json, sys
from pathlib import Path
from headway.training.local import LocalLauncher
from trainer.spec import parse_attempt, parse_run
attempt, spec = parse_attempt(Path(sys.argv[1]).read_bytes()), parse_run(Path(sys.argv[2]).read_bytes())
launcher = LocalLauncher(Path(attempt.run_dir).parent, Path(attempt.store_root), Path(attempt.code_root))
print("ready", flush=True)
sys.stdin.readline()
launcher.submit(attempt, spec)
print("submitted", flush=True)
sys.stdin.readline()
"""


def submitter(tmp_path: Path, attempt: AttemptSpec) -> subprocess.Popen[bytes]:
    """A process that submits when it is told to, and then lingers."""
    given = tmp_path / "given.json", tmp_path / "spec-given.json"
    given[0].write_bytes(canonical_json(attempt.to_json()))
    given[1].write_bytes(canonical_json(toy_spec(attempt.nodes).to_json()))
    command = [sys.executable, "-c", SUBMITTER, *map(str, given)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def tell(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def test_submitters_at_the_same_moment_start_it_once(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG)
    several = [submitter(tmp_path, attempt) for _ in range(4)]
    for process in several:
        tell(process)
    for process in several:
        assert process.stdout is not None
        assert process.stdout.readline() == b"submitted\n"
        process.communicate(b"\n")
        assert process.returncode == 0
    path = attempt_file_of(attempt)
    stepped(path)
    assert [event.kind for event in launcher.stream(RUN_ID, 1, 0, 0, 1000)].count("node_start") == 1
    keepers = [
        pid for pid in marked(path) if b"headway.training.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert wait_until(lambda: keepers if len(keepers) == 1 else None, "one supervisor") == [supervisor_pid(attempt)]


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_submitter_killed_at_any_moment_leaves_something_to_submit_or_to_adopt(
    tmp_path: Path, launcher: LocalLauncher, moment: float
) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 20})
    process = submitter(tmp_path, attempt)
    tell(process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(moment)
    # The whole group, as a scheduler does it, supervisor excepted: it is in a session of its own.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    launcher.submit(attempt, toy_spec())
    assert ended(launcher, attempt).code == 0
    assert len(of_kind(attempt_file_of(attempt), "node_start")) == 1


def test_a_closed_terminal_ends_nothing(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG, nodes=2)
    process = submitter(tmp_path, attempt)
    tell(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"submitted\n"
    process.kill()
    process.communicate()
    path = attempt_file_of(attempt)
    keeper = read_process(supervisor_pid(attempt))
    assert keeper is not None
    assert os.getsid(keeper.pid) == keeper.pid
    for pid in (keeper.pid, node_pid(attempt, 0), node_pid(attempt, 1), rank_pid(path, 1, 1)):
        os.kill(pid, signal.SIGHUP)
    stepped(path, len(of_kind(path, "step")) + 5)
    assert launcher.observe(RUN_ID, 1).state == "running"


def test_workers_get_what_they_need_and_no_secret(
    tmp_path: Path, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "HEADWAY_DATABASE_URL": "postgresql://user:password@host/db",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PYTHON_API_PASSWORD": "secret",
        "TRAINER_TOKEN": "secret",
        "OMP_TOKEN": "secret",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINER_EVENT_FD", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    attempt = toy_attempt(tmp_path, LONG)
    launcher.submit(attempt, toy_spec())
    path = attempt_file_of(attempt)
    rank = environment_of(rank_pid(path, 0))
    assert rank["PYTHONHASHSEED"] == "7"
    for pid in marked(path):
        given = environment_of(pid)
        assert not secrets.keys() & given.keys()
        assert "/nowhere" not in given["PYTHONPATH"]
        assert given["HEADWAY_ATTEMPT"] == f"{RUN_ID}/1"
        assert given.get("TRAINER_EVENT_FD") != "1"


def test_the_attempts_own_environment_reaches_nodes_and_ranks_and_not_the_supervisor(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    attempt = toy_attempt(tmp_path, LONG)
    launcher.submit(attempt, toy_spec())
    rank = rank_pid(attempt_file_of(attempt), 0)
    assert "TOY" in environment_of(rank)
    assert "TOY" in environment_of(node_pid(attempt, 0))
    assert "TOY" not in environment_of(supervisor_pid(attempt))


def test_what_contradicts_the_first_submission_is_refused(tmp_path: Path, launcher: LocalLauncher) -> None:
    launcher.submit(toy_attempt(tmp_path, {"steps": 1}), toy_spec())
    with pytest.raises(LaunchRefused, match=r"spec\.json exists with other content"):
        launcher.submit(toy_attempt(tmp_path, {"steps": 1}, attempt=2), toy_spec(grace_s=1.0))
    with pytest.raises(LaunchRefused, match=r"attempt\.json exists with other content"):
        launcher.submit(toy_attempt(tmp_path, {"steps": 2}), toy_spec())


def test_a_stale_attempt_is_not_started(tmp_path: Path, launcher: LocalLauncher) -> None:
    launcher.submit(toy_attempt(tmp_path, {"steps": 1}, attempt=2), toy_spec())
    with pytest.raises(LaunchRefused, match="fenced off: attempt 2 exists"):
        launcher.submit(toy_attempt(tmp_path, {"steps": 1}, attempt=1), toy_spec())
    assert launcher.observe(RUN_ID, 1).state == "absent"


def test_an_attempt_of_another_place_is_refused(tmp_path: Path, launcher: LocalLauncher) -> None:
    with pytest.raises(LaunchRefused, match="names run directory"):
        launcher.submit(toy_attempt(tmp_path / "elsewhere", {}), toy_spec())
    for run_id in ("../../etc", "", ".", "a/b"):
        with pytest.raises(LaunchRefused, match="is no run id"):
            launcher.run_dir(run_id)


def supervise(path: Path) -> None:
    """Start a supervisor by hand; it leaves with 0 also when there is nothing for it to do."""
    command = [sys.executable, "-m", "headway.training.supervisor", "--attempt", str(path)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("mark", ["lock", "supervisor.json", "final.json"])
def test_a_supervisor_leaves_an_attempt_alone_that_is_or_was_another_ones(tmp_path: Path, mark: str) -> None:
    path = written(toy_attempt(tmp_path, LONG), toy_spec())
    with (path.parent / mark).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = sorted({*path.parent.iterdir(), path.parent / "lock", path.parent / "supervisor.log"})
        supervise(path)
        wait_until(lambda: not marked(path), "the second supervisor to leave")
        assert sorted(path.parent.iterdir()) == before


def test_a_supervisor_that_cannot_start_is_told_with_its_log(tmp_path: Path, launcher: LocalLauncher) -> None:
    broken = LocalLauncher(tmp_path, tmp_path, tmp_path, python="/bin/false")
    attempt = toy_attempt(tmp_path, {"steps": 1})
    with pytest.raises(LaunchFailed, match=r"did not start.*see .*supervisor\.log"):
        broken.submit(attempt, toy_spec())
    assert launcher.observe(RUN_ID, 1).state == "absent"
    launcher.submit(attempt, toy_spec())
    assert ended(launcher, attempt).code == 0


def test_a_spec_that_cannot_run_ends_the_attempt_as_refused(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 1})
    launcher.run_dir(RUN_ID).mkdir()
    spoiled = canonical_json(toy_spec().to_json()).replace(b'"seed":1', b'"seed":"one"')
    (launcher.run_dir(RUN_ID) / "spec.json").write_bytes(spoiled)
    with pytest.raises(LaunchRefused):
        launcher.submit(attempt, toy_spec())
    path = attempt_file_of(attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canonical_json(attempt.to_json()))
    supervise(path)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cause) == (64, "SpecRefused: seed: 'one' is no int")


def test_cancel_saves_and_ends_every_process(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG | {"group": True, "ranks": {"1": {"at": 1, "do": "grandchild"}}}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    path = attempt_file_of(attempt)
    stepped(path, 3)
    launcher.cancel(RUN_ID, 1, "asked for by a person")
    launcher.cancel(RUN_ID, 1, "asked twice")
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cancelled, seen.exit_codes) == (75, True, (75, 75))
    assert of_kind(path, "stopping") == of_kind(path, "stopping", 1) == [{"reason": "cancel"}]
    assert json.loads((path.parent / "cancel").read_text())["reason"] == "asked for by a person"
    assert marked(path) == []


def test_cancel_before_the_start_starts_nothing(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG, nodes=2)
    launcher.cancel(RUN_ID, 1, "early")
    launcher.submit(attempt, toy_spec(2))
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cancelled, seen.exit_codes, seen.worker_seconds) == (75, True, (None, None), 0.0)
    assert not (attempt_file_of(attempt).parent / "node-0").exists()


def test_a_cancel_after_the_end_changes_nothing(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 1})
    launcher.submit(attempt, toy_spec())
    before = ended(launcher, attempt)
    launcher.cancel(RUN_ID, 1, "late")
    assert launcher.observe(RUN_ID, 1) == before
    assert not before.cancelled


def test_a_machine_that_stops_is_no_cancel(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG | {"group": True}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    path = attempt_file_of(attempt)
    stepped(path, 3)
    os.kill(supervisor_pid(attempt), signal.SIGTERM)
    seen = ended(launcher, attempt)
    assert (seen.code, seen.cancelled, seen.exit_codes) == (75, False, (75, 75))
    assert of_kind(path, "stopping") == [{"reason": "sigterm"}]


def test_kill_ends_everything_and_says_that_nobody_saw_the_end(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG | {"ranks": {"1": {"at": 1, "do": "grandchild"}}}, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    path = attempt_file_of(attempt)
    stepped(path, 3)
    os.kill(node_pid(attempt, 1), signal.SIGSTOP)
    launcher.kill(RUN_ID, 1)
    assert marked(path) == []
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.code, seen.cause, seen.supervisor_alive) == ("ended", None, "supervisor lost", False)
    assert seen.worker_seconds > 0
    launcher.kill(RUN_ID, 1)


@pytest.mark.parametrize("left", [None, b"", b"{", b"[]"], ids=["absent", "empty", "torn", "list"])
def test_kill_needs_no_supervisor_json(tmp_path: Path, launcher: LocalLauncher, left: bytes | None) -> None:
    attempt = toy_attempt(tmp_path, LONG, nodes=2)
    launcher.submit(attempt, toy_spec(2))
    path = attempt_file_of(attempt)
    stepped(path, 3)
    (path.parent / "supervisor.json").unlink()
    if left is not None:
        (path.parent / "supervisor.json").write_bytes(left)
    launcher.kill(RUN_ID, 1)
    assert marked(path) == []
    # The supervisor went first: it wrote no end that its children had not chosen.
    assert not (path.parent / "final.json").exists()


GOOD_FINAL = {"code": 0, "cause": "", "exit_codes": [0], "cancelled": False, "worker_seconds": 1, "ended_at": 1}
GOOD_KEEPER = {"pid": 1, "started": 1, "boot_id": "another"}


def spoiled(good: dict[str, object]) -> list[bytes]:
    """What may stand in the place of a document."""
    missing = [json.dumps({k: v for k, v in good.items() if k != name}) for name in good]
    wrong = [json.dumps(good | {name: {}}) for name in good]
    return [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, *(text.encode() for text in missing + wrong)]


@pytest.mark.parametrize(("name", "good"), [("supervisor.json", GOOD_KEEPER), ("final.json", GOOD_FINAL)])
def test_an_unreadable_file_of_an_attempt_is_named(
    tmp_path: Path, launcher: LocalLauncher, name: str, good: dict[str, object]
) -> None:
    path = written(toy_attempt(tmp_path, LONG), toy_spec())
    file = path.parent / name
    file.write_text(json.dumps(good))
    assert launcher.observe(RUN_ID, 1).state == "ended"
    for content in [*spoiled(good), *([json.dumps(good | {"exit_codes": ["0"]}).encode()] if "code" in good else [])]:
        file.write_bytes(content)
        with pytest.raises(FactsUnreadable, match=re.escape(str(file))) as refusal:
            launcher.observe(RUN_ID, 1)
        assert "move the file away" in refusal.value.remedy, content
    file.unlink()
    file.mkdir()
    with pytest.raises(FactsUnreadable, match="IsADirectoryError"):
        launcher.observe(RUN_ID, 1)
    launcher.kill(RUN_ID, 1)


def test_an_attempt_json_that_was_spoiled_is_named(tmp_path: Path, launcher: LocalLauncher) -> None:
    path = written(toy_attempt(tmp_path, LONG), toy_spec())
    (path.parent / "supervisor.json").write_text(json.dumps(GOOD_KEEPER))
    path.write_bytes(b"{")
    with pytest.raises(FactsUnreadable, match=re.escape(str(path))):
        launcher.observe(RUN_ID, 1)


def test_a_clock_that_was_set_back_makes_no_negative_time(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 1})
    path = written(attempt, toy_spec())
    (path.parent / "supervisor.json").write_text(json.dumps(GOOD_KEEPER))
    clock = iter([2_000_000_000, 1_000_000_000])
    stream = EventWriter(node_folder(path, 0) / "events.jsonl", 0, lambda: next(clock))
    stream.emit("node_start", {})
    stream.emit("step", {})
    stream.close()
    seen = launcher.observe(RUN_ID, 1)
    assert (seen.state, seen.worker_seconds) == ("ended", 0.0)


def test_a_reason_to_cancel_is_one_line_of_plain_text(tmp_path: Path, launcher: LocalLauncher) -> None:
    launcher.cancel(RUN_ID, 1, "two\nlines \x1b[2J\0 \ud800" + "x" * 1000)
    reason = json.loads((attempt_file_of(toy_attempt(tmp_path, {})).parent / "cancel").read_text())["reason"]
    assert reason.startswith("two\\nlines \\x1b[2J\\x00 \\ud800xx")
    assert len(reason) == 500


def test_strays_are_found_by_their_mark_and_only_in_their_home(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, LONG | {"ranks": {"0": {"at": 1, "do": "grandchild"}}})
    launcher.submit(attempt, toy_spec())
    path = attempt_file_of(attempt)
    stepped(path, 3)
    expected = sorted((RUN_ID, 1, pid) for pid in marked(path))
    assert launcher.strays() == expected
    assert len(expected) == 4
    (tmp_path / "other").mkdir()
    assert LocalLauncher(tmp_path / "other", tmp_path, tmp_path).strays() == []
    # Without the node's and the supervisor's care, the grandchild is what is left; the mark finds it.
    launcher.kill(RUN_ID, 1)
    assert launcher.strays() == []


def test_a_process_that_took_over_the_supervisors_pid_is_not_it(tmp_path: Path, launcher: LocalLauncher) -> None:
    attempt = toy_attempt(tmp_path, {"steps": 1})
    folder = attempt_file_of(attempt).parent
    launcher.submit(attempt, toy_spec())
    ended(launcher, attempt)
    (folder / "final.json").unlink()
    keeper = json.loads((folder / "supervisor.json").read_text())
    with subprocess.Popen(["sleep", "60"]) as other:
        process = read_process(other.pid)
        assert process is not None
        for pretended, alive in (
            ({"pid": other.pid, "started": process.started}, True),
            ({"pid": other.pid, "started": process.started - 1}, False),
            ({"pid": other.pid, "started": process.started, "boot_id": "another boot"}, False),
        ):
            (folder / "supervisor.json").write_text(json.dumps(keeper | pretended))
            assert launcher.observe(RUN_ID, 1).supervisor_alive is alive
        launcher.kill(RUN_ID, 1)
        assert other.poll() is None
        other.kill()


def test_a_stream_shorter_than_what_was_read_is_refused(tmp_path: Path, launcher: LocalLauncher) -> None:
    with pytest.raises(StreamBroken):
        launcher.stream(RUN_ID, 1, 0, 5, 100)
    assert launcher.stream(RUN_ID, 1, 0, 0, 100) == []
