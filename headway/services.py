"""Opens the platform's services from the settings; the command line and Dagster's resources share it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.catalog.clock import Clock, system_clock
from headway.errors import HeadwayError
from headway.home import Settings
from headway.world import world_clock

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog import Catalog, Principal


class HomeUnusable(HeadwayError):
    """`HEADWAY_HOME` is no folder that can be read and written."""

    def __init__(self, home: Path, cause: OSError) -> None:
        super().__init__(
            f"the home {home} cannot be used: {cause.strerror or cause}",
            f"make it a folder that you may write (chmod u+rwx {home}), or set HEADWAY_HOME to another one",
        )


@dataclass(frozen=True, slots=True)
class Services:
    """What every command works with: the source of truth, the artifacts, and on whose behalf it acts.

    `world` is the clock of requests, labels and weeks; `catalog.clock` that of commits.
    """

    catalog: "Catalog"
    store: "LocalStore"
    principal: "Principal"
    world: Clock = system_clock

    def close(self) -> None:
        """Give back the catalog's connections."""
        self.catalog.close()


def connect(settings: Settings) -> Services:
    """Open the catalog (migrated to its newest schema) and the store that `settings` name, for the caller to close.

    The database driver is imported here and not with the module, so that listing commands or assets stays cheap.

    Raises:
        HomeUnusable: the home is no folder, or may not be written.
        CatalogUnavailable: the database cannot be reached or written.
    """
    from headway.artifacts.store import LocalStore
    from headway.catalog import Principal, open_catalog

    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        store = LocalStore(settings.store_root)
        catalog = open_catalog(settings.database_url)
    except OSError as error:
        raise HomeUnusable(settings.home, error) from error
    principal = Principal(tenant=settings.tenant, actor=settings.actor)
    catalog.ensure_tenant(principal)
    return Services(catalog, store, principal, world_clock(settings.clock_file))


@contextmanager
def open_services(settings: Settings) -> Iterator[Services]:
    """The services of `settings` for the length of a `with` block."""
    services = connect(settings)
    try:
        yield services
    finally:
        services.close()
