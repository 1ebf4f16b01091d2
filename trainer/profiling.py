"""A trace of chosen steps, as an artifact of the attempt that opens in Perfetto (https://ui.perfetto.dev).

`profile.json` in the run's directory asks for it: `{"steps": [first, last]}`, steps counted from 1 over the whole run,
both taken. It may be there when the training begins or come later; rank 0 looks for it with each step event. Nothing of
the run's identity depends on it, and a request whose steps have passed is told and done nothing about.

The trace is torch's, in Chrome's trace event format, packed with gzip; every step is a span named `step N`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.blobs import Manifest, ManifestEntry, canonical_json, digest_file, sync_folder

if TYPE_CHECKING:
    from trainer.checkpoint import Sink

PROFILE_FILE = "profile.json"
MOST_STEPS = 200
_ARTIFACT = "profile"
_TEXT = re.compile(r"(?:steps=)?([1-9][0-9]{0,8}):([1-9][0-9]{0,8})")


class ProfileRefused(ValueError):
    """A request for a trace that means nothing; the message says what it may be."""


@dataclass(frozen=True)
class Wanted:
    """Steps to trace, from `first` to `last`, both taken, counted from 1."""

    first: int
    last: int

    def to_json(self) -> bytes:
        """What `profile.json` holds."""
        return canonical_json({"steps": [self.first, self.last]})


def parse_profile(text: str) -> Wanted:
    """The steps that `steps=10:15` (or `10:15`) asks for.

    Raises:
        ProfileRefused: it is no such text, ends before it begins, or asks for more than `MOST_STEPS`.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ProfileRefused(f"{text!r:.80} is no range of steps from 1; write steps=10:15")
    return _checked(int(found[1]), int(found[2]), text)


def read_profile(run_dir: Path) -> Wanted | None:
    """What the file in the run's directory asks for; None when there is none.

    Raises:
        ProfileRefused: it is no such request.
    """
    try:
        raw: Any = json.loads((run_dir / PROFILE_FILE).read_bytes())
        first, last = raw["steps"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileRefused(f"{PROFILE_FILE} is no request for a trace: {error}") from error
    if type(first) is not int or type(last) is not int:
        raise ProfileRefused(f"{PROFILE_FILE}: {first!r:.40} and {last!r:.40} are no steps")
    return _checked(first, last, f"{first}:{last}")


class Profiler:
    """Rank 0's: traces what is asked for, once per request and attempt.

    Args:
        run_dir: The run's directory.
        attempt: The attempt, whose artifact the trace is.
        sink: Where the artifact is told, and a request that came too late or means nothing.
    """

    def __init__(self, run_dir: Path, attempt: int, sink: Sink) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "attempts" / str(attempt) / "artifact" / _ARTIFACT
        self._sink = sink
        self._wanted: Wanted | None = None
        self._seen: bytes | None = None
        self._torch: Any = None

    def look(self, step: int) -> None:
        """Take up a request that is new, after `step` steps."""
        try:
            asked = (self._run_dir / PROFILE_FILE).read_bytes()
        except FileNotFoundError:
            return
        if asked == self._seen or self._torch is not None or self._folder.exists():
            return
        self._seen = asked
        try:
            wanted = read_profile(self._run_dir)
        except ProfileRefused as error:
            self._tell_refused(str(error))
            return
        if wanted is not None and wanted.first <= step:
            self._tell_refused(f"steps {wanted.first} to {wanted.last} were asked for after step {step}")
            return
        self._wanted = wanted

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around step `step` (from 1): traced when it is one of those."""
        wanted = self._wanted
        if wanted is None or not wanted.first <= step <= wanted.last:
            yield
            return
        # Costs a second to import.
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._torch is None:
            self._torch = profile(activities=[ProfilerActivity.CPU])
            self._torch.start()
        with record_function(f"step {step}"):
            yield
        if step == wanted.last:
            self.close()

    def close(self) -> None:
        """Write what was traced so far, if anything: after the last step asked for, or when training ends before."""
        traced, wanted = self._torch, self._wanted
        if traced is None or wanted is None:
            return
        self._torch = self._wanted = None
        traced.stop()
        try:
            self._write(traced, wanted)
        except OSError as error:
            # A trace is worth less than the training.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._tell_refused(f"it could not be written: {error}")

    def _write(self, traced: Any, wanted: Wanted) -> None:  # noqa: ANN401 - imported when it is needed
        name = f"rank-0.steps-{wanted.first}-{wanted.last}.json.gz"
        self._folder.mkdir(parents=True)
        path = self._folder / name
        traced.export_chrome_trace(str(path))
        entry = ManifestEntry(name, path.stat().st_size, digest_file(path), "application/gzip")
        manifest = Manifest((entry,), {"kind": "profile", "steps": [wanted.first, wanted.last]})
        (self._folder / "manifest.json").write_bytes(manifest.canonical())
        sync_folder(self._folder)
        told = {"name": _ARTIFACT, "manifest": manifest.digest, "path": str(self._folder.relative_to(self._run_dir))}
        self._sink.emit("artifact", {**told, "file": name, "bytes": entry.size})

    def _tell_refused(self, reason: str) -> None:
        self._sink.emit("error", {"rank": 0, "kind": "ProfileRefused", "message": f"no trace: {reason}", "stack": ""})


def _checked(first: int, last: int, text: str) -> Wanted:
    if not 1 <= first <= last:
        raise ProfileRefused(f"{text!r:.80}: steps are counted from 1, and the last is not before the first")
    if last - first >= MOST_STEPS:
        raise ProfileRefused(
            f"{text!r:.80} are {last - first + 1} steps; a trace of more than {MOST_STEPS} opens nowhere"
        )
    return Wanted(first, last)
