"""Keeps an online store current with the released dataset versions, up to a time.

One commit per source partition that only adds rows known since the last sync; the state moves last. Whatever would
change what an older observation sees (another version of a partition, one that is no longer released, one that came
late, pruning) waits for the last commit, so that a reader never finds a mixture. A killed sync leaves a store that
answers as before, and the next one ends where an undisturbed one would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.catalog import DatasetVersion, FeatureSetFacts, FeatureSetVersion
from headway.datasets.partitions import PartitionScheme
from headway.datasets.rows import dataset_name, pinned_rows
from headway.declaration import SourceSpec
from headway.features.clocks import clock_of
from headway.features.contract import code_digest, contract, contract_digest
from headway.features.inputs import InputMissing
from headway.features.online.pins import pins_of, put_pins
from headway.features.online.scopes import Scopes, entities, row_versions, scopes_of
from headway.features.online.store import (
    Change,
    OnlineState,
    OnlineStore,
    PartitionMark,
    RowVersion,
    StoreKey,
    Subject,
)
from headway.features.plan import ValueNotExact, compile_plan
from headway.features.reach import WHOLE_TABLE, bounds, longest_memory
from headway.loading import Pipeline
from headway.services import Services

SLACK_US = 86_400_000_000
_NEVER = np.iinfo(np.int64).min
_TABLES_KEPT = 12


@dataclass(frozen=True)
class SyncReport:
    """What a sync did: `clipped` says that a time in the future was asked for and not taken.

    `rows_read` counts rows of the dataset versions that were read, `rows_written` row versions new to the store (one
    per scope). `skipped` names the quarantined or retired partitions of each source that were left out.
    """

    state: OnlineState
    rows_read: int
    rows_written: int
    versions_read: int
    held: tuple[str, ...]
    clipped: bool
    skipped: Mapping[str, tuple[str, ...]]
    seconds: float


def sync_online(
    services: Services,
    pipeline: Pipeline,
    online: OnlineStore,
    *,
    until: int | None = None,
    hold: Collection[str] = (),
    retain: int = 0,
) -> SyncReport:
    """Load what is known by `until` and bring corrections of pinned partitions; drop what no observation can need.

    Args:
        services: datasets, artifacts, and the world's clock.
        pipeline: whose features.
        online: the store.
        until: microseconds UTC, the world's time by default. A later one is clipped to it and said; one before the
            store's own brings corrections only, since what is loaded stays.
        hold: sources that are not advanced.
        retain: microseconds before `until` (and a day of slack) for whose observations rows are kept.

    Raises:
        InputMissing: a table without partitions has no version.
        ValueNotExact: a declared sequence is null in some row.
        OnlineBusy: another process fills the store.
        OnlineUnavailable: the store cannot be used.
    """
    started = perf_counter()
    now = services.world()
    wanted = now if until is None else min(until, now)
    version = _feature_set(services, pipeline)
    key = StoreKey(services.principal.tenant, pipeline.spec.name, version.version)
    with online.syncing(key):
        before = next((s for s in online.states(key.tenant, key.pipeline) if _is_of(s, version)), None)
        end = wanted if before is None else max(wanted, before.until)
        sync = _Sync(services, pipeline, online, key, before, end, end - SLACK_US - retain)
        state = sync.run(version, tuple(s for s in sync.scopes.sources if s in hold))
    return SyncReport(
        state,
        sync.rows_read,
        sync.rows_written,
        sync.versions_read,
        tuple(s for s in sync.scopes.sources if s in hold),
        until is not None and until > now,
        state.skipped,
        perf_counter() - started,
    )


def _feature_set(services: Services, pipeline: Pipeline) -> FeatureSetVersion:
    facts = FeatureSetFacts(pipeline.spec.name, contract_digest(pipeline), code_digest(pipeline), contract(pipeline))
    return services.catalog.register_feature_set(services.principal, None, facts)


def _is_of(state: OnlineState, version: FeatureSetVersion) -> bool:
    return state.feature_set_version == version.version


@dataclass(frozen=True)
class _Brought:
    """A source after its turn: what is pinned, what is quarantined, what nobody delivered, and up to which instant."""

    marks: list[PartitionMark]
    skipped: tuple[str, ...]
    absent: tuple[str, ...]
    covered: int | None


@dataclass
class _Sync:
    """One run over all sources."""

    services: Services
    pipeline: Pipeline
    online: OnlineStore
    key: StoreKey
    before: OnlineState | None
    until: int
    since: int
    rows_read: int = 0
    rows_written: int = 0
    versions_read: int = 0
    scopes: Scopes = field(init=False)
    _subjects: dict[str, Subject] = field(init=False)
    _erased: frozenset[tuple[Subject, bytes]] = field(init=False)
    _late: list[Change] = field(default_factory=list[Change])

    def __post_init__(self) -> None:
        self.scopes = scopes_of(compile_plan(self.pipeline))
        self._subjects = {s.scope_id: s.subject for s in self.scopes.all}
        self._erased = self.online.erased(self.key.tenant, self.key.pipeline)

    def run(self, version: FeatureSetVersion, hold: Collection[str]) -> OnlineState:
        """Bring every source, then move the state."""
        held: dict[str, dict[str, PartitionMark]] = {}
        for mark in self.online.marks(self.key):
            held.setdefault(mark.source, {})[mark.partition] = mark
        skipped: dict[str, tuple[str, ...]] = {}
        absent: dict[str, tuple[str, ...]] = {}
        covered: dict[str, int] = {}
        known_until: dict[str, int] = {}
        marks: list[PartitionMark] = []
        for source in self.scopes.sources:
            if source in hold:
                known_until[source] = self._known_until(source)
                marks += held.get(source, {}).values()
                if self.before is not None:
                    skipped |= _of(source, self.before.skipped)
                    absent |= _of(source, self.before.absent)
                    covered |= _of(source, self.before.covered)
                continue
            known_until[source] = self.until
            found = self._source(source, held.get(source, {}))
            marks += found.marks
            skipped |= {source: found.skipped} if found.skipped else {}
            absent |= {source: found.absent} if found.absent else {}
            covered |= {} if found.covered is None else {source: found.covered}
        state = OnlineState(
            pipeline=self.key.pipeline,
            feature_set=version.facts.feature_set,
            feature_set_version=version.version,
            until=self.until,
            watermarks={s: _newest(m for m in marks if m.source == s) for s in self.scopes.sources},
            inputs_digest="",
            sequence=0,
            since=self.since,
            known_until=known_until,
            contract_digest=version.facts.contract_digest,
            code_digest=version.facts.code_digest,
            skipped=skipped,
            absent=absent,
            covered=covered,
        )
        state = replace(state, inputs_digest=put_pins(self.services, pins_of(state, marks)))
        last = Change(
            emptied=[e for change in self._late for e in change.emptied],
            rows=[r for change in self._late for r in change.rows],
            marks=[m for change in self._late for m in change.marks],
            dropped_marks=[d for change in self._late for d in change.dropped_marks],
            state=state,
            subjects=self._subjects,
        )
        self.rows_written += self.online.apply(self.key, last)
        return next(
            replace(s, marks=tuple(marks))
            for s in self.online.states(self.key.tenant, self.key.pipeline)
            if _is_of(s, version)
        )

    def _known_until(self, source: str) -> int:
        """Up to when rows of a source are loaded as readers see it."""
        return _NEVER if self.before is None else self.before.known_until.get(source, _NEVER)

    def _source(self, source: str, held: Mapping[str, PartitionMark]) -> _Brought:
        """Bring one source."""
        spec = self.pipeline.spec
        declared = spec.sources[source]
        partitions = self._partitions(source, declared)
        dataset = dataset_name(spec.name, source)
        current = self.services.catalog.current_many(self.services.principal, dataset, partitions)
        if declared.partition is None and not any(_is_settled(v) for v in current.values()):
            raise InputMissing(
                f"{source} of {spec.name} has no released version", "ingest it; online features need whole tables"
            )
        marks: list[PartitionMark] = []
        for partition in partitions:
            version = current.get(partition)
            mark = held.get(partition)
            if version is not None and version.status == "released":
                marks.append(self._partition(source, declared, version, mark))
            elif mark is not None:
                self._drop(source, partition)
        for partition in held:
            if partition not in partitions:
                self._drop(source, partition)
        skipped = tuple(p for p in partitions if p in current and current[p].status in ("quarantined", "retired"))
        absent = tuple(p for p in partitions if p not in current or not _is_settled(current[p]))
        covered = None
        if declared.partition is not None and partitions:
            covered = PartitionScheme.from_spec(declared.partition).window(partitions[-1])[1]
        return _Brought(marks, skipped, absent, covered)

    def _partitions(self, source: str, declared: SourceSpec) -> tuple[str, ...]:
        """Partitions whose rows an observation from `since` on may see, as far as they have begun."""
        if declared.partition is None:
            return (WHOLE_TABLE,)
        before, after = bounds(declared)
        first = self.since - longest_memory(self.pipeline.spec, source) - after
        return tuple(PartitionScheme.from_spec(declared.partition).keys_between(first, self.until + before))

    def _drop(self, source: str, partition: str) -> None:
        emptied = [(s.scope_id, partition) for s in self.scopes.of_source(source)]
        self._late.append(Change(emptied=emptied, dropped_marks=[(source, partition)]))

    def _partition(
        self, source: str, declared: SourceSpec, version: DatasetVersion, mark: PartitionMark | None
    ) -> PartitionMark:
        """Bring one partition to its current version and to `until`."""
        quarantine = None if version.evidence is None else version.evidence.quarantine_digest
        same = mark is not None and (mark.version, mark.quarantine_digest) == (version.version, quarantine)
        if mark is not None and same and (mark.complete or mark.until >= self.until):
            return mark
        loaded = mark.until if mark is not None and same else _NEVER
        table = self._read(source, declared, version, quarantine)
        rows, first, complete = self._rows(source, declared, version, table, loaded)
        emptied = (
            [] if mark is None or same else [(s.scope_id, version.partition) for s in self.scopes.of_source(source)]
        )
        moved = PartitionMark(
            source=source,
            partition=version.partition,
            dataset=version.dataset,
            version=version.version,
            content_digest=version.content_digest,
            evidence_digest=version.evidence_digest or "",
            quarantine_digest=quarantine,
            until=self.until,
            newest=self._newest_event(declared, version, table, complete=complete),
            complete=complete,
        )
        change = Change(emptied=emptied, rows=rows, marks=[moved], subjects=self._subjects)
        if emptied or first <= self._known_until(source):
            self._late.append(change)
        else:
            self.rows_written += self.online.apply(self.key, change)
        return moved

    def _read(self, source: str, declared: SourceSpec, version: DatasetVersion, quarantine: str | None) -> pa.Table:
        scopes = self.scopes.of_source(source)
        wanted = [*declared.row_id, *(c for s in scopes for c in (*s.keys, *s.columns))]
        clocks = [*(s.clock for s in scopes), clock_of(declared)]
        wanted += [c for clock in clocks for c in (clock.event, clock.available) if isinstance(c, str)]
        wanted += [c for c in (declared.sequence, declared.deleted) if c is not None]
        wanted += [c for (of, columns), _ in self._erased if of == source for c in columns]
        table = _cached_rows(self.services, version, quarantine, tuple(sorted(set(wanted))))
        self.versions_read += 1
        self.rows_read += table.num_rows
        return table

    def _rows(
        self, source: str, declared: SourceSpec, version: DatasetVersion, table: pa.Table, loaded: int
    ) -> tuple[list[RowVersion], int, bool]:
        """Rows available after `loaded` and by `until`, the first such instant, and whether all rows are in.

        Availability decides, not the event: a correction supersedes from when it is available, even if it moves the
        event into the future.
        """
        if declared.sequence is not None and table.column(declared.sequence).null_count:
            nulls = table.column(declared.sequence).null_count
            raise ValueNotExact(
                f"sequence column {declared.sequence!r} is null in {nulls} rows, so their order is undefined",
                "fill it in the source, or declare it required",
            )
        alive = self._not_erased(source, table)
        rows: list[RowVersion] = []
        complete = True
        for scope in self.scopes.of_source(source):
            times = scope.clock.times(table)
            usable = times.admitted & alive
            complete &= not bool((usable & (times.available > self.until)).any())
            chosen = np.flatnonzero(usable & (times.available > loaded) & (times.available <= self.until))
            if len(chosen):
                rows += row_versions(declared, scope, table, (version.partition, version.version), chosen)
        return rows, min((r.available_time for r in rows), default=np.iinfo(np.int64).max), complete

    def _not_erased(self, source: str, table: pa.Table) -> NDArray[np.bool_]:
        alive = np.ones(table.num_rows, dtype=np.bool_)
        for subject in {s for s, _ in self._erased if s[0] == source}:
            gone = {entity for of, entity in self._erased if of == subject}
            alive &= np.array([e not in gone for e in entities(table, subject[1])], dtype=np.bool_)
        return alive

    def _newest_event(
        self, declared: SourceSpec, version: DatasetVersion, table: pa.Table, *, complete: bool
    ) -> int | None:
        """What `DatasetVersion.watermark` would be of the rows that are loaded."""
        if version.watermark is None or complete:
            return version.watermark
        times = clock_of(declared).times(table)
        loaded = times.event[times.admitted & (times.available <= self.until)]
        return int(loaded.max()) if len(loaded) else None


V = TypeVar("V")


def _of(source: str, found: Mapping[str, V]) -> dict[str, V]:
    return {source: found[source]} if source in found else {}


def _is_settled(version: DatasetVersion) -> bool:
    return version.status in ("released", "quarantined", "retired")


def _newest(marks: Iterator[PartitionMark]) -> int | None:
    return max((m.newest for m in marks if m.newest is not None), default=None)


_tables: dict[tuple[object, ...], pa.Table] = {}


def _cached_rows(
    services: Services, version: DatasetVersion, quarantine: str | None, columns: tuple[str, ...]
) -> pa.Table:
    """Released rows of a version. The last few stay: syncs that follow a moving clock read the same day again."""
    key = (services.store.root, version.manifest_digest, quarantine, columns)
    table = _tables.pop(key, None)
    if table is None:
        table = pinned_rows(services, version, quarantine, columns)
    _tables[key] = table
    while len(_tables) > _TABLES_KEPT:
        _tables.pop(next(iter(_tables)), None)
    return table
