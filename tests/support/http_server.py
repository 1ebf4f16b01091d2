"""Servers in processes of their own: the double behind real connections, and `headway serve` as people start it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

WAIT_SECONDS = 240
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """A server that answers; `output` holds what it said on standard output."""

    process: subprocess.Popen[str]
    url: str
    output: list[str]
    errors: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def memory_peak(self) -> int:
        """Most bytes that the process ever had resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes until the server closes the connection."""
        with self.connected() as stream:
            stream.sendall(data)
            return read_all(stream)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(with_signal)
        assert self.process.stdout is not None
        self.output += self.process.stdout.read().splitlines()
        return self.process.wait(WAIT_SECONDS)


def read_all(stream: socket.socket) -> bytes:
    """Bytes until the other side closes."""
    found = b""
    while part := stream.recv(65536):
        found += part
    return found


@contextmanager
def started(command: list[str], environ: Mapping[str, str], errors: Path, until: str) -> Iterator[Server]:
    """A process that listens, once it printed a line with `until`; `listening on URL` names the address."""
    with errors.open("a") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, env={**os.environ, **environ}, cwd=ROOT
        )
    try:
        yield _listening(process, errors, until)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def _listening(process: subprocess.Popen[str], errors: Path, until: str) -> Server:
    assert process.stdout is not None
    output: list[str] = []
    give_up = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up:
        line = process.stdout.readline()
        if not line:
            break
        output.append(line.rstrip("\n"))
        if until in line:
            url = re.search(r"listening on (\S+)", "\n".join(output))
            assert url is not None
            return Server(process, url[1], output, errors)
    raise AssertionError(f"it ended or said nothing of {until!r}: {output} {errors.read_text()}")


def headway_serve(home: Path, errors: Path, *arguments: str, until: str = "  curl ") -> AbstractContextManager[Server]:
    """`headway serve` on a free port."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", *arguments]
    return started(command, {"HEADWAY_HOME": str(home)}, errors, until)
