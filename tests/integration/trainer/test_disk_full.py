"""Field report D11: the disk is full during a save."""

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainer_runs import ENGINES, Run, toy_spec

from trainer.spec import ExitCode

PAGE = 4096


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    runs = {engine: Run(tmp_path_factory.mktemp("undisturbed") / "run", toy_spec(engine)) for engine in ENGINES}
    for run in runs.values():
        assert run.finish() == [0, 0]
    return runs


def size_of_checkpoint(run: Run) -> int:
    """What one takes on a disk with blocks of 4 KiB."""
    folder = run.folder / "checkpoints" / run.checkpoints()[-1]
    return sum(math.ceil(file.stat().st_size / PAGE) * PAGE for file in folder.iterdir())


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A place to mount a small file system on."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    yield place
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


def assert_stopped_for_want_of_space(run: Run) -> None:
    """The first checkpoint is whole, nothing else is there; a save that could wait did, the best step could not."""
    assert run.checkpoints() == ["step-00000002"]
    assert [p.name for p in (run.folder / "checkpoints").glob("*.partial")] == []
    skipped, stopped, *_ = [event.data for event in run.events("error")]
    assert skipped["kind"] == "DiskFull"
    assert skipped["message"].endswith("training goes on without a checkpoint of step 4")
    assert stopped["kind"] == "DiskFull"
    assert stopped["message"].startswith("disk full: rank ")
    assert [event.data["step"] for event in run.events("checkpoint")] == [2]
    assert run.events("step")[-1].data["step"] == 5


def assert_goes_on(run: Run, undisturbed: Run) -> None:
    assert run.finish() == [0, 0]
    assert run.events("step")[0].data["step"] == 3
    assert run.losses() == undisturbed.losses()
    assert run.state() == undisturbed.state()


@pytest.mark.parametrize("engine", ENGINES)
def test_d11_quota(engine: str, undisturbed: dict[str, Run], tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec(engine))
    quota = size_of_checkpoint(undisturbed[engine]) * 3 // 2
    assert run.finish(quota=quota) == [ExitCode.LOST_PEER, ExitCode.LOST_PEER]
    assert_stopped_for_want_of_space(run)
    assert_goes_on(run, undisturbed[engine])


def test_d11_file_system_of_one_and_a_half_checkpoints(undisturbed: dict[str, Run], tmpfs: Path) -> None:
    size = size_of_checkpoint(undisturbed["ddp"]) * 3 // 2 // PAGE * PAGE
    options = f"size={size}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(tmpfs)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    run = Run(tmpfs.parent, toy_spec("ddp"))
    assert run.finish() == [ExitCode.LOST_PEER, ExitCode.LOST_PEER]
    assert_stopped_for_want_of_space(run)
    subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(tmpfs)], check=True)
    assert_goes_on(run, undisturbed["ddp"])
