"""Which launcher a profile uses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headway.home import SettingError, Settings
from trainer.blobs import digest_bytes

if TYPE_CHECKING:
    from headway.training.launch import Launcher


def launcher_for(settings: Settings) -> Launcher:
    """The launcher of the profile in force.

    Raises:
        SettingError: the profile has none.
    """
    from headway.training.identity import CODE_ROOT
    from headway.training.local import LocalLauncher

    if settings.profile != "local":
        raise SettingError(f"HEADWAY_PROFILE is {settings.profile!r}", "only the profile `local` can train here")
    return LocalLauncher(settings.home / "runs" / _folder_name(settings.tenant), settings.store_root, CODE_ROOT)


def _folder_name(tenant: str) -> str:
    """Tenants of one home keep their runs apart; a name that is no plain folder name gives way to its digest."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", tenant)
    return tenant if plain else digest_bytes(tenant.encode())[7:39]
