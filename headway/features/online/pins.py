"""What an online store was filled from: the pinned dataset versions, as a document in the store of artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.features.inputs import PinnedInputs, PinnedVersion, Seen
from headway.features.online.store import OnlineState, PartitionMark
from headway.features.reach import Interval, partitions_in_reach
from headway.services import Services
from headway.serving.features import RequestGroup, by_partition
from trainer.blobs import Json, canonical_json

FORMAT = "headway.online_pins/1"


class PinsUnreadable(HeadwayError):
    """A digest names no pins document."""


@dataclass(frozen=True)
class Pins:
    """Per source: the pinned partitions, those left out because they are quarantined, and how far rows were loaded.

    `known_until` is the instant (int64 microseconds UTC) up to which known rows are loaded.
    """

    pipeline: str
    feature_set: str
    feature_set_version: int
    marks: Mapping[str, tuple[PartitionMark, ...]]
    skipped: Mapping[str, tuple[str, ...]]
    known_until: Mapping[str, int]


def pins_of(state: OnlineState, marks: Sequence[PartitionMark]) -> Pins:
    """The pins of a state."""
    by_source: dict[str, list[PartitionMark]] = {s: [] for s in state.known_until}
    for mark in marks:
        by_source.setdefault(mark.source, []).append(mark)
    return Pins(
        state.pipeline,
        state.feature_set,
        state.feature_set_version,
        {s: tuple(m) for s, m in by_source.items()},
        state.skipped,
        state.known_until,
    )


def put_pins(services: Services, pins: Pins) -> str:
    """Store the document and return its digest."""
    sources: dict[str, Json] = {
        source: {
            "known_until": pins.known_until[source],
            "pinned": [asdict(m) for m in pins.marks.get(source, ())],
            "skipped": list(pins.skipped.get(source, ())),
        }
        for source in pins.known_until
    }
    document: Json = {
        "format": FORMAT,
        "pipeline": pins.pipeline,
        "feature_set": pins.feature_set,
        "feature_set_version": pins.feature_set_version,
        "sources": sources,
    }
    return services.store.put_bytes(canonical_json(document), "application/json").digest


def read_pins(services: Services, digest: str) -> Pins:
    """Read the document back.

    Raises:
        PinsUnreadable: the bytes are no pins document.
        BlobMissing, BlobCorrupt: as the store says.
    """
    document: dict[str, Any] = json.loads(services.store.get_bytes(digest))
    if document.get("format") != FORMAT:
        raise PinsUnreadable(f"{digest} is no document of format {FORMAT}", "take the digest from an online state")
    sources: dict[str, Any] = document["sources"]
    return Pins(
        document["pipeline"],
        document["feature_set"],
        document["feature_set_version"],
        {s: tuple(PartitionMark(**m) for m in d["pinned"]) for s, d in sources.items()},
        {s: tuple(d["skipped"]) for s, d in sources.items() if d["skipped"]},
        {s: d["known_until"] for s, d in sources.items()},
    )


def in_reach(spec: PipelineSpec, pins: Pins, first: int, last: int) -> PinnedInputs:
    """What observations of an interval rest on, without the versions themselves: what the flags of cells need."""
    skipped: dict[str, tuple[str, ...]] = {}
    absent: dict[str, tuple[str, ...]] = {}
    for source, partitions in partitions_in_reach(spec, Interval(first, last)).items():
        held = {m.partition for m in pins.marks.get(source, ())}
        out = pins.skipped.get(source, ())
        skipped[source] = tuple(p for p in partitions if p in out)
        absent[source] = tuple(p for p in partitions if p not in held and p not in out)
    return PinnedInputs(
        {}, {s: p for s, p in skipped.items() if p}, {s: p for s, p in absent.items() if p}, seen_of(pins)
    )


def seen_of(pins: Pins) -> dict[str, Seen]:
    """How much of each source was loaded. It is the same for all observations of one state."""
    return {
        source: Seen(until, max((m.newest for m in pins.marks.get(source, ()) if m.newest is not None), default=None))
        for source, until in pins.known_until.items()
    }


def groups_of(
    services: Services, spec: PipelineSpec, pins: Pins, observed: NDArray[np.int64], requests: pa.Table
) -> tuple[RequestGroup, ...]:
    """The groups in which `compute_features` would compute requests, with the versions that the store had pinned.

    Args:
        services: the catalog that holds the versions.
        spec: the declaration.
        pins: what `read_pins` gave for the state that answered.
        observed: the observation of each request, microseconds UTC.
        requests: the requests, as they came or as they are kept.

    Raises:
        UnknownVersion: the catalog has no such version.
    """
    groups: list[RequestGroup] = []
    for partition, rows in by_partition(spec, observed, requests):
        first, last = int(observed[rows].min()), int(observed[rows].max())
        rests = in_reach(spec, pins, first, last)
        released: dict[str, tuple[PinnedVersion, ...]] = {}
        for source, partitions in partitions_in_reach(spec, Interval(first, last)).items():
            released[source] = tuple(
                PinnedVersion(services.catalog.version(services.principal, m.dataset, m.version), m.quarantine_digest)
                for m in pins.marks.get(source, ())
                if m.partition in partitions
            )
        groups.append(RequestGroup(partition, rows, PinnedInputs(released, rests.skipped, rests.absent, rests.seen)))
    return tuple(groups)
