"""Opens the online store that the settings name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from headway.features.online.store import OnlineStore, UnsupportedOnlineStore
from headway.home import Settings


def online_store_for(settings: Settings) -> OnlineStore:
    """The store of `HEADWAY_ONLINE_URL`; nothing is opened before its first use.

    Raises:
        UnsupportedOnlineStore: the URL is neither `sqlite:///PATH` nor `postgresql://...`.
    """
    return online_store_at(settings.online_url)


def online_store_at(url: str) -> OnlineStore:
    """The store at a URL. Raises as `online_store_for`."""
    scheme = urlsplit(url).scheme
    if scheme == "sqlite" and url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        from headway.features.online.sqlite_store import SqliteOnlineStore

        return SqliteOnlineStore(Path(url.removeprefix("sqlite:///")))
    if scheme in ("postgresql", "postgresql+psycopg"):
        from headway.features.online.postgres_store import PostgresOnlineStore

        return PostgresOnlineStore(url)
    raise UnsupportedOnlineStore(
        f"HEADWAY_ONLINE_URL has the scheme {scheme!r}", "write sqlite:///PATH or postgresql://user@host/database"
    )
