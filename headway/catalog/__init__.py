"""The source of truth: tables, state machines, idempotent commands, audit. Dagster is its view and its scheduler."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.catalog.clock import Clock, system_clock
from headway.catalog.facts import (
    DatasetVersion,
    DatasetVersionFacts,
    Evidence,
    FeatureSetFacts,
    FeatureSetVersion,
    FeatureSnapshot,
    LineageEdge,
    Principal,
    SnapshotFacts,
    SnapshotInput,
    SnapshotState,
)

if TYPE_CHECKING:
    from headway.catalog.catalog import Catalog

__all__ = [
    "Clock",
    "DatasetVersion",
    "DatasetVersionFacts",
    "Evidence",
    "FeatureSetFacts",
    "FeatureSetVersion",
    "FeatureSnapshot",
    "LineageEdge",
    "Principal",
    "SnapshotFacts",
    "SnapshotInput",
    "SnapshotState",
    "open_catalog",
    "system_clock",
]


def open_catalog(url: str, clock: Clock = system_clock, probe: Callable[[str], None] | None = None) -> "Catalog":
    """Open the catalog at a database URL, making or migrating its tables first. Safe from several processes at once.

    Args:
        url: `sqlite:///<path>` or `postgresql://<user>@<host>/<database>`.
        clock: answers microseconds UTC.
        probe: called with the name of each point of a command at which a crash or a rival matters (`begun`, `claimed`,
            `effect`, `before_commit`, `after_commit`); tests stop or kill the process there.

    Raises:
        UnsupportedDatabase: another kind of database.
        SchemaTooNew: newer code migrated it.
        CatalogBusy: another process held the migration lock past the deadline.
        CatalogUnavailable: the database cannot be reached.
    """
    # Loading the code location imports this package; SQLAlchemy and Alembic come with the first opened catalog.
    from headway.catalog.catalog import Catalog
    from headway.catalog.database import Database
    from headway.catalog.migrate import migrate

    database = Database(url)
    try:
        migrate(database)
    except BaseException:
        database.close()
        raise
    return Catalog(database, clock, probe)
