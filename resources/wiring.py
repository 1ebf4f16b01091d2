"""The only switch between profiles: which Dagster resources stand behind the names that assets ask for."""

from collections.abc import Callable
from typing import Any

from headway.home import SettingError, Settings, load_settings
from resources.platform import Platform


def _platform(settings: Settings) -> dict[str, Any]:
    return {"platform": Platform(home=str(settings.home))}


# The cluster differs by its settings and its launcher (`headway.training.launchers`), not by what assets are given.
PROFILES: dict[str, Callable[[Settings], dict[str, Any]]] = {"local": _platform, "cluster": _platform}


def resources_for(settings: Settings | None = None) -> dict[str, Any]:
    """Dagster resources by name for the profile in `settings` (default: read from the environment).

    Raises:
        SettingError: `HEADWAY_PROFILE` names no profile.
    """
    settings = settings or load_settings()
    if settings.profile not in PROFILES:
        raise SettingError(f"HEADWAY_PROFILE is {settings.profile!r}", f"choose one of: {', '.join(sorted(PROFILES))}")
    return PROFILES[settings.profile](settings)
