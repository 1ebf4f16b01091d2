"""Which launcher a profile uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.home import SettingError, Settings

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
    return LocalLauncher(settings.home / "runs", settings.store_root, CODE_ROOT)
