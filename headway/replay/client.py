"""Speaks to `headway serve` as an application would: Open Inference Protocol v2 over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.home import Settings
from headway.serving.http.v2 import request_body
from trainer.blobs import Json

_READY_SECONDS = 180.0
_STOP_SECONDS = 30.0


class ServerUnusable(HeadwayError):
    """The server did not come up, or ended."""


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP: its status and its JSON body."""

    status: int
    body: Mapping[str, Any]


class ServingClient:
    """One kept connection to a server; it is opened again when the server closed it.

    Args:
        url: of the server.
        timeout_s: how long to wait for bytes.
        deadline_ms: the deadline of each request; None: what the pipeline declares.
    """

    def __init__(self, url: str, timeout_s: float = 30.0, deadline_ms: int | None = None) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
        self._headers = {"Content-Type": "application/json"}
        if deadline_ms is not None:
            self._headers["X-Deadline-Ms"] = str(deadline_ms)

    def infer(self, spec: PipelineSpec, model: str, caller_id: str, request: Mapping[str, Json]) -> Reply:
        """Ask for one row. Raises `ServerUnusable` when nobody answers."""
        return self._post(f"/v2/models/{model}/infer", {"id": caller_id} | request_body(spec, request))

    def labels(self, endpoint: str, items: Sequence[Mapping[str, Json]]) -> Reply:
        """Report outcomes of an endpoint's answers. Raises `ServerUnusable` when nobody answers."""
        return self._post("/v2/labels", {"endpoint": endpoint, "labels": list(items)})

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _post(self, path: str, body: object) -> Reply:
        payload = json.dumps(body).encode()
        for attempt in (1, 2):
            try:
                self._connection.request("POST", path, payload, self._headers)
                answer = self._connection.getresponse()
                return Reply(answer.status, json.loads(answer.read()))
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                # A kept connection may have been closed while idle; a repeat of the same caller id is no other event.
                if attempt == 2:
                    raise ServerUnusable(f"the server does not answer {path}: {error}", "look at its log") from error
        raise AssertionError


@contextmanager
def running_server(settings: Settings, pipeline: str, port: int, log: Path, *more: str) -> Iterator[str]:
    """`headway serve` of one endpoint for the length of a `with` block; yields its URL once it is ready.

    Raises:
        ServerUnusable: it ended, or was not ready in time; the message ends with its last words.
    """
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--endpoint", pipeline, "--port", str(port), *more]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "HEADWAY_HOME": str(settings.home)}
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environ)
    try:
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    parts = urlsplit(url)
    give_up = time.monotonic() + _READY_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            break
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # Not listening yet.
        finally:
            connection.close()
        time.sleep(0.2)
    last = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
    ended = f"ended with status {process.poll()}" if process.poll() is not None else "was not ready in time"
    raise ServerUnusable(f"`headway serve` {ended}:\n  {last}", f"look at {log}")
