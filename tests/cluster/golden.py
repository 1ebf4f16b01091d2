"""Replay of recorded Kubernetes exchanges (`tests/cases/k8s_golden.jsonl`, or the file that HEADWAY_TEST_GOLDEN names).

A scenario is sent again in the recorded order; what the recording says about uids, versions, generated names, addresses
and tokens is mapped by value: the first time that a value appears in an answer, what the cluster under test says
in its place is remembered, later requests are sent with that, and later answers must repeat it.
"""

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

Json = Any
RECORDING = Path(os.environ.get("HEADWAY_TEST_GOLDEN") or Path(__file__).parents[1] / "cases" / "k8s_golden.jsonl")
# How long to wait for what was recorded; when something differs already, the rest is only looked at.
PATIENCE_S, HASTE_S = 120.0, 3.0

_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_SUFFIX = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}(?![a-z0-9-])")
_ADDRESS = re.compile(r"\b(\d{1,3}\.){3}\d{1,3}\b")
_VERSION_WORDS = re.compile(r"(resource version: |current: |record \(|\()(\d+)")
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"(containerd://|sha256:)[0-9a-f]{64}")
_DIAL = re.compile(r"(dial tcp )[^\"]*")
_DUMP = ("Invalid value: {", "patch: Invalid value", '"Invalid value: "{')
_UIDS = {"uid", "controller-uid", "batch.kubernetes.io/controller-uid", "kueue.x-k8s.io/job-uid"}
_ADDRESSES = {"podIP", "hostIP", "ip", "clusterIP", "serverAddress", "address"}
_TIMES = {"startedAt", "finishedAt", "startTime", "completionTime", "eventTime", "renewTime", "acquireTime"}
_IGNORED = {"nodeInfo", "buildDate", "goVersion", "gitCommit", "ca.crt", "containerID", "imageID", "images"}
_IGNORED |= {"reportingInstance", "managedFields", "kubernetes.io/description"}


@dataclass
class Exchange:
    """One line of the recording; the names are those of the file."""

    scenario: str
    seq: int
    method: str
    t_ms: int = 0
    path: str = ""
    user: str = "admin"
    query: dict[str, str] = field(default_factory=dict)
    request_body: Json = None
    request_content_type: str | None = None
    status: int = 0
    response_headers: dict[str, Any] = field(default_factory=dict)
    response: Json = None
    took_ms: int = 0
    note: str | None = None
    ended: str | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is a watch or a followed log."""
        return isinstance(self.response, list)

    def __str__(self) -> str:
        """What a failure report calls it."""
        asked = f"?{urlencode(self.query)}" if self.query else ""
        return f"{self.scenario} {self.seq}: {self.user} {self.method} {self.path}{asked} ({self.note or ''})"


def read(path: Path = RECORDING) -> dict[str, list[Exchange]]:
    """Every scenario of a recording, in order."""
    scenarios: dict[str, list[Exchange]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        known = {key: value for key, value in entry.items() if key in Exchange.__dataclass_fields__}
        for key in [key for key, value in known.items() if value is None]:
            del known[key]
        scenarios.setdefault(entry["scenario"], []).append(Exchange(**known))
    return scenarios


def merge(o: Json, p: Json) -> Json:
    """Apply a recorded `merge` to the previous object, as `k8s_golden.md` defines it."""
    if not isinstance(p, dict):
        return p
    if "@" in p:
        merged = list(o)
        for i, q in p["@"].items():
            merged[int(i)] = merge(merged[int(i)], q)
        return merged + p.get("+", [])
    found = dict(o) if isinstance(o, dict) else {}
    for key, value in p.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), value)
    return found


def events(entries: list[Json]) -> list[tuple[str, Json]]:
    """A recorded watch as (type, whole object)."""
    latest: dict[str, Json] = {}
    found = []
    for entry in entries:
        obj = entry["object"] if "object" in entry else merge(latest[entry["uid"]], entry["merge"])
        uid = obj.get("metadata", {}).get("uid")
        if uid:
            latest[uid] = obj
        found.append((entry["type"], obj))
    return found


# --- comparing ------------------------------------------------------------------------------------------------


class Values:
    """What stands in this cluster for the recorded values."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[str, str] = {}
        self._versions: dict[int, str] = {}

    def trial(self) -> "Values":
        """A copy: what is learned from an answer counts only when the answer fits."""
        copied = Values()
        copied._known, copied._versions = dict(self._known), dict(self._versions)
        return copied

    def adopt(self, trial: "Values") -> None:
        """Take over what a copy has learned."""
        self._known, self._versions = trial._known, trial._versions

    def knows(self, recorded: str) -> bool:
        """Whether a recorded value was seen in an answer."""
        return recorded in self._known

    def learn(self, recorded: str, actual: str) -> bool:
        """Remember a pair, or check it against what is remembered; whether it fits."""
        return self._known.setdefault(recorded, actual) == actual

    def learn_version(self, recorded: str, actual: str) -> None:
        """Remember what a resourceVersion was."""
        if recorded.isdigit():
            self._versions.setdefault(int(recorded), actual)

    def knows_version(self, recorded: str) -> bool:
        """Whether a recorded resourceVersion was seen in an answer."""
        return recorded.isdigit() and int(recorded) in self._versions

    def version(self, recorded: str) -> str:
        """The version to send for a recorded one: made-up ones stay, unseen ones become the last before them."""
        if not recorded.isdigit() or int(recorded) < 20 or int(recorded) > 10**7:
            return recorded
        earlier = [number for number in self._versions if number <= int(recorded)]
        return self._versions[max(earlier)] if earlier else "0"

    def text(self, recorded: str) -> str:
        """A recorded text with every known value put in."""
        if recorded in self._known:
            return self._known[recorded]
        for old, new in self._known.items():
            if len(old) > 6 and old in recorded:
                recorded = recorded.replace(old, new)
        return recorded

    def json(self, recorded: Json, key: str = "") -> Json:
        """A recorded body with every known value put in."""
        if isinstance(recorded, dict):
            return {k: self.json(v, k) for k, v in recorded.items()}
        if isinstance(recorded, list):
            return [self.json(v, key) for v in recorded]
        if not isinstance(recorded, str):
            return recorded
        return self.version(recorded) if key == "resourceVersion" else self.text(recorded)


class Comparer:
    """Compares a recorded answer with an actual one; differences are paths with both sides."""

    def __init__(self, values: Values) -> None:
        """Learn into, and compare by, `values`."""
        self._values = values
        self.differences: list[str] = []

    def compare(self, recorded: Json, actual: Json, path: str = "") -> list[str]:
        """Every difference between two JSON values, volatile fields apart."""
        key = path.rsplit(".", 1)[-1].split("[")[0]
        if path.endswith("]") and "['" in path:
            key = path[path.rindex("['") + 2 : -2]
        if key in _IGNORED:
            return self.differences
        if isinstance(recorded, dict) and isinstance(actual, dict):
            self._dict(recorded, actual, path)
        elif isinstance(recorded, list) and isinstance(actual, list):
            self._list(recorded, actual, path)
        elif not self._same(recorded, actual, key):
            self.differences.append(f"{path or '.'}: recorded {_short(recorded)}, here {_short(actual)}")
        return self.differences

    def _dict(self, recorded: Json, actual: Json, path: str) -> None:
        if recorded.get("kind") == "Status" and any(dump in recorded.get("message", "") for dump in _DUMP):
            recorded, actual = _without_dumps(recorded), _without_dumps(actual)
        for key in sorted({*recorded, *actual}):
            here = f"{path}['{key}']" if "." in key or "/" in key else f"{path}.{key}" if path else key
            if key in _IGNORED:
                continue
            if key not in actual:
                self.differences.append(f"{here}: missing, recorded {_short(recorded[key])}")
            elif key not in recorded:
                self.differences.append(f"{here}: not in the recording, here {_short(actual[key])}")
            else:
                self.compare(recorded[key], actual[key], here)

    def _list(self, recorded: list[Json], actual: list[Json], path: str) -> None:
        if len(recorded) != len(actual):
            difference = f"{path}: recorded {len(recorded)} items, here {len(actual)}"
            self.differences.append(f"{difference}: {_short(recorded)} / {_short(actual)}")
            return
        for i, (old, new) in enumerate(zip(recorded, actual, strict=True)):
            self.compare(old, new, f"{path}[{i}]")

    def _same(self, recorded: Json, actual: Json, key: str) -> bool:
        if not isinstance(recorded, str) or not isinstance(actual, str):
            return recorded == actual and type(recorded) is type(actual)
        if key == "resourceVersion":
            self._values.learn_version(recorded, actual)
            return True
        if key.endswith(("Timestamp", "TransitionTime", "ProbeTime")) or key in _TIMES:
            return bool(_TIME.fullmatch(recorded)) == bool(_TIME.fullmatch(actual))
        if key in _UIDS and _UID.fullmatch(recorded):
            return bool(_UID.fullmatch(actual)) and self._values.learn(recorded, actual)
        if key in _ADDRESSES and _ADDRESS.search(recorded):
            return bool(_ADDRESS.search(actual)) and self._values.learn(recorded, actual)
        if key in ("continue", "token"):
            return self._values.learn(recorded, actual)
        if self._values.text(recorded) == actual:
            return True
        if key == "name" and _generated(recorded) == _generated(actual):
            return self._values.learn(recorded, actual)
        return _plain(self._values.text(recorded)) == _plain(actual)


def _generated(name: str) -> str:
    stem = re.sub(r"\.[0-9a-f]{14,17}$", ".<event>", name)
    return _SUFFIX.sub("-<suffix>", re.sub(r"^job-(.*)-[0-9a-f]{5}$", r"job-\1-<hash>", stem))


def _plain(text: str) -> str:
    text = _UID.sub("<uid>", text)
    text = _DIAL.sub(r"\1<error>", text)
    text = _ADDRESS.sub("<address>", text)
    text = _VERSION_WORDS.sub(r"\1<version>", text)
    return _SUFFIX.sub("-<suffix>", _TIME.sub("<time>", _IMAGE.sub("<image>", text)))


def _without_dumps(status: Json) -> Json:
    """A Status without its message: only reason, code and the fields of the causes count where Go dumps a struct."""
    bare = {key: value for key, value in status.items() if key != "message"}
    details = dict(bare.get("details") or {})
    details["causes"] = [{k: v for k, v in c.items() if k != "message"} for c in details.get("causes", ())]
    return {**bare, "details": details}


def _short(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) < 240 else text[:200] + " ... " + text[-30:]


def essence(sequence: list[tuple[str, Json]]) -> dict[str, dict[str, Json]]:
    """What must agree of a watch, object by object, when the number of writes may differ.

    Returns:
        By kind and name: the first and last type, the conditions in the order in which they appeared, the phases, and
        the last object.
    """
    found: dict[str, dict[str, Json]] = {}
    for type_, obj in sequence:
        meta = obj.get("metadata", {})
        key = f"{obj.get('kind')} {meta.get('name', '')} {meta.get('uid', '')}"
        seen = found.setdefault(key, {"first": type_, "conditions": [], "phases": []})
        seen["last"], seen["object"] = type_, obj
        status = obj.get("status") or {}
        for one in status.get("conditions", ()):
            shown = {k: one.get(k) for k in ("type", "status", "reason") if one.get(k) is not None}
            if shown not in seen["conditions"]:
                seen["conditions"].append(shown)
        phase = status.get("phase")
        if phase and phase not in seen["phases"]:
            seen["phases"].append(phase)
    return found


# --- the double -----------------------------------------------------------------------------------------------


class RunningDouble:
    """A double that runs: its kubeconfig, and what the notes of BED entries do to it.

    Attributes:
        kubeconfig: Its kubeconfig.
    """

    def __init__(self, folder: Path, bed: Iterable[tuple[str, Json]]) -> None:
        """See `running_double`."""
        self.kubeconfig, self._faults, self._bed = folder / "kubeconfig", folder / "faults.json", tuple(bed)

    def do(self, exchange: Exchange) -> None:
        """What a BED entry says."""
        note = exchange.note or ""
        content = next((content for word, content in self._bed if word in note), None)
        assert content is not None, f"no rule for what the recording did to the cluster: {note}"
        fresh = self._faults.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self._faults)


@contextlib.contextmanager
def running_double(bed: Iterable[tuple[str, Json]], *arguments: str) -> Iterator[RunningDouble]:
    """A double of its own.

    Args:
        bed: Words in notes of BED entries, and the fault file that does what the note says; the first that fits counts.
        arguments: Further arguments of the double.
    """
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.cluster.double", "--kubeconfig", str(folder / "kubeconfig")]
        command += ["--fault", str(folder / "faults.json"), "--state", str(folder / "state"), *arguments]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield RunningDouble(folder, bed)
        finally:
            process.terminate()
            process.wait(120)


# --- sending --------------------------------------------------------------------------------------------------


class Client:
    """Sends requests as the users of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        """Read the file."""
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        self._server = cluster["server"]
        self._tokens = {user["name"]: user["user"].get("token") for user in config["users"]}
        self._tokens |= {"none": None, "bad": "not-a-token"}
        self._pool = urllib3.PoolManager(ssl_context=context, maxsize=64)

    def send(self, exchange: Exchange, values: Values, stream: bool = False) -> urllib3.BaseHTTPResponse:
        """Send a recorded request with the values of this cluster."""
        query = {k: values.version(v) if k == "resourceVersion" else values.text(v) for k, v in exchange.query.items()}
        url = self._server + values.text(exchange.path) + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json"}
        token = self._tokens[exchange.user]
        if token:
            headers["Authorization"] = f"Bearer {token}"
        body = values.json(exchange.request_body)
        data: bytes | None = None
        if body is not None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
        if data is not None or exchange.method in ("POST", "PUT", "PATCH"):
            headers["Content-Type"] = exchange.request_content_type or "application/json"
        timeout = urllib3.Timeout(connect=10, read=None if stream else 120)
        return self._pool.request(
            exchange.method,
            url,
            body=data,
            headers=headers,
            preload_content=not stream,
            retries=False,
            timeout=timeout,
        )


def _content(exchange: Exchange, data: bytes) -> Json:
    text = data.decode("utf-8", "replace")
    kind = str(exchange.response_headers.get("Content-Type") or "")
    return json.loads(text) if kind.startswith("application/json") and text else text


def _learn_start(client: Client, exchange: Exchange, values: Values) -> None:
    """A watch that starts at a version which no recorded answer holds starts from a list made here and now."""
    version = exchange.query.get("resourceVersion", "")
    if values.version(version) == version or values.knows_version(version):
        return
    time.sleep(0.3)  # until what the cluster makes in every new namespace is there
    listed = client.send(Exchange(exchange.scenario, exchange.seq, "GET", path=exchange.path), values)
    values.learn_version(version, listed.json()["metadata"]["resourceVersion"])


class Stream(threading.Thread):
    """A watch or a followed log, read in the background.

    Attributes:
        exchange: The recorded request.
        status: HTTP status of the answer.
        lines: What came.
        ended: Whether the server has closed it.
    """

    def __init__(self, client: Client, exchange: Exchange, values: Values) -> None:
        """Send the request; the answer's head is awaited here."""
        super().__init__(daemon=True)
        _learn_start(client, exchange, values)
        self.exchange, self.lines, self.ended = exchange, [], False
        self._response = client.send(exchange, values, stream=True)
        self.status = self._response.status
        self._socket: socket.socket | None = getattr(self._response.connection, "sock", None)
        self.start()

    def run(self) -> None:
        """Collect lines until the end."""
        rest = b""
        try:
            for chunk in self._response.stream(65_536, decode_content=True):
                *whole, rest = (rest + chunk).split(b"\n")
                self.lines += [line + b"\n" for line in whole]
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError):
            pass  # closed by `close`, or cut off: `ended` and the lines say what came
        if rest:
            self.lines.append(rest)
        self.ended = True

    def close(self) -> None:
        """Hang up."""
        # Closing the response would wait for the lock that the reading thread holds.
        if not self.ended and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def events(self) -> list[tuple[str, Json]]:
        """The lines as watch events."""
        parsed = [json.loads(line) for line in self.lines]
        return [(entry["type"], entry["object"]) for entry in parsed]


def differences_of(exchange: Exchange, response: urllib3.BaseHTTPResponse, values: Values) -> list[str]:
    """Every difference between a recorded answer and the actual one."""
    found = (
        [] if response.status == exchange.status else [f"status: recorded {exchange.status}, here {response.status}"]
    )
    for name in ("Content-Type", "Warning", "Retry-After"):
        recorded, actual = exchange.response_headers.get(name), response.headers.get(name)
        if recorded != actual:
            found.append(f"header {name}: recorded {recorded}, here {actual}")
    actual = _content(exchange, response.data)
    recorded_body = exchange.response
    written = exchange.method in ("PATCH", "PUT", "DELETE") and not exchange.path.endswith("/status")
    if response.status == 200 and isinstance(actual, dict) and isinstance(recorded_body, dict):
        recorded_body, actual = _timeless(recorded_body, actual, written)
    if "trimmed" in (exchange.note or ""):
        names = {entry["name"] for entry in exchange.response["resources"]}
        actual["resources"] = [entry for entry in actual["resources"] if entry["name"] in names]
    if exchange.path.startswith(("/healthz", "/readyz", "/livez")):
        return found
    return found + Comparer(values).compare(recorded_body, actual)


def _timeless(recorded: Json, actual: Json, written: bool) -> tuple[Json, Json]:
    """Both bodies without a status that is chance: how far controllers had got when something was written or made."""
    if "items" in recorded and "items" in actual and len(recorded["items"]) == len(actual["items"]):
        pairs = [_timeless(a, b, written) for a, b in zip(recorded["items"], actual["items"], strict=True)]
        return {**recorded, "items": [a for a, _ in pairs]}, {**actual, "items": [b for _, b in pairs]}
    if recorded.get("kind") == "Status" or "status" not in recorded:
        return recorded, actual
    if written or recorded["status"] == {}:
        recorded, actual = ({k: v for k, v in body.items() if k != "status"} for body in (recorded, actual))
    return recorded, actual


def stream_differences(stream: Stream, values: Values, exact: bool) -> list[str]:
    """Every difference between a recorded stream and what came.

    Args:
        stream: The stream.
        values: The mapping of values.
        exact: Whether every write counts; else what `essence` keeps of them.
    """
    exchange = stream.exchange
    if stream.status != exchange.status:
        return [f"status: recorded {exchange.status}, here {stream.status}"]
    if exchange.response and "line" in exchange.response[0]:
        recorded = [entry["line"] for entry in exchange.response]
        actual = [line.decode("utf-8", "replace") for line in stream.lines]
        return Comparer(values).compare(recorded, actual)
    recorded, actual = events(exchange.response), stream.events()
    if exact:
        return Comparer(values).compare([list(e) for e in recorded], [list(e) for e in actual])
    return _compare_essence(essence(recorded), essence(actual), values)


def _compare_essence(recorded: dict[str, Json], actual: dict[str, Json], values: Values) -> list[str]:
    found: list[str] = []
    recorded, left = _said_once(recorded), _said_once(actual)
    for key, wanted in recorded.items():
        kind, name, uid = key.split(" ")
        fits = [k for k in left if _fits(k, kind, values.text(name), values.text(uid), uid)]
        fits = fits or [k for k in left if k.split(" ")[0] == kind and _alike(wanted["object"], left[k]["object"])]
        if not fits:
            found.append(f"{key}: not seen here")
            continue
        seen = left.pop(fits[0])
        if kind == "Job" and wanted["object"].get("status") == {}:
            # Gone before the controller's first look there, or not: chance.
            wanted, seen = ({**e, "conditions": [], "object": {**e["object"], "status": {}}} for e in (wanted, seen))
        wanted, seen = _without_finalizers(wanted), _without_finalizers(seen)
        found += [f"{key}: {d}" for d in Comparer(values).compare(wanted, seen)]
    return found + [f"{key}: not in the recording" for key in left]


def _said_once(found: dict[str, Json]) -> dict[str, Json]:
    """Without events that say again what one said before: how often a scheduler looks again is chance."""
    kept: dict[str, Json] = {}
    for key, entry in found.items():
        repeated = any(_alike(entry["object"], o["object"]) for k, o in kept.items() if k.startswith("Event "))
        if not (key.startswith("Event ") and repeated):
            kept[key] = entry
    return kept


def _without_finalizers(entry: Json) -> Json:
    """A pod that is gone: whether the collector or the Job controller came first is chance, its finalizers tell."""
    obj = entry["object"]
    if obj.get("kind") != "Pod" or entry["last"] != "DELETED":
        return entry
    meta = {key: value for key, value in obj["metadata"].items() if key != "finalizers"}
    return {**entry, "object": {**obj, "metadata": meta}}


def _fits(key: str, kind: str, name: str, uid: str, recorded_uid: str) -> bool:
    found = key.split(" ")
    return found[:2] == [kind, name] and (uid == recorded_uid or found[2] == uid)


def _alike(recorded: Json, actual: Json) -> bool:
    if recorded.get("kind") == "Event":
        keys = ("reason", "type")
        same = all(recorded.get(k) == actual.get(k) for k in keys)
        said = _plain(str(recorded.get("message"))) == _plain(str(actual.get("message")))
        names = [_generated(o["involvedObject"].get("name", "")) for o in (recorded, actual)]
        return same and said and names[0] == names[1]
    return _generated(recorded["metadata"].get("name", "")) == _generated(actual["metadata"].get("name", ""))


def _read_again(exchange: Exchange, rest: list[Exchange]) -> list[Exchange]:
    """The recorded reads of the same thing before anything else is written to it: controllers may be faster here."""
    found: list[Exchange] = []
    for other in rest:
        if other.method == "GET" and (other.path, other.query) == (exchange.path, exchange.query):
            found.append(other)
        elif other.method != "GET" and (other.path == exchange.path or other.method == "BED"):
            break
    return found if exchange.method == "GET" else []


def _created_unrecorded(exchanges: list[Exchange]) -> list[Exchange]:
    """Creations that only a watch shows: nobody owns the object, and no POST of it was recorded."""
    kinds = {"Job": "apis/batch/v1", "Service": "api/v1", "ConfigMap": "api/v1"}
    known = {e.response["metadata"].get("uid") for e in exchanges if e.method == "POST"}
    found: list[tuple[int, Exchange]] = []
    for stream in (e for e in exchanges if e.streams and e.query.get("watch")):
        for entry in stream.response:
            obj = entry.get("object", {})
            meta, kind = obj.get("metadata", {}), obj.get("kind")
            if kind not in kinds or entry["type"] != "ADDED" or meta["name"] == "kube-root-ca.crt":
                continue
            if meta["uid"] in known:
                continue
            known.add(meta["uid"])
            # Events arrive a little after the write: the first request from a moment before is taken as the next one.
            after = next((e for e in exchanges if e.t_ms >= entry["t_ms"] - 100 and e.seq > stream.seq), None)
            if after is not None:
                path = f"/{kinds[kind]}/namespaces/{meta['namespace']}/{kind.lower()}s"
                made = Exchange(
                    stream.scenario, after.seq, "POST", path=path, request_body=_as_created(obj), response=obj
                )
                found.append((entry["t_ms"], made))
    return [made for _, made in sorted(found, key=lambda pair: pair[0])]


def _as_created(obj: Json) -> Json:
    """An object as its creator may have sent it."""
    sent = json.loads(json.dumps(obj))
    sent.pop("status", None)
    meta = sent["metadata"]
    sent["metadata"] = {k: meta[k] for k in ("name", "labels", "annotations", "ownerReferences") if k in meta}
    template = sent.get("spec", {}).get("template")
    if template:
        for key in ("selector", "manualSelector"):
            sent["spec"].pop(key, None)
        labels = template["metadata"]["labels"]
        template["metadata"]["labels"] = {
            k: v for k, v in labels.items() if not re.search("controller-uid|job-name", k)
        }
    return sent


def _recorded_name(stream: Stream, name: str) -> Json:
    if not stream.exchange.response or "line" in stream.exchange.response[0]:
        return None
    found = (obj for _, obj in events(stream.exchange.response) if obj["metadata"].get("name") == name)
    return next(found, None)


class Replay:
    """Sends one scenario to a cluster and collects what differs.

    Attributes:
        values: The mapping of values; scenarios that continue one another share it.
    """

    def __init__(
        self,
        client: Client,
        values: Values,
        left_out: dict[tuple[str, int], str],
        unrecorded: dict[str, list[Exchange]] | None = None,
    ) -> None:
        """Replay with `client`.

        Args:
            client: Sends the requests.
            values: The mapping of values.
            left_out: Exchanges that are sent, but not compared.
            unrecorded: By scenario, requests that were made but not recorded: sent before the exchange of their number.
        """
        self._client, self.values, self._left_out, self._unrecorded = client, values, left_out, unrecorded or {}
        self._differs = False

    def run(self, exchanges: list[Exchange], bed: Callable[[Exchange], None], exact: bool = False) -> Iterator[str]:
        """Replay a scenario.

        Args:
            exchanges: The scenario.
            bed: Called with each exchange of method BED: does to the cluster what its note says.
            exact: Whether every write of a watch counts.

        Yields:
            One text for each exchange that differs.
        """
        streams: list[Stream] = []
        unrecorded = self._unrecorded.get(exchanges[0].scenario, []) + _created_unrecorded(exchanges)
        for i, exchange in enumerate(exchanges):
            for request in [r for r in unrecorded if r.seq == exchange.seq]:
                answer = self._client.send(request, self.values)
                if request.response is not None:
                    Comparer(self.values).compare(request.response, answer.json())
                    time.sleep(0.7)  # its pods were there when the next request was sent
            if exchange.method == "BED":
                bed(exchange)
                continue
            if exchange.method == "DELETE":
                # Controllers act on what is made, and on what is deleted first: they get the time that they had.
                time.sleep(min((exchange.t_ms - exchanges[i - 1].t_ms) / 1000, 1.0))
            self._resolve(exchange, streams)
            if exchange.streams:
                streams.append(Stream(self._client, exchange, self.values))
            elif found := self._exchange(exchange, _read_again(exchange, exchanges[i + 1 :])):
                yield self._report(exchange, found)
        for stream in streams:
            if found := self._settle(stream, exact):
                yield self._report(stream.exchange, found)

    def _resolve(self, exchange: Exchange, streams: list[Stream]) -> None:
        """Wait until the generated names in a request have been seen in a watch."""
        sent = json.dumps([exchange.path, exchange.query, exchange.request_body])
        names = {name for name in _NAME.findall(sent) if _SUFFIX.search(name) and not self.values.knows(name)}
        deadline = self._deadline()
        while names and time.monotonic() < deadline:
            for stream in streams:
                self._learn_names(stream, names)
            names = {name for name in names if not self.values.knows(name)}
            if not any(_recorded_name(stream, name) for stream in streams for name in names):
                return
            time.sleep(0.05)

    def _learn_names(self, stream: Stream, names: set[str]) -> None:
        for name in names:
            recorded = _recorded_name(stream, name)
            for _, actual in stream.events() if recorded else ():
                if actual.get("kind") == recorded["kind"] and _alike(recorded, actual):
                    self.values.learn(name, actual["metadata"]["name"])
                    self.values.learn(recorded["metadata"]["uid"], actual["metadata"]["uid"])

    def _exchange(self, exchange: Exchange, later: list[Exchange]) -> list[str]:
        out = (exchange.scenario, exchange.seq) in self._left_out
        deadline = self._deadline()
        while True:
            response = self._client.send(exchange, self.values)
            if out:
                return []
            found: list[str] = []
            for recorded in (exchange, *later):
                trial = self.values.trial()
                differs = differences_of(recorded, response, trial)
                if not differs or exchange.method != "GET":
                    self.values.adopt(trial)
                    found = differs
                    break
                found = found or differs
            # A read may come before a controller has acted: it is repeated; a write is never sent twice.
            if not found or exchange.method != "GET" or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _settle(self, stream: Stream, exact: bool) -> list[str]:
        exchange = stream.exchange
        deadline = self._deadline()
        found = ["nothing came"]
        while found and time.monotonic() < deadline:
            if stream.ended or exchange.ended == "client":
                trial = self.values.trial()
                found = stream_differences(stream, trial, exact)
                if not found:
                    self.values.adopt(trial)
            if stream.ended:
                break
            time.sleep(0.05)
        stream.close()
        return [] if (exchange.scenario, exchange.seq) in self._left_out else found

    def _deadline(self) -> float:
        return time.monotonic() + (HASTE_S if self._differs else PATIENCE_S)

    def _report(self, exchange: Exchange, found: list[str]) -> str:
        self._differs = True
        return "\n  ".join([str(exchange), *found[:12]])
