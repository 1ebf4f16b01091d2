"""The stateful machine over the public commands on both databases, and the mutants that it must kill."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.catalog_machine import run

ROOT = Path(__file__).parents[3]
STEPS = 2_000


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "drop the epoch check",
        "headway/catalog/datasets.py",
        "            .where(dataset_partition.c.epoch == expected)\n",
        "",
    ),
    Mutant(
        "drop the key claim", "headway/catalog/commands.py", "    if mine:\n        return None\n", "    return None\n"
    ),
    Mutant(
        "drop a trigger in a migration",
        "headway/catalog/migrations/versions/0001_data.py",
        "def _snapshots() -> None:\n",
        'def _snapshots() -> None:\n    op.execute("DROP TRIGGER dataset_event_no_update")\n',
    ),
    Mutant(
        "swallow a conflict",
        "headway/catalog/commands.py",
        "        raise IdempotencyConflict(step.key, command.operation)\n",
        "        pass\n",
    ),
)


def test_commands_keep_the_model(catalog_url: str, tmp_path: Path) -> None:
    assert run(catalog_url, tmp_path / "store", examples=50) >= STEPS


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    unwanted = shutil.ignore_patterns("__pycache__")
    for package in ("headway", "trainer", "tests/support"):
        shutil.copytree(ROOT / package, copy / package, ignore=unwanted)
    return copy


def _run_copy(copy: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "support.catalog_machine",
        f"sqlite:///{folder / 'catalog.db'}",
        str(folder / "store"),
    ]
    return subprocess.run([*command, "25"], env=environment, cwd=copy, capture_output=True, text=True, timeout=300)


def test_the_machine_passes_on_an_unchanged_copy(copied: Path, tmp_path: Path) -> None:
    result = _run_copy(copied, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "steps" in result.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_machine_kills(mutant: Mutant, copied: Path, tmp_path: Path) -> None:
    file = copied / mutant.file
    original = file.read_text()
    assert original.count(mutant.old) == 1
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        result = _run_copy(copied, tmp_path)
    finally:
        file.write_text(original)
    assert result.returncode == 1, result.stdout
    assert "state." in result.stderr, result.stderr
