"""The client over HTTP: which answer becomes which error, what is asked again, and how watches and logs are read."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from headway.training.kubernetes import client as calling
from headway.training.kubernetes.client import (
    ClusterClient,
    ClusterUnreachable,
    Forbidden,
    Gone,
    ManifestRefused,
    ObjectConflict,
    ObjectMissing,
)
from headway.training.launch import LaunchError, LauncherUnavailable


@dataclass
class Answer:
    """What the server says once: a document, or pieces of a body that is cut wherever a piece ends."""

    status: int
    document: Any = None
    pieces: tuple[bytes, ...] = ()
    headers: dict[str, str] = field(default_factory=dict[str, str])
    torn: bool = False


class Server:
    """An HTTP server that gives the answers it was told, in order, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, str, dict[str, list[str]], Any, dict[str, str]]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                headers = {name.title(): value for name, value in self.headers.items()}
                server.asked.append((self.command, parts.path, parse_qs(parts.query), body, headers))
                answer = server.answers.pop(0)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in answer.pieces or (json.dumps(answer.document).encode(),):
                    self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    self.wfile.flush()
                if answer.torn:
                    self.close_connection = True
                    return
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
                return

        return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def client(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterClient]:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "letmein"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(calling, "_PAUSES_S", (0.0, 0.0, 0.0))
    made = ClusterClient(namespace="team")
    yield made
    made.close()


def status(code: int, message: str, **more: Any) -> Answer:  # noqa: ANN401
    """A refusal as the API server words it."""
    return Answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code, **more})


def test_paths_bodies_and_the_token(server: Server, client: ClusterClient) -> None:
    server.answers = [Answer(201, {"kind": "Job"}), Answer(200, {}), Answer(200, {}), Answer(200, {"a": 1})]
    client.create("jobs", {"metadata": {"name": "x"}})
    client.patch("jobs", "x", {"spec": {"suspend": False}})
    client.delete("jobs", "x", uid="u1", grace_s=0)
    assert client.get("nodes", "n 1") == {"a": 1}
    created, patched, deleted, read = server.asked
    assert created[:2] == ("POST", "/apis/batch/v1/namespaces/team/jobs")
    assert created[2] == {"fieldValidation": ["Strict"]}
    assert created[4]["Authorization"] == "Bearer letmein"
    assert patched[:2] == ("PATCH", "/apis/batch/v1/namespaces/team/jobs/x")
    assert patched[4]["Content-Type"] == "application/merge-patch+json"
    assert deleted[3] == {"propagationPolicy": "Background", "gracePeriodSeconds": 0, "preconditions": {"uid": "u1"}}
    assert read[1] == "/api/v1/nodes/n%201"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (status(404, 'jobs.batch "x" not found'), ObjectMissing, "namespace 'team'"),
        (status(409, "object is being deleted"), ObjectConflict, "being deleted"),
        (status(410, "too old"), Gone, "too old"),
        (status(401, "Unauthorized"), Forbidden, "renew the token"),
        (status(403, "no"), Forbidden, "may not get jobs in namespace 'team'"),
        (status(403, 'admission webhook "v" denied the request: bad'), ManifestRefused, "denied"),
        (status(400, 'strict decoding error: unknown field "spec.x"'), ManifestRefused, "spec.x"),
    ],
)
def test_each_refusal_has_its_error(
    server: Server, client: ClusterClient, answer: Answer, error: type[LaunchError], words: str
) -> None:
    server.answers = [answer]
    with pytest.raises(error) as refused:
        client.get("jobs", "x")
    assert words in str(refused.value)
    assert len(server.asked) == 1


def test_a_422_is_told_as_field_paths(server: Server, client: ClusterClient) -> None:
    causes = [
        {
            "reason": "FieldValueInvalid",
            "field": "spec.template.spec.tolerations[0].effect",
            "message": "Invalid value",
        },
        {"field": "spec.completions", "message": "Required value"},
    ]
    server.answers = [status(422, "a long sentence with a Go dump", details={"causes": causes})]
    with pytest.raises(ManifestRefused) as refused:
        client.create("jobs", {})
    assert refused.value.message.splitlines() == [
        "spec.template.spec.tolerations[0].effect: Invalid value",
        "spec.completions: Required value",
    ]


@pytest.mark.parametrize(
    "fault",
    [
        status(500, "webhook down"),
        status(429, "slow down"),
        Answer(503, pieces=(b"<html>",)),
        Answer(200, pieces=(b'{"ki',), torn=True),
        status(403, "exceeded quota: team, requested: count/jobs.batch=1"),
    ],
)
def test_faults_that_may_pass_are_tried_again_and_then_told(
    server: Server, client: ClusterClient, fault: Answer
) -> None:
    server.answers = [fault, fault, Answer(200, {"kind": "Job"})]
    assert client.get("jobs", "x") == {"kind": "Job"}
    server.answers = [fault] * 4
    with pytest.raises(LauncherUnavailable):
        client.get("jobs", "x")
    assert len(server.asked) == 7


def test_the_server_may_ask_for_patience(
    server: Server, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(calling.time, "sleep", waited.append)
    for asked in ("3", "3600", "Wed, 21 Oct 2015 07:28:00 GMT"):
        server.answers = [Answer(429, {}, headers={"Retry-After": asked}), Answer(200, {})]
        client.get("jobs", "x")
    assert waited == [3.0, 5.0, 0.0]


def test_nobody_there(server: Server, client: ClusterClient) -> None:
    client.get("jobs", "x") if server.answers.append(Answer(200, {})) is None else None
    server.close()
    client.close()
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        client.get("jobs", "x")


def test_no_cluster_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterUnreachable, match="no cluster is configured"):
        ClusterClient().get("jobs", "x")


def test_lists_are_read_page_by_page(server: Server, client: ClusterClient) -> None:
    page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next", "resourceVersion": "7"}}
    last = {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "7"}}
    empty = {"items": None, "metadata": {"resourceVersion": "8"}}
    server.answers = [Answer(200, page), Answer(200, last), Answer(200, empty)]
    listing = client.list("pods", labels="a=b")
    assert ([item["metadata"]["name"] for item in listing.items], listing.version) == (["a", "b"], "7")
    assert server.asked[1][2]["continue"] == ["next"]
    assert client.list("pods").items == []


def test_pages_that_grew_too_old_are_read_from_the_start(server: Server, client: ClusterClient) -> None:
    page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next", "resourceVersion": "7"}}
    whole = {"items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "9"}}
    server.answers = [Answer(200, page), status(410, "expired"), Answer(200, whole)]
    listing = client.list("pods")
    assert (len(listing.items), listing.version) == (1, "9")


def test_a_watch_is_read_line_by_line_however_it_is_cut(server: Server, client: ClusterClient) -> None:
    events = [{"type": kind, "object": {"metadata": {"name": "ü"}}} for kind in ("ADDED", "MODIFIED", "DELETED")]
    body = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
    for cut in (1, 7, 50, len(body)):
        pieces = tuple(body[start : start + cut] for start in range(0, len(body), cut))
        server.answers = [Answer(200, pieces=pieces)]
        assert [kind for kind, _ in client.watch("pods", "5", labels="a=b")] == ["ADDED", "MODIFIED", "DELETED"]
    query = server.asked[0][2]
    assert (query["resourceVersion"], query["watch"], query["allowWatchBookmarks"]) == (["5"], ["true"], ["true"])


def test_a_watch_that_is_too_old_says_so_with_200(server: Server, client: ClusterClient) -> None:
    line = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}).encode()
    server.answers = [Answer(200, pieces=(line + b"\n",))]
    with pytest.raises(Gone):
        list(client.watch("pods", "5"))


def test_a_watch_that_breaks_off_says_so(server: Server, client: ClusterClient) -> None:
    line = json.dumps({"type": "ADDED", "object": {"metadata": {}}}).encode() + b"\n"
    server.answers = [Answer(200, pieces=(line, b'{"ty'), torn=True)]
    watch = iter(client.watch("pods", "5"))
    assert next(watch)[0] == "ADDED"
    with pytest.raises(ClusterUnreachable, match="broke off"):
        next(watch)


def test_a_log_is_bytes_line_by_line(server: Server, client: ClusterClient) -> None:
    """Letters of several bytes are cut in the middle; the last line has no end."""
    text = "grün\nzwei\r\nohne Ende ✓".encode()
    server.answers = [Answer(200, pieces=tuple(text[i : i + 1] for i in range(len(text))))]
    lines = list(client.pod_log("p", "trainer", since_time="2013-06-01T00:00:00Z", timestamps=True))
    assert lines == ["grün\n".encode(), b"zwei\r\n", "ohne Ende ✓".encode()]
    path, query = server.asked[0][1:3]
    assert path == "/api/v1/namespaces/team/pods/p/log"
    assert query == {"container": ["trainer"], "sinceTime": ["2013-06-01T00:00:00Z"], "timestamps": ["true"]}


def test_who_waits_for_a_slow_server_is_not_kept_for_minutes(
    server: Server, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its answers may take long, so that a call that took its time is not repeated."""
    monkeypatch.setattr(calling, "REPEAT_S", 0.0)
    server.answers = [Answer(500, {"message": "x"})] * 4
    with pytest.raises(LauncherUnavailable):
        client.get("jobs", "x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_how_far_the_clocks_are_apart_is_read_from_an_answer(
    server: Server, client: ClusterClient, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    ours = SimpleNamespace(time=lambda: time.time() - ahead_s, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(calling, "time", ours)
    server.answers = [Answer(200, {"metadata": {}})]
    client.get("jobs", "x")
    # The answer says when it was made, in whole seconds.
    assert abs(client.ahead_us - ahead_s * 1_000_000) < 30_000_000
    assert (client.ahead_us == 0) == (ahead_s == 0)
