"""The process that scores for a server: the same bits as `trainer.score`, whatever frames it gets."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_data import ROOT, model_spec, snapshot_table, training_run, write_models

from trainer.predictor import Predictor, load_artifact
from trainer.serve import MAX_FRAME, serve

ROWS = snapshot_table(40, 300, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    spec = training_run(folder / "store", days=4, rows=60, model=model_spec(options={"width": 128, "blocks": 2}))
    write_models(spec, folder / "store", folder)
    return folder


@pytest.fixture(scope="module")
def network(folder: Path) -> Predictor:
    return load_artifact(folder / "network")


class _Client:
    """The server's side of the socket."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        wire.settimeout(120)

    def send(self, kind: bytes, body: bytes) -> None:
        self.wire.sendall(struct.pack("<I", 1 + len(body)) + kind + body)

    def receive(self) -> tuple[bytes, bytes]:
        (length,) = struct.unpack("<I", self._exactly(4))
        frame = self._exactly(length)
        return frame[:1], frame[1:]

    def asked(self, kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        self.send(kind, body)
        return self.receive()

    def scores(self, rows: pa.Table) -> np.ndarray:
        kind, body = self.asked(b"P", packed(rows))
        assert kind == b"A", body
        return np.frombuffer(body, "<f8")

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self.wire.recv(count - len(found))
            assert part, "the other end closed"
            found += part
        return found


def packed(rows: pa.Table) -> bytes:
    return msgspec.msgpack.encode(list(zip(*(c.to_pylist() for c in rows.columns), strict=True)))


def named(columns: Sequence[str], code: str = "a", artifact: str = "b") -> bytes:
    types = {"double": "float64", "dictionary<values=string, indices=int32, ordered=0>": "string"}
    kinds = [str(ROWS.schema.field(c).type) for c in columns]
    inputs = [[c, types.get(k, k)] for c, k in zip(columns, kinds, strict=True)]
    return json.dumps({"code": code, "artifact": artifact, "inputs": inputs}).encode()


@pytest.fixture(scope="module")
def loaded(network: Predictor) -> Iterator[_Client]:
    """A client of a loop in this process, which has loaded the network."""
    ours, theirs = socket.socketpair()
    loop = threading.Thread(target=serve, args=(theirs, lambda code, artifact: network))
    loop.start()
    client = _Client(ours)
    assert client.receive() == (b"H", b'{"protocol": 2}')
    kind, body = client.asked(b"L", named(network.inputs.columns))
    assert (kind, json.loads(body)) == (b"R", {"manifest": network.manifest.digest})
    yield client
    ours.close()
    loop.join(60)
    assert not loop.is_alive(), "it ends when the other end closes"


def test_rows_of_one_frame_score_to_the_bits_of_the_command(loaded: _Client, network: Predictor) -> None:
    inputs = ROWS.select(list(network.inputs.columns))
    whole = network.score(ROWS).probability
    assert loaded.scores(inputs).tobytes() == whole.tobytes()
    assert loaded.scores(inputs.slice(7, 3)).tobytes() == whole[7:10].tobytes()
    assert len(loaded.scores(inputs.slice(0, 0))) == 0


@given(frames=st.lists(st.tuples(st.sampled_from([b"P", b"P", b"L", b"H", b"?", b"\x00"]), st.binary(max_size=200))))
@settings(max_examples=60, deadline=None)
def test_no_frame_ends_the_loop(loaded: _Client, network: Predictor, frames: list[tuple[bytes, bytes]]) -> None:
    for kind, body in frames:
        answer, said = loaded.asked(kind, body)
        assert answer == b"E"
        assert json.loads(said)["code"] == "malformed"
    inputs = ROWS.select(list(network.inputs.columns)).slice(0, 1)
    assert loaded.scores(inputs)[0] == network.score(inputs).probability[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_rows_are_refused_or_scored_and_never_end_the_loop(
    loaded: _Client, network: Predictor, data: st.DataObject
) -> None:
    whole = bytearray(packed(ROWS.select(list(network.inputs.columns)).slice(0, 2)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))])
    kind, said = loaded.asked(b"P", body)
    assert kind in (b"A", b"E")
    if kind == b"E":
        assert json.loads(said)["code"] in ("malformed", "refused")


def test_rows_that_are_no_text_are_refused_before_the_model_sees_them(loaded: _Client, network: Predictor) -> None:
    rows = ROWS.select(list(network.inputs.columns)).slice(0, 1)
    name = network.inputs.categorical[0].name
    marked = packed(rows.set_column(rows.column_names.index(name), name, pa.array(["MARKMARK"])))
    assert b"\xa8MARKMARK" in marked
    for broken in (b"\xa8\xff\xfe\xff\xfeMARK", b"\xc4\x08\xff\xfe\xff\xfeMARK"):
        kind, said = loaded.asked(b"P", marked.replace(b"\xa8MARKMARK", broken))
        assert (kind, json.loads(said)["code"]) == (b"E", "malformed"), broken


def test_a_frame_that_is_too_long_is_read_past_and_refused(loaded: _Client, network: Predictor) -> None:
    length = MAX_FRAME + 10
    loaded.wire.sendall(struct.pack("<I", length))
    for start in range(0, length, 1 << 20):
        loaded.wire.sendall(bytes(min(1 << 20, length - start)))
    assert json.loads(loaded.receive()[1])["code"] == "malformed"
    loaded.wire.sendall(struct.pack("<I", 0))
    assert json.loads(loaded.receive()[1])["code"] == "malformed"
    assert len(loaded.scores(ROWS.select(list(network.inputs.columns)).slice(0, 1))) == 1


def test_rows_of_other_columns_are_refused(loaded: _Client, network: Predictor) -> None:
    columns = list(network.inputs.columns)
    first = ROWS.select(columns).slice(0, 1)
    for wrong in (packed(first.select(columns[1:])), packed(first)[:-1], packed(first.select(columns[::-1]))):
        assert json.loads(loaded.asked(b"P", wrong)[1])["code"] == "malformed"


def test_a_missing_input_is_refused_by_name(loaded: _Client, network: Predictor) -> None:
    first, *others = network.inputs.columns
    assert loaded.asked(b"L", named(others))[0] == b"R"
    kind, said = loaded.asked(b"P", packed(ROWS.select(others)))
    assert kind == b"E"
    assert (json.loads(said)["code"], first in json.loads(said)["message"]) == ("refused", True)
    assert loaded.asked(b"L", named(network.inputs.columns))[0] == b"R"


def test_what_the_model_raises_is_told_and_the_next_frame_answered() -> None:
    class Raises:
        manifest: Any = type("M", (), {"digest": "sha256:x"})

        def score(self, table: pa.Table) -> Any:  # noqa: ANN401
            raise ZeroDivisionError(f"{table.num_rows} rows")

    ours, theirs = socket.socketpair()
    loop = threading.Thread(target=serve, args=(theirs, lambda code, artifact: Raises()))
    loop.start()
    with closing(ours):
        client = _Client(ours)
        client.receive()
        assert json.loads(client.asked(b"P", b"\x91\x91\x01")[1])["code"] == "malformed", "nothing is loaded"
        client.asked(b"L", b'{"code": "a", "artifact": "b", "inputs": [["x", "int64"]]}')
        for _ in range(2):
            assert json.loads(client.asked(b"P", b"\x91\x91\x01")[1]) == {
                "code": "raised",
                "message": "ZeroDivisionError: 1 rows",
            }
    loop.join(60)
    assert not loop.is_alive()


_PARENT = """
import os, signal, socket, subprocess, sys
ours, theirs = socket.socketpair()
number = theirs.fileno()
child = subprocess.Popen([sys.executable, "-P", sys.argv[1], "--socket", str(number)], pass_fds=[number])
theirs.close()
ours.recv(4)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_scores_with_the_code_it_is_told_and_dies_with_its_parent(folder: Path, network: Predictor) -> None:
    script = str(ROOT / "trainer" / "serve.py")
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-P", script, "--socket", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    with closing(ours):
        client = _Client(ours)
        client.receive()
        kind, said = client.asked(b"L", named(network.inputs.columns, str(folder), str(folder / "network")))
        assert (kind, json.loads(said)["code"]) == (b"E", "refused"), "no trainer of another tree takes its place"
        kind, said = client.asked(b"L", named(network.inputs.columns, str(ROOT), str(folder / "network")))
        assert kind == b"R", said
        inputs = ROWS.select(list(network.inputs.columns)).slice(0, 5)
        assert client.scores(inputs).tobytes() == network.score(inputs).probability.tobytes()
    assert child.wait(60) == 0, "it ends when its server is gone"

    parent = subprocess.run([sys.executable, "-c", _PARENT, script], stdout=subprocess.PIPE, check=False, timeout=120)
    pid = int(parent.stdout)
    for _ in range(600):
        if not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        threading.Event().wait(0.1)
    else:
        pytest.fail("the scoring process outlives its server")
