"""A process of the trainer that scores rows for this server; `trainer/serve.py` says how both talk."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError
from headway.serving.live.inputs import Row
from headway.training.trainer_process import trainer_environment

# A first import of torch takes many seconds on a busy machine.
HELLO_SECONDS = 120.0
LOAD_SECONDS = 60.0
SCORE_SECONDS = 60.0
_PROTOCOL = 2
_encode = msgspec.msgpack.Encoder().encode
_LENGTH = struct.Struct("<I")
_MAX_FRAME = 64 * 1024 * 1024


class ChildLost(HeadwayError):
    """The scoring process ended, or did not answer in time and was ended; another one can take its place."""


class ChildRefused(HeadwayError):
    """The scoring process answered with an error; `code` is its own (`malformed`, `refused`, `raised`)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}", "the server's log has the stack of what was raised")
        self.code = code


class WrongRowCount(HeadwayError):
    """The model answered with another number of scores than it got rows."""

    def __init__(self, rows: int, scores: int) -> None:
        super().__init__(f"the model gave {scores} scores for {rows} rows", "nobody was answered; look at the model")


class ScoringChild:
    """One scoring process. Not for several threads at once; it dies with the thread that made it, and with us."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # Run as a file: its own folder must not be searched for another trainer than the one that is named later.
        command = [sys.executable, "-P", str(_script()), "--socket", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=trainer_environment(),
                pass_fds=[theirs.fileno()],
            )
        self._wire = ours
        self._greeted = False

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def load(self, code: Path, artifact: Path, inputs: Mapping[str, str]) -> str:
        """Load an artifact with the trainer of a code tree; return the digest of the manifest that was loaded.

        Args:
            code: the code tree.
            artifact: the artifact's folder.
            inputs: names and types of the columns that rows will have, in their order.

        Raises:
            ChildRefused: the artifact or the code is refused.
            ChildLost: the process ended.
        """
        self._greet()
        request = json.dumps({"code": str(code), "artifact": str(artifact), "inputs": list(inputs.items())}).encode()
        kind, body = self._ask(b"L", request, LOAD_SECONDS)
        return str(self._document(kind, b"R", body)["manifest"])

    def score(self, rows: Sequence[Row], seconds: float = SCORE_SECONDS) -> NDArray[np.float64]:
        """The probability of each row of plain values, float64 of shape (rows,), within some seconds.

        Raises:
            ChildRefused: the model's code raised, or does not take these columns.
            WrongRowCount: the answer has another length.
            ChildLost: the process ended, or did not answer in time.
        """
        kind, body = self._ask(b"P", _encode(rows), seconds)
        if kind != b"A":
            self._document(kind, b"A", body)
        if len(body) != 8 * len(rows):
            raise WrongRowCount(len(rows), len(body) // 8)
        return np.frombuffer(body, dtype="<f8")

    def close(self) -> None:
        """End the process; safe to repeat."""
        self._wire.close()
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _greet(self) -> None:
        if not self._greeted:
            self._wire.settimeout(HELLO_SECONDS)
            said = self._document(*self._receive_of(b"H"))
            if said.get("protocol") != _PROTOCOL:
                raise self._lost(f"it speaks protocol {said.get('protocol')!r}, this server {_PROTOCOL}")
            self._greeted = True

    def _receive_of(self, wanted: bytes) -> tuple[bytes, bytes, bytes]:
        kind, body = self._receive()
        return kind, wanted, body

    def _ask(self, kind: bytes, body: bytes, seconds: float) -> tuple[bytes, bytes]:
        self._wire.settimeout(seconds)
        try:
            self._wire.sendall(_LENGTH.pack(1 + len(body)) + kind + body)
        except OSError as error:
            raise self._lost(str(error)) from error
        return self._receive()

    def _document(self, kind: bytes, wanted: bytes, body: bytes) -> dict[str, Any]:
        if kind not in (wanted, b"E"):
            raise self._lost(f"it answered {kind!r} where {wanted!r} was asked")
        document: dict[str, Any] = json.loads(body)
        if kind == b"E":
            raise ChildRefused(document["code"], document["message"])
        return document

    def _receive(self) -> tuple[bytes, bytes]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 < length <= _MAX_FRAME:
            raise self._lost(f"it sent a frame of {length} bytes")
        frame = self._exactly(length)
        return frame[:1], frame[1:]

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                part = self._wire.recv(count - len(found))
            except OSError as error:
                raise self._lost(str(error) or "it did not answer in time") from error
            if not part:
                raise self._lost("it closed its socket")
            found += part
        return bytes(found)

    def _lost(self, why: str) -> ChildLost:
        """End the process: after half an answer, the next one would not be told from the rest of this one."""
        self.close()
        return ChildLost(f"the scoring process {self.pid} is gone ({why}; status {self._process.returncode})", "wait")


def _script() -> Path:
    found = importlib.util.find_spec("trainer")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "serve.py"
