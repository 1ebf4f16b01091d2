"""The online store over both databases, empty per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres import Postgres

from headway.features.online import OnlineStore, online_store_at


@pytest.fixture(params=["sqlite", "postgresql"])
def online_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'online' / 'online.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.fresh_database()
    yield url
    server.drop_database(url)


@pytest.fixture
def online(online_url: str) -> Iterator[OnlineStore]:
    """An empty store."""
    store = online_store_at(online_url)
    yield store
    store.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[OnlineStore]:
    """An empty store in SQLite, for tests in which the database is beside the point."""
    store = online_store_at(f"sqlite:///{tmp_path / 'embedded.db'}")
    yield store
    store.close()
