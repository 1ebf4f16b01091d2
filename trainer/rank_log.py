"""What a rank prints, on a disk that it cannot fill. Standard library only.

`NAME.log` takes the beginning. When it is full, `NAME.log.2` takes what follows; each time that one is full, it becomes
`NAME.log.1` and a new one is begun. So the beginning and the newest part are kept, and together the three files hold
at most `3 * LIMIT` bytes and two short lines that say what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LIMIT = 16 << 20
# One look at a pipe takes at most so much: more than it holds, and no end where a rank never pauses.
CHUNK, READS = 1 << 16, 16


class RankLog:
    """The reading end of a rank's stdout and stderr, and the files they go to.

    `channel` is what to wait on; `open` is whether there may still come something.
    """

    def __init__(self, path: Path, channel: int) -> None:
        """`channel` is the reading end of a pipe; it is made non-blocking."""
        os.set_blocking(channel, False)
        self.channel = channel
        self.open = True
        self._first = path
        self._newest = path.with_name(f"{path.name}.2")
        self._older = path.with_name(f"{path.name}.1")
        self._file = path.open("ab", buffering=0)
        self._left = LIMIT - self._file.tell()
        self._refused = False

    def relay(self) -> None:
        """Move what the pipe holds into the files; `open` is False afterwards when every writer is gone."""
        for _ in range(READS):
            try:
                data = os.read(self.channel, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            try:
                self._write(data)
            except OSError as error:
                # Reading goes on: a rank must not wait for a disk that is full. The first refusal is told.
                if not self._refused:
                    print(f"{self._first}: {error}; what follows may be missing", file=sys.stderr, flush=True)
                self._refused = True

    def _write(self, data: bytes) -> None:
        while data:
            if self._left <= 0:
                self._rotate()
            written = self._file.write(data[: self._left])
            self._left -= written
            data = data[written:]

    def _rotate(self) -> None:
        if self._file.name == str(self._first):
            self._file.write(
                f"\n--- {LIMIT} bytes were written; the newest are in {self._newest.name}, "
                f"some before them in {self._older.name}, the rest is left out ---\n".encode()
            )
        else:
            self._newest.replace(self._older)
        self._file.close()
        self._file = self._newest.open("wb", buffering=0)
        self._left = LIMIT
