"""Saves beside the training: the copy, one save at a time, what stays, what a resume passes over."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import trainer.checkpoint
from trainer.blobs import Json
from trainer.checkpoint import (
    Best,
    Checkpoints,
    Retention,
    StorageFailed,
    checkpoint_facts,
    complete_steps,
    read_manifest,
)
from trainer.image import Image
from trainer.pieces import Stored, box_piece
from trainer.process_group import Group, PeerLost
from trainer.spec import DataFile, DataSpec, ModelSpec, RunSpec, ScheduleSpec, SpecRefused, parse_layout
from trainer.tree import UnknownType

WAIT_S = 120.0
HOUR = 3_600_000_000


@dataclass
class Told:
    events: list[tuple[str, Mapping[str, Json]]] = field(default_factory=list)

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        self.events.append((kind, data))

    def beat(self) -> None:
        pass

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [data for found, data in self.events if found == kind]


def opened(folder: Path, told: Told, rank: int = 0, store: Any = None, world: int = 1, **more: Any) -> Checkpoints:  # noqa: ANN401
    (folder / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    group = Group(rank, world, store or dist.HashStore(), WAIT_S)  # pyright: ignore[reportPrivateImportUsage]
    return Checkpoints(folder, 1, group, told, {"run_id": "r"}, **more)


def state(value: float) -> dict[str, Any]:
    """A parameter that has been learned, and a buffer."""
    learned = {key: torch.full((2, 3), value) for key in ("weight", "exp_avg", "exp_avg_sq")}
    pieces = {
        "w": [box_piece((2, 3), [[0, 2], [0, 3]], step=1.0, **learned)],
        "seen": [box_piece((2,), [[0, 2]], weight=torch.full((2,), value))],
    }
    return {"engine": {"format": 2, "pieces": pieces}, "at": value}


def tensors_of(part: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: held.read().tolist() for key, held in part["engine"]["pieces"][name][0].items() if "w" in key}


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies beside the training, and writes, wait until it is set."""
    opening, copy = threading.Event(), Image.copy

    def wait_and_copy(image: Image, tensors: Mapping[str, Any], names: Iterable[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert opening.wait(WAIT_S)
        copy(image, tensors, names)

    monkeypatch.setattr(Image, "copy", wait_and_copy)
    return opening


def test_training_changes_nothing_of_a_save_that_has_begun(tmp_path: Path, told: Told, gate: threading.Event) -> None:
    checkpoints, saved = opened(tmp_path, told), state(1.0)
    checkpoints.begin(5, saved, "last", None)
    # A forward pass changes buffers while the copy is still being made.
    saved["engine"]["pieces"]["seen"][0]["weight"].fill_(9.0)
    order: list[str] = []

    def open_gate() -> None:
        order.append("copied")
        gate.set()

    threading.Timer(0.2, open_gate).start()
    checkpoints.settle()
    order.append("updated")
    for key in ("weight", "exp_avg", "exp_avg_sq"):
        saved["engine"]["pieces"]["w"][0][key].fill_(9.0)
    done = checkpoints.finish()
    assert done is not None
    assert (done.outcome, done.step, order) == ("published", 5, ["copied", "updated"])
    (found,) = opened(tmp_path, told).newest() or []
    assert tensors_of(found, "w") == {"weight": [[1.0] * 3] * 2}
    assert found["engine"]["pieces"]["w"][0]["exp_avg"].read().tolist() == [[1.0] * 3] * 2
    assert tensors_of(found, "seen") == {"weight": [1.0] * 2}
    assert checkpoints.stall.seconds >= 0.1


def test_the_memory_of_one_save_serves_the_next(tmp_path: Path, told: Told) -> None:
    checkpoints, image = opened(tmp_path, told), Image()
    for value in (1.0, 2.0, 3.0):
        checkpoints.save(int(value), state(value), "last", None)
    (found,) = opened(tmp_path, told).newest() or []
    assert tensors_of(found, "w") == {"weight": [[3.0] * 3] * 2}
    large, small = {"a": torch.ones(100), "b": torch.ones(3, dtype=torch.bool)}, {"a": torch.zeros(5)}
    image.prepare(large)
    first = np.frombuffer(image.data, np.uint8).ctypes.data
    image.prepare(small)
    image.copy(small, small)
    assert np.frombuffer(image.data, np.uint8).ctypes.data == first
    assert torch.equal(safetensors.torch.load(bytes(image.data))["a"], small["a"])


@pytest.mark.parametrize("error", [28, 5])
def test_what_went_wrong_is_told_when_the_save_is_finished(
    tmp_path: Path, told: Told, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = opened(tmp_path, told)
    checkpoints.save(2, state(2.0), "last", None)

    def fail(path: Path, data: bytes) -> None:
        raise OSError(error, "no", str(path))

    monkeypatch.setattr(trainer.checkpoint, "write_synced", fail)
    checkpoints.begin(4, state(4.0), "last", None)
    checkpoints.settle()
    if error == 5:
        with pytest.raises(StorageFailed):
            checkpoints.finish()
    else:
        done = checkpoints.finish()
        assert done is not None
        assert (done.outcome, done.step) == ("disk full", 4)
    assert checkpoints.finish() is None
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000002"]


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path: Path, told: Told) -> None:
    checkpoints = opened(tmp_path, told)
    with pytest.raises(UnknownType, match="/at"):
        checkpoints.begin(1, {"at": object()}, "last", None)
    assert not (tmp_path / "checkpoints").exists()


def test_a_save_that_takes_too_long_loses_the_peers(tmp_path: Path, told: Told, gate: threading.Event) -> None:
    checkpoints = opened(tmp_path, told)
    checkpoints.begin(1, state(1.0), "last", None)
    with pytest.raises(PeerLost, match=r"step 1 did not end within 0\.1 s"):
        checkpoints.finish(deadline_s=0.1)
    gate.set()


def test_d13_saves_close_together_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, lists = dist.HashStore(), [Told(), Told()]  # pyright: ignore[reportPrivateImportUsage]
    write, most = trainer.checkpoint.write_synced, 0

    def write_slowly(path: Path, data: bytes) -> None:
        nonlocal most
        most = max(most, len({p.name for p in path.parent.parent.glob("*.partial")}))
        time.sleep(0.01)
        write(path, data)

    monkeypatch.setattr(trainer.checkpoint, "write_synced", write_slowly)
    ranks = [opened(tmp_path, lists[r], r, store, 2) for r in (0, 1)]
    outcomes: list[list[Any]] = [[], []]

    def train(rank: int) -> None:
        for step in range(1, 51):
            ranks[rank].settle()
            outcomes[rank].append(ranks[rank].finish())
            ranks[rank].begin(step, state(float(step)), "last", None)
        outcomes[rank].append(ranks[rank].finish())

    both(train)
    assert most == 1
    assert [done.step for done in outcomes[0][1:]] == list(range(1, 51))
    assert outcomes[0] == outcomes[1]
    assert ranks[0].stall.saves == 50
    assert 40 <= ranks[0].stall.waits <= 50
    assert complete_steps(tmp_path / "checkpoints") == [50]
    assert [data["step"] for data in lists[0].of("checkpoint")] == list(range(1, 51))
    assert lists[1].events == []


def both(function: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=function, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_manifest_says_what_the_state_is(tmp_path: Path, told: Told) -> None:
    spec = RunSpec(
        pipeline="p",
        data=DataSpec((DataFile("a", "sha256:" + "0" * 64, 1, 1),), ("id",), "t", "o", "k", 2, 1, ("c",), ("n",)),
        model=ModelSpec("m.py", "build", "sha256:" + "0" * 64),
        seed=1,
        layout=parse_layout("deepspeed", "dp=2,zero=2"),
        precision="bf16",
    )
    checkpoints = opened(tmp_path, told, clock=lambda: 12.5)
    checkpoints._facts = {**checkpoints._facts, **checkpoint_facts(spec)}
    checkpoints.save(7, state(7.0), "best", Best(7, 0.5), {"samples": 56})
    facts = read_manifest(checkpoints.folder / "step-00000007").facts
    versions = facts["versions"]
    assert isinstance(versions, dict)
    assert set(versions) == {"python", "torch", "safetensors", "numpy", "deepspeed"}
    assert str(versions["torch"]).split("+")[0] == torch.__version__.split("+")[0]
    assert {key: value for key, value in facts.items() if key != "versions"} == {
        "run_id": "r",
        "engine": "deepspeed",
        "layout": "dp=2,zero=2",
        "precision": "bf16",
        "samples": 56,
        "kind": "checkpoint",
        "step": 7,
        "saved_as": "best",
        "best_step": 7,
        "world_size": 1,
        "saved_at": 12_500_000,
    }


def test_newest_best_and_the_first_of_every_hours_stay(tmp_path: Path, told: Told) -> None:
    hours = iter([0.1, 0.9, 2.1, 3.9, 4.0, 4.5, 5.9])
    checkpoints = opened(tmp_path, told, retention=Retention(2, 2.0), clock=lambda: next(hours) * 3600)
    for step in range(1, 8):
        checkpoints.save(step, state(1.0), "last", Best(2, 0.5) if step > 1 else None)
    assert sorted(complete_steps(checkpoints.folder)) == [1, 2, 3, 5, 6, 7]


@given(
    st.dictionaries(st.integers(1, 99), st.none() | st.integers(0, 99 * HOUR)),
    st.integers(1, 4),
    st.sampled_from([0, 1, 5]),
)
def test_every_hour_keeps_one_and_the_newest_stay(times: dict[int, int | None], last: int, hours: int) -> None:
    kept = Retention(last, hours).kept(times)
    assert kept <= set(times)
    assert set(sorted(times)[-last:]) <= kept
    if hours:
        periods = {at // (hours * HOUR) for at in times.values() if at is not None}
        assert {times[s] // (hours * HOUR) for s in kept if times[s] is not None} == periods  # pyright: ignore[reportOptionalOperand]
        assert len(kept) <= last + len(periods)
    else:
        assert len(kept) == min(last, len(times))


def test_a_resume_says_what_it_passed_over(tmp_path: Path, told: Told) -> None:
    checkpoints = opened(tmp_path, told, retention=Retention(9))
    for step in (1, 2, 3):
        checkpoints.save(step, state(float(step)), "last", None)
    (checkpoints.folder / "step-00000003" / "rank-0.safetensors").write_bytes(b"other")
    (checkpoints.folder / "step-00000002" / "rank-0.json").unlink()
    (checkpoints.folder / "step-00000004.1.partial").mkdir()
    again = Told()
    (found,) = opened(tmp_path, again).newest() or []
    assert found["at"] == 1.0
    assert [(data["kind"], data["message"].split(":")[0]) for data in again.of("error")] == [
        ("CheckpointTorn", "step-00000004.1.partial was never finished; it is removed"),
        ("CheckpointBroken", "step-00000003/rank-0.safetensors"),
        ("CheckpointBroken", "step-00000002/rank-0.json"),
    ]


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json", "rank-1.safetensors", "rank-1.json"])
def test_ranks_verify_a_checkpoint_together(tmp_path: Path, name: str) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    ranks = [opened(tmp_path, Told(), r, store, 2, retention=Retention(2)) for r in (0, 1)]

    def save(rank: int) -> None:
        for step in (1, 2):
            ranks[rank].save(step, state(float(step)), "last", None)

    both(save)
    file = tmp_path / "checkpoints" / "step-00000002" / name
    file.write_bytes(file.read_bytes()[:-1] + b"#")
    found: dict[int, Any] = {}
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    again = [opened(tmp_path, Told(), r, store, 2) for r in (0, 1)]

    def load(rank: int) -> None:
        found[rank] = [part["at"] for part in again[rank].newest() or []]

    both(load)
    assert found == {0: [1.0, 1.0], 1: [1.0, 1.0]}


def test_only_what_is_asked_for_is_read(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.pieces import collect, read

    checkpoints = opened(tmp_path, told)
    weight = torch.arange(24.0).view(4, 6)
    pieces = {"w": [box_piece((4, 6), [[0, 4], [0, 6]], weight=weight)]}
    checkpoints.save(1, {"engine": {"format": 2, "pieces": pieces}}, "last", None)
    (part,) = opened(tmp_path, told).newest() or []
    held = part["engine"]["pieces"]["w"][0]["weight"]
    assert isinstance(held, Stored)
    asked: list[tuple[slice, ...]] = []
    whole = Stored.part
    monkeypatch.setattr(Stored, "part", lambda self, places: asked.append(places) or whole(self, places))
    monkeypatch.setattr(Stored, "read", lambda self: pytest.fail("the whole tensor was read"))
    found = read(collect([part["engine"]])["w"], "w", "weight", [[1, 3], [2, 5]])
    assert found is not None
    assert torch.equal(found, weight[1:3, 2:5])
    assert asked == [(slice(1, 3), slice(2, 5))]
    assert json.loads((checkpoints.folder / "step-00000001" / "rank-0.json").read_bytes())["engine"]["format"] == 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"keep_last": 0}, "schedule.keep_last: 0 is less than 1"),
        ({"keep_every_hours": -1.0}, "schedule.keep_every_hours: -1.0 is no number of hours from 0 on"),
        ({"keep_every_hours": float("nan")}, "schedule.keep_every_hours: nan is no number of hours from 0 on"),
    ],
)
def test_a_schedule_that_keeps_nothing_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecRefused) as refused:
        ScheduleSpec(**fields).check()
    assert str(refused.value) == problem
