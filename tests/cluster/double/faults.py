"""The fault file: how tests break the cluster while it runs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.double.store import Object


@dataclass
class HttpFault:
    """One rule for HTTP requests.

    Attributes:
        method: HTTP method; `WATCH` for watches, empty for any.
        path: Regular expression that the path must contain.
        do: `error` (answer without doing it), `after_error` (do it, then answer the error), `drop` (close the
            connection), `after_drop` (do it, then close), `timeout` (never answer), `slow` (answer late), `close_watch`
            (end running watches), `gone` (a watch answers 410).
        status: Status of the error.
        body: Body of the error; a `v1.Status` when None.
        times: How often it applies; 0 or less = always.
        seconds: How long `slow` waits, and how long `timeout` holds the connection.
    """

    method: str = ""
    path: str = ""
    do: str = "error"
    status: int = 500
    body: Object | None = None
    times: int = 1
    seconds: float = 2.0
    used: int = 0

    def matches(self, method: str, path: str) -> bool:
        """Whether it applies to a request once more."""
        left = self.times <= 0 or self.used < self.times
        return left and self.method in ("", method) and re.search(self.path, path) is not None


class Faults:
    """What the fault file says now; it is read again when it has changed.

    Attributes:
        generation: Counts the readings; running watches end when a new reading holds `close_watch`.
    """

    def __init__(self, path: Path | None) -> None:
        """Watch `path`; None = nothing is ever broken."""
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._content: dict[str, Any] = {}
        self._http: list[HttpFault] = []
        self.generation = 0

    def refresh(self) -> dict[str, Any]:
        """The content of the file."""
        if self._path is None or not self._path.exists():
            return self._content
        state = self._path.stat()
        seen = (state.st_mtime_ns, state.st_ino)
        if seen == self._seen:
            return self._content
        try:
            content = json.loads(self._path.read_text() or "{}")
        except json.JSONDecodeError:
            # A writer that does not replace the file is not finished yet: the next request looks again.
            return self._content
        self._seen, self._content = seen, content
        self._http = [HttpFault(**rule) for rule in content.get("http", ())]
        self.generation += 1
        return content

    def http(self, method: str, path: str) -> HttpFault | None:
        """The first rule for a request; using it counts."""
        self.refresh()
        for rule in self._http:
            if rule.do != "close_watch" and rule.matches(method, path):
                rule.used += 1
                return rule
        return None

    def closes_watch(self, path: str, since: int) -> bool:
        """Whether a watch that runs since generation `since` is to end."""
        self.refresh()
        if self.generation == since:
            return False
        return any(rule.do == "close_watch" and re.search(rule.path, path) for rule in self._http)

    def away(self) -> bool:
        """Whether the API server refuses connections."""
        return self.refresh().get("api", "up") == "away"

    def compaction(self) -> int:
        """A number; the history is forgotten when it changes."""
        return self.refresh().get("compact", 0)

    def node(self, name: str) -> str:
        """`ready`, `killed`, `partitioned` or `cut`."""
        return self.refresh().get("nodes", {}).get(name, "ready")

    def oom(self, pod: str) -> bool:
        """Whether the containers of a pod die as if out of memory."""
        return any(re.search(pattern, pod) for pattern in self.refresh().get("oom", ()))

    def kueue_webhook(self) -> str:
        """`up` or `down`."""
        return self.refresh().get("kueue_webhook", "up")
