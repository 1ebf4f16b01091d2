"""What every part of the catalog's public face stands on: the database, the clock, and how a command runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from headway.catalog.clock import Clock
from headway.catalog.commands import Probe, Runner
from headway.catalog.database import Database
from headway.catalog.facts import Principal


class CatalogBase:
    """One catalog for several tenants; the parts of its face derive from this, `Catalog` from the parts."""

    def __init__(self, database: Database, clock: Clock, probe: Probe | None = None) -> None:
        self.database = database
        self.clock = clock
        self._runner = Runner(database, clock, probe)

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    @contextmanager
    def reading(self, principal: Principal) -> Iterator[sa.Connection]:
        """Give a connection inside a reading transaction of the principal's tenant."""
        with self.database.read(principal.tenant) as connection:
            yield connection
