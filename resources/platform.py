"""The Dagster resource through which an asset reaches the catalog, the store and the acting principal."""

import os
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import PrivateAttr

from headway.home import Settings, load_settings
from headway.services import Services, connect

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore
    from headway.catalog import Catalog, Principal
    from headway.features.online.store import OnlineStore
    from headway.registry.keys import KeyRing
    from headway.training.launch import Launcher


class Platform(dg.ConfigurableResource["Platform"]):
    """Headway's services, opened on first use and closed with the step that used them.

    `home` stands for `HEADWAY_HOME`; every other setting comes from the environment, so that no database password
    becomes visible as resource configuration in Dagster's UI.
    """

    home: str

    _services: Services | None = PrivateAttr(default=None)
    _online: "OnlineStore | None" = PrivateAttr(default=None)
    _launcher: "Launcher | None" = PrivateAttr(default=None)

    def catalog(self) -> "Catalog":
        """The source of truth."""
        return self._open().catalog

    def store(self) -> "LocalStore":
        """The content-addressed artifacts."""
        return self._open().store

    def principal(self) -> "Principal":
        """The tenant and actor that audit rows name."""
        return self._open().principal

    def settings(self) -> Settings:
        """The settings in force, with this resource's home."""
        return load_settings({**os.environ, "HEADWAY_HOME": self.home})

    def services(self) -> Services:
        """Catalog, store and principal together."""
        return self._open()

    def launcher(self) -> "Launcher":
        """Where training attempts run; it may keep watch in the background until this is closed."""
        if self._launcher is None:
            from headway.training.launchers import launcher_for

            self._launcher = launcher_for(self.settings())
        return self._launcher

    def online(self) -> "OnlineStore":
        """The online store of the settings, opened on first use."""
        if self._online is None:
            from headway.features.online import online_store_for

            self._online = online_store_for(self.settings())
        return self._online

    def keyring(self) -> "KeyRing":
        """The role keys that sign."""
        from headway.registry.keys import KeyRing

        return KeyRing(self.settings().keys_folder)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Close what was opened; Dagster calls this when the step's process is done with the resource."""
        self.close()

    def close(self) -> None:
        """Close the connections, where nothing else tears the resource down (a sensor's tick)."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if self._services is not None:
            self._services.close()
            self._services = None
        if self._online is not None:
            self._online.close()
            self._online = None

    def _open(self) -> Services:
        if self._services is None:
            self._services = connect(self.settings())
        return self._services
