"""What a finished attempt left behind: artifacts read back, verified and stored, and the metrics that it reported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import put_manifest, read_manifest, stored_file_problem
from headway.artifacts.store import Blob
from headway.errors import HeadwayError
from headway.services import Services
from headway.training.claims import claimed_level
from headway.training.launch import Launcher
from trainer.blobs import InvalidManifest, Json, Manifest, ManifestEntry, digest_bytes, parse_manifest
from trainer.spec import RunSpec, parse_run

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, RunResult, TrainingRun

MANIFEST_FILE = "manifest.json"
_PAGE = 1_000


class ArtifactInvalid(HeadwayError):
    """An artifact that a run reported is missing, incomplete or not what its manifest says."""


def collect_result(services: Services, launcher: Launcher, run: TrainingRun, attempt: int) -> RunResult:
    """Store every artifact that the attempt reported, and sum up what it measured.

    Raises:
        ArtifactInvalid: nothing was reported, a node never reported its end, or a file differs from its manifest.
    """
    from headway.catalog.run_facts import RunResult

    events = _events(services, run.run_id, attempt)
    ended = {e.node for e in events if e.kind == "node_end" and e.node is not None}
    nodes = next(a.layout["nodes"] for a in run.attempts if a.attempt == attempt)
    if not isinstance(nodes, int) or len(ended) < nodes:
        raise ArtifactInvalid(f"only nodes {sorted(ended)} of {nodes} reported their end", "the attempt is not trusted")
    artifacts: dict[str, str] = {}
    blobs: list[Blob] = []
    for event in events:
        if event.kind == "artifact":
            name = str(event.data["name"])
            manifest, stored = _store(services, launcher.artifact_dir(run.run_id, attempt, name))
            if manifest.digest != event.data["manifest"]:
                raise ArtifactInvalid(
                    f"artifact {name!r} has manifest {manifest.digest}, the run reported {event.data['manifest']}",
                    "it was changed after it was written",
                )
            artifacts[name] = manifest.digest
            blobs += stored
    if not artifacts:
        raise ArtifactInvalid("it reported no artifact", "look at `headway runs logs`")
    best = [e.data.get("step") for e in events if e.kind == "checkpoint" and e.data.get("kind") == "best"]
    return RunResult(
        artifacts=artifacts,
        metrics={**_last_metrics(events), "claimed_level": claimed_level(_spec(services, run), run.attempts)},
        best_step=best[-1] if best and isinstance(best[-1], int) else None,
        blobs=tuple({b.digest: b for b in blobs}.values()),
    )


def verify_stored(services: Services, run: TrainingRun) -> str:
    """What is wrong with the stored artifacts of a succeeded run; "" when every file is what its manifest says."""
    assert run.result is not None
    for name, digest in run.result.artifacts.items():
        try:
            manifest = read_manifest(services.store, digest)
        except (StoreError, InvalidManifest) as error:
            return f"artifact {name!r}: {error}"
        for entry in manifest.entries:
            if problem := stored_file_problem(services.store, entry):
                return f"artifact {name!r}, file {entry.name}: {problem}"
    return ""


def _events(services: Services, run_id: str, attempt: int) -> list[RunEvent]:
    found: list[RunEvent] = []
    after = 0
    while page := services.catalog.run_events(
        services.principal,
        run_id,
        attempt=attempt,
        after=after,
        limit=_PAGE,
        kinds=("artifact", "checkpoint", "metrics", "node_end"),
    ):
        found += page
        after = page[-1].seq
        if len(page) < _PAGE:
            break
    return found


def _spec(services: Services, run: TrainingRun) -> RunSpec:
    return parse_run(services.store.get_bytes(run.facts.spec_digest))


def _last_metrics(events: list[RunEvent]) -> Mapping[str, Json]:
    reported = [e.data for e in events if e.kind == "metrics"]
    return dict(reported[-1]) if reported else {}


def _store(services: Services, folder: Path) -> tuple[Manifest, list[Blob]]:
    """Verify a folder against its manifest and store every file of it; the files themselves stay.

    What is stored is what was read: a file that changes meanwhile gets another digest, and is refused.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes())
        names = {entry.name for entry in manifest.entries}
        extra = sorted(p.name for p in folder.iterdir() if p.name not in {*names, MANIFEST_FILE})
        if extra:
            raise ArtifactInvalid(
                f"{folder.name!r} holds {len(extra)} files that are not listed: {extra[:5]}", "train again"
            )
        blobs = [_store_file(services, folder, entry) for entry in manifest.entries]
    except (OSError, InvalidManifest) as error:
        raise ArtifactInvalid(f"{folder.name!r} cannot be read as an artifact: {error}", "train again") from error
    return manifest, [*blobs, put_manifest(services.store, manifest)]


def _store_file(services: Services, folder: Path, entry: ManifestEntry) -> Blob:
    path = folder / entry.name
    if path.is_symlink() or not path.is_file():
        raise ArtifactInvalid(f"{folder.name}/{entry.name} is no plain file", "train again")
    data = path.read_bytes()
    if digest_bytes(data) != entry.sha256:
        raise ArtifactInvalid(f"{folder.name}/{entry.name} is not what its manifest says", "train again")
    return services.store.put_bytes(data, entry.media_type)
