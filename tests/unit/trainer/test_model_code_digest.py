"""The digest of a code tree: what changes it, what does not, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.blobs import MissingCode, code_tree_digest

PARTS = ("trainer", "pipelines/p")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("trainer/loop.py", "trainer/models/net.py", "pipelines/p/defs.yaml", "pipelines/p/model.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


CHANGES: dict[str, Callable[[Path], object]] = {
    "bytes": lambda t: (t / "trainer/models/net.py").write_text("other"),
    "a declaration": lambda t: (t / "pipelines/p/defs.yaml").write_text("other"),
    "a new file": lambda t: (t / "trainer/new.py").write_text(""),
    "a file gone": lambda t: (t / "trainer/loop.py").unlink(),
    "a name": lambda t: (t / "trainer/loop.py").rename(t / "trainer/pool.py"),
    "a folder": lambda t: (t / "trainer/models").rename(t / "trainer/nets"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_paths_and_bytes_of_every_file_count(tree: Path, change: str) -> None:
    before = code_tree_digest(tree, PARTS)
    CHANGES[change](tree)
    assert code_tree_digest(tree, PARTS) != before


def test_caches_hidden_files_other_parts_place_and_order_do_not(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = code_tree_digest(tree, PARTS)
    (tree / "trainer/__pycache__").mkdir()
    (tree / "trainer/__pycache__/loop.pyc").write_bytes(b"x")
    (tree / "trainer/.loop.py.swp").write_bytes(b"x")
    (tree / "pipelines/q").mkdir()
    (tree / "pipelines/q/model.py").write_text("x")
    assert code_tree_digest(tree, PARTS[::-1]) == before
    moved = tmp_path_factory.mktemp("hidden") / ".home"
    tree.rename(moved)
    assert code_tree_digest(moved, PARTS) == before


def test_a_part_that_is_absent_and_a_link_are_refused(tree: Path) -> None:
    with pytest.raises(MissingCode, match="pipelines/q"):
        code_tree_digest(tree, ["pipelines/q"])
    (tree / "trainer/link.py").symlink_to(tree / "trainer/loop.py")
    with pytest.raises(MissingCode, match=r"trainer/link\.py"):
        code_tree_digest(tree, PARTS)
    (tree / "pipelines/r").symlink_to(tree / "pipelines/p")
    with pytest.raises(MissingCode, match="pipelines/r"):
        code_tree_digest(tree, ["pipelines/r"])


def test_a_single_file_is_a_part(tree: Path) -> None:
    assert code_tree_digest(tree, ["trainer/loop.py"]) != code_tree_digest(tree, ["trainer/models/net.py"])
