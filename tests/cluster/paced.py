"""Replay of recorded exchanges that have running pods in them.

A request is sent when the watches have shown what the recording's had shown by then, not at its time. What a real
cluster decides by chance, or at a moment of its own, is not compared (`loose`).
"""

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tests.cluster import golden
from tests.cluster.golden import Client, Exchange, Json, Replay, Stream, Values

_NODE = re.compile(r"\bn[12]\b")
_ONE_OF = re.compile(r"( for pod \S+?|^Pod \S+?)-\d+-(?=[a-z0-9]{5}\b)")
_DIAL = re.compile(r"dial tcp:? .*")
_SECONDS = re.compile(r"\b\d+s$")
_HASH = re.compile(r"\b(job-[a-z0-9-]+?)-[0-9a-f]{5}\b")
_WORKLOAD = re.compile(r"job-(.*)-[0-9a-f]{5}")
_STEP = re.compile(r"step \d+\n?")
_STAMP = re.compile(r"^[0-9T:.-]{20,}Z ", re.MULTILINE)
_INDEX = "batch.kubernetes.io/job-completion-index"
_BEYOND = 8
_AT_ONCE_MS = 100
_CHANCE = ("nodeName", "hostIP", "hostIPs", "accumulatedPastExecutionTimeSeconds")
_TRIMMED = ("resources", "allocatedResources")
_ORDINARY = ("Scheduled", "Pulled", "Created", "Started")
_WITH_STARTS = ("run_success", "run_image_missing", "run_start_errors", "run_restart_onfailure")
_WATCHED = ("/jobs", "/pods", "/workloads", "/nodes")


def loose(value: Json) -> Json:
    """A value without what is chance: the node that the scheduler took; when a kubelet drops resource fields; which of
    several failed pods a rule of the podFailurePolicy was held against first."""
    if isinstance(value, list):
        return [loose(one) for one in value]
    if isinstance(value, dict):
        if "containerStatuses" in value:
            value = _status(value)
        if str(value.get("message", "")).startswith(("Container ", "Pod ")):
            value = {**value, "message": _ONE_OF.sub(r"\1-<index>-", value["message"])}
        if isinstance(value.get("message"), str):
            value = {**value, "message": _DIAL.sub("dial tcp <error>", value["message"])}
        if "Pod" in str(value.get("kind")) and "items" in value:
            value = {**value, "items": _in_order(value["items"])}
        if value.get("kind") == "Event" or "involvedObject" in value:
            value = _event(value)
        if value.get("kind") == "Workload" and value.get("status", {}).get("conditions"):
            value = {**value, "status": {**value["status"], "conditions": _sorted(value["status"]["conditions"])}}
        kept = {key: one for key, one in value.items() if key not in _CHANCE}
        return {key: loose(one) for key, one in kept.items()}
    return value


def _sorted(conditions: list[Json]) -> list[Json]:
    """A Workload's conditions: who of Kueue's controllers writes first is chance."""
    return sorted(({k: v for k, v in one.items() if k != "observedGeneration"} for one in conditions), key=_type)


def _type(condition: Json) -> str:
    return condition["type"]


def _watched(obj: Json) -> Json:
    """An object of a watch; a kubelet may report the network of a pod together with what follows it."""
    obj = loose(obj)
    pod = obj.get("kind") == "Pod" or "containers" in obj.get("spec", {})
    if pod and "conditions" in obj.get("status", {}):
        together = ["PodReadyToStartContainers"]
        if obj["status"].get("phase") == "Pending" and "containerStatuses" in obj["status"]:
            together += ["Ready", "ContainersReady"]
        kept = [one for one in obj["status"]["conditions"] if one["type"] not in together]
        return {**obj, "status": {**obj["status"], "conditions": kept}}
    if obj.get("kind") == "Workload" and "conditions" in obj.get("status", {}):
        kept = [one for one in obj["status"]["conditions"] if one["type"] != "PodsReady"]
        return {**obj, "status": {**obj["status"], "conditions": kept}}
    return obj


def _status(status: Json) -> Json:
    kept = {key: one for key, one in status.items() if key not in _TRIMMED}
    for part in ("containerStatuses", "initContainerStatuses"):
        if part in kept:
            kept[part] = [{k: v for k, v in one.items() if k not in _TRIMMED} for one in kept[part]]
    return kept


def _event(event: Json) -> Json:
    """An event without its node and its counts, which are matters of time."""
    kept = {key: one for key, one in event.items() if key not in ("count", "series", "lastTimestamp", "source")}
    message = _SECONDS.sub("<seconds>", _NODE.sub("<node>", str(kept.get("message", ""))))
    message = _HASH.sub(r"\1-<hash>", message)
    kept["involvedObject"] = {k: v for k, v in event["involvedObject"].items() if k != "resourceVersion"}
    about = golden._generated(event["involvedObject"].get("name", "")) + golden._plain(message)
    name = f"{event.get('reason')}.{hashlib.sha1(about.encode()).hexdigest()[:8]}"
    return {**kept, "metadata": {**kept["metadata"], "name": name}, "message": message}


def _once_each(sequence: list[tuple[str, Json]]) -> list[tuple[str, Json]]:
    """A watch in which the same event again is left out, and what a node reports again."""
    seen, kept, nodes = set(), [], {}
    for type_, obj in sequence:
        if obj.get("kind") == "Node":
            shown = [
                obj["spec"],
                [(one["type"], one["status"]) for one in obj["status"]["conditions"]],
                type_ == "DELETED",
            ]
            if nodes.get(obj["metadata"]["name"]) == shown:
                continue
            nodes[obj["metadata"]["name"]] = shown
        if obj.get("kind") == "Event":
            key = (obj["involvedObject"].get("name"), obj["reason"], obj["message"])
            if key in seen or type_ == "MODIFIED":
                continue
            seen.add(key)
        kept.append((type_, obj))
    return kept


class LooseClient(Client):
    """A client whose answers are loose."""

    def send(self, exchange: Exchange, values: Values, stream: bool = False) -> Json:
        """See `Client.send`."""
        response = super().send(exchange, values, stream)
        if stream or not response.data.startswith(b"{"):
            return response
        return _Answer(response.status, response.headers, json.dumps(loose(json.loads(response.data))).encode())


def _log_differs(exchange: Exchange, actual: str, whole: list[str]) -> list[str]:
    """What differs in a log that was read while it grew: how far it had got is chance.

    Args:
        exchange: The recorded request; its answer is the recorded log.
        actual: The log that was read here.
        whole: Every line of the recorded log.
    """
    recorded = exchange.response
    if isinstance(recorded, list):
        recorded = "".join(one["line"] for one in recorded)
    old, new = (_STAMP.sub("", text).splitlines(keepends=True) for text in (recorded, actual))
    starts = [i for i in range(len(whole) - len(new) + 1) if whole[i : i + len(new)] == new]
    stamped = len(_STAMP.findall(actual)) == (len(new) if _STAMP.search(recorded) else 0)
    fits = bool(starts) and stamped
    if "tailLines" in exchange.query and not exchange.streams:
        fits &= len(old) == len(new)
    elif "tailLines" in exchange.query or "sinceSeconds" in exchange.query:
        fits &= not exchange.streams or not new or new[-1] == whole[-1]
    else:
        fits &= new[:1] == old[:1]
    return [] if fits else [f"log: recorded {old}, here {new}"]


class _Answer(NamedTuple):
    status: int
    headers: Json
    data: bytes

    def json(self) -> Json:
        return json.loads(self.data)


class PacedReplay(Replay):
    """Replays scenarios in step with their watches, with a `LooseClient`."""

    def __init__(
        self,
        client: LooseClient,
        values: Values,
        left_out: dict[tuple[str, int], str],
        paces: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Replay with `client`.

        Args:
            client: Sends the requests.
            values: The mapping of values.
            left_out: Exchanges that are sent, but not compared.
            paces: Parts of containers' commands and what is run in their place: a pod that was recorded while it ran
                has to run longer where everything else takes longer.
        """
        super().__init__(client, values, left_out, {})
        self._streams: list[Stream] = []
        self._turned: set[str] = set()
        self._paces = paces
        self._growing: dict[str, list[str]] = {}

    def run(self, exchanges: list[Exchange], bed: Callable[[Exchange], None], exact: bool = False) -> Iterator[str]:
        """Replay a scenario; see `Replay.run`."""
        streams = self._streams = []
        every = [_loosened(one) for one in exchanges]
        self._keep_pace(exchanges)
        self._growing = _growing(every)
        for number, exchange in enumerate(every):
            # What was sent right after the exchange before it is sent so here too.
            if number == 0 or exchange.t_ms - every[number - 1].t_ms > _AT_ONCE_MS or exchange.method == "BED":
                self._keep_step(exchange, streams)
            if exchange.method == "BED":
                self._take_the_same(every, exchanges)
                bed(exchange)
                continue
            self._resolve(exchange, streams)
            if exchange.streams:
                streams.append(_LooseStream(self._client, exchange, self.values))
            elif found := self._exchange(exchange, golden._read_again(exchange, every[number + 1 :])):
                yield self._report(exchange, found)
        for stream in streams:
            if found := self._settle(stream, exact):
                yield self._report(stream.exchange, found)

    def _keep_pace(self, exchanges: list[Exchange]) -> None:
        for text in _texts([exchange.request_body for exchange in exchanges]):
            for old, new in self._paces.items():
                if old in text:
                    self.values.learn(text, text.replace(old, new))

    def _resolve(self, exchange: Exchange, streams: list[Stream]) -> None:
        for stream in streams:
            if stream.exchange.path.endswith("/workloads"):
                self._learn_workloads(stream)
        super()._resolve(exchange, streams)

    def _learn_workloads(self, stream: Stream) -> None:
        """A Workload's name ends with a hash of its Job's uid."""
        actual = {_WORKLOAD.sub(r"\1", obj["metadata"]["name"]): obj["metadata"] for _, obj in stream.events()}
        for _, obj in golden.events(stream.exchange.response):
            found = actual.get(_WORKLOAD.sub(r"\1", obj["metadata"]["name"]))
            if found:
                self.values.learn(obj["metadata"]["name"], found["name"])
                self.values.learn(obj["metadata"]["uid"], found["uid"])

    def _exchange(self, exchange: Exchange, later: list[Exchange]) -> list[str]:
        """Like `Replay._exchange`; a read may also find a state that a watch has shown and that is over."""
        if (exchange.scenario, exchange.seq) in self._left_out:
            self._client.send(exchange, self.values)
            return []
        found: list[str] = []
        deadline = self._deadline()
        while exchange.method == "GET" and time.monotonic() < deadline:
            trial = self.values.trial()
            response = self._client.send(exchange, self.values)
            found = golden.differences_of(exchange, response, trial)
            if found and exchange.status == response.status == 200 and exchange.path in self._growing:
                found = _log_differs(exchange, response.data.decode(), self._growing[exchange.path])
            if not found or self._was_so(exchange):
                self.values.adopt(trial if not found else self.values)
                return []
            if any(not golden.differences_of(one, self._client.send(one, self.values), trial) for one in later):
                return []
            time.sleep(0.05)
        return super()._exchange(exchange, later) if exchange.method != "GET" else found

    def _was_so(self, exchange: Exchange) -> bool:
        if not isinstance(exchange.response, dict) or exchange.status != 200:
            return False
        items = exchange.response.get("items", [exchange.response])
        if "items" in exchange.response and any("involvedObject" in one for one in items):
            return False
        return bool(items) and all(self._item_was_so(_watched(one)) for one in items)

    def _item_was_so(self, wanted: Json) -> bool:
        wanted = {key: value for key, value in wanted.items() if key not in ("kind", "apiVersion")}
        for stream in self._streams:
            if not stream.exchange.path.endswith(_WATCHED):
                continue
            for _, obj in stream.events():
                seen = {key: value for key, value in obj.items() if key not in ("kind", "apiVersion")}
                if not golden.Comparer(self.values.trial()).compare(wanted, seen):
                    return True
        return False

    def _settle(self, stream: Stream, exact: bool) -> list[str]:
        """Like `Replay._settle`; what came after the end of the recording does not count."""
        if (stream.exchange.scenario, stream.exchange.seq) in self._left_out:
            stream.close()
            return []
        if stream.exchange.path in self._growing and stream.exchange.ended == "server":
            stream.join(golden.PATIENCE_S)
            actual = b"".join(stream.lines).decode()
            return _log_differs(stream.exchange, actual, self._growing[stream.exchange.path])
        deadline = time.monotonic() + 1.0
        watched = stream.exchange.path.endswith(_WATCHED)
        while isinstance(stream, _LooseStream) and watched and time.monotonic() < deadline:
            stream.end_as_recorded(self.values)
            for cut in range(min(_BEYOND, len(stream.events()))):
                stream.cut = cut
                trial = self.values.trial()
                if not golden.stream_differences(stream, trial, exact):
                    self.values.adopt(trial)
                    stream.close()
                    return []
                stream.cut = 0
            time.sleep(0.1)
        return super()._settle(stream, exact)

    def _take_the_same(self, every: list[Exchange], exchanges: list[Exchange]) -> None:
        """A node is about to be lost: exchange the indexes of a Job of two pods where they sit the other way round."""
        recorded, actual = {}, {}
        for raw in exchanges:
            if raw.streams and raw.path.endswith("/pods"):
                recorded |= _places(golden.events(raw.response))
        for stream in self._streams:
            if stream.exchange.path.endswith("/pods"):
                actual |= _places(Stream.events(stream))
        jobs = {host.rpartition("-")[0] for host in recorded}
        for job in jobs - self._turned:
            first, second = recorded.get(f"{job}-0"), recorded.get(f"{job}-1")
            here = actual.get(f"{job}-0")
            if first and second and here and here.node != first.node and here.node == second.node:
                self._turned.add(job)
                other = {first.pod: _turned(first.pod), second.pod: _turned(second.pod)}
                for exchange in every:
                    exchange.path = _swapped(exchange.path, other)
                    exchange.response = _swapped(exchange.response, other)

    def _keep_step(self, exchange: Exchange, streams: list[Stream]) -> None:
        """Wait until the watches have shown what they had shown when the request was recorded."""
        if exchange.streams and not exchange.path.endswith("/log"):
            return
        deadline = self._deadline()
        for stream in streams:
            seen = -1
            while stream.exchange.path.endswith(_WATCHED) and time.monotonic() < deadline:
                if len(stream.lines) != seen:
                    seen = len(stream.lines)
                    if not self._behind(stream, exchange.t_ms):
                        break
                time.sleep(0.04)

    def _behind(self, stream: Stream, t_ms: int) -> bool:
        prefix = [entry for entry in stream.exchange.response if entry["t_ms"] <= t_ms]
        wanted, actual = golden.essence(golden.events(prefix)), golden.essence(stream.events())
        left = dict(actual)
        for key, one in wanted.items():
            kind, name, uid = key.split(" ")
            fits = [k for k in left if golden._fits(k, kind, self.values.text(name), self.values.text(uid), uid)]
            fits = fits or [k for k in left if golden._alike(one["object"], left[k]["object"])]
            if not fits:
                return True
            seen = left.pop(fits[0])
            if not _reached(one, seen):
                return True
        return False


class _Place(NamedTuple):
    node: str
    pod: str


def _places(sequence: list[tuple[str, Json]]) -> dict[str, _Place]:
    """By host name `job-index`, the first pod of an Indexed Job and its node."""
    found: dict[str, _Place] = {}
    for _, pod in sequence:
        if pod["spec"].get("nodeName") and pod["spec"].get("hostname"):
            found.setdefault(pod["spec"]["hostname"], _Place(pod["spec"]["nodeName"], pod["metadata"]["name"]))
    return found


def _turned(pod: str) -> str:
    job, index, suffix = pod.rsplit("-", 2)
    return f"{job}-{1 - int(index)}-{suffix}"


def _swapped(value: Json, other: dict[str, str]) -> Json:
    """A recorded value in which the two pods of a Job have each other's index; `other` are their names so."""
    if isinstance(value, str):
        return re.sub("|".join(map(re.escape, other)), lambda match: other[match[0]], value)
    if isinstance(value, list):
        return [_swapped(one, other) for one in value]
    if not isinstance(value, dict):
        return value
    swapped = {key: _swapped(one, other) for key, one in value.items()}
    if "involvedObject" in swapped:
        return _event(swapped)
    if "items" in swapped:
        swapped["items"] = _in_order(swapped["items"])
    meta = swapped.get("metadata", {})
    if "generateName" in meta and meta["name"] in other.values():
        host = meta["name"].rpartition("-")[0]
        meta["generateName"] = f"{host}-"
        swapped["spec"]["hostname"] = host
        for part in ("labels", "annotations"):
            meta[part][_INDEX] = host.rpartition("-")[2]
    return swapped


def _in_order(items: list[Json]) -> list[Json]:
    """Objects of a list, those whose names differ by chance in order of their making."""
    return sorted(items, key=lambda one: (golden._generated(one["metadata"]["name"]), _made(one)))


def _made(obj: Json) -> tuple[bool, str]:
    meta = obj["metadata"]
    return "deletionTimestamp" not in meta, meta.get("creationTimestamp") or ""


def _texts(value: Json) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)


def _reached(wanted: Json, seen: Json) -> bool:
    gone = wanted["last"] == "DELETED"
    if gone or seen["last"] == "DELETED":
        return gone == (seen["last"] == "DELETED") or not gone
    if any(phase not in seen["phases"] for phase in wanted["phases"]):
        return False
    now = {one["type"]: one for one in seen["object"].get("status", {}).get("conditions", ())}
    for one in wanted["object"].get("status", {}).get("conditions", ()):
        if one["type"] not in now or now[one["type"]]["status"] != one["status"]:
            shown = {k: one.get(k) for k in ("type", "status", "reason") if one.get(k) is not None}
            if shown not in seen["conditions"]:
                return False
    taints = [one["object"].get("spec", {}).get("taints", ()) for one in (wanted, seen)]
    back = any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in seen["object"].get("status", {}).get("conditions", ())
    )
    if wanted["object"].get("kind") == "Node" and len(taints[0]) > len(taints[1]) and not back:
        return False
    old, new = wanted["object"].get("status", {}), seen["object"].get("status", {})
    return all(old.get(key, 0) <= new.get(key, 0) for key in ("ready", "succeeded", "failed")) or "conditions" in new


class _LooseStream(Stream):
    def __init__(self, client: Client, exchange: Exchange, values: Values) -> None:
        self._parsed: list[tuple[str, Json, bool]] = []
        self.cut, self._ends = 0, {}
        super().__init__(client, exchange, values)

    def run(self) -> None:
        super().run()
        if self.exchange.path.endswith("/log"):
            self.lines = [one for one in self.lines if not _STEP.fullmatch(one.decode("utf-8", "replace"))]

    def events(self) -> list[tuple[str, Json]]:
        # A replay asks often: every line is parsed once.
        while len(self._parsed) < len(self.lines):
            entry = json.loads(self.lines[len(self._parsed)])
            self._parsed.append((entry["type"], _watched(entry["object"]), self._unrecorded(entry["object"])))
        kept = [
            (type_, obj) for i, (type_, obj, skipped) in enumerate(self._parsed) if not skipped and self._lasts(i, obj)
        ]
        found = _once_each(kept)
        return found[: len(found) - self.cut] if self.cut else found

    def _lasts(self, number: int, obj: Json) -> bool:
        return number <= self._ends.get(obj["metadata"].get("uid", ""), number)

    def end_as_recorded(self, values: Values) -> None:
        """Leave out what came of an object after it was as the recording saw it last."""
        self._ends = {}
        last = {obj["metadata"].get("uid"): (kind, obj) for kind, obj in golden.events(self.exchange.response)}
        for number, (_, obj, _) in enumerate(self._parsed):
            uid = obj["metadata"].get("uid", "")
            alike = [one for one in last.values() if golden._alike(one[1], obj)] if uid else []
            once = len(alike) == 1 and alike[0][0] != "DELETED"
            if once and not golden.Comparer(values.trial()).compare(alike[0][1], obj):
                self._ends[uid] = number

    def _unrecorded(self, obj: Json) -> bool:
        """The recording keeps the events of an ordinary start in four scenarios only."""
        return obj.get("reason") in _ORDINARY and self.exchange.scenario not in _WITH_STARTS


def _growing(exchanges: list[Exchange]) -> dict[str, list[str]]:
    """By path, the lines of the logs that were followed from their start to their end."""
    found: dict[str, list[str]] = {}
    for one in exchanges:
        if one.streams and one.path.endswith("/log") and one.ended == "server" and one.status == 200:
            lines = [entry["line"] for entry in one.response]
            found[one.path] = max(found.get(one.path, []), lines, key=len)
    return {path: lines for path, lines in found.items() if len(lines) > 4}


def _loosened(exchange: Exchange) -> Exchange:
    """A copy whose recorded objects are loose."""
    copied = copy.copy(exchange)
    watched = exchange.streams and exchange.response and "type" in exchange.response[0]
    if watched:
        whole = [(kind, _watched(obj)) for kind, obj in golden.events(exchange.response)]
        times = [entry["t_ms"] for entry in exchange.response]
        kept = {id(obj) for _, obj in _once_each(whole)}
        entries = [(t, *entry) for t, entry in zip(times, whole, strict=True) if id(entry[1]) in kept]
        copied.response = [{"t_ms": t, "type": kind, "object": obj} for t, kind, obj in entries]
    elif exchange.streams:
        copied.response = [one for one in exchange.response if not _STEP.fullmatch(one["line"])]
    elif isinstance(exchange.response, dict):
        copied.response = loose(exchange.response)
    return copied
