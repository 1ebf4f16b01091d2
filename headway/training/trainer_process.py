"""Runs a module of the trainer in a process of its own, from a code tree put in place for it: torch lives there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.errors import HeadwayError
from headway.processes import die_with_parent

_LINES = 15
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


class TrainerAbsent(HeadwayError):
    """A code tree without the trainer that was to run from it."""


class TrainerFailed(HeadwayError):
    """A module of the trainer ended badly or not in time; `code` is its exit status, None for a missed deadline."""

    def __init__(self, module: str, code: int | None, words: str) -> None:
        ended = "did not end in time" if code is None else f"ended with {code}"
        super().__init__(f"{module} {ended}: {words or 'it said nothing'}", "see its words")
        self.code = code


def run_trainer(module: str, arguments: Sequence[str], code_root: Path, deadline_s: float, threads: int = 1) -> str:
    """Run `python -m <module>` with the code below `code_root`, and return what it printed.

    Raises:
        TrainerAbsent: `code_root` holds no such module; nothing was started.
        TrainerFailed: it ended with another status than 0, or took longer than `deadline_s` seconds.
    """
    file = code_root.joinpath(*module.split(".")).with_suffix(".py")
    # Python would look further along its path and quietly run the installed trainer in place of the absent one.
    if not (file.is_file() and (code_root / "trainer" / "__init__.py").is_file()):
        raise TrainerAbsent(f"{code_root} holds no {module}", "restore the code tree; no other trainer takes its place")
    command = [sys.executable, "-m", module, *arguments]
    us = os.getpid()
    try:
        done = subprocess.run(
            command,
            cwd=code_root,
            env=trainer_environment(threads) | {"PYTHONPATH": str(code_root)},
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            preexec_fn=lambda: die_with_parent(us),
        )
    except subprocess.TimeoutExpired as error:
        raise TrainerFailed(module, None, f"{deadline_s:.0f} s are over") from error
    if done.returncode != 0:
        raise TrainerFailed(module, done.returncode, "\n".join(done.stderr.strip().splitlines()[-_LINES:]))
    return done.stdout


def trainer_environment(threads: int = 1) -> dict[str, str]:
    """What a process of the trainer gets of our environment: nothing else, as model code must not see our secrets."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return passed | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": str(threads)}
