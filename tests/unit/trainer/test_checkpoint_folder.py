"""The folder of checkpoints: whole or absent, newest that verifies, pruned only afterwards, fenced."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trainer.checkpoint
from trainer.blobs import Json
from trainer.checkpoint import Best, CheckpointBroken, Checkpoints, StaleAttempt, StorageFailed, complete_steps
from trainer.process_group import Group


@dataclass
class Events:
    """A sink that remembers."""

    told: list[tuple[str, Mapping[str, Json]]] = field(default_factory=list)

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        self.told.append((kind, data))

    def beat(self) -> None:
        pass


@dataclass
class Folder:
    """Checkpoints of one rank."""

    run_dir: Path
    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        (self.run_dir / "attempts" / "1").mkdir(parents=True, exist_ok=True)

    def open(self, attempt: int = 1) -> Checkpoints:
        group = Group(0, 1, dist.HashStore(), 5.0)  # pyright: ignore[reportPrivateImportUsage]
        return Checkpoints(self.run_dir, attempt, group, self.events, {"run_id": "r"})

    def names(self) -> list[str]:
        return sorted(p.name for p in (self.run_dir / "checkpoints").iterdir())

    def step_found(self) -> int | None:
        parts = self.open().newest()
        return None if parts is None else parts[0]["step"]


def part(step: int) -> dict[str, object]:
    return {"step": step, "engine": {"model": {"w": torch.full((3,), float(step))}, "optimizer": {}}}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_newest_and_best_stay(folder: Folder) -> None:
    checkpoints = folder.open()
    assert checkpoints.newest() is None
    for step, best in ((2, None), (4, Best(4, 0.5)), (6, Best(4, 0.5)), (8, Best(4, 0.5))):
        saved = checkpoints.save(step, part(step), "best" if best and best.step == step else "last", best)
        assert saved.outcome == "published"
        assert set(complete_steps(checkpoints.folder)) == {step} | ({4} if best else set())
    assert folder.names() == ["best.json", "step-00000004", "step-00000008"]
    assert json.loads((checkpoints.folder / "best.json").read_bytes())["step"] == 4
    assert checkpoints.weights(4)["w"].tolist() == [4.0, 4.0, 4.0]
    assert folder.step_found() == 8
    told = [data for kind, data in folder.events.told if kind == "checkpoint"]
    assert [(data["step"], data["kind"]) for data in told] == [(2, "last"), (4, "best"), (6, "last"), (8, "last")]
    assert told[-1]["path"] == "checkpoints/step-00000008"
    newest = checkpoints.folder / "step-00000008"
    assert told[-1]["bytes"] == sum((newest / name).stat().st_size for name in ("rank-0.json", "rank-0.safetensors"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no manifest"])
def test_the_newest_that_verifies_is_loaded(folder: Folder, damage: str) -> None:
    checkpoints = folder.open()
    checkpoints.save(2, part(2), "best", Best(2, 0.5))
    checkpoints.save(4, part(4), "last", Best(2, 0.5))
    newest = checkpoints.folder / "step-00000004"
    file = newest / ("manifest.json" if "manifest" in damage else "rank-0.safetensors")
    data = file.read_bytes()
    if damage in ("remove", "no manifest"):
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert folder.step_found() == 2
    with pytest.raises(CheckpointBroken, match="step-00000004"):
        checkpoints.weights(4)
    # The run comes by the broken one again, and puts a whole one in its place.
    assert folder.open().save(4, part(4), "last", Best(2, 0.5)).outcome == "published"
    assert folder.step_found() == 4


def test_a_checkpoint_is_of_no_use_without_its_best_one(folder: Folder) -> None:
    checkpoints = folder.open()
    checkpoints.save(2, part(2), "best", Best(2, 0.5))
    checkpoints.save(4, part(4), "last", Best(2, 0.5))
    (checkpoints.folder / "step-00000002" / "rank-0.json").unlink()
    assert folder.step_found() is None
    assert "step-00000002/rank-0.json" in str(folder.events.told[-2:])


def test_leftovers_are_removed_at_the_start(folder: Folder) -> None:
    folder.open().save(2, part(2), "last", None)
    for name in ("step-00000004.1.partial", "step-00000001.gone.partial"):
        (folder.run_dir / "checkpoints" / name).mkdir()
        (folder.run_dir / "checkpoints" / name / "rank-0.json").write_text("torn")
    assert folder.step_found() == 2
    assert folder.names() == ["step-00000002"]


@pytest.mark.parametrize("sign", ["attempts/2/x", "attempts/10/x", "attempts/1/final.json"])
def test_a_stale_attempt_publishes_and_prunes_nothing(folder: Folder, sign: str) -> None:
    checkpoints = folder.open()
    checkpoints.save(2, part(2), "last", None)
    (folder.run_dir / sign).parent.mkdir(exist_ok=True)
    (folder.run_dir / sign).touch()
    told = list(folder.events.told)
    with pytest.raises(StaleAttempt, match="attempt 1 is stale"):
        checkpoints.save(4, part(4), "last", None)
    assert folder.names() == ["step-00000002"]
    assert folder.events.told == told
    with pytest.raises(StaleAttempt):
        folder.open().newest()
    with pytest.raises(StaleAttempt):
        checkpoints.check_fence()


def test_older_attempts_make_none_stale(folder: Folder) -> None:
    (folder.run_dir / "attempts" / "2").mkdir()
    assert folder.open(2).save(2, part(2), "last", None).outcome == "published"


def test_a_cancelled_attempt_publishes_nothing(folder: Folder) -> None:
    (folder.run_dir / "attempts" / "1" / "cancel").touch()
    checkpoints = folder.open()
    assert checkpoints.save(2, part(2), "last", None).outcome == "cancelled"
    assert folder.names() == []


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json", "manifest.json", "best.json.1"])
@pytest.mark.parametrize("error", [28, 122, 5])
def test_a_failing_disk_leaves_no_torn_checkpoint(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    checkpoints = folder.open()
    checkpoints.save(2, part(2), "best", Best(2, 0.5))
    write = trainer.checkpoint.write_synced

    def fail(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2] if path.name == name else data)
        if path.name == name:
            raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(trainer.checkpoint, "write_synced", fail)
    if error == 5:
        with pytest.raises(StorageFailed, match="rank 0 could not write its part"):
            checkpoints.save(4, part(4), "best", Best(4, 0.4))
    else:
        saved = checkpoints.save(4, part(4), "best", Best(4, 0.4))
        assert saved.outcome == "disk full"
        assert saved.detail.startswith("disk full: rank 0 could not write its part")
    assert folder.step_found() in ((2, 4) if name.startswith("best") else (2,))
    assert not [n for n in folder.names() if n.endswith(".partial")]
