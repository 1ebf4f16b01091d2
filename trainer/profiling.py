"""A trace of chosen steps, as an artifact of the attempt that opens in Perfetto (https://ui.perfetto.dev).

`profile.json` in the run's directory asks for it: `{"steps": [first, last]}`, steps counted from 1 over the whole run,
both taken. It may be there when the training begins or come later; rank 0 looks for it with each step event. Nothing of
the run's identity depends on it, and a request whose steps have passed is told and done nothing about.

The trace is torch's, in Chrome's trace event format, packed with gzip; every step is a span named `step N`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.blobs import Manifest, ManifestEntry, digest_file, sync_folder
from trainer.profile_request import PROFILE_FILE, ProfileRefused, Wanted, read_profile

if TYPE_CHECKING:
    from trainer.checkpoint import Sink

_ARTIFACT = "profile"


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
