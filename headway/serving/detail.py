"""What is kept beside recorded predictions: requests, feature values, and the digest of every raw row within reach.

One document per batch, a manifest in the store: `inputs.json` (the pinned dataset versions of each group of rows, and
the digests of contract, code and model), `requests.parquet` (with the group of each row), `values.parquet`,
`outputs.json` (what was answered, row by row), and per dataset version the 32-byte digests of its rows in stored order.
The content digest names a version as a whole; the row digests say which row was altered when it no longer holds.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from headway.artifacts.manifest import Manifest, manifest_entry, put_manifest, read_manifest
from headway.artifacts.store import Blob
from headway.catalog import DatasetVersion
from headway.datasets.digest import digest_of_rows, row_digests
from headway.datasets.rows import stored_rows
from headway.errors import HeadwayError
from headway.features.assemble import parquet_bytes
from headway.features.inputs import PinnedInputs, Seen
from headway.services import Services
from headway.serving.features import ComputedRequests
from trainer.blobs import Json, canonical_json

FORMAT = "headway.prediction/2"
GROUP = "__group"
DIGEST_BYTES = 32

RowDigests = dict[tuple[str, int], list[bytes]]


class InputAltered(HeadwayError):
    """The stored rows of a dataset version are not those that its content digest names."""


@dataclass(frozen=True)
class PinnedRows:
    """A dataset version as a prediction read it; `row_digests` names the stored digests of its rows."""

    dataset: str
    version: int
    content_digest: str
    evidence_digest: str
    quarantine_digest: str | None
    row_digests: str

    @property
    def source(self) -> str:
        """The source's name."""
        return self.dataset.partition("/")[2]


@dataclass(frozen=True)
class DetailGroup:
    """The rows of one label partition: what was read, what was left out, what did not exist.

    `seen` names the sources of which only what was available by an instant had been read.
    """

    partition: str
    inputs: tuple[PinnedRows, ...]
    skipped: Mapping[str, tuple[str, ...]]
    absent: Mapping[str, tuple[str, ...]]
    seen: Mapping[str, Seen] = field(default_factory=dict[str, Seen])


@dataclass(frozen=True)
class Detail:
    """A stored document, read back. `requests` has a last column with the index of each row's group.

    `outputs` holds what was answered to each row.
    """

    facts: Mapping[str, Any]
    groups: tuple[DetailGroup, ...]
    requests: pa.Table
    values: pa.Table
    outputs: tuple[Json, ...]

    def group_rows(self, group: int) -> list[int]:
        """Positions of the rows of a group, in the order in which they were computed."""
        return [i for i, g in enumerate(self.requests.column(GROUP).to_pylist()) if g == group]


def verified_inputs(services: Services, computed: ComputedRequests) -> RowDigests:
    """The digest of each stored row of every dataset version that the requests were computed from.

    Raises:
        InputAltered: a version is not what its content digest says.
    """
    found: RowDigests = {}
    for group in computed.groups:
        for versions in group.inputs.released.values():
            for pinned in versions:
                key = (pinned.version.dataset, pinned.version.version)
                if key not in found:
                    found[key] = _row_digests(services, pinned.version)
    return found


def put_detail(
    services: Services,
    computed: ComputedRequests,
    digests: RowDigests,
    facts: Mapping[str, Json],
    outputs: Sequence[Json],
) -> tuple[str, tuple[Blob, ...]]:
    """Store the document of a batch: its digest, and all of its blobs.

    Args:
        services: the store.
        computed: requests and feature values.
        digests: what `verified_inputs` gave.
        facts: who answered, with what.
        outputs: what was answered, in the order of the requests.
    """
    rows = {key: services.store.put_bytes(b"".join(found)) for key, found in digests.items()}
    groups: list[Json] = [_group_document(group.partition, group.inputs, rows) for group in computed.groups]
    requests = computed.requests.append_column(GROUP, pa.array(computed.group_of()))
    inputs = canonical_json({"format": FORMAT, **facts, "groups": groups})
    named = {
        "inputs.json": services.store.put_bytes(inputs, "application/json"),
        "requests.parquet": services.store.put_bytes(parquet_bytes(requests), "application/vnd.apache.parquet"),
        "values.parquet": services.store.put_bytes(parquet_bytes(computed.values), "application/vnd.apache.parquet"),
        "outputs.json": services.store.put_bytes(canonical_json(list(outputs)), "application/json"),
    }
    named |= {f"row_digests/{dataset}/{version}": blob for (dataset, version), blob in rows.items()}
    entries = tuple(manifest_entry(name, blob) for name, blob in named.items())
    manifest = put_manifest(services.store, Manifest(entries, {"kind": "prediction_detail"}))
    return manifest.digest, (*dict.fromkeys(named.values()), manifest)


def read_detail(services: Services, digest: str) -> Detail:
    """Read a document back; every byte is verified. Raises the store's errors."""
    manifest = read_manifest(services.store, digest)
    parts = {n: services.store.get_bytes(manifest.entry(n).sha256) for n in _PARTS}
    facts = cast("dict[str, Any]", json.loads(parts["inputs.json"]))
    groups = tuple(
        DetailGroup(
            partition=g["partition"],
            inputs=tuple(PinnedRows(**i) for i in g["inputs"]),
            skipped={s: tuple(p) for s, p in g["skipped"].items()},
            absent={s: tuple(p) for s, p in g["absent"].items()},
            seen={s: Seen(**part) for s, part in g.get("seen", {}).items()},
        )
        for g in facts.pop("groups")
    )
    tables = [pq.read_table(io.BytesIO(parts[n])) for n in ("requests.parquet", "values.parquet")]
    outputs: list[Json] = json.loads(parts["outputs.json"])
    return Detail(facts, groups, tables[0], tables[1], tuple(outputs))


_PARTS = ("inputs.json", "requests.parquet", "values.parquet", "outputs.json")


def _row_digests(services: Services, version: DatasetVersion) -> list[bytes]:
    digests = row_digests(stored_rows(services, version))
    found = digest_of_rows(digests, version.facts.schema_hash)
    if found != version.content_digest:
        raise InputAltered(
            f"{version.dataset} version {version.version} ({version.partition}) holds rows with content digest "
            f"{found}, the catalog says {version.content_digest}",
            "restore its blobs from a copy; nothing is answered from altered rows",
        )
    return digests


def split_digests(data: bytes) -> list[bytes]:
    """The row digests of a stored run of them."""
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


def _group_document(partition: str, inputs: PinnedInputs, digests: Mapping[tuple[str, int], Blob]) -> Json:
    pinned: Sequence[Json] = [
        {
            "dataset": i.dataset,
            "version": i.version,
            "content_digest": i.content_digest,
            "evidence_digest": i.evidence_digest,
            "quarantine_digest": i.quarantine_digest,
            "row_digests": digests[(i.dataset, i.version)].digest,
        }
        for i in inputs.references()
    ]
    document: dict[str, Json] = {
        "partition": partition,
        "inputs": pinned,
        "skipped": {s: list(p) for s, p in inputs.skipped.items()},
        "absent": {s: list(p) for s, p in inputs.absent.items()},
    }
    seen: dict[str, Json] = {s: {"until": p.until, "newest": p.newest} for s, p in inputs.seen.items()}
    return document | ({"seen": seen} if seen else {})
