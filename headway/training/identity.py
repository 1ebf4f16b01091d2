"""What a run's identity pins beside its data: code, environment and configuration."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headway.errors import HeadwayError
from trainer.blobs import Json

CODE_ROOT = Path(__file__).resolve().parents[2]

# What computes: another version of one of these may give other bits. The rest of the environment moves bytes.
_DECISIVE = ("deepspeed", "numpy", "pyarrow", "safetensors", "scikit-learn", "torch")


class WorkerPackageMissing(HeadwayError):
    """A package that workers need is not installed."""


def environment() -> dict[str, Json]:
    """Interpreter, machine and the packages that decide what is computed; torch is looked up, never imported."""
    packages: dict[str, Json] = {}
    for name in _DECISIVE:
        try:
            packages[name] = version(name)
        except PackageNotFoundError as error:
            raise WorkerPackageMissing(
                f"{name} is not installed, and training needs it", "run `make venv`, or pip install -e '.[train]'"
            ) from error
    return {"python": platform.python_version(), "machine": platform.machine(), "packages": packages}


def is_dirty(folder: Path) -> bool:
    """Whether the code differs from what version control holds; code outside of it counts as dirty."""
    command = ["git", "status", "--porcelain", "--", str(CODE_ROOT / "trainer"), str(folder)]
    try:
        done = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"code counts as dirty: git could not be asked ({error})\n")
        return True
    return done.returncode != 0 or bool(done.stdout.strip())
