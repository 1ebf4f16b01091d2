"""The trainer runs from the code tree that was put in place for it, and from no other."""

from pathlib import Path

import pytest

from headway.training.trainer_process import TrainerAbsent, TrainerFailed, run_trainer


def _tree(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return root


@pytest.mark.parametrize(
    "files",
    [
        (),
        ("trainer.py",),
        ("trainer/__init__.py",),
        # A folder that is no package, behind which Python finds the installed one.
        ("trainer/score.py",),
    ],
)
def test_a_tree_without_the_trainer_starts_nothing(
    tmp_path: Path, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.training.trainer_process.subprocess.run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(TrainerAbsent, match=r"holds no trainer\.score"):
        run_trainer("trainer.score", ["--help"], _tree(tmp_path, *files), 60)


def test_the_trees_own_trainer_runs(tmp_path: Path) -> None:
    root = _tree(tmp_path, "trainer/__init__.py", "trainer/score.py")
    (root / "trainer" / "score.py").write_text("import sys\nprint(__file__, *sys.argv[1:])\n")
    assert run_trainer("trainer.score", ["a", "b"], root, 60).split() == [str(root / "trainer/score.py"), "a", "b"]
    (root / "trainer" / "score.py").write_text("raise SystemExit(65)\n")
    with pytest.raises(TrainerFailed) as failed:
        run_trainer("trainer.score", [], root, 60)
    assert failed.value.code == 65
