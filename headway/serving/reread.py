"""Reads what a prediction rested on again, and names what is no longer what was recorded: version, row, digest."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.artifacts.errors import BlobCorrupt, StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.catalog import DatasetVersion
from headway.catalog.errors import InvalidFact, UnknownVersion
from headway.datasets.canonical import may_be_shown
from headway.datasets.digest import digest_of_rows, row_digests
from headway.datasets.rows import ROWS_ENTRY, kept_positions, stored_rows
from headway.declaration import PipelineSpec
from headway.loading import Pipeline
from headway.services import Services
from headway.serving.detail import DetailGroup, PinnedRows, split_digests

ROWS_NAMED = 20


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was recorded: `place` names it (a dataset version, a row, a feature, a document)."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass
class ReadVersion:
    """A dataset version read again: its rows, their digests, and where each stands in the stored table."""

    pinned: PinnedRows
    version: DatasetVersion
    table: pa.Table
    digests: list[bytes]
    kept: NDArray[np.int64]


@dataclass
class Walk:
    """What the steps of one explanation share."""

    services: Services
    pipeline: Pipeline
    problems: list[Problem] = field(default_factory=list[Problem])

    def report(self, place: str, message: str) -> None:
        """Note a problem, once."""
        problem = Problem(place, message)
        if problem not in self.problems:
            self.problems.append(problem)

    def version(self, dataset: str, version: int) -> DatasetVersion | None:
        """A dataset version as the catalog has it; None, and a problem, when the catalog's facts contradict."""
        try:
            return self.services.catalog.version(self.services.principal, dataset, version)
        except (InvalidFact, UnknownVersion) as error:
            self.report(f"{dataset} version {version}", str(error))
            return None


def read_inputs(walk: Walk, group: DetailGroup | None) -> list[ReadVersion] | None:
    """Every dataset version of a group, read again and checked; None when one of them is not what it was."""
    if group is None:
        return None
    reads = [_read_version(walk, pinned) for pinned in group.inputs]
    return None if any(r is None for r in reads) else [r for r in reads if r is not None]


def _read_version(walk: Walk, pinned: PinnedRows) -> ReadVersion | None:
    services, place = walk.services, f"{pinned.dataset} version {pinned.version}"
    version = walk.version(pinned.dataset, pinned.version)
    if version is None:
        return None
    place = f"{place} ({version.partition})" if version.partition else place
    if version.content_digest != pinned.content_digest:
        walk.report(
            place, f"the prediction read content {pinned.content_digest}, the catalog: {version.content_digest}"
        )
    try:
        recorded = split_digests(services.store.get_bytes(pinned.row_digests))
    except StoreError as error:
        walk.report(f"{place}, recorded row digests", str(error))
        return None
    spec = walk.pipeline.spec
    try:
        table = stored_rows(services, version)
        kept = kept_positions(services, table.num_rows, pinned.quarantine_digest)
    except (StoreError, InvalidManifest, pa.ArrowException, OSError, KeyError, IndexError) as error:
        walk.report(place, str(error))
        table = _unverified_rows(services, version, error)
        if table is not None:
            _report_rows(walk, spec, pinned.source, place, table, _digests_of(table), recorded)
        return None
    digests = row_digests(table)
    found = digest_of_rows(digests, version.facts.schema_hash)
    if found != pinned.content_digest or digests != recorded:
        walk.report(place, f"its rows have content digest {found}, the prediction read {pinned.content_digest}")
        _report_rows(walk, spec, pinned.source, place, table, digests, recorded)
        return None
    return ReadVersion(pinned, version, table, digests, kept)


def _unverified_rows(services: Services, version: DatasetVersion, error: Exception) -> pa.Table | None:
    """What an altered file says, to name the altered rows; nothing is computed from it."""
    if not isinstance(error, BlobCorrupt):
        return None
    try:
        digest = read_manifest(services.store, version.manifest_digest).entry(ROWS_ENTRY).sha256
        data = (services.store.root / "sha256" / digest[7:9] / digest[9:]).read_bytes()
        return pq.read_table(io.BytesIO(data))
    except (StoreError, InvalidManifest, pa.ArrowException, OSError):
        # The first report says that the bytes are not the recorded ones; here they are not even rows.
        return None


def _digests_of(table: pa.Table) -> list[bytes]:
    try:
        return row_digests(table)
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError):
        return []


def _report_rows(
    walk: Walk,
    spec: PipelineSpec,
    source: str,
    place: str,
    table: pa.Table,
    digests: Sequence[bytes],
    recorded: Sequence[bytes],
) -> None:
    """Name rows that are not the recorded ones, and recorded ones that are gone."""
    known = set(recorded)
    for position in [i for i, d in enumerate(digests) if d not in known][:ROWS_NAMED]:
        identity = ", ".join(f"{c}={v}" for c, v in identity_of(spec, source, table, position).items())
        before = recorded[position].hex() if position < len(recorded) else "nothing"
        walk.report(
            f"{place}, row {position + 1} ({identity})",
            f"its digest is sha256:{digests[position].hex()}, recorded at this place is sha256:{before}",
        )
    if len(digests) != len(recorded):
        walk.report(place, f"{len(digests)} rows, recorded are {len(recorded)}")
    elif set(digests) == known and list(digests) != list(recorded):
        walk.report(place, "the same rows stand in another order than recorded")


def identity_of(spec: PipelineSpec, source: str, table: pa.Table, position: int) -> dict[str, str]:
    """The row identity of a row of a source's table; values that nobody may see are withheld."""
    declared = spec.sources[source]
    found: dict[str, str] = {}
    for column in declared.row_id:
        if column in table.column_names:
            value = table.column(column)[position].as_py()
            found[column] = str(value) if may_be_shown(column, declared) else "(withheld)"
    return found
