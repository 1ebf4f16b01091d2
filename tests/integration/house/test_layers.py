"""The import contracts of pyproject.toml hold the layers: each kind of violation is found, what is allowed passes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree of the five packages under the real contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("assets", "headway", "pipelines", "resources", "trainer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for module in ("blobs", "events", "spec", "worker"):
        (tmp_path / "trainer" / f"{module}.py").touch()
    return tmp_path


def check(tree: Path) -> "subprocess.CompletedProcess[str]":
    linter = Path(sys.executable).parent / "lint-imports"
    return subprocess.run([str(linter), "--no-cache"], cwd=tree, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pipelines/one.py", "import assets, resources, headway, trainer.worker"),
        ("assets/one.py", "import dagster, resources, headway, trainer.spec"),
        ("resources/one.py", "import dagster, headway, trainer.events"),
        ("headway/one.py", "import trainer.spec, trainer.blobs, trainer.events"),
    ],
)
def test_what_the_design_allows_passes(tree: Path, module: str, line: str) -> None:
    (tree / module).write_text(line + "\n")
    done = check(tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("assets/bad.py", "import pipelines", "Imports point one way"),
        ("resources/bad.py", "import assets", "Imports point one way"),
        ("headway/bad.py", "import resources", "Imports point one way"),
        ("trainer/bad.py", "import headway", "Imports point one way"),
        ("headway/bad.py", "import dagster", "The platform knows no Dagster"),
        ("headway/bad.py", "def f():\n    import dagster_pipes", "The platform knows no Dagster"),
        ("trainer/bad.py", "import dagster", "The platform knows no Dagster"),
        ("headway/bad.py", "import trainer.worker", "Only the trainer's torch-free modules are shared"),
        ("assets/bad.py", "from trainer import worker", "Only the trainer's torch-free modules are shared"),
    ],
)
def test_a_violation_is_found_and_named(tree: Path, module: str, line: str, contract: str) -> None:
    (tree / module).write_text(line + "\n")
    done = check(tree)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout
