"""Small, valid facts for catalog tests; a test changes only what it is about."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from headway.artifacts.digests import digest_json
from headway.artifacts.store import Blob, LocalStore
from headway.catalog import (
    DatasetVersion,
    DatasetVersionFacts,
    Evidence,
    FeatureSetFacts,
    Principal,
    SnapshotFacts,
    SnapshotInput,
)

ALICE = Principal("acme", "alice")
MALLORY = Principal("rival", "mallory")


@dataclass
class Ticker:
    """A clock that moves by one second at each look."""

    now: int = 1_370_000_000_000_000
    step: int = field(default=1_000_000)

    def __call__(self) -> int:
        self.now += self.step
        return self.now


def payload(*parts: object) -> bytes:
    """The bytes that stand for a named thing."""
    return repr(parts).encode()


def blob(*parts: object, store: LocalStore | None = None) -> Blob:
    """The blob of a named thing, stored when a store is given."""
    data = payload(*parts)
    if store is not None:
        return store.put_bytes(data)
    return Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))


def digest(*parts: object) -> str:
    """The digest of a named thing."""
    return blob(*parts).digest


def delivery(
    dataset: str = "flights",
    partition: str = "2013-06-01",
    content: object = 1,
    **changes: Any,  # noqa: ANN401
) -> DatasetVersionFacts:
    """A delivery whose identity follows from dataset, partition and content."""
    manifest = blob("manifest", dataset, partition, content)
    values: dict[str, Any] = {
        "dataset": dataset,
        "partition": partition,
        "content_digest": digest("content", dataset, partition, content),
        "schema_hash": digest("schema", dataset),
        "manifest_digest": manifest.digest,
        "rows": 3,
        "event_time_min": 1,
        "event_time_max": 9,
        "watermark": 10,
        "privacy": "public",
        "reason": None,
        "source_digest": digest("raw", dataset, partition, content),
        "run_id": None,
        "blobs": (manifest,),
        "metadata": {"columns": ["a", "b"], "share": 0.5},
    }
    return DatasetVersionFacts(**values | changes)


def evidence(suite: object = "suite", found: object = "good", **changes: Any) -> Evidence:  # noqa: ANN401
    """Evidence of a suite that evaluated four expectations."""
    report = blob("report", suite, found)
    values: dict[str, Any] = {
        "suite_digest": digest("suite", suite),
        "report_digest": report.digest,
        "evaluated": 4,
        "failed": 0,
        "quarantined_rows": 0,
        "quarantine_digest": None,
        "reason": str(found),
        "blobs": (report,),
    }
    return Evidence(**values | changes)


def feature_set(name: str = "delay", contract: object = 1) -> FeatureSetFacts:
    """A feature contract."""
    form = {"name": name, "contract": str(contract)}
    return FeatureSetFacts(name, digest_json(form), digest("code"), form)


def snapshot(
    inputs: tuple[DatasetVersion, ...],
    partition: str = "2013-06-01",
    content: object = 1,
    pipeline: str = "flight_delay",
    **changes: Any,  # noqa: ANN401
) -> SnapshotFacts:
    """A proved snapshot of these inputs under version 1 of feature set `delay`."""
    manifest = blob("snapshot manifest", partition, content)
    values: dict[str, Any] = {
        "pipeline": pipeline,
        "partition": partition,
        "feature_set": "delay",
        "feature_set_version": 1,
        "inputs": tuple(
            SnapshotInput(v.dataset, v.version, v.content_digest, v.evidence_digest or digest("no evidence"))
            for v in inputs
        ),
        "content_digest": digest("snapshot", content),
        "manifest_digest": manifest.digest,
        "rows": 2,
        "as_of_min": 1,
        "as_of_max": 8,
        "source_watermarks": {v.dataset: v.watermark for v in inputs},
        "proof_digest": digest("proof", content),
        "proof_passed": True,
        "excluded": {"cancelled": 1},
        "run_id": None,
        "blobs": (manifest,),
        "metadata": {},
    }
    return SnapshotFacts(**values | changes)
