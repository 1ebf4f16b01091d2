"""Writes files so that a reader, also one after a crash, sees all of the new content or all of the old."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.blobs import sync_folder


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one durable step. One writer at a time; what a killed one left is overwritten by the next.

    Args:
        path: the file; `<name>.new` beside it is used meanwhile.
        data: what it will hold.
        mode: its permissions, whatever the umask is.

    Raises:
        OSError: nothing was replaced.
    """
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as target:
        os.fchmod(target.fileno(), mode)
        target.write(data)
        target.flush()
        os.fsync(target.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)
