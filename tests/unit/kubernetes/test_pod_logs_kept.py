"""Pods' logs are kept whole: through broken connections, killed keepers, vanished pods and rotated logs."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pod_log_source import PATIENCE_S, LogFolder, pod, wait_for

from headway.training.kubernetes.client import ClusterUnreachable, ManifestRefused
from headway.training.kubernetes.logs import LogBusy, LogKeeper, PodLogFile, is_complete, names_shared_memory

ROOT = Path(__file__).parents[3]


def stamped(texts: list[bytes], same: int = 1) -> list[bytes]:
    """Lines with times, `same` of them at the same nanosecond, several in a second."""
    stamps = [f"2026-11-30T10:00:{n // 5:02d}.{n % 5:09d}Z" for n in (i // same for i in range(len(texts)))]
    return [stamp.encode() + b" " + text for stamp, text in zip(stamps, texts, strict=True)]


class Bench:
    def __init__(self, root: Path) -> None:
        self.logs, self.run = root / "cluster", root / "run"
        self.logs.mkdir()
        self.source = LogFolder(self.logs)
        self.kept = self.run / "attempts" / "1" / "logs" / "node-0.u1.log"
        self.keepers: list[LogKeeper] = []

    def keeper(self) -> LogKeeper:
        made = LogKeeper(self.source, lambda _: self.run)
        self.keepers.append(made)
        return made

    def write(self, lines: list[bytes], name: str = "p0") -> None:
        with (self.logs / name).open("ab") as file:
            file.write(b"".join(lines))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for keeper in made.keepers:
        keeper.close()


TEXTS = [f"line {n} ä\n".encode() for n in range(40)]


def test_a_log_is_kept_while_it_grows_and_whole_at_its_end(bench: Bench) -> None:
    lines = stamped(TEXTS[:20])
    bench.write(lines[:10])
    keeper = bench.keeper()
    keeper.keep("r", 1, [pod("p0", "u1")])
    wait_for(bench.kept, b"".join(TEXTS[:10]))
    bench.write(lines[10:])
    bench.write([b"2026-11-30T10:01:00Z no newline"])
    (bench.logs / "p0.ended").touch()
    assert keeper.catch_up("r", 1, [pod("p0", "u1", state="terminated")], PATIENCE_S) == []
    assert bench.kept.read_bytes() == b"".join(TEXTS[:20]) + b"no newline"
    assert is_complete(bench.kept)


def test_a_pod_that_vanishes_leaves_what_was_written_until_then(bench: Bench) -> None:
    bench.write([*stamped(TEXTS[:5]), b"2026-11-30T10:01:00Z torn"])
    keeper = bench.keeper()
    keeper.keep("r", 1, [pod("p0", "u1")])
    wait_for(bench.kept, b"".join(TEXTS[:5]))
    (bench.logs / "p0").unlink()
    wait_for(bench.kept, b"".join(TEXTS[:5]) + b"torn")


def test_broken_connections_lose_and_double_nothing(bench: Bench) -> None:
    lines = stamped(TEXTS, same=3)
    away = ClusterUnreachable("the log broke off", "")
    bench.source.faults = [(0, ManifestRefused("waiting to start", "")), (7, away), (0, away), (1, away), (20, away)]
    bench.write(lines)
    (bench.logs / "p0.ended").touch()
    bench.keeper().keep("r", 1, [pod("p0", "u1", state="terminated")])
    wait_for(bench.kept, b"".join(TEXTS))
    assert bench.source.calls[:3] == ["", "", "2026-11-30T10:00:00.000000002Z"]


def test_another_keeper_goes_on_where_one_stopped_and_never_beside_it(bench: Bench) -> None:
    lines = stamped(TEXTS)
    bench.write(lines[:10])
    first, second = bench.keeper(), bench.keeper()
    first.keep("r", 1, [pod("p0", "u1")])
    wait_for(bench.kept, b"".join(TEXTS[:10]))
    second.keep("r", 1, [pod("p0", "u1")])
    with pytest.raises(LogBusy):
        PodLogFile(bench.kept, "u1")
    first.close()
    bench.write(lines[10:])
    (bench.logs / "p0.ended").touch()
    assert second.catch_up("r", 1, [pod("p0", "u1", state="terminated")], PATIENCE_S) == []
    assert bench.kept.read_bytes() == b"".join(TEXTS)


def test_pods_of_one_node_have_logs_of_their_own(bench: Bench) -> None:
    """E11: a replacement pod writes into no file of the pod that it replaces."""
    for name, text in (("p0", TEXTS[0]), ("p0b", TEXTS[1])):
        bench.write(stamped([text]), name)
        (bench.logs / f"{name}.ended").touch()
    pods = [pod("p0", "u1", state="terminated"), pod("p0b", "u2", state="terminated")]
    assert bench.keeper().catch_up("r", 1, pods, PATIENCE_S) == []
    assert sorted((p.name, p.read_bytes()) for p in bench.kept.parent.glob("*.log")) == [
        ("node-0.u1.log", TEXTS[0]),
        ("node-0.u2.log", TEXTS[1]),
    ]


def test_a_keeper_that_lives_for_months_forgets_what_is_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a pod that is shown again after that gets nothing written twice."""
    monkeypatch.setattr("headway.training.kubernetes.logs._MANY", 3)
    keeper = bench.keeper()
    bench.write(stamped([TEXTS[0]]))
    (bench.logs / "p0.ended").touch()
    for number in [*range(1, 9), 1]:
        shown = [pod("p0", f"u{number}", state="terminated")]
        assert keeper.catch_up("r", 1, shown, PATIENCE_S) == []
        assert len(keeper._followers) < 8
    assert {path.read_bytes() for path in bench.kept.parent.glob("*.log")} == {TEXTS[0]}
    assert len(list(bench.kept.parent.glob("*.log"))) == 8


def test_what_cannot_be_read_in_time_is_named(bench: Bench) -> None:
    bench.source.faults = [(0, ClusterUnreachable("the node does not answer", ""))] * 50
    bench.write(stamped(TEXTS))
    pods = [pod("p0", "u1", state="terminated"), pod("waits", "u2", state="waiting")]
    assert bench.keeper().catch_up("r", 1, pods, 0.5) == ["p0"]


def test_the_kubelets_own_words_are_no_part_of_the_log(bench: Bench) -> None:
    bench.write([b"unable to retrieve container logs for containerd://2d6c9d14"])
    (bench.logs / "p0.ended").touch()
    assert bench.keeper().catch_up("r", 1, [pod("p0", "u1", state="terminated")], PATIENCE_S) == []
    assert bench.kept.read_bytes() == b""


def test_killed_at_any_moment_a_keeper_loses_and_doubles_nothing(bench: Bench) -> None:
    chance = random.Random(7)
    texts = [bytes(chance.choices(b"ab\xc3\xa9", k=chance.randint(0, 400))) + b"\n" for _ in range(400)]
    lines = stamped(texts, same=2)
    command = [sys.executable, "-m", "support.pod_log_source", str(bench.logs), str(bench.run), "p0", "u1"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    for number in range(4):
        bench.write(lines[number * 100 : (number + 1) * 100])
        with subprocess.Popen(command, cwd=ROOT, env=environment) as child:
            try:
                before = bench.kept.stat().st_size if bench.kept.exists() else 0
                deadline = time.monotonic() + PATIENCE_S
                while time.monotonic() < deadline:
                    if bench.kept.exists() and bench.kept.stat().st_size > before:
                        break
                time.sleep(chance.random() / 500)
            finally:
                child.kill()
    (bench.logs / "p0.ended").touch()
    assert bench.keeper().catch_up("r", 1, [pod("p0", "u1", state="terminated")], PATIENCE_S) == []
    assert bench.kept.read_bytes() == b"".join(texts)


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"") + b"\n"), min_size=1, max_size=12),
    same=st.integers(1, 4),
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=4),
)
def test_a_cursor_that_lags_by_one_line_is_caught_up(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], same: int, stops: list[tuple[int, int]]
) -> None:
    """Each stop leaves the file up to one line, or some of its bytes, beyond the cursor, as a kill does."""
    path = tmp_path_factory.mktemp("kept") / "node-0.u1.log"
    lines = stamped(texts, same)
    for count, beyond in [*stops, (len(lines), 0)]:
        file = PodLogFile(path, "u1")
        since = file.resume()
        for line in lines[: max(count, 0)]:
            if line[:19].decode() >= since[:19]:
                file.add(line)
        kept = file.cursor
        file.close()
        rest = b"".join(texts)[kept.size :]
        missing = len(path.read_bytes()) - kept.size
        with path.open("ab") as raw:
            raw.write(rest[missing : missing + beyond])
    assert path.read_bytes() == b"".join(texts)


def test_a_log_that_was_rotated_goes_on_after_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "node-0.u1.log"
    first = PodLogFile(path, "u1")
    first.resume()
    first.add(b"2026-11-30T10:00:00.1Z one\n")
    first.close()
    with path.open("ab") as raw:
        raw.write(b"two\n")
    again = PodLogFile(path, "u1")
    assert again.resume() == "2026-11-30T10:00:00.1Z"
    again.add(b"2026-11-30T10:00:09.5Z nine\n")
    again.close()
    assert path.read_bytes() == b"one\ntwo\nnine\n"
    cursor = json.loads(path.with_suffix(".cursor").read_text())
    assert cursor == {"uid": "u1", "stamp": "2026-11-30T10:00:09.5Z", "same": 1, "size": 13, "done": False}


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        ("RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that", True),
        ("rank 1 killed by SIGBUS", True),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_41_2'", True),
        ("RuntimeError: unable to write to file </torch_41_3>", True),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory", True),
        ("OSError: [Errno 28] No space left on device: '/data/checkpoints/1'", False),
        ("ValueError: the business error rate is above 1", False),
        ("rank 0 killed by SIGKILL", False),
    ],
)
def test_e09_too_small_shared_memory_is_told_from_other_failures(words: str, is_it: bool) -> None:
    assert names_shared_memory(words) is is_it
