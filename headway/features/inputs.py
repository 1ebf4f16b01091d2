"""Pins the dataset versions that a snapshot reads, and reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headway.catalog import DatasetVersion, SnapshotInput
from headway.datasets.rows import dataset_name, pinned_rows
from headway.datasets.schema import arrow_schema
from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.services import Services


class InputMissing(HeadwayError):
    """A source partition in reach has no dataset version yet."""


@dataclass(frozen=True)
class PinnedVersion:
    """A version with the rows that its evidence kept back when it was pinned."""

    version: DatasetVersion
    quarantine_digest: str | None


@dataclass(frozen=True)
class Seen:
    """How much of a source's versions was read: rows known by `until`, the newest of which happened at `newest`."""

    until: int
    newest: int | None


@dataclass(frozen=True)
class PinnedInputs:
    """Versions read per source, quarantined partitions that were left out, and partitions that nobody required.

    `seen` holds the sources whose versions were read in part: what became known later was not there yet.
    """

    released: dict[str, tuple[PinnedVersion, ...]]
    skipped: dict[str, tuple[str, ...]]
    absent: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])

    def references(self) -> tuple[SnapshotInput, ...]:
        """The versions as the catalog records them."""
        return tuple(
            SnapshotInput(
                v.version.dataset,
                v.version.version,
                v.version.content_digest,
                v.version.evidence_digest or "",
                v.quarantine_digest,
            )
            for versions in self.released.values()
            for v in versions
        )

    def watermarks(self) -> dict[str, int | None]:
        """Newest instant of knowledge per source; None where nothing was seen or the table has no time."""
        found: dict[str, int | None] = {}
        for source, versions in self.released.items():
            seen = [v.version.watermark for v in versions if v.version.watermark is not None]
            found[source] = max(seen, default=None)
        return found | {source: part.newest for source, part in self.seen.items()}


def pin_inputs(
    services: Services,
    spec: PipelineSpec,
    reach: Mapping[str, Sequence[str]],
    label_partition: str,
    not_required: Mapping[str, Collection[str]] | None = None,
) -> PinnedInputs:
    """Current versions of every partition in reach, that of the rows which are learned from included.

    Partitions of `not_required` are read where they are released, and listed as absent where they have no version.

    Raises `InputMissing` naming every other partition without a version that has passed or failed validation.
    """
    wanted = {s: set(p) for s, p in reach.items()}
    wanted.setdefault(spec.learned_source, set()).add(label_partition)
    released: dict[str, tuple[PinnedVersion, ...]] = {}
    skipped: dict[str, tuple[str, ...]] = {}
    absent: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    for source, partitions in wanted.items():
        current = services.catalog.current_many(services.principal, dataset_name(spec.name, source), sorted(partitions))
        status = {p: current[p].status if p in current else "missing" for p in sorted(partitions)}
        released[source] = tuple(_pinned(current[p]) for p, s in status.items() if s == "released")
        skipped[source] = tuple(p for p, s in status.items() if s in ("quarantined", "retired"))
        unsettled = [p for p, s in status.items() if s not in _SETTLED]
        spared = set(not_required.get(source, ())) if not_required is not None else set[str]()
        absent[source] = tuple(p for p in unsettled if p in spared)
        missing += [f"{source} {p or '(whole table)'}" for p in unsettled if p not in spared]
    if missing:
        raise InputMissing(
            f"{len(missing)} source partitions in reach of {spec.name} {label_partition} have no released version: "
            f"{', '.join(missing[:10])}",
            "materialize them first",
        )
    return PinnedInputs(released, {s: p for s, p in skipped.items() if p}, {s: p for s, p in absent.items() if p})


def _pinned(version: DatasetVersion) -> PinnedVersion:
    return PinnedVersion(version, None if version.evidence is None else version.evidence.quarantine_digest)


_SETTLED = ("released", "quarantined", "retired")


class RowReader:
    """Reads rows of pinned versions; keeps the last few tables when told to, since neighbours share most inputs."""

    def __init__(self, services: Services, keep: int = 0) -> None:
        self._services = services
        self._keep = keep
        self._tables: dict[tuple[str, int, str | None], pa.Table] = {}

    def rows(self, spec: PipelineSpec, source: str, versions: Sequence[PinnedVersion]) -> pa.Table:
        """Rows of several versions of one source together."""
        tables = [t for t in (self._table(v) for v in versions) if t.num_rows]
        if not tables:
            return arrow_schema(spec.sources[source]).empty_table()
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    def _table(self, pinned: PinnedVersion) -> pa.Table:
        key = (pinned.version.dataset, pinned.version.version, pinned.quarantine_digest)
        if key in self._tables:
            self._tables[key] = self._tables.pop(key)
            return self._tables[key]
        table = pinned_rows(self._services, pinned.version, pinned.quarantine_digest)
        if self._keep:
            self._tables[key] = table
            while len(self._tables) > self._keep:
                del self._tables[next(iter(self._tables))]
        return table
