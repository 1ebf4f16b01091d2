"""Connections that are slow, huge or too many are ended; others go on, and a server ends in order."""

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from support.http_child import LIMITS
from support.http_engine import INFER, asked
from support.http_server import Server, read_all, started

from headway.serving.http.server import PortTaken, listen

BODY = json.dumps(asked()).encode()
TESTS = Path(__file__).resolve().parents[2]


def child(folder: Path) -> AbstractContextManager[Server]:
    environ = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    return started([sys.executable, "-m", "support.http_child"], environ, folder / "errors", "listening on")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with child(tmp_path_factory.mktemp("child")) as found:
        yield found


def head(length: int, *more: str) -> bytes:
    lines = [f"POST {INFER} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answers(server: Server) -> bool:
    return httpx.post(server.url + INFER, content=BODY).status_code == 200


@pytest.mark.parametrize("start", [b"", b"POST /v2/mod", head(5)[:-2]])
def test_a_head_that_does_not_come_is_given_up(server: Server, start: bytes) -> None:
    told = server.raw(start)
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"slow_head"' in told
    assert answers(server)


def test_a_head_that_drips_is_given_up_as_well(server: Server) -> None:
    with server.connected() as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n")
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.05):
                try:
                    stream.sendall(b"a: b\r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert stream.recv(65536).startswith(b"HTTP/1.1 408 ")
        finally:
            done.set()
            dripping.join()
    assert answers(server)


def test_a_body_that_does_not_come_is_given_up(server: Server) -> None:
    told = server.raw(head(50) + b"{")
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"slow_body"' in told
    assert b"connection: close" in told


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\na: ", b"GET /"])
def test_a_head_without_measure_is_refused(server: Server, start: bytes) -> None:
    with server.connected() as stream:
        stream.sendall(start)
        try:
            for _ in range(20):
                stream.sendall(b"b" * 10_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
        told = _rest(stream)
    assert told == b"" or told.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert answers(server)


def _rest(stream: socket.socket) -> bytes:
    try:
        return read_all(stream)
    except ConnectionResetError:
        return b""


def test_what_is_no_http_is_refused(server: Server) -> None:
    assert server.raw(b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answers(server)


def test_bodies_of_100_mb_are_refused_and_memory_stays_flat(server: Server) -> None:
    assert answers(server)
    before = server.memory_peak()
    chunk = b" " * 1_000_000

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield chunk

    told = httpx.post(server.url + INFER, content=chunk * 100, timeout=120)
    assert (told.status_code, told.json()["code"]) == (413, "body_too_large")
    told = httpx.post(server.url + INFER, content=chunks(), timeout=120)
    assert (told.status_code, told.json()["code"]) == (413, "body_too_large")
    told = httpx.post(server.url + "/v2/labels", content=chunks(), timeout=120)
    assert told.status_code == 413
    assert server.memory_peak() - before < 40_000_000
    assert answers(server)


def test_requests_on_one_connection_are_answered_in_turn(server: Server) -> None:
    with server.connected() as stream:
        stream.sendall(2 * (head(len(BODY)) + BODY) + head(len(BODY), "connection: close") + BODY)
        told = read_all(stream)
    assert told.count(b"HTTP/1.1 200 OK") == 3


def test_connections_beyond_the_limit_are_refused_and_those_that_are_open_go_on(server: Server) -> None:
    opened = [server.connected() for _ in range(LIMITS.connections)]
    try:
        assert b'"code":"overloaded"' in server.raw(b"")
        for stream in opened[:3]:
            stream.sendall(head(len(BODY), "connection: close") + BODY)
        assert all(read_all(stream).startswith(b"HTTP/1.1 200 OK") for stream in opened[:3])
    finally:
        for stream in opened:
            stream.close()
    assert answers(server)


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_asked_to_end_answers_what_is_in_flight(tmp_path: Path, with_signal: int) -> None:
    slow = json.dumps(asked(flight=1)).encode()
    with child(tmp_path) as server:
        in_flight, idle = server.connected(), server.connected()
        idle.sendall(b"HEAD /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 OK")
        in_flight.sendall(head(len(slow)) + slow)
        while "headway_in_flight_requests 1.0" not in httpx.get(server.url + "/metrics").text:
            pass
        server.process.send_signal(with_signal)
        while True:
            late = httpx.post(server.url + INFER, content=BODY)
            if late.status_code != 200:
                break
        assert (late.status_code, late.json()["code"]) == (503, "draining")
        assert httpx.get(server.url + "/v2/health/ready").status_code == 503
        assert read_all(in_flight).startswith(b"HTTP/1.1 200 OK")
        assert read_all(idle) == b""
        assert server.stop(with_signal) == 0
        assert server.output[-1] == "stopped"
    lines = [json.loads(line) for line in (tmp_path / "errors").read_text().splitlines()]
    assert [line["event"] for line in lines][-1] == "stopped"


def test_an_address_that_cannot_be_used_is_a_clear_refusal(server: Server) -> None:
    with pytest.raises(PortTaken) as taken:
        listen("127.0.0.1", server.port)
    assert f"port {server.port} on 127.0.0.1 cannot be used" in str(taken.value)
    assert "--port" in str(taken.value)
    with pytest.raises(PortTaken, match="is no address to listen on"):
        listen("nowhere.invalid", 0)
    with pytest.raises(PortTaken, match="cannot be used"):
        listen("192.0.2.1", 0)
