"""Opens the platform's services from the settings; the command line and Dagster's resources share it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.home import Settings

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog import Catalog, Principal


@dataclass(frozen=True, slots=True)
class Services:
    """What every command works with: the source of truth, the artifacts, and on whose behalf it acts."""

    catalog: "Catalog"
    store: "LocalStore"
    principal: "Principal"

    def close(self) -> None:
        """Give back the catalog's connections."""
        self.catalog.close()


def connect(settings: Settings) -> Services:
    """Open the catalog (migrated to its newest schema) and the store that `settings` name, for the caller to close.

    The database driver is imported here and not with the module, so that listing commands or assets stays cheap.
    """
    from headway.artifacts.store import LocalStore
    from headway.catalog import Principal, open_catalog

    settings.home.mkdir(parents=True, exist_ok=True)
    store = LocalStore(settings.store_root)
    principal = Principal(tenant=settings.tenant, actor=settings.actor)
    catalog = open_catalog(settings.database_url)
    catalog.ensure_tenant(principal)
    return Services(catalog, store, principal)


@contextmanager
def open_services(settings: Settings) -> Iterator[Services]:
    """The services of `settings` for the length of a `with` block."""
    services = connect(settings)
    try:
        yield services
    finally:
        services.close()
