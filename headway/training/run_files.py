"""The files by which an attempt is known: seen whole or not at all, also after a crash, with any number of writers."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from headway.training.launch import LaunchRefused
from trainer.blobs import Json, canonical_json, sync_folder

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def run_folder(runs_root: Path, run_id: str) -> Path:
    """The run's directory below `runs_root`.

    Raises:
        LaunchRefused: `run_id` is no name for a directory.
    """
    if _RUN_ID.fullmatch(run_id) is None:
        raise LaunchRefused(f"{run_id!r:.80} is no run id", "use the id that `headway runs` lists")
    return runs_root / run_id


def publish(path: Path, document: Json) -> None:
    """Write a JSON document in the place of what stands there."""
    _write_beside(path, canonical_json(document)).replace(path)
    sync_folder(path.parent)


def create(path: Path, content: bytes) -> None:
    """Make a file with all of its content, unless it exists: the first writer wins."""
    if path.exists():
        return
    temporary = _write_beside(path, content)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    sync_folder(path.parent)


def write_once(path: Path, content: bytes) -> None:
    """Write a file that never changes; a second writer with the same content finds it done.

    Raises:
        LaunchRefused: it exists with other content.
    """
    create(path, content)
    if path.read_bytes() != content:
        raise LaunchRefused(
            f"{path} exists with other content", "a run's spec and an attempt's never change; use a new run or attempt"
        )


def _write_beside(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary
