"""Which launcher a profile uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headway.home import SettingError, Settings
from trainer.blobs import digest_bytes

if TYPE_CHECKING:
    from headway.training.launch import Launcher


def launcher_for(settings: Settings) -> Launcher:
    """The launcher of the profile in force.

    Raises:
        SettingError: the profile has none, or the cluster is not described.
        PlatformInvalid: the file that describes the cluster cannot be used.
    """
    from headway.training.identity import CODE_ROOT
    from headway.training.local import LocalLauncher

    runs_root = runs_root_of(settings)
    if settings.profile == "local":
        return LocalLauncher(runs_root, settings.store_root, CODE_ROOT, nodes=settings.local_nodes or None)
    if settings.profile == "cluster":
        return _on_cluster(settings, runs_root)
    raise SettingError(f"HEADWAY_PROFILE is {settings.profile!r}", "`local` and `cluster` are the profiles that train")


def _on_cluster(settings: Settings, runs_root: Path) -> Launcher:
    from headway.training.identity import CODE_ROOT
    from headway.training.kubernetes.client import ClusterClient
    from headway.training.kubernetes.launcher import KubernetesLauncher
    from headway.training.kubernetes.platform import load_platform

    if settings.platform_file is None:
        raise SettingError(
            "HEADWAY_PLATFORM is not set", "name the file that describes the cluster (docs/kubernetes.md)"
        )
    platform = load_platform(settings.platform_file)
    client = ClusterClient(platform.context)
    return KubernetesLauncher(
        runs_root, settings.store_root, CODE_ROOT, platform, client, instance_of(settings), settings.tenant
    )


def instance_of(settings: Settings) -> str:
    """Tells apart what different catalogs have in one namespace: no password, so that rotating one changes nothing."""
    parts = urlsplit(settings.database_url)
    place = f"{parts.scheme}://{parts.hostname or ''}:{parts.port or ''}{parts.path}"
    return digest_bytes(f"{place} {settings.tenant}".encode())[7:17]


def runs_root_of(settings: Settings) -> Path:
    """The folder of the tenant's runs; pods of a cluster see it under the same path."""
    return settings.home / "runs" / _folder_name(settings.tenant)


def _folder_name(tenant: str) -> str:
    """Tenants of one home keep their runs apart; a name that is no plain folder name gives way to its digest."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", tenant)
    return tenant if plain else digest_bytes(tenant.encode())[7:39]
