"""What an online store keeps and promises; `sqlite_store` and `postgres_store` keep the promise.

It keeps the rows in reach, not aggregates of them: one entry per scope (a source under one clock, looked up by some key
columns) and row version, filed under the entity that its key columns name. The answer is then computed by the plan that
computes snapshots. A row version is named by where it stands in its dataset version, so writing it again changes
nothing, and what the store holds depends on the set of versions written, never on order or repetition.

A correction may move a row to another entity. The old entity must learn of it, or the superseded version would answer
for ever: every version of an identity is also noted, as moved, in all other entities where the identity has a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headway.errors import HeadwayError

NO_ENTITY = b""


class OnlineNotReady(HeadwayError):
    """The store holds nothing for this feature set: it was never filled, or for another version of the features."""


class OnlineUnavailable(HeadwayError):
    """The store's database cannot be reached, read or written."""


class OnlineBusy(HeadwayError):
    """Another process fills the store and did not finish before the deadline."""


class UnsupportedOnlineStore(HeadwayError):
    """The URL names no kind of store that Headway has."""


@dataclass(frozen=True, order=True)
class StoreKey:
    """Whose rows: the tenant, the pipeline and the version of its feature set."""

    tenant: str
    pipeline: str
    feature_set_version: int


@dataclass(frozen=True, slots=True)
class RowVersion:
    """A version of a row as one scope sees it; times are int64 microseconds UTC.

    `entity` is `NO_ENTITY` where a key part is null: nobody asks for it, but it supersedes. `partition`, `version` and
    `position` say where it stands in the source's dataset.
    """

    scope: str
    entity: bytes
    identity: bytes
    partition: str
    version: int
    position: int
    event_time: int
    available_time: int
    sequence: int
    deleted: bool
    payload: bytes


@dataclass(frozen=True)
class PartitionMark:
    """What the store holds of a source partition: the pinned version and how much of it.

    Rows available by `until` are loaded; the newest of them happened at `newest`. `complete` says that no row of the
    version is left to load.
    """

    source: str
    partition: str
    dataset: str
    version: int
    content_digest: str
    evidence_digest: str
    quarantine_digest: str | None
    until: int
    newest: int | None
    complete: bool


@dataclass(frozen=True)
class OnlineState:
    """What the store answers from.

    Rows that became available by `until` are loaded, except of sources that were held: `known_until` has the time of
    each. `watermarks` is when the newest loaded row of each source happened (None: no row, or a source without time).
    Observations before `since` may need rows that were pruned. `inputs_digest` names the pins document in the store of
    artifacts. `sequence` grows with every change. `skipped` are quarantined or retired partitions, `absent` those that
    nobody delivered, among the partitions of each source from those that `since` may need up to the instant `covered`.
    """

    pipeline: str
    feature_set: str
    feature_set_version: int
    until: int
    watermarks: Mapping[str, int | None]
    inputs_digest: str
    sequence: int
    since: int = 0
    known_until: Mapping[str, int] = field(default_factory=dict[str, int])
    contract_digest: str = ""
    code_digest: str = ""
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    covered: Mapping[str, int] = field(default_factory=dict[str, int])
    marks: tuple[PartitionMark, ...] = ()


class EntityRow(NamedTuple):
    """A row version as it is read for an entity; `here` is 0 for one that stands in another entity now or then."""

    identity: bytes
    partition: str
    position: int
    event_time: int
    available_time: int
    sequence: int
    deleted: int
    here: int
    payload: bytes | None


Entity = tuple[str, bytes]


@dataclass(frozen=True)
class Read:
    """Rows of entities in one consistent view of the store.

    `sequence` is 0 when the store was never filled; `rows_sequence` is that of the last change of a row. `state` is
    None when the sequence is the one that the reader has seen.
    """

    sequence: int
    rows_sequence: int
    state: OnlineState | None
    rows: Mapping[Entity, Sequence[EntityRow]]


Subject = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Change:
    """One commit: partitions that are emptied, row versions that are written, marks, and the state when it moves.

    `emptied` names (scope, partition), `dropped_marks` (source, partition). `subjects` says what the entities of a
    scope are (source and key columns), so that erased ones are left out.
    """

    emptied: Collection[tuple[str, str]] = ()
    rows: Sequence[RowVersion] = ()
    marks: Sequence[PartitionMark] = ()
    dropped_marks: Collection[tuple[str, str]] = ()
    state: OnlineState | None = None
    subjects: Mapping[str, Subject] = field(default_factory=dict[str, Subject])


class OnlineStore(Protocol):
    """Rows of entities, for one writer at a time and any number of readers. Every wait has a deadline.

    All methods raise `OnlineUnavailable` when the database cannot be used.
    """

    def syncing(self, key: StoreKey) -> AbstractContextManager[None]:
        """Keep other writers of `key` out meanwhile. Raises `OnlineBusy` after a deadline."""
        ...

    def apply(self, key: StoreKey, change: Change) -> int:
        """Make one change as a whole and return the number of row versions that were written.

        A state is stored with the sequence that follows the last one. Rows of erased entities are left out.
        """
        ...

    def states(self, tenant: str, pipeline: str) -> list[OnlineState]:
        """The states of a pipeline, one per feature set version; without marks."""
        ...

    def marks(self, key: StoreKey) -> list[PartitionMark]:
        """What is held of each source partition, as committed, in order of source and partition."""
        ...

    def read(self, key: StoreKey, seen: tuple[int, int], missing: Sequence[Entity], held: Sequence[Entity]) -> Read:
        """The state if it moved, and the rows of `missing`; those of `held` too when rows changed.

        `seen` is the sequence and the rows' sequence that the reader knows, (0, 0) at first.
        """
        ...

    def erase(self, key: StoreKey, subject: Subject, entity: bytes, scopes: Mapping[str, Subject], at: int) -> int:
        """Remove an entity for good, whatever the version of the feature set; what is written of it later is left out.

        `scopes` are all scopes of the subject's source: the rows of the entity's identities go from each. Returns the
        number of row versions removed.
        """
        ...

    def erased(self, tenant: str, pipeline: str) -> frozenset[tuple[Subject, bytes]]:
        """The entities that were erased."""
        ...

    def dump(self, key: StoreKey) -> list[tuple[object, ...]]:
        """Everything that is held, in one fixed order, for comparison."""
        ...

    def close(self) -> None:
        """Give back the connections."""
        ...
