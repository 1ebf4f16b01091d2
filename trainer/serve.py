"""Scores rows for a server, over a socket that the server hands down: `python -P trainer/serve.py --socket FD`.

It runs as a file and not as `-m trainer.serve`: torch is imported at once, so that a process waits warm, and the
trainer only once a version is named, from the code tree of the run that made it. So the server's present code speaks
the protocol, and the run's own code loads the artifact and scores, as `trainer.score` of that tree does.

A frame is four bytes of length (little endian), one byte of kind, and a body:

* `H` to the server, JSON `{"protocol": 2}`: torch is imported.
* `L` from it, JSON `{"code": folder, "artifact": folder, "inputs": [[name, type], ...]}`: load, and take rows of these
  columns (`string`, `int64`, `float64` or `bool`); answered by `R`, JSON `{"manifest": digest}`, or `E`.
* `P` from it, a MessagePack list of rows, each a list of values in the order of the columns: answered by `A`, one
  float64 (little endian) per row, or `E`.
* `E` to the server, JSON `{"code": ..., "message": ...}` with the codes `malformed`, `refused` (the artifact or an
  input column), `raised` (anything else that the model's code raised). It goes on with the next frame.

It ends when the server's end of the socket closes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import safetensors.torch  # noqa: F401  # pyright: ignore[reportUnusedImport] - loading needs it
import torch

if TYPE_CHECKING:
    from trainer.predictor import Predictor

PROTOCOL = 2
MAX_FRAME = 64 * 1024 * 1024
HELLO, LOAD, READY, ROWS, ANSWER, ERROR = b"H", b"L", b"R", b"P", b"A", b"E"

_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20
_rows = msgspec.msgpack.Decoder(list[list[Any]]).decode
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Closed(Exception):
    """The server's end of the socket is closed."""


class FrameRefused(ValueError):
    """A frame that says nothing here; the next one may."""


class CodeElsewhere(ValueError):
    """The trainer was imported from another tree than the one that was named."""


Load = Callable[[Path, Path], "Predictor"]
Columns = list[tuple[str, pa.DataType]]


@dataclass(frozen=True)
class Loaded:
    """A model, and the columns in which rows come."""

    predictor: Predictor
    columns: Columns


def serve(wire: socket.socket, load: Load) -> None:
    """Answer frame after frame until the other end closes. Whatever a frame holds, the next one is answered too."""
    loaded: Loaded | None = None
    _send(wire, HELLO, json.dumps({"protocol": PROTOCOL}).encode())
    while True:
        try:
            kind, body = receive(wire)
            if kind == LOAD:
                code, artifact, columns = _named(body)
                loaded = Loaded(load(code, artifact), columns)
                _send(wire, READY, json.dumps({"manifest": loaded.predictor.manifest.digest}).encode())
            elif kind == ROWS:
                _send(wire, ANSWER, score(loaded, body))
            else:
                raise FrameRefused(f"kind {kind!r} is none")
        except (Closed, ConnectionError):
            return
        except FrameRefused as error:
            _send_error(wire, "malformed", error)
        except ValueError as error:
            # Every refusal of the trainer is a ValueError, whichever tree it comes from.
            _send_error(wire, "refused", error)
        except Exception as error:  # noqa: BLE001 - it is told, and its stack goes to the server's log
            # The model's code is a pipeline's own, and may raise anything.
            traceback.print_exc()
            _send_error(wire, "raised", error)


def score(loaded: Loaded | None, body: bytes) -> bytes:
    """The probabilities of a frame's rows, float64 little endian, each computed as a batch of its own.

    Raises:
        FrameRefused: nothing is loaded, or the body holds no rows of the columns that were named.
        EncodingRefused: an input column is missing or of another kind.
    """
    if loaded is None:
        raise FrameRefused("rows came before an artifact")
    try:
        rows = _rows(body)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(loaded.columns)
        table = pa.Table.from_arrays(
            [pa.array(values, kind) for values, (_, kind) in zip(columns, loaded.columns, strict=True)],
            names=[name for name, _ in loaded.columns],
        )
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise FrameRefused(f"the rows are not of the columns that were named: {error}") from error
    return loaded.predictor.score(table).probability.astype("<f8").tobytes()


def receive(wire: socket.socket) -> tuple[bytes, bytes]:
    """The kind and body of the next frame.

    Raises:
        Closed: there is none, or it broke off.
        FrameRefused: it is empty, or longer than `MAX_FRAME`; its bytes were read past.
    """
    (length,) = _LENGTH.unpack(_exactly(wire, _LENGTH.size))
    if length > MAX_FRAME:
        for start in range(0, length, _CHUNK):
            _exactly(wire, min(_CHUNK, length - start))
        raise FrameRefused(f"{length} bytes; {MAX_FRAME} are the most")
    if length == 0:
        raise FrameRefused("an empty frame")
    frame = _exactly(wire, length)
    return frame[:1], frame[1:]


def load_from(code: Path, artifact: Path) -> Predictor:
    """The artifact, loaded by the trainer of a code tree.

    Raises:
        CodeElsewhere: Python found another trainer first.
        ArtifactRefused, CodeRefused: as that tree's `load_artifact`.
    """
    sys.path.insert(0, str(code))
    from trainer import predictor

    if Path(predictor.__file__).resolve().parents[1] != code.resolve():
        raise CodeElsewhere(f"the trainer comes from {predictor.__file__}, not from {code}")
    return predictor.load_artifact(artifact, code)


def warm() -> None:
    """One torch thread and deterministic kernels, as the trainer's commands have them; what comes late comes now.

    Both libraries import parts of themselves at their first use, which takes longer than loading a version.
    """
    torch.set_num_threads(1)
    # What `use_deterministic_algorithms(True)` sets, without importing the compiler, which nothing here uses.
    torch.set_deterministic_debug_mode("error")
    with torch.inference_mode():
        torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Linear(2, 1))(torch.zeros(1, dtype=torch.int64)).item()
    column = pa.chunked_array([["a", None]])
    column.combine_chunks().dictionary_encode().indices.fill_null(0).to_numpy()
    pa.chunked_array([[1, None]]).cast(pa.float64(), safe=False).to_numpy()


def _exactly(wire: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        read = wire.recv_into(view)
        if read == 0:
            raise Closed
        view = view[read:]
    return bytes(found)


def _named(body: bytes) -> tuple[Path, Path, Columns]:
    try:
        named = json.loads(body)
        columns = [(str(name), _TYPES[kind]) for name, kind in named["inputs"]]
        return Path(named["code"]), Path(named["artifact"]), columns
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameRefused(f"no artifact is named: {error!r:.200}") from error


def _send(wire: socket.socket, kind: bytes, body: bytes) -> None:
    wire.sendall(_LENGTH.pack(1 + len(body)) + kind + body)


def _send_error(wire: socket.socket, code: str, error: Exception) -> None:
    document = {"code": code, "message": f"{type(error).__name__}: {error}"[:2000]}
    try:
        _send(wire, ERROR, json.dumps(document).encode())
    except ConnectionError:
        # Nobody is left to tell; the next read finds the end.
        return


def main() -> int:
    """Serve the socket that was handed down until it closes."""
    parser = argparse.ArgumentParser(description="Score rows for a server.")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of a connected stream socket")
    given = parser.parse_args()
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    # The server decides when to end; a key pressed in its terminal reaches us as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm()
    with socket.socket(fileno=given.socket) as wire:
        serve(wire, load_from)
    return 0


if __name__ == "__main__":
    sys.exit(main())
