"""What Headway and the nodes wrote about an attempt on the shared volume, and the few files that the launcher writes.

| file of `attempts/<n>/` | what it says | written |
|---|---|---|
| `job.json` | the Job that was made for the attempt, by uid | when it exists, and again when its submission is whole |
| `cancel` | a person's wish | once |
| `pods/<uid>.json` | what was last seen of a pod that ended or is being deleted | while it can be seen |
| `final.json` | how the attempt ended; fences it: its nodes end within a second | once, the first writer wins |
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from headway.training.kubernetes.observe import End, Marker, NodeFacts, PodFact
from headway.training.launch import FactsUnreadable, Observation
from headway.training.run_files import create, publish, write_once
from trainer.blobs import Json, canonical_json
from trainer.events import (
    Beat,
    Event,
    StreamBroken,
    last_event,
    node_folder,
    now_us,
    one_line,
    read_events,
    read_heartbeat,
)
from trainer.spec import AttemptSpec, RunSpec, SpecRefused, parse_attempt, parse_run

# A node beats once a second: one whose clock is wrong shows within this time that it lives.
LOOK_ON_S = 3.0
_LOOK_EVERY_S = 0.1
_PAGE = 1_000
# Nodes write here under another user of the same group.
_SHARED_FOLDER = 0o2775

F = TypeVar("F", Marker, PodFact)


class Heard:
    """When each node's heartbeat was last seen to move, by this process's own clock, whatever the node's clock says."""

    def __init__(self) -> None:
        self._moved: dict[Path, tuple[int, float]] = {}

    def silence_s(self, path: Path, beat: Beat) -> float:
        """Seconds since the heartbeat at `path` moved, as far as this process has seen."""
        now = time.monotonic()
        count, since = self._moved.get(path, (None, now))
        if count != beat.count:
            since = now
            self._moved[path] = (beat.count, now)
        return now - since


class AttemptFacts:
    """The files of one attempt, `folder` being `attempts/<n>` of its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.folder.parent.parent

    def prepare(self, attempt: AttemptSpec, spec: RunSpec) -> None:
        """Make the folders and write what the nodes read; a second call finds them.

        Raises:
            LaunchRefused: other content stands there.
        """
        for place in (self.folder, self.run_dir / "checkpoints"):
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):
                # Somebody else's folder has the mode that its owner gave it.
                place.chmod(_SHARED_FOLDER)
        write_once(self.run_dir / "spec.json", canonical_json(spec.to_json()))
        write_once(self.folder / "attempt.json", canonical_json(attempt.to_json()))

    def specs(self) -> tuple[AttemptSpec, RunSpec] | None:
        """What was submitted; None before.

        Raises:
            FactsUnreadable: it cannot be read.
        """
        path = self.folder / "attempt.json"
        try:
            return parse_attempt(path.read_bytes()), parse_run((self.run_dir / "spec.json").read_bytes())
        except FileNotFoundError:
            return None
        except (SpecRefused, OSError) as error:
            raise FactsUnreadable(
                f"{path} or its run's spec.json cannot be read: {type(error).__name__}: {error}",
                "put back what was there: without it the attempt cannot be judged",
            ) from error

    def later_attempts(self) -> list[int]:
        """Attempts of the same run with a higher number: each of them fences this one."""
        found = self.folder.parent.iterdir() if self.folder.parent.is_dir() else ()
        numbers = [int(entry.name) for entry in found if entry.name.isdecimal()]
        return [number for number in numbers if number > int(self.folder.name)]

    def marker(self) -> Marker | None:
        """The Job that was made for the attempt."""
        document = _read(self.folder / "job.json")
        return None if document is None else _facts(Marker, document, self.folder / "job.json")

    def write_marker(self, marker: Marker) -> None:
        """Keep which Job is the attempt's."""
        publish(self.folder / "job.json", asdict(marker))

    def wished(self) -> bool:
        """Whether a person asked for the end."""
        return (self.folder / "cancel").exists()

    def wish(self, reason: str) -> None:
        """Keep that a person asked for the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.wished():
            publish(self.folder / "cancel", {"reason": one_line(reason), "at": now_us()})

    def remember(self, pod: PodFact) -> None:
        """Keep what is seen of a pod that ended or is going: it may be gone the next time."""
        path = self.folder / "pods" / f"{pod.uid}.json"
        known = _facts(PodFact, _read(path) or asdict(pod), path) if path.exists() else None
        # A pod that is being deleted may show less than before: a forced deletion never tells the exit code.
        if known == pod or (known is not None and known.ended and not pod.ended):
            return
        path.parent.mkdir(exist_ok=True)
        publish(path, asdict(pod))

    def remembered(self) -> tuple[PodFact, ...]:
        """What was last seen of pods, newest start first."""
        found = [_facts(PodFact, _read(path) or {}, path) for path in sorted(self.folder.glob("pods/*.json"))]
        return tuple(sorted(found, key=lambda pod: pod.created_at or 0, reverse=True))

    def final(self) -> Observation | None:
        """How the attempt ended; None while it has not."""
        path = self.folder / "final.json"
        document = _read(path)
        if document is None:
            return None
        try:
            code = document["code"]
            return Observation(
                "ended",
                code if code is None else int(code),
                str(document["cause"]),
                tuple(status if status is None else int(status) for status in document["exit_codes"]),
                bool(document["cancelled"]),
                float(document["worker_seconds"]),
                int(document["ended_at"]),
                reason_code=str(document["reason_code"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error

    def write_final(self, end: End) -> Observation:
        """Fence the attempt and keep how it ended; return what stands, which is the first writer's."""
        document: dict[str, Json] = {
            "exit_codes": list(end.exit_codes),
            "code": end.code,
            "cause": one_line(end.cause),
            "cause_node": end.cause_node,
            "cause_rank": end.cause_rank,
            "ended_at": end.ended_at,
            "worker_seconds": end.worker_seconds,
            "cancelled": end.cancelled,
            "reason_code": end.reason_code,
        }
        create(self.folder / "final.json", canonical_json(document))
        stands = self.final()
        assert stands is not None
        return stands

    def nodes(self, attempt: AttemptSpec, heard: Heard, watched: Mapping[int, float]) -> tuple[NodeFacts, ...]:
        """What each node left.

        Args:
            attempt: how many nodes there are.
            heard: this process's memory of heartbeats.
            watched: nodes that should be alive, and after how many seconds of silence one looks on whether they are.
        """
        seen = {node: self._node(node, heard) for node in range(attempt.nodes)}
        silent = {
            node: self._heartbeat(node)
            for node, facts in seen.items()
            if facts.silent_s is not None and facts.silent_s > watched.get(node, math.inf)
        }
        for node in _moving(silent):
            seen[node] = replace(seen[node], silent_s=0.0)
        return tuple(seen.values())

    def first_step_at(self, node: int) -> int | None:
        """When the node's stream tells of the first training step, microseconds UTC; None before."""
        after = 0
        while events := read_events(self._stream(node), after, _PAGE):
            steps = [event.at for event in events if event.kind == "step"]
            if steps:
                return steps[0]
            after = events[-1].seq
        return None

    def _node(self, node: int, heard: Heard) -> NodeFacts:
        path = self._heartbeat(node)
        beat = read_heartbeat(path)
        first, last = self._span(node)
        seen = [at for at in (last.at if last else None, beat.at if beat else None, first) if at is not None]
        silent = None if beat is None else max((now_us() - beat.at) / 1e6, heard.silence_s(path, beat))
        return NodeFacts(
            node,
            end=last if last is not None and last.kind == "node_end" else None,
            began_at=first,
            seen_at=max(seen, default=None),
            silent_s=silent,
        )

    def _span(self, node: int) -> tuple[int | None, Event | None]:
        """When the node's stream began, and its last event; a broken stream tells when it began by its file alone."""
        stream = self._stream(node)
        try:
            first, last = read_events(stream, limit=1), last_event(stream)
        except StreamBroken:
            return (self.folder / "attempt.json").stat().st_mtime_ns // 1_000, None
        return (first[0].at if first else None), last

    def _heartbeat(self, node: int) -> Path:
        return node_folder(self.folder / "attempt.json", node) / "node.heartbeat"

    def _stream(self, node: int) -> Path:
        return node_folder(self.folder / "attempt.json", node) / "events.jsonl"


def _moving(paths: Mapping[int, Path]) -> set[int]:
    """Whose heartbeats go on while one looks at all of them: clocks of two machines prove nothing."""
    still = {node: read_heartbeat(path) for node, path in paths.items()}
    # Counted in looks: a machine that stands still meanwhile takes nothing from them.
    for _ in range(round(LOOK_ON_S / _LOOK_EVERY_S)):
        if not still:
            break
        time.sleep(_LOOK_EVERY_S)
        still = {node: first for node, first in still.items() if read_heartbeat(paths[node]) == first}
    return paths.keys() - still.keys()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(document, dict):
        raise _unreadable(path, f"{document!r:.80} is no object")
    return cast("dict[str, Any]", document)


def _facts(kind: type[F], document: Mapping[str, Any], path: Path) -> F:
    known = {field.name for field in fields(kind)}
    try:
        return kind(**{name: value for name, value in document.items() if name in known})
    except TypeError as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, problem: str) -> FactsUnreadable:
    return FactsUnreadable(
        f"{path} cannot be read: {problem}", "move the file away; what it told is then looked up in the cluster again"
    )
